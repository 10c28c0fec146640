"""Claims of dynamic resource allocation: the kubelet's two calls, and what the scheduler learns of the devices.

The calls are those of the emulated kubelet for real pods, by its own record. Kubelet, API server and scheduler are one
process, which is also the benchmark's; the driver is a client of that API server over HTTP.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from bench import footprint
from bench.echo import REFERENCE, Echo
from bench.figures import Amount, Quantiles, Timing
from bench.node import IDLE_CONTAINER, MEMORY, unlimited_kubelet
from plugin.api import dra_v1_pb2 as api
from scrubber.adapters.sim import control
from scrubber.emulator.claim_cluster import DRIVER_ACCOUNT, ClaimCluster
from scrubber.emulator.cluster import ApiRequest
from scrubber.emulator.cluster.resources import SLICES
from scrubber.emulator.playground import Playground
from scrubber.emulator.pods import EmulatedPod, PodPhase

__all__ = ["MAX_PUBLICATIONS", "ClaimNode", "at_rest", "fault_to_taint", "prepare_and_unprepare", "publication"]

MAX_PUBLICATIONS = 4
"""After the fifth repair of its slices within a minute, the driver suspects another client and waits."""
_TIMEOUT = 120.0
_RUN = 1.5
"""Seconds that pods run before the first of them ends: the service has seen them run, as nearly all real pods."""
_XID = 95


class ClaimNode:
    """A playground with the DRA driver, whose devices are all clean and published.

    Attributes:
        devices: ids, in the order of the devices' indices.
    """

    def __init__(self, stage: Playground, cluster: ClaimCluster, devices: tuple[str, ...]) -> None:
        self.stage = stage
        self.cluster = cluster
        self.devices = devices
        self._pods = 0

    @classmethod
    @asynccontextmanager
    async def start(cls, devices: int, *, policy: str) -> AsyncIterator[ClaimNode]:
        """Run a node of ``devices`` devices, each scrubbed once."""
        stage = Playground(
            devices=devices, memory=MEMORY, policy=policy, watch_interval=1.0, timings=unlimited_kubelet(), dra=True
        )
        assert stage.cluster is not None
        async with stage:
            await stage.start_daemons(_TIMEOUT)
            await stage.wait_until_clean(_TIMEOUT)
            ids = tuple(each.id for each in (await stage.read_client.devices()).devices)
            yield cls(stage, stage.cluster, ids)

    async def start_pod(self) -> EmulatedPod:
        """Start a pod with a claim of one device, and wait until it runs; no process in it opens the device."""
        self._pods += 1
        spec = self.stage.gpu_pod(f"p{self._pods}", f"team-{self._pods % 4}", IDLE_CONTAINER)
        pod = await self.stage.run_pod(spec)
        await pod.wait(PodPhase.RUNNING, _TIMEOUT)
        return pod

    def seconds_of(self, call: str, pod: EmulatedPod) -> float:
        """Return the seconds of the kubelet's only call of this name for a pod.

        Raises:
            RuntimeError: there were several, or it failed.
        """
        calls = [each for each in self.stage.kubelet.events if each.name == call and each.pod_uid == pod.uid]
        if len(calls) != 1 or calls[0].outcome != "OK":
            raise RuntimeError(f"{call} was to be called once for {pod.full_name}, and these calls were made: {calls}")
        return calls[0].duration

    def requests_since(self, at: float) -> list[ApiRequest]:
        """Return the driver's requests since the time ``at`` of the event loop's clock."""
        return [each for each in self.cluster.server.log.requests if each.at >= at and each.account == DRIVER_ACCOUNT]


async def prepare_and_unprepare(node: ClaimNode, echo: Echo, *, samples: int) -> list[Timing]:
    """Start pods on clean devices, one after the other, and end them one after the other on the idle node.

    Unprepare is answered when the device is clean again. The first two pods open connections, and do not count.
    """
    message = _message()
    prepared: list[float] = []
    released: list[float] = []
    beside: tuple[list[float], list[float]] = ([], [])
    rounds = [2, *(min(len(node.devices), samples - at) for at in range(0, samples, len(node.devices)))]
    for number, count in enumerate(rounds):
        pods: list[EmulatedPod] = []
        echoes: tuple[list[float], list[float]] = ([], [])
        for _ in range(count):
            echoes[0].append(await echo(message))
            pods.append(await node.start_pod())
        await asyncio.sleep(_RUN)
        for pod in pods:
            echoes[1].append(await echo(message))
            await node.stage.kubelet.delete(pod, grace=0)
        await node.stage.wait_until_clean(_TIMEOUT)
        if number > 0:
            prepared += [node.seconds_of("NodePrepareResources", pod) for pod in pods]
            released += [node.seconds_of("NodeUnprepareResources", pod) for pod in pods]
            for all_of, new in zip(beside, echoes, strict=True):
                all_of.extend(new)
    return [
        Timing(f"claim.{name}", title, Quantiles.of(measured), Quantiles.of(reference), REFERENCE)
        for name, title, measured, reference in (
            ("prepare", "NodePrepareResources, a clean device", prepared, beside[0]),
            ("unprepare", f"NodeUnprepareResources with the scrub of {MEMORY}, the pod has ended", released, beside[1]),
        )
    ]


def _message() -> bytes:
    """Return the kubelet's message about one claim: the echo carries the same number of bytes."""
    claim = api.Claim(namespace="team-0", uid="00000000-0000-0000-0000-000000000000", name="p100-gpu-abcde")
    return api.NodePrepareResourcesRequest(claims=[claim]).SerializeToString()


async def fault_to_taint(node: ClaimNode, *, faults: int) -> Timing:
    """Measure from the write of the control file until the API server has the device with a taint, in seconds."""
    measured: list[float] = []
    while len(measured) < faults:
        for device in node.devices[: faults - len(measured)]:
            began = time.perf_counter()
            control.add_faults(node.stage.sim_dir, device, xid=_XID)
            await node.cluster.wait_for_taint(device, _TIMEOUT)
            measured.append(time.perf_counter() - began)
        await node.cluster.wait_for_schedulable(len(node.devices), _TIMEOUT)
    title = f"fault → taint in the ResourceSlice, {len(node.devices)} devices"
    return Timing(f"taint.devices-{len(node.devices)}", title, Quantiles.of(measured))


async def publication(node: ClaimNode, *, samples: int) -> tuple[Timing, list[Amount]]:
    """Delete all slices, as the kubelet does when it starts, and measure until the API server has all devices again."""
    cluster, loop = node.cluster, asyncio.get_running_loop()
    measured: list[float] = []
    requests: list[ApiRequest] = []
    for _ in range(samples):
        since, began = loop.time(), time.perf_counter()
        for item in cluster.api.list(SLICES):
            cluster.api.delete(SLICES, item["metadata"]["name"])
        await cluster.wait_for_schedulable(len(node.devices), _TIMEOUT)
        measured.append(time.perf_counter() - began)
        requests += [each for each in node.requests_since(since) if each.verb != "watch"]
    prefix, count = f"publication.devices-{len(node.devices)}", len(node.devices)
    title = f"{count} devices, {samples} times"
    sent = sum(each.received_bytes for each in requests) / samples
    return Timing(prefix, f"slices of {count} devices deleted → published again", Quantiles.of(measured)), [
        Amount(f"{prefix}.requests", f"requests to publish {title}", len(requests) / samples, ""),
        Amount(f"{prefix}.bytes", f"bytes sent to publish {title}", sent / 1000, "kB"),
    ]


async def at_rest(node: ClaimNode, *, seconds: float) -> list[Amount]:
    """Measure the driver's requests to the API server, besides watches, and both daemons' CPU time and memory."""
    since, began = asyncio.get_running_loop().time(), time.monotonic()
    title = f"DRA driver, {len(node.devices)} devices"
    amounts = await footprint.at_rest(node.stage, seconds=seconds, name="claim-idle", title=title)
    requests = [each for each in node.requests_since(since) if each.verb != "watch"]
    rate = 60 * len(requests) / (time.monotonic() - began)
    return [*amounts, Amount("claim-idle.requests", f"requests to the API server at rest, {title}", rate, "a minute")]
