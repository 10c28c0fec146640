"""Assembles the parts of this package for the composition root."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

from plugin.kubelet.server import Gatekeeper, ListAndWatchStreams
from plugin.logs import Logger
from plugin.nvidia.injection import NvidiaInjection
from plugin.resource_mapping import PublishMapping
from plugin.upstream.devices import UpstreamDevices
from plugin.upstream.registry import UpstreamRegistry, UpstreamRegistryTimes, check_directory
from plugin.upstream.resource import UpstreamResourceTimes
from plugin.upstream.server import UpstreamDevicePlugin
from plugin.upstream.vendor import VendorTimes
from scrubber.ports.runtime import NOOP_TRACER, Tracer

__all__ = ["UpstreamProxy", "UpstreamProxyTimes"]


@dataclass(frozen=True, slots=True)
class UpstreamProxyTimes:
    """All durations of this package."""

    upstream: UpstreamResourceTimes = field(default_factory=UpstreamResourceTimes)
    vendor: VendorTimes = field(default_factory=VendorTimes)
    registry: UpstreamRegistryTimes = field(default_factory=UpstreamRegistryTimes)


class UpstreamProxy:
    """Runs vendors' plugins behind this plugin.

    Args:
        directory: where they must register.
        kubelet_dir: directory of the real kubelet.
        clock: monotonic seconds.
        tracer: records a span of every allocation and every start.

    Attributes:
        devices: the node's devices, and a list for each resource.

    Raises:
        InvalidConfiguration: the directory cannot be used.
    """

    def __init__(
        self,
        directory: Path,
        kubelet_dir: Path,
        *,
        times: UpstreamProxyTimes,
        injection: NvidiaInjection,
        publish_mapping: PublishMapping,
        log: Logger,
        clock: Callable[[], float],
        tracer: Tracer = NOOP_TRACER,
    ) -> None:
        check_directory(directory, kubelet_dir)
        self.devices = UpstreamDevices(publish_mapping=publish_mapping, times=times.upstream, log=log, clock=clock)
        self._registry = UpstreamRegistry(
            directory, self.devices, times.registry, times.vendor, log, lambda: secrets.token_hex(4), clock
        )
        self._injection = injection
        self._log = log
        self._clock = clock
        self._tracer = tracer

    async def run(self) -> NoReturn:
        """Accept and follow registrations, until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._registry.run(), name="vendors' registrations")
            await self.devices.run()

    def create_plugin(self, resource: str, gate: Gatekeeper, streams: ListAndWatchStreams) -> UpstreamDevicePlugin:
        """Return the servicer of one incarnation for one resource of :attr:`devices`."""
        return UpstreamDevicePlugin(
            self.devices.upstreams[resource],
            self.devices,
            gate,
            streams=streams,
            log=self._log,
            injection=self._injection,
            clock=self._clock,
            tracer=self._tracer,
        )
