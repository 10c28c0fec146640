"""The end of the service: whatever hangs, no child of it is left to keep the driver open."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time

import pytest

from scrubber.adapters.children.process import wait_for_exit
from scrubber.stop_deadline import STOP_SECONDS
from tests.integration.acting import SOON
from tests.integration.nvidia_stage import staged
from tests.nvidia.machine import Gpu


async def has_a_context(gpu: Gpu) -> None:
    """Wait until an eraser has a context on ``gpu``."""
    async with asyncio.timeout(SOON):
        while True:
            if list((gpu.directory / "processes/compute.d").glob("[0-9]*")):
                return
            await asyncio.sleep(0.02)


async def test_service_ends_within_its_limit_and_leaves_no_child_although_children_and_driver_hang() -> None:
    async with staged(gpus=2) as stage:
        for gpu in stage.machine.gpus:
            gpu.set("slow_clear", 600)
        scrub = await stage.run_command("scrub", "0", "--no-wait")
        assert scrub.returncode == 0, scrub.stderr
        await has_a_context(stage.machine.gpus[0])
        for gpu in stage.machine.gpus:
            gpu.hang()
        children = stage.child_processes(stage.service)
        assert len(children) > len(stage.machine.gpus)
        for pid in children:
            os.kill(pid, signal.SIGSTOP)
        began = time.monotonic()
        await stage.service.stop(SOON)
        assert time.monotonic() - began < STOP_SECONDS + 5.0
        assert stage.running_processes(children) == []


@pytest.mark.parametrize("reset_seconds", [0, 4])
async def test_service_that_ignores_its_end_is_ended_with_its_children_but_not_during_a_reset(
    reset_seconds: int,
) -> None:
    command = (sys.executable, "-m", "tests.hanging_end", "1.5", str(reset_seconds))
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    assert process.stdout is not None
    try:
        async with asyncio.timeout(SOON):
            pidfd = os.pidfd_open(int(await process.stdout.readline()))
            began = time.monotonic()
            assert await process.wait() == 1
            assert time.monotonic() - began > (reset_seconds or 1)
            assert b"service.stop-timed-out" in await process.stdout.read()
            await wait_for_exit(pidfd)
            os.close(pidfd)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
