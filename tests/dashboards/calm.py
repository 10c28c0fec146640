"""A healthy node: pods come and go on it, and its daemons are restarted as in an upgrade."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from itertools import count
from typing import Final

from scrubber.emulator.playground import RESOURCE, Daemon, gpu_pod_spec, tenant_argv
from scrubber.emulator.pods import PodPhase
from tests.dashboards.stage import SOON, Node

__all__ = ["churn", "job"]

_PAUSE: Final = 12.0
"""Seconds between two restarts."""


async def job(node: Node, name: str, namespace: str, *, seconds: float = 0.3) -> None:
    """Run a pod once there is room: it fills its device, stays for ``seconds``, ends, and is deleted."""
    await node.kubelet.wait_until(lambda kubelet: kubelet.running and kubelet.schedulable(RESOURCE) > 0, SOON)
    pod = await node.kubelet.run(
        gpu_pod_spec(name, namespace, tenant_argv("--write", namespace, "--hold", str(seconds)))
    )
    if pod.admitted:
        await pod.wait(lambda status: status.phase in (PodPhase.SUCCEEDED, PodPhase.FAILED), SOON)
    await node.kubelet.delete(pod, grace=0)


async def churn(node: Node, enough: asyncio.Event) -> None:
    """Run until ``enough``: at most half of the devices in use, and an occasional restart."""
    async with asyncio.TaskGroup() as group:
        group.create_task(_restarts(node, enough))
        for lane in range(2):
            group.create_task(_lane(node, lane, enough))
    await node.wait_until_clean(SOON)


async def _lane(node: Node, lane: int, enough: asyncio.Event) -> None:
    for number in count():
        if enough.is_set():
            return
        await job(node, f"train-{lane}-{number}", f"team-{lane}", seconds=2.0)
        await node.wait_until_clean(SOON)


async def _restarts(node: Node, enough: asyncio.Event) -> None:
    async def restarted(daemon: Daemon) -> None:
        await node.restart(lambda: daemon.stop(SOON), daemon)

    async def killed(daemon: Daemon) -> None:
        await node.restart(daemon.kill, daemon)

    acts: list[Callable[[], Awaitable[object]]] = [
        lambda: restarted(node.service),
        lambda: restarted(node.plugin),
        lambda: killed(node.service),
        lambda: killed(node.plugin),
        node.kubelet.restart,
    ]
    for act in acts:
        try:
            async with asyncio.timeout(_PAUSE):
                await enough.wait()
            return
        except TimeoutError:
            await act()
