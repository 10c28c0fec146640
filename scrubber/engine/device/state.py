"""The state of one device: its record, and hints that are not durable. Only this module changes the record.

Every change is decided under the lock, committed to the ledger, and only then applied in memory, published and logged.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace

from scrubber.completion import run_to_completion
from scrubber.domain.assignment import Pod
from scrubber.domain.device import Device
from scrubber.domain.errors import DeviceBusy, InvalidRequest, LedgerFailure
from scrubber.domain.policy import Enforcement, Policy
from scrubber.domain.record import BreakGlass, DeviceRecord
from scrubber.domain.states import Hygiene
from scrubber.engine.breaker import CircuitBreaker
from scrubber.engine.dependencies import Dependencies
from scrubber.engine.device.disturbances import Disturbances
from scrubber.engine.pods import PodTracker
from scrubber.engine.scrub import ScrubJob
from scrubber.ports.record import LedgerChange

__all__ = ["DeviceState"]


# See docs/decisions/0003-one-transaction-per-decision.md.
class DeviceState:
    """The record of one device, with hints that are not durable.

    Args:
        record: the record from the ledger.
        resources: returns the kubelet's resources that advertise the device of a record.
        on_change: called after every change that may interest a reader.

    Attributes:
        id: the device's ID.
        device: the device as the inventory describes it.
        lock: held from a decision to its commit, and never during a scrub.
        job: the scrub in progress; set only by :class:`~scrubber.engine.device.scrubs.Scrubs`.
        disturbances: unauthorized use since the last grant.
        allocations: number of ``Allocate`` calls, so that a grant resolves only those that it knew of.
        retired: the device left the node; nothing is granted, scrubbed or committed any more.
        wake: set when something changed that the recovery loop must check.
        dirty_since: monotonic time since which the device is free and not clean; None: it is clean, or in use.
    """

    def __init__(
        self,
        device: Device,
        record: DeviceRecord,
        *,
        dependencies: Dependencies,
        pods: PodTracker,
        breaker: CircuitBreaker,
        resources: Callable[[DeviceRecord], frozenset[str]],
        on_change: Callable[[], None],
    ) -> None:
        self.id = device.id
        self.device = device
        self._record = record
        self._dependencies = dependencies
        self._pods = pods
        self._breaker = breaker
        self._resources = resources
        self.on_change = on_change
        self.lock = asyncio.Lock()
        self.job: ScrubJob | None = None
        self.disturbances = Disturbances(dependencies.clock)
        # Not durable: after a restart, the kubelet may have allocated the device in the meantime.
        self.allocations, self._allocations_granted = 1, 0
        self._waiting: Pod | None = None
        self.retired = False
        self.wake = asyncio.Event()
        self.dirty_since: float | None = None
        self._note_hygiene(record)

    @property
    def record(self) -> DeviceRecord:
        """The record as of the last commit."""
        return self._record

    @property
    def policy(self) -> Policy:
        """The current policy of this device. An active break-glass override sets its enforcement to observe."""
        policy = self._dependencies.policy()
        if policy.overrides or policy.by_backend:
            policy = policy.for_device(self.device.model, self._resources(self._record), self.device.backend)
        if self._record.break_glass is not None and self.is_override_active(self._record.break_glass, policy):
            policy = replace(policy, enforcement=Enforcement.OBSERVE)
        return policy

    def is_override_active(self, override: BreakGlass, policy: Policy) -> bool:
        """Return whether a break-glass override has time left.

        A clock that was set back does not prolong it beyond the policy's limit.
        """
        return 0 < override.until - self._dependencies.clock.wall() <= policy.limits.break_glass

    def describe(self, device: Device) -> None:
        """Apply a new description of the device, which is still in the same location."""
        if device != self.device:
            self.device = device
            self.on_change()

    # -- hints from the kubelet's calls ----------------------------------------------------------------------------

    @property
    def allocated_since(self) -> bool:
        """Whether the device was allocated again since its last grant, as far as known."""
        return self.allocations != self._allocations_granted

    @property
    def is_reserved(self) -> bool:
        """Whether the kubelet is known to have allocated the device since its last grant.

        Unlike :attr:`allocated_since`, this does not count what may have happened before the start of the service.
        """
        return self.allocations > max(self._allocations_granted, 1)

    def count_allocation(self) -> None:
        """Count an allocation: one that the kubelet made, or may have made while the service could not be notified."""
        self.allocations += 1
        self.wake.set()

    @property
    def waiting_pod(self) -> Pod | None:
        """The pod whose start was refused last, while the kubelet still assigns it the device."""
        return self.pod_if_starting(self._waiting)

    def pod_if_starting(self, pod: Pod | None) -> Pod | None:
        """Return ``pod`` while the kubelet assigns it the device, else None: a deleted pod no longer starts."""
        given = pod is not None and any(each.pod == pod for each in self._pods.reading.all_assignments(self.id))
        return pod if pod is not None and given and not self._pods.is_absent(pod) else None

    def note_waiting(self, pod: Pod) -> None:
        """Note that ``pod`` keeps the device while its start waits, so that the device can recover in the meantime."""
        self._waiting = pod
        self.wake.set()

    # -- changing the record ---------------------------------------------------------------------------------------

    def apply(self, record: DeviceRecord) -> None:
        """Apply a record that was committed to the ledger. The caller holds the lock."""
        assert self.lock.locked()
        self._record = record
        self._note_hygiene(record)
        self._breaker.invalidate()
        self.wake.set()
        self.on_change()

    def _note_hygiene(self, record: DeviceRecord) -> None:
        if record.hygiene not in (Hygiene.DIRTY, Hygiene.SCRUBBING):
            self.dirty_since = None
        elif self.dirty_since is None:
            self.dirty_since = self._dependencies.clock.monotonic()

    def apply_grant(self, record: DeviceRecord, allocations: int) -> None:
        """Apply a record with a new grant, which resolves the allocations it knew of. The caller holds the lock."""
        self._allocations_granted = allocations
        self._waiting = None
        self.disturbances.reset()
        self.apply(record)

    async def commit(self, change: LedgerChange, record: DeviceRecord) -> None:
        """Commit ``change`` with the device's next record, then apply, publish and log it. The caller holds the lock.

        Raises:
            InvalidRequest: the device left the node.
            LedgerFailure: nothing has changed.
        """
        if self.retired:
            raise InvalidRequest(f"Device {self.id} is no longer on this node.")

        async def store_and_apply() -> None:
            # Only the audit log is bounded: the log and the metrics get every event.
            rows = self.disturbances.coalesce(change.events)
            try:
                await self._dependencies.ledger.commit(replace(change, events=rows) | LedgerChange(records=(record,)))
            except LedgerFailure:
                self.on_change()
                raise
            self.disturbances.note_stored(change.events, rows)
            self.apply(record)
            self._dependencies.journal.record(change.events)

        await run_to_completion(store_and_apply())

    async def retire(self) -> DeviceRecord:
        """Refuse every later change; return the last record.

        Raises:
            DeviceBusy: the device is in use or being scrubbed.
        """
        async with self.lock:
            if self.job is not None or self._record.hygiene is Hygiene.IN_USE:
                raise DeviceBusy(f"Device {self.id} is {self._record.state}.")
            self.retired = True
            return self._record
