"""Everything that a stage started is over when the stage ends, however that happens."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from scrubber.emulator.playground import Playground


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
