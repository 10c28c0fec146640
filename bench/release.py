"""Release → clean, and the requests to the kubelet for it.

A pod is deleted. From the moment when the kubelet has released its device until that device is certified clean again,
no pod requests it. Most of that time is waiting: for the next reading of the kubelet's list, and for the one after it
that proves the pod absent. The slow path itself is measured separately, by the service's own record.
"""

from __future__ import annotations

import asyncio
import time

from bench.figures import Amount, Quantiles, Timing
from bench.node import BenchNode

__all__ = ["churn", "list_calls_at_rest", "release_to_clean"]

_TIMEOUT = 60.0


async def release_to_clean(node: BenchNode, *, releases: int) -> Timing:
    """Measure one pod after the other on an otherwise idle node."""
    measured: list[float] = []
    for _ in range(releases):
        (pod,) = await node.start_pods(1)
        await node.stage.kubelet.delete(pod, grace=0)
        began = time.perf_counter()
        await node.stage.wait_for_devices(lambda devices: all(each.state == "clean" for each in devices), _TIMEOUT)
        measured.append(time.perf_counter() - began)
    title = f"release → clean, {len(node.devices)} devices"
    return Timing("release.to-clean", title, Quantiles.of(measured))


async def list_calls_at_rest(node: BenchNode, *, seconds: float, name: str, title: str) -> Amount:
    """Measure how often the kubelet is queried on an idle node."""
    before, began = node.stage.kubelet.pod_resources_requests, time.perf_counter()
    await asyncio.sleep(seconds)
    return _list_calls_per_minute(node, before, began, name, title)


async def churn(node: BenchNode, *, rounds: int) -> list[Amount]:
    """Assign all devices to pods and release them, ``rounds`` times, as fast as the node can."""
    before, began = node.stage.kubelet.pod_resources_requests, time.perf_counter()
    for _ in range(rounds):
        await node.end_pods(await node.start_pods(len(node.devices)))
    pods = rounds * len(node.devices)
    rate = 60 * pods / (time.perf_counter() - began)
    return [
        _list_calls_per_minute(node, before, began, "churn", "while pods come and go"),
        Amount("pods.churn", "pods that came and went meanwhile", rate, "a minute"),
    ]


def _list_calls_per_minute(node: BenchNode, before: int, began: float, name: str, title: str) -> Amount:
    calls = 60 * (node.stage.kubelet.pod_resources_requests - before) / (time.perf_counter() - began)
    return Amount(f"requests.{name}", f"requests to PodResources, {title}", calls, "a minute")
