"""The scrub service as the plugin sees it: what is asked of it, and the task that follows what it says.

Promise: no data is never healthy for longer than the grace period. A service that holds the stream open but answers
nothing (stopped, hung) counts as away, exactly as one that is gone.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import NoReturn, Protocol

from plugin.kubelet.devices import AdvertisedDevice, AdvertisedDevices, Availability, ServiceVerdict
from plugin.logs import Logger, WaitLogger
from plugin.nvidia.injection import has_nvidia_node
from plugin.observers import NullObserver, ServiceObserver
from scrubber.api import scrubber_pb2 as pb
from scrubber.domain.device import Access, AccessKind
from scrubber.domain.errors import InvalidConfiguration, ScrubberError, Unavailable

__all__ = ["ScrubService", "ServiceWatch", "WatchTimes", "advertised_devices"]


class ScrubService(Protocol):
    """The questions of the plugin's socket; :class:`scrubber.api.client.PluginClient` answers them.

    All raise the errors of :mod:`scrubber.domain.errors`; :class:`Unavailable` when nobody answers within ``timeout`` seconds.
    """

    async def snapshot(self, timeout: float) -> pb.Snapshot: ...

    def watch_snapshots(self) -> AsyncIterator[pb.Snapshot]: ...

    async def announce(self, resource: str, mapping: Mapping[str, str], timeout: float) -> pb.AnnounceResponse: ...

    async def reserve(self, device_ids: Sequence[str], timeout: float, *, resource: str = "") -> pb.ReserveResponse: ...

    async def hand_over(
        self,
        device_ids: Sequence[str],
        *,
        wait_seconds: float,
        reserved_unseen: Sequence[str] = (),
        resource: str = "",
        timeout: float,
    ) -> pb.HandOverResponse: ...


_KINDS = frozenset(AccessKind)


ENVVAR_REFUSED = (
    "Device {id} is not handed out: the policy refuses devices that are announced by an environment variable, which any "
    "pod can set. Start the plugin with another --device-list-strategy."
)


SERVICE_AWAY_TOO_LONG = (
    "No scrub service that is ready was there for {grace:g} s: the device is withheld until one says that it may be "
    "given out."
)
NO_SERVICE_YET = "No scrub service that is ready has said anything of the device yet."


def advertised_devices(snapshot: pb.Snapshot, *, uses_envvar: bool = False) -> tuple[AdvertisedDevice, ...]:
    """The devices of a snapshot, with its verdict.

    A device whose way into a container is of a kind that this plugin does not know is withheld: it could be allocated,
    but not used. So is a GPU that this plugin would announce by an environment variable (``uses_envvar``) although the
    policy refuses that: to refuse only its allocation would fail one pod after the other.
    """
    return tuple(_advertised(device, uses_envvar and snapshot.envvar_refused) for device in snapshot.devices)


def _advertised(device: pb.SnapshotDevice, envvar_refused: bool) -> AdvertisedDevice:
    known, strange = _access_of(device), sorted({access.kind for access in device.access} - _KINDS)
    forgeable = envvar_refused and has_nvidia_node(known)
    offered = device.advertised and not strange and not forgeable
    refusal = device.refusal
    if forgeable:
        refusal = refusal or ENVVAR_REFUSED.format(id=device.id)
    if strange:
        refusal = (
            f"Device {device.id} is reached by {strange[0]!r}, which this plugin does not know: update the plugin."
        )
    return AdvertisedDevice(
        id=device.id,
        index=device.index,
        verdict=ServiceVerdict.OFFERED if offered else ServiceVerdict.WITHHELD,
        certified=device.certified,
        scrubbing=device.scrubbing,
        numa_node=device.numa_node if device.HasField("numa_node") else None,
        peers=frozenset(device.peers),
        parent=device.parent,
        profile=device.profile,
        pci_address=device.pci_address,
        access=known,
        refusal="" if offered else refusal or f"Device {device.id} is out of service.",
    )


def _access_of(device: pb.SnapshotDevice) -> tuple[Access, ...]:
    """What a container is given with ``device``, without what this plugin does not know."""
    return tuple(
        Access(AccessKind(each.kind), each.host_path, each.container_path)
        for each in device.access
        if each.kind in _KINDS
    )


def _forgeable(snapshot: pb.Snapshot) -> bool:
    """Whether the policy refuses GPUs that are announced by an environment variable, and there are such GPUs."""
    return snapshot.envvar_refused and any(has_nvidia_node(_access_of(each)) for each in snapshot.devices)


@dataclass(frozen=True, slots=True)
class WatchTimes:
    """Seconds.

    Attributes:
        grace: that health outlives the service.
        heartbeat: of silence on the stream after which the service is asked whether it is there.
        probe: that it may take to answer that.
        retry: between attempts to reach a service that is away.
        log_interval: between log lines about that.
    """

    grace: float = 10.0
    heartbeat: float = 5.0
    probe: float = 2.0
    retry: float = 0.2
    log_interval: float = 30.0


class ServiceWatch:
    """Follows the service's snapshots and says what the kubelet is to see.

    Args:
        uses_envvar: containers are told of their devices by an environment variable; see :func:`advertised_devices`.
        on_snapshot: is passed each snapshot, and None when no service that is ready was there for the grace period.
        clock: monotonic seconds.

    Attributes:
        was_ready: a service that is ready has been heard since the start.
    """

    def __init__(
        self,
        service: ScrubService,
        advertised: AdvertisedDevices,
        *,
        times: WatchTimes,
        log: Logger,
        clock: Callable[[], float],
        uses_envvar: bool = False,
        on_snapshot: Callable[[pb.Snapshot | None], None] | None = None,
        observer: ServiceObserver | None = None,
    ) -> None:
        self._observer = observer or NullObserver()
        self._service = service
        self._advertised = advertised
        self._times = times
        self._clock = clock
        self._uses_envvar = uses_envvar
        self._on_snapshot = on_snapshot or (lambda _: None)
        self._log = log
        self._reminder = WaitLogger(log, every=times.log_interval, clock=clock)
        self._availability = Availability(grace=times.grace)
        self._forgeable = False
        self._grace_expired = True
        self.was_ready = False
        self._changed = asyncio.Event()

    async def run(self) -> NoReturn:
        """Until cancelled.

        Raises:
            ExceptionGroup: with :class:`InvalidConfiguration` when what is to be the service's socket is none.
        """
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._expire_grace_period(), name="availability")
            while True:
                try:
                    await self._follow()
                except InvalidConfiguration:
                    raise
                except ScrubberError as error:
                    self._observer.on_service_status(up=False)
                    self._reminder.log_waiting("service.away", sentence=str(error))
                self._availability = self._availability.on_disconnect(self._clock())
                if self._advertised.version > 0:
                    await self._advertise()
                await asyncio.sleep(self._times.retry)

    async def _follow(self) -> NoReturn:
        """Take in one stream of snapshots.

        Raises:
            ScrubberError: the stream is over, or the service was silent and did not answer when asked.
        """
        stream = self._service.watch_snapshots()
        coming = asyncio.ensure_future(anext(stream, None))
        try:
            while True:
                done, _ = await asyncio.wait({coming}, timeout=self._times.heartbeat)
                if not done:
                    await self._apply_snapshot(await self._service.snapshot(timeout=self._times.probe))
                    continue
                snapshot = coming.result()
                if snapshot is None:
                    raise Unavailable("The scrub service ended its stream of snapshots.")
                await self._apply_snapshot(snapshot)
                coming = asyncio.ensure_future(anext(stream, None))
        finally:
            coming.cancel()
            await asyncio.gather(coming, return_exceptions=True)

    async def _apply_snapshot(self, snapshot: pb.Snapshot) -> None:
        self._observer.on_service_status(up=True)
        before = self._availability
        self._availability = before.on_snapshot(
            advertised_devices(snapshot, uses_envvar=self._uses_envvar),
            epoch=snapshot.epoch,
            version=snapshot.version,
            ready=snapshot.ready,
            now=self._clock(),
        )
        self._reminder.log_ended("service.there", epoch=snapshot.epoch, ready=snapshot.ready)
        if before.epoch != snapshot.epoch:
            self._log.info("service.followed", epoch=snapshot.epoch, devices=len(snapshot.devices))
        forgeable = self._uses_envvar and _forgeable(snapshot)
        if forgeable and not self._forgeable:
            self._log.error(
                "policy.envvar-refused",
                sentence="The policy refuses devices that are announced by an environment variable: no GPU is handed out.",
                cure="start the plugin with --device-list-strategy volume-mounts, cdi-annotations or cdi-cri",
            )
        self._forgeable = forgeable
        self._grace_expired = self._grace_expired and self._availability.not_ready_since is not None
        await self._advertise()
        self.was_ready = self.was_ready or snapshot.ready
        self._on_snapshot(snapshot)

    async def _advertise(self) -> None:
        before = {device.id: device.healthy for device in self._advertised.devices}
        await self._advertised.update(self._availability.devices(self._clock()), self._availability.epoch)
        for device in self._advertised.devices:
            if before.get(device.id) is not device.healthy:
                self._log_health(device)
        self._changed.set()

    def _log_health(self, device: AdvertisedDevice) -> None:
        """A line about what the kubelet is told of one device from now on."""
        if device.healthy:
            self._log.info("device.healthy", device=device.id, word=device.verdict.value, sentence=None)
            return
        verdict, message = device.verdict, device.refusal
        if verdict is ServiceVerdict.OFFERED:
            # The last verdict outlives the service by the grace period only; what is withheld then is the plugin's doing.
            verdict, message = ServiceVerdict.WITHHELD, SERVICE_AWAY_TOO_LONG.format(grace=self._times.grace)
        elif verdict is ServiceVerdict.NONE:
            message = NO_SERVICE_YET
        self._log.warning("device.unhealthy", device=device.id, word=verdict.value, sentence=message)

    async def _expire_grace_period(self) -> NoReturn:
        """Show the devices anew at the end of the grace period; without it, silence would keep everything healthy."""
        while True:
            self._changed.clear()
            now = self._clock()
            if self._availability.is_expired(now) and not self._grace_expired:
                self._grace_expired = True
                self._log.error("service.given-up", sentence="No device is offered until the scrub service is back.")
                await self._advertise()
                self._on_snapshot(None)
            with suppress(TimeoutError):
                async with asyncio.timeout(self._availability.seconds_until_expiry(now)):
                    await self._changed.wait()
