"""A pod takes over all devices of a node from a pod that has just ended: eight devices of one hand-over against one.

The next pod is created as soon as the earlier one is gone, so its start waits for the scrubs of all its devices.
"""

from __future__ import annotations

from collections.abc import Sequence

from bench.figures import Amount, Quantiles, Timing
from bench.node import IDLE_CONTAINER, BenchNode
from scrubber.emulator.events import KubeletEvent
from scrubber.emulator.playground import gpu_pod_spec
from scrubber.emulator.pods import EmulatedPod, PodPhase

__all__ = ["take_over"]

_TIMEOUT = 120.0


async def take_over(nodes: Sequence[BenchNode], *, memory: str, rounds: int) -> tuple[list[Timing], Amount]:
    """Measure from the end of a pod to the grant of its devices to the next pod, on each node in turn.

    Args:
        nodes: two nodes, the one with fewer devices first; each pod has all devices of its node.
        memory: the size of each device, for the titles.

    Returns:
        a row for each node, and the ratio of their medians.
    """
    measured: list[list[float]] = [[] for _ in nodes]
    for number in range(-1, rounds):  # the first round opens connections, and does not count
        for node, samples in zip(nodes, measured, strict=True):
            seconds = await _take_over(node, number)
            if number >= 0:
                samples.append(seconds)
    timings = [
        Timing(
            f"take-over.devices-{len(node.devices)}",
            f"end of a pod → grant to the next one, devices of {memory} each: {len(node.devices)}",
            Quantiles.of(samples),
        )
        for node, samples in zip(nodes, measured, strict=True)
    ]
    few, many = (each.measured.p50 for each in timings)
    title = f"{len(nodes[-1].devices)} devices of one hand-over against {len(nodes[0].devices)} (medians)"
    return timings, Amount("take-over.ratio", title, many / few, "times")


async def _take_over(node: BenchNode, number: int) -> float:
    first = await _run(node, f"first-{number + 1}", "team-0")
    await node.stage.kubelet.delete(first, grace=0)
    second = await _run(node, f"second-{number + 1}", "team-1")
    ended = next(each for each in _events(node, first) if each.name == "PodOver")
    starts = [each for each in _events(node, second) if each.name == "PreStartContainer"]
    if len(starts) != 1 or starts[0].outcome != "OK":
        raise RuntimeError(f"a pod was to start at the first call, and these were made: {starts}")
    await node.end_pods([second])
    return starts[0].at + starts[0].duration - ended.at


async def _run(node: BenchNode, name: str, namespace: str) -> EmulatedPod:
    spec = gpu_pod_spec(name, namespace, IDLE_CONTAINER, gpus=len(node.devices))
    pod = await node.stage.kubelet.run(spec)
    await pod.wait(PodPhase.RUNNING, _TIMEOUT)
    return pod


def _events(node: BenchNode, pod: EmulatedPod) -> list[KubeletEvent]:
    return [each for each in node.stage.kubelet.events if each.pod == pod.full_name]
