"""Failing commands: one message, and an exit code that indicates who has to act."""

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from scrubber.domain.errors import (
    DeviceBusy,
    InvalidRequest,
    LedgerFailure,
    NotReady,
    PermissionDenied,
    Quarantined,
    Unreadable,
)
from tests.cli.stage import BROKEN, Ended, Service, environment, run, serving, start
from tests.cli.terminal import at_terminal


@pytest.fixture
async def service(short_tmp: Path) -> AsyncIterator[Service]:
    async with serving(short_tmp) as service:
        yield service


class TestErrors:
    @pytest.mark.parametrize(
        ("error", "code"),
        [
            (InvalidRequest("There is no device 9."), 2),
            (DeviceBusy("Device 0 is in use."), 3),
            (Quarantined("Device 0 is quarantined."), 3),
            (NotReady("A scrub is in progress."), 3),
            (PermissionDenied("uid 5 may not do that."), 3),
            (LedgerFailure("The ledger is read-only."), 1),
            (Unreadable("The driver gave no data."), 1),
        ],
    )
    async def test_error_is_one_message_and_an_exit_code(
        self, service: Service, short_tmp: Path, error: Exception, code: int
    ) -> None:
        service.error = error
        assert await run(short_tmp, "scrub", "0", "-o", "json") == Ended(code, "", f"Error: {error}\n")

    async def test_unavailable_service_gives_no_verdict(self, short_tmp: Path) -> None:
        ended = await run(short_tmp, "devices", "-o", "json")
        assert (ended.code, ended.out) == (1, "")
        assert ended.err.startswith("Error: The scrub service is not reachable:")
        assert ended.err.count("\n") == 1

    @pytest.mark.parametrize("words", [("devices",), ("devices", "-o", "json"), ("devices", "--watch"), ("version",)])
    async def test_result_that_cannot_be_written_is_an_error(
        self, service: Service, short_tmp: Path, words: tuple[str, ...]
    ) -> None:
        closing = ("/bin/sh", "-c", 'exec "$0" "$@" >&-', sys.executable, "-m", "scrubber.cli.main", *words)
        process = await asyncio.create_subprocess_exec(
            *closing, env=environment(short_tmp), stderr=asyncio.subprocess.PIPE
        )
        _, err = await process.communicate()
        assert (process.returncode, err) == (1, b"Error: Standard output is closed.\n")

    async def test_written_result_counts_when_a_note_cannot_be_written(self, service: Service, short_tmp: Path) -> None:
        service.devices = [BROKEN]
        full = os.open("/dev/full", os.O_WRONLY)
        process = await start(short_tmp, "devices", stderr=full)
        os.close(full)
        out, _ = await process.communicate()
        assert (process.returncode, out[:5]) == (0, b"INDEX")

    async def test_error_message_is_wrapped_on_a_terminal(self, short_tmp: Path) -> None:
        result = await at_terminal("devices", columns=40, environment={"SCRUBBER_SOCKET_DIR": str(short_tmp)})
        first, *others = result.text.splitlines()
        assert first == "Error: The scrub service is not"
        assert all(line.startswith("       ") for line in others)
