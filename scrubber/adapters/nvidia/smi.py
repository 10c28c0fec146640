"""``nvidia-smi --gpu-reset``: the only program of the driver that this service runs, because NVML cannot reset a GPU.

Promise: a run has a deadline and a fixed environment, and its error output reaches the operator. A run that cannot be
killed is abandoned and reported, and no second one is started for its GPU. Each counts among the service's children.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

from scrubber.adapters.children.process import AbandonedChild, Children
from scrubber.adapters.deadlines import stall_tolerant_timeout
from scrubber.adapters.nvidia.driver_paths import DriverPaths
from scrubber.domain.errors import DeviceBusy, DriverTimeout, Unreadable

__all__ = ["NvidiaSmi", "OutputTail"]

_TAIL = 4096
"""Bytes of its output that are kept; the reason for a failure comes last."""
_MAX_LINE = 300

_IN_USE = re.compile(r"\bin use by\b|being used by one or more", re.IGNORECASE)
_STATUSES: Mapping[int, str] = {  # from its manual page
    3: "this GPU does not support this reset",
    4: "nvidia-smi was denied permission",
    6: "nvidia-smi does not find the GPU",
    8: "the GPU's external power cables are not attached",
    9: "the driver is not loaded",
    10: "the kernel has a problem with the GPU's interrupts",
    12: "nvidia-smi does not find the driver's library",
    14: "the GPU's InfoROM is corrupt",
    15: "the GPU has fallen off the bus",
}


class NvidiaSmi:
    """Runs ``nvidia-smi`` of the driver at ``paths``.

    Args:
        children: counts each run; their ``kill_timeout`` is the time after SIGKILL until a run is abandoned.
        kill: ``killpg``, or a test's stand-in for a run that cannot be killed.
    """

    def __init__(
        self, paths: DriverPaths, children: Children, *, kill: Callable[[int, int], object] = os.killpg
    ) -> None:
        self._paths = paths
        self._children = children
        self._kill_timeout = children.kill_timeout
        self._kill = kill
        self._unkillable: dict[str, asyncio.subprocess.Process] = {}

    @property
    def program(self) -> str | None:
        """Its path; None when it is not installed."""
        found = self._paths.find_program("nvidia-smi")
        return None if found is None else str(found)

    @property
    def abandoned(self) -> tuple[AbandonedChild, ...]:
        """Runs that SIGKILL did not end, and that have not ended since: they hang in the kernel."""
        return tuple(
            AbandonedChild(process.pid, "nvidia-smi", gpu)
            for gpu, process in self._unkillable.items()
            if process.returncode is None
        )

    async def reset(self, gpus: Sequence[str], subject: str, deadline: float) -> None:
        """Reset ``gpus`` (UUIDs) in one command; ``subject`` names the device that it is done for.

        Once started it must not be cancelled: an interrupted reset leaves a GPU that only a reboot restores.

        Raises:
            DeviceBusy: nvidia-smi reports that a process uses one of them; nothing was done.
            Unreadable: it failed.
            DriverTimeout: it did not end within ``deadline`` seconds, or an earlier run has not ended yet.
        """
        for each in self.abandoned:
            if each.device in gpus:
                raise _unkillable_error(subject, each.pid)
        process, words = await self._start("--gpu-reset", "-i", ",".join(gpus))
        try:
            async with stall_tolerant_timeout(deadline):
                status = await process.wait()
        except TimeoutError as error:
            await self._end(process, gpus, subject)
            raise DriverTimeout(
                f"nvidia-smi did not finish the reset of {subject} within {deadline:g} s and was killed; "
                "reboot the node."
            ) from error
        finally:
            await words.wait_until_closed(self._kill_timeout)  # a process that inherited its output may keep it open
        _check_exit(status, words.text, subject)

    async def _start(self, *arguments: str) -> tuple[asyncio.subprocess.Process, OutputTail]:
        program = self.program
        if program is None:
            raise Unreadable("nvidia-smi is not installed with the driver.")
        try:
            words, output = await OutputTail.listen()
        except OSError as error:
            raise Unreadable(f"{program} cannot be started: {error.strerror}.") from error
        try:
            # Not asyncio's own pipe: for asyncio, a process with one has ended only when no process has the other end
            # open.
            process = await asyncio.create_subprocess_exec(
                *(program, *arguments),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                cwd="/",
                env={"PATH": os.defpath, "LANG": "C.UTF-8", **self._paths.environment()},
                start_new_session=True,
            )
        except OSError as error:
            words.close()
            raise Unreadable(f"{program} cannot be started: {error.strerror}.") from error
        except BaseException:
            words.close()
            raise
        finally:
            os.close(output)
        self._children.count_program(process, "nvidia-smi")
        return process, words

    async def _end(self, process: asyncio.subprocess.Process, gpus: Sequence[str], about: str) -> None:
        """Kill the run and its process group; raises :class:`DriverTimeout` when it does not die."""
        with suppress(ProcessLookupError):
            self._kill(process.pid, signal.SIGKILL)
        dead, _ = await asyncio.wait({asyncio.ensure_future(process.wait())}, timeout=self._kill_timeout)
        if not dead:
            self._unkillable.update(dict.fromkeys(gpus, process))
            self._children.abandoned_total += 1
            raise _unkillable_error(about, process.pid)


def _check_exit(status: int, output: str, about: str) -> None:
    """Raise the error of a run that has ended, if it failed."""
    if status == 0:
        return
    lines = [text[:_MAX_LINE] for line in output.split("\n") if (text := line.strip(" \t\r"))]
    in_use = next((line for line in lines if _IN_USE.search(line)), None)
    if in_use is not None:
        raise DeviceBusy(f"{about} cannot be reset while a process uses it: {in_use}")
    why = _STATUSES.get(status, f"nvidia-smi exited with status {status}")
    last = f": {lines[-1]}" if lines else ""
    raise Unreadable(f"The reset of {about} failed ({why}{last}); reboot the node.")


def _unkillable_error(about: str, pid: int) -> DriverTimeout:
    return DriverTimeout(
        f"{about} is not reset: nvidia-smi (PID {pid}), which performs its reset, has not returned from the "
        "driver and cannot be killed. Reboot the node."
    )


class OutputTail(asyncio.Protocol):
    """The end of a program's output, however long that is."""

    def __init__(self) -> None:
        self._tail = b""
        self._closed = asyncio.Event()
        self._pipe: asyncio.BaseTransport | None = None

    @classmethod
    async def listen(cls) -> tuple[OutputTail, int]:
        """Start to listen; the descriptor is for the program, and the caller closes it."""
        ours, write_end = os.pipe()
        try:
            words = cls()
            await asyncio.get_running_loop().connect_read_pipe(lambda: words, os.fdopen(ours, "rb", buffering=0))
        except BaseException:
            os.close(write_end)
            raise
        return words, write_end

    @property
    def text(self) -> str:
        return self._tail.decode("utf-8", "replace")

    async def wait_until_closed(self, seconds: float) -> None:
        """Wait until no process can write any more, or for ``seconds``; then close."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._closed.wait()
        self.close()

    def close(self) -> None:
        if self._pipe is not None:
            self._pipe.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._pipe = transport

    def data_received(self, data: bytes) -> None:
        self._tail = (self._tail + data)[-_TAIL:]

    def connection_lost(self, error: Exception | None) -> None:
        self._closed.set()
