"""A node as a transition system: devices, pods, the service, and a crash of any component between any two steps.

All decisions and all changes of a record are the product's own (:class:`Product`). Each step represents this code:

- ``call``, ``decide``: one round of ``engine/prepare.py`` (``_decide_once``, ``_not_granted``) for one device. A device
  stays prepared until its record changes, as ``GrantRequest._grant`` checks by the record's version.
- ``grant``: the one transaction of ``engine/grant.py`` for all devices of the call. ``answer``: the result has reached the
  kubelet. Between the two the ledger has the grant, and a crash of service, plugin or kubelet loses the answer.
- ``start``: the runtime has created the container, whose process opens the device; from ``answer`` on nothing of ours
  can prevent it.
- ``scrub`` (commit), ``look`` and ``kill`` (``steps/holders.py``), ``erase`` (the eraser, which may outlive a crash of
  the service), ``conclude`` (commit): ``engine/device/scrubs.py``. ``not stored``: the ledger refused the last commit.
- ``release``, ``adopt``, ``note start``: commits of ``engine/device/occupancy.py``. ``need``: ``engine/loops/recovery.py``.
- ``service starts`` (commit), then ``check``, one device at a time: ``engine/loops/reconcile.py``.
- ``fault``: ``engine/device/health.py``, with a fault that a reset cures.

``test_model.py`` compares this list with the calls in the engine that write to the ledger.

Time passes between any two steps: pauses and backoffs are over when a step is due, and a pod that was deleted is absent
for less, then for more than the leftover grace period. Numbers of grants, times and IDs are replaced by their order; the
quarantines and recoveries of the last day, which only limit how often a device recovers, are forgotten.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from enum import IntEnum
from typing import Any, Final, NamedTuple, TypeVar, cast

from scrubber.domain.assignment import Assignment, Pod, PodAbsence, Process
from scrubber.domain.certificate import certify
from scrubber.domain.evidence import Certificate, Finding, FindingCode, Outcome, PathKind, Severity, Step
from scrubber.domain.handover import (
    FastPathChecks,
    HandoverDecision,
    HandoverFacts,
    HandoverVerdict,
    MissingFact,
    certificate_flaw,
    decide,
)
from scrubber.domain.handover_kind import Basis, HandOverKind, classify_hand_over
from scrubber.domain.health.history import RecoveryAttempt
from scrubber.domain.health.recovery import after_findings, after_scrub
from scrubber.domain.next_action import NextAction, RecoveryAction, next_action
from scrubber.domain.pods import PodLiveness, PodState, own_pod_liveness, pod_liveness
from scrubber.domain.record import DeviceRecord, Grant
from scrubber.domain.states import Health, Hygiene, RecoveryMethod
from tests.simulation.samples import DEVICE, NODE, POLICY, finding, scrub

__all__ = ["Broken", "Kind", "Node", "Phase", "Product", "State", "Transition"]

_T = TypeVar("_T")


@dataclass(frozen=True)
class Product:
    """The decisions and changes under test; a broken variant replaces one of them."""

    decide: Callable[..., HandoverDecision] = decide
    next_action: Callable[..., NextAction] = next_action
    pod_liveness: Callable[..., PodLiveness] = pod_liveness
    after_service_start: Callable[..., DeviceRecord] = DeviceRecord.after_service_start
    after_grant: Callable[..., DeviceRecord] = DeviceRecord.after_grant
    after_passed_scrub: Callable[..., DeviceRecord] = DeviceRecord.after_passed_scrub
    waits_for_orphan: bool = True
    """Whether an eraser of an earlier service is ended before another one starts."""
    answers_after_commit: bool = True
    """Whether the ledger has a grant before the kubelet gets the answer."""


class Phase(IntEnum):
    PENDING = 0
    ASSIGNED = 1
    """The kubelet has allocated its devices, and will request its start."""
    CALLED = 2
    ANSWERED = 3
    """Granted; the answer is on its way."""
    STARTING = 4
    RUNNING = 5
    DELETED_STARTING = 6
    """Deleted by force while its container was being created."""
    LEFT = 7
    """Deleted by force; its process lives, and the pod is absent for less than the leftover grace period."""
    LEFTOVER = 8
    """The same, for longer."""
    GONE = 9


_ASSIGNED = frozenset({Phase.ASSIGNED, Phase.CALLED, Phase.ANSWERED, Phase.STARTING, Phase.RUNNING})
_PROCESS = frozenset({Phase.RUNNING, Phase.LEFT, Phase.LEFTOVER})
_MAY_TOUCH = _PROCESS | {Phase.ANSWERED, Phase.STARTING, Phase.DELETED_STARTING}
WAITING = frozenset({Phase.ASSIGNED, Phase.CALLED, Phase.ANSWERED})


class PodView(NamedTuple):
    phase: Phase
    devices: int
    """A bit for each of its devices."""
    restarts: int
    prepared: tuple[str, ...]
    """For each device of the node: the basis of its grant, or empty."""


class Work(IntEnum):
    """How far the service is with a scrub."""

    NONE = 0
    LOOKING = 1
    ERASING = 2
    ERASED = 3
    FAILED = 4
    BLOCKED = 5


class Eraser(IntEnum):
    NONE = 0
    CHILD = 1
    ORPHAN = 2


class DeviceView(NamedTuple):
    record: int
    """Number of the record in the ledger, which is also what the service believes."""
    work: Work
    starting_pod: int
    """The pod that the scrub is for, or -1."""
    eraser: Eraser
    residue: int
    """A bit for each pod whose data is in the device's memory; ``_SOMEONE`` for all pods that are gone."""
    checked: bool
    """Whether the service has checked, since it started, which pods have it."""


class State(NamedTuple):
    up: bool
    devices: tuple[DeviceView, ...]
    pods: tuple[PodView, ...]
    faults: int


class Kind(IntEnum):
    SYSTEM = 0
    """Happens sooner or later: steps of service, plugin and kubelet, and time."""
    WORLD = 1
    """May happen or not: what users and processes do."""
    CRASH = 2


Transition = tuple[str, Kind, State]


class Broken(AssertionError):
    """An invariant does not hold."""


_FAULT: Final = finding("xid-95")
_BUSY: Final = Finding(Step.HOLDERS, FindingCode.DEVICE_BUSY, Severity.BLOCKING, "A process holds the device.")
_FREE: Final = FastPathChecks(passed=True)
_HELD: Final = FastPathChecks(passed=False, findings=(_BUSY,))
_PREPARED: Final = ("", *(basis.value for basis in Basis))
_OTHER_BOOT: Final = "boot-0"
_LONG: Final = 1e6
_SOMEONE: Final = 1 << 6
_POLICY: Final = replace(POLICY, recovery=replace(POLICY.recovery, max_attempts=2, probation_scrubs=1))


@dataclass
class Node:
    """The transition system.

    Args:
        wants: for each pod, how many devices it requests; pods 0 and 1 are of one tenant, and the others of another.
        devices: at most two.
        restarts: how often the container of each pod ends and is started again.
        faults: how many faults of devices and refused commits there are in all.
    """

    wants: tuple[int, ...]
    devices: int
    restarts: int
    faults: int
    product: Product = field(default_factory=Product)

    def __post_init__(self) -> None:
        self._records: list[DeviceRecord] = []
        self._numbers: dict[DeviceRecord, int] = {}
        self._cache: dict[object, object] = {}
        self._pods = [
            Pod("team-a" if number < 2 else "team-b", f"pod-{number}", f"uid-{number}")
            for number in range(len(self.wants))
        ]
        self._assignments = [Assignment(pod, "main", frozenset({DEVICE})) for pod in self._pods]

    # -- states ----------------------------------------------------------------------------------------------------

    def first(self) -> State:
        """Return the first start of the service on a new node."""
        device = DeviceView(self._number(DeviceRecord(DEVICE)), Work.NONE, -1, Eraser.NONE, 0, False)
        pod = PodView(Phase.PENDING, 0, self.restarts, ("",) * self.devices)
        return State(False, (device,) * self.devices, (pod,) * len(self.wants), self.faults)

    def canonical(self, state: State) -> State:
        """Return the representative of all states that differ by the names of devices, and of pods of equal shape.

        Sound, because no transition and no invariant depends on these names.
        """
        variants = [state]
        if len(self.wants) > 1 and self.wants[0] == self.wants[1]:
            variants.append(self._swap_pods(state))
        if self.devices == 2:
            variants += [self._swap_devices(each) for each in variants]
        return min(variants)

    def _swap_devices(self, state: State) -> State:
        first, second = state.devices
        pods = tuple(
            pod._replace(devices=(pod.devices & 1) << 1 | pod.devices >> 1, prepared=pod.prepared[::-1])
            for pod in state.pods
        )
        return state._replace(devices=(second, first), pods=pods)

    def _swap_pods(self, state: State) -> State:
        def swapped(device: DeviceView) -> DeviceView:
            bits = device.residue
            residue = bits & ~3 | (bits & 1) << 1 | (bits >> 1) & 1
            starting = {0: 1, 1: 0}.get(device.starting_pod, device.starting_pod)
            return device._replace(
                record=self._with_swapped_pods(device.record), residue=residue, starting_pod=starting
            )

        first, second, *rest = state.pods
        return state._replace(devices=tuple(map(swapped, state.devices)), pods=(second, first, *rest))

    def pack(self, state: State) -> bytes:
        """Return a short form of ``state``: millions of them are kept."""
        parts = [state.up, state.faults]
        for device in state.devices:
            parts += (device.record >> 8, device.record & 255, device.work, device.starting_pod + 1, device.eraser)
            parts += (device.residue, device.checked)
        for pod in state.pods:
            parts += (pod.phase, pod.devices, pod.restarts, *map(_PREPARED.index, pod.prepared))
        return bytes(parts)

    def unpack(self, packed: bytes) -> State:
        up, faults, *rest = packed
        devices, pods = [], []
        for _ in range(self.devices):
            high, low, work, starting, eraser, residue, checked, *rest = rest
            devices.append(
                DeviceView(high << 8 | low, Work(work), starting - 1, Eraser(eraser), residue, bool(checked))
            )
        for _ in self.wants:
            phase, mine, restarts, *rest = rest
            prepared, rest = rest[: self.devices], rest[self.devices :]
            pods.append(PodView(Phase(phase), mine, restarts, tuple(_PREPARED[each] for each in prepared)))
        return State(bool(up), tuple(devices), tuple(pods), faults)

    def record(self, device: DeviceView) -> DeviceRecord:
        return self._records[device.record]

    def _number(self, record: DeviceRecord) -> int:
        """Return the number of ``record`` in its canonical form."""
        record = _canonical(record)
        number = self._numbers.get(record)
        if number is None:
            number = self._numbers[record] = len(self._records)
            self._records.append(record)
        return number

    def _cached(self, key: object, compute: Callable[[], _T]) -> _T:
        found = self._cache.get(key)
        if found is None:
            found = self._cache[key] = compute()
        return cast(_T, found)

    def _with_swapped_pods(self, record: int) -> int:
        def compute() -> int:
            names = {self._pods[0]: self._assignments[1], self._pods[1]: self._assignments[0]}

            def swapped(grant: Grant) -> Grant:
                assert grant.assignment is not None
                return replace(grant, assignment=names.get(grant.assignment.pod, grant.assignment))

            old = self._records[record]
            last = None if old.last_grant is None else swapped(old.last_grant)
            return self._number(replace(old, last_grant=last, open_grants=tuple(map(swapped, old.open_grants))))

        return self._cached(("swap", record), compute)

    def _change(self, name: str, record: int, change: Callable[[DeviceRecord], DeviceRecord]) -> int:
        """Return the number of ``record`` after ``change``, which ``name`` identifies."""
        return self._cached((name, record), lambda: self._number(change(self._records[record])))

    # -- facts ------------------------------------------------------------------------------------------------------

    def _liveness(self, state: State, device: DeviceView, starting_pod: int = -1) -> list[tuple[int, PodState]]:
        """Return the open grants' pods and their states, as ``engine/pods.py`` asks the domain for them."""
        found = []
        for grant in self.record(device).open_grants:
            assert grant.pod is not None
            pod = self._pods.index(grant.pod)
            phase = state.pods[pod].phase
            key = ("liveness", grant.boot, grant.cgroups, grant.started, pod, phase, pod == starting_pod)
            found.append((pod, self._cached(key, functools.partial(self._pod_state, grant, pod, phase, starting_pod))))
        return found

    def _pod_state(self, grant: Grant, pod: int, phase: Phase, starting_pod: int) -> PodState:
        if grant.boot != NODE.boot:
            return PodState.OVER
        process = Process(1, 1, "run")
        processes = (process,) if phase in _PROCESS else ()
        if pod == starting_pod:
            return own_pod_liveness(processes, sandbox=(), cgroups=grant.cgroups).state
        listed = phase in _ASSIGNED
        return self.product.pod_liveness(
            processes,
            PodAbsence() if listed else PodAbsence(times=2, since=0.0),
            listed=listed,
            trusted=True,
            sandbox=phase is not Phase.GONE,
            first_processes={"run": process},
            now=0.0 if phase is Phase.LEFT else _LONG,
            grant_age=0.0 if phase in (Phase.ANSWERED, Phase.STARTING, Phase.DELETED_STARTING) else _LONG,
            leftover_grace_period=_POLICY.limits.leftover_grace_period,
            unknown_pod_idle_period=_POLICY.limits.unknown_pod_idle_period,
        ).state

    @staticmethod
    def _has(pod: PodView, number: int) -> bool:
        return bool(pod.devices >> number & 1)

    def _is_held(self, state: State, number: int) -> bool:
        return any(pod.phase in _PROCESS and self._has(pod, number) for pod in state.pods)

    # -- changes of a state --------------------------------------------------------------------------------------------

    def _with_device(self, state: State, number: int, **changes: Any) -> State:
        """Change a device; a call for which it was prepared has to decide again if its record changes."""
        devices = list(state.devices)
        devices[number] = devices[number]._replace(**changes)
        state = state._replace(devices=tuple(devices))
        if "record" in changes:
            pods = tuple(
                pod._replace(
                    prepared=tuple("" if other == number else basis for other, basis in enumerate(pod.prepared))
                )
                for pod in state.pods
            )
            state = state._replace(pods=pods)
        return state

    def _with_pod(self, state: State, number: int, **changes: Any) -> State:
        pods = list(state.pods)
        pods[number] = pods[number]._replace(**changes)
        if pods[number].phase is not Phase.CALLED:
            pods[number] = pods[number]._replace(prepared=("",) * self.devices)
        if pods[number].phase is Phase.GONE:  # what it had no longer matters, but its data does
            pods[number] = pods[number]._replace(devices=0, restarts=0)
            devices = tuple(
                each._replace(residue=each.residue & ~(1 << number) | _SOMEONE) if each.residue >> number & 1 else each
                for each in state.devices
            )
            state = state._replace(devices=devices)
        return state._replace(pods=tuple(pods))

    # -- transitions -----------------------------------------------------------------------------------------------

    def transitions(self, state: State) -> Iterator[Transition]:
        """Yield all next states; raises :class:`Broken` where a step itself breaks an invariant."""
        for number in range(len(self.wants)):
            yield from self._pod_steps(state, number)
            if state.up and state.pods[number].phase is Phase.CALLED:
                yield from self._call_steps(state, number)
        for number in range(self.devices):
            yield from self._device_steps(state, number)
        yield from self._crashes(state)
        if not state.up:
            yield from self._start_steps(state)

    def _pod_steps(self, state: State, number: int) -> Iterator[Transition]:
        """What kubelet, runtime and users do with a pod."""
        pod = state.pods[number]
        match pod.phase:
            case Phase.PENDING:
                taken = 0
                for other in state.pods:
                    taken |= other.devices if other.phase in _ASSIGNED else 0
                free = [
                    each
                    for each in range(self.devices)
                    if not taken >> each & 1 and self.record(state.devices[each]).advertised
                ]
                sets = [1 << each for each in free] if self.wants[number] == 1 else [3] if len(free) == 2 else []
                for devices in sets:
                    yield (
                        f"allocate to {number}",
                        Kind.WORLD,
                        self._with_pod(state, number, phase=Phase.ASSIGNED, devices=devices),
                    )
            case Phase.ASSIGNED:
                if state.up:
                    yield f"call for {number}", Kind.SYSTEM, self._with_pod(state, number, phase=Phase.CALLED)
            case Phase.ANSWERED:
                yield f"answer for {number}", Kind.SYSTEM, self._with_pod(state, number, phase=Phase.STARTING)
            case Phase.STARTING | Phase.DELETED_STARTING:
                yield self._created(state, number)
                if pod.phase is Phase.DELETED_STARTING:
                    yield f"{number} ends", Kind.SYSTEM, self._with_pod(state, number, phase=Phase.GONE)
            case Phase.RUNNING:
                if pod.restarts:
                    again = self._with_pod(state, number, phase=Phase.ASSIGNED, restarts=pod.restarts - 1)
                    yield f"{number} restarts", Kind.WORLD, again
            case Phase.LEFT:
                yield f"{number} absent for long", Kind.SYSTEM, self._with_pod(state, number, phase=Phase.LEFTOVER)
        if pod.phase in (Phase.ASSIGNED, Phase.CALLED, Phase.ANSWERED):
            yield f"delete {number}", Kind.WORLD, self._with_pod(state, number, phase=Phase.GONE)
        elif pod.phase is Phase.STARTING:
            yield f"delete {number}", Kind.WORLD, self._with_pod(state, number, phase=Phase.DELETED_STARTING)
        elif pod.phase is Phase.RUNNING:
            yield f"delete {number}", Kind.WORLD, self._with_pod(state, number, phase=Phase.LEFT)
        if pod.phase in _PROCESS:
            yield f"{number} ends", Kind.WORLD, self._with_pod(state, number, phase=Phase.GONE)

    def _created(self, state: State, number: int) -> Transition:
        pod = state.pods[number]
        runs = Phase.RUNNING if pod.phase is Phase.STARTING else Phase.LEFT
        after = self._with_pod(state, number, phase=runs)
        for device in range(self.devices):
            if self._has(pod, device):
                residue = state.devices[device].residue
                if residue & ~(1 << number):
                    raise Broken(f"invariant 1: pod {number} starts on a device with data of other pods ({residue:b})")
                after = self._with_device(after, device, residue=residue | 1 << number)
        return f"start {number}", Kind.SYSTEM, after

    def _call_steps(self, state: State, number: int) -> Iterator[Transition]:
        """A start that waits in the service."""
        pod = state.pods[number]
        for index in range(self.devices):
            if self._has(pod, index) and not pod.prepared[index]:
                yield from self._decide(state, number, index)
        mine = [index for index in range(self.devices) if self._has(pod, index)]
        if all(pod.prepared[index] for index in mine):
            blocked = any(self._is_held(state, index) or state.devices[index].work for index in mine)
            if not blocked:
                yield self._grant(state, number, mine)

    def _decide(self, state: State, number: int, index: int) -> Iterator[Transition]:
        device, record = state.devices[index], self.record(state.devices[index])
        earlier = frozenset(where for pod, where in self._liveness(state, device, number) if pod != number)
        held = self._is_held(state, index)
        decision = self._cached(
            ("decide", device.record, number, earlier, held), lambda: self._decision(record, number, earlier, held=held)
        )
        match decision.verdict:
            case HandoverVerdict.GRANT:
                assert decision.basis is not None
                prepared = list(state.pods[number].prepared)
                prepared[index] = decision.basis.value
                yield (
                    f"prepare {index} for {number} ({decision.basis.value})",
                    Kind.SYSTEM,
                    self._with_pod(state, number, prepared=tuple(prepared)),
                )
            case HandoverVerdict.SCRUB:
                if device.work is Work.NONE and not self._is_blocked(state, index, number):
                    if record.hygiene is Hygiene.IN_USE:
                        yield self._release(state, index)
                    else:
                        yield from self._scrub(state, index, number, recover=False)
            case HandoverVerdict.REFUSE:
                if record.hygiene is Hygiene.IN_USE and not self._is_blocked(state, index, number, held=False):
                    yield self._release(state, index)
                yield f"refuse {number}", Kind.SYSTEM, self._with_pod(state, number, phase=Phase.ASSIGNED)
            case HandoverVerdict.WAIT | HandoverVerdict.JOIN:
                pass
            case _:
                raise AssertionError(decision)

    def _decision(
        self, record: DeviceRecord, number: int, earlier: frozenset[PodState], *, held: bool
    ) -> HandoverDecision:
        last = record.last_grant
        mine = last is not None and last.pod == self._pods[number]
        facts = HandoverFacts(
            record=record,
            kind=classify_hand_over(
                record.previous_assignment, self._assignments[number], allocated_since=not mine, container_count=1
            ),
            policy=_POLICY,
            identity=NODE,
            last_pod_ran=last is not None and bool(last.started),
            starting_pod=self._pods[number],
        )
        decide: Callable[[HandoverFacts], HandoverDecision] = self.product.decide
        while (decision := decide(facts)).verdict is HandoverVerdict.GATHER:
            if decision.missing is MissingFact.EARLIER_PODS:
                facts = replace(facts, earlier_pods=earlier)
            else:
                facts = replace(facts, checks=_HELD if held else _FREE)
        return decision

    def _is_blocked(self, state: State, index: int, starting_pod: int = -1, *, held: bool = True) -> bool:
        """Whether a scrub would find a living pod of an earlier grant, or a process of the starting pod."""
        if any(where is PodState.ALIVE for _, where in self._liveness(state, state.devices[index], starting_pod)):
            return True
        return held and starting_pod >= 0 and state.pods[starting_pod].phase in _PROCESS

    def _grant(self, state: State, number: int, mine: list[int]) -> Transition:
        pod, after = state.pods[number], self._with_pod(state, number, phase=Phase.ANSWERED)
        for index in mine:
            device, basis = state.devices[index], Basis(pod.prepared[index])
            record = self.record(device)
            certificate = record.certificate
            if basis is Basis.CERTIFICATE:
                flaw = "there is none" if certificate is None else certificate_flaw(certificate, record, NODE, _POLICY)
                if flaw is not None or record.hygiene is not Hygiene.CLEAN:
                    raise Broken(f"invariant 1: pod {number} is granted device {index} by a certificate: {flaw}")
            elif (
                basis is not Basis.SAME_CONTAINER
                or record.last_grant is None
                or record.last_grant.pod != self._pods[number]
            ):
                raise Broken(f"invariant 1: pod {number} is granted device {index} on {basis.value}")
            key = ("granted", device.record, number, basis)
            granted = self._cached(key, functools.partial(self._granted, record, number, basis))
            if self.product.answers_after_commit:
                after = self._with_device(after, index, record=granted)
        return f"grant to {number}", Kind.SYSTEM, after

    def _granted(self, record: DeviceRecord, number: int, basis: Basis) -> int:
        own = record.open_grants_of(self._pods[number])
        grant = Grant(
            record.grant_sequence + 1,
            self._assignments[number],
            HandOverKind.SAME_CONTAINER if basis is Basis.SAME_CONTAINER else HandOverKind.OTHER_TENANT,
            0.0,
            NODE.boot,
            "fast",
            basis,
            cgroups=own[-1].cgroups if own else (),
        )
        return self._number(self.product.after_grant(record, grant, _certificate(record), certain=True))

    def _release(self, state: State, index: int) -> Transition:
        after = self._change("release", state.devices[index].record, DeviceRecord.after_release)
        return f"release {index}", Kind.SYSTEM, self._with_device(state, index, record=after)

    def _scrub(self, state: State, index: int, starting_pod: int, *, recover: bool) -> Iterator[Transition]:
        record = self.record(state.devices[index])
        if record.hygiene not in (Hygiene.DIRTY, Hygiene.CLEAN):
            return

        def begun(before: DeviceRecord) -> DeviceRecord:
            return (before.after_recovery_start(RecoveryAttempt(0.0, True)) if recover else before).after_scrub_start()

        after = self._change(f"scrub {recover}", state.devices[index].record, begun)
        changes = {"record": after, "work": Work.LOOKING, "starting_pod": starting_pod}
        yield f"scrub {index}", Kind.SYSTEM, self._with_device(state, index, **changes)

    def _device_steps(self, state: State, index: int) -> Iterator[Transition]:
        device = state.devices[index]
        if not state.up:
            return
        record = self.record(device)
        match device.work:
            case Work.NONE:
                yield from self._loops(state, index, record)
            case Work.LOOKING:
                yield from self._look(state, index)
            case Work.ERASING:
                erased = self._with_device(state, index, work=Work.ERASED, eraser=Eraser.NONE, residue=0)
                yield f"erased {index}", Kind.SYSTEM, erased
                if state.faults:
                    failed = self._with_device(state, index, work=Work.FAILED, eraser=Eraser.NONE)
                    yield f"erasing {index} fails", Kind.WORLD, failed._replace(faults=state.faults - 1)
            case _:
                yield from self._conclude(state, index)
        if state.faults and record.health is not Health.CONDEMNED:
            after = self._change("fault", device.record, lambda before: after_findings(before, (_FAULT,), _POLICY, 0.0))
            faulty = self._with_device(state, index, record=after)._replace(faults=state.faults - 1)
            yield f"fault of {index}", Kind.WORLD, faulty

    def _loops(self, state: State, index: int, record: DeviceRecord) -> Iterator[Transition]:
        """What the loops of the service do without a request."""
        device = state.devices[index]
        last = record.last_grant
        if last is not None and last.pod is not None and record.hygiene is Hygiene.IN_USE and not last.started:
            pod = self._pods.index(last.pod)
            if state.pods[pod].phase is Phase.RUNNING and self._has(state.pods[pod], index):
                started = self._change(
                    "started", device.record, lambda before: before.with_started_container("run", None)
                )
                yield f"note start on {index}", Kind.SYSTEM, self._with_device(state, index, record=started)
        if record.hygiene is Hygiene.IN_USE:
            standings = self._liveness(state, device)
            over = all(
                where is PodState.LEFTOVER or (where is PodState.OVER and state.pods[pod].phase not in _ASSIGNED)
                for pod, where in standings
            )
            leftover = any(where is PodState.LEFTOVER for _, where in standings)
            if standings and over and (leftover or not self._is_held(state, index)):
                yield self._release(state, index)
        need = self._cached(("need", device.record), lambda: self.product.next_action(record, _POLICY, NODE))
        if need.action is RecoveryAction.RESOLVE:
            after = self._change("resolve", device.record, _resolved)
            yield f"resolve {index}", Kind.SYSTEM, self._with_device(state, index, record=after)
        elif need.action is not RecoveryAction.NOTHING:
            waiting = [
                number
                for number, pod in enumerate(state.pods)
                if pod.phase in (Phase.ASSIGNED, Phase.CALLED) and self._has(pod, index)
            ]
            starting_pod = waiting[0] if waiting else -1
            if not self._is_blocked(state, index, starting_pod):
                recover = need.action is RecoveryAction.RECOVER
                yield from self._scrub(state, index, starting_pod, recover=recover)

    def _look(self, state: State, index: int) -> Iterator[Transition]:
        """The holders step of a scrub."""
        device = state.devices[index]
        if device.eraser is not Eraser.NONE and self.product.waits_for_orphan:
            yield f"end orphan of {index}", Kind.SYSTEM, self._with_device(state, index, eraser=Eraser.NONE)
            return
        standings = self._liveness(state, device, device.starting_pod)
        if any(where is PodState.ALIVE for _, where in standings):
            yield f"blocked {index}", Kind.SYSTEM, self._with_device(state, index, work=Work.BLOCKED)
            return
        for pod, where in standings:
            if where is PodState.LEFTOVER:
                if state.pods[pod].phase is not Phase.LEFTOVER:
                    raise Broken(f"invariant 5: a process of pod {pod} is killed in phase {state.pods[pod].phase.name}")
                yield f"kill leftover {pod}", Kind.SYSTEM, self._with_pod(state, pod, phase=Phase.GONE)
                return
        if self._is_held(state, index):
            yield f"blocked {index}", Kind.SYSTEM, self._with_device(state, index, work=Work.BLOCKED)
            return
        if device.eraser is not Eraser.NONE:
            raise Broken(f"invariant 4: two erasers work on device {index}")
        yield f"erase {index}", Kind.SYSTEM, self._with_device(state, index, work=Work.ERASING, eraser=Eraser.CHILD)

    def _conclude(self, state: State, index: int) -> Iterator[Transition]:
        device = state.devices[index]
        work, starting_pod = device.work, device.starting_pod

        def concluded(before: DeviceRecord) -> DeviceRecord:
            if work is Work.ERASED:
                starting = None if starting_pod < 0 else self._pods[starting_pod]
                issued = _certificate(before)
                # A recovery resets the device.
                proved = self.product.after_passed_scrub(
                    before,
                    issued,
                    was_reset=before.health in (Health.RECOVERING, Health.PROBATION),
                    starting_pod=starting,
                )
                return after_scrub(proved, Outcome.PASSED, (), _POLICY, 0.0)
            outcome = Outcome.FAILED if work is Work.FAILED else Outcome.BLOCKED
            found = (_FAULT,) if work is Work.FAILED else ()
            return after_scrub(before.after_unproven_scrub(), outcome, found, _POLICY, 0.0)

        after = self._change(f"conclude {work} {starting_pod}", device.record, concluded)
        ended = {"work": Work.NONE, "starting_pod": -1}
        yield f"conclude {index}", Kind.SYSTEM, self._with_device(state, index, record=after, **ended)
        if state.faults:
            lost = self._with_device(state, index, **ended)._replace(faults=state.faults - 1)
            yield f"conclusion of {index} not stored", Kind.WORLD, lost

    # -- crashes -----------------------------------------------------------------------------------------------------

    def _crashes(self, state: State) -> Iterator[Transition]:
        lost: dict[str, tuple[Phase, ...]] = {
            "service": (Phase.CALLED, Phase.ANSWERED),
            "plugin": (Phase.CALLED, Phase.ANSWERED),
        }
        lost["kubelet"] = (Phase.CALLED, Phase.ANSWERED, Phase.STARTING)
        for component, phases in lost.items():
            if component == "service" and not state.up and not any(device.checked for device in state.devices):
                continue  # it is down already
            after = state
            for number, pod in enumerate(state.pods):
                if pod.phase in phases:
                    after = self._with_pod(after, number, phase=Phase.ASSIGNED)
            if component == "service":
                for orphan in (Eraser.ORPHAN, Eraser.NONE):
                    yield f"crash of service, {orphan.name}", Kind.CRASH, self._without_service(after, orphan)
            elif after != state:
                yield f"crash of {component}", Kind.CRASH, after
        after = self._without_service(state, Eraser.NONE)
        for index, device in enumerate(after.devices):
            rebooted = self._change("reboot", device.record, _rebooted)
            after = self._with_device(after, index, record=rebooted, eraser=Eraser.NONE)
        for number, pod in enumerate(after.pods):
            if pod.phase in _ASSIGNED:
                after = self._with_pod(after, number, phase=Phase.ASSIGNED)
            elif pod.phase is not Phase.PENDING:
                after = self._with_pod(after, number, phase=Phase.GONE)
        yield "crash of node", Kind.CRASH, after

    def _without_service(self, state: State, orphan: Eraser) -> State:
        """Forget all that the service had in memory."""
        for index, device in enumerate(state.devices):
            eraser = orphan if device.eraser is Eraser.CHILD else device.eraser
            state = self._with_device(state, index, work=Work.NONE, starting_pod=-1, eraser=eraser, checked=False)
        return state._replace(up=False)

    def _start_steps(self, state: State) -> Iterator[Transition]:
        """The start of the service: one commit for all devices, then each device is checked."""
        if not any(device.checked for device in state.devices) and not self._has_started(state):
            after = state
            for index, device in enumerate(state.devices):
                record = self._change(
                    "begin", device.record, lambda before: self.product.after_service_start(before, NODE.boot)
                )
                after = self._with_device(after, index, record=record)
            if after != state:
                yield "service starts", Kind.SYSTEM, after
                return
        for index, device in enumerate(state.devices):
            if not device.checked:
                after = self._with_device(state, index, checked=True)
                alive = any(where is PodState.ALIVE for _, where in self._liveness(state, device))
                if alive:
                    record = self._change("adopt", device.record, lambda before: before.after_adoption(None))
                    after = self._with_device(after, index, record=record)
                yield f"check {index}", Kind.SYSTEM, after._replace(up=all(each.checked for each in after.devices))

    def _has_started(self, state: State) -> bool:
        """Whether the commit of the start changes nothing more."""
        return all(
            self._change("begin", each.record, lambda before: self.product.after_service_start(before, NODE.boot))
            == each.record
            for each in state.devices
        )

    # -- invariants ----------------------------------------------------------------------------------------------------

    def check(self, state: State) -> None:
        """Check what holds in every state; raises :class:`Broken`."""
        for index, device in enumerate(state.devices):
            record = self.record(device)
            if record.hygiene is Hygiene.CLEAN and device.residue:
                raise Broken(
                    f"invariant 3: device {index} is clean in the ledger and has data of pods {device.residue:b}"
                )
            for number, pod in enumerate(state.pods):
                if pod.phase not in _MAY_TOUCH or not self._has(pod, index):
                    continue
                mine = [
                    each for each in record.open_grants if each.pod == self._pods[number] and each.boot == NODE.boot
                ]
                if not mine:
                    raise Broken(
                        f"invariant 1: pod {number} ({pod.phase.name}) has device {index} without a grant on record"
                    )
                if record.hygiene is Hygiene.CLEAN:
                    raise Broken(f"invariant 2: pod {number} can touch device {index}, which is clean in the ledger")
                if device.eraser is not Eraser.NONE and pod.phase in _PROCESS:
                    raise Broken(f"invariant 5: device {index} is erased while pod {number} uses it")
            if device.eraser is Eraser.CHILD and device.work is not Work.ERASING:
                raise Broken(f"invariant 4: an eraser works on device {index} without a scrub")

    def has_started_all(self, state: State) -> bool:
        """Whether no pod waits, except for a device that is out of service with a reason."""
        for pod in state.pods:
            if pod.phase in WAITING:
                mine = [self.record(device) for index, device in enumerate(state.devices) if self._has(pod, index)]
                if not any(not record.advertised and record.cause is not None for record in mine):
                    return False
        return True

    def has_way_out(self, state: State) -> bool:
        """Whether no device is out of service that recovers by itself, except while a pod has it."""
        for index, device in enumerate(state.devices):
            record = self.record(device)
            if record.advertised or record.health is Health.CONDEMNED or self._is_held(state, index):
                continue
            cause = record.cause
            if cause is None or cause.recovery_method not in (RecoveryMethod.OPERATOR, RecoveryMethod.REBOOT):
                return False
        return True


def _certificate(record: DeviceRecord) -> Certificate:
    return certify(
        scrub(PathKind.SLOW), (), record, identity=NODE, policy=_POLICY, certificate_id="certificate", now=0.0
    )


def _resolved(record: DeviceRecord) -> DeviceRecord:
    """As ``Scrubs.resolve`` does."""
    if record.hygiene is Hygiene.SCRUBBING:
        record = record.after_unproven_scrub()
    if record.health is Health.RECOVERING:
        record = record.after_recovery_failure(retry_at=0.0)
    return record


def _rebooted(record: DeviceRecord) -> DeviceRecord:
    """The same record, seen from the next boot."""
    issued = record.certificate
    return replace(
        record,
        boot=_OTHER_BOOT if record.boot else "",
        certificate=None if issued is None else replace(issued, boot=_OTHER_BOOT),
        last_grant=None if record.last_grant is None else replace(record.last_grant, boot=_OTHER_BOOT),
        open_grants=tuple(replace(each, boot=_OTHER_BOOT) for each in record.open_grants),
    )


def _canonical(record: DeviceRecord) -> DeviceRecord:
    """Replace numbers and times, which grow without end, by their order."""
    order = sorted({record.grant_sequence, *(each.sequence for each in record.open_grants)})
    names = {sequence: place - len(order) + 10 for place, sequence in enumerate(order)}

    def renamed(grant: Grant) -> Grant:
        return replace(grant, sequence=names[grant.sequence])

    last = None if record.last_grant is None else renamed(record.last_grant)
    issued = record.certificate
    if issued is not None:
        sequence = 0 if last is None else last.sequence
        issued = replace(
            issued, sequence=0, previous_grant=sequence if issued.previous_grant == record.grant_sequence else -1
        )
    return replace(
        record,
        version=0,
        certificate=issued,
        rests_on=None,
        last_grant=last,
        open_grants=tuple(map(renamed, record.open_grants)),
        certificate_count=0,
        cause=None if record.cause is None else replace(record.cause, since=0.0, message=""),
        retry_at=None,
        recent_quarantines=(),
        recovery_attempts=(),
    )
