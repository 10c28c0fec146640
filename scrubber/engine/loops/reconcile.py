"""Service start: whatever happened before was not watched. Who has a device keeps it; everything else is dirty."""

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
from scrubber.domain.states import Hygiene
from scrubber.engine.dependencies import Dependencies
from scrubber.engine.device.controller import DeviceController
from scrubber.engine.node import Node
from scrubber.ports.record import Event, LedgerChange, LedgerState

__all__ = ["add_device", "reconcile"]


async def reconcile(node: Node, devices: Iterable[Device], state: LedgerState, *, dependencies: Dependencies) -> None:
    """Bring ledger, kubelet and devices to one story; nothing is handed over before this is done.

    Raises:
        LedgerFailure: the new start cannot be recorded.
    """
    now = dependencies.clock.wall()
    boot = dependencies.identity.boot
    known = {device.id: state.records.get(device.id, DeviceRecord(device.id)) for device in devices}
    started = {device.id: _started(device, known[device.id], boot, now) for device in devices}
    abandoned = tuple(_abandoned(scrub, now) for scrub in state.unfinished_scrubs)
    event = Event(
        "service.started",
        now,
        fields={"devices": len(started), "abandoned_scrubs": len(abandoned), "key_id": dependencies.signer.key_id},
    )
    learnt = [_baseline_events(known[device.id], started[device.id], now) for device in devices]
    events = (event, *(each for one in learnt for each in one))
    await dependencies.ledger.commit(LedgerChange(records=tuple(started.values()), scrubs=abandoned, events=events))
    dependencies.journal.record(events)
    controllers = [node.devices.make_controller(device, started[device.id]) for device in devices]
    grants = [grant for controller in controllers for grant in controller.state.record.open_grants]
    await _check_all(node, controllers, grants, dependencies)
    for controller in controllers:
        node.devices.add(controller)
    node.mark_ready()


async def add_device(node: Node, device: Device, state: LedgerState, *, dependencies: Dependencies) -> None:
    """A device that appeared while the service runs: known from the ledger or new, and dirty either way."""
    known = node.devices.removed_records.get(device.id) or state.records.get(device.id) or DeviceRecord(device.id)
    now = dependencies.clock.wall()
    record = _started(device, known, dependencies.identity.boot, now)
    events = (Event("device.appeared", now, device.id), *_baseline_events(known, record, now))
    await dependencies.ledger.commit(LedgerChange(records=(record,), events=events))
    dependencies.journal.record(events)
    controller = node.devices.make_controller(device, record)
    await _check_all(node, [controller], [*node.devices.open_grants(), *record.open_grants], dependencies)
    node.devices.add(controller)


def _started(device: Device, known: DeviceRecord, boot: str, now: float) -> DeviceRecord:
    """The record as of this start. A device that was never seen before should be as it is now."""
    record = known.after_service_start(boot)
    expected = (
        Baseline(baseline_facts(device), at=now) if record.baseline is None else record.baseline.with_new_facts(device)
    )
    return replace(record, baseline=expected)


def _baseline_events(before: DeviceRecord, after: DeviceRecord, now: float) -> tuple[Event, ...]:
    """What is known from now on of what the device should be."""
    known = () if before.baseline is None else before.baseline.facts
    new = dict(set(() if after.baseline is None else after.baseline.facts) - set(known))
    return (Event("baseline.taken", now, after.device, fields=dict(sorted(new.items()))),) if new else ()


def _abandoned(scrub: ScrubRecord, now: float) -> ScrubRecord:
    return replace(scrub, ended=now, outcome=Outcome.ABANDONED)


async def _check_all(
    node: Node, controllers: Iterable[DeviceController], grants: Iterable[Grant], dependencies: Dependencies
) -> None:
    """Find out who has these devices, before anybody else may do anything with them.

    Args:
        grants: all that the ledger still calls open, of any device.
    """
    asked = frozenset(grant.pod for grant in grants if grant.pod is not None)
    node.pods.track_more(asked)
    await node.pods.refresh()
    await asyncio.gather(*(_check_device(controller, asked, dependencies) for controller in controllers))


async def _check_device(controller: DeviceController, gated_pods: frozenset[Pod], dependencies: Dependencies) -> None:
    """A device that cannot be looked at is out of service, stays with the pods it was granted to, and stops nothing."""
    try:
        await _adopt_if_used(controller, gated_pods, dependencies)
    except (DeviceFault, Unavailable) as error:
        fault = error if isinstance(error, DeviceFault) else Unreadable(str(error))
        if controller.state.record.open_grants and controller.state.record.hygiene is Hygiene.DIRTY:
            await controller.occupancy.adopt()
        await controller.health.report([fault_finding(Step.HOLDERS, fault)])


async def _adopt_if_used(controller: DeviceController, gated_pods: frozenset[Pod], dependencies: Dependencies) -> None:
    """Leave a device with the pod that has it; otherwise it stays dirty, and tending scrubs it.

    An orphaned eraser holds its device too: it is ended first, or left for the scrub to deal with.
    """
    limits = controller.state.policy.limits
    orphan = await dependencies.eraser.find_orphan(controller.state.device)
    if orphan is not None:
        ended = await dependencies.eraser.terminate_orphan(controller.state.device, limits.driver_call * 5)
        fields = {"pid": orphan, "ended": ended}
        event = Event("eraser.orphan", dependencies.clock.wall(), controller.id, fields=fields)
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
    """Pods that were there before this ledger: adopted if they run, not if they only wait for their start.

    Args:
        gated_pods: pods whose starts were asked about: of such a one, that another container of it runs says nothing of a device
            that it was never granted.
    """
    named = controller.pods.reading.all_assignments(controller.id)
    by_pod = {each.pod: each for each in reversed(named) if each.pod.uid is not None}
    for pod, assignment in by_pod.items():
        try:
            processes = await dependencies.containers.processes(pod)
            sandbox = presumed_sandbox(processes, held=held)
        except Unreadable:
            sandbox, running = (), True
        else:
            # A sandbox may have several processes; a pod none of whose containers was ever started has nothing else.
            running = (
                bool(exclude_baseline(processes, sandbox)) and dependencies.assignments.container_starts(pod) != {}
            )
        # Of several pods that share it, that somebody holds it says nothing of this one.
        if (running and pod not in gated_pods) or (held and len(by_pod) == 1):
            await controller.occupancy.adopt(assignment, sandbox)
