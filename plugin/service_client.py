"""The scrub service as the plugin sees it: its requests, and the task that follows its snapshots.

Invariant: without data, no device stays healthy for longer than the grace period. A service that holds the stream open
but does not respond (stopped, hung) counts as away, exactly like one that has exited.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import NoReturn, Protocol

from plugin.device_selection import ALL_DEVICES, DeviceSelection
from plugin.kubelet.devices import AdvertisedDevice, AdvertisedDevices, Availability, ServiceVerdict
from plugin.logs import Logger, WaitLogger
from plugin.nvidia.injection import has_nvidia_node
from plugin.observers import NullObserver, ServiceObserver
from scrubber.api import scrubber_pb2 as pb
from scrubber.domain.device import Access, AccessKind
from scrubber.domain.errors import InvalidConfiguration, ScrubberError, Unavailable
from scrubber.domain.states import BindingState, TaintReason

__all__ = ["ScrubService", "ServiceWatch", "WatchTimes", "advertised_devices"]


class ScrubService(Protocol):
    """The requests of the plugin's socket; :class:`scrubber.api.client.PluginClient` implements them.

    All raise the errors of :mod:`scrubber.domain.errors`; :class:`Unavailable` when there is no response within
    ``timeout`` seconds.
    """

    async def snapshot(self, timeout: float) -> pb.Snapshot: ...

    def watch_snapshots(self) -> AsyncIterator[pb.Snapshot]: ...

    async def announce(
        self, resource: str, mapping: Mapping[str, str], timeout: float
    ) -> pb.SetResourceMappingResponse: ...

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
_BINDING_STATES = frozenset(BindingState)


ENVVAR_REFUSED = (
    "Device {id} is withheld: the policy forbids passing devices in an environment variable, because any pod can set it. "
    "Start the plugin with another --device-list-strategy."
)


SERVICE_AWAY_TOO_LONG = (
    "No ready scrub service was connected for {grace:g} s: the device is withheld until the service reports that it may "
    "be used."
)
NO_SERVICE_YET = "No ready scrub service has reported this device yet."


def advertised_devices(snapshot: pb.Snapshot, *, uses_envvar: bool = False) -> tuple[AdvertisedDevice, ...]:
    """Return the devices of a snapshot, with its verdict.

    A device with a kind of access that this plugin does not know is withheld: it could be allocated, but not used. A
    GPU that this plugin would announce by an environment variable (``uses_envvar``) although the policy refuses that is
    withheld as well: if only its allocation were refused, one pod after the other would fail.
    """
    return tuple(_advertised(device, uses_envvar and snapshot.envvar_refused) for device in snapshot.devices)


def _advertised(device: pb.SnapshotDevice, envvar_refused: bool) -> AdvertisedDevice:
    known, unknown_kinds = _access_of(device), sorted({access.kind for access in device.access} - _KINDS)
    forgeable = envvar_refused and has_nvidia_node(known)
    offered = device.advertised and not unknown_kinds and not forgeable
    refusal = device.refusal
    if forgeable:
        refusal = refusal or ENVVAR_REFUSED.format(id=device.id)
    if unknown_kinds:
        refusal = (
            f"Device {device.id} needs access of kind {unknown_kinds[0]!r}, which this plugin does not support: "
            "update the plugin."
        )
    return AdvertisedDevice(
        id=device.id,
        index=device.index,
        verdict=_verdict(device, known=not unknown_kinds and not forgeable),
        certified=device.certified,
        scrubbing=device.scrubbing,
        numa_node=device.numa_node if device.HasField("numa_node") else None,
        peers=frozenset(device.peers),
        parent=device.parent,
        profile=device.profile,
        pci_address=device.pci_address,
        model=device.model,
        memory_bytes=device.memory_bytes,
        driver_version=device.driver_version,
        taints=tuple(TaintReason(each.reason, each.evicts) for each in device.taints),
        binding=_binding(device, known=not unknown_kinds and not forgeable),
        access=known,
        refusal="" if offered else refusal or f"Device {device.id} is out of service.",
    )


def _verdict(device: pb.SnapshotDevice, *, known: bool) -> ServiceVerdict:
    """Return the verdict on a device; ``known``: whether this plugin itself has no reason to withhold it."""
    if not known:
        return ServiceVerdict.WITHHELD
    if device.advertised:
        return ServiceVerdict.ADVERTISED
    return ServiceVerdict.HELD if device.withheld else ServiceVerdict.WITHHELD


def _binding(device: pb.SnapshotDevice, *, known: bool) -> BindingState | None:
    """Return the service's word; ``known``: whether this plugin itself has no reason to withhold the device."""
    if not known:
        return BindingState.OUT_OF_SERVICE
    return BindingState(device.binding) if device.binding in _BINDING_STATES else None


def _access_of(device: pb.SnapshotDevice) -> tuple[Access, ...]:
    """Return how a container accesses ``device``, without the kinds that this plugin does not know."""
    return tuple(
        Access(AccessKind(each.kind), each.host_path, each.container_path)
        for each in device.access
        if each.kind in _KINDS
    )


def _forgeable(snapshot: pb.Snapshot) -> bool:
    """Return whether the policy refuses GPUs announced by an environment variable, and there are such GPUs."""
    return snapshot.envvar_refused and any(has_nvidia_node(_access_of(each)) for each in snapshot.devices)


@dataclass(frozen=True, slots=True)
class WatchTimes:
    """Times of the watch, in seconds.

    Attributes:
        grace: how long health remains valid after the service is lost.
        heartbeat: silence on the stream after which the service is probed.
        probe: how long the service may take to respond to the probe.
        retry: between attempts to reach a service that is away.
        log_interval: between log lines about that.
    """

    grace: float = 10.0
    heartbeat: float = 5.0
    probe: float = 2.0
    retry: float = 0.2
    log_interval: float = 30.0


class ServiceWatch:
    """Follows the service's snapshots and updates what the kubelet sees.

    Args:
        uses_envvar: containers learn their devices from an environment variable; see :func:`advertised_devices`.
        selection: the devices that this daemon offers; it ignores the others.
        on_snapshot: called with each snapshot, and with None when no service was ready during the grace period.
        clock: monotonic seconds.

    Attributes:
        was_ready: a ready service has been seen since the start.
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
        selection: DeviceSelection = ALL_DEVICES,
        on_snapshot: Callable[[pb.Snapshot | None], None] | None = None,
        observer: ServiceObserver | None = None,
    ) -> None:
        self._observer = observer or NullObserver()
        self._service = service
        self._advertised = advertised
        self._times = times
        self._clock = clock
        self._uses_envvar = uses_envvar
        self._selection = selection
        self._on_snapshot = on_snapshot or (lambda _: None)
        self._log = log
        self._reminder = WaitLogger(log, every=times.log_interval, clock=clock)
        self._availability = Availability(grace=times.grace)
        self._forgeable = False
        self._none_selected = False
        self._grace_expired = True
        self.was_ready = False
        self._changed = asyncio.Event()

    async def run(self) -> NoReturn:
        """Run until cancelled.

        Raises:
            ExceptionGroup: with :class:`InvalidConfiguration` when the path of the service's socket is not a socket.
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
                    self._reminder.log_waiting("service.unavailable", message=str(error))
                self._availability = self._availability.on_disconnect(self._clock())
                if self._advertised.version > 0:
                    await self._advertise()
                await asyncio.sleep(self._times.retry)

    async def _follow(self) -> NoReturn:
        """Follow one stream of snapshots.

        Raises:
            ScrubberError: the stream has ended, or the service was silent and did not respond to the probe.
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
                    raise Unavailable("The scrub service closed its stream of snapshots.")
                await self._apply_snapshot(snapshot)
                coming = asyncio.ensure_future(anext(stream, None))
        finally:
            coming.cancel()
            await asyncio.gather(coming, return_exceptions=True)

    async def _apply_snapshot(self, snapshot: pb.Snapshot) -> None:
        self._observer.on_service_status(up=True)
        before = self._availability
        devices = advertised_devices(snapshot, uses_envvar=self._uses_envvar)
        selected = [device for device in devices if self._selection.includes(device)]
        self._availability = before.on_snapshot(
            selected,
            epoch=snapshot.epoch,
            version=snapshot.version,
            ready=snapshot.ready,
            now=self._clock(),
            yielded=bool(snapshot.yielded),
        )
        self._reminder.log_ended("service.available", epoch=snapshot.epoch, ready=snapshot.ready)
        if before.epoch != snapshot.epoch:
            self._log.info(
                "service.instance-changed",
                epoch=snapshot.epoch,
                devices=len(snapshot.devices),
                service_version=snapshot.service_version,
            )
        if snapshot.ready:
            self._log_selection(devices, selected)
        forgeable = self._uses_envvar and _forgeable(snapshot)
        if forgeable and not self._forgeable:
            self._log.error(
                "policy.envvar-refused",
                message="The policy forbids passing devices in an environment variable: all GPUs are withheld.",
                remedy="start the plugin with --device-list-strategy volume-mounts, cdi-annotations or cdi-cri",
            )
        self._forgeable = forgeable
        self._grace_expired = self._grace_expired and self._availability.not_ready_since is not None
        await self._advertise()
        if snapshot.ready and not self.was_ready:
            self.was_ready = True
            await self._advertised.notify()  # its devices may be the same as before, and are all of the node by now
        self._on_snapshot(snapshot)

    def _log_selection(self, devices: Sequence[AdvertisedDevice], selected: Sequence[AdvertisedDevice]) -> None:
        """Log once that none of the node's devices is selected: that is allowed, and usually a mistake."""
        none_selected = bool(devices) and not selected
        if none_selected and not self._none_selected:
            self._log.warning(
                "devices.none-selected",
                devices=[f"{device.index}={device.id}" for device in devices],
                message="--devices selects no device of this node, so that this daemon offers none.",
            )
        self._none_selected = none_selected

    async def _advertise(self) -> None:
        before = {device.id: device.healthy for device in self._advertised.devices}
        await self._advertised.update(self._availability.devices(self._clock()), self._availability.epoch)
        for device in self._advertised.devices:
            if before.get(device.id) is not device.healthy:
                self._log_health(device)
        self._changed.set()

    def _log_health(self, device: AdvertisedDevice) -> None:
        """Log the new health of one device, as the kubelet sees it from now on."""
        if device.healthy:
            self._log.info("device.healthy", device=device.id, verdict=device.verdict.value, message=None)
            return
        verdict, message = device.verdict, device.refusal
        if verdict is ServiceVerdict.ADVERTISED:
            # The last verdict stays valid only for the grace period; after that the plugin itself withholds the device.
            verdict, message = ServiceVerdict.WITHHELD, SERVICE_AWAY_TOO_LONG.format(grace=self._times.grace)
        elif verdict is ServiceVerdict.UNKNOWN:
            message = NO_SERVICE_YET
        self._log.warning("device.unhealthy", device=device.id, verdict=verdict.value, message=message)

    async def _expire_grace_period(self) -> NoReturn:
        """Update the devices at the end of the grace period; otherwise silence would keep them all healthy."""
        while True:
            self._changed.clear()
            now = self._clock()
            if self._availability.is_expired(now) and not self._grace_expired:
                self._grace_expired = True
                self._log.error(
                    "service.grace-period-expired", message="All devices are unhealthy until the scrub service is back."
                )
                await self._advertise()
                self._on_snapshot(None)
            with suppress(TimeoutError):
                async with asyncio.timeout(self._availability.seconds_until_expiry(now)):
                    await self._changed.wait()
