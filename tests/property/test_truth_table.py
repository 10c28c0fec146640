"""The truth table of a hand-over: from previous user, next user and findings to the path of the start.

Three tables, each read from the top: the first row that matches a case decides. A column that a row does not name may
have any value. Together they are the specification. The tests below check the code against every case: first the pure
functions, then the engine, in a simulated cluster in which each case is set up and a pod is started.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from random import Random

import pytest

from scrubber.domain.assignment import Assignment, Pod, Trust
from scrubber.domain.evidence import Certificate
from scrubber.domain.handover import HandoverVerdict
from scrubber.domain.handover_kind import Basis, HandOverKind, classify_hand_over
from scrubber.domain.policy import Enforcement, Policy, RequiredProof
from scrubber.domain.record import DeviceRecord
from scrubber.domain.states import ADVERTISED, Health, Hygiene
from tests.depth import depth
from tests.simulation.cluster import SimulatedCluster
from tests.simulation.kubelet import Tenant
from tests.simulation.process_table import Proc
from tests.simulation.samples import POLICY, assignment, by_record, certificate, grant, record
from tests.simulation.scenario import POLICIES
from tests.simulation.timeline import in_virtual_time

# -- evaluation of a table ---------------------------------------------------------------------------------------------

Case = Mapping[str, str]
"""A value for every column."""


@dataclass(frozen=True)
class Row:
    """One row: ``when`` maps relevant columns to matching values; ``then`` is the outcome, mostly one value."""

    rule: str
    then: frozenset[str]
    when: Mapping[str, frozenset[str]]

    def fits(self, case: Case) -> bool:
        return all(case[column] in values for column, values in self.when.items())


def row(rule: str, then: str | tuple[str, ...], **when: str | tuple[str, ...]) -> Row:
    return Row(rule, _values(then), {name: _values(each) for name, each in when.items()})


def _values(these: str | tuple[str, ...]) -> frozenset[str]:
    return frozenset((these,) if isinstance(these, str) else these)


@dataclass(frozen=True)
class Table:
    """Columns with all their values, the rows in order, and which cases are impossible."""

    columns: Mapping[str, tuple[str, ...]]
    rows: tuple[Row, ...]
    impossible: Callable[[Case], bool] = lambda case: False

    @cached_property
    def by_row(self) -> Mapping[str, tuple[Case, ...]]:
        """Return the cases that each row decides, by its rule."""
        found: dict[str, list[Case]] = {each.rule: [] for each in self.rows}
        for case in self.cases():
            found[self.deciding(case).rule].append(case)
        return {rule: tuple(cases) for rule, cases in found.items()}

    def cases(self) -> Iterator[Case]:
        for values in itertools.product(*self.columns.values()):
            case = dict(zip(self.columns, values, strict=True))
            if not self.impossible(case):
                yield case

    def deciding(self, case: Case) -> Row:
        return next(each for each in self.rows if each.fits(case))


# -- the kind of a hand-over -------------------------------------------------------------------------------------------

KINDS = Table(
    {
        "previous": ("known", "unknown"),
        "following": ("known", "unknown"),
        "uids": ("same", "different", "one-missing", "both-missing"),
        "tenant": ("same", "other"),
        "container": ("same", "another"),
        "containers": ("1", "2"),
        "init": ("known", "unknown"),
        "allocated": ("no", "yes"),
    },
    (
        row("the writer of its bytes is unknown", "unknown", previous="unknown"),
        row("the starting pod is unknown", "unknown", following="unknown"),
        row(
            "the only container of its pod restarts, and the kubelet has not allocated the device since",
            "same-container",
            uids="same",
            container="same",
            containers="1",
            init="known",
            allocated="no",
        ),
        row("anything else within one pod, by its UID", "same-pod", uids="same"),
        row("another pod, or one that may be another, of the namespace", "same-tenant", tenant="same"),
        row("any other pod", "other-tenant"),
    ),
    lambda case: case["uids"] == "same" and case["tenant"] == "other",
)


def _pods(case: Case) -> tuple[Pod, Pod]:
    uids: tuple[str | None, str | None] = {
        "same": ("uid-1", "uid-1"),
        "different": ("uid-1", "uid-2"),
        "one-missing": ("uid-1", None),
        "both-missing": (None, None),
    }[case["uids"]]
    space = "acme" if case["tenant"] == "same" else "umbrella"
    return Pod("acme", "train-0", uids[0]), Pod(space, "train-0", uids[1])


@pytest.mark.parametrize("rule", KINDS.rows, ids=lambda each: each.rule)
def test_hand_over_kind_matches_the_truth_table(rule: Row) -> None:
    cases = KINDS.by_row[rule.rule]
    assert cases, "no case gets as far as this row"
    for case in cases:
        before, after = _pods(case)
        previous: Assignment | None = assignment(before, "main")
        following: Assignment | None = assignment(after, "main" if case["container"] == "same" else "side")
        kind = classify_hand_over(
            previous if case["previous"] == "known" else None,
            following if case["following"] == "known" else None,
            allocated_since=case["allocated"] == "yes",
            container_count=int(case["containers"]),
            init_containers_known=case["init"] == "known",
        )
        assert {kind.value} == rule.then, case


# -- what a record permits ---------------------------------------------------------------------------------------------

CERTIFICATE, EXCEPTION, OBSERVED = "by-certificate", "by-exception", "only-observed"
SLOW, WAITS, REFUSED = "slow-path-first", "waits", "refused"

FLAWS: Mapping[str, Mapping[str, object]] = {
    "of-another-device": {"device": "GPU-0001"},
    "used-up": {"next_grant": 1},
    "granted-since": {"previous_grant": 7},
    "of-another-node": {"node": "node-2"},
    "of-an-earlier-boot": {"boot": "boot-0"},
    "of-another-driver": {"driver": "driver-0"},
    "of-another-policy": {"policy_digest": "sha256:older"},
}
"""Everything that :func:`scrubber.domain.handover.certificate_flaw` detects, with the change that causes it."""

LAX = replace(POLICY, required_proofs=dict.fromkeys(HandOverKind, RequiredProof.CHECKS))
"""A policy that would permit every start on checks."""
PROOFS = {name: replace(POLICY, required_proofs=policy.required_proofs) for name, policy in POLICIES.items()} | {
    "lax": LAX
}

NAMED = {
    "default": ("same-container",),
    "strict": (),
    "trusted": ("same-container", "same-pod", "same-tenant"),
    "lax": tuple(kind.value for kind in HandOverKind),
}
"""The kinds that each policy lets start on checks: its named exceptions."""
IN_SERVICE = tuple(health.value for health in ADVERTISED)


RECORDS = Table(
    {
        "kind": tuple(kind.value for kind in HandOverKind),
        "health": tuple(health.value for health in Health),
        "hygiene": tuple(hygiene.value for hygiene in Hygiene),
        "certificate": ("none", "valid", *FLAWS),
        "policy": tuple(PROOFS),
        "named": ("yes", "no"),
        "mode": ("enforce", "observe"),
        "history": ("watched", "not-watched", "unknown-pod", "never-granted"),
    },
    (
        row(
            "certified since the last grant",
            CERTIFICATE,
            health=IN_SERVICE,
            hygiene="clean",
            certificate="valid",
        ),
        row(
            "a start during a scrub waits for it, under an observing policy as well",
            WAITS,
            mode="observe",
            hygiene="scrubbing",
        ),
        row("out of service: observed", OBSERVED, mode="observe", health=tuple({*Health} - ADVERTISED)),
        row("out of service", REFUSED, health=tuple({*Health} - ADVERTISED)),
        row("a scrub is under way", WAITS, hygiene="scrubbing"),
        row(
            "the named exception, for a healthy device whose bytes are certainly the last grant's alone",
            EXCEPTION,
            named="yes",
            kind=("same-container", "same-pod", "same-tenant"),
            health="healthy",
            hygiene=("in-use", "dirty"),
            history="watched",
        ),
        row("every other start: observed", OBSERVED, mode="observe"),
        row("a certificate with any flaw proves nothing", SLOW, hygiene="clean", certificate=tuple(FLAWS)),
        row("clean without a certificate", SLOW, hygiene="clean"),
        row("a suspect device has no exceptions", SLOW, health="suspect"),
        row("an unknown pod has no exceptions", SLOW, kind="unknown"),
        row("another tenant has no exceptions", SLOW, kind="other-tenant"),
        row("a device that others may have used has no exceptions", SLOW, history=("not-watched", "unknown-pod")),
        row("a device that was never granted has no exceptions", SLOW, history="never-granted"),
        row("every other kind needs a certificate", SLOW),
    ),
    lambda case: (case["named"] == "yes") != (case["kind"] in NAMED[case["policy"]]),
)


def _record(case: Case) -> DeviceRecord:
    last = {
        "watched": grant(),
        "not-watched": grant(),
        "unknown-pod": grant(unknown=True),
        "never-granted": None,
    }[case["history"]]
    grants = 0 if last is None else last.sequence
    issued = None
    if case["certificate"] != "none":
        issued = certificate(**{"previous_grant": grants, **FLAWS.get(case["certificate"], {})})
    return record(
        Hygiene(case["hygiene"]),
        Health(case["health"]),
        certificate=issued,
        last_grant=last,
        exclusive_use=case["history"] != "not-watched",
    )


def _answered(case: Case) -> str:
    policy: Policy = PROOFS[case["policy"]]
    policy = replace(policy, enforcement=Enforcement(case["mode"]))
    decision = by_record(_record(case), HandOverKind(case["kind"]), policy, ran=True)
    assert decision.reason
    if decision.verdict is HandoverVerdict.GRANT and decision.basis is not Basis.CERTIFICATE:
        assert decision.basis in (case["kind"], Basis.OBSERVE_MODE)
        return OBSERVED if decision.basis is Basis.OBSERVE_MODE else EXCEPTION
    assert decision.basis is (Basis.CERTIFICATE if decision.verdict is HandoverVerdict.GRANT else None)
    return {
        HandoverVerdict.GRANT: CERTIFICATE,
        HandoverVerdict.JOIN: WAITS,
        HandoverVerdict.SCRUB: SLOW,
        HandoverVerdict.REFUSE: REFUSED,
    }[decision.verdict]


@pytest.mark.parametrize("rule", RECORDS.rows, ids=lambda each: each.rule)
def test_decision_for_a_record_matches_the_truth_table(rule: Row) -> None:
    cases = RECORDS.by_row[rule.rule]
    assert cases, "no case gets as far as this row"
    for case in cases:
        assert {_answered(case)} == rule.then, case


# -- the path of a start -----------------------------------------------------------------------------------------------

HELD, GHOST, SETTINGS, WARNING, FAULT, REPORTED_FAULT, UNREADABLE = (
    "held",
    "memory-not-at-its-level",
    "setting-off",
    "health-warning",
    "health-fault",
    "health-fault-reported",
    "unreadable",
)

PATHS = Table(
    {
        "kind": tuple(kind.value for kind in HandOverKind),
        "policy": ("default", "strict", "trusted"),
        "named": ("yes", "no"),
        "mode": ("enforce", "observe"),
        "certificate": ("valid", "used-up", *(flaw for flaw in FLAWS if flaw != "used-up")),
        "finding": ("nothing", HELD, GHOST, SETTINGS, WARNING, FAULT, REPORTED_FAULT, UNREADABLE),
        "earlier": ("over", "living", "leftover"),
    },
    (
        row(
            "observing, a certificate is valid as usual",
            CERTIFICATE,
            mode="observe",
            certificate="valid",
            finding=("nothing", WARNING),
        ),
        row(
            "observing, the named exception applies if no check fails",
            EXCEPTION,
            mode="observe",
            named="yes",
            certificate="used-up",
            finding="nothing",
            earlier="over",
        ),
        row(
            "observing, processes of the starting pod itself are no obstacle",
            EXCEPTION,
            mode="observe",
            named="yes",
            kind=("same-container", "same-pod"),
            certificate="used-up",
            finding="nothing",
        ),
        row(
            "observing, a start with a setting that is off may be scrubbed first",
            (SLOW, OBSERVED),
            mode="observe",
            certificate="valid",
            finding=SETTINGS,
        ),
        row(
            "observing, the named exception may be scrubbed first where something is off",
            (EXCEPTION, SLOW, OBSERVED),
            mode="observe",
            named="yes",
            certificate="used-up",
            finding=(SETTINGS, WARNING),
            earlier="over",
        ),
        row(
            "observing, the named exception is granted despite other users",
            (EXCEPTION, OBSERVED),
            mode="observe",
            named="yes",
            certificate="used-up",
        ),
        row(
            "observing, a device whose certificate has a flaw may be scrubbed first",
            (SLOW, OBSERVED),
            mode="observe",
            certificate=tuple(FLAWS.keys() - {"used-up"}),
        ),
        row("observing, every other start is granted and marked as observed", OBSERVED, mode="observe"),
        row("a device that cannot be read is out of service", REFUSED, finding=UNREADABLE),
        row("a fault that the driver reported takes it out of service", REFUSED, finding=REPORTED_FAULT),
        row(
            "processes of the starting pod itself do not block its named exception",
            EXCEPTION,
            named="yes",
            kind=("same-container", "same-pod"),
            certificate="used-up",
            finding="nothing",
            earlier="living",
        ),
        row("no leftover is proved while the kubelet cannot be read", WAITS, kind="unknown", earlier="leftover"),
        row(
            "a start waits for an earlier pod that still runs",
            WAITS,
            kind=("same-tenant", "other-tenant", "unknown"),
            earlier="living",
        ),
        row(
            "a start waits for processes of an earlier start of its pod before a scrub",
            WAITS,
            named="no",
            earlier="living",
        ),
        row("a start waits before a scrub for a setting that is off", WAITS, earlier="living", finding=SETTINGS),
        row("a start waits before a scrub for a driver warning", WAITS, earlier="living", finding=WARNING),
        row("a start waits for any holder", WAITS, finding=HELD),
        row(
            "unexplained memory use is cleared by a reset where every scrub includes one",
            SLOW,
            finding=GHOST,
            policy="strict",
        ),
        row(
            "unexplained memory use takes it out of service before an exception as well, once the delay is over",
            (WAITS, REFUSED),
            finding=GHOST,
            certificate="used-up",
            named="yes",
        ),
        row("unexplained memory use takes it out of service", REFUSED, finding=GHOST),
        row("a fault that the checks find takes it out of service", REFUSED, finding=FAULT, certificate="valid"),
        row(
            "a fault that the checks find takes it out of service before an exception as well",
            REFUSED,
            finding=FAULT,
            named="yes",
            earlier=("over", "living"),
        ),
        row("a reset within the scrub clears a fault that requires one", SLOW, finding=FAULT, policy="strict"),
        row("a fault that the scrub finds takes it out of service", REFUSED, finding=FAULT),
        row("settings are restored", SLOW, finding=SETTINGS),
        row("a leftover is killed", SLOW, earlier="leftover"),
        row("certified since the last grant, despite a driver warning", CERTIFICATE, certificate="valid"),
        row("a certificate with any flaw proves nothing", SLOW, certificate=tuple(FLAWS.keys() - {"used-up"})),
        row("a device with a driver warning has no exceptions", SLOW, finding=WARNING, named="yes"),
        row("the policy's named exception", EXCEPTION, named="yes"),
        row("every other kind needs a certificate", SLOW),
    ),
    lambda case: (
        (case["named"] == "yes") != (case["kind"] in NAMED[case["policy"]])
        # A scrub closes every grant, so that after a certificate all earlier pods are over.
        or (case["certificate"] != "used-up" and case["earlier"] != "over")
        # One flaw at a time where the certificate has the flaw.
        or (case["certificate"] not in ("valid", "used-up") and case["finding"] != "nothing")
        # Processes that a pod left while the kubelet still lists it are its own.
        or (case["kind"] in ("same-container", "same-pod") and case["earlier"] == "leftover")
    ),
)
"""Finding: the problem at the moment of the start. Earlier: what lives of the earlier pod, or of an earlier start."""

IN_TIME = 4.2
"""Seconds in which a scrub with a reset completes, and during which no periodic health check runs."""


def _sound(case: Case, path: str) -> None:
    """Check invariants of every start, independent of the rows."""
    off = case["finding"] not in ("nothing", WARNING) or case["earlier"] == "leftover"
    if off and case["mode"] == "enforce":
        assert path not in (CERTIFICATE, EXCEPTION), f"the fast path although something is off: {case}"
    if case["finding"] == WARNING and case["mode"] == "enforce":
        assert path != EXCEPTION, f"an exception although something is off: {case}"
    if case["kind"] in ("unknown", "other-tenant"):
        assert path != EXCEPTION, f"an exception for a pod that must see nothing of the last tenant: {case}"
    if case["mode"] == "observe":
        assert path not in (WAITS, REFUSED), f"observing refuses nothing: {case}"
    if case["mode"] == "enforce":
        assert path != OBSERVED, f"observed where a policy is enforced: {case}"


def test_no_row_of_the_truth_table_allows_an_unsafe_path() -> None:
    for case in PATHS.cases():
        for path in PATHS.deciding(case).then:
            _sound(case, path)


class Stage:
    """One case, set up in a simulated cluster with one device: a pod starts when every condition is met."""

    def __init__(self, case: Case) -> None:
        self._case = case
        policy = POLICIES[case["policy"]]
        self.cluster = SimulatedCluster(1, replace(policy, enforcement=Enforcement(case["mode"])))
        self._in_the_way: list[Proc] = []

    async def play(self) -> str:
        """Return the path that the start took; a pod that had to wait has started in the end."""
        cluster, case = self.cluster, self._case
        await cluster.start_service()
        await cluster.until(cluster.settled)
        starting = await self._until_the_start()
        began, grants = cluster.clock.wall(), cluster.record().grant_sequence
        starts = starting.starts
        cluster.kubelet.retry_pre_start(starting)
        await cluster.run(IN_TIME)
        path = self._path(grants, began)
        if case["mode"] == "enforce":
            self._lift()
            await cluster.until(lambda: starting.starts > starts, within=400.0)
            await cluster.run(0.2)
        return path

    def _path(self, grants: int, began: float) -> str:
        last = self.cluster.record().last_grant
        if last is None or last.sequence == grants:
            return WAITS if self.cluster.record().advertised else REFUSED
        if self._case["finding"] not in (HELD, GHOST):  # after other use, the last user is unknown
            assert last.kind.value == self._case["kind"], "the case was not brought about"
        if last.basis is not Basis.CERTIFICATE:
            return OBSERVED if last.basis is Basis.OBSERVE_MODE else EXCEPTION
        assert last.certificate is not None
        fast = self.cluster.ledger_store.certificates[last.certificate]
        assert fast.rests_on is not None
        return SLOW if self.cluster.ledger_store.certificates[fast.rests_on].issued_at > began else CERTIFICATE

    async def _until_the_start(self) -> Tenant:
        """Set up everything except the start request."""
        cluster, case = self.cluster, self._case
        first = await cluster.admit("acme-space", "train-0", init=case["kind"] == "same-pod")
        assert first is not None
        await cluster.until(lambda: first.running)
        await cluster.run(6.0)  # its first process was sampled twice, and the grant is older than the settle time
        cluster.write_all(first)
        same = case["kind"] in ("same-container", "same-pod")
        if case["certificate"] == "used-up":
            await self._just_after_a_look()
            starting = self._ends(first) if same else await self._follower(first)
        else:
            starting = await self._after_a_scrub(first) if same else await self._after_a_release(first)
            await self._just_after_a_look()
        if case["kind"] == "unknown":
            cluster.kubelet.trust = Trust.UNREADABLE
        await self._flaw()
        self._find()
        return starting

    async def _flaw(self) -> None:
        """Modify the certificate as the case requires, directly in the record."""
        controller, flaw = self.cluster.controller(), self._case["certificate"]
        issued = controller.state.record.certificate
        if flaw == "of-another-policy":
            self.cluster.policy = replace(self.cluster.policy, digest="sha256:newer")
        elif flaw not in ("valid", "used-up"):
            assert issued is not None
            flawed: Certificate = replace(issued, **FLAWS[flaw])  # type: ignore[arg-type]
            async with controller.state.lock:
                controller.state.apply(replace(controller.state.record, certificate=flawed))

    async def _just_after_a_look(self) -> None:
        """Advance to a moment just after a health check."""
        await self.cluster.run(5.0 - (self.cluster.clock.monotonic() - 0.4) % 5.0)

    def _ends(self, first: Tenant) -> Tenant:
        """End the container of the first pod, so that it or the next container is about to start."""
        assert first.first is not None
        assert first.worker is not None
        if self._case["earlier"] == "living":
            child = self.cluster.process_table.fork(first.first)
            child.holds.clear()
            self._in_the_way.append(child)
        first.worker.cancel()
        self.cluster.kubelet.exit(first, again=self._case["kind"] == "same-container")
        return first

    async def _after_a_scrub(self, first: Tenant) -> Tenant:
        """Make an earlier call start a scrub of the device, and cancel that call before the scrub ends."""
        cluster = self.cluster
        self._ends(first)
        await cluster.run(0.0)
        cluster.gpu().settings["compute-mode"] = "exclusive"
        policy, cluster.policy = cluster.policy, replace(cluster.policy, enforcement=Enforcement.ENFORCE)
        cluster.kubelet.retry_pre_start(first)
        await cluster.until(lambda: bool(cluster.erasers.running), within=20.0)
        assert first.worker is not None
        first.worker.cancel()
        await cluster.until(cluster.settled)
        cluster.policy = policy
        return first

    async def _follower(self, first: Tenant) -> Tenant:
        """Give the device to another pod at the moment the kubelet removes the first."""
        cluster, case = self.cluster, self._case
        assert first.first is not None
        if case["earlier"] == "leftover":
            self._in_the_way.append(cluster.process_table.fork(first.first))
        if case["kind"] == "unknown":
            cluster.kubelet.trust = Trust.UNREADABLE
        if case["earlier"] == "living":
            cluster.kubelet.force_delete(first, lives_on=1000.0)
            self._in_the_way.append(first.first)
            assert first.sandbox is not None
            self._in_the_way.append(first.sandbox)
        else:
            cluster.process_table.has_cgroups = False  # so that the device is not released before the request
            cluster.kubelet.delete(first)
        return await self._admitted()

    async def _after_a_release(self, first: Tenant) -> Tenant:
        self.cluster.kubelet.delete(first)
        await self.cluster.run(1.0)
        await self.cluster.until(lambda: self.cluster.record().hygiene is Hygiene.CLEAN)
        return await self._admitted()

    async def _admitted(self) -> Tenant:
        space = "acme-space" if self._case["kind"] == "same-tenant" else "umbrella-space"
        tenant = await self.cluster.admit(space, "serve-0", starts=False)
        assert tenant is not None
        return tenant

    def _find(self) -> None:
        """Introduce the finding of the case."""
        cluster, gpu = self.cluster, self.cluster.gpu()
        match self._case["finding"]:
            case "held":
                host = cluster.process_table.start(None, "", "host")
                cluster.process_table.open(host, gpu.id)
                self._in_the_way.append(host)
            case "memory-not-at-its-level":
                gpu.ghost = True
            case "setting-off":
                gpu.settings["compute-mode"] = "exclusive"
            case "health-warning":
                gpu.celsius = 120
            case "health-fault":
                gpu.xids[95] = 1
            case "health-fault-reported":
                gpu.xids[95] = 1
                cluster.signal(0)
            case "unreadable":
                cluster.unreadable.add(gpu.id)

    def _lift(self) -> None:
        """Remove every obstacle, except those that the service has to repair itself: a ghost holder and a fault."""
        cluster = self.cluster
        cluster.unreadable.clear()
        cluster.gpu().celsius = 40
        cluster.kubelet.trust = Trust.TRUSTED
        for proc in self._in_the_way:
            cluster.process_table.end(proc)


def _play(case: Case) -> None:
    @in_virtual_time
    async def play() -> None:
        stage = Stage(case)
        try:
            path = await stage.play()
            stage.cluster.check_laws()
            breaches = stage.cluster.laws.breaches
        finally:
            await stage.cluster.end()
        if case["mode"] == "observe":
            breaches = [each for each in breaches if "signalled" in each]
        assert breaches == [], case
        _sound(case, path)
        assert path in PATHS.deciding(case).then, f"it is {path}: {case}"

    play()


@pytest.mark.parametrize("rule", PATHS.rows, ids=lambda each: each.rule)
def test_engine_takes_the_path_of_the_truth_table(rule: Row) -> None:
    cases = PATHS.by_row[rule.rule]
    assert cases, "no case gets as far as this row"
    cases = tuple(Random(rule.rule).sample(cases, min(len(cases), depth().starts or len(cases))))
    for case in cases:
        _play(case)
