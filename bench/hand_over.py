"""The fast path as the kubelet sees it: PreStartContainer → plugin → service → ledger commit → response.

``same container`` is the repeated restart of a running pod's container: List, decision, checks, commit. On a
``certificate`` is the first start of a new pod on a certified device; each uses the certificate up, so the devices are
scrubbed between two rounds, and there are fewer samples.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

from bench.echo import REFERENCE, Echo, measure_interleaved
from bench.figures import Quantiles, Timing
from bench.list_timer import ListTimer
from bench.node import BenchNode, hand_over_message
from scrubber.emulator.pods import EmulatedPod

__all__ = ["on_certificate", "reading_breakdown", "restart_interval", "same_container"]


_SPACING = 0.02
"""Minimum time between two restarts, in seconds."""
_WATCH_INTERVAL = 1.5
"""Seconds between two restarts of the same pod: an exception requires that the watch has seen the pod run."""
_BUDGET = 15.0
"""Default limit of the restarts of one row, in seconds; there are fewer samples where a single pod is restarted."""


async def same_container(
    node: BenchNode,
    echo: Echo,
    pods: list[EmulatedPod],
    *,
    name: str,
    title: str,
    samples: int,
    budget: float = _BUDGET,
) -> Timing:
    """Measure ``PreStartContainer`` for the containers of ``pods`` in turn, within the kubelet's rate limit.

    Back to back, they would exceed the service's limit of requests to the kubelet per second, and that wait would be
    measured.
    """
    next_at, spacing = 0.0, restart_interval(pods)

    async def start_again(number: int) -> float:
        nonlocal next_at
        await asyncio.sleep(next_at - time.monotonic())
        next_at = time.monotonic() + spacing
        return await node.pre_start(pods[number % len(pods)])

    message = hand_over_message(node.devices[0])
    return await measure_interleaved(
        f"hand-over.same-container.{name}",
        title,
        start_again,
        echo,
        message,
        samples=min(samples, int(budget / spacing)),
        warm_up=8,
    )


def restart_interval(pods: Sequence[EmulatedPod]) -> float:
    """Return the seconds between two restarts when ``pods`` take turns."""
    return max(_SPACING, _WATCH_INTERVAL / len(pods))


async def reading_breakdown(node: BenchNode, echo: Echo, *, name: str, title: str, samples: int) -> list[Timing]:
    """Measure the kubelet's List, and the whole reading of the kubelet's state."""
    lists: list[float] = []
    readings: list[float] = []
    beside: list[float] = []
    message = hand_over_message(node.devices[0])
    async with ListTimer.start(node.stage.kubelet, node.devices) as lister:
        for number in range(-20, samples):
            reference = await echo(message)
            listed, read = await lister()
            if number >= 0:
                beside.append(reference)
                lists.append(listed)
                readings.append(read)
    reference_of_both = Quantiles.of(beside)
    return [
        Timing(f"list.{name}", f"PodResources List, {title}", Quantiles.of(lists), reference_of_both, REFERENCE),
        Timing(
            f"reading.{name}",
            f"List + checkpoint + log directories, {title}",
            Quantiles.of(readings),
            reference_of_both,
            REFERENCE,
        ),
    ]


async def on_certificate(node: BenchNode, echo: Echo, *, name: str, title: str, pods: int, rounds: int) -> Timing:
    """Measure the first start of ``pods`` new pods, ``rounds`` times, from the kubelet's own record of its calls."""
    measured: list[float] = []
    reference: list[float] = []
    message = hand_over_message(node.devices[0])
    events = node.stage.kubelet.events
    for number in range(-1, rounds):
        # The first round opens connections, and does not count.
        pod_count = pods if number >= 0 else 2
        begun = len(events)
        running: list[EmulatedPod] = []
        beside: list[float] = []
        for _ in range(pod_count):
            beside.append(await echo(message))
            running += await node.start_pods(1)
        calls = [each for each in events[begun:] if each.name == "PreStartContainer"]
        if len(calls) != pod_count or any(each.outcome != "OK" for each in calls):
            raise RuntimeError(f"{pod_count} pods were to start at the first call, and these were made: {calls}")
        await node.end_pods(running)
        if number >= 0:
            measured += [each.duration for each in calls]
            reference += beside
    quantiles = Quantiles.of(measured)
    return Timing(f"hand-over.certificate.{name}", title, quantiles, Quantiles.of(reference), REFERENCE)
