"""The judgement of a soak run: every breach is one message, and an empty list means that there was none.

Three independent records are compared: what tenants reported about themselves (:class:`Message`), what the soak and its
emulated kubelet recorded about their own actions (:class:`Facts`), and the ledger's tables, read without its code.
Standard library only: the judge shares no code with what it judges.

One breach is not the service's fault: between a restart of the kubelet and the next registration of its plugin the
kubelet starts containers without calling the plugin. Harm by such a start is caused by the kubelet alone; those starts
are recognized and counted.
"""

from __future__ import annotations

import bisect
import json
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.chaos.ledger_tables import LedgerTables

__all__ = ["Event", "Facts", "Message", "PodFacts", "UnauthorizedProcess", "Verdict", "judge", "read_facts"]

SLACK = 5.0
"""Seconds that a container may take from the kubelet's decision to start it to its first message."""
MEANWHILE = 0.5
"""Seconds by which a view of the service may be older than its reader assumes."""


@dataclass(frozen=True, slots=True)
class Message:
    """One message and its sender; ``ended`` is reported by the reader itself. ``at`` is on the monotonic clock.

    ``what``: ``hello``, ``came`` (what was found on a device), ``wrote``, ``damaged``, ``signalled``, ``left`` (it is
    about to exit normally), ``ended``, ``beside`` (a process of another pod has its device).
    """

    what: str
    at: float
    number: int
    pid: int
    role: str
    name: str
    uid: str
    run: str
    devices: tuple[str, ...]
    facts: Mapping[str, str]

    @property
    def who(self) -> str:
        return f"{self.name} ({self.role}, PID {self.pid})"

    @property
    def container(self) -> tuple[str, str]:
        return self.uid, self.name.rpartition("/")[2]


@dataclass(frozen=True, slots=True)
class Event:
    """An event that the emulated kubelet recorded."""

    at: float
    name: str
    outcome: str
    duration: float
    devices: tuple[str, ...]
    uid: str
    container: str

    @property
    def over(self) -> float:
        return self.at + self.duration


@dataclass(frozen=True, slots=True)
class PodFacts:
    """What the soak requested for a pod, and when the kubelet stopped listing it. None: never."""

    uid: str
    name: str
    created: float
    deleted: float | None = None
    grace: float = 0.0
    forced: float | None = None
    dying_for: float = 0.0
    left: float | None = None
    turned_away: bool = False
    leave_children: bool = False


@dataclass(frozen=True, slots=True)
class UnauthorizedProcess:
    """A process of the node that opened a device which the service had reported as clean, at ``clean_at``."""

    pid: int
    device: str
    clean_at: float


@dataclass(frozen=True, slots=True)
class Facts:
    """The soak's record of its own actions.

    Attributes:
        soak_pid: the only process that may signal a tenant: it contains the emulated kubelet.
        dying_grace: of the policy, seconds.
        wall: seconds to add to the monotonic clock to get the ledger's.
        devices: id → name in a container.
        kubelet_starts: when each run of the kubelet began.
        orders: processes that the soak itself was about to kill, and when.
        exits: daemon → exit codes of its runs.
        waited: pods that never stopped waiting, one message each.
        unsettled: what did not reach its final state at the end, one message each.
        assigned: at a roll-call, device → UID of the pod that the kubelet's checkpoint names.
        granted: at the same roll-call, device → name of the pod that the service names.
        ledger: a copy of the ledger's database.
        clock_steps: (monotonic seconds, by how much the ledger's clock was wrong from then on), in order.
        explained: daemon → how many of its runs ended with a message about a shortage of the node.
        without_memory: how often a daemon was denied memory.
        with_claims: whether devices are requested by claims: then a pod passes the gate once, for all its starts.
    """

    soak_pid: int
    dying_grace: float
    wall: float
    devices: Mapping[str, str] = field(default_factory=dict)
    events: Sequence[Event] = ()
    pods: Mapping[str, PodFacts] = field(default_factory=dict)
    kubelet_starts: Sequence[float] = ()
    orders: Sequence[tuple[int, float]] = ()
    unauthorized: Sequence[UnauthorizedProcess] = ()
    exits: Mapping[str, Sequence[int]] = field(default_factory=dict)
    waited: Sequence[str] = ()
    unsettled: Sequence[str] = ()
    assigned: Mapping[str, str] = field(default_factory=dict)
    granted: Mapping[str, str] = field(default_factory=dict)
    ledger: str = ""
    clock_steps: Sequence[tuple[float, float]] = ()
    explained: Mapping[str, int] = field(default_factory=dict)
    without_memory: int = 0
    with_claims: bool = False

    @property
    def clock(self) -> Sequence[tuple[float, float]]:
        """(monotonic seconds, what to add to them to get the ledger's time from then on), in order."""
        begun = min(self.kubelet_starts, default=0.0)
        return [(begun, self.wall), *((at, self.wall + offset) for at, offset in self.clock_steps)]


@dataclass(frozen=True, slots=True)
class Verdict:
    """The breaches, and what was counted on the way."""

    breaches: list[str]
    counts: dict[str, int]


def read_facts(path: Path) -> Facts:
    """Read :class:`Facts` from the JSON of its :func:`dataclasses.asdict`."""
    document: dict[str, Any] = json.loads(path.read_text())
    document["events"] = [Event(**{**each, "devices": tuple(each["devices"])}) for each in document["events"]]
    document["pods"] = {uid: PodFacts(**each) for uid, each in document["pods"].items()}
    document["unauthorized"] = [UnauthorizedProcess(**each) for each in document["unauthorized"]]
    document["clock_steps"] = [(at, offset) for at, offset in document.get("clock_steps", ())]
    document["orders"] = [(pid, at) for pid, at in document["orders"]]
    return Facts(**document)


def judge(messages: Sequence[Message], facts: Facts) -> Verdict:
    """Compare all records with each other."""
    case = _Case(messages, facts)
    ledger = LedgerTables(facts.ledger) if facts.ledger else None
    breaches = [
        *case.foreign_bytes(),
        *case.touched_memory(),
        *case.company(),
        *case.starts_without_the_gate(),
        *case.unordered_ends(),
        *case.foreign_signals(),
        *case.silent_tenants(),
        *case.surviving_processes(),
        *case.daemons_that_ended_by_themselves(),
        *(f"waits for ever: {each}" for each in facts.waited),
        *(f"unsettled: {each}" for each in facts.unsettled),
        *case.two_accounts_of_one_device(),
        *(ledger.breaches(case.gated_starts(), facts.clock, case.claims) if ledger else ()),
    ]
    return Verdict(breaches, {**case.counts(), **(ledger.counts() if ledger else {})})


class _Case:
    """The messages, sorted by sender and subject."""

    def __init__(self, messages: Sequence[Message], facts: Facts) -> None:
        self.facts = facts
        self._messages: defaultdict[str, list[Message]] = defaultdict(list)
        for each in messages:
            self._messages[each.what].append(each)
        self._events: defaultdict[str, list[Event]] = defaultdict(list)
        for event in sorted(facts.events, key=lambda event: event.at):
            self._events[event.name].append(event)
        self._passes: defaultdict[tuple[str, str], list[float]] = defaultdict(list)
        for event in self._events["PreStartContainer"]:
            if event.outcome == "OK":
                self._passes[event.uid, event.container].append(event.over)
        self.claims: defaultdict[str, set[str]] = defaultdict(set)
        self._prepared: defaultdict[str, float] = defaultdict(lambda: float("inf"))
        for event in self._events["NodePrepareResources"]:
            if event.outcome == "OK":
                self.claims[event.uid] |= {*event.devices}
                self._prepared[event.uid] = min(self._prepared[event.uid], event.over)
        for passes in self._passes.values():
            passes.sort()
        self._first_deaths = {
            each.run: each.at for what in ("left", "ended") for each in self._messages[what] if each.role == "main"
        }
        for each in self._messages["left"]:
            if each.role == "main":
                self._first_deaths[each.run] = min(self._first_deaths[each.run], each.at)
        self._left = {each.number for each in self._messages["left"]}
        self._born = {each.number: each.at for each in self._messages["hello"]}
        for each in self._messages["ended"]:
            if each.role == "main" and (order := self._order(each)) is not None:
                # The end of its child may be reported first.
                self._first_deaths[each.run] = min(self._first_deaths[each.run], order)
        self._mains = sorted(
            (each for each in self._messages["hello"] if each.role == "main"), key=lambda each: each.at
        )
        self._ungated = list(self._starts_past_the_gate())
        self._holes = {each.number: each for each in self._ungated if self._in_the_kubelets_own_hole(each.at)}

    # -- bytes -----------------------------------------------------------------------------------------------------

    def foreign_bytes(self) -> Iterator[str]:
        """A starting container finds zeros, or what the same container left."""
        for each in self._messages["came"]:
            strange = int(each.facts["strange"])
            if not strange or (each.role == "main" and each.number in self._holes):
                continue
            if each.role == "unauthorized" and self._handed_over_meanwhile(each):
                continue
            found = _text(each.facts["found"])
            yield f"foreign bytes: {each.who} found {strange} on {each.facts['device']} at {each.at:.3f}: {found}"

    def touched_memory(self) -> Iterator[str]:
        """What a tenant wrote stays for as long as a process of its pod holds the device."""
        for each in self._messages["damaged"]:
            device = each.facts["device"]
            by_the_kubelet = any(
                device in hole.devices and hole.uid != each.uid and self._born[each.number] <= hole.at <= each.at
                for hole in self._holes.values()
            )
            if not by_the_kubelet:
                found = _text(each.facts["found"])
                wrong = each.facts["wrong"]
                yield f"touched memory: {wrong} bytes of {each.who} on {device} changed by {each.at:.3f}: {found}"

    def company(self) -> Iterator[str]:
        """No container is permitted to start beside one of another pod."""
        for each in self._messages["beside"]:
            if each.number not in self._holes:
                other, pid = each.facts["other"], each.facts["other_pid"]
                yield f"two at once: {each.who} has {each.facts['device']} beside {other} (PID {pid}) at {each.at:.3f}"

    def _handed_over_meanwhile(self, message: Message) -> bool:
        """Return whether a tenant may have come between the view with a clean device and the unauthorized process's reading."""
        seen = [each.clean_at for each in self.facts.unauthorized if each.pid == message.pid]
        begun = min(seen, default=message.at) - MEANWHILE
        device = message.facts["device"]
        return any(device in main.devices and begun <= main.at <= message.at + MEANWHILE for main in self._mains)

    # -- starts ----------------------------------------------------------------------------------------------------

    def starts_without_the_gate(self) -> Iterator[str]:
        for each in self._ungated:
            if each.number not in self._holes:
                yield f"no gate: {each.who} started at {each.at:.3f} without a PreStartContainer call"

    def _starts_past_the_gate(self) -> Iterator[Message]:
        """Return starts of containers with a device that did not pass the gate since the container's last start."""
        before: dict[tuple[str, str], float] = {}
        for each in self._mains:
            passes = self._passes[each.container]
            last = before.get(each.container, float("-inf"))
            if self.facts.with_claims:
                if each.devices and each.at < self._prepared[each.uid]:
                    yield each
            elif each.devices and bisect.bisect_right(passes, last) == bisect.bisect_right(passes, each.at):
                yield each
            before[each.container] = each.at

    def _in_the_kubelets_own_hole(self, at: float) -> bool:
        """Return whether a restarted kubelet had no plugin yet when it decided on a start reported ``at``."""
        restarts = self.facts.kubelet_starts[1:]
        number = bisect.bisect_right(restarts, at)
        if number == 0:
            return False
        restarted = restarts[number - 1]
        calls = [event.over for event in self._events["GetDevicePluginOptions"] if event.outcome == "OK"]
        known = next((each for each in calls if each >= restarted), float("inf"))
        return at - SLACK <= known

    # -- processes -------------------------------------------------------------------------------------------------

    def unordered_ends(self) -> Iterator[str]:
        """A process that ended without a message was killed: by the soak, by the kubelet, or rightly by the service."""
        for each in self._messages["ended"]:
            if each.number not in self._left and each.role and (why := self._unlawful(each)):
                yield f"ended: {each.who} at {each.at:.3f}: {why}"

    def _order(self, end: Message) -> float | None:
        """Return when the soak was about to kill the process; None if it did not."""
        born = self._born[end.number]
        return next((at for pid, at in self.facts.orders if pid == end.pid and born <= at <= end.at), None)

    def _unlawful(self, end: Message) -> str:
        """Return why this process must not have been killed; empty if it was killed rightly."""
        if self._order(end) is not None:
            return ""
        if end.role == "unauthorized":
            return "it is a process of the node, which must not be killed"
        pod = self.facts.pods.get(end.uid)
        if pod is None:
            return "its pod is unknown"
        first_death = self._first_deaths.get(end.run, float("inf"))
        orphaned = end.role != "main" and first_death <= end.at
        if orphaned and not pod.leave_children:
            return ""  # the runtime kills a whole container
        if pod.turned_away and any(pod.created <= each <= end.at for each in self.facts.kubelet_starts[1:]):
            return ""  # a restarted kubelet refused the pod and killed it
        if pod.deleted is not None and end.role == "main" and end.at >= pod.deleted + pod.grace:
            return ""
        gone = min(each for each in (pod.left, pod.forced, float("inf")) if each is not None)
        if end.at < gone:
            return "the kubelet still had its pod"
        by_the_runtime = end.role == "main" or not pod.leave_children
        if pod.forced is not None and end.at >= pod.forced + pod.dying_for and by_the_runtime:
            return ""
        if orphaned or end.at >= gone + self.facts.dying_grace:
            return ""
        return f"its pod was gone for {end.at - gone:.3f} s, and the first process of its container was not dead"

    def foreign_signals(self) -> Iterator[str]:
        for each in self._messages["signalled"]:
            sender = int(each.facts["sender"])
            if sender not in (0, each.pid, self.facts.soak_pid):  # 0 is the kernel
                yield f"signalled: {each.who} got signal {each.facts['number']} from PID {sender} at {each.at:.3f}"

    def silent_tenants(self) -> Iterator[str]:
        """A reader without messages finds no breach, so every started container must have reported what it found."""
        words = Counter(each.container for each in self._mains)
        found = Counter(each.number for each in self._messages["came"])
        for key, starts in Counter((event.uid, event.container) for event in self._events["ContainerStarted"]).items():
            pod = self.facts.pods.get(key[0])
            cut_short = pod is None or pod.deleted is not None or pod.forced is not None or pod.turned_away
            if words[key] < starts and not cut_short:
                name = pod.name if pod else key[0]
                yield f"no report: {key[1]} of {name} started {starts} times and reported {words[key]} times"
        ended = {each.number for each in self._messages["ended"]} - self._left
        for each in self._mains:
            if found[each.number] < len(each.devices) and each.number not in ended:
                yield f"no report: {each.who} did not report what it found"
        for event in self._events["ContainerDied"]:
            if event.outcome == "1":
                yield f"no report: a tenant of pod {event.uid} failed by itself at {event.at:.3f}"

    def surviving_processes(self) -> Iterator[str]:
        """At the end no pod and no process of any pod is left."""
        ended = {each.number for each in self._messages["ended"]}
        for each in self._messages["hello"]:
            if each.number not in ended:
                yield f"lives on: {each.who}"

    def daemons_that_ended_by_themselves(self) -> Iterator[str]:
        """The weather ends daemons by SIGKILL and by SIGTERM, which kills one that has just started (status -15).

        One that cannot start for a shortage of the node ends with a message about it, and status 1 or 2. One that is
        denied memory may end in any way, by a signal from a library too.
        """
        denied = self.facts.without_memory
        for daemon, codes in self.facts.exits.items():
            failed = sum(code in (1, 2) for code in codes)
            failed += sum(code in (-6, -11) for code in codes)
            explained = {1, 2, -6, -11} if failed <= self.facts.explained.get(daemon, 0) + denied else set()
            for code in sorted(set(codes) - {0, -9, -15} - explained):
                yield f"daemon: {daemon} ended {codes.count(code)} times with status {code}"

    # -- records of the kubelet and the service --------------------------------------------------------------------

    def two_accounts_of_one_device(self) -> Iterator[str]:
        """When all devices are in use, the kubelet's checkpoint and the service name the same pods."""
        for device in sorted({*self.facts.assigned, *self.facts.granted}):
            uid, granted = self.facts.assigned.get(device), self.facts.granted.get(device)
            pod = self.facts.pods.get(uid) if uid is not None else None
            assigned = None if uid is None else uid if pod is None else pod.name
            if assigned != granted:
                yield f"accounts: {device} is assigned to {assigned}, and granted to {granted}"

    def gated_starts(self) -> Iterator[tuple[Event, float]]:
        """Return starts that passed the gate, each with the time of the previous start on any of its devices."""
        if self.facts.with_claims:
            yield from self._prepared_starts()
            return
        of_container: dict[tuple[str, str], float] = {}
        of_device: dict[str, float] = {}
        never = float("-inf")
        for event in self._events["ContainerStarted"]:
            key = event.uid, event.container
            passes = self._passes[key]
            gated = bisect.bisect_right(passes, of_container.get(key, never)) < bisect.bisect_right(passes, event.at)
            if gated and event.devices:
                yield event, max(of_device.get(device, never) for device in event.devices)
            of_container[key] = event.at
            of_device.update(dict.fromkeys(event.devices, event.at))

    def _prepared_starts(self) -> Iterator[tuple[Event, float]]:
        """Return the first start of each container with claims, and the time of the last start of another pod."""
        ids = {name: device for device, name in self.facts.devices.items()}
        started: dict[str, list[tuple[float, str]]] = defaultdict(list)
        known: set[tuple[str, str]] = set()
        for each in self._mains:
            if each.devices and each.container not in known:
                others = (at for name in each.devices for at, uid in started[name] if uid != each.uid)
                devices = tuple(ids[name] for name in each.devices)
                event = Event(each.at, "ContainerStarted", "OK", 0.0, devices, *each.container)
                yield event, max(others, default=float("-inf"))
            known.add(each.container)
            for name in each.devices:
                started[name].append((each.at, each.uid))

    def counts(self) -> dict[str, int]:
        calls = self._events["PreStartContainer"]
        started = self._events["ContainerStarted"]
        return {
            "pods started": len({event.uid for event in started}),
            "container starts": len(started),
            "starts refused": sum(event.outcome not in ("OK", "Canceled") for event in calls),
            "starts without a PreStartContainer call": len(self._holes),
            "processes with reports": len(self._messages["hello"]),
            "processes ended by others": len(
                {each.number for each in self._messages["ended"] if each.role} - self._left
            ),
        }


def _text(found: str) -> str:
    return "" if found == "none" else repr(bytes.fromhex(found).decode(errors="replace"))
