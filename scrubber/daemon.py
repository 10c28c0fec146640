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
from collections.abc import Callable, Coroutine, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import replace
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
from scrubber.adapters.kubelet.assignments import KubeletAssignments
from scrubber.adapters.kubelet.pid_namespace import require_node_pid_namespace
from scrubber.adapters.kubelet.service_accounts import ServiceAccounts
from scrubber.adapters.ledger.periodic_verification import log_head, verify_periodically
from scrubber.adapters.ledger.sqlite import SqliteLedger
from scrubber.adapters.signing.node_key import NodeKey
from scrubber.adapters.systemd import SystemdNotifier
from scrubber.api.server import GrpcServer
from scrubber.api.sockets import Sockets
from scrubber.backends import BACKENDS, BackendContext
from scrubber.config.policy_file import PolicySource, with_digest
from scrubber.config.settings import ServiceSettings, TraceExport
from scrubber.domain.assignment import Trust
from scrubber.domain.device import Device, NodeIdentity
from scrubber.domain.errors import InvalidConfiguration, ScrubberError, Unavailable
from scrubber.domain.policy import Policy
from scrubber.domain.resource_mapping import MappedDevice
from scrubber.domain.usage import MAX_UNDETECTED_SECONDS
from scrubber.engine.breaker import watch_breaker
from scrubber.engine.dependencies import Dependencies
from scrubber.engine.loops.health import follow_signals, watch_health
from scrubber.engine.loops.inventory import watch_inventory
from scrubber.engine.loops.pods import watch_pods
from scrubber.engine.loops.policy import follow_policy
from scrubber.engine.loops.reconcile import add_device, reconcile
from scrubber.engine.loops.recovery import run_recovery_loops
from scrubber.engine.loops.usage import watch_use
from scrubber.engine.node import Node
from scrubber.engine.views import NodeView, ServiceView
from scrubber.observability.journal import StructlogJournal
from scrubber.observability.log_context import LogContextTracer
from scrubber.observability.log_sink import LostLineCounter
from scrubber.observability.logging import configure_logging
from scrubber.observability.metrics.recorder import MetricsRecorder
from scrubber.observability.metrics.status import DeviceStatus, ServiceStatus
from scrubber.observability.metrics_port import MetricsListener, bind_metrics_port_or_warn
from scrubber.observability.metrics_server import check_tls_files, serve_metrics_on
from scrubber.observability.tracing import OpenTelemetryTracer, open_otlp_tracer
from scrubber.ports.device import ChildCounts, DeviceBackend
from scrubber.ports.node import Containers
from scrubber.ports.record import Event, LedgerChange, LedgerState
from scrubber.ports.runtime import NOOP_TRACER, Clock

__all__ = ["run"]

_INTERVALS_PER_HEALTH_CHECK = 5
"""Watch intervals between two comparisons of health snapshots."""
_MIN_USE_CHECK_INTERVAL = 0.5
"""Lower bound in seconds of the longest pause between two checks of device users, for short watch intervals."""
_DRIVER_CHECK_INTERVAL = 5.0
"""Seconds between two checks of the driver itself."""
_AUDIT_VERIFY_INTERVAL = 3600.0
"""Seconds between two verifications of the complete audit log."""
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
    serving = asyncio.create_task(_serve(settings, policies, reload, log, losses), name="service")
    stopping = asyncio.create_task(stop.wait(), name="stop")
    await asyncio.wait({serving, stopping}, return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    if not serving.done():
        log.info("service.stopping")
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


async def _serve(
    settings: ServiceSettings,
    policies: PolicySource,
    reload: asyncio.Event,
    log: structlog.typing.FilteringBoundLogger,
    lost_lines: LostLineCounter,
) -> None:
    """Build everything, run it, and shut it down in the reverse order."""
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
        traces = _open_tracer(settings, log, stack)
        # A single instance and a readable ledger come first: nothing else is touched without them.
        ledger = SqliteLedger(settings.state_dir, observe=metrics.service.observe_commit)
        stack.push_async_callback(ledger.close)
        state = await ledger.load()
        metrics.service.set_audit_result(intact=True, at=clock.wall())  # loading includes the verification
        containers = _make_containers(settings)
        stack.callback(containers.close)
        backend = await stack.enter_async_context(_open_backend(settings, policies, containers))
        supervisor.notify("STATUS=Waiting for the driver")
        patient = not settings.fail_on_init_error
        identity, devices = await _wait_for_driver(backend, clock, log, supervisor, wait=patient)
        identity = replace(identity, node=settings.node_name)
        key, created = NodeKey.open(settings.state_dir)
        if created:
            await _log_new_key(key, clock, ledger, journal)
        log.info("key.loaded", key_id=key.key_id)

        # A bug in a scrub ends the service; at the end, scrubs in progress are abandoned, and their devices stay dirty.
        scrubs = await stack.enter_async_context(asyncio.TaskGroup())
        epoch = token_hex(8)
        node: Node

        def known_devices() -> frozenset[str]:
            return node.devices.known_ids

        def meaning(resource: str, listed: str) -> MappedDevice | None:
            return node.resolve_id(resource, listed)

        assignments = KubeletAssignments(
            pod_resources_socket=settings.pod_resources_socket,
            kubelet_dir=settings.kubelet_dir,
            pod_logs_dir=settings.pod_logs_dir,
            device_ids=known_devices,
            clock=clock,
            resolve_alias=meaning,
            pod_uid_of=containers.pod_uid_of,
            restart_grace=settings.list_stabilize_seconds,
        )
        stack.push_async_callback(assignments.close)
        dependencies = Dependencies(
            clock=clock,
            inventory=backend.inventory,
            holders=backend.holders,
            telemetry=backend.telemetry,
            settings=backend.settings,
            resetter=backend.resetter,
            eraser=backend.eraser,
            diagnostics=backend.diagnostics,
            assignments=assignments,
            containers=containers,
            ledger=ledger,
            audit_log=ledger,
            certificates=ledger,
            signer=key,
            journal=journal,
            tracer=LogContextTracer(traces or NOOP_TRACER),
            identity=identity,
            policy=lambda: policies.policy,
            new_id=lambda kind: f"{kind}-{token_hex(6)}",
            spawn=lambda work, name: scrubs.create_task(work, name=name),
        )

        places = _service_paths(settings, policies, containers)

        def info() -> ServiceView:
            return ServiceView(
                __version__,
                settings.backend.name,
                identity,
                policies.policy,
                ledger.health(),
                epoch,
                key_id=key.key_id,
                public_key=key.public_key,
                audit_head=ledger.head(),
                paths=places,
                policy_error=policies.rejection,
                admin_group=settings.admin_group or "",
                read_group=settings.read_group or settings.admin_group or "",
            )

        node = Node(dependencies=dependencies, service_view=info, epoch=epoch)
        metrics.service.set_build_info(version=__version__, backend=settings.backend.name, driver=identity.driver)
        metrics.service.set_signing_key(key.key_id)
        metrics.read_status = _status_reader(
            node, ledger=ledger, children=backend.children, policy=lambda: policies.policy
        )
        server = GrpcServer(
            node,
            Sockets(settings.socket_dir, admin_group=settings.admin_group, read_group=settings.read_group),
            reflection=settings.reflection,
            log=log,
            observer=metrics.rpc,
            join_trace=None if traces is None else traces.join_trace,
        )
        await server.start()
        stack.push_async_callback(node.devices.drain)
        stack.push_async_callback(server.stop)
        if listener is not None:
            _serve_metrics(listener, settings, metrics, log, stack)

        await reconcile(node, devices, state, dependencies=dependencies)
        # A full garbage collection visits everything that was loaded: 36 ms with 256 devices, in the middle of a
        # hand-over.
        gc.collect()
        gc.freeze()
        supervisor.notify(f"READY=1\nSTATUS=Watching {len(devices)} devices")
        log.info(
            "service.ready",
            devices=len(devices),
            policy=policy.name,
            version=__version__,
            key_id=key.key_id,
            audit_head=str(ledger.head()),
        )
        beside = {
            "policy": follow_policy(node, provider=policies, reload_requested=reload, dependencies=dependencies),
            "audit head": log_head(ledger, clock, log),
            "audit log": verify_periodically(
                ledger,
                journal,
                clock,
                _AUDIT_VERIFY_INTERVAL,
                on_verified=lambda intact, at: metrics.service.set_audit_result(intact=intact, at=at),
            ),
        }
        await _run_tasks(node, backend, state, dependencies, supervisor, settings, log, beside)


async def _run_tasks(
    node: Node,
    backend: DeviceBackend,
    state: LedgerState,
    dependencies: Dependencies,
    supervisor: SystemdNotifier,
    settings: ServiceSettings,
    log: structlog.typing.FilteringBoundLogger,
    other_tasks: Mapping[str, Coroutine[Any, Any, None]],
) -> None:
    """Run all tasks until cancelled, or until one of them fails."""
    interval = settings.poll_interval

    async def greet(device: Device) -> None:
        await add_device(node, device, state, dependencies=dependencies)

    async with asyncio.TaskGroup() as group:
        watching = watch_inventory(node, inventory=backend.inventory, dependencies=dependencies, add_device=greet)
        group.create_task(follow_signals(node, dependencies=dependencies), name="signals")
        group.create_task(
            watch_health(node, dependencies=dependencies, interval=interval * _INTERVALS_PER_HEALTH_CHECK),
            name="health",
        )
        group.create_task(watch_pods(node, dependencies=dependencies, interval=interval), name="pods")
        group.create_task(watching, name="inventory")
        between_looks = min(max(interval, _MIN_USE_CHECK_INTERVAL), MAX_UNDETECTED_SECONDS)
        use_watch = watch_use(
            node, dependencies=dependencies, interval=between_looks, random_fraction=SystemRandom().random
        )
        group.create_task(use_watch, name="use")
        group.create_task(run_recovery_loops(node, dependencies=dependencies), name="tending")
        group.create_task(_watch_driver(backend, dependencies, log), name="driver")
        group.create_task(watch_breaker(node.devices.breaker, dependencies=dependencies), name="breaker")
        for name, work in other_tasks.items():
            group.create_task(work, name=name)
        group.create_task(_log_kubelet_trust(node, dependencies.clock, log), name="kubelet")
        group.create_task(_keep_alive(supervisor, dependencies.clock), name="watchdog")


def _status_reader(
    node: Node, *, ledger: SqliteLedger, children: ChildCounts, policy: Callable[[], Policy]
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
            statuses = (
                view,
                tuple(
                    DeviceStatus(each.device, each.record, each.advertised, each.policy.enforcement)
                    for each in view.devices
                ),
            )
            last = statuses
        return statuses[1]

    def facts() -> ServiceStatus:
        slots, force = node.devices.eraser_pool, policy()
        return ServiceStatus(
            devices=devices(),
            handovers_waiting=node.waiting_starts,
            erasers_busy=slots.busy,
            erasers_free=slots.free,
            erasers_waiting=slots.waiting,
            child_starts=dict(children.starts),
            children_abandoned=children.abandoned_total,
            ledger_ok=ledger.health() == "ok",
            ledger_bytes=ledger.size_bytes,
            audit_head=ledger.head(),
            kubelet_trusted=node.pods.reading.trust is Trust.TRUSTED,
            kubelet_restarts=node.kubelet_restarts,
            policy=(force.name, force.digest),
        )

    return facts


async def _log_new_key(key: NodeKey, clock: Clock, ledger: SqliteLedger, journal: StructlogJournal) -> None:
    """Record the creation of a node key: verifiers that know only the old key will not accept its signatures."""
    event = Event("key.created", clock.wall(), fields={"key_id": key.key_id})
    await ledger.commit(LedgerChange(events=(event,)))
    journal.record([event])


def _service_paths(settings: ServiceSettings, policies: PolicySource, containers: Containers) -> dict[str, str]:
    """Return the paths that the service uses, by name, for the node's operators."""
    places: dict[str, Path | None] = {
        "state": settings.state_dir,
        "policy": policies.path.absolute(),
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
            raise Unavailable(
                f"The driver changed from {driver} to {now} while the service was running; the service must restart."
            )
        await dependencies.clock.sleep(_DRIVER_CHECK_INTERVAL)


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


async def _keep_alive(supervisor: SystemdNotifier, clock: Clock) -> None:
    """Send the watchdog signal from the engine's event loop, so that the supervisor restarts a hung loop."""
    while True:
        # Repeat READY: a supervisor that was too busy for the first one would end the service.
        supervisor.notify("READY=1\nWATCHDOG=1")
        await clock.sleep(5.0)


def _adjust_policy(policy: Policy, settings: ServiceSettings, log: structlog.typing.FilteringBoundLogger) -> Policy:
    """Return the policy with the settings of this start, for this backend."""
    row = BACKENDS[settings.backend.name]
    policy = policy.for_node(settings.node_name).with_signals(row.signal_table())
    everyone = (policy, *(each.policy for each in policy.overrides))
    impossible = [why for one in everyone for why in row.unsupported_settings(one.settings)]
    if impossible:
        raise InvalidConfiguration(f"{settings.policy}: settings: {' '.join(impossible)}")
    if not settings.disabled_healthchecks:
        return policy
    log.warning(
        "policy.xids-disabled",
        message="DP_DISABLE_HEALTHCHECKS makes the service ignore XIDs; prefer xids: ignore in the policy file, where "
        "the choice is on record.",
    )
    return with_digest(settings.disabled_healthchecks.apply_to(policy))


def _open_backend(
    settings: ServiceSettings, policies: PolicySource, containers: Containers
) -> AbstractAsyncContextManager[DeviceBackend]:
    accounts = ServiceAccounts(settings.kubelet_dir, settings.pod_logs_dir)

    async def infrastructure(pid: int) -> str | None:
        """Return the systemd unit, or the namespace and service account, by which the policy lists the process.

        Never identifies a process by its own name.
        """
        unit = systemd_unit_of(pid)
        if unit in policies.policy.infrastructure.systemd_units:
            return unit
        uid = await containers.pod_uid_of(pid) if policies.policy.infrastructure.pods else None
        account = None if uid is None else accounts.find(uid)
        return "/".join(account) if account in policies.policy.infrastructure.pods and account is not None else None

    question = policies.policy.limits.driver_call
    context = BackendContext(settings=settings, driver_call_timeout=question, infrastructure=infrastructure)
    return BACKENDS[settings.backend.name].open(context)


def _make_containers(settings: ServiceSettings) -> CgroupContainers | MarkerContainers:
    if not settings.uses_cgroups:
        return MarkerContainers()
    root = settings.cgroup_root or discover_root()
    if root is None:
        raise InvalidConfiguration("No cgroup hierarchy was found; pass its directory with --cgroup-root.")
    return CgroupContainers(root)


async def _wait_for_driver(
    backend: DeviceBackend,
    clock: Clock,
    log: structlog.typing.FilteringBoundLogger,
    supervisor: SystemdNotifier,
    *,
    wait: bool,
) -> tuple[NodeIdentity, tuple[Device, ...]]:
    """Return the driver's description of the node as soon as the driver answers.

    Raises:
        InvalidConfiguration: the driver is missing, and ``wait`` is False.
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
        if state.attempt_number % 30 == 1 and state.outcome is not None:
            log.warning("driver.unavailable", message=str(state.outcome.exception()))

    ask = tenacity.AsyncRetrying(
        retry=tenacity.retry_if_exception_type(Unavailable),
        wait=tenacity.wait_fixed(1),
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
) -> MetricsListener | None:
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


def _serve_metrics(
    listener: MetricsListener,
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
