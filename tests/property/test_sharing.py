"""Any history of a shared device, in any order of joins, ends, restarts and refusals.

No two tenants ever meet on it, no pod finds another tenant's bytes, and no memory is cleared while a pod lives. The
history uses only the domain's functions; the engine's part (request, grant, scrub when no pod is left) is implemented
here in as few lines as possible.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from scrubber.domain.assignment import Assignment, Pod
from scrubber.domain.handover_kind import UNPROVEN_BASES, Basis, HandOverKind
from scrubber.domain.pods import PodState
from scrubber.domain.policy import SharingMode
from scrubber.domain.record import DeviceRecord, Grant
from scrubber.domain.sharing import GrantedPod, SharingAction, decide_sharing
from scrubber.domain.states import Health, Hygiene
from tests.simulation.samples import DEVICE, NODE, NOW, certificate, record

TENANTS = ("acme", "acme", "umbrella")
KNOWN = st.sampled_from((True, True, True, False))
"""Whether the kubelet's list identifies the requesting pod with certainty."""


@dataclass(slots=True)
class Guest:
    """A pod: whether it runs, what is left of it, and whether it has a share or all of the device."""

    pod: Pod
    state: PodState = PodState.OVER
    share: bool = True


class SharedDevice(RuleBasedStateMachine):
    """One device, and the pods on it."""

    def __init__(self) -> None:
        super().__init__()
        self.guests: dict[Pod, Guest] = {}
        self.record: DeviceRecord = record(Hygiene.DIRTY)
        self.sharing = SharingMode.SAME_TENANT
        self.bytes_of: set[str] = set()
        self.cleared_beside: list[Pod] = []
        self.found_foreign: list[tuple[Pod, str]] = []
        self.born = 0

    @initialize(sharing=st.sampled_from((SharingMode.SAME_TENANT, SharingMode.SAME_TENANT, SharingMode.NEVER)))
    def begin(self, sharing: SharingMode) -> None:
        """The initial content of the device is unknown."""
        self.sharing = sharing
        self.bytes_of = {"an unknown earlier tenant"}

    # -- events ----------------------------------------------------------------------------------------------------

    @rule(tenant=st.sampled_from(TENANTS), share=st.sampled_from((True, True, True, False)), known=KNOWN)
    def a_pod_comes(self, tenant: str, share: bool, known: bool) -> None:
        self.born += 1
        pod = Pod(tenant, f"pod-{self.born}", f"uid-{self.born}")
        self._requests_start(Guest(pod, share=share), known=known)

    @rule(choice=st.integers(0, 9), known=KNOWN)
    def a_container_restarts(self, choice: int, known: bool) -> None:
        living = [guest for guest in self.guests.values() if guest.state is PodState.ALIVE]
        if living:
            guest = living[choice % len(living)]
            guest.state = PodState.OVER
            self._requests_start(guest, known=known)

    @rule(choice=st.integers(0, 9), leaves=st.sampled_from((False, False, True)))
    def a_pod_ends(self, choice: int, leaves: bool) -> None:
        living = [guest for guest in self.guests.values() if guest.state is PodState.ALIVE]
        if living:
            living[choice % len(living)].state = PodState.LEFTOVER if leaves else PodState.OVER

    @rule()
    def a_leftover_dies(self) -> None:
        for guest in self.guests.values():
            guest.state = PodState.OVER if guest.state is PodState.LEFTOVER else guest.state

    @rule()
    def everybody_is_gone_and_the_device_is_released(self) -> None:
        if not self._living() and self.record.hygiene is Hygiene.IN_USE:
            self.record = self.record.after_release()

    @rule()
    def a_device_that_is_free_is_scrubbed(self) -> None:
        if self.record.hygiene is Hygiene.DIRTY and not self._living():
            self._scrub()

    @rule()
    def the_service_is_restarted(self) -> None:
        self.record = self.record.after_service_start(NODE.boot)
        if self._living():
            self.record = self.record.after_adoption(None)

    @rule(tenant=st.sampled_from(TENANTS))
    def a_free_device_is_found_with_an_unannounced_pod(self, tenant: str) -> None:
        """No scrub removes its predecessor's bytes, so what it may find is not the service's responsibility."""
        if self._living() or self.record.hygiene is not Hygiene.DIRTY:
            return
        self.born += 1
        pod = Pod(tenant, f"pod-{self.born}", f"uid-{self.born}")
        self.guests[pod] = Guest(pod, PodState.ALIVE)
        self.record = self.record.after_adoption(self._grant(pod, Basis.ADOPTED))
        self.bytes_of |= {tenant, "an unknown earlier tenant"}

    # -- the engine's part -----------------------------------------------------------------------------------------

    def _requests_start(self, guest: Guest, *, known: bool) -> None:
        standings = {grant.sequence: self.guests[grant.pod].state for grant in self.record.open_grants if grant.pod}
        others = [grant for grant in self.record.open_grants if grant.pod != guest.pod]
        if guest.share:
            verdict = decide_sharing(
                guest.pod if known else None,
                [
                    GrantedPod(
                        grant.pod,
                        standings[grant.sequence],
                        bool(grant.pod and self.guests[grant.pod].share),
                        grant.basis not in UNPROVEN_BASES,
                    )
                    for grant in others
                ],
                self.sharing,
                device_is_sound=self.record.hygiene is Hygiene.IN_USE and self.record.health is Health.HEALTHY,
            )
            if verdict.action is SharingAction.JOIN:
                self._starts(guest, Basis.SHARED)
                return
            if verdict.action is SharingAction.WAIT:
                return
        if any(standings[grant.sequence] is PodState.ALIVE for grant in others):
            return
        if self.record.hygiene is Hygiene.IN_USE:
            self.record = self.record.after_release()
        self._scrub()
        self._starts(guest, Basis.CERTIFICATE)

    def _starts(self, guest: Guest, basis: Basis) -> None:
        self.found_foreign += [(guest.pod, tenant) for tenant in self.bytes_of - {guest.pod.tenant}]
        guest.state = PodState.ALIVE
        self.guests[guest.pod] = guest
        self.record = self.record.after_grant(self._grant(guest.pod, basis), None, certain=True)
        if basis is Basis.SHARED:
            self.record = replace(self.record, exclusive_use=False)
        self.bytes_of.add(guest.pod.tenant)

    def _grant(self, pod: Pod, basis: Basis) -> Grant:
        assignment = Assignment(pod, "main", frozenset({DEVICE}))
        return Grant(self.record.grant_sequence + 1, assignment, HandOverKind.UNKNOWN, NOW, NODE.boot, basis=basis)

    def _scrub(self) -> None:
        """Kill leftovers and clear the memory: the pod of every open grant has to be over."""
        self.cleared_beside += [guest.pod for guest in self._living()]
        for guest in self.guests.values():
            guest.state = PodState.OVER
        self.record = self.record.after_scrub_start()
        issued = certificate(sequence=self.record.certificate_count + 1, previous_grant=self.record.grant_sequence)
        self.record = self.record.after_passed_scrub(issued, was_reset=False)
        self.bytes_of.clear()

    def _living(self) -> list[Guest]:
        return [guest for guest in self.guests.values() if guest.state is PodState.ALIVE]

    # -- invariants ------------------------------------------------------------------------------------------------

    @invariant()
    def one_tenant_is_on_it(self) -> None:
        assert len({guest.pod.tenant for guest in self._living()}) <= 1

    @invariant()
    def no_tenant_finds_another_tenants_bytes(self) -> None:
        assert self.found_foreign == []

    @invariant()
    def nothing_is_cleared_beside_a_running_pod(self) -> None:
        assert self.cleared_beside == []

    @invariant()
    def pod_with_the_whole_device_is_alone(self) -> None:
        living = self._living()
        assert len(living) <= 1 or all(guest.share for guest in living)

    @invariant()
    def where_no_two_pods_may_meet_none_do(self) -> None:
        assert len(self._living()) <= 1 or self.sharing is SharingMode.SAME_TENANT

    @invariant()
    def no_exception_holds_for_a_device_that_was_joined(self) -> None:
        if any(grant.basis is Basis.SHARED for grant in self.record.open_grants):
            assert self.record.previous_assignment is None


TestASharedDevice = SharedDevice.TestCase
