"""Labels of the node that pause agents: which ones are configured, and which change comes next.

Pure decisions; :mod:`plugin.cluster.agent_pause` carries them out. A change that was planned is repeated after a crash at
any point, so each decision depends only on the plan and on the labels as they are.

Invariant: a label is restored only while it has the value that the pause gave it. Any other value is another client's
decision, and stays.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Self

from plugin.cluster.deploy_labels import LABEL_KEY
from scrubber.domain.errors import InvalidConfiguration

__all__ = [
    "DEFAULT_LEASE",
    "DEPLOY_PREFIX",
    "PAUSE_LABEL",
    "LeaseName",
    "PauseLabel",
    "PlannedChange",
    "labels_left",
    "next_pausing_patch",
    "next_restoring_patch",
    "parse_pause_labels",
    "plan_changes",
    "refusal_to_plan",
]

PAUSE_LABEL = "scrubber.dev/agent-pause"
"""Our own label, with the id of the pause while it lasts.

It is set before every other label and removed after every other one, each by a request that names the version of the
node. So when it has been removed, a delayed request of an instance that died is refused, because it names an older
version.
"""

DEPLOY_PREFIX = "nvidia.com/gpu.deploy."
"""An operand runs where its label with this prefix is "true"; with another value another client has paused it."""

_DEPLOYED = "true"
_VALUE = re.compile(r"([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?")
_DNS_NAME = re.compile(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?")
_RESERVED_DOMAIN = re.compile(r"(?:.*\.)?(?:kubernetes\.io|k8s\.io|scrubber\.dev)")
_OWN_PODS = frozenset({f"{DEPLOY_PREFIX}client", f"{DEPLOY_PREFIX}device-plugin"})
_NEEDED = frozenset({f"{DEPLOY_PREFIX}driver", f"{DEPLOY_PREFIX}operands", f"{DEPLOY_PREFIX}container-toolkit"})


@dataclass(frozen=True, slots=True)
class PauseLabel:
    """A label and the value that it has during a pause."""

    key: str
    during: str


@dataclass(frozen=True, slots=True)
class PlannedChange:
    """A change of one label. ``before``: None where the node does not have the label."""

    key: str
    before: str | None
    during: str

    @property
    def before_text(self) -> str:
        """The value before the change, for a log."""
        return "no label" if self.before is None else self.before

    def __str__(self) -> str:
        return f"{self.key}: {self.before_text} to {self.during}"


@dataclass(frozen=True, slots=True)
class LeaseName:
    """The Lease that allows one node at a time to pause its agents."""

    namespace: str
    name: str

    @classmethod
    def parse(cls, text: str) -> Self | None:
        """Read ``NAMESPACE/NAME``; None for the empty text.

        Raises:
            InvalidConfiguration: the text is neither.
        """
        if not text:
            return None
        namespace, slash, name = text.partition("/")
        if not (slash and _DNS_NAME.fullmatch(namespace) and "." not in namespace and _DNS_NAME.fullmatch(name)):
            raise InvalidConfiguration(
                f"--pause-lease {text!r} is not the name of a Lease. Write NAMESPACE/NAME, such as {DEFAULT_LEASE}, or "
                "the empty text for none."
            )
        return cls(namespace, name)

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"


DEFAULT_LEASE = LeaseName("scrubber-system", "scrubber-agent-pause")


def parse_pause_labels(text: str, yield_labels: Collection[str] = ()) -> tuple[PauseLabel, ...]:
    """Return the labels in ``text``: ``KEY=VALUE`` separated by commas, in their order.

    Args:
        yield_labels: keys of labels that yield the node.

    Raises:
        InvalidConfiguration: an entry is no label, occurs twice, or must not be changed by the plugin.
    """
    found: dict[str, PauseLabel] = {}
    for part in text.split(","):
        if not (entry := part.strip()):
            continue
        key, equals, value = entry.partition("=")
        if not (equals and LABEL_KEY.fullmatch(key) and _VALUE.fullmatch(value)):
            raise InvalidConfiguration(
                f"--pause-labels: {entry!r} is not a label with a value. Use for example "
                f"{DEPLOY_PREFIX}dcgm-exporter=false."
            )
        if key in found:
            raise InvalidConfiguration(f"--pause-labels names {key} twice. Remove one of the entries.")
        if refusal := _refusal(key, yield_labels):
            raise InvalidConfiguration(f"--pause-labels: {key} {refusal} Remove it.")
        found[key] = PauseLabel(key, value)
    return tuple(found.values())


def _refusal(key: str, yield_labels: Collection[str]) -> str:
    if key in yield_labels:
        return "is also in --yield-labels: a pause would yield the node, which ends the reset that it is for."
    if key in _OWN_PODS:
        return "can select the pods of the scrub service and of this plugin: a pause would end them."
    if key in _NEEDED:
        return "also selects the driver or the container toolkit, without which no GPU can be reset or handed over."
    if _RESERVED_DOMAIN.fullmatch(key.rpartition("/")[0]):
        return "belongs to Kubernetes or to this plugin."
    return ""


def plan_changes(labels: Mapping[str, str], configured: Sequence[PauseLabel]) -> tuple[PlannedChange, ...]:
    """Return the changes of ``labels`` for a pause, in order.

    A deploy label is changed only from "true": otherwise there is no operand, or another client has paused it.
    """
    return tuple(
        PlannedChange(each.key, before, each.during)
        for each in configured
        if (before := labels.get(each.key)) != each.during
        and (before == _DEPLOYED or not each.key.startswith(DEPLOY_PREFIX))
    )


def refusal_to_plan(changes: Sequence[PlannedChange], configured: Sequence[PauseLabel]) -> str:
    """Return why ``changes`` would pause no agent; empty if they would."""
    deploy = [each.key for each in configured if each.key.startswith(DEPLOY_PREFIX)]
    if not configured:
        return "The plugin has no --pause-labels."
    if deploy and not any(each.key.startswith(DEPLOY_PREFIX) for each in changes):
        return f"None of the node labels {', '.join(deploy)} is {_DEPLOYED!r}, so they pause no agent."
    if not changes:
        return f"The node labels {', '.join(each.key for each in configured)} already have their values of a pause."
    return ""


def next_pausing_patch(
    labels: Mapping[str, str], pause: str, changes: Sequence[PlannedChange], done: Collection[str]
) -> dict[str, str | None] | None:
    """Return the next change of ``labels`` for the pause of this id; None when all are made.

    Args:
        done: keys of labels that this instance has changed already. If they have another value again, another client
            has decided that.
    """
    if labels.get(PAUSE_LABEL) != pause:
        return {PAUSE_LABEL: pause}
    for each in changes:
        if each.key not in done and labels.get(each.key) == each.before:
            return {each.key: each.during}
    return None


def next_restoring_patch(
    labels: Mapping[str, str], changes: Sequence[PlannedChange], done: Collection[str]
) -> dict[str, str | None] | None:
    """Return the next change of ``labels`` that restores them, in reverse order; None when all are made.

    Args:
        done: keys of labels that were restored already.
    """
    for each in reversed(changes):
        if each.key not in done and labels.get(each.key) == each.during:
            return {each.key: each.before}
    return {PAUSE_LABEL: None} if PAUSE_LABEL in labels else None


def labels_left(labels: Mapping[str, str], changes: Sequence[PlannedChange], *, during: bool) -> list[str]:
    """Return the keys that have another value than the plan intends now, because another client changed them.

    Args:
        during: the pause lasts; otherwise it has ended.
    """
    return [each.key for each in changes if labels.get(each.key) != (each.during if during else each.before)]
