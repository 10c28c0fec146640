"""Operator actions: scrub, reset, quarantine, release from quarantine, accept a baseline, break-glass override.

This module checks what concerns more than the device's own record; the device's controller decides and commits.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from dataclasses import replace

from scrubber.domain.baseline import baseline_facts
from scrubber.domain.claims import replaced_claims
from scrubber.domain.errors import DeviceBusy, InvalidRequest, Refused, ScrubberError
from scrubber.domain.evidence import PathKind, ScrubTrigger
from scrubber.domain.pods import PodState
from scrubber.domain.policy import ResetMode
from scrubber.domain.reset_plan import ResetPlan
from scrubber.domain.states import Cause, Hygiene
from scrubber.engine.agent_pauses import NO_WAY_REMEDY
from scrubber.engine.dependencies import Dependencies
from scrubber.engine.device.controller import DeviceController
from scrubber.engine.devices import Devices
from scrubber.engine.views import DeviceView, ScrubUpdate

__all__ = ["OperatorActions"]

_MAX_NAMED = 5
"""Maximum number of processes that a refusal names."""


class OperatorActions:
    """Implements :class:`scrubber.engine.views.Actions`."""

    def __init__(self, *, devices: Devices, dependencies: Dependencies) -> None:
        self._devices = devices
        self._dependencies = dependencies

    async def scrub(self, device: str, path: PathKind, actor: str) -> AsyncIterator[ScrubUpdate]:
        controller = self._devices.find(device)
        await self._require_free(controller, actor)
        if path is PathKind.FAST:
            if controller.state.job is not None:
                raise DeviceBusy(
                    f"Device {controller.id} is being scrubbed ({controller.state.job.id}), and checks would "
                    "interrupt the scrub: request the slow path to join it."
                )
            record = await controller.scrubs.check(ScrubTrigger.ON_DEMAND, actor)
            await controller.scrubs.record_check(record)
            yield ScrubUpdate(record.id, controller.id, finished=record)
            return
        self._dependencies.agent_pauses.retry(controller.id)
        joined = controller.state.job is not None
        job = await controller.scrubs.start(ScrubTrigger.ON_DEMAND, actor=actor)
        async for news in job.updates(joined=joined):
            yield news

    async def reset(self, device: str, reason: str, actor: str) -> AsyncIterator[ScrubUpdate]:
        controller = self._devices.find(device)
        _require_reason(reason, "A reset")
        if controller.state.policy.reset is ResetMode.NEVER:
            raise Refused(
                f"The policy {controller.state.policy.name} does not allow resets of device {controller.id} "
                "(reset: never)."
            )
        await self._require_free(controller, actor)
        plan = await self._dependencies.resetter.plan(controller.state.device)
        if plan.unavailable is not None:
            raise Refused(f"Device {controller.id} cannot be reset on this node: {plan.unavailable}")
        used = self._in_use(plan)
        if used:
            raise DeviceBusy(" ".join(used))
        self._dependencies.agent_pauses.retry(controller.id)
        # The plan's other blockers may come from a leftover process, which the scrub kills before it resets.
        job = await controller.scrubs.start(ScrubTrigger.ON_DEMAND, actor=actor, reset_reason=reason)
        async for news in job.updates(joined=False):
            yield news

    async def reset_plan(self, device: str) -> ResetPlan:
        controller = self._devices.find(device)
        plan = await self._dependencies.resetter.plan(controller.state.device)
        ways = self._dependencies.agent_pauses.offers
        used = self._in_use(plan)
        external = self._dependencies.agent_pauses.external_reset_offer
        ways = ways if external is None else (*ways, external)
        if plan.agents and ways:
            others = tuple(each for each in plan.blockers if each not in plan.agents)
            return replace(plan, blockers=(*used, *others), pause_ways=ways)
        remedy = (NO_WAY_REMEDY,) if plan.agents else ()
        return replace(plan, blockers=(*used, *plan.blockers, *remedy))

    def _in_use(self, plan: ResetPlan) -> list[str]:
        """Return a message for each device of the plan that is in use or being scrubbed."""
        concerned = [
            self._devices.controllers[each]
            for each in (plan.device, *plan.also_reset)
            if each in self._devices.controllers
        ]
        return [
            f"Device {controller.state.device.index} ({controller.id}) is {_busy_with(controller)}: wait "
            "until that has ended."
            for controller in concerned
            if controller.state.record.hygiene is Hygiene.IN_USE or controller.state.job is not None
        ]

    async def _require_free(self, controller: DeviceController, actor: str) -> None:
        """Raise :class:`DeviceBusy` with the names of the device's users, if it is granted."""
        await self._release_unnamed(controller)
        await self._release_abandoned_claims(controller, actor)
        if controller.state.record.hygiene is not Hygiene.IN_USE:
            return
        raise DeviceBusy(
            f"Device {controller.id} is {_busy_with(controller)}{await self._holder_text(controller)}; it is "
            "scrubbed when it is released."
        )

    async def _holder_text(self, controller: DeviceController) -> str:
        """Return the part of a message that names the holders; empty where they cannot be determined."""
        try:
            found = await self._dependencies.holders.list_users(controller.state.device)
        except ScrubberError:
            return ""
        named = [f"{each.pid} ({each.command})" if each.command else str(each.pid) for each in found if each.pid]
        more = f" and {len(named) - _MAX_NAMED} more" if len(named) > _MAX_NAMED else ""
        return f", held by PID {', '.join(named[:_MAX_NAMED])}{more}" if named else ""

    async def _release_unnamed(self, controller: DeviceController) -> None:
        """Release a device of a pod that no source names once it was free for a while, so it can be scrubbed."""
        record = controller.state.record
        if record.hygiene is Hygiene.IN_USE and not any(grant.pods for grant in record.open_grants):
            await controller.occupancy.is_held()
            if all(where.state is PodState.OVER for _, where in await controller.occupancy.pod_liveness()):
                await controller.occupancy.release(record)

    async def _release_abandoned_claims(self, controller: DeviceController, actor: str) -> None:
        """Release a device of claims that were never unprepared, once all their pods are gone and it is free.

        A claim that the kubelet lists is not forgotten: a pod that has just joined it starts without a call.
        What is left of a pod after the leftover grace period may be killed, but only once the claim is released.
        """
        record = controller.state.record
        claims = record.prepared_claims
        if record.hygiene is not Hygiene.IN_USE or not claims or len(claims) != len(record.open_grants):
            return
        await controller.pods.refresh()
        reading, records = controller.pods.reading, self._devices.records()
        if any(reading.pods_of_claim(each) for each in claims if each.uid not in replaced_claims(records, reading)):
            return
        limits, leftovers = controller.state.policy.limits, False
        for claim, pod in [(each, pod) for each in claims for pod in each.pods]:
            if not await controller.pods.is_gone(pod):
                facts = await controller.pods.claim_pod_facts(pod, (), limits=limits)
                if claim.manager is not None or not facts.is_long_gone:
                    return
                leftovers = True
        if leftovers or not await controller.occupancy.is_held():
            await controller.occupancy.release_claims(record, actor)

    async def quarantine(self, device: str, reason: str, actor: str) -> tuple[DeviceView, Cause | None]:
        controller = self._devices.find(device)
        _require_reason(reason, "A quarantine")
        previous = await controller.health.quarantine(reason, actor)
        return controller.view, previous

    async def unquarantine(self, device: str, reason: str, actor: str) -> DeviceView:
        controller = self._devices.find(device)
        _require_reason(reason, "A release from quarantine")
        await controller.health.unquarantine(reason, actor)
        return controller.view

    async def break_glass(self, device: str, seconds: float, reason: str, actor: str) -> DeviceView:
        controller = self._devices.find(device)
        _require_reason(reason, "A break-glass override")
        await controller.health.break_glass(seconds, reason, actor)
        return controller.view

    async def accept_baseline(
        self, device: str, reason: str, actor: str, expected_facts: Mapping[str, str] | None = None
    ) -> DeviceView:
        _require_reason(reason, "Accepting a baseline")
        # Describe all devices again: the baseline to accept is the current one, not that of the last inspection.
        for each in await self._dependencies.inventory.devices():
            known = self._devices.controllers.get(each.id)
            if known is not None and each.has_same_location(known.state.device):
                known.state.describe(each)
        controller = self._devices.find(device)
        described = controller.state.device
        # Compare with the form that was displayed: a fact that is not valid text cannot be sent unchanged.
        now = {name: value.encode("utf-8", "replace").decode() for name, value in baseline_facts(described)}
        if expected_facts and expected_facts != now:
            others = ", ".join(
                f"{name} {now.get(name, 'not reported')}"
                for name in sorted(now.keys() | expected_facts.keys())
                if now.get(name) != expected_facts.get(name)
            )
            raise Refused(
                f"Device {controller.id} differs from what you were shown ({others}): check it again, and "
                "accept that if it is correct."
            )
        await controller.health.accept_baseline(described, reason, actor)
        return controller.view


def _busy_with(controller: DeviceController) -> str:
    """Return what a device that is not free is used for, and by which pods."""
    if controller.state.record.hygiene is not Hygiene.IN_USE:
        return (
            f"being scrubbed ({controller.state.job.id})"
            if controller.state.job is not None
            else controller.state.record.state
        )
    pods = {pod for each in controller.state.record.open_grants for pod in each.pods}
    named = ", ".join(sorted(f"{pod.namespace}/{pod.name}" for pod in pods))
    return f"in use by {named or 'a pod that could not be identified'}"


def _require_reason(reason: str, order: str) -> None:
    if not reason.strip():
        raise InvalidRequest(f"{order} needs a reason; it is recorded in the audit log.")
