"""Watches the pods of the node: detects releases, restarts of the kubelet and assignments made by others.

A release is detected when the kernel reports the end of a pod's containers, and otherwise, at regular intervals, when the
kubelet no longer lists the pod.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from functools import partial

from scrubber.domain.assignment import Claim, KubeletReading, Pod, Trust, presumed_sandbox
from scrubber.domain.errors import LedgerFailure, ScrubberError, Unreadable
from scrubber.domain.states import Hygiene
from scrubber.engine.dependencies import Dependencies
from scrubber.engine.device.controller import DeviceController
from scrubber.engine.loops.health import run_check
from scrubber.engine.node import Node
from scrubber.ports.record import Event

__all__ = ["follow_pod_ends", "watch_pods"]

_WATCH_AGAIN = 10.0
"""Seconds until a pod whose end cannot be watched is tried again. Meanwhile the kubelet's list shows its end."""


async def watch_pods(node: Node, *, dependencies: Dependencies, interval: float) -> None:
    """Detect releases, kubelet restarts and assignments made by others.

    Runs every ``interval`` seconds and whenever ``node.pod_check_requested`` is set.
    """
    kubelet, before = "", KubeletReading(Trust.UNREADABLE)
    reported: frozenset[tuple[str, Pod]] = frozenset()
    while True:
        node.pod_check_requested.clear()
        node.devices.track_pods()
        reading = await node.pods.refresh()
        controllers = list(node.devices.controllers.values())
        if reading.kubelet_instance and kubelet and reading.kubelet_instance != kubelet:
            node.kubelet_restarts += 1
            await asyncio.gather(
                *(
                    run_check(controller, partial(_void_after_restart, controller, before, reading, dependencies))
                    for controller in controllers
                )
            )
        kubelet, before = reading.kubelet_instance or kubelet, reading if reading.kubelet_instance else before
        if reading.trust is not Trust.UNREADABLE:
            with suppress(LedgerFailure):  # repeated in the next round
                await node.claims.add_listed_pods(reading)
            reported = await _report_other_assignments(node, reading, reported, dependencies)
        looks = [
            run_check(controller, partial(_check_pods, controller, reading, dependencies)) for controller in controllers
        ]
        await asyncio.gather(*looks)
        node.update_notices(reading)
        try:
            async with dependencies.clock.timeout(interval):
                await node.pod_check_requested.wait()
        except TimeoutError:
            continue


async def follow_pod_ends(node: Node, *, dependencies: Dependencies) -> None:
    """Release devices as soon as the kernel shows that their pods have ended."""
    following: dict[tuple[Pod, str, bool], asyncio.Task[None]] = {}
    failures = _WatchFailures(dependencies)
    version = 0
    async with asyncio.TaskGroup() as group:
        while True:
            # The container that was started is part of the key: the pod may have ended before it was identified. So is
            # whether the kubelet lists a claim for the pod, and whether a job's end was reported: only then is it certain
            # that the cgroup exists.
            starts = {
                (pod, grant.started, grant.claim is not None and _may_have_cgroup(grant.claim, pod))
                for record in node.devices.records()
                if record.hygiene is Hygiene.IN_USE
                for grant in record.open_grants
                for pod in grant.pods
                if pod.uid is not None
            }
            for start in following.keys() - starts:
                following.pop(start).cancel()
            for start in starts - following.keys():
                pod = start[0]
                following[start] = group.create_task(
                    _follow_pod_end(node, pod, failures, dependencies), name=f"end of pod {pod.uid}"
                )
            failures.keep({pod for pod, _, _ in starts})
            version = (await node.wait_for_change(version)).version


def _may_have_cgroup(claim: Claim, pod: Pod) -> bool:
    return pod in claim.listed_pods if claim.manager is None else not claim.is_prepared


class _WatchFailures:
    """Reports that the ends of pods are not watched, once until all are watched again."""

    def __init__(self, dependencies: Dependencies) -> None:
        self._dependencies = dependencies
        self._unwatched: set[Pod] = set()
        self._reported = False

    def keep(self, pods: set[Pod]) -> None:
        """Forget all other pods: they have ended."""
        self._unwatched &= pods

    def note(self, pod: Pod, error: Unreadable | None) -> None:
        """Note why the end of ``pod`` cannot be watched; None if it is."""
        journal, now = self._dependencies.journal, self._dependencies.clock.wall()
        self._unwatched = self._unwatched - {pod} if error is None else self._unwatched | {pod}
        if error is not None and not self._reported:
            journal.record([Event("pods.watch-failed", now, fields={"message": str(error)})])
        if self._reported and not self._unwatched:
            journal.record([Event("pods.watched", now)])
        self._reported = bool(self._unwatched)


async def _follow_pod_end(node: Node, pod: Pod, failures: _WatchFailures, dependencies: Dependencies) -> None:
    """Check the devices of ``pod`` now and whenever one of its containers ends."""
    while True:
        try:
            ended = dependencies.pod_cgroups.watch_end(pod)
        except Unreadable as error:
            failures.note(pod, error)
            await dependencies.clock.sleep(_WATCH_AGAIN)
            continue
        failures.note(pod, None)
        if ended is None:
            return
        try:
            checks = [
                run_check(controller, partial(_note_container_end, controller))
                for controller in node.devices.controllers.values()
                if any(pod in grant.pods for grant in controller.state.record.open_grants)
            ]
            await asyncio.gather(*checks)
            await asyncio.wait({ended})
        finally:
            ended.cancel()
        if ended.cancelled():
            return  # the service no longer watches


# See docs/decisions/0011-containers-that-start-without-the-gate.md.
async def _void_after_restart(
    controller: DeviceController, before: KubeletReading, after: KubeletReading, dependencies: Dependencies
) -> None:
    """Void certificates and exceptions after a kubelet restart.

    Until the plugin has registered again, a restarted kubelet starts containers without a hand-over. A container that
    ended before it was detected would leave its data under a certificate or, where a pod waited for a device that
    others have, under an exception or for a pod that joins them.

    Args:
        before, after: the last readings before and after the restart.
    """
    record = controller.state.record
    granted = {pod for grant in record.open_grants for pod in grant.pods}
    claims = (*record.prepared_claims, *record.admin_claims)
    granted |= {pod for reading in (before, after) for claim in claims for pod in reading.pods_of_claim(claim)}
    waiting = {each.pod for reading in (before, after) for each in reading.all_assignments(record.device)} - granted
    others = {pod.tenant for pod in waiting} - {pod.tenant for pod in granted}
    if controller.state.job is None and (
        record.hygiene is Hygiene.CLEAN or (record.hygiene is Hygiene.IN_USE and waiting)
    ):
        message = (
            "The kubelet was restarted and starts containers without calling the plugin until the plugin has "
            "registered."
        )
        fields = {"reason": "kubelet-restart", "message": message}
        event = Event("certificate.voided", dependencies.clock.wall(), controller.id, fields=fields)
        await controller.occupancy.void_for_unauthorized_use(
            event, observed=record.hygiene is Hygiene.IN_USE and bool(others)
        )


async def _report_other_assignments(
    node: Node, reading: KubeletReading, reported: frozenset[tuple[str, Pod]], dependencies: Dependencies
) -> frozenset[tuple[str, Pod]]:
    """Report assignments of our devices by another plugin or a DRA driver, each once while it lasts."""
    own = node.assigners()
    foreign = {
        (device, each.pod): each
        for device, names in own.items()
        if names
        for each in reading.assigned_by_other_plugins(device, names)
    }
    for (device, pod), assignment in foreign.items():
        if (device, pod) in reported or device not in node.devices.controllers:
            continue
        message = (
            f"{assignment.resource} assigned it to {pod.namespace}/{pod.name}; it is also advertised as "
            f"{', '.join(sorted(own[device]))}. Only one of them may assign it: stop the other plugin or DRA driver, "
            "or exclude the device."
        )
        fields = {"use": "assigned-by-another-plugin", "resource": assignment.resource, "message": message}
        event = Event("unauthorized.use.detected", dependencies.clock.wall(), device, fields=fields)
        try:
            await node.devices.controllers[device].occupancy.void_for_unauthorized_use(event)
        except ScrubberError:
            foreign = {key: each for key, each in foreign.items() if key != (device, pod)}  # reported in the next round
    return frozenset(foreign)


async def _check_pods(controller: DeviceController, reading: KubeletReading, dependencies: Dependencies) -> None:
    await controller.health.end_expired_break_glass()
    await _name_last_grant(controller, reading, dependencies)
    # Only here: two samples in quick succession could take a helper of the runtime for a container's first process.
    record, running = controller.state.record, False
    for grant in record.open_grants if record.hygiene is Hygiene.IN_USE else ():
        for each in grant.by_pod():
            running |= await controller.pods.sample_processes(each) and each.boot == dependencies.identity.boot
    if not running:
        await controller.occupancy.release_if_over()


async def _note_container_end(controller: DeviceController) -> None:
    """Release the device if its pods have ended, unless a start waits: that one decides whether a scrub is needed."""
    if not controller.occupancy.has_waiting_start:
        await controller.occupancy.release_if_over()
    controller.occupancy.note_container_end()


async def _name_last_grant(controller: DeviceController, reading: KubeletReading, dependencies: Dependencies) -> None:
    """Add the pod to a grant that was made while no source named its pod, once a source names it.

    The kubelet has not allocated the device again since, so the pod that has it now is the one that it was granted to.
    """
    last = controller.state.record.last_grant
    assignment = reading.assignment_of(controller.id)
    if assignment is not None and reading.shares_of(assignment.pod, controller.id):
        return  # other pods may have been assigned shares of a shared device before this one was granted
    if (
        last is None
        or last.claim is not None
        or (last.pod is not None and last.pod.uid is not None)
        or controller.state.record.hygiene is not Hygiene.IN_USE
    ):
        return
    if (
        reading.trust is not Trust.TRUSTED
        or assignment is None
        or assignment.pod.uid is None
        or controller.state.allocated_since
    ):
        return
    try:
        baseline = presumed_sandbox(await dependencies.containers.processes(assignment.pod), held=True)
    except Unreadable:
        return
    await controller.occupancy.record_grant_pod(last.sequence, assignment, baseline)
