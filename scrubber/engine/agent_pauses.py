"""Pauses of the node's agents for resets: the only writer of the ledger's record of a pause.

Monitoring agents have every device open for as long as they run, and a device is reset only while nothing has it open.
A pause is recorded before it happens and stays recorded until everything is restored; a service that finds one when it
starts ends it. The service decides, and never changes the cluster: labels of the node are changed by the plugin.

An external reset is a pause too: the plugin has another service of the cluster reset the devices. No process of this
service may use the driver meanwhile, so a service that is started then goes on with it, on a yielded node.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace

from scrubber.completion import run_to_completion
from scrubber.domain.agent_pause import (
    AgentPause,
    AgentPauseRecord,
    PauseOffer,
    PauseReport,
    PauseState,
    PauseWay,
)
from scrubber.domain.errors import InvalidRequest, LedgerFailure, Refused, RetryableError
from scrubber.domain.reset_plan import ResetPlan
from scrubber.ports.device import AgentControl
from scrubber.ports.record import Event, Journal, Ledger, LedgerChange
from scrubber.ports.runtime import Clock

__all__ = ["NO_WAY_REMEDY", "AgentPauses", "ClearedDevice"]

_POLL = 1.0
"""Seconds between two looks at what still holds a device whose agents are ending."""
_BACKEND_GRACE = 10.0
"""Seconds after which agents that still hold a device are not those that the backend can pause."""
_RETRY = 10.0
"""Seconds until agents that could not be restored, or a record that could not be stored, are tried again."""
_REFUSED_SECONDS = 600.0
"""Seconds after which a backend that could not pause agents is offered again: what it needs may have been installed."""
_REST_FACTOR = 2
"""How long no pause is begun for a device that paused agents did not release, in limits of the wait for them."""
_MAX_CHANGES = 64
"""Changes of one pause: the plugin decides on them, and each is kept in the ledger."""
_CLOSE_SECONDS = 10.0
"""Seconds that restoring may take at the end of the service, which its supervisor kills if it takes long."""

NO_WAY_REMEDY = (
    "The service has no way to pause agents: let the plugin do it (--pause-labels, component agent-pause), or stop them "
    "for the reset."
)


@dataclass(frozen=True, slots=True)
class ClearedDevice:
    """What was achieved for a device whose reset waits for agents.

    Attributes:
        plan: the last plan of its reset; it has no blockers if the agents released the device.
        ways: the ways that were tried, in order.
        failures: why each of them did not help, for operators; empty if the last one did.
    """

    plan: ResetPlan
    ways: tuple[PauseWay, ...] = ()
    failures: tuple[str, ...] = ()


# See docs/decisions/0043-agents-are-paused-for-a-reset.md.
class AgentPauses:
    """The pause of the node's agents, of which there is at most one.

    Args:
        record: as the ledger has it: a pause in it is ending, because the service that began it is gone, unless it is an
            external reset.
        new_id: makes the ID of a pause.
        backend: lets agents of the devices' vendor release the driver; None where that is not set up.

    Attributes:
        driver_closed: whether no process of the service uses the driver; set by what serves.
    """

    def __init__(
        self,
        record: AgentPauseRecord,
        *,
        ledger: Ledger,
        journal: Journal,
        clock: Clock,
        new_id: Callable[[str], str],
        backend: AgentControl | None = None,
    ) -> None:
        self._ledger = ledger
        self._journal = journal
        self._clock = clock
        self._new_id = new_id
        self._backend = backend
        self._refused_until = -math.inf
        self._rests: dict[str, tuple[float, str]] = {}
        """Device that paused agents did not release → monotonic end of its rest, and why."""
        self._failed_pause = ""
        """ID of a pause in which a device was not released: no other device joins it, so that it ends."""
        self._offered: tuple[PauseOffer, ...] = ()
        self._state = PauseState.WAITING
        self._state_since = clock.monotonic()
        self._message = ""
        self.driver_closed = False
        found = record.pause
        self._interrupted = found is not None and not found.is_external_reset
        ended = replace(found, ending=True) if found is not None and self._interrupted else found
        self._record = replace(record, pause=ended)
        self._lock = asyncio.Lock()
        self._changed = asyncio.Event()

    # -- status ------------------------------------------------------------------------------------------------------

    @property
    def pause(self) -> AgentPause | None:
        """The pause in effect, or still to be undone."""
        return self._record.pause

    @property
    def message(self) -> str:
        """Why the pause is not further yet, or failed, for operators; empty otherwise."""
        return self._message

    @property
    def offers(self) -> tuple[PauseOffer, ...]:
        """The ways to pause agents, in the order in which they are tried."""
        backend = self._backend if self._clock.monotonic() >= self._refused_until else None
        own = () if backend is None else (PauseOffer(PauseWay.BACKEND, backend.actions),)
        return (*own, *(each for each in self._offered if each.way is not PauseWay.EXTERNAL_RESET))

    @property
    def external_reset_offer(self) -> PauseOffer | None:
        """How another service of the cluster would reset a device; None where there is none."""
        return next((each for each in self._offered if each.way is PauseWay.EXTERNAL_RESET), None)

    @property
    def changed(self) -> asyncio.Event:
        """Is set at the next change."""
        return self._changed

    async def wait_for_change(self) -> None:
        """Return after the next change."""
        await self._changed.wait()

    def concerns(self, device: str, plan: ResetPlan) -> bool:
        """Whether a reset of ``device`` by ``plan`` needs a pause, or joins the one in effect, whose end would disturb it.

        A pause does not help where something else blocks the reset.
        """
        if plan.blockers:
            return plan.only_agents_block and bool(self.offers) and not self.failure(device)
        running = self.pause
        return (
            running is not None
            and not (running.ending or running.is_external_reset)
            and running.id != self._failed_pause
        )

    def failure(self, device: str) -> str:
        """Return why no pause is begun for ``device`` for now, for operators; empty if one is.

        Agents that did not release it in time are unlikely to the next time, and must not stay paused for that.
        """
        until, message = self._rests.get(device, (-math.inf, ""))
        return message if self._clock.monotonic() < until else ""

    def retry(self, device: str) -> None:
        """Let the next reset of ``device`` pause agents, whatever happened before: an operator requested it."""
        self._rests.pop(device, None)

    # -- pauses for resets -------------------------------------------------------------------------------------------

    @asynccontextmanager
    async def cleared(
        self, device: str, plan: Callable[[], Awaitable[ResetPlan]], limit: float
    ) -> AsyncIterator[ClearedDevice]:
        """Pause agents until the reset of ``device`` has no blockers, and keep them paused while the context is open.

        Each way that is offered is tried once, as long as there is time.

        Args:
            plan: returns the plan of the reset as of now.
            limit: seconds.

        Raises:
            DeviceFault, Unavailable: as ``plan`` raises them.
            LedgerFailure: the pause could not be recorded, so nothing was changed.
        """
        try:
            yield await self._clear(device, plan, limit)
        finally:
            await run_to_completion(self._leave(device))

    async def _clear(self, device: str, plan: Callable[[], Awaitable[ResetPlan]], limit: float) -> ClearedDevice:
        end = self._clock.monotonic() + limit
        ways: list[PauseWay] = []
        failures: list[str] = []
        while True:
            joined = await self._join(device, frozenset(ways), end)
            if not isinstance(joined, AgentPause):
                return ClearedDevice(await plan(), tuple(ways), (*failures, *([joined] if joined else [])))
            ways.append(joined.way)
            found, failure = await self._wait_until_released(joined, plan, end)
            if not failure:
                self._rests.pop(device, None)
                return ClearedDevice(found, tuple(ways))
            failures.append(failure)
            if self.pause is not None and not self.pause.ending:
                self._failed_pause, rest = joined.id, _REST_FACTOR * limit
                message = f"{' '.join(failures)} No agent is paused for it again for {rest:g} s after that."
                self._rests[device] = (self._clock.monotonic() + rest, message)
                await run_to_completion(self._note_failure(joined, device, failure))
            if self._clock.monotonic() >= end or not any(each.way not in ways for each in self.offers):
                return ClearedDevice(found, tuple(ways), tuple(failures))
            await run_to_completion(self._leave(device))

    async def _join(self, device: str, tried: frozenset[PauseWay], end: float) -> AgentPause | str:
        """Begin a pause for ``device``, or join the one in effect; return why that is not possible otherwise."""
        while True:
            changed = self._changed
            ways = [each.way for each in self.offers if each.way not in tried]
            joined = await run_to_completion(self._join_now(device, tried, ways))
            if joined is not None:
                return joined
            current = self.pause
            if current is None:
                return ""
            left = end - self._clock.monotonic()
            if left <= 0:
                doing = "ended" if current.ending else "used for other devices"
                waits = f" {self._message}" if self._message else ""
                return f"An earlier pause of agents ({current.way}) is still being {doing}.{waits}"
            await self._wait(changed, left)

    async def _join_now(self, device: str, tried: frozenset[PauseWay], ways: list[PauseWay]) -> AgentPause | None:
        async with self._lock:
            current = self.pause
            if current is not None:
                refused = current.way in tried or current.id == self._failed_pause
                if current.ending or current.is_external_reset or refused:
                    return None
                joined = current.with_device(device)
                if joined != current:
                    await self._commit(joined)
                return joined
            if not ways:
                return None
            now = self._clock.wall()
            begun = AgentPause(self._new_id("pause"), ways[0], (device,), now)
            fields = {"pause": begun.id, "way": begun.way.value}
            await self._commit(begun, Event("agents.pause-started", now, device, fields=fields))
            self._set_state(PauseState.WAITING)
            return begun

    async def begin_external_reset(self, devices: tuple[str, ...], limit: float) -> str:
        """Record that another service is to reset ``devices``, once an earlier pause is over.

        Args:
            limit: seconds.

        Returns:
            Why it was not begun; empty if it was.

        Raises:
            LedgerFailure: it could not be recorded, so nothing happens.
        """
        end = self._clock.monotonic() + limit
        while True:
            changed = self._changed
            if self.external_reset_offer is None:
                return "No other service of the cluster resets devices any more."
            if await run_to_completion(self._begin_external_reset(devices)):
                return ""
            left = end - self._clock.monotonic()
            if left <= 0:
                return "An earlier pause of agents, or the reset of another device, is not over yet."
            await self._wait(changed, left)

    async def _begin_external_reset(self, devices: tuple[str, ...]) -> bool:
        async with self._lock:
            if self.pause is not None:
                return False
            now = self._clock.wall()
            begun = AgentPause(self._new_id("pause"), PauseWay.EXTERNAL_RESET, devices, now)
            fields = {"pause": begun.id, "devices": ", ".join(devices)}
            await self._commit(begun, Event("external-reset.started", now, devices[0], fields=fields))
            self._set_state(PauseState.WAITING)
            return True

    async def fail_external_reset(self, pause: str, message: str) -> None:
        """End an external reset that takes too long, or can no longer happen.

        Raises:
            LedgerFailure: nothing has changed.
        """
        await run_to_completion(self._fail_external_reset(pause, message))

    async def _fail_external_reset(self, pause: str, message: str) -> None:
        async with self._lock:
            current = self.pause
            if current is not None and current.id == pause and not current.ending:
                await self._fail(current, message, actor="service")

    async def commit_start(
        self, devices: Collection[str], change: Callable[[frozenset[str]], LedgerChange]
    ) -> LedgerChange:
        """Commit the start of ``devices``, whose records get the external resets that are still on the node's record.

        Args:
            change: returns the change for those of them that another service says it reset.

        Raises:
            LedgerFailure: nothing has changed.
        """
        async with self._lock:
            noted = frozenset(self._record.externally_reset) & frozenset(devices)
            made = change(noted)
            if noted:
                left = tuple(each for each in self._record.externally_reset if each not in noted)
                made |= LedgerChange(agent_pause=replace(self._record, externally_reset=left))
            await self._ledger.commit(made)
            if made.agent_pause is not None:
                self._record = made.agent_pause
            return made

    async def _wait_until_released(
        self, joined: AgentPause, plan: Callable[[], Awaitable[ResetPlan]], end: float
    ) -> tuple[ResetPlan, str]:
        """Return the last plan, and why the device is not released; empty if it is."""
        while True:
            changed, current = self._changed, self.pause
            found = await plan()
            if current is None or current.id != joined.id or current.ending:
                return found, f"Agents were not paused ({joined.way}): {self._message or 'the pause was ended.'}"
            if not found.blockers:
                return found, ""
            now = self._clock.monotonic()
            if now >= end:
                waits = f" {self._message}" if self._message else ""
                return found, f"Agents were not gone in time ({joined.way}).{waits}"
            released = self._state is PauseState.PAUSED and now - self._state_since >= _BACKEND_GRACE
            if joined.way is PauseWay.BACKEND and released:
                return found, f"Agents that do not let go on request hold the device ({joined.way})."
            await self._wait(changed, min(_POLL, end - now))

    async def _note_failure(self, joined: AgentPause, device: str, failure: str) -> None:
        """Record that the device was not released, although no failure was reported."""
        fields = {"pause": joined.id, "way": joined.way.value, "message": failure}
        event = Event("agents.pause-failed", self._clock.wall(), device, fields=fields)
        await self._ledger.commit(LedgerChange(events=(event,)))
        self._journal.record([event])

    async def _wait(self, changed: asyncio.Event, seconds: float) -> None:
        """Return after ``seconds``, or as soon as something changes."""
        with suppress(TimeoutError):
            async with self._clock.timeout(seconds):
                await changed.wait()

    async def _leave(self, device: str) -> None:
        """End the pause for ``device``; it ends altogether with the last one."""
        async with self._lock:
            current = self.pause
            if current is None or device not in current.devices:
                return
            after = current.without_device(device)
            try:
                await self._end(after)
            except LedgerFailure:
                # A service that finds a pause ends it: the end need not be durable.
                self._apply(after)

    async def _end(self, pause: AgentPause, *events: Event) -> None:
        """Store ``pause``, or remove it if it is ending and there is nothing to undo."""
        await self._commit(None if pause.ending and not pause.needs_restoring else pause, *events)

    # -- the plugin --------------------------------------------------------------------------------------------------

    async def report(self, report: PauseReport) -> None:
        """Take a report of the plugin; returns when what it changes is durable.

        A report about a pause that is over changes nothing.

        Raises:
            InvalidRequest: changes are planned for a pause that is over or ending: none must be made.
            LedgerFailure: nothing has changed.
        """
        await run_to_completion(self._take(report))

    async def _take(self, report: PauseReport) -> None:
        async with self._lock:
            if report.offers != self._offered:
                self._offered = report.offers
                self._rests.clear()
                self._notify()
            current = self.pause
            concerned = current is not None and current.id == report.pause and current.way is not PauseWay.BACKEND
            if current is None or not concerned:
                if report.state is PauseState.PLANNED:
                    raise InvalidRequest(f"There is no pause {report.pause}: nothing is to be changed for it.")
                return
            match report.state:
                case PauseState.PLANNED:
                    await self._plan(current, report)
                case PauseState.RESET:
                    await self._note_external_reset(current, report.message)
                case PauseState.RESTORED:
                    await self._restored(current, report.message)
                case PauseState.FAILED:
                    await self._fail(current, report.message)
                case PauseState.WAITING | PauseState.PAUSED:
                    self._set_state(report.state, report.message)

    async def _plan(self, current: AgentPause, report: PauseReport) -> None:
        if current.ending:
            raise InvalidRequest(f"The pause {current.id} is ending: nothing is to be changed for it.")
        after = current.with_changes(report.changes)
        if len(after.changes) > _MAX_CHANGES:
            raise InvalidRequest(f"A pause of agents changes at most {_MAX_CHANGES} labels.")
        if after != current:
            fields = {
                "pause": current.id,
                "way": current.way.value,
                "changes": "; ".join(str(each) for each in after.changes),
            }
            await self._commit(after, Event("agents.pause-planned", self._clock.wall(), actor="plugin", fields=fields))
        self._set_state(PauseState.PLANNED, report.message)

    async def _note_external_reset(self, current: AgentPause, message: str) -> None:
        if not current.is_external_reset or not (self.driver_closed or current.ending):
            raise InvalidRequest(f"No device can have been reset for the pause {current.id} yet.")
        if current.ending:
            return  # it came too late: what the device's next recovery does is decided already
        fields = {"pause": current.id, "message": message or None}
        now = self._clock.wall()
        ended = replace(current, ending=True)
        known = (each for each in self._record.externally_reset if each not in current.devices)
        record = AgentPauseRecord(ended, (*known, *current.devices))
        events = tuple(
            Event("external-reset.succeeded", now, each, actor="plugin", fields=fields) for each in current.devices
        )
        await self._ledger.commit(LedgerChange(agent_pause=record, events=events))
        self._record = record
        self._journal.record(events)
        self._set_state(PauseState.RESET, message)
        self._notify()

    async def _fail(self, current: AgentPause, message: str, *, actor: str = "plugin") -> None:
        actor = "service" if current.way is PauseWay.BACKEND else actor
        now = self._clock.wall()
        event = Event(
            "agents.pause-failed",
            now,
            actor=actor,
            fields={"pause": current.id, "way": current.way.value, "message": message},
        )
        if current.is_external_reset:
            fields = {"pause": current.id, "message": message}
            event = Event("external-reset.failed", now, current.devices[0], actor=actor, fields=fields)
        events = () if current.ending else (event,)
        self._message = message
        await self._end(replace(current, ending=True), *events)
        self._set_state(PauseState.FAILED, message)

    async def _restored(self, current: AgentPause, message: str) -> None:
        now = self._clock.wall()
        seconds = round(max(0.0, now - current.since), 3)
        actor = "service" if current.way is PauseWay.BACKEND else "plugin"
        if not current.ending:
            self._message = message or "The plugin has ended the pause."
        if current.is_external_reset:
            fields = {"pause": current.id, "message": message or None, "duration_seconds": seconds}
            await self._commit(None, Event("external-reset.ended", now, actor=actor, fields=fields))
            return
        ended = {
            "pause": current.id,
            "way": current.way.value,
            "message": message or None,
            "duration_seconds": seconds,
        }
        await self._commit(None, Event("agents.restored", now, actor=actor, fields=ended))

    # -- the backend, and what an earlier service left -----------------------------------------------------------------

    async def run(self) -> None:
        """Carry out pauses by the backend, and end what an earlier service left. Runs as long as the service."""
        while True:
            changed = self._changed
            try:
                if self._interrupted:
                    await run_to_completion(self._note_interruption())
                    self._interrupted = False
                waits = await self._step()
            except LedgerFailure:  # it is reported by the ledger's own status
                await self._clock.sleep(_RETRY)
                continue
            if waits is None:
                await changed.wait()
            else:
                await self._clock.sleep(waits)

    async def _step(self) -> float | None:
        """Do what is due; return seconds until something is due again, or None to wait for a change."""
        current = self.pause
        if current is None:
            return None
        if current.ending and not current.needs_restoring:
            await run_to_completion(self._drop(current))
            return 0.0
        if current.way is not PauseWay.BACKEND:
            return None
        if current.ending:
            return await self._restore(current)
        if self._state is PauseState.WAITING:
            await self._pause_by_backend(current)
            return 0.0
        return None

    async def _note_interruption(self) -> None:
        async with self._lock:
            current = self.pause
            if current is None:
                return
            fields = {"pause": current.id, "way": current.way.value}
            await self._commit(current, Event("agents.pause-interrupted", self._clock.wall(), fields=fields))

    async def _drop(self, current: AgentPause) -> None:
        async with self._lock:
            if self.pause == current:
                await self._commit(None)

    async def _pause_by_backend(self, current: AgentPause) -> None:
        if self._backend is None:
            return
        try:
            await self._backend.pause()
        except Refused as refusal:  # nothing has changed, and the next attempt would fail as well
            self._refused_until = self._clock.monotonic() + _REFUSED_SECONDS
            await run_to_completion(self._fail_backend(current, str(refusal), changed=False))
        except RetryableError as failure:
            await run_to_completion(self._fail_backend(current, str(failure), changed=True))
        else:
            self._set_state(PauseState.PAUSED)

    async def _fail_backend(self, current: AgentPause, message: str, *, changed: bool) -> None:
        async with self._lock:
            if self.pause is not None and self.pause.id == current.id:
                await self._fail(self.pause, message)
                if not changed:
                    await self._commit(None)

    async def _restore(self, current: AgentPause) -> float:
        """Restore agents by the backend; return seconds until the next attempt."""
        if self._backend is not None:
            try:
                await self._backend.restore()
            except (RetryableError, Refused) as failure:
                if str(failure) != self._message:
                    fields = {"pause": current.id, "way": current.way.value, "message": str(failure)}
                    self._journal.record([Event("agents.restore-failed", self._clock.wall(), fields=fields)])
                self._set_state(PauseState.FAILED, str(failure))
                return _RETRY
        await run_to_completion(self._forget(current))
        return 0.0

    async def _forget(self, current: AgentPause) -> None:
        async with self._lock:
            if self.pause is not None and self.pause.id == current.id:
                missing = (
                    "" if self._backend is not None else "The setting that pauses agents is gone; nothing was done."
                )
                await self._restored(self.pause, missing)

    async def close(self) -> None:
        """Restore what the backend has paused, once; a service that is started later tries it again."""
        current = self.pause
        if current is not None and current.way is PauseWay.BACKEND:
            with suppress(LedgerFailure, TimeoutError):
                async with self._clock.timeout(_CLOSE_SECONDS):
                    await self._restore(replace(current, ending=True))

    # -- record and state ----------------------------------------------------------------------------------------------

    async def _commit(self, pause: AgentPause | None, *events: Event) -> None:
        """Store and apply the record; the caller has the lock, and cannot be cancelled meanwhile."""
        await self._ledger.commit(LedgerChange(agent_pause=replace(self._record, pause=pause), events=events))
        self._apply(pause)
        self._journal.record(events)

    def _apply(self, pause: AgentPause | None) -> None:
        self._record = replace(self._record, pause=pause)
        self._notify()

    def _set_state(self, state: PauseState, message: str = "") -> None:
        if (state, message) == (self._state, self._message):
            return
        if state is not self._state:
            self._state_since = self._clock.monotonic()
        self._state, self._message = state, message
        self._notify()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
