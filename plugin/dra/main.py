"""The DRA driver as a process: its composition root.

Invariants: it waits for a kubelet and for a service that are not running. If one of its tasks fails, all tasks end and
the process exits, so that its supervisor restarts it. After SIGTERM the registration socket disappears first; the
ResourceSlices stay, because the next instance continues with them.
"""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

from plugin.cluster.client import ApiServerClient
from plugin.cluster.credentials import Credentials
from plugin.dra.cdi import ClaimCdiSpecs
from plugin.dra.claim_driver import ClaimDriver, ClaimDriverTimes
from plugin.dra.claim_pods import ClaimPodsFollower
from plugin.dra.claim_reports import ClaimReports
from plugin.dra.inventory import slice_devices
from plugin.dra.paths import DriverSocketPaths
from plugin.dra.registration import DriverRegistration, DriverRegistrationTimes
from plugin.dra.server import HealthStream, add_driver_services
from plugin.dra.service import ScrubServiceClaims
from plugin.dra.slice_controller import SliceController, SliceTimes
from plugin.instance_lock import WriterLock
from plugin.kubelet.devices import AdvertisedDevices
from plugin.logs import Logger, create_logger
from plugin.nvidia.cdi import CdiPublisher
from plugin.nvidia.settings import NvidiaPluginSettings
from plugin.observers import DeferredObserver, NullObserver
from plugin.process import bind_metrics, bind_probes, expected_error, notify_service_manager, serve_metrics, signals
from plugin.service_client import ServiceWatch, WatchTimes
from scrubber import __version__
from scrubber.api.client import PluginClient
from scrubber.config.settings import Address, MetricsTls
from scrubber.observability.log_sink import LostLineCounter
from scrubber.observability.probes import ProbeServer

__all__ = ["DriverSettings", "DriverTimes", "run"]


@dataclass(frozen=True, slots=True)
class DriverTimes:
    """All durations of the driver, for tests to scale."""

    calls: ClaimDriverTimes = field(default_factory=ClaimDriverTimes)
    registration: DriverRegistrationTimes = field(default_factory=DriverRegistrationTimes)
    slices: SliceTimes = field(default_factory=SliceTimes)
    watch: WatchTimes = field(default_factory=WatchTimes)
    request: float = 10.0
    """Limit of one request to the API server, in seconds."""
    metrics: float = 5.0
    """Seconds that the metrics wait for the registration, which takes precedence."""


@dataclass(frozen=True, slots=True)
class DriverSettings:
    """The settings of the driver.

    Attributes:
        paths: its name, its sockets, and the UID of its pod.
        node_name: this node's name in the cluster, which is also the name of its pool.
        credentials: for the API server.
        cdi_dir: where container runtimes look for CDI specifications.
        socket: directory of the service's sockets.
        nvidia: settings for NVIDIA GPUs only.
        metrics_required: whether an address in use stops the driver; otherwise it only disables the metrics.
        probe_address: address of the kubelet's probes; None: no probes.
    """

    paths: DriverSocketPaths
    node_name: str
    credentials: Credentials
    cdi_dir: Path = Path("/var/run/cdi")
    socket: Path = Path("/run/scrubber")
    nvidia: NvidiaPluginSettings = field(default_factory=NvidiaPluginSettings)
    log_format: str = "auto"
    log_level: str = "info"
    metrics_address: Address | None = None
    metrics_required: bool = False
    metrics_tls: MetricsTls | None = None
    probe_address: Address | None = None
    times: DriverTimes = field(default_factory=DriverTimes)


async def run(settings: DriverSettings) -> int:
    """Run the driver until SIGTERM or SIGINT; return the exit status.

    Raises:
        InvalidConfiguration: a setting cannot work; nothing was started, or everything running has ended.
    """
    losses = LostLineCounter()
    with ExitStack() as stack:
        log = create_logger(settings.log_format, settings.log_level, libraries=True, losses=losses)
        return await _run(settings, log, losses, stack)


async def _run(settings: DriverSettings, log: Logger, losses: LostLineCounter, stack: ExitStack) -> int:
    settings.paths.check()
    listener = bind_metrics(
        settings.metrics_address, log, stack, required=settings.metrics_required, tls=settings.metrics_tls
    )
    observer: DeferredObserver | NullObserver = NullObserver() if listener is None else DeferredObserver()
    probes = bind_probes(settings.probe_address, stack)
    stop, _ = signals()
    devices = AdvertisedDevices()
    try:
        async with _Driver.create(settings, devices, observer, log) as driver, asyncio.TaskGroup() as tasks:
            if probes is not None:
                server = ProbeServer(probes, unready_reason=driver.unready_reason)
                stack.callback(server.close)
                await server.start()
                log.info("probes.serving", address=probes.address)
            log.info("driver.started", version=__version__, driver=settings.paths.driver, node=settings.node_name)
            running = [
                tasks.create_task(driver.watch.run(), name="service snapshots"),
                tasks.create_task(driver.publish(), name="devices"),
                tasks.create_task(driver.slices.run(), name="slices"),
                tasks.create_task(driver.pods.run(), name="pods of claims"),
                tasks.create_task(driver.reports.run(), name="reports about claims"),
                tasks.create_task(driver.claims.remove_unprepared(), name="specifications"),
                tasks.create_task(notify_service_manager(driver.unready_reason), name="service manager"),
                tasks.create_task(
                    serve_metrics(
                        listener,
                        observer,
                        losses,
                        lambda: {settings.paths.driver: devices},
                        log,
                        stack,
                        tls=settings.metrics_tls,
                        wait=settings.times.metrics,
                    ),
                    name="metrics",
                ),
            ]
            registration = tasks.create_task(driver.registration.run(), name="registration")
            await stop.wait()
            log.info("plugin.stopping")
            registration.cancel()
            await asyncio.wait({registration})
            for task in running:
                task.cancel()
    except BaseExceptionGroup as group:
        error = expected_error(group)
        if error is None and not isinstance(group, ExceptionGroup):
            raise
        if error is None:
            log.error("plugin.failed", exc_info=group)
            return 1
        raise error from group
    log.info("plugin.stopped")
    return 0


class _Driver:
    """The parts of the driver.

    Args:
        claim_api, slice_api, slice_watch, report_api: a connection each, because one connection serves one request at a time.

    Raises:
        InvalidConfiguration: a setting cannot work on this node.
    """

    def __init__(
        self,
        settings: DriverSettings,
        devices: AdvertisedDevices,
        observer: DeferredObserver | NullObserver,
        log: Logger,
        *,
        client: PluginClient,
        claim_api: ApiServerClient,
        slice_api: ApiServerClient,
        slice_watch: ApiServerClient,
        report_api: ApiServerClient,
    ) -> None:
        driver, node, times = settings.paths.driver, settings.node_name, settings.times
        self._devices = devices
        self._changed = asyncio.Event()
        specs = ClaimCdiSpecs(
            settings.cdi_dir, driver, log=log, nvidia=_nvidia_specs(settings, log), epoch=lambda: devices.epoch
        )
        specs.check()
        specs.remove_left_behind(time.time())
        self.watch = ServiceWatch(
            client,
            devices,
            times=times.watch,
            log=log,
            clock=time.monotonic,
            on_snapshot=lambda _: self._changed.set(),
            observer=observer,
        )
        self.slices = SliceController(
            driver,
            node,
            api=slice_api,
            watch=slice_watch,
            times=times.slices,
            log=log,
            clock=time.monotonic,
            jitter=random.random,
            token=lambda: os.urandom(4).hex(),
            lock=WriterLock(settings.paths.directory),
            observer=observer,
        )
        self.reports = ClaimReports(
            driver,
            report_api,
            log=log,
            clock=time.monotonic,
            wall_clock=time.time,
            jitter=random.random,
            observer=observer,
        )
        self.pods = ClaimPodsFollower(
            driver,
            ScrubServiceClaims(client),
            lambda: ApiServerClient(settings.credentials, node, deadline=times.request),
            log=log,
            clock=time.monotonic,
            jitter=random.random,
        )
        self.claims = ClaimDriver(
            driver,
            node,
            service=ScrubServiceClaims(client),
            api=claim_api,
            devices=devices,
            specs=specs,
            withdrawal=self.slices,
            times=times.calls,
            log=log,
            clock=time.monotonic,
            observer=observer,
            claims_observers=(self.reports, self.pods),
        )
        health = HealthStream(node, devices)
        self.registration = DriverRegistration(
            settings.paths,
            add_services=lambda server: add_driver_services(server, self.claims, health),
            times=times.registration,
            token=lambda: os.urandom(4).hex(),
            log=log,
            clock=time.monotonic,
            observer=observer,
        )

    @classmethod
    @asynccontextmanager
    async def create(
        cls,
        settings: DriverSettings,
        devices: AdvertisedDevices,
        observer: DeferredObserver | NullObserver,
        log: Logger,
    ) -> AsyncIterator[_Driver]:
        async with AsyncExitStack() as stack:
            client = await stack.enter_async_context(PluginClient(settings.socket.absolute()))
            apis = []
            for _ in range(4):
                api = ApiServerClient(settings.credentials, settings.node_name, deadline=settings.times.request)
                stack.push_async_callback(api.close)
                apis.append(api)
            yield cls(
                settings,
                devices,
                observer,
                log,
                client=client,
                claim_api=apis[0],
                slice_api=apis[1],
                slice_watch=apis[2],
                report_api=apis[3],
            )

    async def publish(self) -> NoReturn:
        """Pass on the devices to the slices after every snapshot of the service."""
        while True:
            await self._changed.wait()
            self._changed.clear()
            await self.slices.update(slice_devices(self._devices.devices))

    def unready_reason(self) -> str:
        """Return why this instance could not replace another one yet; empty when it could."""
        if not self.watch.was_ready:
            return "no scrub service that has checked every device has answered yet"
        return "" if self.registration.is_registered else "the kubelet has not registered the driver yet"


def _nvidia_specs(settings: DriverSettings, log: Logger) -> CdiPublisher:
    nvidia = settings.nvidia
    return CdiPublisher(
        settings.cdi_dir,
        root=nvidia.root,
        hook=nvidia.hook,
        injection=nvidia.injection,
        log=log,
        disabled_hooks=nvidia.disabled_cdi_hooks,
        sockets=nvidia.ipc_sockets,
        host=nvidia.host_root or Path("/"),
    )
