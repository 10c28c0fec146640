"""A stand-in for NVSentinel's janitor: carries out ``GPUReset`` objects of one node, succeeds, fails or hangs."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Self

from tests.cluster.api_server import ApiServerStandIn

__all__ = ["JanitorStandIn"]


class JanitorStandIn:
    """Pauses operands by labels, resets, restores the labels, and writes the status; use as ``async with``.

    An object that is deleted meanwhile goes when the labels are restored, as NVSentinel's finalizer has it.

    Args:
        labels: keys that it sets to "false" meanwhile; only those that are "true".
        reset: resets the GPUs of these UUIDs once the operands have ended; returns why it failed, empty if it did not.

    Attributes:
        hangs: whether it never resets.
        on_step: called with each step: labels, reset, restore, done.
        seen: specifications of the objects that it worked on.
    """

    def __init__(
        self,
        server: ApiServerStandIn,
        node: str,
        labels: Sequence[str],
        *,
        stopped: Callable[[], Awaitable[None]],
        reset: Callable[[Sequence[str]], Awaitable[str]],
    ) -> None:
        self._server = server
        self._node = node
        self._labels = labels
        self._stopped = stopped
        self._reset = reset
        self.hangs = False
        self.on_step: Callable[[str], object] = lambda step: None
        self.seen: list[Any] = []
        self._working = ""
        self._task: asyncio.Task[None] | None = None
        server.gpu_resets = {}
        server.finalized = lambda name: name != self._working

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self._follow(), name="janitor")
        return self

    async def __aexit__(self, *exc: object) -> None:
        assert self._task is not None
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _follow(self) -> None:
        while True:
            resets = self._server.gpu_resets or {}
            due = [each for each in resets.values() if "status" not in each and each["spec"]["nodeName"] == self._node]
            if not due:
                await self._server.bell.rung()
                continue
            await self._carry_out(due[0])

    async def _carry_out(self, wish: Any) -> None:
        name = self._working = wish["metadata"]["name"]
        self.seen.append(wish["spec"])
        wish["status"] = {"startTime": "2026-01-01T00:00:00Z"}
        changed = [key for key in self._labels if self._server.labels(self._node).get(key) == "true"]
        self._server.set_labels(self._node, dict.fromkeys(changed, "false"))
        self.on_step("labels")
        await self._stopped()
        while self.hangs and "deletionTimestamp" not in wish["metadata"]:
            await self._server.bell.rung()
        self.on_step("reset")
        failure = "it was deleted" if self.hangs else await self._reset(wish["spec"]["selector"]["uuids"])
        self.on_step("restore")
        self._server.set_labels(self._node, dict.fromkeys(changed, "true"))
        wish["status"] |= {
            "completionTime": "2026-01-01T00:01:00Z",
            "conditions": [
                {
                    "type": "Complete",
                    "status": "True",
                    "reason": "ResetJobFailed" if failure else "GPUResetSucceeded",
                    "message": failure or "the GPU was reset",
                }
            ],
        }
        self._working = ""
        self.on_step("done")
        resets = self._server.gpu_resets
        if resets is not None and "deletionTimestamp" in wish["metadata"]:
            resets.pop(name, None)
        self._server.bell.ring()
