"""Lets DCGM's host engine release the driver for a reset, by ``dcgmi set --detach-driver`` (DCGM from 4.5 on).

The host engine goes on without GPUs and connects to the driver again with ``--attach-driver``; one that is restarted
connects by itself. It does not affect a host engine that is embedded in another program, such as dcgm-exporter's.

Source: DCGM's user guide, "Detached GPUs".
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
from contextlib import suppress
from pathlib import Path

from scrubber.adapters.deadlines import stall_tolerant_timeout
from scrubber.adapters.nvidia.smi import OutputTail
from scrubber.domain.errors import Refused, Unavailable

__all__ = ["DcgmControl"]

_MIN_VERSION = (4, 5)
_VERSION = re.compile(r"\b(\d+)\.(\d+)\.\d+")
_UNKNOWN_OPTION = re.compile(r"couldn't find match for argument|unknown (option|argument|command)", re.IGNORECASE)
_MAX_LINE = 300


class DcgmControl:
    """:class:`scrubber.ports.device.AgentControl` by the program ``dcgmi``.

    Args:
        dcgmi: its path.
        host: address of the host engine, ``HOST[:PORT]``; empty for dcgmi's own default.
        timeout: seconds for each run, after which it is killed.
        kill_timeout: seconds after SIGKILL until a run is abandoned.
    """

    def __init__(self, dcgmi: Path, host: str = "", *, timeout: float = 30.0, kill_timeout: float = 2.0) -> None:
        self._dcgmi = dcgmi
        self._host = ("--host", host) if host else ()
        self._timeout = timeout
        self._kill_timeout = kill_timeout

    @property
    def actions(self) -> tuple[str, ...]:
        return (f"run {' '.join(self._command('--detach-driver'))}",)

    async def pause(self) -> None:
        try:
            version = await self._run(str(self._dcgmi), "--version")
            found = _VERSION.search(version)
            if found is not None and (int(found[1]), int(found[2])) < _MIN_VERSION:
                raise Refused(
                    f"{self._dcgmi} is of DCGM {found[0]}, and only DCGM 4.5 or newer can release the driver: upgrade "
                    "it, or let the plugin pause its pods (--pause-labels)."
                )
        except (_NotStarted, Unavailable) as failure:
            raise Refused(f"DCGM was not asked to release the driver: {failure} Check --dcgmi.") from failure
        try:
            await self._run(*self._command("--detach-driver"))
        except _NotStarted as failure:
            raise Refused(f"DCGM was not asked to release the driver: {failure}") from failure
        except _Failed as failure:
            if _UNKNOWN_OPTION.search(failure.output):
                raise Refused(
                    f"{self._dcgmi} does not know --detach-driver: only DCGM 4.5 or newer can release the driver. "
                    "Upgrade it, or let the plugin pause its pods (--pause-labels)."
                ) from failure
            raise Unavailable(
                f"DCGM did not release the driver: {failure} Check that the host engine runs (dcgmi discovery -l), and "
                "its address (--dcgm-address)."
            ) from failure

    async def restore(self) -> None:
        try:
            await self._run(*self._command("--attach-driver"))
        except (_NotStarted, Unavailable) as failure:
            raise Unavailable(
                f"DCGM may still be without the driver: {failure} Run {' '.join(self._command('--attach-driver'))}, or "
                "restart the host engine."
            ) from failure

    def _command(self, option: str) -> tuple[str, ...]:
        return (str(self._dcgmi), "set", option, *self._host)

    async def _run(self, *command: str) -> str:
        """Return the end of the output of a run that succeeded.

        Raises:
            _NotStarted: it could not be started.
            _Failed: it failed.
            Unavailable: it was killed at the deadline.
        """
        try:
            output, write_end = await OutputTail.listen()
        except OSError as error:
            raise _NotStarted(f"{command[0]} cannot be started: {error.strerror}.") from error
        try:
            process = await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=write_end,
                stderr=write_end,
                cwd="/",
                env={"PATH": os.defpath, "LANG": "C.UTF-8"},
                start_new_session=True,
            )
        except OSError as error:
            output.close()
            raise _NotStarted(f"{command[0]} cannot be started: {error.strerror}.") from error
        except BaseException:
            output.close()
            raise
        finally:
            os.close(write_end)
        try:
            async with stall_tolerant_timeout(self._timeout):
                status = await process.wait()
        except TimeoutError as error:
            raise Unavailable(f"{' '.join(command)} did not end within {self._timeout:g} s and was killed.") from error
        finally:
            if process.returncode is None:
                await self._kill(process)
            await output.wait_until_closed(self._kill_timeout)
        if status:
            raise _Failed(command, status, output.text)
        return output.text

    async def _kill(self, process: asyncio.subprocess.Process) -> None:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await asyncio.wait({asyncio.ensure_future(process.wait())}, timeout=self._kill_timeout)


class _NotStarted(Exception):
    """The program could not be started, so it changed nothing."""


class _Failed(Unavailable):
    """The program failed; ``output`` is the end of what it printed."""

    def __init__(self, command: tuple[str, ...], status: int, output: str) -> None:
        lines = [text[:_MAX_LINE] for line in output.splitlines() if (text := line.strip())]
        last = f": {lines[-1]}" if lines else ""
        super().__init__(f"{' '.join(command)} exited with status {status}{last}.")
        self.output = output
