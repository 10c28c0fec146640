"""The controller of one device: its state, health, occupancy and scrubs, and operations that combine them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass

from scrubber.domain.assignment import Trust
from scrubber.domain.binding import binding_state
from scrubber.domain.claims import shares_against_policy
from scrubber.domain.device import Device
from scrubber.domain.policy import Enforcement, QuarantineTiming
from scrubber.domain.record import DeviceRecord
from scrubber.domain.states import Health, Hygiene
from scrubber.domain.taints import DeviceCondition, taint_reasons
from scrubber.engine import refusals
from scrubber.engine.breaker import CircuitBreaker
from scrubber.engine.dependencies import Dependencies
from scrubber.engine.device.health import DeviceHealth
from scrubber.engine.device.occupancy import Occupancy
from scrubber.engine.device.reset_gate import ResetGate
from scrubber.engine.device.scrubs import Scrubs
from scrubber.engine.device.state import DeviceState
from scrubber.engine.eraser_pool import EraserPool
from scrubber.engine.pods import PodTracker
from scrubber.engine.views import DeviceView

__all__ = ["DeviceController", "NodeContext"]

_WITHHOLD_AFTER = 60.0
"""Seconds for which a process without a grant must block every scrub before its device is withheld from the kubelet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeContext:
    """What the controller of one device may use of its node.

    Attributes:
        on_change: called after every change that may interest a reader.
        pods: tracks the pods that have, or had, a device.
        keep_out_of_use: keeps other devices out of use while open
            (:meth:`scrubber.engine.devices.Devices.keep_out_of_use`).
        resources: returns the kubelet's resources that advertise the device of a record, as far as they are known.
        records: returns the records of all devices.
        breaker: limits on recoveries.
        eraser_pool: limits how many children work on devices at once.
    """

    on_change: Callable[[], None]
    pods: PodTracker
    keep_out_of_use: Callable[[Iterable[str]], AbstractAsyncContextManager[None]]
    resources: Callable[[DeviceRecord], frozenset[str]]
    records: Callable[[], Collection[DeviceRecord]]
    breaker: CircuitBreaker
    eraser_pool: EraserPool


class DeviceController:
    """One device.

    Args:
        record: the record from the ledger.

    Attributes:
        pods: the pod tracker of the node.
        state: the record and its lock.
        health: the device's condition, and operator actions on it.
        occupancy: which processes and pods have the device.
        reset_gate: decides whether a recovery may reset the device now.
        scrubs: the scrub in progress, and when the next one may start.
    """

    def __init__(self, device: Device, record: DeviceRecord, *, dependencies: Dependencies, node: NodeContext) -> None:
        self.id = device.id
        self.pods = node.pods
        self._last_view: tuple[tuple[object, ...], DeviceView] | None = None
        self._clock = dependencies.clock
        self.state = DeviceState(
            device,
            record,
            dependencies=dependencies,
            pods=node.pods,
            breaker=node.breaker,
            resources=node.resources,
            on_change=node.on_change,
        )
        self.health = DeviceHealth(
            state=self.state, dependencies=dependencies, breaker=node.breaker, records=node.records
        )
        self.occupancy = Occupancy(state=self.state, health=self.health, pods=node.pods, dependencies=dependencies)
        self.reset_gate = ResetGate(
            state=self.state, health=self.health, breaker=node.breaker, dependencies=dependencies
        )
        self.scrubs = Scrubs(
            state=self.state,
            health=self.health,
            occupancy=self.occupancy,
            pods=node.pods,
            dependencies=dependencies,
            reset_gate=self.reset_gate,
            eraser_pool=node.eraser_pool,
            keep_out_of_use=node.keep_out_of_use,
        )

    @property
    def view(self) -> DeviceView:
        """The current state of the device; the same object for as long as nothing in it can have changed."""
        basis = self._lasting_basis
        if basis is None:
            return self.build_view()
        if self._last_view is None or self._last_view[0] != basis:
            self._last_view = basis, self.build_view()
        return self._last_view[1]

    @property
    def _lasting_basis(self) -> tuple[object, ...] | None:
        """All that the view of a healthy device at rest depends on; None if time or the kubelet's list can change it."""
        state, record = self.state, self.state.record
        changes_without_commit = (
            record.health is not Health.HEALTHY
            or record.hygiene not in (Hygiene.CLEAN, Hygiene.IN_USE)
            or state.job is not None
            or state.dirty_since is not None
            or self.health.reported_fault
            or self.scrubs.held_since is not None
        )
        if changes_without_commit:
            return None
        users, holders = self.occupancy.unauthorized_users, self.occupancy.holders
        uninspected, blocker = self.scrubs.uninspected_processes, self.reset_gate.blocker
        return state.device, record, state.policy, users, holders, uninspected, blocker

    def build_view(self) -> DeviceView:
        """Return a new view of the current state."""
        job, condition = self.state.job, self._condition
        return DeviceView(
            self.state.device,
            self.state.record,
            None if job is None else job.id,
            advertised=self.advertised,
            policy=self.state.policy,
            recovery_blocker=self.reset_gate.blocker,
            unauthorized_users=self.occupancy.unauthorized_users,
            holders=self.occupancy.holders,
            withheld=self._withheld_message,
            uninspected_processes=self.scrubs.uninspected_processes,
            taints=taint_reasons(self.state.record, self.state.policy, condition),
            binding=binding_state(self.state.record, self.state.policy, condition),
        )

    @property
    def advertised(self) -> bool:
        """Whether the device is advertised to the kubelet as healthy."""
        record = self.state.record
        if record.quarantined_by_operator or (record.advertised and not self.health.reported_fault):
            return record.advertised and not self.is_withheld and not self.is_shared_against_policy
        policy = self.state.policy
        if policy.enforcement is Enforcement.OBSERVE:
            return True
        if policy.health.quarantine_at is not QuarantineTiming.RELEASE or record.hygiene is not Hygiene.IN_USE:
            return False
        shared = any(grant.assignment is not None and grant.assignment.shares for grant in record.open_grants)
        return not (shared or self.is_shared_against_policy) and self._is_still_given()

    @property
    def is_withheld(self) -> bool:
        """Whether the device is withheld from the kubelet because a process without a grant has held it for a while.

        It would attract one pod after the other, and none could start. While it is assigned to a pod it is advertised:
        it attracts no other, and the kubelet would count an unhealthy device that is assigned twice.
        """
        return self.is_blocked_by_a_process and not self.pods.reading.all_assignments(self.id)

    @property
    def is_blocked_by_a_process(self) -> bool:
        """Whether a process without a grant has blocked every scrub of the device for a while."""
        since, state = self.scrubs.held_since, self.state
        if since is None or state.policy.enforcement is Enforcement.OBSERVE:
            return False
        if state.record.hygiene not in (Hygiene.DIRTY, Hygiene.SCRUBBING):
            return False
        return self._clock.monotonic() - since >= _WITHHOLD_AFTER

    @property
    def is_shared_against_policy(self) -> bool:
        """Whether several pods use the device by one claim although the policy allows one pod at a time."""
        policy = self.state.policy
        observes = policy.enforcement is Enforcement.OBSERVE
        return not observes and shares_against_policy(self.state.record, policy.sharing)

    @property
    def _withheld_message(self) -> str:
        """The message for a pod's status why the device is not advertised although it is in service, or empty."""
        if self.is_shared_against_policy:
            return refusals.claim_shared_message(self.id)
        if self.is_withheld:
            return refusals.withheld_message(self.id)
        if self.health.reported_fault and self.state.record.advertised and not self.advertised:
            return refusals.fault_reported_message(self.id, self.health.reported_fault)
        return ""

    @property
    def _condition(self) -> DeviceCondition:
        since = self.state.dirty_since
        return DeviceCondition(
            fault_reported=bool(self.health.reported_fault),
            held=self.is_withheld,
            shared=self.is_shared_against_policy,
            dirty_seconds=None if since is None else self._clock.monotonic() - since,
        )

    def _is_still_given(self) -> bool:
        """Whether the kubelet still assigns the device to a granted pod, as far as known; if not, it would offer it."""
        reading = self.pods.reading
        assigned_pods = {each.pod for each in reading.all_assignments(self.id)}
        unsure = reading.trust is not Trust.TRUSTED
        return any(unsure or pod in assigned_pods for grant in self.state.record.open_grants for pod in grant.pods)

    @property
    def refuses_allocation(self) -> bool:
        """Whether an allocation is refused, which makes its pod fail permanently."""
        record = self.state.record
        return not record.advertised and (
            record.quarantined_by_operator or self.state.policy.enforcement is not Enforcement.OBSERVE
        )

    def apply_grant(self, record: DeviceRecord, allocations: int) -> None:
        """Apply a committed record with a new grant; no use was seen since. The caller holds the lock.

        Args:
            allocations: the number of allocations that the grant resolves.
        """
        self.occupancy.coverage.note_grant()
        self.state.apply_grant(record, allocations)
