"""The eraser of NVIDIA devices, over the stand-ins: it claims exactly what it has written and read back."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from scrubber.adapters.children.message import HEADER_SIZE, body_length, pack, unpack
from scrubber.domain.errors import DeviceBusy, DriverTimeout, ScrubberError, Unavailable, Unreadable
from scrubber.ports.device import EraseProgress, OnChipReport
from tests.adapters.cuda_rig import GRANULE, CudaRig, cuda_rig, environment, request
from tests.nvidia.machine import Machine

MIB = 1 << 20


@pytest.fixture
async def rig(short_tmp: Path) -> AsyncIterator[CudaRig]:
    async with cuda_rig(short_tmp) as made:
        yield made


# --- memory


async def test_residue_of_a_tenant_is_counted_cleared_and_verified_on_its_device_alone(rig: CudaRig) -> None:
    device, other = rig.device(0), rig.device(1)
    for number in (0, 1):
        rig.machine.gpus[number].fill("secret")
    seen: list[EraseProgress] = []
    report = await rig.eraser.erase(device, request(), seen.append)
    covered = device.memory_bytes - report.not_covered_bytes
    assert report.residue_bytes == covered == report.cleared_bytes == (report.verified_bytes or 0) > 0
    assert sum(report.residue_map) == covered
    assert (report.failed_bytes, report.fence_broken, report.unreleased_bytes) == (0, False, 0)
    assert rig.machine.gpus[0].content().strip(b"\0") == b""
    phases = [phase for phase, _ in report.seconds_by_phase]
    assert phases == ["audit", "clear", "verify"] == list(dict.fromkeys(each.phase for each in seen))
    assert all(0 <= each.done_bytes <= each.total_bytes == covered for each in seen)
    assert seen[-1].done_bytes == covered
    assert rig.machine.find(other.id)[1].content().startswith(b"secret")


async def test_every_byte_is_either_verified_or_reported_as_not_covered(rig: CudaRig) -> None:
    device = rig.device()
    report = await rig.erase(device)
    assert report.total_bytes == device.memory_bytes == (report.verified_bytes or 0) + report.not_covered_bytes
    assert report.reserved_bytes == 2 * MIB
    rest = report.not_covered_bytes - report.reserved_bytes
    assert rest == GRANULE + 4096  # a context of the stand-in, and the eraser's counters
    assert f"memory: {report.reserved_bytes} bytes reserved by the driver" in report.not_covered
    assert any(
        message.startswith(f"memory: {rest} bytes that the eraser could not allocate") for message in report.not_covered
    )


async def test_memory_in_use_without_a_process_is_not_claimed_as_verified(rig: CudaRig) -> None:
    device = rig.device()
    before = await rig.erase(device)
    rig.machine.gpus[0].set("used", 4 * MIB)
    after = await rig.erase(device)
    assert (after.verified_bytes or 0) <= (before.verified_bytes or 0) - 4 * MIB
    assert (after.verified_bytes or 0) + after.not_covered_bytes == after.total_bytes


async def test_residue_is_counted_to_the_byte_and_located(rig: CudaRig) -> None:
    device = rig.device()
    await rig.erase(device)
    gpu = rig.machine.gpus[0]
    with gpu.memory.open("r+b") as memory:
        for offset in (6 * MIB, 8 * MIB + 5_000):
            memory.seek(offset)
            memory.write(b"\x00ab")
    report = await rig.erase(device)
    assert report.residue_bytes == sum(report.residue_map) == 4
    assert sorted(report.residue_map, reverse=True)[:3] == [2, 2, 0]
    assert len(report.residue_map) == 64


async def test_clean_device_has_no_residue_and_a_skipped_audit_reports_none(rig: CudaRig) -> None:
    device = rig.device()
    await rig.erase(device)
    clean = await rig.erase(device)
    assert (clean.residue_bytes, clean.residue_map) == (0, ())
    unasked = await rig.erase(device, request(audit=False))
    assert (unasked.residue_bytes, unasked.residue_map) == (None, ())
    assert "audit" not in dict(unasked.seconds_by_phase)


async def test_pattern_pass_is_verified_and_leaves_no_residue(rig: CudaRig) -> None:
    device = rig.device()
    report = await rig.erase(device, request(pattern=True))
    assert report.failed_bytes == 0
    assert "pattern" in dict(report.seconds_by_phase)
    assert rig.machine.gpus[0].content().strip(b"\0") == b""


async def test_bytes_that_reappear_fail_the_verification(rig: CudaRig) -> None:
    device, gpu = rig.device(), rig.machine.gpus[0]
    gpu.set("wont_clear", 8 * MIB)
    report = await rig.erase(device)
    assert report.failed_bytes == 64
    assert report.verified_bytes == report.cleared_bytes - 64
    with_pattern = await rig.erase(device, request(pattern=True))
    assert with_pattern.failed_bytes > 64
    gpu.unset("wont_clear")
    assert (await rig.erase(device)).failed_bytes == 0


@pytest.mark.parametrize(
    ("status", "words"),
    [
        (214, "ECC error"),
        (700, "illegal address"),
        (716, "misaligned"),
        (719, "failed on the device"),
        (999, "Unknown"),
    ],
)
async def test_inaccessible_memory_is_a_fault_that_names_the_cuda_status(rig: CudaRig, status: int, words: str) -> None:
    device, gpu = rig.device(), rig.machine.gpus[0]
    gpu.set("bad_page", f"{8 * MIB} {status}")
    with pytest.raises(Unreadable, match=words):
        await rig.erase(device)
    assert rig.gpu.mode(device) == "default"
    gpu.unset("bad_page")
    assert (await rig.erase(device)).failed_bytes == 0


async def test_instance_is_cleared_by_its_own_id_and_its_siblings_are_untouched(short_tmp: Path) -> None:
    async with cuda_rig(short_tmp, gpus=0) as rig:
        gpu = rig.machine.add_gpu(mebibytes=130)
        first, second = gpu.split("1g.18gb", "1g.18gb")
        for each in (first, second):
            each.fill("secret")
        device = next(rig.device(number) for number in (0, 1, 2) if rig.device(number).id == first.uuid)
        report = await rig.erase(device, request(on_chip=True))
        assert report.residue_bytes == (report.verified_bytes or 0) > 0
        assert report.total_bytes == first.number("total") == (report.verified_bytes or 0) + report.not_covered_bytes
        assert second.content().startswith(b"secret")
        assert any(message.startswith("fence: ") for message in report.not_covered)
        assert gpu.text("compute_mode") == "0"
        assert not rig.note(device).exists()


async def test_instances_of_one_gpu_are_cleared_at_the_same_time(short_tmp: Path) -> None:
    async with cuda_rig(short_tmp, gpus=0) as rig:
        gpu = rig.machine.add_gpu(mebibytes=130)
        ids = {each.uuid for each in gpu.split("1g.18gb", "1g.18gb")}
        devices = [device for number in (0, 1, 2) if (device := rig.device(number)).id in ids]
        under_way = [await rig.in_mid_clear(device) for device in devices]
        assert not any(each.task.done() for each in under_way)
        rig.lift(devices[0])
        for report in await asyncio.gather(*(each.task for each in under_way)):
            assert report.residue_bytes == (report.verified_bytes or 0) > 0


async def test_memory_not_released_by_the_eraser_is_reported(rig: CudaRig) -> None:
    rig.gpu.unsettled = 3 * MIB
    assert (await rig.erase(rig.device())).unreleased_bytes == 3 * MIB


async def test_device_with_a_changed_memory_size_is_not_cleared(rig: CudaRig) -> None:
    device = rig.device()
    rig.machine.gpus[0].fill("secret")
    rig.machine.gpus[0].set("total", device.memory_bytes // 2)
    with pytest.raises(Unreadable, match="were reported when it was found"):
        await rig.erase(device)
    assert rig.machine.gpus[0].content().startswith(b"secret")


# --- processors


async def test_shared_memory_residue_is_counted_and_cleared_on_every_sm(rig: CudaRig) -> None:
    device, gpu = rig.device(), rig.machine.gpus[0]
    await rig.erase(device, request(on_chip=True))
    before = await rig.erase(device, request(on_chip=True))
    assert before.on_chip is not None
    for number in range(4):
        with (gpu.directory / "sm" / str(number)).open("r+b") as processor:
            processor.write(b"secret")
    report = await rig.erase(device, request(on_chip=True))
    assert report.on_chip == OnChipReport(
        units=4,
        units_cleared=4,
        shared_bytes=64 * 1024,
        register_bytes=245_760,
        residue_bytes=before.on_chip.residue_bytes + 4 * 6,
        failed_bytes=0,
    )
    for number in range(4):
        assert (gpu.directory / "sm" / str(number)).read_bytes()[: 64 * 1024].strip(b"\0") == b""
    assert any(message.startswith("on-chip: L1") for message in report.not_covered)
    assert "on-chip" in dict(report.seconds_by_phase)


async def test_sm_that_never_ran_a_kernel_is_not_counted_as_cleared(rig: CudaRig) -> None:
    rig.machine.gpus[0].set("sm_dead", "2")
    report = await rig.erase(rig.device(), request(on_chip=True))
    assert report.on_chip is not None
    assert (report.on_chip.units, report.on_chip.units_cleared) == (4, 3)


async def test_on_chip_memory_that_was_not_requested_is_reported_as_not_covered(rig: CudaRig) -> None:
    report = await rig.erase(rig.device(), request(on_chip=False))
    assert report.on_chip is None
    assert "on-chip: shared memory and registers, which were not requested to be cleared" in report.not_covered


# --- fence


async def test_fence_is_recorded_before_it_is_set_and_removed_once_the_eraser_is_dead(rig: CudaRig) -> None:
    device = rig.device()
    story: list[tuple[str, bool, bool]] = []

    def look(what: str) -> None:
        at_work = rig.programs.zygote.pid is not None and len(rig.children.pids()) > 1
        story.append((what, rig.note(device).exists(), at_work))

    rig.gpu.on_fence = look
    begun = await rig.in_mid_clear(device)
    assert rig.gpu.mode(device) == "exclusive-process"
    assert rig.note(device).read_text(encoding="ascii") == "default\n"
    rig.lift(device)
    await begun.task
    assert story == [("up", True, False), ("down", True, False)]
    assert rig.gpu.mode(device) == "default"
    assert not rig.note(device).exists()


async def test_device_with_an_open_context_is_not_cleared(rig: CudaRig) -> None:
    device, gpu = rig.device(), rig.machine.gpus[0]
    gpu.fill("secret")
    before = gpu.content()
    with rig.holding(device), pytest.raises(DeviceBusy, match="another process has a context"):
        await rig.erase(device)
    assert gpu.content()[GRANULE:] == before[GRANULE:]  # all but the holder's own context
    assert rig.gpu.mode(device) == "default"
    assert (await rig.erase(device)).residue_bytes


async def test_no_other_process_gets_a_context_while_a_device_is_cleared(rig: CudaRig) -> None:
    device = rig.device()
    begun = await rig.in_mid_clear(device)
    variables = environment(rig.machine, CUDA_VISIBLE_DEVICES=device.id)
    script = "from cupy.cuda import runtime; runtime.malloc(1)"
    intruder = await asyncio.create_subprocess_exec(
        sys.executable, "-c", script, env=variables, stderr=asyncio.subprocess.PIPE
    )
    _, error = await intruder.communicate()
    assert b"cudaErrorDevicesUnavailable" in error
    rig.lift(device)
    assert (await begun.task).failed_bytes == 0


async def test_fence_that_cannot_be_set_is_an_error_and_one_that_cannot_be_removed_stays_recorded(
    rig: CudaRig,
) -> None:
    device = rig.device()
    rig.gpu.refusal = DriverTimeout("The driver does not answer.")
    with pytest.raises(DriverTimeout, match="does not answer"):
        await rig.erase(device)
    assert rig.note(device).exists()
    rig.gpu.refusal = None
    begun = await rig.in_mid_clear(device)
    rig.gpu.refusal = Unreadable("It cannot be set.")
    rig.lift(device)
    with pytest.raises(Unreadable, match="cannot be set"):
        await begun.task
    assert await rig.eraser.find_orphan(device) is None
    assert rig.gpu.mode(device) == "exclusive-process"
    rig.gpu.refusal = None
    assert await rig.eraser.find_orphan(device) is None
    assert rig.gpu.mode(device) == "default"
    assert not rig.note(device).exists()


async def test_eraser_refuses_a_fence_that_cuda_does_not_enforce(rig: CudaRig) -> None:
    device, gpu = rig.device(), rig.machine.gpus[0]
    gpu.fill("secret")
    before = gpu.content()
    rig.gpu.stubborn = True
    with pytest.raises(Unavailable, match="does not report it as exclusive"):
        await rig.erase(device)
    assert gpu.content()[GRANULE:] == before[GRANULE:]  # all but the eraser's own context


async def test_fence_is_not_set_when_its_record_cannot_be_written(rig: CudaRig) -> None:
    device = rig.device()
    (rig.locks / "fences").write_text("no directory", encoding="ascii")
    with pytest.raises(ScrubberError, match="fence"):
        await rig.erase(device)
    assert rig.gpu.mode(device) == "default"


async def test_previous_compute_mode_is_restored_after_the_fence(rig: CudaRig) -> None:
    device = rig.device()
    rig.machine.gpus[0].set("compute_mode", "2")
    await rig.erase(device)
    assert rig.gpu.mode(device) == "prohibited"


# --- endings


async def test_deadline_kills_the_eraser_and_removes_the_fence(rig: CudaRig) -> None:
    device = rig.device()
    await rig.programs.warm_up()
    begun = await rig.in_mid_clear(device, deadline=3.0)
    with pytest.raises(DriverTimeout, match="it was killed"):
        await begun.task
    assert rig.children.pids() == {rig.programs.zygote.pid}
    assert rig.gpu.mode(device) == "default"
    assert b"secret" in rig.machine.gpus[0].content()


async def test_cancelled_scrub_kills_its_eraser_and_removes_its_fence_before_returning(rig: CudaRig) -> None:
    device = rig.device()
    begun = await rig.in_mid_clear(device)
    begun.task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await begun.task
    assert rig.children.pids() == {rig.programs.zygote.pid}
    assert await rig.eraser.find_orphan(device) is None
    assert rig.gpu.mode(device) == "default"


async def test_killed_eraser_yields_no_report(rig: CudaRig) -> None:
    device = rig.device()
    begun = await rig.in_mid_clear(device)
    eraser = await rig.eraser.find_orphan(device)
    assert eraser is not None
    os.kill(eraser, signal.SIGKILL)
    with pytest.raises(Unreadable, match="gave no valid report"):
        await begun.task
    assert rig.gpu.mode(device) == "default"
    assert b"secret" in rig.machine.gpus[0].content()


async def test_device_with_a_running_eraser_has_a_holder_and_gets_no_second_eraser(rig: CudaRig) -> None:
    device = rig.device()
    begun = await rig.in_mid_clear(device)
    with pytest.raises(Unavailable, match="still being cleaned up"):
        await rig.erase(device)
    assert await rig.eraser.find_orphan(device) in rig.children.pids()
    assert rig.gpu.mode(device) == "exclusive-process"
    assert (await rig.erase(rig.device(1))).failed_bytes == 0
    rig.lift(device)
    assert (await begun.task).failed_bytes == 0
    assert await rig.eraser.find_orphan(device) is None
    assert await rig.eraser.terminate_orphan(device, 1.0)


async def test_eraser_that_hangs_in_the_driver_is_killed_at_its_deadline(rig: CudaRig) -> None:
    device = rig.device()
    await rig.programs.warm_up()
    rig.machine.gpus[0].set("hang", "")
    with pytest.raises(DriverTimeout, match="it was killed"):
        await rig.erase(device, request(deadline=2.0))
    rig.machine.gpus[0].unset("hang")
    assert (await rig.erase(device)).failed_bytes == 0


async def test_missing_driver_is_no_device_fault(rig: CudaRig) -> None:
    device = rig.device()
    rig.machine.set("init_error", 9)
    with pytest.raises(Unavailable, match="install or load the driver"):
        await rig.erase(device)
    rig.machine.unset("init_error")
    assert (await rig.erase(device)).failed_bytes == 0


async def test_missing_device_is_unreadable(rig: CudaRig) -> None:
    device = rig.device()
    rig.machine.gpus[0].set("error", 15)
    with pytest.raises(Unreadable, match="does not see the device"):
        await rig.erase(device)


async def test_eraser_is_not_started_where_a_process_could_provide_mps(rig: CudaRig) -> None:
    device = rig.device()
    await rig.erase(device)
    (rig.state / "no-mps" / "control").touch()
    with pytest.raises(Unavailable, match="must be empty"):
        await rig.erase(device)
    assert rig.gpu.mode(device) == "default"


def test_eraser_stops_between_two_chunks_when_its_parent_closes_the_socket(short_tmp: Path) -> None:
    """Only the end of file of its socket ends this eraser: its parent is no zygote and keeps running."""
    with Machine.create(short_tmp / "world", gpus=1) as machine:
        gpu = machine.gpus[0]
        gpu.fill("secret")
        gpu.set("slow_clear", 600)
        ours, theirs = socket.socketpair()
        script = (
            "import sys; from scrubber.adapters.children.child import ParentSocket\n"
            "from scrubber.adapters.cuda.eraser import run; run(ParentSocket(int(sys.argv[1])))"
        )
        with subprocess.Popen(
            [sys.executable, "-c", script, str(theirs.fileno())],
            pass_fds=(theirs.fileno(),),
            env=environment(machine, CUDA_VISIBLE_DEVICES=gpu.uuid),
        ) as eraser:
            theirs.close()
            order = {
                "lock": str(short_tmp / "lock"),
                "fenced": False,
                "audit": False,
                "pattern": False,
                "on_chip": False,
            }
            with ours, ours.makefile("rb") as reader:
                ours.sendall(pack({**order, "scrub": "1"}))
                while unpack(reader.read(body_length(reader.read(HEADER_SIZE))))["phase"] != "clear":
                    pass
            gpu.unset("slow_clear")  # the current chunk ends now, and the eraser checks whether its parent still exists
            assert eraser.wait(60) == 0
        assert b"secret" in gpu.content()
