"""The composition root of the service, which connects all components.

It builds adapters, engine and servers with keyword arguments, and runs them as named tasks of one group. If one fails,
all are stopped, and the supervisor restarts the service. No decision about a device is made here.
"""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import sys
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, suppress
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from random import SystemRandom
from secrets import token_hex
from typing import Any

import structlog
import tenacity
from prometheus_client import CollectorRegistry

from scrubber import __version__
from scrubber.adapters.cgroups.containers import CgroupContainers
from scrubber.adapters.cgroups.environment_marker import MarkerContainers
from scrubber.adapters.cgroups.hierarchy import discover_root
from scrubber.adapters.cgroups.systemd_unit import systemd_unit_of
from scrubber.adapters.clock import SystemClock
from scrubber.adapters.journald import AnnouncingResetter
from scrubber.adapters.kubelet.absent import NoKubelet
from scrubber.adapters.kubelet.assignments import KubeletAssignments
from scrubber.adapters.kubelet.pid_namespace import require_node_pid_namespace
from scrubber.adapters.kubelet.pod_identity import PodIdentities
from scrubber.adapters.ledger.conversion import Conversion
from scrubber.adapters.ledger.periodic_verification import log_head, verify_periodically
from scrubber.adapters.ledger.sqlite import SqliteLedger
from scrubber.adapters.locks import lock_holders
from scrubber.adapters.signing.node_key import NodeKey
from scrubber.api.server import GrpcServer
from scrubber.api.sockets import Sockets
from scrubber.backends import Backend, BackendContext
from scrubber.config.policy_file import PolicySource, with_digest
from scrubber.config.settings import ServiceSettings, TraceExport
from scrubber.domain.assignment import Trust
from scrubber.domain.device import Device, NodeIdentity
from scrubber.domain.errors import InvalidConfiguration, LedgerFailure, ScrubberError, Unavailable
from scrubber.domain.policy import Policy
from scrubber.domain.record import DeviceRecord
from scrubber.domain.resource_mapping import MappedDevice
from scrubber.domain.usage import MAX_UNDETECTED_SECONDS
from scrubber.engine.agent_pauses import AgentPauses
from scrubber.engine.breaker import watch_breaker
from scrubber.engine.dependencies import Dependencies
from scrubber.engine.events import health_changed
from scrubber.engine.external_resets import ExternalResets
from scrubber.engine.loops.health import follow_signals, watch_health
from scrubber.engine.loops.inventory import watch_inventory
from scrubber.engine.loops.pods import follow_pod_ends, watch_pods
from scrubber.engine.loops.policy import follow_policy
from scrubber.engine.loops.reconcile import add_device, reconcile
from scrubber.engine.loops.recovery import run_recovery_loops
from scrubber.engine.loops.usage import watch_use
from scrubber.engine.node import Node
from scrubber.engine.views import DeviceView, NodeView, Service, ServiceView
from scrubber.engine.yielding import DriverlessNode, YieldControl
from scrubber.observability.journal import StructlogJournal
from scrubber.observability.log_context import LogContextTracer
from scrubber.observability.log_sink import LostLineCounter
from scrubber.observability.logging import configure_logging
from scrubber.observability.metrics.recorder import MetricsRecorder
from scrubber.observability.metrics.status import DeviceStatus, ServiceStatus
from scrubber.observability.metrics_port import bind_metrics_port_or_warn
from scrubber.observability.metrics_server import check_tls_files, serve_metrics_on
from scrubber.observability.probes import ProbeServer, bind_probe_port
from scrubber.observability.systemd import SystemdNotifier, watchdog_interval
from scrubber.observability.tcp_listener import TcpListener
from scrubber.observability.tracing import OpenTelemetryTracer, open_otlp_tracer
from scrubber.ports.device import ChildCounts, DeviceBackend, Resetter
from scrubber.ports.node import Containers
from scrubber.ports.record import Event, LedgerChange, LedgerState
from scrubber.ports.runtime import NOOP_TRACER, Clock
from scrubber.process_owners import ProcessOwners
from scrubber.stop_deadline import CountedResetter, StopDeadline

__all__ = ["run"]

_INTERVALS_PER_HEALTH_CHECK = 5
"""Watch intervals between two comparisons of health snapshots."""
_MIN_USE_CHECK_INTERVAL = 0.5
"""Lower bound in seconds of the longest pause between two checks of device users, for short watch intervals."""
_DRIVER_CHECK_INTERVAL = 5.0
"""Seconds between two checks of the driver itself."""
_AUDIT_VERIFY_INTERVAL = 3600.0
"""Seconds between two verifications of the complete audit log."""
_YIELD_PUBLISH_INTERVAL = 1.0
"""Seconds between two looks at what a yielded node reports: the ledger's health, and who keeps it yielded."""
_DRIVER_RETURN_SECONDS = 30.0
"""Seconds after a yield within which the driver must answer: one that was replaced never does to the old libraries."""
_QUIET_START_SECONDS = 5.0
"""Seconds that the driver gets to answer before requests are answered without it; after a failed attempt, at once."""
_KUBELET_CHECK_INTERVAL = 5.0
"""Seconds between two checks whether the kubelet's lists are trusted."""


async def run(settings: ServiceSettings) -> int:
    """Serve until SIGTERM or SIGINT; return the exit status.

    Raises:
        FatalError: a setting, the policy, the ledger or another instance prevents the service from starting.
    """
    losses = LostLineCounter()
    log = configure_logging(
        settings.log_format.value, settings.log_level.value, sys.stderr, component="service", lost_lines=losses
    )
    policies = PolicySource(settings.policy, adjust=lambda policy: _adjust_policy(policy, settings, log))
    stop, reload = asyncio.Event(), asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, reload.set)
    deadline = StopDeadline(log)
    serving = asyncio.create_task(_serve(settings, policies, reload, log, losses, deadline), name="service")
    stopping = asyncio.create_task(stop.wait(), name="stop")
    await asyncio.wait({serving, stopping}, return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    if not serving.done():
        log.info("service.stopping")
        with deadline.enforced():
            serving.cancel()
            await asyncio.wait({serving})
    failure = None if serving.cancelled() else serving.exception()
    while isinstance(failure, BaseExceptionGroup) and len(failure.exceptions) == 1:
        failure = failure.exceptions[0]  # a task group wraps the one error that ended it
    if isinstance(failure, ScrubberError):
        raise failure
    if failure is not None:
        log.error("service.failed", exc_info=failure)
        return 1
    log.info("service.stopped")
    return 0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Core:
    """What outlives a yield of the node: everything that does not use the driver."""

    settings: ServiceSettings
    policies: PolicySource
    reload: asyncio.Event
    log: structlog.typing.FilteringBoundLogger
    supervisor: SystemdNotifier
    clock: Clock
    journal: StructlogJournal
    traces: OpenTelemetryTracer | None
    ledger: SqliteLedger
    containers: CgroupContainers | MarkerContainers
    open_key: Callable[[], Awaitable[NodeKey]]
    yields: YieldControl
    pauses: AgentPauses
    external_resets: ExternalResets
    paths: Mapping[str, str]
    startup: _Startup
    serve_metrics: Callable[[], None]
    stop_deadline: StopDeadline

    def service_view(self, identity: NodeIdentity, epoch: str, key: NodeKey) -> ServiceView:
        settings, policies = self.settings, self.policies
        return ServiceView(
            __version__,
            settings.backend.name,
            identity,
            policies.policy,
            self.ledger.health(),
            epoch,
            key_id=key.key_id,
            public_key=key.public_key,
            audit_head=self.ledger.head(),
            paths=self.paths,
            policy_error=policies.rejection,
            admin_group=settings.admin_group or "",
            read_group=settings.read_group or settings.admin_group or "",
        )

    async def driverless_node(self, left: _Left, driver_error: Callable[[], str] | None = None) -> DriverlessNode:
        """Return what is served while the driver is closed, or does not answer, for ``driver_error``."""
        epoch, key = token_hex(8), await self.open_key()
        return DriverlessNode(
            devices=left.devices,
            yields=self.yields,
            pauses=self.pauses,
            service_view=lambda: self.service_view(left.identity, epoch, key),
            epoch=epoch,
            ledger=self.ledger,
            journal=self.journal,
            clock=self.clock,
            audit_log=self.ledger,
            certificates=self.ledger,
            remaining_children=left.remaining_pids,
            driver_error=driver_error,
        )

    def server(self, service: Service) -> GrpcServer:
        settings = self.settings
        return GrpcServer(
            service,
            Sockets(settings.socket_dir, admin_group=settings.admin_group, read_group=settings.read_group),
            reflection=settings.reflection,
            log=self.log,
            observer=self.journal.metrics.rpc,
            join_trace=None if self.traces is None else self.traces.join_trace,
        )

    def ledger_tasks(self) -> dict[str, Coroutine[Any, Any, None]]:
        """Return the tasks that publish and verify the audit log."""
        metrics = self.journal.metrics
        return {
            "audit head": log_head(self.ledger, self.clock, self.log),
            "audit log": verify_periodically(
                self.ledger,
                self.journal,
                self.clock,
                _AUDIT_VERIFY_INTERVAL,
                on_verified=lambda intact, at: metrics.service.set_audit_result(intact=intact, at=at),
            ),
        }


@dataclass(frozen=True, slots=True)
class _Left:
    """What is known of the devices when the driver has been closed."""

    identity: NodeIdentity
    devices: tuple[DeviceView, ...] = ()
    children: tuple[ChildCounts, ...] = ()
    """Of every backend that was closed."""
    locks: tuple[Path, ...] = ()
    """Directories of the locks that erasers hold, also those of an earlier service that are stuck in the driver."""

    def remaining_pids(self) -> frozenset[int]:
        return frozenset[int]().union(*map(lock_holders, self.locks), *(each.pids() for each in self.children))


async def _serve(
    settings: ServiceSettings,
    policies: PolicySource,
    reload: asyncio.Event,
    log: structlog.typing.FilteringBoundLogger,
    lost_lines: LostLineCounter,
    stop_deadline: StopDeadline,
) -> None:
    """Build what needs no driver, and serve: with the devices, or without the driver while the node is yielded."""
    policy = policies.policy
    if not settings.backend.simulated:
        require_node_pid_namespace(settings.pod_resources_socket)
    supervisor = SystemdNotifier(os.environ.get("NOTIFY_SOCKET", ""))
    clock = SystemClock()
    journal = StructlogJournal(registry=CollectorRegistry(), logger=log, signals=policy.signals)
    metrics = journal.metrics
    lost_lines.set_callback(metrics.service.count_lost_line)
    async with AsyncExitStack() as stack:
        stack.callback(supervisor.close)
        listener = _bind_metrics_port(settings, log, stack)
        startup = _Startup()
        await _serve_probes(settings, startup, log, stack)
        traces = _open_tracer(settings, log, stack)
        # A single instance and a readable ledger come first: nothing else is touched without them.
        ledger = SqliteLedger(settings.state_dir, observe=metrics.service.observe_commit)
        stack.push_async_callback(ledger.close)
        state = await ledger.load()
        metrics.service.set_audit_result(intact=True, at=clock.wall())  # loading includes the verification
        if ledger.conversion is not None:
            await _log_conversion(ledger.conversion, state, clock, ledger, journal)
        containers = _make_containers(settings)
        stack.callback(containers.close)
        key: NodeKey | None = None

        async def open_key() -> NodeKey:
            nonlocal key
            if key is None:
                key, created = NodeKey.open(settings.state_dir)
                if created:
                    await _log_new_key(key, clock, ledger, journal)
                log.info("key.loaded", key_id=key.key_id)
                metrics.service.set_signing_key(key.key_id)
            return key

        @cache
        def serve_metrics() -> None:
            if listener is not None:
                _serve_metrics(listener, settings, metrics, log, stack)

        pauses = AgentPauses(
            state.agent_pause,
            ledger=ledger,
            journal=journal,
            clock=clock,
            new_id=_new_id,
            backend=_row(settings).agents(settings),
        )
        stack.push_async_callback(pauses.close)
        yields = YieldControl(state.node, ledger=ledger, journal=journal, clock=clock)
        external_resets = ExternalResets(
            pauses=pauses, yields=yields, clock=clock, limit=lambda: policies.policy.limits.agent_pause
        )
        core = _Core(
            settings=settings,
            policies=policies,
            reload=reload,
            log=log,
            supervisor=supervisor,
            clock=clock,
            journal=journal,
            traces=traces,
            ledger=ledger,
            containers=containers,
            open_key=open_key,
            yields=yields,
            pauses=pauses,
            external_resets=external_resets,
            paths=_service_paths(settings, policies, containers),
            startup=startup,
            serve_metrics=serve_metrics,
            stop_deadline=stop_deadline,
        )
        left = _Left(NodeIdentity(settings.node_name, "", ""), locks=_row(settings).lock_directories(settings))
        async with asyncio.TaskGroup() as group:
            group.create_task(_keep_alive(core), name="watchdog")
            group.create_task(pauses.run(), name="agent pauses")
            group.create_task(external_resets.run(), name="external resets")
            while True:
                if core.yields.record.is_yielded:
                    await _serve_yielded(core, left)
                else:
                    left = await _serve_devices(core, await ledger.load(), left)
                    gc.unfreeze()  # the objects of these devices are garbage now


async def _serve_yielded(core: _Core, left: _Left) -> None:
    """Serve without the driver, until the node is no longer yielded."""
    yields = core.yields
    node = await core.driverless_node(left)
    async with AsyncExitStack() as stack:
        server = core.server(node)
        _show_driverless(core, node, left, yielded=True)
        await server.start()
        stack.push_async_callback(server.stop)
        remaining = ", ".join(map(str, sorted(left.remaining_pids()))) or None
        fields = {"message": yields.message, "remaining_pids": remaining}
        event = Event("node.yielded", core.clock.wall(), fields=fields)
        with suppress(LedgerFailure):  # the request is durable; a full disk does not open the driver again
            await core.ledger.commit(LedgerChange(events=(event,)))
        core.journal.record([event])
        core.startup.step = ""
        core.supervisor.notify("READY=1\nSTATUS=Yielded: the driver is closed")

        async def publish() -> None:
            while True:
                node.publish()
                await core.clock.sleep(_YIELD_PUBLISH_INTERVAL)

        await _run_phase(core.ledger_tasks() | {"view": publish()}, until=yields.wait_until(yielded=False))


def _show_driverless(core: _Core, node: DriverlessNode, left: _Left, *, yielded: bool) -> None:
    """Serve metrics of a service without a driver: closed (``yielded``), or not answering yet."""
    metrics, devices = core.journal.metrics, _device_statuses(node.view().devices)

    def status() -> ServiceStatus:
        policy = core.policies.policy
        return ServiceStatus(
            devices=devices,
            ledger_ok=core.ledger.health() == "ok",
            ledger_bytes=core.ledger.size_bytes,
            audit_head=core.ledger.head(),
            policy=(policy.name, policy.digest),
            agent_pause_seconds=_pause_seconds(core.pauses, core.clock),
            yielded=yielded,
            waiting_for_driver=not yielded,
            yield_starts=core.yields.record.starts,
        )

    metrics.service.set_build_info(version=__version__, backend=core.settings.backend.name, driver=left.identity.driver)
    metrics.read_status = status
    core.serve_metrics()


async def _run_phase(tasks: Mapping[str, Coroutine[Any, Any, None]], *, until: Awaitable[None]) -> None:
    """Run ``tasks`` until ``until`` is done, or until one of them fails."""
    async with asyncio.TaskGroup() as group:
        running = [group.create_task(work, name=name) for name, work in tasks.items()]
        await until
        for task in running:
            task.cancel()


async def _serve_devices(core: _Core, state: LedgerState, left: _Left) -> _Left:
    """Serve the devices until the node is yielded, which can be before the driver has answered.

    Return what is known of the devices once the driver is closed.

    Raises:
        Unavailable: while the node was yielded, the driver was replaced. The supervisor restarts the service, and
            thereby its container, which then gets the libraries of the new one.
    """
    settings, policies, clock, ledger = core.settings, core.policies, core.clock, core.ledger
    containers, metrics = core.containers, core.journal.metrics
    async with AsyncExitStack() as stack:
        node: Node
        owners = ProcessOwners(
            unit_of=systemd_unit_of,
            pod_uid_of=containers.pod_uid_of,
            pods=PodIdentities(
                settings.kubelet_dir,
                settings.pod_logs_dir,
                may_run=containers.may_run,
                reading=lambda: node.pods.reading,
                monotonic=clock.monotonic,
            ),
            allowed=lambda: policies.policy.infrastructure,
        )
        backend = await stack.enter_async_context(_open_backend(settings, policies, owners))
        core.supervisor.notify("STATUS=Waiting for the driver")
        core.startup.step = "waiting for the driver"
        left = replace(left, children=(*left.children, backend.children))
        answer = await _driver_answer(core, backend, left)
        if answer is None:
            core.supervisor.notify("STATUS=Closing the driver: the node is yielded")
            return left
        identity, devices = answer
        earlier = left.identity.driver
        if earlier not in ("", identity.driver):
            raise _changed_driver(earlier, identity.driver)
        identity = replace(identity, node=settings.node_name)
        key = await core.open_key()

        # A bug in a scrub ends the service; at the end, scrubs in progress are abandoned, and their devices stay dirty.
        scrubs = await stack.enter_async_context(asyncio.TaskGroup())
        epoch = token_hex(8)

        def known_devices() -> frozenset[str]:
            return node.devices.known_ids

        def meaning(resource: str, listed: str) -> MappedDevice | None:
            return node.resolve_id(resource, listed)

        assignments = (
            KubeletAssignments(
                pod_resources_socket=settings.pod_resources_socket,
                kubelet_dir=settings.kubelet_dir,
                pod_logs_dir=settings.pod_logs_dir,
                device_ids=known_devices,
                clock=clock,
                resolve_alias=meaning,
                pod_uid_of=containers.pod_uid_of,
                restart_grace=settings.list_stabilize_seconds,
            )
            if settings.kubelet
            else NoKubelet(clock)
        )
        if not settings.kubelet:
            core.log.info("kubelet.none")
        stack.push_async_callback(assignments.close)
        dependencies = Dependencies(
            clock=clock,
            inventory=backend.inventory,
            holders=backend.holders,
            telemetry=backend.telemetry,
            settings=backend.settings,
            resetter=CountedResetter(_make_resetter(backend, settings, core.log), core.stop_deadline),
            eraser=backend.eraser,
            diagnostics=backend.diagnostics,
            assignments=assignments,
            containers=containers,
            pod_cgroups=containers,
            owners=owners,
            ledger=ledger,
            audit_log=ledger,
            certificates=ledger,
            signer=key,
            journal=core.journal,
            tracer=LogContextTracer(core.traces or NOOP_TRACER),
            identity=identity,
            agent_pauses=core.pauses,
            policy=lambda: policies.policy,
            new_id=_new_id,
            confidential=backend.confidential,
            spawn=lambda work, name: scrubs.create_task(work, name=name),
        )
        node = Node(
            dependencies=dependencies,
            service_view=lambda: core.service_view(identity, epoch, key),
            epoch=epoch,
            yields=core.yields,
        )
        metrics.service.set_build_info(version=__version__, backend=settings.backend.name, driver=identity.driver)
        metrics.read_status = _status_reader(
            node, ledger=ledger, children=backend.children, policy=lambda: policies.policy, clock=clock
        )
        server = core.server(node)
        await server.start()
        stack.push_async_callback(node.work_gate.close)
        stack.push_async_callback(node.devices.drain)
        stack.push_async_callback(server.stop)
        core.serve_metrics()

        core.startup.step = "comparing the ledger's records with the devices and their users"
        await reconcile(node, devices, state, dependencies=dependencies)
        # A full garbage collection visits everything that was loaded: 36 ms with 256 devices, in the middle of a
        # hand-over.
        gc.collect()
        gc.freeze()
        core.startup.step = ""
        core.supervisor.notify(f"READY=1\nSTATUS=Watching {len(devices)} devices")
        core.log.info(
            "service.ready",
            devices=len(devices),
            policy=policies.policy.name,
            version=__version__,
            key_id=key.key_id,
            audit_head=str(ledger.head()),
        )
        tasks = _device_tasks(core, node, backend, state, dependencies)
        await _run_phase(tasks, until=core.yields.wait_until(yielded=True))
        node.publish_yield()
        core.supervisor.notify("STATUS=Closing the driver: the node is yielded")
    return replace(left, identity=identity, devices=node.devices.views())


def _device_tasks(
    core: _Core, node: Node, backend: DeviceBackend, state: LedgerState, dependencies: Dependencies
) -> dict[str, Coroutine[Any, Any, None]]:
    """Return the tasks that run while the driver is open, by name."""
    interval, clock = core.settings.poll_interval, core.clock

    async def greet(device: Device) -> None:
        await add_device(node, device, dependencies=dependencies)

    return core.ledger_tasks() | {
        "signals": follow_signals(node, dependencies=dependencies),
        "health": watch_health(
            node,
            dependencies=dependencies,
            interval=interval * _INTERVALS_PER_HEALTH_CHECK,
            least=backend.poll_interval,
        ),
        "pods": watch_pods(node, dependencies=dependencies, interval=interval),
        "pod ends": follow_pod_ends(node, dependencies=dependencies),
        "inventory": watch_inventory(node, inventory=backend.inventory, dependencies=dependencies, add_device=greet),
        "use": watch_use(
            node,
            dependencies=dependencies,
            interval=min(max(interval, _MIN_USE_CHECK_INTERVAL), MAX_UNDETECTED_SECONDS),
            random_fraction=SystemRandom().random,
        ),
        "recovery": run_recovery_loops(node, dependencies=dependencies),
        "driver": _watch_driver(backend, dependencies, core.log),
        "work gate": node.work_gate.follow(),
        "breaker": watch_breaker(node.devices.breaker, dependencies=dependencies),
        "policy": follow_policy(node, provider=core.policies, reload_requested=core.reload, dependencies=dependencies),
        "kubelet": _log_kubelet_trust(node, clock, core.log),
        "agent pauses": node.follow_pauses(),
        "external resets": core.external_resets.yield_when_free(node.devices),
    }


def _status_reader(
    node: Node, *, ledger: SqliteLedger, children: ChildCounts, policy: Callable[[], Policy], clock: Clock
) -> Callable[[], ServiceStatus]:
    """Return a function that reads the current metrics status from the engine and the adapters.

    It changes nothing and never blocks, because the scrape thread calls it: it reads values that are replaced, and
    never modified.
    """

    last: tuple[NodeView, tuple[DeviceStatus, ...]] | None = None

    def devices() -> tuple[DeviceStatus, ...]:
        nonlocal last
        view, statuses = node.view(), last
        if statuses is None or statuses[0] is not view:
            last = statuses = (view, _device_statuses(view.devices))
        return statuses[1]

    def facts() -> ServiceStatus:
        slots, force = node.devices.eraser_pool, policy()
        return ServiceStatus(
            devices=devices(),
            handovers_waiting=node.waiting_starts,
            erasers_busy=slots.busy,
            erasers_free=node.devices.free_eraser_slots,
            erasers_waiting=slots.waiting,
            child_starts=dict(children.starts),
            children_abandoned=children.abandoned_total,
            ledger_ok=ledger.health() == "ok",
            ledger_bytes=ledger.size_bytes,
            audit_head=ledger.head(),
            kubelet_trusted=node.pods.reading.trust is Trust.TRUSTED,
            kubelet_restarts=node.kubelet_restarts,
            policy=(force.name, force.digest),
            yield_starts=node.yields.record.starts,
            agent_pause_seconds=_pause_seconds(node.pauses, clock),
        )

    return facts


def _pause_seconds(pauses: AgentPauses, clock: Clock) -> float:
    pause = pauses.pause
    return 0.0 if pause is None else max(0.0, clock.wall() - pause.since)


def _device_statuses(views: Iterable[DeviceView]) -> tuple[DeviceStatus, ...]:
    return tuple(
        DeviceStatus(each.device, each.record, each.advertised, each.policy.enforcement, each.holders) for each in views
    )


def _new_id(kind: str) -> str:
    return f"{kind}-{token_hex(6)}"


async def _log_new_key(key: NodeKey, clock: Clock, ledger: SqliteLedger, journal: StructlogJournal) -> None:
    """Record the creation of a node key: verifiers that know only the old key will not accept its signatures."""
    event = Event("key.created", clock.wall(), fields={"key_id": key.key_id})
    await ledger.commit(LedgerChange(events=(event,)))
    journal.record([event])


async def _log_conversion(
    conversion: Conversion, state: LedgerState, clock: Clock, ledger: SqliteLedger, journal: StructlogJournal
) -> None:
    """Record that the ledger was converted, and the devices that are quarantined for it."""
    now = clock.wall()
    converted = Event(
        "ledger.converted",
        now,
        fields={
            "from_version": conversion.from_version or None,
            "from_schema": conversion.from_schema,
            "to_schema": conversion.to_schema,
            "copy": str(conversion.copy),
            "omitted": conversion.omitted,
            "quarantined": ", ".join(conversion.quarantined) or None,
        },
    )
    quarantines = [
        each
        for device in conversion.quarantined
        for each in health_changed(DeviceRecord(device), state.records[device], now)
    ]
    rows = (converted, *quarantines)
    await ledger.commit(LedgerChange(events=rows))
    journal.record(rows)


def _service_paths(settings: ServiceSettings, policies: PolicySource, containers: Containers) -> dict[str, str]:
    """Return the paths that the service uses, by name, for the node's operators."""
    places: dict[str, Path | None] = {
        "state": settings.state_dir,
        "policy": policies.path.absolute(),
    }
    if settings.kubelet:
        places |= {
            "kubelet": settings.kubelet_dir,
            "pod-resources": settings.pod_resources_socket,
            "pod-logs": settings.pod_logs_dir,
        }
    if isinstance(containers, CgroupContainers):
        places["cgroups"] = settings.cgroup_root or discover_root()
    return {name: str(path) for name, path in places.items() if path is not None}


async def _watch_driver(
    backend: DeviceBackend, dependencies: Dependencies, log: structlog.typing.FilteringBoundLogger
) -> None:
    """Log devices that are not advertised when that changes; end the service when the driver version changed.

    Raises:
        Unavailable: no proof made under the previous driver is valid under this one. The supervisor restarts the
            service, which has no proofs then and scrubs everything.
    """
    logged: dict[str, str] = {}
    driver = dependencies.identity.driver
    while True:
        withheld = dict(backend.not_advertised())
        for device, reason in withheld.items():
            if logged.get(device) != reason:
                log.warning("device.not-advertised", device=device, message=reason)
        logged = withheld
        try:
            now = (await backend.inventory.identity()).driver
        except Unavailable:
            now = driver  # the devices' own state shows it
        if now != driver:
            raise _changed_driver(driver, now)
        await dependencies.clock.sleep(_DRIVER_CHECK_INTERVAL)


def _changed_driver(earlier: str, now: str) -> Unavailable:
    return Unavailable(
        f"The driver changed from {earlier} to {now} while the service was running; the service must restart."
    )


async def _log_kubelet_trust(node: Node, clock: Clock, log: structlog.typing.FilteringBoundLogger) -> None:
    """Log why the kubelet's lists are not trusted while they are not: starts wait, and an operator can act."""
    logged = (Trust.TRUSTED, "")
    while True:
        reading = node.pods.reading
        without = " ".join(reading.caveats)
        # The message about a recently started kubelet counts seconds: compare without it, so that it is logged once.
        now = (reading.trust, reading.untrusted_reason if reading.trust is Trust.UNREADABLE else without)
        if now != logged and now == (Trust.TRUSTED, ""):
            log.info("kubelet.trusted")
        elif now != logged:
            log.warning("kubelet.untrusted", trust=reading.trust.value, message=reading.untrusted_reason or without)
        logged = now
        await clock.sleep(_KUBELET_CHECK_INTERVAL)


async def _keep_alive(core: _Core) -> None:
    """Send the watchdog signal from the engine's event loop, so that the supervisor restarts a hung loop."""
    interval = watchdog_interval(os.environ)
    while True:
        # Repeat READY: a supervisor that was too busy for the first one would end the service.
        core.supervisor.notify("WATCHDOG=1" if core.startup.step else "READY=1\nWATCHDOG=1")
        await core.clock.sleep(interval)


def _adjust_policy(policy: Policy, settings: ServiceSettings, log: structlog.typing.FilteringBoundLogger) -> Policy:
    """Return the policy with the settings of this start, for this backend."""
    row = _row(settings)
    policy = policy.for_node(settings.node_name)
    everyone = (policy, *(each.policy for each in policy.overrides))
    impossible = [why for one in everyone for why in row.unsupported_settings(one.settings)]
    if impossible:
        raise InvalidConfiguration(f"{settings.policy}: settings: {' '.join(impossible)}")
    if settings.disabled_healthchecks:
        log.warning(
            "policy.xids-disabled",
            message="DP_DISABLE_HEALTHCHECKS makes the service ignore XIDs; prefer xids: ignore in the policy file, "
            "where the choice is on record.",
        )
        policy = with_digest(settings.disabled_healthchecks.apply_to(policy))
    return policy.with_signals(row.signal_table(), row.member_tables())


def _row(settings: ServiceSettings) -> Backend:
    """Return the chosen backend, of which the settings know only a part."""
    assert isinstance(settings.backend, Backend)
    return settings.backend


def _open_backend(
    settings: ServiceSettings, policies: PolicySource, owners: ProcessOwners
) -> AbstractAsyncContextManager[DeviceBackend]:
    question = policies.policy.limits.driver_call
    context = BackendContext(settings=settings, driver_call_timeout=question, infrastructure=owners.infrastructure)
    return _row(settings).open(context)


def _make_resetter(
    backend: DeviceBackend, settings: ServiceSettings, log: structlog.typing.FilteringBoundLogger
) -> Resetter:
    if settings.reset_journal is None:
        return backend.resetter
    return AnnouncingResetter(
        backend.resetter,
        settings.reset_journal,
        on_failure=lambda device, why: log.warning("reset.not-announced", device=device, message=why),
    )


def _make_containers(settings: ServiceSettings) -> CgroupContainers | MarkerContainers:
    if not settings.uses_cgroups:
        return MarkerContainers()
    root = settings.cgroup_root or discover_root()
    if root is None:
        raise InvalidConfiguration("No cgroup hierarchy was found; pass its directory with --cgroup-root.")
    return CgroupContainers(root)


async def _driver_answer(
    core: _Core, backend: DeviceBackend, left: _Left
) -> tuple[NodeIdentity, tuple[Device, ...]] | None:
    """Return the driver's description of the node as soon as it answers; None once the node is yielded instead.

    If it does not answer at once, requests are served meanwhile; all that need the driver are refused.

    Raises:
        InvalidConfiguration: the driver is missing, and the service is not to wait for it.
        Unavailable: it did not answer soon after a yield.
    """
    returning, failed = bool(left.identity.driver), asyncio.Event()
    error = "It has not answered yet."

    def on_failure(message: str) -> None:
        nonlocal error
        error = message
        failed.set()

    answer = asyncio.ensure_future(
        _wait_for_driver(
            backend,
            core.clock,
            core.log,
            core.supervisor,
            wait=returning or not core.settings.fail_on_init_error,
            limit=_DRIVER_RETURN_SECONDS if returning else None,
            on_failure=on_failure,
        )
    )
    unanswered = asyncio.ensure_future(failed.wait())
    yielded = asyncio.ensure_future(core.yields.wait_until(yielded=True))
    tasks: set[asyncio.Future[Any]] = {answer, unanswered, yielded}
    try:
        await asyncio.wait({answer, unanswered}, timeout=_QUIET_START_SECONDS, return_when=asyncio.FIRST_COMPLETED)
        if not answer.done():
            node = await core.driverless_node(left, lambda: error)
            server = core.server(node)
            _show_driverless(core, node, left, yielded=False)
            await server.start()
            try:
                while not (answer.done() or yielded.done()):
                    await asyncio.wait(
                        {answer, yielded}, timeout=_YIELD_PUBLISH_INTERVAL, return_when="FIRST_COMPLETED"
                    )
                    node.publish()
            finally:
                await server.stop()
        return None if yielded.done() and not answer.done() else await answer
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _wait_for_driver(
    backend: DeviceBackend,
    clock: Clock,
    log: structlog.typing.FilteringBoundLogger,
    supervisor: SystemdNotifier,
    *,
    wait: bool,
    limit: float | None,
    on_failure: Callable[[str], None],
) -> tuple[NodeIdentity, tuple[Device, ...]]:
    """Return the driver's description of the node as soon as the driver answers.

    Args:
        on_failure: called with the reason after each attempt that failed, if another one follows.

    Raises:
        InvalidConfiguration: the driver is missing, and ``wait`` is False.
        Unavailable: it did not answer within ``limit`` seconds.
    """
    if not wait:
        try:
            return await backend.inventory.identity(), await backend.inventory.devices()
        except Unavailable as away:
            raise InvalidConfiguration(
                f"{away} (With --no-fail-on-init-error the service waits for the driver instead of exiting.)"
            ) from away

    def waiting(state: tenacity.RetryCallState) -> None:
        # Extend the supervisor's start timeout while the service cannot become ready.
        supervisor.notify("EXTEND_TIMEOUT_USEC=10000000\nWATCHDOG=1")
        error = "" if state.outcome is None else str(state.outcome.exception())
        on_failure(error)
        if state.attempt_number % 30 == 1:
            log.warning("driver.unavailable", message=error)

    ask = tenacity.AsyncRetrying(
        retry=tenacity.retry_if_exception_type(Unavailable),
        wait=tenacity.wait_fixed(1),
        stop=tenacity.stop_never if limit is None else tenacity.stop_after_delay(limit),
        reraise=True,
        sleep=clock.sleep,
        before_sleep=waiting,
    )
    async for attempt in ask:
        with attempt:
            return await backend.inventory.identity(), await backend.inventory.devices()
    raise AssertionError("the retry loop ends only with an answer")


def _open_tracer(
    settings: ServiceSettings, log: structlog.typing.FilteringBoundLogger, stack: AsyncExitStack
) -> OpenTelemetryTracer | None:
    """Open the tracer, which sends until everything else has ended; None where traces are off.

    Raises:
        InvalidConfiguration: traces cannot be sent as the environment variables define.
    """
    if settings.traces is TraceExport.OFF:
        return None
    traces = open_otlp_tracer("gpu-scrubber", __version__, settings.node_name, log)
    stack.callback(traces.close)
    return traces


def _bind_metrics_port(
    settings: ServiceSettings, log: structlog.typing.FilteringBoundLogger, stack: AsyncExitStack
) -> TcpListener | None:
    """Bind the metrics port before anything is started; None where there is none.

    Raises:
        InvalidConfiguration: a required port cannot be bound, or the certificates cannot be used.
    """
    address = settings.metrics_address
    if address is None:
        return None

    def warn(message: str) -> None:
        log.warning("metrics.unavailable", message=message)

    if settings.metrics_tls is not None:
        check_tls_files(settings.metrics_tls)
    listener = bind_metrics_port_or_warn(address.host, address.port, required=settings.metrics_required, warn=warn)
    if listener is not None:
        stack.callback(listener.close)
    return listener


@dataclass(slots=True)
class _Startup:
    """What the start of the service is doing; empty once the service is ready."""

    step: str = "opening the ledger"


async def _serve_probes(
    settings: ServiceSettings,
    startup: _Startup,
    log: structlog.typing.FilteringBoundLogger,
    stack: AsyncExitStack,
) -> None:
    """Serve the probes until everything else has ended, where there is an address for them.

    Raises:
        InvalidConfiguration: the address cannot be bound.
    """
    address = settings.probe_address
    if address is None:
        return
    port = bind_probe_port(address.host, address.port)
    probes = ProbeServer(port, unready_reason=lambda: startup.step)
    stack.callback(probes.close)
    await probes.start()
    log.info("probes.serving", address=port.address)


def _serve_metrics(
    listener: TcpListener,
    settings: ServiceSettings,
    metrics: MetricsRecorder,
    log: structlog.typing.FilteringBoundLogger,
    stack: AsyncExitStack,
) -> None:
    def tell(message: str) -> None:
        log.warning("metrics.scrape-failed", message=message)

    serving = serve_metrics_on(listener, metrics.page, report=tell, tls=settings.metrics_tls)
    stack.callback(serving.close)
    log.info("metrics.serving", address=serving.address, encrypted=settings.metrics_tls is not None)
