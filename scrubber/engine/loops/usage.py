"""Watches the use of devices: unauthorized use is detected, reported and handled as the policy defines.

A grant defines which processes may use a device; the driver reports which do. Nothing prevents a privileged pod or a
process of the node from opening a device, so such use is detected afterwards: it voids the certificate, and the device
no longer counts as exclusively used.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial

from scrubber.domain.assignment import KubeletReading, Trust, presumed_sandbox
from scrubber.domain.errors import Unreadable
from scrubber.domain.evidence import Finding, FindingCode, Severity, Step
from scrubber.domain.infrastructure import NamedHolder, ProcessOwner
from scrubber.domain.policy import Enforcement, Policy, UnauthorizedUseAction
from scrubber.domain.states import Hygiene
from scrubber.domain.telemetry import Holder, HolderKind
from scrubber.domain.usage import UseKind, classify_use
from scrubber.engine.dependencies import Dependencies
from scrubber.engine.device.controller import DeviceController
from scrubber.engine.loops.health import run_check
from scrubber.engine.node import Node
from scrubber.ports.record import Event

__all__ = ["check_use", "watch_use"]

_RECHECK_DELAY = 0.1
"""Seconds until an unauthorized user is checked again: a process that is just being executed briefly shows no pod."""

_MAX_SHOWN = 8
"""Maximum number of unauthorized users of one device that are published: there may be any number."""

_MIN_INTERVAL_SHARE = 0.1
"""The shortest pause between two checks, as a share of the longest."""

Identity = tuple[int, int]


@dataclass(frozen=True, slots=True)
class _User:
    """A process that uses a device without a grant; ``pod`` is the UID of its pod, None for a process of no pod."""

    holder: Holder
    pod: str | None
    use: UseKind
    owner: ProcessOwner

    @property
    def reported_as(self) -> str:
        return self.pod or "node"

    @property
    def message(self) -> str:
        who = f"PID {self.holder.pid} ({self.holder.command or 'unknown'}) {self.owner}"
        return f"{who} uses the device without a grant."

    def named(self, at: float) -> NamedHolder:
        """Return it for display; ``at``: wall-clock seconds of the check."""
        code = FindingCode.VALIDATION_HOLDER if self.use is UseKind.VALIDATION else FindingCode.UNAUTHORIZED_USE
        return NamedHolder(self.holder, self.owner, code, at)


# See docs/decisions/0020-unauthorized-use.md.
async def watch_use(
    node: Node, *, dependencies: Dependencies, interval: float, random_fraction: Callable[[], float]
) -> None:
    """Check the users of each device at random moments, at most ``interval`` seconds apart.

    Does not wait for the kubelet.

    If the checks were at regular moments, a process could use a device between two of them and never be detected.

    Args:
        random_fraction: returns a random number from 0 to 1 that no process of a tenant can predict.
    """
    running: dict[str, asyncio.Task[None]] = {}
    async with asyncio.TaskGroup() as group:
        while True:
            # A check that takes long, because a process does not die, must not cost other devices their certificates.
            running = {device: task for device, task in running.items() if not task.done()}
            for device, controller in node.devices.controllers.items():
                controller.occupancy.coverage.heartbeat()
                if device not in running:
                    check = run_check(controller, partial(check_use, controller, dependencies=dependencies))
                    running[device] = group.create_task(check, name=f"use {device}")
            await dependencies.clock.sleep(
                interval * (_MIN_INTERVAL_SHARE + (1.0 - _MIN_INTERVAL_SHARE) * random_fraction())
            )


async def check_use(controller: DeviceController, *, dependencies: Dependencies) -> None:
    """Check one device once. During a scrub the driver is not queried: the query breaks an eraser's fence."""
    if controller.state.job is not None:
        return
    seen = controller.state.record
    held = await controller.occupancy.is_held()
    await controller.occupancy.void_after_gap()
    if not held:
        controller.occupancy.set_unauthorized_users(())
        return
    if controller.state.record.hygiene is Hygiene.CLEAN:
        await controller.occupancy.void_certificate(seen)
    suspects = await _suspects(controller, dependencies)
    if not suspects:
        controller.occupancy.set_unauthorized_users(())
        return
    await dependencies.clock.sleep(_RECHECK_DELAY)
    again = await _suspects(controller, dependencies)
    found = [each for identity, each in again.items() if _confirmed(identity, each, suspects)]
    controller.occupancy.set_unauthorized_users(
        tuple(sorted(each.message for each in found if each.use is UseKind.UNAUTHORIZED))[:_MAX_SHOWN],
        tuple(
            each.named(dependencies.clock.wall())
            for each in sorted(found, key=lambda each: each.holder.identity)
            if each.use is not UseKind.STARTED_WITHOUT_HAND_OVER
        )[:_MAX_SHOWN],
    )
    by_use = {use: [each for each in found if each.use is use] for use in UseKind}
    await _adopt_ungated(controller, by_use[UseKind.STARTED_WITHOUT_HAND_OVER], dependencies)
    await _handle_validation(controller, by_use[UseKind.VALIDATION], dependencies)
    await _handle_unauthorized(controller, by_use[UseKind.UNAUTHORIZED], dependencies)


def _confirmed(identity: Identity, user: _User, suspects: Mapping[Identity, _User]) -> bool:
    """Whether the previous check showed the same use. A pod's process may be another one: processes can take turns."""
    if user.pod is None:
        return identity in suspects and suspects[identity].pod is None
    return any((each.pod, each.use) == (user.pod, user.use) for each in suspects.values())


async def _suspects(controller: DeviceController, dependencies: Dependencies) -> dict[Identity, _User]:
    """Return the processes that use the device now without a grant."""
    if controller.state.job is not None:
        return {}
    queried_at = dependencies.clock.wall()
    users = await dependencies.holders.list_users(controller.state.device)
    pods = {
        user: await dependencies.containers.pod_uid_of(user.pid)
        for user in users
        if user.pid and user.kind is not HolderKind.INFRASTRUCTURE
    }
    # Use the grants of this moment: a grant made while the processes were queried may be theirs.
    record, reading = controller.state.record, controller.pods.reading
    found = {}
    for user, uid in pods.items():
        use = classify_use(uid, record.device, record.open_grants, reading, admin_claims=record.admin_claims)
        if use is UseKind.GRANTED and uid is not None:
            controller.pods.note_use(record.device, uid, queried_at)
        elif user.kind is HolderKind.VALIDATION and use is UseKind.UNAUTHORIZED:
            use = UseKind.VALIDATION
        if use in (UseKind.VALIDATION, UseKind.UNAUTHORIZED, UseKind.STARTED_WITHOUT_HAND_OVER):
            found[user.identity] = _User(user, uid, use, await dependencies.owners.owner_of(user.pid))
    return found


async def _adopt_ungated(controller: DeviceController, users: Iterable[_User], dependencies: Dependencies) -> None:
    """Adopt pods whose containers the kubelet started without a hand-over.

    That can happen between the kubelet's start and our registration.
    """
    for user in users:
        named = controller.pods.reading.all_assignments(controller.id)
        assignment = next((each for each in named if each.pod.uid == user.pod), None)
        if assignment is None or any(assignment.pod in grant.pods for grant in controller.state.record.open_grants):
            continue
        if controller.state.job is not None or controller.state.record.hygiene not in (Hygiene.DIRTY, Hygiene.IN_USE):
            continue
        try:
            baseline = presumed_sandbox(await dependencies.containers.processes(assignment.pod), held=True)
        except Unreadable:
            baseline = ()
        message = (
            f"The kubelet started {assignment.pod.namespace}/{assignment.pod.name} on the device without "
            "calling the plugin; the pod may have read data of an earlier tenant. The device is scrubbed "
            "when the pod is over."
        )
        await controller.occupancy.void_for_unauthorized_use(_event(controller, user, message, dependencies))
        await controller.occupancy.adopt(assignment, baseline)


async def _handle_validation(controller: DeviceController, users: Iterable[_User], dependencies: Dependencies) -> None:
    """Record that programs of the node's infrastructure used the device; whatever the policy, none is a fault."""
    for user in users:
        news = controller.occupancy.unauthorized_use.should_report(f"validation {user.reported_as}")
        if news or not controller.state.record.contaminated:
            message = (
                f"PID {user.holder.pid} ({user.holder.command or 'unknown'}) of {user.holder.owner}, infrastructure of "
                "the node, runs a program on the device. The device is scrubbed before its next grant."
            )
            fields = _fields(controller, user, message)
            await controller.occupancy.void_for_unauthorized_use(
                Event("validation.use.detected", dependencies.clock.wall(), controller.id, fields=fields)
            )


async def _handle_unauthorized(
    controller: DeviceController, users: Iterable[_User], dependencies: Dependencies
) -> None:
    policy = controller.state.policy
    for user in users:
        device, findings = controller.id, _faults(user, policy, controller.pods.reading)
        # The certificate is voided at once, whether or not similar use was reported within the last minute.
        news = controller.occupancy.unauthorized_use.should_report(user.reported_as)
        if news or not controller.state.record.contaminated or (findings and controller.state.record.advertised):
            await controller.occupancy.void_for_unauthorized_use(
                _event(controller, user, user.message, dependencies), findings
            )
        record, reading = controller.state.record, controller.pods.reading
        if await controller.occupancy.unauthorized_use.handle(
            user.holder, user.pod, record, reading=reading, policy=policy
        ):
            fields = {"pid": user.holder.pid, "pod_uid": user.pod}
            await controller.occupancy.void_for_unauthorized_use(
                Event("unauthorized.process.killed", dependencies.clock.wall(), device, fields=fields)
            )


def _faults(user: _User, policy: Policy, reading: KubeletReading) -> tuple[Finding, ...]:
    """Return the faults that the policy derives from the use.

    While the kubelet's list is not trusted, use by a pod takes no device out of service: the pod may have been assigned
    it.
    """
    if policy.unauthorized_use is not UnauthorizedUseAction.QUARANTINE or policy.enforcement is not Enforcement.ENFORCE:
        return ()
    if user.pod is not None and reading.trust is not Trust.TRUSTED:
        return ()
    message = "A process used the device without a grant."
    return (Finding(Step.HOLDERS, FindingCode.UNAUTHORIZED_USE, Severity.FAULT, message),)


def _event(controller: DeviceController, user: _User, message: str, dependencies: Dependencies) -> Event:
    fields = _fields(controller, user, message)
    return Event("unauthorized.use.detected", dependencies.clock.wall(), controller.id, fields=fields)


def _fields(controller: DeviceController, user: _User, message: str) -> dict[str, str | int | float | bool | None]:
    return {
        "use": user.use.value,
        "pid": user.holder.pid,
        "command": user.holder.command,
        "pod_uid": user.pod,
        "state": controller.state.record.state,
        "message": message,
    }
