"""The node under test: the demo's playground, and the kubelet's end of the plugin's socket.

Invariant: the benchmark process is the kubelet, as in production. It serves registration and PodResources, follows
``ListAndWatch``, admits pods whose containers are real processes, and calls the plugin. The plugin registers by the
protocol; the timed calls use another connection to its socket, without the emulator's bookkeeping.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import grpc

from plugin.api import deviceplugin_pb2 as api
from plugin.api import deviceplugin_pb2_grpc as rpc
from scrubber.emulator.playground import Playground, fast_kubelet_timings, gpu_pod_spec
from scrubber.emulator.pods import EmulatedPod, PodPhase
from scrubber.emulator.timings import KubeletTimings

__all__ = ["IDLE_CONTAINER", "MEMORY", "BenchNode", "hand_over_message", "other_processes", "unlimited_kubelet"]

MEMORY = "1MiB"
"""Memory of each device where its size is irrelevant."""
IDLE_CONTAINER = ("sleep", "infinity")
_TIMEOUT = 120.0


class BenchNode:
    """A playground whose daemons are running and whose devices are all clean.

    Attributes:
        devices: ids, in the order of the devices' indices.
        plugin: the plugin's five calls.
        metrics_port: the port of the service's metrics; 0 if it serves none.
    """

    def __init__(self, stage: Playground, devices: Sequence[str], plugin: rpc.DevicePluginStub, metrics: int) -> None:
        self.metrics_port = metrics
        self.stage = stage
        self.devices = tuple(devices)
        self.plugin = plugin
        self._pods = 0

    @classmethod
    @asynccontextmanager
    async def start(
        cls, devices: int, *, memory: str = MEMORY, policy: str = "default", watch_interval: float = 1.0
    ) -> AsyncIterator[BenchNode]:
        """Run a node of ``devices`` devices, each scrubbed once.

        Args:
            watch_interval: of the service, in seconds; by default its own default.
        """
        stage = Playground(
            devices=devices, memory=memory, policy=policy, watch_interval=watch_interval, timings=unlimited_kubelet()
        )
        metrics = _free_port()
        stage.service.arguments = (*stage.service.arguments, "--metrics-address", f"127.0.0.1:{metrics}")
        async with cls.on(stage, metrics) as node:
            yield node

    @classmethod
    @asynccontextmanager
    async def on(cls, stage: Playground, metrics: int = 0) -> AsyncIterator[BenchNode]:
        """Run the node of ``stage``; ``metrics`` is the port of the service's metrics."""
        async with stage:
            await stage.start_daemons(_TIMEOUT)
            await stage.wait_until_clean(_TIMEOUT)
            ids = [each.id for each in (await stage.read_client.devices()).devices]
            async with grpc.aio.insecure_channel(f"unix:{_plugin_socket(stage)}") as channel:
                yield cls(stage, ids, rpc.DevicePluginStub(channel), metrics)

    async def start_pods(self, count: int, *, gpus: int = 1) -> list[EmulatedPod]:
        """Start ``count`` pods with ``gpus`` devices each, and wait until they run; no process in them opens the device."""
        pods = []
        for _ in range(count):
            self._pods += 1
            spec = gpu_pod_spec(f"p{self._pods}", f"team-{self._pods % 4}", IDLE_CONTAINER, gpus=gpus)
            pod = await self.stage.kubelet.run(spec)
            await pod.wait(PodPhase.RUNNING, _TIMEOUT)
            pods.append(pod)
        return pods

    async def end_pods(self, pods: Sequence[EmulatedPod]) -> None:
        """End ``pods``, and wait until every device is certified clean again."""
        await asyncio.gather(*(self.stage.kubelet.delete(pod, grace=0) for pod in pods))
        await self.stage.wait_for_devices(lambda devices: all(each.state == "clean" for each in devices), _TIMEOUT)

    async def pre_start(self, pod: EmulatedPod) -> float:
        """Return the seconds of ``PreStartContainer``, as before a restart of the pod's container."""
        return await self._timed_pre_start(pod.device_ids)

    async def allocate(self, device: str) -> float:
        """Return the seconds of ``Allocate`` for one device."""
        request = api.AllocateRequest(container_requests=[api.ContainerAllocateRequest(devices_ids=[device])])
        began = time.perf_counter()
        await self.plugin.Allocate(request)
        return time.perf_counter() - began

    async def _timed_pre_start(self, devices: Sequence[str]) -> float:
        request = api.PreStartContainerRequest(devices_ids=devices)
        began = time.perf_counter()
        await self.plugin.PreStartContainer(request, timeout=30.0)
        return time.perf_counter() - began


def hand_over_message(device: str) -> bytes:
    """Return the kubelet's message before a container of one device starts: the echo carries the same bytes."""
    return api.PreStartContainerRequest(devices_ids=[device]).SerializeToString()


@contextlib.asynccontextmanager
async def other_processes(count: int) -> AsyncIterator[None]:
    """Run ``count`` unrelated processes that sleep."""
    script = f"for n in $(seq {count}); do sleep infinity & done; echo started; wait"
    shell = await asyncio.create_subprocess_exec(
        "/bin/sh", "-c", script, stdout=asyncio.subprocess.PIPE, start_new_session=True
    )
    try:
        assert shell.stdout is not None
        await shell.stdout.readline()
        yield
    finally:
        os.killpg(shell.pid, signal.SIGKILL)
        await shell.wait()


def unlimited_kubelet() -> KubeletTimings:
    """Return timings of a kubelet without rate limits: samples arrive faster than hand-overs in production."""
    return replace(
        fast_kubelet_timings(),
        pod_resources_per_second=100_000,
        pod_resources_burst=1_000,
        sandbox_setup=0.0,
        image_pull=0.0,
    )


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def _plugin_socket(stage: Playground) -> Path:
    kubelet = stage.kubelet
    found = [
        path
        for directory in (kubelet.plugins_registry, kubelet.device_plugins)
        for path in directory.glob("scrubber-*.sock")
    ]
    if len(found) != 1:
        raise RuntimeError(f"one plugin is to be registered, and {len(found)} sockets of plugins were found")
    return found[0]
