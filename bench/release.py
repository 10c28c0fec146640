"""The end of a pod: until its device's scrub begins, until the device is clean, and until a pod that waits gets it.

The clock starts when the last process of the pod ends, its sandbox included. The scrub, its duration and its end are
those of the service's own record; it *begins* when its first step does, after its start is in the ledger. So what is
left besides the scrub is the service's own time: to notice the end, to verify it, and to record what it did.

Requests to the kubelet's PodResources, at rest and while pods come and go, are measured here too.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass

from bench.echo import REFERENCE, Echo
from bench.figures import Amount, Quantiles, Timing
from bench.node import BenchNode, hand_over_message
from bench.pod_end import PodEnd, end_evidence
from scrubber.emulator.pods import EmulatedPod

__all__ = ["churn", "list_calls_at_rest", "releases", "waiting_hand_overs"]

_TIMEOUT = 60.0
_RUN = 1.5
"""Seconds that pods run before the first of them ends: the service has seen them run, as nearly all real pods."""
_WAITING = 4
"""Number of pods that wait at the same time."""
_FIRST_END, _NEXT_END = 1.0, 0.4
"""Seconds from a forced deletion until the processes of the first pod end, and then those of the next one."""
_SCRUB = "its scrub"


@dataclass(frozen=True, slots=True)
class _Sample:
    """Wall-clock seconds, except for ``echo``, which is a duration.

    Attributes:
        began, finished: of the scrub.
        done: when the device was seen clean, or the start that waited was answered.
    """

    ended: float
    began: float
    finished: float
    done: float
    echo: float


async def releases(node: BenchNode, echo: Echo, *, samples: int) -> list[Timing]:
    """End one pod after the other on an otherwise idle node; no pod waits for its device."""
    found: list[_Sample] = []
    async with PodEnd.start() as end:
        while len(found) < samples:
            pods = await node.start_pods(min(len(node.devices), samples - len(found)))
            await asyncio.sleep(_RUN)
            found += [await _release(node, echo, end, pod) for pod in pods]
    title = f"release, {len(node.devices)} devices, {end_evidence(node)}: pod's last process ended"
    return _timings("release", title, "its device is clean", "to-clean", found)


async def _release(node: BenchNode, echo: Echo, end: PodEnd, pod: EmulatedPod) -> _Sample:
    (device,) = pod.device_ids
    beside = await echo(hand_over_message(device))
    await end.watch(pod)
    # Before the deletion: a scrub may have finished by the time when the kubelet has deleted the pod.
    clean = asyncio.create_task(_wait_until_clean(node, device))
    await node.stage.kubelet.delete(pod, grace=0)
    ended = await end.ended()
    done = await clean
    began, finished = await _scrub(node, device, ended)
    return _Sample(ended, began, finished, done, beside)


async def _wait_until_clean(node: BenchNode, device: str) -> float:
    await node.stage.wait_for_devices(
        lambda devices: any(each.id == device and each.state == "clean" for each in devices), _TIMEOUT
    )
    return time.time()


async def waiting_hand_overs(node: BenchNode, echo: Echo, *, samples: int) -> list[Timing]:
    """End pods whose devices are already allocated to the next pods, which wait in ``PreStartContainer``.

    Several pods wait at the same time, and get their devices one after the other.
    """
    found: list[_Sample] = []
    async with AsyncExitStack() as stack:
        ends = [await stack.enter_async_context(PodEnd.start()) for _ in range(_WAITING)]
        pods = await node.start_pods(len(node.devices))
        await asyncio.sleep(_RUN)
        while len(found) < samples:
            measured, started = await _hand_over(node, echo, ends, pods[:_WAITING])
            found += measured
            pods = pods[_WAITING:] + started
    await node.end_pods(pods)
    title = f"hand-over that waits, {end_evidence(node)}: earlier pod's last process ended"
    return _timings("waiting", title, "start granted", "granted", found[:samples])


async def _hand_over(
    node: BenchNode, echo: Echo, ends: Sequence[PodEnd], pods: Sequence[EmulatedPod]
) -> tuple[list[_Sample], list[EmulatedPod]]:
    """Delete ``pods`` by force, and start as many, which get their devices; return the new ones too."""
    kubelet, before = node.stage.kubelet, len(node.stage.kubelet.events)
    beside = [await echo(hand_over_message(pod.device_ids[0])) for pod in pods]
    for end, pod in zip(ends, pods, strict=True):
        await end.watch(pod)
    for number, pod in enumerate(pods):
        await kubelet.delete(pod, force=True, linger=_FIRST_END + number * _NEXT_END)
    started = [pod for each in await asyncio.gather(*(node.start_pods(1) for _ in pods)) for pod in each]
    offset = time.time() - asyncio.get_running_loop().time()
    calls = {
        each.devices[0]: each
        for each in kubelet.events[before:]
        if each.name == "PreStartContainer" and each.outcome == "OK"
    }
    found = []
    for end, pod, reference in zip(ends, pods, beside, strict=True):
        (device,), ended = pod.device_ids, await end.ended()
        call = calls[device]
        if call.at + offset > ended:
            raise RuntimeError(f"the start on {device} came only after the end of the pod that it was to wait for")
        began, finished = await _scrub(node, device, ended)
        found.append(_Sample(ended, began, finished, call.at + call.duration + offset, reference))
    return found, started


async def _scrub(node: BenchNode, device: str, since: float) -> tuple[float, float]:
    """Return when the first step of the scrub of ``device`` after ``since`` began, and when the last one ended."""
    rows = (await node.stage.read_client.history(device, since, events=["scrub.finished"])).entries
    scrubs = [row.scrub for row in rows if row.scrub.path == "slow"]
    if len(scrubs) != 1 or scrubs[0].outcome != "passed":
        raise RuntimeError(f"{device} was to be scrubbed once, and these are its scrubs: {scrubs}")
    (scrub,) = scrubs
    return scrub.finished_at - sum(step.duration_seconds for step in scrub.steps), scrub.finished_at


def _timings(prefix: str, title: str, goal: str, name: str, samples: Sequence[_Sample]) -> list[Timing]:
    echoes = Quantiles.of([each.echo for each in samples])
    scrubs = [each.finished - each.began for each in samples]
    whole = [each.done - each.ended for each in samples]
    rest = [each - scrub for each, scrub in zip(whole, scrubs, strict=True)]
    to_scrub = Quantiles.of([each.began - each.ended for each in samples])
    return [
        Timing(f"{prefix}.to-scrub", f"{title} → its device's scrub begins", to_scrub, echoes, REFERENCE),
        Timing(f"{prefix}.{name}", f"{title} → {goal}", Quantiles.of(whole), Quantiles.of(scrubs), _SCRUB),
        Timing(
            f"{prefix}.besides-scrub",
            f"{title} → {goal}, without the scrub itself",
            Quantiles.of(rest),
            echoes,
            REFERENCE,
        ),
    ]


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
