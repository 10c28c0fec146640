"""Resource claims: what a grant to one means, what keeps one from being prepared, and when its release is complete."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scrubber.domain.assignment import (
    Assignment,
    Claim,
    JobManager,
    KubeletReading,
    ListedClaim,
    Pod,
    PodAbsence,
    Process,
    Trust,
)
from scrubber.domain.claims import (
    ClaimPodFacts,
    PreparedClaimState,
    ReleasingDevice,
    claim_kind,
    claim_problem,
    decide_release,
    is_prepared_for,
    merge_pods,
    prepared_claim_state,
    replaced_claims,
    shares_against_policy,
    unprepared_claims,
)
from scrubber.domain.codes import ErrorCode
from scrubber.domain.handover_kind import HandOverKind
from scrubber.domain.pods import PodState, RemainingCgroups, claim_pod_liveness
from scrubber.domain.policy import SharingMode
from scrubber.domain.record import DeviceRecord, Grant
from scrubber.domain.states import Hygiene
from scrubber.domain.usage import UseKind, classify_use, may_be_killed

FIRST, SECOND, OTHER = (Pod("team-a", f"train-{n}", f"uid-{n}") for n in range(3))
CLAIM = Claim("claim-1", "team-a", "gpus", "gpu.example.com", (FIRST, SECOND))
RIVAL = Claim("claim-2", "team-b", "gpus", "gpu.example.com", (OTHER,))
NOW = 1000.0
pods = st.lists(st.sampled_from([FIRST, SECOND, OTHER]), max_size=5)


def grant(claim: Claim, sequence: int = 1) -> Grant:
    return Grant(sequence, None, HandOverKind.UNKNOWN, NOW, "boot-1", claim=claim)


def in_use(*claims: Claim, device: str = "GPU-1") -> DeviceRecord:
    grants = tuple(grant(each, number) for number, each in enumerate(claims, 1))
    return DeviceRecord(
        device, hygiene=Hygiene.IN_USE, open_grants=grants, last_grant=grants[-1] if grants else None, boot="boot-1"
    )


def released(claim: Claim) -> Claim:
    return replace(claim, released_at=NOW)


# -- a grant to a claim ------------------------------------------------------------------------------------------------


def test_grant_of_a_claim_is_one_grant_for_each_of_its_pods() -> None:
    parts = grant(CLAIM).by_pod()
    assert [each.pod for each in parts] == [FIRST, SECOND]
    assert {each.sequence for each in parts} == {1}
    assert (grant(CLAIM).pod, grant(CLAIM).pods, grant(CLAIM).tenant) == (None, (FIRST, SECOND), "team-a")


def test_released_claim_keeps_the_pods_that_may_use_its_device_and_its_grant_while_it_has_one() -> None:
    device = in_use(replace(CLAIM, listed_pods=(FIRST,)), RIVAL)
    assert device.after_unprepare("claim-1", NOW).claim("claim-1") == replace(released(CLAIM), listed_pods=(FIRST,))
    left = device.after_unprepare("claim-1", NOW, elsewhere=(FIRST,))
    assert left.claim("claim-1") == replace(released(CLAIM), pods=(SECOND,))
    ended = device.after_unprepare("claim-1", NOW, elsewhere=(FIRST, SECOND))
    assert (ended.hygiene, [each.claim for each in ended.open_grants]) == (Hygiene.IN_USE, [RIVAL])
    unused = in_use(CLAIM).after_unprepare("claim-1", NOW, elsewhere=(FIRST, SECOND))
    assert (unused.hygiene, unused.open_grants) == (Hygiene.DIRTY, ())
    assert unused.last_grant is not None
    assert unused.last_grant.claim == released(CLAIM)


def test_grant_of_a_container_is_one_grant() -> None:
    ordinary = Grant(1, Assignment(FIRST, "main", frozenset({"GPU-1"})), HandOverKind.UNKNOWN, NOW, "boot-1")
    assert ordinary.by_pod() == (ordinary,)
    assert (ordinary.pods, ordinary.tenant) == ((FIRST,), "team-a")


def test_new_grant_of_a_claim_replaces_its_earlier_one() -> None:
    record = replace(in_use(released(CLAIM), RIVAL), hygiene=Hygiene.DIRTY)
    after = record.after_grant(grant(CLAIM, 3), None, certain=True)
    assert [each.claim and each.claim.uid for each in after.open_grants] == ["claim-2", "claim-1"]
    assert after.claim("claim-1") == CLAIM


def test_claim_is_changed_in_every_grant_and_only_with_a_new_version() -> None:
    record = in_use(CLAIM, RIVAL)
    after = record.with_claim("claim-2", released)
    assert after.version == record.version + 1
    assert after.prepared_claims == (CLAIM,)
    assert after.last_grant is not None
    assert after.last_grant.claim == released(RIVAL)
    assert record.with_claim("claim-3", released) is record
    assert after.with_claim("claim-2", released) is after


def test_claim_of_an_earlier_boot_is_forgotten() -> None:
    record = in_use(CLAIM).with_admin_access(RIVAL)
    assert record.after_service_start("boot-1").prepared_claims == (CLAIM,)
    assert record.after_service_start("boot-1").admin_claims == (RIVAL,)
    after = record.after_service_start("boot-2")
    assert (after.open_grants, after.admin_claims) == ((), ())


def test_claims_with_admin_access_are_limited_in_number() -> None:
    record = DeviceRecord("GPU-1")
    for number in range(40):
        record = record.with_admin_access(replace(RIVAL, uid=f"claim-{number}"))
    assert [each.uid for each in record.admin_claims] == [f"claim-{number}" for number in range(24, 40)]
    assert record.without_admin_access("claim-30").claim("claim-30") is None
    assert len(record.without_admin_access("claim-30").admin_claims) == 15
    assert record.without_admin_access("unknown") is record


# -- Prepare -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("devices", "prepared"), [({"GPU-1", "GPU-2"}, True), ({"GPU-1"}, None), ({"GPU-1", "GPU-3"}, None)]
)
def test_claim_is_prepared_with_exactly_its_devices(devices: set[str], prepared: bool | None) -> None:
    records = [in_use(CLAIM, device="GPU-1"), in_use(CLAIM, device="GPU-2"), DeviceRecord("GPU-3")]
    assert is_prepared_for("claim-1", devices, records) is prepared


def test_released_claim_is_not_prepared() -> None:
    assert is_prepared_for("claim-1", {"GPU-1"}, [in_use(released(CLAIM))]) is False


@pytest.mark.parametrize(
    ("record", "resources", "sharing", "problem"),
    [
        (DeviceRecord("GPU-1"), (), SharingMode.SAME_TENANT, None),
        (in_use(CLAIM), (), SharingMode.SAME_TENANT, None),
        (in_use(RIVAL), (), SharingMode.SAME_TENANT, ErrorCode.PREPARED_FOR_CLAIM),
        (in_use(RIVAL), ("example.com/gpu",), SharingMode.NEVER, ErrorCode.PREPARED_FOR_CLAIM),
        (in_use(released(RIVAL)), (), SharingMode.SAME_TENANT, None),
        (DeviceRecord("GPU-1"), ("example.com/gpu",), SharingMode.NEVER, ErrorCode.ADVERTISED_BY_PLUGIN),
        (DeviceRecord("GPU-1"), (), SharingMode.NEVER, ErrorCode.CLAIM_SHARED),
    ],
)
def test_problem_of_a_claim(
    record: DeviceRecord, resources: tuple[str, ...], sharing: SharingMode, problem: ErrorCode | None
) -> None:
    assert claim_problem(CLAIM, record, plugin_resources=resources, sharing=sharing) is problem


@pytest.mark.parametrize(
    ("requested", "advertised", "problem"),
    [
        ((), ("example.com/gpu",), None),
        (("example.com/gpu",), (), None),
        (("example.com/gpu",), ("example.com/nic",), None),
        (("example.com/fpga", "example.com/gpu"), ("example.com/gpu",), ErrorCode.RESOURCE_OF_PLUGIN),
    ],
)
def test_claim_for_an_extended_resource_that_a_plugin_advertises_is_a_problem(
    requested: tuple[str, ...], advertised: tuple[str, ...], problem: ErrorCode | None
) -> None:
    found = claim_problem(
        CLAIM,
        DeviceRecord("GPU-1"),
        plugin_resources=(),
        sharing=SharingMode.SAME_TENANT,
        extended_resources=requested,
        node_resources=advertised,
    )
    assert found is problem


def test_one_pod_may_have_a_device_that_is_not_shared() -> None:
    alone = replace(CLAIM, pods=(FIRST,))
    assert claim_problem(alone, DeviceRecord("GPU-1"), plugin_resources=(), sharing=SharingMode.NEVER) is None


@pytest.mark.parametrize(
    ("record", "kind"),
    [
        (DeviceRecord("GPU-1"), HandOverKind.UNKNOWN),
        (replace(in_use(CLAIM), exclusive_use=True), HandOverKind.SAME_TENANT),
        (replace(in_use(RIVAL), exclusive_use=True), HandOverKind.OTHER_TENANT),
        (replace(in_use(RIVAL), exclusive_use=False), HandOverKind.UNKNOWN),
    ],
)
def test_kind_of_a_hand_over_to_a_claim(record: DeviceRecord, kind: HandOverKind) -> None:
    assert claim_kind(record, "team-a") is kind


# -- pods --------------------------------------------------------------------------------------------------------------


@given(pods, pods, pods)
def test_pod_is_dropped_from_a_claim_only_when_it_is_over(
    before: list[Pod], reported: list[Pod], over: list[Pod]
) -> None:
    claim = replace(CLAIM, pods=tuple(dict.fromkeys(before)))
    after = merge_pods(claim, reported, over=over)
    assert set(reported) <= set(after)
    assert set(claim.pods) - set(over) <= set(after)
    assert set(after) <= set(claim.pods) | set(reported)
    assert len(after) == len(set(after))
    assert bool(after) or not claim.pods


def test_second_pod_of_a_claim_is_against_a_policy_that_allows_one() -> None:
    alone = replace(CLAIM, pods=(FIRST,))
    assert shares_against_policy(in_use(CLAIM), SharingMode.NEVER)
    assert not shares_against_policy(in_use(alone), SharingMode.NEVER)
    assert not shares_against_policy(in_use(released(CLAIM)), SharingMode.NEVER)
    assert not shares_against_policy(in_use(CLAIM), SharingMode.SAME_TENANT)


@pytest.mark.parametrize(
    ("claim", "use"),
    [
        (CLAIM, UseKind.GRANTED),
        (released(CLAIM), UseKind.GRANTED),
        (replace(CLAIM, pods=(FIRST,)), UseKind.GRANTED),
        (released(replace(CLAIM, pods=(FIRST,))), UseKind.STARTED_WITHOUT_HAND_OVER),
        (replace(CLAIM, name="others", pods=(FIRST,)), UseKind.STARTED_WITHOUT_HAND_OVER),
    ],
)
def test_pod_uses_a_device_by_the_claim_that_names_it_or_that_the_kubelet_lists_for_it(
    claim: Claim, use: UseKind
) -> None:
    listed = Assignment(SECOND, "main", frozenset({"GPU-1"}), CLAIM.driver)
    reading = KubeletReading(
        Trust.TRUSTED, (listed,), claims=(ListedClaim(SECOND, CLAIM.driver, CLAIM.namespace, CLAIM.name),)
    )
    assert classify_use(SECOND.uid, "GPU-1", [grant(claim)], reading) is use


@pytest.mark.parametrize(
    ("reserved", "listed"),
    [
        ((FIRST, SECOND), FIRST),
        ((SECOND,), replace(FIRST, uid=None)),
        ((FIRST, replace(FIRST, uid="uid-of-an-earlier-pod")), replace(FIRST, uid=None)),
    ],
    ids=["the only one of its name", "not reserved for it", "two of its name"],
)
def test_listed_pod_without_a_uid_is_the_only_one_of_its_name_that_the_claim_is_reserved_for(
    reserved: tuple[Pod, ...], listed: Pod
) -> None:
    claim = replace(CLAIM, pods=reserved)
    reading = KubeletReading(
        Trust.TRUSTED, claims=(ListedClaim(replace(FIRST, uid=None), claim.driver, claim.namespace, claim.name),)
    )
    assert reading.pods_of_claim(claim) == {listed}


def test_pod_with_admin_access_is_no_tenant_and_is_never_killed() -> None:
    reading = KubeletReading(Trust.TRUSTED, (Assignment(OTHER, "main", frozenset({"GPU-1"}), CLAIM.driver),))
    assert classify_use(OTHER.uid, "GPU-1", [], reading, admin_claims=[RIVAL]) is UseKind.ADMIN_ACCESS
    unlisted = KubeletReading(Trust.TRUSTED)
    assert may_be_killed(OTHER.uid, "GPU-1", [], unlisted)
    assert not may_be_killed(OTHER.uid, "GPU-1", [], unlisted, admin_claims=[RIVAL])


# -- when a pod of a claim is over -------------------------------------------------------------------------------------

SANDBOX, MAIN, CHILD = Process(1, 10, "sandbox"), Process(2, 20, "main"), Process(3, 30, "main")
GONE = PodAbsence(2, NOW - 5.0, NOW)
LONG_GONE = PodAbsence(2, NOW - 31.0, NOW)
GRACE = 30.0


def state(
    *processes: Process,
    released_for: float | None = 1.0,
    absence: PodAbsence | None = None,
    remaining: RemainingCgroups | None = None,
    listed: bool = False,
    withdrawn_for: float | None = None,
    never_started: bool = False,
    named_by_kubelet: bool = True,
    first: Process | None = MAIN,
) -> PodState:
    return claim_pod_liveness(
        processes,
        absence or PodAbsence(),
        remaining,
        released_for=released_for,
        listed=listed,
        withdrawn_for=withdrawn_for,
        never_started=never_started,
        named_by_kubelet=named_by_kubelet,
        seen={"sandbox", "main"},
        first_processes={} if first is None else {first.container: first, "sandbox": SANDBOX},
        now=NOW,
        leftover_grace_period=GRACE,
    ).state


def test_process_of_a_pod_that_only_the_driver_named_is_no_leftover_however_long_the_pod_is_gone() -> None:
    assert state(MAIN, absence=LONG_GONE) is PodState.LEFTOVER
    assert state(MAIN, absence=LONG_GONE, named_by_kubelet=False) is PodState.ALIVE


def test_pod_of_a_prepared_claim_is_alive_whatever_is_known_of_it() -> None:
    assert state(released_for=None, absence=LONG_GONE, remaining=RemainingCgroups(False)) is PodState.ALIVE
    assert state(SANDBOX, released_for=None, withdrawn_for=GRACE, listed=True, never_started=True) is PodState.ALIVE


def test_pod_of_a_released_claim_that_has_only_a_sandbox_is_over_once_the_claim_had_no_specification_for_the_grace_period() -> (
    None
):
    def waiting(withdrawn_for: float | None, *, never_started: bool = True) -> PodState:
        return state(
            SANDBOX, released_for=math.inf, withdrawn_for=withdrawn_for, listed=True, never_started=never_started
        )

    assert waiting(GRACE) is PodState.OVER
    assert waiting(GRACE - 1.0) is PodState.ALIVE
    assert waiting(None) is PodState.ALIVE
    assert waiting(GRACE, never_started=False) is PodState.ALIVE


@pytest.mark.parametrize(
    ("listed", "absence", "remaining", "released_for", "over"),
    [
        (True, None, RemainingCgroups(True), 1.0, True),
        (True, None, None, 1.0, True),
        (False, GONE, RemainingCgroups(True, frozenset({"main"})), 1.0, True),
        (False, None, RemainingCgroups(False), 1.0, True),
        (True, None, RemainingCgroups(True, frozenset({"next"})), 1.0, False),
        (False, None, RemainingCgroups(True), 1.0, False),
        (False, None, None, 1.0, False),
        (False, None, RemainingCgroups(True, frozenset({"next"})), GRACE, True),
    ],
)
def test_pod_of_a_released_claim_without_processes(
    listed: bool, absence: PodAbsence | None, remaining: RemainingCgroups | None, released_for: float, over: bool
) -> None:
    found = state(listed=listed, absence=absence, remaining=remaining, released_for=released_for)
    assert found is (PodState.OVER if over else PodState.ALIVE)


@pytest.mark.parametrize("process", [SANDBOX, MAIN, CHILD])
def test_pod_of_a_released_claim_is_alive_while_any_process_of_it_lives(process: Process) -> None:
    assert state(process, listed=True) is PodState.ALIVE
    assert state(process, absence=GONE) is PodState.ALIVE


def test_processes_of_a_released_claim_are_leftovers_after_the_grace_period() -> None:
    assert state(MAIN, absence=LONG_GONE) is PodState.LEFTOVER
    assert state(CHILD, listed=True, released_for=GRACE) is PodState.LEFTOVER


def test_process_of_a_listed_pod_is_no_leftover_while_its_container_may_be_alive() -> None:
    assert state(MAIN, CHILD, listed=True, released_for=1e6) is PodState.ALIVE
    assert state(CHILD, listed=True, released_for=1e6, first=None) is PodState.ALIVE
    assert state(SANDBOX, CHILD, listed=True, released_for=1e6) is PodState.ALIVE


# -- Unprepare ---------------------------------------------------------------------------------------------------------


def test_release_is_complete_when_no_device_is_left_or_those_left_are_out_of_service() -> None:
    assert decide_release([]).is_done
    one, two, three = (in_use(released(CLAIM), device=f"GPU-{number}") for number in (1, 2, 3))
    decision = decide_release([ReleasingDevice(two), ReleasingDevice(one), ReleasingDevice(three, "xid-95")])
    assert (decision.is_done, decision.waits_for) == (False, ("GPU-1", "GPU-2"))
    decision = decide_release([ReleasingDevice(one, observes=True), ReleasingDevice(three, "xid-95")])
    assert (decision.is_done, decision.withheld) == (True, (("GPU-3", "xid-95"),))


# -- claims that the kubelet has forgotten -----------------------------------------------------------------------------

REMOVED = ClaimPodFacts(has_processes=False, is_removed=True)
STARTING = ClaimPodFacts(has_processes=False, is_requested=True)
LEFT_OVER = ClaimPodFacts(has_processes=True, is_long_gone=True)
NOTHING_LISTED = KubeletReading(Trust.TRUSTED)
LISTS_CLAIM = KubeletReading(Trust.TRUSTED, claims=(ListedClaim(OTHER, CLAIM.driver, CLAIM.namespace, CLAIM.name),))
UNREADABLE_LIST = KubeletReading(Trust.UNREADABLE, untrusted_reason="it does not answer")
SHORT_LIST = KubeletReading(Trust.EMPTY_AFTER_RESTART, untrusted_reason="it has just started")


@pytest.mark.parametrize(
    ("claim", "facts", "reading", "state"),
    [
        (CLAIM, {FIRST: REMOVED, SECOND: REMOVED}, NOTHING_LISTED, PreparedClaimState.ABANDONED),
        (CLAIM, {FIRST: REMOVED, SECOND: STARTING}, NOTHING_LISTED, PreparedClaimState.ABANDONED),
        (CLAIM, {FIRST: LEFT_OVER, SECOND: REMOVED}, NOTHING_LISTED, PreparedClaimState.ABANDONED),
        (CLAIM, {FIRST: LEFT_OVER, SECOND: LEFT_OVER}, SHORT_LIST, PreparedClaimState.UNPROVED),
        (CLAIM, {FIRST: REMOVED, SECOND: REMOVED}, LISTS_CLAIM, PreparedClaimState.LISTED),
        (CLAIM, {FIRST: REMOVED}, NOTHING_LISTED, PreparedClaimState.UNPROVED),
        (CLAIM, {FIRST: REMOVED, SECOND: ClaimPodFacts()}, NOTHING_LISTED, PreparedClaimState.UNPROVED),
        (
            CLAIM,
            {FIRST: REMOVED, SECOND: replace(REMOVED, has_processes=True)},
            NOTHING_LISTED,
            PreparedClaimState.UNPROVED,
        ),
        (
            CLAIM,
            {FIRST: REMOVED, SECOND: replace(STARTING, has_processes=True)},
            NOTHING_LISTED,
            PreparedClaimState.UNPROVED,
        ),
        (
            CLAIM,
            {FIRST: REMOVED, SECOND: replace(REMOVED, is_removed=False)},
            NOTHING_LISTED,
            PreparedClaimState.UNPROVED,
        ),
        (CLAIM, {FIRST: REMOVED, SECOND: REMOVED}, UNREADABLE_LIST, PreparedClaimState.UNPROVED),
        (CLAIM, {FIRST: REMOVED, SECOND: REMOVED}, SHORT_LIST, PreparedClaimState.UNPROVED),
        (replace(CLAIM, pods=()), {}, NOTHING_LISTED, PreparedClaimState.UNPROVED),
        (
            replace(CLAIM, manager=JobManager.SLURM),
            {FIRST: REMOVED, SECOND: REMOVED},
            NOTHING_LISTED,
            PreparedClaimState.UNPROVED,
        ),
    ],
)
def test_claim_is_abandoned_only_if_each_of_its_pods_is_over_and_a_trusted_list_lacks_it(
    claim: Claim, facts: dict[Pod, ClaimPodFacts], reading: KubeletReading, state: PreparedClaimState
) -> None:
    assert prepared_claim_state(claim, facts, reading) is state


LISTS_STARTING = KubeletReading(Trust.TRUSTED, claims=(ListedClaim(FIRST, CLAIM.driver, CLAIM.namespace, CLAIM.name),))


@pytest.mark.parametrize(
    ("facts", "reading", "same_devices", "state"),
    [
        ({FIRST: STARTING, SECOND: REMOVED}, NOTHING_LISTED, True, PreparedClaimState.ABANDONED),
        ({FIRST: STARTING, SECOND: REMOVED}, LISTS_STARTING, True, PreparedClaimState.ABANDONED),
        ({FIRST: STARTING, SECOND: REMOVED}, LISTS_STARTING, False, PreparedClaimState.LISTED),
        (
            {FIRST: replace(STARTING, has_processes=True), SECOND: REMOVED},
            LISTS_STARTING,
            True,
            PreparedClaimState.LISTED,
        ),
        ({FIRST: REMOVED, SECOND: STARTING}, LISTS_STARTING, True, PreparedClaimState.LISTED),
        ({FIRST: STARTING, SECOND: REMOVED}, LISTS_CLAIM, True, PreparedClaimState.LISTED),
        ({FIRST: STARTING, SECOND: ClaimPodFacts()}, LISTS_STARTING, True, PreparedClaimState.UNPROVED),
        ({FIRST: STARTING}, LISTS_STARTING, True, PreparedClaimState.UNPROVED),
        ({FIRST: ClaimPodFacts(), SECOND: REMOVED}, NOTHING_LISTED, True, PreparedClaimState.UNPROVED),
        ({FIRST: STARTING, SECOND: REMOVED}, UNREADABLE_LIST, True, PreparedClaimState.UNPROVED),
        ({FIRST: STARTING, SECOND: REMOVED}, SHORT_LIST, True, PreparedClaimState.UNPROVED),
    ],
)
def test_claim_that_is_requested_again_is_abandoned_only_if_it_is_listed_for_no_pod_but_one_that_has_not_started(
    facts: dict[Pod, ClaimPodFacts], reading: KubeletReading, same_devices: bool, state: PreparedClaimState
) -> None:
    assert prepared_claim_state(CLAIM, facts, reading, same_devices=same_devices) is state


def test_only_the_end_of_a_job_releases_it_although_it_is_requested_again() -> None:
    job = replace(CLAIM, manager=JobManager.SLURM)
    pods = {FIRST: STARTING, SECOND: STARTING}
    assert prepared_claim_state(job, pods, NOTHING_LISTED, same_devices=True) is PreparedClaimState.UNPROVED


def test_claim_is_abandoned_although_the_kubelet_lists_a_later_one_of_its_name() -> None:
    pods = {FIRST: REMOVED, SECOND: REMOVED}
    assert prepared_claim_state(CLAIM, pods, LISTS_CLAIM, is_replaced=True) is PreparedClaimState.ABANDONED


def test_claim_is_replaced_by_one_of_the_same_name_that_was_prepared_later() -> None:
    later = replace(CLAIM, uid="claim-3")
    records = [
        in_use(CLAIM),
        replace(in_use(device="GPU-2"), open_grants=(replace(grant(later), at=NOW + 1),)),
        in_use(RIVAL, device="GPU-3"),
    ]
    assert replaced_claims(records, NOTHING_LISTED) == {CLAIM.uid}
    assert replaced_claims(records, LISTS_CLAIM) == {CLAIM.uid}
    alone = [in_use(CLAIM), in_use(CLAIM, device="GPU-2"), in_use(RIVAL, device="GPU-3")]
    assert replaced_claims(alone, NOTHING_LISTED) == frozenset()


def test_claim_that_the_kubelet_lists_is_unprepared_unless_it_is_prepared_or_has_admin_access() -> None:
    name = (CLAIM.driver, CLAIM.namespace, CLAIM.name)
    released = in_use(replace(CLAIM, released_at=NOW))
    assert unprepared_claims([], LISTS_CLAIM) == {name}
    assert unprepared_claims([released], LISTS_CLAIM) == {name}
    assert unprepared_claims([released, in_use(CLAIM, device="GPU-2")], LISTS_CLAIM) == frozenset()
    assert unprepared_claims([DeviceRecord("GPU-1", admin_claims=(CLAIM,))], LISTS_CLAIM) == frozenset()
    assert unprepared_claims([in_use(CLAIM)], NOTHING_LISTED) == frozenset()
    assert unprepared_claims([in_use(replace(CLAIM, driver="other.example.com"))], LISTS_CLAIM) == {name}


def test_claim_is_unprepared_although_the_kubelet_has_forgotten_a_prepared_one_of_the_same_name() -> None:
    forgotten, second = in_use(CLAIM), replace(CLAIM, uid="claim-3", released_at=NOW)
    releasing = in_use(second, device="GPU-2")
    name = (CLAIM.driver, CLAIM.namespace, CLAIM.name)
    assert unprepared_claims([forgotten, releasing], LISTS_CLAIM) == {name}
    assert unprepared_claims([forgotten, replace(releasing, open_grants=())], LISTS_CLAIM) == {name}
    both = [forgotten, in_use(replace(second, released_at=None), device="GPU-2")]
    assert unprepared_claims(both, LISTS_CLAIM) == frozenset()
    partly = [forgotten, in_use(released(CLAIM), device="GPU-2")]  # an operator released it on one device
    assert unprepared_claims(partly, LISTS_CLAIM) == frozenset()


def test_claim_that_the_kubelet_lists_for_a_pod_of_it_is_not_replaced_whatever_the_clock_was() -> None:
    other = replace(CLAIM, uid="claim-3", pods=(OTHER,))
    records = [in_use(CLAIM), replace(in_use(device="GPU-2"), open_grants=(replace(grant(other), at=NOW - 1),))]
    assert replaced_claims(records, LISTS_CLAIM) == {CLAIM.uid}
    both = replace(LISTS_CLAIM, claims=(*LISTS_CLAIM.claims, replace(LISTS_CLAIM.claims[0], pod=FIRST)))
    assert replaced_claims(records, both) == frozenset()
