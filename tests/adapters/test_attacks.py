"""The attacks on the stand-in for a GPU find data of a killed process until the scrub's kernels have run."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.adapters.cuda_program import Programs
from tests.nvidia.machine import Machine


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


# --- on-chip memory


ATTACK = """
    sms = runtime.deviceGetAttribute(runtime.cudaDevAttrMultiProcessorCount, 0)
    shared = runtime.deviceGetAttribute(runtime.cudaDevAttrMaxSharedMemoryPerBlockOptin, 0)
    for_ever = uint64(1 << 62)
    counters = zeroed(8 * 32)
    place = lambda index: uint64(counters + 8 * index)

    def launch(name, threads, *arguments, path=ATTACKS, size=0):
        found = kernel(name, path)
        if size:
            found.max_dynamic_shared_size_bytes = size
        found((sms,), (threads,), arguments, shared_mem=size)
        runtime.deviceSynchronize()
"""
LEAVE = """
    launch("leave_shared", 1024, uint64(0xC0FFEE), uint32(shared), place(0), place(1), for_ever, size=shared)
    launch("leave_registers", 256, uint32(0xC0FFEE), uint32(1), place(2), place(3), place(1), for_ever)
    tell(arrived=[word(counters), word(counters + 24)])
    wait()
"""
FIND = """
    launch("find_registers", 256, uint32(0xC0FFEE), uint32(0), place(0), place(1), uint32(sms), for_ever)
    launch("find_shared", 1024, uint64(0xC0FFEE), uint32(shared), place(2), place(3), uint32(sms), for_ever, size=shared)
    tell(registers=word(counters), shared=word(counters + 16))
"""
CLEAR = """
    common = (place(0), place(20), place(21), place(22), uint32(sms), for_ever)
    launch("onchip_shared", 1024, *common, uint32(shared), path=KERNELS, size=shared)
    runtime.memset(counters + 8 * 22, 0, 8)
    launch("onchip_registers", 256, *common, path=KERNELS)
    tell(seen=word(counters), residue=word(counters + 160), failed=word(counters + 168))
"""


def test_on_chip_secret_of_a_killed_process_is_found_until_the_scrub_kernels_ran(
    machine: Machine, programs: Programs
) -> None:
    gpu = machine.gpus[0]
    sms, shared = gpu.number("multiprocessors"), 64 * 1024
    tenant = programs.start(ATTACK, LEAVE, on=gpu)
    assert tenant.next_message() == {"arrived": [sms, sms]}
    tenant.kill()
    everything = {"registers": sms * 256 * 240, "shared": sms * shared // 8}
    assert programs.start(ATTACK, FIND, on=gpu).next_message() == everything
    cleared = programs.start(ATTACK, CLEAR, on=gpu).next_message()
    assert cleared["seen"] == 2**sms - 1
    assert cleared["residue"] >= sms * 3 * (shared // 8 + 240 * 256)
    assert cleared["failed"] == 0
    assert programs.start(ATTACK, FIND, on=gpu).next_message() == {"registers": 0, "shared": 0}


def test_attack_program_does_not_reach_a_dead_sm(machine: Machine, programs: Programs) -> None:
    gpu = machine.gpus[0]
    gpu.set("sm_dead", "2")
    assert programs.start(ATTACK, CLEAR, on=gpu).next_message()["seen"] == 2 ** gpu.number("multiprocessors") - 1 - (
        1 << 2
    )


def test_secret_in_memory_is_found_word_by_word(machine: Machine, programs: Programs) -> None:
    gpu = machine.gpus[0]
    program = programs.start(
        """
        memory, n = runtime.malloc(1 << 21), (1 << 21) // 8
        counters = zeroed(8)
        kernel("leave_global", ATTACKS)((4,), (64,), (uint64(memory), uint64(n), uint64(0xC0FFEE)))
        kernel("find_global", ATTACKS)((4,), (64,), (uint64(memory), uint64(n), uint64(0xC0FFEE), uint64(counters)))
        tell(found=word(counters) / n)
        """,
        on=gpu,
    )
    assert program.next_message() == {"found": 1}
