"""A stand-in for NVSentinel's janitor: carries out ``GPUReset`` objects of one node, succeeds, fails or hangs."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Self

from scrubber.emulator.cluster import ResourceType
from scrubber.emulator.cluster.resources import Json
from tests.cluster.plugin_server import PluginApiServer

__all__ = ["FINALIZER", "GPU_RESETS", "JanitorStandIn"]

GPU_RESETS = ResourceType(
    "janitor.dgxc.nvidia.com", "gpuresets", "GPUReset", False, has_status=True, version="v1alpha1", custom=True
)
FINALIZER = "janitor.dgxc.nvidia.com/finalizer"


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
        server: PluginApiServer,
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
        self._task: asyncio.Task[None] | None = None
        server.api.install(GPU_RESETS)

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self._follow(), name="janitor")
        return self

    async def __aexit__(self, *exc: object) -> None:
        assert self._task is not None
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _follow(self) -> None:
        store = self._server.api.store
        while True:
            seen = store.version
            due = [
                each
                for each in store.items(GPU_RESETS)
                if "status" not in each and each["spec"]["nodeName"] == self._node
            ]
            if due:
                await self._carry_out(due[0])
            else:
                await store.wait_beyond(seen)

    async def _carry_out(self, wish: Json) -> None:
        name, store = wish["metadata"]["name"], self._server.api.store
        self.seen.append(wish["spec"])
        self._write(name, {"metadata": {"finalizers": [FINALIZER]}})
        self._write(name, {"status": {"startTime": "2026-01-01T00:00:00Z"}}, "status")
        changed = [key for key in self._labels if self._server.labels(self._node).get(key) == "true"]
        self._server.set_labels(self._node, dict.fromkeys(changed, "false"))
        self.on_step("labels")
        await self._stopped()
        while self.hangs and not self._is_deleted(name):
            await store.wait_beyond(store.version)
        self.on_step("reset")
        failure = "it was deleted" if self.hangs else await self._reset(wish["spec"]["selector"]["uuids"])
        self.on_step("restore")
        self._server.set_labels(self._node, dict.fromkeys(changed, "true"))
        condition = {
            "type": "Complete",
            "status": "True",
            "reason": "ResetJobFailed" if failure else "GPUResetSucceeded",
            "message": failure or "the GPU was reset",
        }
        self._write(name, {"status": {"completionTime": "2026-01-01T00:01:00Z", "conditions": [condition]}}, "status")
        self.on_step("done")
        self._write(name, {"metadata": {"finalizers": []}})

    def _is_deleted(self, name: str) -> bool:
        found = self._server.api.store.get(GPU_RESETS, name)
        return found is None or "deletionTimestamp" in found["metadata"]

    def _write(self, name: str, patch: Json, subresource: str = "") -> None:
        """Patch an object that may be gone meanwhile, with its kind."""
        if self._server.api.store.get(GPU_RESETS, name) is not None:
            self._server.api.patch(GPU_RESETS, name, patch, subresource=subresource)
