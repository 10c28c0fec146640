"""The kubelet's side of one registered plugin: a connection that is dialled once and never again.

Promise: every call has the deadline that the kubelet sets for it, and no call is made after the connection was closed.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Collection
from pathlib import Path

import grpc

from plugin.api import deviceplugin_pb2 as api
from plugin.api import deviceplugin_pb2_grpc as rpc
from scrubber.emulator import sockets
from scrubber.emulator.devicestore import HEALTHY
from scrubber.emulator.events import CHANNEL_CLOSED, KubeletEvent, Recorder, go_code_name, is_task_cancelled, sorted_ids
from scrubber.emulator.timings import KubeletTimings

VERSION = "v1beta1"


class DialFailed(Exception):
    """There was no reply at the plugin's socket in time."""


class DevicePluginClient:
    """One incarnation of one plugin, for one resource."""

    def __init__(
        self, resource: str, socket: Path, timings: KubeletTimings, recorder: Recorder, rng: random.Random
    ) -> None:
        self.resource = resource
        self.socket = socket
        self._timings = timings
        self._recorder = recorder
        self._rng = rng
        self._channel = sockets.channel(socket)
        self._plugin = rpc.DevicePluginStub(self._channel)

    async def dial(self) -> None:
        """Connect; ``Register`` waits meanwhile.

        Raises:
            DialFailed: no server behind the socket within ``timings.dial_back``, or the connection was closed.
        """
        try:
            async with asyncio.timeout(self._timings.dial_back):
                await self._channel.channel_ready()
        except TimeoutError as error:
            await self.close()
            raise DialFailed(f"failed to dial device plugin socket {self.socket}: context deadline exceeded") from error
        except grpc.aio.UsageError as error:  # the channel was closed
            raise DialFailed(f"failed to dial device plugin socket {self.socket}: {CHANNEL_CLOSED}") from error

    async def get_options(self) -> api.DevicePluginOptions:
        """Return the plugin's options; the kubelet uses no others.

        Raises:
            RpcFailed: the plugin refused or disconnected.
        """
        event = self._event("GetDevicePluginOptions")
        return await self._recorder.call(event, lambda: self._plugin.GetDevicePluginOptions(api.Empty()))

    async def watch(self, on_devices: Callable[[Collection[api.Device]], None]) -> None:
        """Follow ``ListAndWatch`` until the stream ends, for any reason, and record how it ended."""
        clock = asyncio.get_running_loop().time
        begun = clock()
        outcome, detail = "OK", ""
        try:
            async for response in self._plugin.ListAndWatch(api.Empty()):
                ids = sorted_ids([device.ID for device in response.devices])
                healthy = sum(device.health == HEALTHY for device in response.devices)
                detail = f"{healthy} of {len(ids)} healthy"
                self._recorder.record(
                    KubeletEvent(clock(), "ListAndWatch", resource=self.resource, devices=ids, detail=detail)
                )
                on_devices(response.devices)
        except grpc.aio.AioRpcError as error:
            outcome, detail = go_code_name(error.code()), error.details() or ""
        except (asyncio.CancelledError, grpc.aio.UsageError):  # UsageError: the channel was closed by then
            outcome, detail = go_code_name(grpc.StatusCode.CANCELLED), "the kubelet closed the connection"
            if is_task_cancelled():
                raise
        finally:
            self._recorder.record(
                KubeletEvent(clock(), "StreamEnded", outcome, clock() - begun, self.resource, detail=detail)
            )

    async def get_preferred_allocation(
        self, available: Collection[str], must_include: Collection[str], size: int
    ) -> set[str]:
        """Ask the plugin which of ``available`` it prefers; no deadline. The plugin may return fewer than ``size``.

        Raises:
            RpcFailed: the plugin refused or disconnected.
        """
        request = api.ContainerPreferredAllocationRequest(
            available_deviceIDs=self._shuffled(available),
            must_include_deviceIDs=self._shuffled(must_include),
            allocation_size=size,
        )
        response: api.PreferredAllocationResponse = await self._recorder.call(
            self._event("GetPreferredAllocation", available),
            lambda: self._plugin.GetPreferredAllocation(api.PreferredAllocationRequest(container_requests=[request])),
        )
        return set(response.container_responses[0].deviceIDs) if response.container_responses else set()

    async def allocate(self, devices: Collection[str], *, pod: str, uid: str, container: str) -> api.AllocateResponse:
        """Allocate one container's devices; no deadline.

        The pod's name is for the record only: the plugin does not get it.

        Raises:
            RpcFailed: the plugin refused or disconnected.
        """
        request = api.ContainerAllocateRequest(devices_ids=self._shuffled(devices))
        return await self._recorder.call(
            self._event("Allocate", devices, pod, uid, container),
            lambda: self._plugin.Allocate(api.AllocateRequest(container_requests=[request])),
        )

    async def pre_start(self, devices: Collection[str], *, pod: str, uid: str, container: str) -> None:
        """Announce a container's start, within ``timings.pre_start_deadline``.

        Raises:
            RpcFailed: the plugin refused, disconnected or took too long.
        """
        request = api.PreStartContainerRequest(devices_ids=self._shuffled(devices))
        await self._recorder.call(
            self._event("PreStartContainer", devices, pod, uid, container),
            lambda: self._plugin.PreStartContainer(request, timeout=self._timings.pre_start_deadline),
        )

    async def close(self) -> None:
        """Close the connection; calls in progress end as cancelled."""
        await self._channel.close()

    def _event(
        self, name: str, devices: Collection[str] = (), pod: str = "", uid: str = "", container: str = ""
    ) -> KubeletEvent:
        return KubeletEvent(
            0.0,
            name,
            resource=self.resource,
            devices=sorted_ids(list(devices)),
            pod=pod,
            pod_uid=uid,
            container=container,
        )

    def _shuffled(self, ids: Collection[str]) -> list[str]:
        """Return the ids in a random order: Go's sets have none, so the order differs from message to message."""
        mixed = sorted(ids)
        self._rng.shuffle(mixed)
        return mixed
