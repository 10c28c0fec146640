"""The parts of this package, put together for the composition root."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

from plugin.announcements import Announce
from plugin.injection import Injection
from plugin.logs import Log
from plugin.server import Gatekeeper, Streams
from plugin.upstream.front import Front
from plugin.upstream.reception import Reception, ReceptionTimes, check_directory
from plugin.upstream.server import BehindOurs
from plugin.upstream.upstream import UpstreamTimes
from plugin.upstream.vendor import VendorTimes
from scrubber.ports.runtime import UNTRACED, Tracer

__all__ = ["Behind", "BehindTimes"]


@dataclass(frozen=True, slots=True)
class BehindTimes:
    """All durations of this package."""

    upstream: UpstreamTimes = field(default_factory=UpstreamTimes)
    vendor: VendorTimes = field(default_factory=VendorTimes)
    reception: ReceptionTimes = field(default_factory=ReceptionTimes)


class Behind:
    """Vendors' plugins behind ours.

    Args:
        directory: where they are to register.
        kubelet_dir: the real kubelet's.
        clock: monotonic seconds.
        tracer: is told of every allocation and every start.

    Attributes:
        front: the node's devices, and a list for each resource.

    Raises:
        BadConfiguration: the directory cannot be ours.
    """

    def __init__(
        self,
        directory: Path,
        kubelet_dir: Path,
        *,
        times: BehindTimes,
        injection: Injection,
        announce: Announce,
        log: Log,
        clock: Callable[[], float],
        tracer: Tracer = UNTRACED,
    ) -> None:
        check_directory(directory, kubelet_dir)
        self.front = Front(announce=announce, times=times.upstream, log=log, clock=clock)
        self._reception = Reception(
            directory, self.front, times.reception, times.vendor, log, lambda: secrets.token_hex(4), clock
        )
        self._injection = injection
        self._log = log
        self._clock = clock
        self._tracer = tracer

    async def run(self) -> NoReturn:
        """Take and follow registrations, until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._reception.run(), name="vendors' registrations")
            await self.front.run()

    def plugin(self, resource: str, gate: Gatekeeper, streams: Streams) -> BehindOurs:
        """The servicer of one incarnation for one resource of :attr:`front`."""
        return BehindOurs(
            self.front.upstreams[resource],
            self.front,
            gate,
            streams=streams,
            log=self._log,
            injection=self._injection,
            clock=self._clock,
            tracer=self._tracer,
        )
