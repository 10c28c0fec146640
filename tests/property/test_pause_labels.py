"""Any interleaving of a pause with crashes, lost and late requests, and other writers of the node's labels.

After the restore, every label that no other client changed has its earlier value, and what others decided stays, whatever
arrives late. The history uses the plugin's decisions; the requests and their delays are modelled here.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from plugin.cluster.pause_labels import (
    PAUSE_LABEL,
    PauseLabel,
    PlannedChange,
    next_pausing_patch,
    next_restoring_patch,
    plan_changes,
)

CONFIGURED = (
    PauseLabel("k8saas.nvidia.com/ManagedByNVSentinel", "false"),
    PauseLabel("nvidia.com/gpu.deploy.dcgm-exporter", "false"),
    PauseLabel("nvidia.com/gpu.deploy.dcgm", "false"),
)
KEYS = [each.key for each in CONFIGURED]
VALUES = st.sampled_from([None, "true", "false", "paused-for-mig-change"])
Labels = dict[str, str]
Patch = dict[str, str | None]


@dataclass(eq=False)
class Request:
    """A request that was sent; ``sender``: the instance that waits for the response."""

    patch: Patch
    version: int
    sender: Instance


@dataclass(eq=False)
class Instance:
    """An instance of the plugin: the node as it last saw it, and what it has done.

    Attributes:
        seen: labels and version; None: to be read first.
    """

    restoring: bool
    seen: tuple[Labels, int] | None = None
    done: set[str] = field(default_factory=set)
    waits_for: Request | None = None


class Pause(RuleBasedStateMachine):
    @initialize(before=st.fixed_dictionaries(dict.fromkeys(KEYS, st.just("true") | VALUES)))
    def begin(self, before: dict[str, str | None]) -> None:
        self.labels: Labels = {key: value for key, value in before.items() if value is not None} | {"zone": "a"}
        self.version = 1
        self.changes: tuple[PlannedChange, ...] = plan_changes(self.labels, CONFIGURED)
        self.others: dict[str, str | None] = {}
        """What others wrote last, by key."""
        self.sent: list[Request] = []
        self.ending = False
        self.instance = Instance(restoring=False)

    @rule()
    def the_instance_takes_a_step(self) -> None:
        self._step()

    @rule(steps=st.integers(1, 2))
    def the_instance_takes_steps_without_delay(self, steps: int) -> None:
        for _ in range(steps):
            self._step()
            if self.instance.waits_for in self.sent:
                self.sent.remove(self.instance.waits_for)
                self._deliver(self.instance.waits_for)

    @rule(steps=st.integers(0, 2))
    def the_instance_dies_with_a_request_on_its_way(self, steps: int) -> None:
        self.the_instance_takes_steps_without_delay(steps)
        self._step()
        self.instance = Instance(restoring=self.ending)

    @rule()
    def the_instance_dies_and_another_one_starts(self) -> None:
        self.instance = Instance(restoring=self.ending)

    @rule(ends=st.sampled_from((False, False, False, True)))
    def the_pause_ends(self, ends: bool) -> None:
        if ends and not self.ending:
            self.ending = True
            self.instance = Instance(restoring=True)

    @rule(number=st.integers(0, 3))
    def a_request_arrives(self, number: int) -> None:
        if number < len(self.sent):
            self._deliver(self.sent.pop(number))

    @rule()
    def the_instance_gives_up_waiting(self) -> None:
        self.instance.waits_for = self.instance.seen = None

    @rule(key=st.sampled_from(KEYS), value=VALUES)
    def another_client_changes_a_label(self, key: str, value: str | None) -> None:
        self.others[key] = value
        self._write({key: value})

    @rule(value=st.sampled_from(["a", "b"]))
    def another_client_changes_another_label(self, value: str) -> None:
        self._write({"zone": value})

    def teardown(self) -> None:
        if not hasattr(self, "instance"):
            return
        self.the_pause_ends(ends=True)
        while self._step():
            while self.instance.waits_for is not None:
                self._deliver(self.sent.pop())
        zone = self.labels["zone"]
        for late in self.sent:
            self._deliver(late)
        assert self.labels["zone"] == zone
        for change in self.changes:
            if change.key not in self.others:
                assert self.labels.get(change.key) == change.before, change
        for key, value in self.others.items():
            (during,) = [each.during for each in CONFIGURED if each.key == key]
            before = [each.before for each in self.changes if each.key == key]
            if value != during and [value] != before:
                assert self.labels.get(key) == value, key

    def _step(self) -> bool:
        """Do what the instance does next; return whether there was anything."""
        one = self.instance
        if one.waits_for is not None:
            return True
        if one.seen is None:
            one.seen = dict(self.labels), self.version
            return True
        labels, version = one.seen
        patch = (
            next_restoring_patch(labels, self.changes, one.done)
            if one.restoring
            else next_pausing_patch(labels, "pause-1", self.changes, one.done)
        )
        if patch is None:
            return False
        one.waits_for = Request(patch, version, one)
        self.sent.append(one.waits_for)
        return True

    def _deliver(self, request: Request) -> None:
        accepted = request.version == self.version
        if accepted:
            self._write(request.patch)
        sender = request.sender
        if sender.waits_for is request:
            sender.waits_for = None
            sender.seen = (dict(self.labels), self.version) if accepted else None
            if accepted:
                sender.done |= request.patch.keys()

    def _write(self, patch: Patch) -> None:
        labels = {key: value for key, value in (self.labels | patch).items() if value is not None}
        if labels != self.labels:
            self.labels, self.version = labels, self.version + 1


def test_own_label_is_set_before_and_removed_after_every_other_one() -> None:
    labels = dict.fromkeys(KEYS, "true")
    changes = plan_changes(labels, CONFIGURED)
    order = []
    while patch := next_pausing_patch(labels, "pause-1", changes, ()):
        labels |= {key: value for key, value in patch.items() if value is not None}
        order += list(patch)
    assert order == [PAUSE_LABEL, *KEYS]
    while patch := next_restoring_patch(labels, changes, ()):
        labels = {key: value for key, value in (labels | patch).items() if value is not None}
        order += list(patch)
    assert order[4:] == [*reversed(KEYS), PAUSE_LABEL]
    assert labels == dict.fromkeys(KEYS, "true")


TestPause = Pause.TestCase
TestPause.settings = settings(stateful_step_count=12)  # long histories end long after the pause
