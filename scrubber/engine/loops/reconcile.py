"""Reconciles ledger, kubelet and devices at service start, because nothing was watched before it.

A device in use stays with its pod; every other device is dirty.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import replace

from scrubber.domain.assignment import Pod, exclude_baseline, presumed_sandbox
from scrubber.domain.baseline import Baseline, baseline_facts
from scrubber.domain.device import Device
from scrubber.domain.errors import DeviceFault, Unavailable, Unreadable
from scrubber.domain.evidence import Outcome, ScrubRecord, Step
from scrubber.domain.health.signals import fault_finding
from scrubber.domain.pods import PodState
from scrubber.domain.record import DeviceRecord, Grant
from scrubber.domain.states import Health, Hygiene
from scrubber.engine import events
from scrubber.engine.dependencies import Dependencies
from scrubber.engine.device.controller import DeviceController
from scrubber.engine.node import Node
from scrubber.ports.record import Event, LedgerChange, LedgerState

__all__ = ["add_device", "reconcile"]


async def reconcile(node: Node, devices: Iterable[Device], state: LedgerState, *, dependencies: Dependencies) -> None:
    """Reconcile ledger, kubelet and devices; nothing is handed over before this is done.

    Raises:
        LedgerFailure: the service start cannot be recorded.
    """
    now = dependencies.clock.wall()
    boot = dependencies.identity.boot
    known = {device.id: state.records.get(device.id, DeviceRecord(device.id)) for device in devices}
    started: dict[str, DeviceRecord] = {}
    abandoned = tuple(_abandoned(scrub, now) for scrub in state.unfinished_scrubs)
    event = Event(
        "service.started",
        now,
        fields={"devices": len(known), "abandoned_scrubs": len(abandoned), "key_id": dependencies.signer.key_id},
    )

    def start(externally_reset: frozenset[str]) -> LedgerChange:
        for device in devices:
            started[device.id] = _started(
                device, known[device.id], boot, now, externally_reset=device.id in externally_reset
            )
        baselines = [_baseline_events(known[device.id], started[device.id], now) for device in devices]
        ended = [_abandonment_events(scrub, known.get(scrub.device)) for scrub in abandoned]
        failed = [_recovery_events(known[device.id], started[device.id], now) for device in devices]
        rows = (event, *(each for some in (*ended, *failed, *baselines) for each in some))
        return LedgerChange(records=tuple(started.values()), scrubs=abandoned, events=rows)

    node.devices.removed_records |= {device: each for device, each in state.records.items() if device not in known}
    committed = await dependencies.agent_pauses.commit_start(known.keys(), start)
    dependencies.journal.record(committed.events)
    controllers = [node.devices.make_controller(device, started[device.id]) for device in devices]
    grants = [grant for controller in controllers for grant in controller.state.record.open_grants]
    await _check_all(node, controllers, grants, dependencies)
    for controller in controllers:
        node.devices.add(controller)
    node.mark_ready()


async def add_device(node: Node, device: Device, *, dependencies: Dependencies) -> None:
    """Add a device that appeared while the service runs: known from the ledger or new, and dirty in both cases."""
    async with node.devices.arrivals:
        await _add_device(node, device, dependencies)


async def _add_device(node: Node, device: Device, dependencies: Dependencies) -> None:
    known = node.devices.removed_records.get(device.id) or DeviceRecord(device.id)
    now = dependencies.clock.wall()
    appeared = Event("device.appeared", now, device.id)

    def start(externally_reset: frozenset[str]) -> LedgerChange:
        record = _started(device, known, dependencies.identity.boot, now, externally_reset=bool(externally_reset))
        rows = (appeared, *_recovery_events(known, record, now), *_baseline_events(known, record, now))
        return LedgerChange(records=(record,), events=rows)

    committed = await dependencies.agent_pauses.commit_start({device.id}, start)
    (record,) = committed.records
    node.devices.removed_records[device.id] = record  # until it is added
    dependencies.journal.record(committed.events)
    controller = node.devices.make_controller(device, record)
    await _check_all(node, [controller], [*node.devices.open_grants(), *record.open_grants], dependencies)
    node.devices.add(controller)


def _started(device: Device, known: DeviceRecord, boot: str, now: float, *, externally_reset: bool) -> DeviceRecord:
    """Return the record as of this start. A device never seen before gets its current facts as its baseline."""
    record = known.after_service_start(boot)
    if externally_reset:
        record = replace(record.after_external_reset(now), version=record.version)
    expected = (
        Baseline(baseline_facts(device), at=now) if record.baseline is None else record.baseline.with_new_facts(device)
    )
    return replace(record, baseline=expected)


def _baseline_events(before: DeviceRecord, after: DeviceRecord, now: float) -> tuple[Event, ...]:
    """Return the event for baseline facts that are new."""
    known = () if before.baseline is None else before.baseline.facts
    new = dict(set(() if after.baseline is None else after.baseline.facts) - set(known))
    return (Event("baseline.recorded", now, after.device, fields=dict(sorted(new.items()))),) if new else ()


def _abandoned(scrub: ScrubRecord, now: float) -> ScrubRecord:
    return replace(scrub, ended=now, outcome=Outcome.ABANDONED)


def _abandonment_events(scrub: ScrubRecord, known: DeviceRecord | None) -> tuple[Event, ...]:
    """Return the events for a scrub that the last service did not finish. When it stopped is not known."""
    tenant = None if known is None else known.tenant
    unknown = {"duration_seconds": None, "message": "The service ended during this scrub."}
    return tuple(
        replace(event, fields={**event.fields, **unknown}) if event.name == "scrub.finished" else event
        for event in events.scrub_finished(scrub, None, tenant)
    )


def _recovery_events(before: DeviceRecord, after: DeviceRecord, now: float) -> tuple[Event, ...]:
    """Return the event for a recovery that the last service did not finish."""
    return events.health_changed(before, after, now) if before.health is Health.RECOVERING else ()


async def _check_all(
    node: Node, controllers: Iterable[DeviceController], grants: Iterable[Grant], dependencies: Dependencies
) -> None:
    """Find out which pods have these devices, before anything else may happen to them.

    Args:
        grants: all grants that are open according to the ledger, of any device.
    """
    pods = frozenset(pod for grant in grants for pod in grant.pods)
    node.pods.track_more(pods)
    await node.pods.refresh()
    await asyncio.gather(*(_check_device(controller, pods, dependencies) for controller in controllers))


async def _check_device(controller: DeviceController, gated_pods: frozenset[Pod], dependencies: Dependencies) -> None:
    """Check one device; one that cannot be inspected is quarantined, stays with its pods, and blocks no other."""
    try:
        await _adopt_if_used(controller, gated_pods, dependencies)
    except (DeviceFault, Unavailable) as error:
        fault = error if isinstance(error, DeviceFault) else Unreadable(str(error))
        if controller.state.record.open_grants and controller.state.record.hygiene is Hygiene.DIRTY:
            await controller.occupancy.adopt()
        await controller.health.report([fault_finding(Step.HOLDERS, fault)])


async def _adopt_if_used(controller: DeviceController, gated_pods: frozenset[Pod], dependencies: Dependencies) -> None:
    """Leave a device with the pod that uses it; otherwise it stays dirty, and the recovery loop scrubs it.

    An orphaned eraser holds its device too: it is killed first, or left for the scrub to handle.
    """
    limits = controller.state.policy.limits
    orphan = await dependencies.eraser.find_orphan(controller.state.device)
    if orphan is not None:
        ended = await dependencies.eraser.terminate_orphan(controller.state.device, limits.driver_call * 5)
        fields = {"pid": orphan, "killed": ended}
        event = Event("eraser.orphan.found", dependencies.clock.wall(), controller.id, fields=fields)
        await dependencies.ledger.commit(LedgerChange(events=(event,)))
        dependencies.journal.record([event])
        if not ended:
            return
    held = await controller.occupancy.is_held()
    for _, where in await controller.occupancy.pod_liveness():
        if where.state is PodState.ALIVE:
            await controller.occupancy.adopt()
            return
    await _adopt_unrecorded_pods(controller, gated_pods, dependencies, held=held)


async def _adopt_unrecorded_pods(
    controller: DeviceController, gated_pods: frozenset[Pod], dependencies: Dependencies, *, held: bool
) -> None:
    """Adopt pods that are older than this ledger if they run, but not if they only wait for their start.

    Args:
        gated_pods: pods whose starts went through a hand-over. Another running container of such a pod is no evidence
            about a device that the pod was never granted.
    """
    reading = controller.pods.reading
    named = reading.all_assignments(controller.id)
    admins = {
        pod for each in controller.state.record.admin_claims for pod in (*each.pods, *reading.pods_of_claim(each))
    }
    by_pod = {each.pod: each for each in reversed(named) if each.pod.uid is not None and each.pod not in admins}
    claimed = {pod for each in controller.state.record.open_grants if each.claim is not None for pod in each.pods}
    for pod, assignment in by_pod.items():
        if pod in claimed:  # listed until its claim's release has ended, which an adoption would keep from ever ending
            continue
        try:
            processes = await dependencies.containers.processes(pod)
            sandbox = presumed_sandbox(processes, held=held)
        except Unreadable:
            sandbox, running = (), True
        else:
            # A sandbox may have several processes; a pod none of whose containers was ever started has no other
            # processes.
            running = (
                bool(exclude_baseline(processes, sandbox)) and dependencies.assignments.container_starts(pod) != {}
            )
        # If several pods share the device, its being held is no evidence about this one.
        if (running and pod not in gated_pods) or (held and len(by_pod) == 1):
            await controller.occupancy.adopt(assignment, sandbox)
