"""What a person orders of a device: scrub it, reset it, take it out, let it back in, hand it out whatever is known of it.

The order is checked here as far as it concerns more than the device's own record; its keeper decides, and commits.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from dataclasses import replace

from scrubber.domain.baseline import facts_of
from scrubber.domain.device import find_device
from scrubber.domain.errors import Held, InvalidRequest, Refused, ScrubberError
from scrubber.domain.evidence import Occasion, Path
from scrubber.domain.hygiene import Hygiene
from scrubber.domain.leftover import PodState
from scrubber.domain.policy import ResetUse
from scrubber.domain.reset import ResetPlan
from scrubber.engine.dependencies import Dependencies
from scrubber.engine.keeper import Keeper
from scrubber.engine.views import DeviceView, ScrubNews

__all__ = ["Orders"]

_MOST_NAMED = 5
"""Processes that a refusal names."""


class Orders:
    """A person's part of :class:`scrubber.engine.views.Service`."""

    def __init__(self, dependencies: Dependencies) -> None:
        self._dependencies = dependencies
        self._keepers: dict[str, Keeper] = {}

    async def scrub(self, device: str, path: Path, actor: str) -> AsyncIterator[ScrubNews]:
        keeper = self._find(device)
        await self._be_free(keeper)
        if path is Path.FAST:
            if keeper.job is not None:
                raise Held(
                    f"Device {keeper.device.id} is being scrubbed ({keeper.job.id}), and checks would break that off: "
                    "ask for the slow path to join it."
                )
            record, _ = await keeper.check(Occasion.ON_DEMAND, actor)
            await keeper.note_check(record)
            yield ScrubNews(record.id, keeper.device.id, finished=record)
            return
        joined = keeper.job is not None
        job = await keeper.start_scrub(Occasion.ON_DEMAND, actor=actor)
        async for news in job.news(joined=joined):
            yield news

    async def reset(self, device: str, reason: str, actor: str) -> AsyncIterator[ScrubNews]:
        keeper = self._find(device)
        _be_given(reason, "A reset")
        if keeper.policy.reset is ResetUse.NEVER:
            raise Refused(
                f"The policy {keeper.policy.name} says that device {keeper.device.id} is never reset (reset: never)."
            )
        await self._be_free(keeper)
        plan = await self._dependencies.resetter.plan(keeper.device)
        if plan.unavailable is not None:
            raise Refused(f"Device {keeper.device.id} cannot be reset here: {plan.unavailable}")
        used = self._in_use(plan)
        if used:
            raise Held(" ".join(used))
        # What else blocks it may be a leftover, which the scrub ends before it resets.
        job = await keeper.start_scrub(Occasion.ON_DEMAND, actor=actor, ordered=reason)
        async for news in job.news(joined=False):
            yield news

    async def reset_plan(self, device: str) -> ResetPlan:
        keeper = self._find(device)
        plan = await self._dependencies.resetter.plan(keeper.device)
        strange = plan.blockers and keeper.job is None and keeper.record.hygiene is not Hygiene.IN_USE
        holding = await self._holding(keeper) if strange else ""
        held = (f"Device {keeper.device.index} is{holding.removeprefix(',')}.",) if holding else ()
        return replace(plan, blockers=(*self._in_use(plan), *plan.blockers, *held))

    def _in_use(self, plan: ResetPlan) -> list[str]:
        """What is done with the devices that the plan would reset, a sentence for each that is not left alone."""
        concerned = [self._keepers[each] for each in (plan.device, *plan.together) if each in self._keepers]
        return [
            f"Device {keeper.device.index} ({keeper.device.id}) is {_busy_with(keeper)}: wait until that is over."
            for keeper in concerned
            if keeper.record.hygiene is Hygiene.IN_USE or keeper.job is not None
        ]

    async def _be_free(self, keeper: Keeper) -> None:
        """Raises :class:`Held` with who has the device, if anybody was granted it."""
        await self._give_back_unnamed(keeper)
        if keeper.record.hygiene is not Hygiene.IN_USE:
            return
        raise Held(
            f"Device {keeper.device.id} is {_busy_with(keeper)}{await self._holding(keeper)}; it is scrubbed when it is given "
            "back."
        )

    async def _holding(self, keeper: Keeper) -> str:
        """Which processes have the device open, for a sentence; nothing where that cannot be told."""
        try:
            found = await self._dependencies.holders.users(keeper.device)
        except ScrubberError:
            return ""
        named = [f"{each.pid} ({each.command})" if each.command else str(each.pid) for each in found if each.pid]
        more = f" and {len(named) - _MOST_NAMED} more" if len(named) > _MOST_NAMED else ""
        return f", held by PID {', '.join(named[:_MOST_NAMED])}{more}" if named else ""

    async def _give_back_unnamed(self, keeper: Keeper) -> None:
        """A person may have a device scrubbed that went to a pod nobody can name, once nobody has held it for a while."""
        record = keeper.record
        if record.hygiene is Hygiene.IN_USE and all(grant.pod is None for grant in record.open_grants):
            await keeper.held()
            if all(where.state is PodState.OVER for _, where in await keeper.standings()):
                await keeper.release(record)

    async def quarantine(self, device: str, reason: str, actor: str) -> DeviceView:
        keeper = self._find(device)
        _be_given(reason, "A quarantine")
        await keeper.quarantine(reason, actor)
        return keeper.view

    async def unquarantine(self, device: str, reason: str, actor: str) -> DeviceView:
        keeper = self._find(device)
        _be_given(reason, "A release from quarantine")
        await keeper.unquarantine(reason, actor)
        return keeper.view

    async def break_glass(self, device: str, seconds: float, reason: str, actor: str) -> DeviceView:
        keeper = self._find(device)
        _be_given(reason, "Breaking the glass")
        await keeper.break_glass(seconds, reason, actor)
        return keeper.view

    async def accept_baseline(
        self, device: str, reason: str, actor: str, shown: Mapping[str, str] | None = None
    ) -> DeviceView:
        _be_given(reason, "Accepting a baseline")
        # What somebody wrote a moment ago is what he accepts, and not what was there when it was last looked at.
        for each in await self._dependencies.inventory.devices():
            known = self._keepers.get(each.id)
            if known is not None and each.is_where(known.device):
                known.described(each)
        keeper = self._find(device)
        described = keeper.device
        # As it was shown: a fact that is no text cannot be sent as it is.
        now = {name: value.encode("utf-8", "replace").decode() for name, value in facts_of(described)}
        if shown and shown != now:
            others = ", ".join(
                f"{name} {now.get(name, 'not told')}"
                for name in sorted(now.keys() | shown.keys())
                if now.get(name) != shown.get(name)
            )
            raise Refused(
                f"Device {keeper.device.id} is something else by now than what you were shown ({others}): look again, and accept "
                "that if it is right."
            )
        await keeper.accept_baseline(described, reason, actor)
        return keeper.view

    def _find(self, wanted: str) -> Keeper:
        return self._keepers[find_device((keeper.device for keeper in self._keepers.values()), wanted).id]


def _busy_with(keeper: Keeper) -> str:
    """What a device that is not free does, and for whom."""
    if keeper.record.hygiene is not Hygiene.IN_USE:
        return f"being scrubbed ({keeper.job.id})" if keeper.job is not None else keeper.record.state
    pods = {each.pod for each in keeper.record.open_grants if each.pod is not None}
    named = ", ".join(sorted(f"{pod.namespace}/{pod.name}" for pod in pods))
    return f"in use by {named or 'a pod that no witness names'}"


def _be_given(reason: str, order: str) -> None:
    if not reason.strip():
        raise InvalidRequest(f"{order} needs a reason; it goes into the audit.")
