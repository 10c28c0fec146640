"""Everything that a stage started is over when the stage ends, however that happens."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from scrubber.emulator.playground import Playground


async def test_start_ends_with_the_name_of_a_daemon_that_exits_instead(short_tmp: Path) -> None:
    async with Playground(directory=short_tmp / "stage", devices=1, memory="1MiB", policy="no-such-policy") as stage:
        with pytest.raises(
            RuntimeError, match=r"scrubber serve exited while it was starting; its log is .*/service\.log"
        ):
            await stage.start_daemons()


async def test_failed_wait_for_devices_names_the_goal_and_the_state_of_the_service(short_tmp: Path) -> None:
    stage = Playground(directory=short_tmp / "stage")
    try:
        goal = r"not within 0 s: all 4 devices are clean or in use \(the service did not answer\)"
        with pytest.raises(TimeoutError, match=goal):
            await stage.wait_until_clean(0)
    finally:
        await stage.close()


async def test_cancelled_command_of_the_playground_has_ended_before_the_next_step(short_tmp: Path) -> None:
    file = short_tmp / "a pipe that never ends"
    os.mkfifo(file)
    stage = Playground(directory=short_tmp / "stage")
    try:
        running = asyncio.create_task(stage.run_command("audit", "verify", "--file", str(file)))
        never_ends = await asyncio.to_thread(os.open, file, os.O_WRONLY)  # waits until the command has it open
        try:
            running.cancel()
            with pytest.raises(asyncio.CancelledError):
                await running
            with pytest.raises(BrokenPipeError):  # the kernel's error once no process has it open for reading
                os.write(never_ends, b"\n")
        finally:
            os.close(never_ends)
    finally:
        await stage.close()
