"""Programs of the check that use CUDA: tenants that leave secrets, readers, and measurements of limits.

Each sees one device, dies with the check, and is killed by its own process handle, never by a PID that may have been
reused.
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
    """A program of the check ended before its answer."""


def python_path(*first: Path) -> str:
    """Return the Python path of children: ``first``, then this tree, and the libraries of this process.

    A child uses neither the user's own packages nor this process's environment.
    """
    found = [*first, _ROOT]
    for name in _LIBRARIES:
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.origin is not None:
            place = Path(spec.origin)
            found.append(place.parents[1] if place.name == "__init__.py" else place.parent)
    return ":".join(dict.fromkeys(map(str, found)))


def library_path(added: Mapping[str, str]) -> dict[str, str]:
    """Return ``LD_LIBRARY_PATH`` of children: the value in ``added``, then that of this process; nothing when empty."""
    parts = [each for each in (added.get("LD_LIBRARY_PATH"), os.environ.get("LD_LIBRARY_PATH")) if each]
    return {"LD_LIBRARY_PATH": ":".join(parts)} if parts else {}


class Program:
    """A running program that prints JSON lines."""

    def __init__(self, name: str, process: asyncio.subprocess.Process) -> None:
        self._name = name
        self._process = process

    @property
    def pid(self) -> int:
        return self._process.pid

    async def line(self) -> dict[str, Any]:
        """Return its next message.

        Raises:
            Broken: it ended, or prints no JSON; contains its standard error.
        """
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        line = await self._process.stdout.readline()
        try:
            found = json.loads(line)
        except ValueError as error:
            await self.kill()
            errors = (await self._process.stderr.read()).decode(errors="replace").strip().splitlines()
            raise Broken(
                f"{self._name} ended with {self._process.returncode}: {errors[-1] if errors else 'silent'}"
            ) from error
        if not isinstance(found, dict):
            raise Broken(f"{self._name} says {found!r}")
        return found

    async def kill(self) -> None:
        """Send SIGKILL, like the OOM killer or a kubelet at its deadline; returns when the process is over."""
        with suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGKILL)
        await self._process.wait()


@asynccontextmanager
async def running(module: str, *arguments: str, environment: Mapping[str, str]) -> AsyncIterator[Program]:
    """Run ``python -m module`` until the end of the block, with only ``environment`` as its environment."""
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
