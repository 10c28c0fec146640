"""The eraser: fenced while it works, safe to kill, and waited for after its service has ended."""

import asyncio
import ctypes
import errno
import fcntl
import mmap
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from scrubber.adapters.children import orphans
from scrubber.adapters.children.message import HEADER_SIZE, unpack
from scrubber.adapters.children.process import Child, Children
from scrubber.adapters.procwalk import start_time
from scrubber.adapters.sim import control, eraser, shape
from scrubber.adapters.sim.backend import SimBackend
from scrubber.adapters.sim.eraser import BlockPattern, count_differences
from scrubber.adapters.sim.erasure import ERASER_MODULE
from scrubber.adapters.sim.layout import write_json
from scrubber.domain.device import Device
from scrubber.domain.errors import DeviceBusy, DeviceLost, DriverTimeout, Unavailable, Unreadable
from scrubber.ports.device import EraseProgress, EraseReport
from tests.adapters.backend_contract import request
from tests.adapters.shortage import descriptors_left
from tests.adapters.sim_rig import Sim, make

MEBIBYTES = 4
ROOT = Path(__file__).parents[2]


@pytest.fixture
async def sim(tmp_path: Path) -> AsyncIterator[Sim]:
    backend = SimBackend(make(tmp_path / "sim", mebibytes=MEBIBYTES))
    await backend.start()
    made = Sim(tmp_path / "sim", backend)
    yield made
    made.close()
    await backend.close()


@pytest.fixture
async def device(sim: Sim) -> Device:
    return (await sim.backend.inventory.devices())[0]


class Clearing:
    """An erase in its clear pass, which takes minutes unless a test interferes."""

    def __init__(self, sim: Sim, device: Device, deadline: float = 60.0) -> None:
        control.add_faults(sim.directory, device.id, slow_clear=600)
        self._reached = asyncio.Event()
        self.task: asyncio.Task[EraseReport] = asyncio.create_task(
            sim.backend.eraser.erase(device, request(deadline=deadline), self._on_progress)
        )

    def _on_progress(self, progress: EraseProgress) -> None:
        if progress.phase == "clear" and progress.done_bytes:
            self._reached.set()

    async def reached(self) -> None:
        async with asyncio.timeout(30):
            await self._reached.wait()


async def clearing(sim: Sim, device: Device, deadline: float = 60.0) -> Clearing:
    sim.fill(device, "secret")
    begun = Clearing(sim, device, deadline)
    await begun.reached()
    return begun


def ignore_progress(_: EraseProgress) -> None:
    pass


class Drowsy(Children):
    """Starts a program that never becomes ready."""

    def __init__(self, directory: Path) -> None:
        super().__init__(start_timeout=0.05)
        self._program = directory / "drowsy"
        self._program.write_text("#!/bin/sh\nexec sleep 600\n")
        self._program.chmod(0o700)

    async def start(self, module: str, *arguments: str, **how: Any) -> Child:
        return await super().start(module, *arguments, **how, interpreter=str(self._program))


async def test_eraser_releases_the_space_once_the_zeros_are_verified(sim: Sim, device: Device) -> None:
    sim.fill(device, "secret")
    assert sim.files(device).memory.stat().st_blocks
    await sim.backend.eraser.erase(device, request(), ignore_progress)
    found = sim.files(device).memory.stat()
    assert (found.st_blocks, found.st_size) == (0, device.memory_bytes)


async def test_residue_is_counted_to_the_byte(sim: Sim, device: Device) -> None:
    with sim.files(device).memory.open("r+b") as memory:
        for offset in (0, 5_000, 2 * 1024 * 1024, device.memory_bytes - 3):
            memory.seek(offset)
            memory.write(b"\x00ab")
    assert (await sim.backend.eraser.erase(device, request(), ignore_progress)).residue_bytes == 8


@pytest.mark.parametrize("size", [0, 12, 4096 * 7 + 1, 9 * 1024 * 1024])
async def test_device_file_size_changed_by_a_tenant_is_restored_and_reported(
    sim: Sim, device: Device, size: int
) -> None:
    memory = sim.files(device).memory
    inode = memory.stat().st_ino
    sim.start(device, "--write", "secret", "--resize", str(size)).process.wait()
    report = await sim.backend.eraser.erase(device, request(), ignore_progress)
    assert report.size_restored is not None
    assert str(size) in report.size_restored
    assert report.verified_bytes == device.memory_bytes == memory.stat().st_size
    assert memory.stat().st_ino == inode
    assert sim.content(device).strip(b"\0") == b""


async def test_device_file_mode_changed_by_a_tenant_is_restored_and_reported(sim: Sim, device: Device) -> None:
    memory = sim.files(device).memory
    memory.chmod(0o666)
    report = await sim.backend.eraser.erase(device, request(), ignore_progress)
    assert report.size_restored is not None
    assert "0666" in report.size_restored
    assert memory.stat().st_mode & 0o777 == 0o600


async def test_bytes_that_reappear_fail_the_verification(sim: Sim, device: Device) -> None:
    control.add_faults(sim.directory, device.id, wont_clear=True)
    report = await sim.backend.eraser.erase(device, request(), ignore_progress)
    assert report.failed_bytes > 0
    assert report.verified_bytes == report.total_bytes - report.failed_bytes
    control.clear_faults(sim.directory, device.id)
    assert (await sim.backend.eraser.erase(device, request(), ignore_progress)).failed_bytes == 0


async def test_slow_clear_ends_as_soon_as_the_fault_is_lifted(sim: Sim, device: Device) -> None:
    slow = await clearing(sim, device)
    control.clear_faults(sim.directory, device.id, ["slow-clear"])
    assert (await slow.task).verified_bytes == device.memory_bytes


async def test_opening_the_device_during_a_scrub_stops_the_eraser(sim: Sim, device: Device) -> None:
    slow = await clearing(sim, device)
    tenant = sim.start(device, "--read", "--hold", "forever")
    report = await slow.task
    assert report.fence_broken
    assert report.cleared_bytes < report.total_bytes
    assert report.verified_bytes == 0
    tenant.until_ready()
    assert await sim.backend.holders.is_held(device)


async def test_nonblocking_open_during_a_scrub_breaks_the_fence(sim: Sim, device: Device) -> None:
    slow = await clearing(sim, device)
    with pytest.raises(BlockingIOError):
        os.open(sim.files(device).memory, os.O_RDONLY | os.O_NONBLOCK)
    assert (await slow.task).fence_broken


async def test_deadline_kills_the_eraser_and_leaves_the_rest_dirty(sim: Sim, device: Device) -> None:
    slow = await clearing(sim, device, deadline=2.0)
    with pytest.raises(DriverTimeout, match="it was killed"):
        await slow.task
    assert await sim.backend.eraser.find_orphan(device) is None
    assert b"secret" in sim.content(device)[-64:]


async def test_cancelled_scrub_kills_its_eraser_before_returning(sim: Sim, device: Device) -> None:
    slow = await clearing(sim, device)
    slow.task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await slow.task
    assert await sim.backend.eraser.find_orphan(device) is None
    assert not await sim.backend.holders.is_held(device)
    assert b"secret" in sim.content(device)


async def test_killed_eraser_yields_no_report(sim: Sim, device: Device) -> None:
    slow = await clearing(sim, device)
    eraser = await sim.backend.eraser.find_orphan(device)
    assert eraser is not None
    os.kill(eraser, signal.SIGKILL)
    with pytest.raises(Unreadable, match="gave no valid report"):
        await slow.task
    assert b"secret" in sim.content(device)


async def test_eraser_that_died_with_its_zygote_is_no_device_fault(sim: Sim, device: Device) -> None:
    slow = await clearing(sim, device)
    assert sim.backend.zygote.pid is not None
    os.kill(sim.backend.zygote.pid, signal.SIGKILL)
    with pytest.raises(Unavailable, match="killed together with its zygote"):
        await slow.task
    assert await sim.backend.eraser.find_orphan(device) is None
    assert b"secret" in sim.content(device)
    control.clear_faults(sim.directory, device.id)
    assert (await sim.backend.eraser.erase(device, request(), ignore_progress)).verified_bytes == device.memory_bytes


async def test_scrubs_share_one_zygote_that_opens_no_device(sim: Sim, device: Device) -> None:
    await sim.backend.warm_up()
    zygote = sim.backend.zygote.pid
    await asyncio.gather(
        *(sim.backend.eraser.erase(each, request(), ignore_progress) for each in await sim.backend.inventory.devices())
    )
    assert zygote is not None
    assert sim.backend.zygote.pid == zygote
    assert sim.backend.children.pids() == {zygote}
    assert sim.backend.children.starts[ERASER_MODULE] == 2
    opened = [os.readlink(each) for each in Path(f"/proc/{zygote}/fd").iterdir()]
    assert not [each for each in opened if each.startswith(str(sim.directory))]


async def test_eraser_that_cannot_start_is_no_device_fault(sim: Sim, device: Device, tmp_path: Path) -> None:
    sim.fill(device, "secret")
    with descriptors_left(0), pytest.raises(Unavailable, match="cannot be started"):
        await sim.backend.eraser.erase(device, request(), ignore_progress)
    with descriptors_left(0), pytest.raises(Unavailable, match="cannot be started"):
        await sim.backend.resetter.reset(device, 60.0)
    drowsy = SimBackend(sim.directory, children=Drowsy(tmp_path))
    with pytest.raises(Unavailable, match="was not ready"):
        await drowsy.eraser.erase(device, request(), ignore_progress)
    await drowsy.close()
    assert b"secret" in sim.content(device)
    assert (await sim.backend.eraser.erase(device, request(), ignore_progress)).verified_bytes == device.memory_bytes


async def test_swapped_device_file_is_not_cleared(sim: Sim, device: Device) -> None:
    memory = sim.files(device).memory
    memory.rename(memory.with_name("hidden"))
    with pytest.raises(DeviceLost):
        await sim.backend.eraser.erase(device, request(), ignore_progress)
    memory.write_bytes(b"precious")
    with pytest.raises(Unreadable, match="was replaced"):
        await sim.backend.eraser.erase(device, request(), ignore_progress)
    assert memory.read_bytes() == b"precious"


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ("{", "not JSON"),
        ("[" * 100_000, "nested too deeply"),
        ('{"slow_clear": Infinity}', "not a number of seconds"),
        ('{"slow_clear": NaN}', "not a number of seconds"),
        (f'{{"slow_clear": {"9" * 400}}}', "not a number of seconds"),
    ],
)
async def test_scrub_with_a_malformed_control_file_is_unreadable(
    sim: Sim, device: Device, content: str, why: str
) -> None:
    (sim.files(device).directory / "control.json").write_text(content, encoding="ascii")
    with pytest.raises(Unreadable, match=why):
        await sim.backend.eraser.erase(device, request(), ignore_progress)


def test_every_block_of_the_pattern_is_different_and_every_wrong_byte_counts() -> None:
    size = 64 * 1024
    content = BlockPattern(size)
    expected = b"".join(content.at(start, size) for start in (0, size, 2 * size))
    assert len({expected[start : start + 4096] for start in range(0, len(expected), 4096)}) == len(expected) // 4096
    found = bytearray(content.at(size, size - 1))
    for wrong in (0, 4097, 4098, size - 2):
        found[wrong] ^= 0x80
    assert count_differences(bytes(found), content.at(size, size - 1)) == 4


async def test_pattern_is_written_and_read_back_before_the_memory_is_cleared(sim: Sim, device: Device) -> None:
    report = await sim.backend.eraser.erase(device, request(pattern=True), ignore_progress)
    assert (report.failed_bytes, report.verified_bytes) == (0, device.memory_bytes)
    assert [phase for phase, _ in report.seconds_by_phase] == ["audit", "pattern", "clear", "verify", "map"]


@pytest.mark.parametrize("touched", [0, 1, 300_000, 4 * 1024 * 1024])
async def test_memory_is_cleared_and_verified_where_pages_exist_and_where_none_do(
    sim: Sim, device: Device, touched: int
) -> None:
    memory = sim.files(device).memory
    with memory.open("r+b") as file:
        file.seek(device.memory_bytes - touched)
        file.write(b"\x01" * touched)
    report = await sim.backend.eraser.erase(device, request(), ignore_progress)
    assert (report.residue_bytes, report.verified_bytes) == (touched, device.memory_bytes)
    assert dict(report.seconds_by_phase).keys() == {"audit", "clear", "verify", "map"}
    assert not sim.content(device).strip(b"\0")


def test_memory_larger_than_the_window_is_mapped_part_by_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(eraser, "_WINDOW", 4 * mmap.PAGESIZE)
    pages = 9
    with (tmp_path / "memory").open("w+b", buffering=0) as file:
        file.write(b"".join(bytes([page]) * mmap.PAGESIZE for page in range(pages)))
        window = eraser.MemoryWindow(file.fileno(), pages * mmap.PAGESIZE)
        for page in (*range(pages), *range(pages)):
            address = window.populate(page * mmap.PAGESIZE, mmap.PAGESIZE)
            assert ctypes.string_at(address, mmap.PAGESIZE) == bytes([page]) * mmap.PAGESIZE
        with Path("/proc/self/maps").open(encoding="ascii") as maps:
            (mapped,) = [line.split()[0] for line in maps if str(tmp_path) in line]
    first, last = (int(each, 16) for each in mapped.split("-"))
    assert last - first == mmap.PAGESIZE


TRUNCATED = """
import ctypes, os, sys
from scrubber.adapters.children.child import ParentSocket
from scrubber.adapters.sim import eraser
kept = eraser.report_bus_errors(ParentSocket(1))
memory = os.open(sys.argv[1], os.O_RDWR)
window = eraser.MemoryWindow(memory, 8192)
address = window.populate(0, 4096)
os.ftruncate(memory, 0)
try:
    window.populate(4096, 4096)
except OSError as error:
    print(error.errno, file=sys.stderr, flush=True)
ctypes.memset(address, 0, 4096)
print("never reached", file=sys.stderr)
"""


def test_memory_truncated_while_it_is_cleared_ends_the_eraser_with_a_report(tmp_path: Path) -> None:
    memory = tmp_path / "memory"
    memory.write_bytes(b"secret" * 2048)
    ended = subprocess.run(
        [sys.executable, "-c", TRUNCATED, str(memory)], capture_output=True, cwd=ROOT, timeout=60, check=True
    )
    assert ended.stderr == f"{errno.EFAULT}\n".encode()
    report = unpack(ended.stdout[HEADER_SIZE:])
    assert (report["fault"], report["message"]) == (
        "unreadable",
        "The device's memory was truncated while it was accessed.",
    )


async def test_device_lock_does_not_follow_a_symlink(sim: Sim, device: Device) -> None:
    (sim.directory / "locks" / device.id).symlink_to(sim.directory / "elsewhere")
    with pytest.raises(Unreadable):
        await sim.backend.eraser.erase(device, request(), ignore_progress)
    assert not (sim.directory / "elsewhere").exists()


async def test_gpu_fault_affects_the_scrub_of_its_instance(tmp_path: Path) -> None:
    directory = make(tmp_path / "sim")
    shape.split(directory, "0", 2)
    backend = SimBackend(directory)
    instance = (await backend.inventory.devices())[0]
    control.add_faults(directory, "0", wont_clear=True)
    assert (await backend.eraser.erase(instance, request(), ignore_progress)).failed_bytes > 0
    await backend.close()


# --- the service dies while the eraser runs
# -----------------------------------------------------------------------------

SERVICE = """
import asyncio, sys
from pathlib import Path
from scrubber.adapters.sim.backend import SimBackend
from scrubber.ports.device import EraseRequest
async def main():
    backend = SimBackend(Path(sys.argv[1]))
    device = (await backend.inventory.devices())[0]
    def report(progress):
        if progress.phase == "clear" and progress.done_bytes:
            print(progress.done_bytes, flush=True)
    await backend.eraser.erase(device, EraseRequest("scrub-1", True, False, 600.0), report)
asyncio.run(main())
"""


async def test_service_killed_during_a_clear_leaves_dirty_bytes_and_no_eraser(sim: Sim, device: Device) -> None:
    sim.fill(device, "secret")
    control.add_faults(sim.directory, device.id, slow_clear=600)
    service = sim.run([sys.executable, "-c", SERVICE, str(sim.directory)])
    assert int(service.line())
    assert await sim.backend.eraser.find_orphan(device)
    service.end()
    assert await sim.backend.eraser.terminate_orphan(device, 20.0)
    assert await sim.backend.eraser.find_orphan(device) is None
    assert not await sim.backend.holders.is_held(device)
    assert b"secret" in sim.content(device)


@pytest.fixture
async def abandoned(sim: Sim, device: Device) -> AsyncIterator[int]:
    """Yield the PID of an eraser in mid-clear that its service could not kill: it is stopped and gets no SIGKILL."""
    deaf = Children(kill_timeout=0.05, send_signal=lambda pidfd, number: None)
    other = Sim(sim.directory, SimBackend(sim.directory, children=deaf))
    slow = await clearing(other, device)
    pid = await sim.backend.eraser.find_orphan(device)
    assert pid
    os.kill(pid, signal.SIGSTOP)
    slow.task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await slow.task
    assert [(each.pid, each.device) for each in deaf.abandoned] == [(pid, device.id)]
    yield pid
    with suppress(ProcessLookupError):  # most tests have killed it
        pidfd = os.pidfd_open(pid)
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        os.close(pidfd)
    for child in tuple(deaf._abandoned):  # a loop that ends before its child leaves a warning to a later test
        assert await child.wait(20.0)
    deaf.kill_timeout = 20.0
    await other.backend.zygote.close()  # it receives no signal, and ends with its socket
    await deaf.close()


async def test_second_eraser_does_not_start_beside_an_orphaned_one(sim: Sim, device: Device, abandoned: int) -> None:
    assert await sim.backend.eraser.find_orphan(device) == abandoned
    with pytest.raises(DeviceBusy, match="eraser"):
        await sim.backend.eraser.erase(device, request(), ignore_progress)


async def test_orphaned_eraser_that_does_not_stop_is_killed_and_the_device_can_be_cleared(
    sim: Sim, device: Device, abandoned: int
) -> None:
    assert await sim.backend.eraser.find_orphan(device) == abandoned
    assert await sim.backend.eraser.terminate_orphan(device, 20.0)
    assert await sim.backend.eraser.find_orphan(device) is None
    control.clear_faults(sim.directory, device.id)
    assert (await sim.backend.eraser.erase(device, request(), ignore_progress)).verified_bytes == device.memory_bytes


async def test_orphaned_eraser_is_killed_even_when_the_deadline_passed_during_a_stall(
    sim: Sim, device: Device, abandoned: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop, ahead = asyncio.get_running_loop(), 0.0
    right = loop.time
    monkeypatch.setattr(loop, "time", lambda: right() + ahead)
    monkeypatch.setattr(orphans, "_GRACE", 0.1)
    ending = asyncio.create_task(sim.backend.eraser.terminate_orphan(device, 20.0))
    await asyncio.sleep(0)
    ahead = 21.0
    assert await ending
    assert await sim.backend.eraser.find_orphan(device) is None


async def test_resumed_orphaned_eraser_stops_by_itself(sim: Sim, device: Device, abandoned: int) -> None:
    os.kill(abandoned, signal.SIGCONT)
    assert await sim.backend.eraser.terminate_orphan(device, 60.0)
    assert b"secret" in sim.content(device)


@pytest.mark.parametrize("claim", ["", "garbage\n", "1 2 3\n", "{innocent} 1\n", "{innocent} {started}\n"])
async def test_forged_lock_content_never_gets_another_process_killed(sim: Sim, device: Device, claim: str) -> None:
    innocent = sim.start((await sim.backend.inventory.devices())[1], "--hold", "forever").until_ready()
    started = start_time(innocent.pid)
    lock = sim.directory / "locks" / device.id
    lock.write_text(claim.format(innocent=innocent.pid, started=started), encoding="ascii")
    with lock.open("r+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert await sim.backend.eraser.find_orphan(device) == 0
        assert not await sim.backend.eraser.terminate_orphan(device, 0.2)
        assert innocent.process.poll() is None
        with pytest.raises(DeviceBusy):
            await sim.backend.eraser.erase(device, request(), ignore_progress)
    assert await sim.backend.eraser.find_orphan(device) is None


async def test_stale_pid_in_a_free_lock_is_ignored(sim: Sim, device: Device) -> None:
    (sim.directory / "locks" / device.id).write_text(f"{os.getpid()} {start_time(os.getpid())}\n", encoding="ascii")
    assert await sim.backend.eraser.find_orphan(device) is None
    assert (await sim.backend.eraser.erase(device, request(), ignore_progress)).failed_bytes == 0


async def test_control_file_written_during_a_clear_takes_effect_between_two_chunks(sim: Sim, device: Device) -> None:
    slow = await clearing(sim, device)
    write_json(sim.files(device).directory / "control.json", {"slow_clear": 0, "wont_clear": True})
    assert (await slow.task).failed_bytes > 0
