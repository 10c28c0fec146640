"""An ordinary device plugin without scrubbing: the "before" of the demo.

Promise: its containers get the same mounts and the same environment as from the real plugin, so that the gate is the
only difference in the scenario. Every device is always healthy, no service is queried, and the plugin requests no call
before a start.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import grpc

from plugin.api import deviceplugin_pb2 as kubelet
from plugin.kubelet.devices import AdvertisedDevice, AdvertisedDevices, ServiceVerdict
from plugin.kubelet.registration import KubeletPaths, Registrar, RegistrationMode, RegistrationTimes
from plugin.kubelet.server import DevicePlugin, ListAndWatchStreams
from plugin.logs import Logger, create_logger
from scrubber.domain.device import Access, AccessKind
from scrubber.ports.runtime import Span

__all__ = ["UngatedPlugin", "read_sim_devices"]


def read_sim_devices(sim_dir: Path) -> tuple[AdvertisedDevice, ...]:
    """Return the devices of the simulated node at ``sim_dir``, each with the file ``devices/<index>/memory``.

    Raises:
        FileNotFoundError: there is no simulated node.
    """
    devices = []
    for description in sorted((sim_dir / "devices").iterdir()):
        index = description.name
        id_ = json.loads((description / "device.json").read_text())["id"]
        mount = Access(AccessKind.MOUNT, str(description / "memory"), f"/dev/simgpu{index.replace(':', '-')}")
        devices.append(
            AdvertisedDevice(id=id_, index=index, verdict=ServiceVerdict.ADVERTISED, healthy=True, access=(mount,))
        )
    return tuple(devices)


class _OpenGate:
    """A gate that allows everything."""

    async def reserve(self, device_ids: Sequence[str], resource: str, span: Span) -> None:
        return

    async def hand_over(self, device_ids: Sequence[str], resource: str, deadline: float | None, span: Span) -> None:
        return


class _UngatedServicer(DevicePlugin):
    async def GetDevicePluginOptions(
        self, request: kubelet.Empty, context: grpc.aio.ServicerContext[kubelet.Empty, kubelet.DevicePluginOptions]
    ) -> kubelet.DevicePluginOptions:
        return kubelet.DevicePluginOptions(pre_start_required=False, get_preferred_allocation_available=False)


class UngatedPlugin:
    """Runs in the caller's event loop. Use as ``async with``; it starts to register when entered."""

    def __init__(
        self,
        kubelet_dir: Path,
        devices: Iterable[AdvertisedDevice],
        *,
        resource_name: str = "scrubber.dev/gpu",
        log: Logger | None = None,
        times: RegistrationTimes | None = None,
    ) -> None:
        log = log or create_logger("json", "error")
        self._devices = tuple(devices)
        self._advertised = AdvertisedDevices()
        self._resource = resource_name
        self._registrar = Registrar(
            KubeletPaths(kubelet_dir.absolute(), resource_name),
            RegistrationMode.CLASSIC,
            plugin=lambda streams: self._servicer(streams, log),
            advertised=self._advertised,
            times=times or RegistrationTimes(),
            token=lambda: secrets.token_hex(4),
            log=log,
            clock=time.monotonic,
        )
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        await self._advertised.update(self._devices, epoch="ungated")
        self._task = asyncio.create_task(self._registrar.run(), name="ungated plugin")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})
            if not self._task.cancelled():
                self._task.result()

    def _servicer(self, streams: ListAndWatchStreams, log: Logger) -> DevicePlugin:
        return _UngatedServicer(self._resource, self._advertised, _OpenGate(), streams=streams, log=log)
