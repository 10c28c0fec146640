"""What the kubelet calls: claims in both versions of the protocol, and the stream of the devices' health.

Both versions have the same messages in different packages, and one implementation answers both.
"""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import suppress
from types import ModuleType
from typing import Any, Protocol

import grpc

from plugin.api import (
    dra_health_pb2,
    dra_health_pb2_grpc,
    dra_v1_pb2,
    dra_v1_pb2_grpc,
    dra_v1beta1_pb2,
    dra_v1beta1_pb2_grpc,
)
from plugin.dra.claim_driver import ClaimAnswer
from plugin.dra.claims import ClaimIdentity
from plugin.dra.device_names import device_names
from plugin.kubelet.devices import AdvertisedDevice, AdvertisedDevices, ServiceVerdict

__all__ = ["HEALTH_INTERVAL", "ClaimCalls", "HealthStream", "add_driver_services"]

HEALTH_INTERVAL = 5.0
"""Seconds between two messages of a health stream without changes.

A device's health is unknown to the kubelet 30 s after the last message. The end of another instance's stream, in a
rolling update, makes the kubelet forget what this one sent.
"""

_MAX_MESSAGE_CHARS = 1024

_Context = grpc.aio.ServicerContext[Any, Any]


class ClaimCalls(Protocol):
    """Answers about claims by their UIDs; :class:`plugin.dra.claim_driver.ClaimDriver`."""

    async def prepare(self, claims: Sequence[ClaimIdentity], remaining: float | None) -> Mapping[str, ClaimAnswer]: ...

    async def unprepare(
        self, claims: Sequence[ClaimIdentity], remaining: float | None
    ) -> Mapping[str, ClaimAnswer]: ...


def add_driver_services(server: grpc.aio.Server, calls: ClaimCalls, health: HealthStream) -> None:
    """Have ``server`` answer the kubelet's calls in every version, and its health stream."""
    dra_v1_pb2_grpc.add_DRAPluginServicer_to_server(_Driver(dra_v1_pb2, calls), server)
    dra_v1beta1_pb2_grpc.add_DRAPluginServicer_to_server(_Driver(dra_v1beta1_pb2, calls), server)
    dra_health_pb2_grpc.add_DRAResourceHealthServicer_to_server(health, server)


class _Driver:
    """Answers the calls of one version of the protocol, whose messages are in ``messages``."""

    def __init__(self, messages: ModuleType, calls: ClaimCalls) -> None:
        self._messages = messages
        self._calls = calls

    async def NodePrepareResources(self, request: Any, context: _Context) -> Any:
        answers = await self._calls.prepare(_refs(request), context.time_remaining())
        return self._messages.NodePrepareResourcesResponse(
            claims={uid: self._prepared(answer) for uid, answer in answers.items()}
        )

    async def NodeUnprepareResources(self, request: Any, context: _Context) -> Any:
        answers = await self._calls.unprepare(_refs(request), context.time_remaining())
        return self._messages.NodeUnprepareResourcesResponse(
            claims={
                uid: self._messages.NodeUnprepareResourceResponse(error=answer.error) for uid, answer in answers.items()
            }
        )

    def _prepared(self, answer: ClaimAnswer) -> Any:
        return self._messages.NodePrepareResourceResponse(
            error=answer.error,
            devices=[
                self._messages.Device(
                    request_names=each.requests,
                    pool_name=each.pool,
                    device_name=each.name,
                    cdi_device_ids=each.cdi_ids,
                    share_id=each.share_id or None,
                )
                for each in answer.devices
            ],
        )


def _refs(request: Any) -> list[ClaimIdentity]:
    return [ClaimIdentity(each.namespace, each.name, each.uid) for each in request.claims]


class HealthStream(dra_health_pb2_grpc.DRAResourceHealthServicer):
    """Sends the health of all devices at every change, and at least every ``interval`` seconds.

    Args:
        wall_clock: seconds since the epoch.
    """

    def __init__(
        self,
        pool: str,
        devices: AdvertisedDevices,
        *,
        interval: float = HEALTH_INTERVAL,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._pool = pool
        self._devices = devices
        self._interval = interval
        self._wall_clock = wall_clock

    async def NodeWatchResources(
        self, request: dra_health_pb2.NodeWatchResourcesRequest, context: _Context
    ) -> AsyncIterator[dra_health_pb2.NodeWatchResourcesResponse]:
        while True:
            sent = self._devices.version
            yield self._response()
            with suppress(TimeoutError):
                async with asyncio.timeout(self._interval):
                    await self._devices.wait_until(functools.partial(self._has_changed, sent))

    def _has_changed(self, sent: int) -> bool:
        return self._devices.version > sent

    def _response(self) -> dra_health_pb2.NodeWatchResourcesResponse:
        devices = self._devices.devices
        names = device_names(device.id for device in devices)
        now = int(self._wall_clock())
        return dra_health_pb2.NodeWatchResourcesResponse(
            devices=[
                dra_health_pb2.DeviceHealth(
                    device=dra_health_pb2.DeviceIdentifier(pool_name=self._pool, device_name=names[device.id]),
                    health=_health(device),
                    last_updated_time=now,
                    message=device.refusal[:_MAX_MESSAGE_CHARS],
                )
                for device in devices
            ]
        )


def _health(device: AdvertisedDevice) -> dra_health_pb2.HealthStatus:
    if device.healthy:
        return dra_health_pb2.HEALTHY
    return dra_health_pb2.UNKNOWN if device.verdict is ServiceVerdict.UNKNOWN else dra_health_pb2.UNHEALTHY
