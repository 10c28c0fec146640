"""Programs of the check that use CUDA: tenants that leave secrets, readers, and the measuring of limits.

Promise: each sees one device, dies with the check, and is killed by its own process handle, never by a PID that may have
become somebody else's.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

__all__ = ["Broken", "Program", "library_path", "python_path", "running"]

_ROOT = Path(__file__).parents[2]
_LIBRARIES = ("cupy", "numpy", "pynvml")
_LONGEST_LINE = 1 << 20


class Broken(Exception):
    """A program of the check ended before it had said what it was asked."""


def python_path(*first: Path) -> str:
    """Where children find this tree, what ``first`` puts before everything, and the libraries that this process finds.

    A child looks neither into the user's own packages nor at our environment, so it is told.
    """
    found = [*first, _ROOT]
    for name in _LIBRARIES:
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.origin is not None:
            place = Path(spec.origin)
            found.append(place.parents[1] if place.name == "__init__.py" else place.parent)
    return ":".join(dict.fromkeys(map(str, found)))


def library_path(added: Mapping[str, str]) -> dict[str, str]:
    """``LD_LIBRARY_PATH`` of children: what ``added`` says, then what this process was started with; none when empty."""
    parts = [each for each in (added.get("LD_LIBRARY_PATH"), os.environ.get("LD_LIBRARY_PATH")) if each]
    return {"LD_LIBRARY_PATH": ":".join(parts)} if parts else {}


class Program:
    """A running program that speaks JSON lines."""

    def __init__(self, name: str, process: asyncio.subprocess.Process) -> None:
        self._name = name
        self._process = process

    @property
    def pid(self) -> int:
        return self._process.pid

    async def line(self) -> dict[str, Any]:
        """What it says next.

        Raises:
            Broken: it ended, or speaks no JSON; with what it wrote on standard error.
        """
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        line = await self._process.stdout.readline()
        try:
            found = json.loads(line)
        except ValueError as error:
            await self.kill()
            told = (await self._process.stderr.read()).decode(errors="replace").strip().splitlines()
            raise Broken(
                f"{self._name} ended with {self._process.returncode}: {told[-1] if told else 'silent'}"
            ) from error
        if not isinstance(found, dict):
            raise Broken(f"{self._name} says {found!r}")
        return found

    async def kill(self) -> None:
        """SIGKILL, as a node out of memory or an impatient kubelet does it; returns when the process is over."""
        with suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGKILL)
        await self._process.wait()


@asynccontextmanager
async def running(module: str, *arguments: str, environment: Mapping[str, str]) -> AsyncIterator[Program]:
    """``python -m module`` until the end of the block; nothing of this process's environment but ``environment``."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-s", "-P", "-m", module, *arguments),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        limit=_LONGEST_LINE,
        cwd="/",
        env={"PATH": os.defpath, "LANG": "C.UTF-8", **environment},
    )
    program = Program(module, process)
    try:
        yield program
    finally:
        await program.kill()
