"""Custody of one device's record: one lock from decision to commit, and nothing believed that is not in the ledger.

Whoever decides holds the lock, commits, and only then believes, shows and tells. Beside the record stand the few hints that
are not durable: what the kubelet allocated, who waits, and for how long nobody was seen.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace

from scrubber.domain.assignment import Pod
from scrubber.domain.device import Device
from scrubber.domain.errors import InvalidRequest, LedgerFailure
from scrubber.domain.policy import Enforcement, Policy
from scrubber.domain.record import DeviceRecord, Glass
from scrubber.engine.dependencies import Dependencies
from scrubber.engine.disturbance import Disturbances
from scrubber.engine.finish import to_the_end
from scrubber.engine.lookout import Lookout
from scrubber.engine.neighbourhood import Neighbourhood
from scrubber.ports.record import Change

__all__ = ["Custody"]


class Custody:
    """One device's.

    Args:
        record: the record as the ledger has it.
    """

    def __init__(
        self, device: Device, record: DeviceRecord, *, dependencies: Dependencies, around: Neighbourhood
    ) -> None:
        self.device = device
        self._record = record
        self._dependencies = dependencies
        self._around = around
        self._changed = around.changed
        self._lock = asyncio.Lock()
        self._lookout = Lookout(dependencies.clock)
        self._disturbances = Disturbances(dependencies.clock)
        # Not durable: after a restart nobody knows whether the kubelet allocated the device meanwhile.
        self._allocations, self._allocations_granted = 1, 0
        self._waiting: Pod | None = None
        self._retired = False
        self.wake = asyncio.Event()

    @property
    def record(self) -> DeviceRecord:
        """The record as of the last commit."""
        return self._record

    @property
    def policy(self) -> Policy:
        """The policy of this device, as it is now. One whose glass is broken is observed."""
        policy = self._dependencies.policy()
        if policy.overrides:
            policy = policy.of(self.device.model, self._around.resources(self.device.id))
        if self._record.glass is not None and self._is_broken(self._record.glass, policy):
            policy = replace(policy, enforcement=Enforcement.OBSERVE)
        return policy

    def _is_broken(self, glass: Glass, policy: Policy) -> bool:
        """Whether its time is not over. A clock that was set back does not make it longer than the policy allows."""
        return 0 < glass.until - self._dependencies.clock.wall() <= policy.limits.break_glass

    def described(self, device: Device) -> None:
        """The device, as it is described now; it is where it was."""
        if device != self.device:
            self.device = device
            self._changed()

    # -- hints from the kubelet's calls ----------------------------------------------------------------------------

    @property
    def allocations(self) -> int:
        """Counts the ``Allocate`` calls that were told of, so that a grant settles only those it knew."""
        return self._allocations

    @property
    def allocated_since(self) -> bool:
        """Whether the device was allocated again since its last grant, as far as anybody knows."""
        return self._allocations != self._allocations_granted

    def note_allocated(self) -> None:
        """The kubelet allocated the device, or may have while we could not be told."""
        self._allocations += 1
        self.wake.set()

    @property
    def waiting(self) -> Pod | None:
        """The pod whose start was refused last, while the kubelet still has it start on the device."""
        return self.starting(self._waiting)

    def starting(self, pod: Pod | None) -> Pod | None:
        """``pod``, as long as the kubelet gives it the device: one that was deleted meanwhile starts no more."""
        pods = self._dependencies.pods
        given = pod is not None and any(each.pod == pod for each in pods.reading.naming(self.device.id))
        return pod if pod is not None and given and not pods.absent(pod) else None

    def note_waiting(self, pod: Pod) -> None:
        """``pod`` keeps the device for as long as it waits for its start: to heal it after the pod's end would be never."""
        self._waiting = pod
        self.wake.set()

    @property
    def retired(self) -> bool:
        """Whether the device is gone: nothing is granted or scrubbed any more."""
        return self._retired

    # -- committing ------------------------------------------------------------------------------------------------

    def deciding(self) -> asyncio.Lock:
        """To be held with ``async with``: nobody else changes the record inside."""
        return self._lock

    def believe(self, record: DeviceRecord) -> None:
        """Take over a record that is in the ledger. Only while :meth:`deciding`."""
        assert self._lock.locked()
        self._record = record
        self._around.breaker.moved()
        self.wake.set()
        self._changed()

    def left_out(self) -> Change:
        """The audit rows that a grant is committed with: for events of the device that had none. Only while :meth:`deciding`."""
        return Change(events=self._disturbances.left_out())

    def believe_granted(self, record: DeviceRecord, allocations: int) -> None:
        """Take over a record with a new grant: it settles the allocations that it knew of, and nobody was seen since."""
        self._allocations_granted = allocations
        self._waiting = None
        self._lookout.granted()
        self._disturbances.forget()
        self.believe(record)

    async def _commit(self, change: Change, record: DeviceRecord) -> None:
        if self._retired:
            raise InvalidRequest(f"Device {self.device.id} is no longer on this node.")

        async def store_and_believe() -> None:
            # Only the audit trail is bounded: log and metrics are told of everything.
            rows = self._disturbances.coalesced(change.events)
            try:
                await self._dependencies.ledger.commit(replace(change, events=rows) | Change(records=(record,)))
            except LedgerFailure:
                self._changed()
                raise
            self._disturbances.stored(change.events, rows)
            self.believe(record)
            self._dependencies.journal.tell(change.events)

        await to_the_end(store_and_believe())
