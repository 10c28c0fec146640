"""CuPy's stand-in: memory, processes and failures are as real as the project's eraser needs them to be."""

import inspect
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.adapters.cuda_program import Program, Programs
from tests.nvidia.machine import MIB, Gpu, Machine


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    with Machine.create(tmp_path / "w", gpus=2, mebibytes=10) as made:
        yield made


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kernels")


@pytest.fixture
def programs(machine: Machine, cache: Path) -> Iterator[Programs]:
    made = Programs(machine, cache)
    yield made
    made.end()


HOLD = """
    address = runtime.malloc(2 << 20)
    tell(free=runtime.memGetInfo()[0])
    wait()
"""


# --- memory


def test_next_process_reads_the_memory_of_a_killed_process_unchanged(machine: Machine, programs: Programs) -> None:
    gpu = machine.gpus[0]
    tenant = programs.start(
        """
        address = runtime.malloc(2 << 20)
        runtime.memset(address, 0x5A, 2 << 20)
        runtime.deviceSynchronize()
        tell(ready=True)
        wait()
        """,
        on=gpu,
    )
    tenant.next_message()
    tenant.kill()
    reader = programs.start(
        """
        address = runtime.malloc(2 << 20)
        tell(count=content(address, 2 << 20).count(b"\\x5a"))
        """,
        on=gpu,
    )
    assert reader.next_message() == {"count": 2 * MIB}


def test_two_processes_never_share_a_byte(machine: Machine, programs: Programs) -> None:
    code = """
        address = runtime.malloc(2 << 20)
        runtime.memset(address, NUMBER, 2 << 20)
        runtime.deviceSynchronize()
        tell(ready=True)
        wait()
        """
    both = [programs.start(f"NUMBER = {number}", code, on=machine.gpus[0]) for number in (1, 2)]
    for program in both:
        program.next_message()
    content = machine.gpus[0].content()
    assert content.count(b"\x01") == content.count(b"\x02") == 2 * MIB


def test_allocation_fails_when_memory_is_exhausted_and_a_context_uses_memory(
    machine: Machine, programs: Programs
) -> None:
    """8 MiB of 10 are available: one granule belongs to the context, and small allocations share one."""
    program = programs.start(
        """
        free, total = runtime.memGetInfo()
        small = [runtime.malloc(256) for _ in range(8)]
        whole = [runtime.malloc(2 << 20) for _ in range(2)]
        full = status(lambda: runtime.malloc(2 << 20))
        runtime.free(whole.pop())
        tell(free=free, total=total, full=full, again=status(lambda: runtime.malloc(2 << 20)))
        """,
        on=machine.gpus[0],
    )
    assert program.next_message() == {"free": 6 * MIB, "total": 8 * MIB, "full": 2, "again": 0}


def test_unallocated_memory_cannot_be_accessed(machine: Machine, programs: Programs) -> None:
    program = programs.start(
        """
        address = runtime.malloc(2 << 20)
        kernel("fill_zero")((1,), (32,), (uint64(address), uint64((2 << 20) // 16 + 1)))
        tell(first=status(runtime.deviceSynchronize), then=status(lambda: runtime.malloc(16)))
        """,
        on=machine.gpus[0],
    )
    assert program.next_message() == {"first": 700, "then": 700}


def test_instance_computes_in_its_own_memory(machine: Machine, programs: Programs) -> None:
    gpu = machine.gpus[0]
    gpu.set("total", 66 * MIB)
    first, second = gpu.split("1g.18gb", "1g.18gb")
    program = programs.start(
        """
        free = runtime.memGetInfo()[0]
        address = runtime.malloc(free)
        runtime.memset(address, 7, free)
        runtime.deviceSynchronize()
        tell(free=free)
        wait()
        """,
        on=second,
    )
    filled = program.next_message()["free"]
    assert second.content().count(7) == filled > 0
    assert first.content().count(7) == gpu.content().count(7) == 0


# --- computing processes, as others see them


@contextmanager
def holding(programs: Programs, gpu: Gpu) -> Iterator[Program]:
    program = programs.start(HOLD, on=gpu)
    program.next_message()
    yield program


def driver_report(machine: Machine, gpu: Gpu) -> tuple[list[tuple[int, int]], int]:
    """Return (PID, bytes) of the computing processes, and the bytes in use, as the NVML stand-in reports them."""
    code = """
        import json, pynvml, sys
        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByUUID(sys.argv[1])
        found = pynvml.nvmlDeviceGetComputeRunningProcesses(handle)
        used = pynvml.nvmlDeviceGetMemoryInfo(handle, version=pynvml.nvmlMemory_v2).used
        print(json.dumps([[(each.pid, each.usedGpuMemory) for each in found], used]))
        """
    done = subprocess.run(
        [sys.executable, "-c", inspect.cleandoc(code), gpu.uuid],
        env={"PATH": os.defpath, **machine.environment},
        capture_output=True,
        text=True,
        check=True,
    )
    processes, used = json.loads(done.stdout)
    return [(pid, size) for pid, size in processes], used


def test_driver_lists_a_process_with_a_context_and_forgets_a_killed_one(machine: Machine, programs: Programs) -> None:
    gpu = machine.gpus[0]
    with holding(programs, gpu) as program:
        assert driver_report(machine, gpu) == ([(program.pid, 4 * MIB)], 4 * MIB)
        assert driver_report(machine, machine.gpus[1]) == ([], 0)
        program.kill_and_leave_unreaped()
        assert driver_report(machine, gpu) == ([], 0)


def test_process_with_a_context_has_the_device_node_open(machine: Machine, programs: Programs) -> None:
    gpu = machine.gpus[0]
    with holding(programs, gpu) as program:
        opened = {os.stat(each).st_rdev for each in Path(f"/proc/{program.pid}/fd").iterdir()}
    assert gpu.node.stat().st_rdev in opened
    assert machine.gpus[1].node.stat().st_rdev not in opened


TRY = "tell(status=status(runtime.memGetInfo))"


def test_exclusive_device_accepts_one_process_and_the_next_after_its_death(
    machine: Machine, programs: Programs
) -> None:
    gpu = machine.gpus[0]
    gpu.set("compute_mode", 3)
    with holding(programs, gpu) as program:
        assert programs.start(TRY, on=gpu).next_message() == {"status": 46}
        assert programs.start(TRY, on=machine.gpus[1]).next_message() == {"status": 0}
        program.kill()
        assert programs.start(TRY, on=gpu).next_message() == {"status": 0}


def test_prohibited_device_accepts_no_process(machine: Machine, programs: Programs) -> None:
    machine.gpus[0].set("compute_mode", 2)
    assert programs.start(TRY, on=machine.gpus[0]).next_message() == {"status": 46}


def test_context_is_unusable_in_a_forked_child(machine: Machine, programs: Programs) -> None:
    """The stand-in therefore detects a zygote that has used CUDA, as a GPU would."""
    program = programs.start(
        """
        before = status(runtime.memGetInfo)
        reader, writer = os.pipe()
        if os.fork() == 0:
            os.write(writer, bytes([status(runtime.memGetInfo)]))
            os._exit(0)
        os.wait()
        tell(before=before, child=os.read(reader, 1)[0])
        """,
        on=machine.gpus[0],
    )
    assert program.next_message() == {"before": 0, "child": 3}


# --- which devices there are


@pytest.mark.parametrize("name", ["", "GPU-00000000", "MIG-1", "7"])
def test_missing_device_fails_with_no_device(programs: Programs, name: str) -> None:
    assert programs.start(TRY, on=name).next_message() == {"status": 100}


def test_lost_gpu_fails_with_no_device_while_other_gpus_work(machine: Machine, programs: Programs) -> None:
    machine.gpus[0].lose()
    assert programs.start(TRY, on=machine.gpus[0]).next_message() == {"status": 100}
    assert programs.start(TRY, on=machine.gpus[1]).next_message() == {"status": 0}


@pytest.mark.parametrize(("code", "expected"), [(9, 35), (12, 35), (18, 803)])
def test_missing_or_mismatched_driver_is_reported(
    machine: Machine, programs: Programs, code: int, expected: int
) -> None:
    machine.init_error(code)
    assert programs.start(TRY, on=machine.gpus[0]).next_message() == {"status": expected}


# --- work


def test_kernel_result_is_visible_only_after_synchronization(machine: Machine, programs: Programs) -> None:
    program = programs.start(
        """
        memory = runtime.malloc(1 << 21)
        runtime.memset(memory, 1, 1 << 21)
        counters = zeroed(16)
        stream = cupy.cuda.Stream(non_blocking=True)
        arguments = (memory, (1 << 21) // 16, 0, counters, counters + 8, 0, 0)
        kernel("count_nonzero")((4,), (64,), tuple(map(uint64, arguments)), stream=stream)
        early = word(counters)
        stream.synchronize()
        tell(early=early, late=word(counters))
        """,
        on=machine.gpus[0],
    )
    assert program.next_message() == {"early": 0, "late": 2 * MIB}


def test_elapsed_time_between_events_is_available_once_both_completed(machine: Machine, programs: Programs) -> None:
    program = programs.start(
        """
        memory = runtime.malloc(1 << 21)
        stream = cupy.cuda.Stream(non_blocking=True)
        first, last = cupy.cuda.Event(), cupy.cuda.Event()
        first.record(stream)
        runtime.memsetAsync(memory, 1, 1 << 21, stream.ptr)
        last.record(stream)
        early = status(lambda: cupy.cuda.get_elapsed_time(first, last))
        last.synchronize()
        tell(early=early, positive=cupy.cuda.get_elapsed_time(first, last) > 0, done=last.done)
        """,
        on=machine.gpus[0],
    )
    assert program.next_message() == {"early": 600, "positive": True, "done": True}


def test_kernel_launch_with_wrong_arguments_is_refused(machine: Machine, programs: Programs) -> None:
    program = programs.start(
        """
        def refused(*arguments, **more):
            try:
                kernel("fill_zero")(*arguments, **more)
            except (TypeError, cupy.cuda.driver.CUDADriverError) as error:
                return str(getattr(error, "status", type(error).__name__))
            return "taken"
        right = (uint64(runtime.malloc(16)), uint64(1))
        tell(
            narrow=refused((1,), (1,), (right[0], uint32(1))),
            plain=refused((1,), (1,), (right[0], 1)),
            few=refused((1,), (1,), right[:1]),
            wide=refused((1,), (2048,), right),
            shared=refused((1,), (1,), right, shared_mem=64 * 1024),
            right=refused((1,), (1,), right),
            unknown=status(lambda: kernel("fill_ones")),
            nowhere=status(lambda: kernel("fill_zero", "/nonexistent.ptx")),
        )
        """,
        on=machine.gpus[0],
    )
    assert program.next_message() == {
        "narrow": "TypeError",
        "plain": "TypeError",
        "few": "TypeError",
        "wide": "1",
        "shared": "1",
        "right": "taken",
        "unknown": 500,
        "nowhere": 301,
    }


# --- faults

CLEAR_AND_COUNT = """
    memory = runtime.malloc(4 << 20)
    counters = zeroed(16)
    kernel("fill_zero")((4,), (64,), (uint64(memory), uint64((4 << 20) // 16)))
    cleared = status(runtime.deviceSynchronize)
    arguments = (memory, (4 << 20) // 16, 0, counters, counters + 8, 0, 0)
    launched = status(lambda: kernel("count_nonzero")((4,), (64,), tuple(map(uint64, arguments))))
    tell(cleared=cleared, launched=launched, count=word(counters) if cleared == 0 else None)
"""


def test_sound_memory_is_zero_after_clearing(machine: Machine, programs: Programs) -> None:
    machine.gpus[0].fill("secret")
    assert programs.start(CLEAR_AND_COUNT, on=machine.gpus[0]).next_message() == {
        "cleared": 0,
        "launched": 0,
        "count": 0,
    }


def test_bytes_that_reappear_are_found_after_clearing(machine: Machine, programs: Programs) -> None:
    machine.gpus[0].set("wont_clear", "")
    assert programs.start(CLEAR_AND_COUNT, on=machine.gpus[0]).next_message()["count"] == 64


def test_bad_page_ends_the_context_that_accesses_it(machine: Machine, programs: Programs) -> None:
    gpu = machine.gpus[0]
    gpu.set("bad_page", 3 * MIB)
    assert programs.start(CLEAR_AND_COUNT, on=gpu).next_message() == {"cleared": 214, "launched": 214, "count": None}
    gpu.set("bad_page", f"{3 * MIB} 719")
    assert programs.start(CLEAR_AND_COUNT, on=gpu).next_message() == {"cleared": 719, "launched": 719, "count": None}
    gpu.set("bad_page", 7 * MIB)  # outside of what any program uses
    assert programs.start(CLEAR_AND_COUNT, on=gpu).next_message() == {"cleared": 0, "launched": 0, "count": 0}


def test_endless_clear_ends_when_the_fault_is_lifted(machine: Machine, programs: Programs) -> None:
    gpu = machine.gpus[0]
    gpu.set("slow_clear", 3600)
    program = programs.start("tell(ready=True)", CLEAR_AND_COUNT, on=gpu)
    program.next_message()
    gpu.unset("slow_clear")
    assert program.next_message()["count"] == 0
