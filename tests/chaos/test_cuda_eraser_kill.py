"""Death while an NVIDIA device is cleared: of the eraser, of the zygote, of the service, or none but stopped forever.

Each time the fence is removed when its maker is dead and not before, nothing is reported as cleared, and the next scrub
finds what was left.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from scrubber.adapters.children.process import wait_for_exit
from scrubber.domain.device import Device
from scrubber.domain.errors import Unavailable, Unreadable
from tests.adapters.cuda_rig import CudaRig, cuda_rig

ROOT = Path(__file__).parents[2]
LONG = 60.0

SERVICE = """
import asyncio, os, signal, sys
from pathlib import Path
from scrubber.adapters.children.process import Children
from tests.adapters.cuda_rig import CudaRig
from tests.nvidia.machine import Machine

async def main():
    rig = CudaRig(Machine(Path(sys.argv[1])), Path(sys.argv[2]), Children())
    if sys.argv[3:]:
        rig.gpu.on_fence = lambda moment: moment in sys.argv and os.kill(os.getpid(), signal.SIGKILL)
        await rig.erase(rig.device())
    begun = await rig.in_mid_clear(rig.device())
    print(rig.programs.zygote.pid, await rig.eraser.find_orphan(rig.device()), flush=True)
    await begun.task

asyncio.run(main())
"""


@pytest.fixture
async def rig(short_tmp: Path) -> AsyncIterator[CudaRig]:
    async with cuda_rig(short_tmp, gpus=1) as made:
        yield made


@contextmanager
def another_service(rig: CudaRig) -> Iterator[tuple[subprocess.Popen[bytes], int, int]]:
    """Run a service in mid-clear on the device; yields it and the PIDs of its zygote and its eraser."""
    command = [sys.executable, "-c", SERVICE, str(rig.machine.root), str(rig.state)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=ROOT) as service:
        try:
            assert service.stdout is not None
            zygote, eraser = (int(word) for word in service.stdout.readline().split())
            yield service, zygote, eraser
        finally:
            service.kill()


async def over(pid: int) -> None:
    """Return once the process is dead."""
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    async with asyncio.timeout(LONG):
        await wait_for_exit(pidfd)
    os.close(pidfd)


def is_fenced(rig: CudaRig, device: Device) -> bool:
    """Return whether the fence is set; asserts that its note exists exactly then."""
    stands = rig.gpu.mode(device) == "exclusive-process"
    assert rig.note(device).exists() == stands
    return stands


async def the_next_scrub_finds_what_was_left(rig: CudaRig, device: Device) -> None:
    assert b"secret" in rig.machine.gpus[0].content()
    rig.lift(device)
    report = await rig.erase(device)
    assert report.residue_bytes
    assert (report.verified_bytes or 0) + report.not_covered_bytes == report.total_bytes
    assert rig.machine.gpus[0].content().strip(b"\0") == b""
    assert not is_fenced(rig, device)


async def test_killed_eraser_has_cleared_nothing(rig: CudaRig) -> None:
    device = rig.device()
    begun = await rig.in_mid_clear(device)
    eraser = await rig.eraser.find_orphan(device)
    assert eraser
    os.kill(eraser, signal.SIGKILL)
    with pytest.raises(Unreadable, match="gave no valid report"):
        await begun.task
    await the_next_scrub_finds_what_was_left(rig, device)


async def test_killed_zygote_ends_its_erasers_and_is_replaced(rig: CudaRig) -> None:
    device = rig.device()
    begun = await rig.in_mid_clear(device)
    zygote, eraser = rig.programs.zygote.pid, await rig.eraser.find_orphan(device)
    assert zygote
    assert eraser
    os.kill(zygote, signal.SIGKILL)
    with pytest.raises(Unavailable, match="killed together with its zygote"):
        await begun.task
    await over(eraser)
    await the_next_scrub_finds_what_was_left(rig, device)
    assert rig.programs.zygote.pid != zygote


async def test_fence_left_by_a_killed_service_is_removed_by_the_next_one(rig: CudaRig) -> None:
    device = rig.device()
    with another_service(rig) as (service, zygote, eraser):
        assert is_fenced(rig, device)
        service.kill()
        for pid in (zygote, eraser):
            await over(pid)
    assert is_fenced(rig, device)
    assert await rig.eraser.find_orphan(device) is None
    assert not is_fenced(rig, device)
    await the_next_scrub_finds_what_was_left(rig, device)


@pytest.mark.parametrize("moment", ["up", "down"])
async def test_service_killed_between_note_and_fence_leaves_no_permanent_fence(rig: CudaRig, moment: str) -> None:
    """The note exists without a fence: before the fence is set, and after it is removed."""
    device = rig.device()
    service = await asyncio.create_subprocess_exec(
        sys.executable, "-c", SERVICE, str(rig.machine.root), str(rig.state), moment, cwd=ROOT
    )
    assert await service.wait() == -signal.SIGKILL
    assert (rig.gpu.mode(device), rig.note(device).exists()) == ("default", True)
    assert await rig.eraser.terminate_orphan(device, 10.0)
    assert not is_fenced(rig, device)
    assert (await rig.erase(device)).failed_bytes == 0


async def test_fence_left_by_a_dead_service_is_not_restored_as_the_compute_mode(rig: CudaRig) -> None:
    device = rig.device()
    with another_service(rig) as (service, _, eraser):
        service.kill()
        await over(eraser)
    assert is_fenced(rig, device)
    await the_next_scrub_finds_what_was_left(rig, device)


async def test_stopped_orphaned_eraser_keeps_its_fence_until_it_is_killed(rig: CudaRig) -> None:
    device = rig.device()
    with another_service(rig) as (_, _, eraser):
        os.kill(eraser, signal.SIGSTOP)
        assert await rig.eraser.find_orphan(device) == eraser
        assert is_fenced(rig, device)
        assert await rig.eraser.terminate_orphan(device, 10.0)
        assert not is_fenced(rig, device)
        await over(eraser)
    await the_next_scrub_finds_what_was_left(rig, device)
