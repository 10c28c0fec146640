"""A stand-in for the DaemonSets of an operator: real processes or pods that come and go with labels of a node."""

from __future__ import annotations

import asyncio
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Self

from tests.cluster.plugin_server import PluginApiServer

__all__ = ["Operand", "OperandsStandIn", "holding_process"]

KEEP_OPEN = """
import os, signal, sys
kept = [os.open(path, os.O_RDWR) for path in sys.argv[1:]]
print(os.getpid(), flush=True)
signal.pause()
"""


@dataclass(frozen=True)
class Operand:
    """What runs on the node while its label ``key`` is "true".

    Attributes:
        start: starts it, and returns once it has its devices open; its result is passed to ``stop``.
    """

    key: str
    start: Callable[[], Awaitable[Any]]
    stop: Callable[[Any], Awaitable[None]]


def holding_process(key: str, paths: Sequence[str]) -> Operand:
    """Return an operand that is one process, which keeps ``paths`` open."""

    async def start() -> Process:
        process = await asyncio.create_subprocess_exec(sys.executable, "-c", KEEP_OPEN, *paths, stdout=PIPE)
        assert process.stdout is not None
        assert await process.stdout.readline(), "the operand ended before it had its devices open"
        return process

    async def stop(process: Process) -> None:
        process.terminate()
        await process.wait()

    return Operand(key, start, stop)


class OperandsStandIn:
    """Starts and stops operands as the labels of one node say; use as ``async with``.

    Attributes:
        running: what ``start`` returned, by key of the label.
        log: each start and stop in order, as ``+key`` and ``-key``.
    """

    def __init__(self, server: PluginApiServer, node: str, *operands: Operand) -> None:
        self._server = server
        self._node = node
        self._operands = operands
        self.running: dict[str, Any] = {}
        self.log: list[str] = []
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        await self._follow_once()
        self._task = asyncio.create_task(self._follow(), name="operands")
        return self

    async def __aexit__(self, *exc: object) -> None:
        assert self._task is not None
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        for operand in self._operands:
            if operand.key in self.running:
                await operand.stop(self.running.pop(operand.key))

    async def until(self, *keys: str) -> None:
        """Wait until exactly the operands of these labels run."""
        await self._server.until(lambda: self.running.keys() == set(keys))

    async def _follow(self) -> None:
        while True:
            seen = self._server.api.store.version
            if await self._follow_once():
                self._server.api.store.changes.notify()
            else:
                await self._server.api.store.wait_beyond(seen)

    async def _follow_once(self) -> bool:
        """Start or stop what the labels say; return whether there was anything to do."""
        changed = False
        for operand in self._operands:
            is_true = self._server.labels(self._node).get(operand.key) == "true"
            if is_true and operand.key not in self.running:
                self.running[operand.key] = await operand.start()
                self.log.append(f"+{operand.key}")
                changed = True
            elif not is_true and operand.key in self.running:
                await operand.stop(self.running.pop(operand.key))
                self.log.append(f"-{operand.key}")
                changed = True
        return changed
