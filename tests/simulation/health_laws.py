"""The laws of health: when a device leaves and returns, observed in durable rows and in actual resets.

No law relies on the engine's state. Recovery is counted in scrubs in the ledger, the breaker in resets that the cluster
observed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable

from scrubber.domain.evidence import Outcome, PathKind
from scrubber.domain.health.history import DAY
from scrubber.domain.policy import Enforcement, Policy, QuarantineTiming, SharingMode
from scrubber.domain.record import DeviceRecord
from scrubber.domain.states import ADVERTISED, Health, Hygiene, RecoveryMethod
from scrubber.engine.views import DeviceView
from scrubber.ports.record import Event, LedgerChange
from tests.simulation.process_table import Gpu

__all__ = ["HealthLaws"]


class HealthLaws:
    """Watches one world.

    Args:
        wall: wall-clock seconds, as in the ledger.
        late: maximum seconds until the end of a break-glass override is noticed.
        breach: called with the violated law, and how it was violated.

    Attributes:
        past: every record that became durable, in order, with the time.
        recoveries: resets by recoveries, each with its device and the start of the recovery.
    """

    def __init__(
        self,
        *,
        policy: Callable[[], Policy],
        wall: Callable[[], float],
        late: Callable[[], float],
        breach: Callable[[str, str], None],
    ) -> None:
        self._policy = policy
        self._wall = wall
        self._late = late
        self._breach = breach
        self.past: list[tuple[float, DeviceRecord]] = []
        self.recoveries: list[tuple[float, str]] = []
        self._last: dict[str, DeviceRecord] = {}
        self._passes: Counter[str] = Counter()
        self._owed: Counter[str] = Counter()
        self._started: dict[str, float] = {}
        self._forgiven: dict[str, float] = {}
        self._ordered: dict[str, bool] = {}
        self._reported: set[str] = set()

    # -- durable rows ----------------------------------------------------------------------------------------------

    def stored(self, change: LedgerChange) -> None:
        for scrub in change.scrubs:
            if scrub.path is PathKind.SLOW and scrub.ended is None:
                self._started[scrub.device] = scrub.started
                self._ordered[scrub.device] = scrub.actor.startswith("uid:")
            elif scrub.path is PathKind.SLOW and scrub.outcome is Outcome.PASSED:
                self._passes[scrub.device] += 1
        for record in change.records:
            before = self._last.get(record.device, DeviceRecord(record.device))
            self._changed(before, record, change.events)
            self._last[record.device] = record
            self.past.append((self._wall(), record))

    def _changed(self, before: DeviceRecord, after: DeviceRecord, events: Iterable[Event]) -> None:
        device = after.device
        mine = [each for each in events if each.device == device and each.actor.startswith("uid:")]
        released = any(each.name == "operator.released" for each in mine)
        self._operator_quarantine(before, after, by_operator=bool(mine))
        self._has_a_message(after)
        rule = self._policy().recovery
        out = after.health in (Health.QUARANTINED, Health.CONDEMNED)
        if released:
            self._passes[device], self._owed[device] = 0, rule.probation_scrubs
            self._forgiven[device] = self._wall()
        elif out and (before.health, before.cause) != (after.health, after.cause):
            self._passes[device], self._owed[device] = 0, rule.probation_scrubs + 1
        if not after.advertised:
            self._reported.discard(device)
        if after.advertised and not before.advertised and self._passes[device] < self._owed[device]:
            self._breach("7", f"{device} is back after {self._passes[device]} of {self._owed[device]} clean scrubs")

    def _operator_quarantine(self, before: DeviceRecord, after: DeviceRecord, *, by_operator: bool) -> None:
        """Only an operator returns a device that an operator quarantined, or a condemned one."""
        cause, device = before.cause, before.device
        is_operators = before.health is Health.QUARANTINED and cause is not None and cause.by_operator
        if is_operators and (after.health, after.cause) != (before.health, before.cause) and not by_operator:
            self._breach("7", f"{device} was taken out by {cause and cause.actor} and is {after.health.value} now")
        if before.health is Health.CONDEMNED and after.health is not Health.CONDEMNED and not by_operator:
            self._breach("7", f"{device} was condemned and is {after.health.value} now")
        needs_operator = (
            before.health is Health.QUARANTINED
            and cause is not None
            and cause.recovery_method is RecoveryMethod.OPERATOR
        )
        if needs_operator and after.health not in (Health.QUARANTINED, Health.CONDEMNED) and not by_operator:
            self._breach("7", f"{device} was out for a person ({cause and cause.code}) and is {after.health.value} now")

    def _has_a_message(self, record: DeviceRecord) -> None:
        cause = record.cause
        if record.health not in ADVERTISED and (cause is None or not cause.code or len(cause.message) < 5):
            self._breach("7", f"{record.device} is {record.health.value} and nothing says why ({cause})")
        if (
            record.health is Health.CONDEMNED
            and cause is not None
            and cause.recovery_method is not RecoveryMethod.OPERATOR
        ):
            self._breach("7", f"{record.device} is condemned and waits for {cause.recovery_method.value}")

    def reported(self, device: str) -> None:
        """The driver reported an error of a device, which may be withheld until a check has decided about it."""
        self._reported.add(device)

    # -- actions ---------------------------------------------------------------------------------------------------

    def resets(self, gpu: Gpu) -> None:
        """A reset begins. Those of recoveries stay within the breaker's rule, and within the device's daily limit.

        They count from the start of their recovery, as recorded. An operator's release of a device resets its daily
        limit, but not the breaker's count.
        """
        record = self._last.get(gpu.id)
        if record is None or record.health is not Health.RECOVERING or self._ordered.get(gpu.id, False):
            return
        begun, policy = self._started.get(gpu.id, self._wall()), self._policy()
        self.recoveries.append((begun, gpu.id))
        window = [at for at, _ in self.recoveries if begun - policy.breaker.window < at <= begun]
        if len(window) > policy.breaker.max_resets:
            self._breach("8", f"{len(window)} resets by recoveries within {policy.breaker.window:g} s")
        since = max(begun - DAY, self._forgiven.get(gpu.id, 0.0))
        mine = [at for at, device in self.recoveries if device == gpu.id and since < at <= begun]
        if len(mine) > policy.recovery.max_resets_per_day:
            self._breach("8", f"{gpu.id} is reset {len(mine)} times within a day")

    # -- between any two steps -------------------------------------------------------------------------------------

    def offered(self, views: Iterable[DeviceView]) -> None:
        """A device advertised to the kubelet is healthy, or an operator or policy permits it."""
        for view in views:
            record, why = view.record, self._why_offered(view)
            if view.advertised and not why:
                self._breach("1", f"{record.device} is offered while {record.health.value}")
            held = record.hygiene in (Hygiene.DIRTY, Hygiene.SCRUBBING)
            crowded = view.policy.sharing is SharingMode.NEVER and any(len(c.pods) > 1 for c in record.prepared_claims)
            kept_back = view.withheld and (held or crowded or record.device in self._reported)
            if record.advertised and not view.advertised and not kept_back:
                self._breach("7", f"{record.device} is {record.health.value} and not offered")

    def _why_offered(self, view: DeviceView) -> str:
        record, policy = view.record, self._policy()
        if record.health in ADVERTISED:
            return "in service"
        out = record.health is Health.QUARANTINED and record.cause is not None and record.cause.by_operator
        if out:
            return ""
        if record.break_glass is not None and self._wall() < record.break_glass.until + self._late():
            return "its glass is broken"
        mine = [policy, *(each.policy for each in policy.overrides if each.matches(view.device.model, each.resources))]
        if any(each.enforcement is Enforcement.OBSERVE for each in mine):
            return "observed"
        shared = any(grant.assignment is not None and grant.assignment.shares for grant in record.open_grants)
        held_back = any(each.health.quarantine_at is QuarantineTiming.RELEASE for each in mine)
        if held_back and record.hygiene is Hygiene.IN_USE and not shared:
            return "its news waits for its release"
        return ""
