"""From a pod's name to its UID and back, by the directories that the kubelet makes for its logs.

``<namespace>_<name>_<uid>`` is there before the pod's sandbox is, and stays for a while after the pod. Neither
namespaces nor names hold an underscore.

A UID is one pod's for ever. Two names that have it are somebody's forgery (whoever may write there, a log collector
perhaps), and nothing says which of them: it names nobody.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

__all__ = ["PodLogs", "index_pod_logs", "read_pod_logs"]

Name = tuple[str, str]


@dataclass(frozen=True, slots=True)
class PodLogs:
    """Both directions. Several UIDs of one name are a pod and those it replaced.

    Attributes:
        uids: by namespace and name.
        names: namespace and name by UID.
        disputed: UIDs that stand under several names, with those names. They are in neither of the two above.
        unreadable: why there is nothing here, in a sentence; empty when the directory could be read.
    """

    uids: Mapping[Name, frozenset[str]] = field(default_factory=dict)
    names: Mapping[str, Name] = field(default_factory=dict)
    disputed: Mapping[str, frozenset[Name]] = field(default_factory=dict)
    unreadable: str = ""

    def claimants(self, uid: str) -> frozenset[Name]:
        """Every name under which ``uid`` left logs: one at most, unless it is disputed."""
        return frozenset({self.names[uid]}) if uid in self.names else self.disputed.get(uid, frozenset())


def read_pod_logs(directory: Path) -> PodLogs:
    """What ``directory`` (``/var/log/pods``) holds; never raises."""
    try:
        return index_pod_logs(os.listdir(directory))
    except FileNotFoundError:
        return PodLogs(unreadable=f"There is no directory {directory}, so pods have no UID.")
    except OSError as exc:
        return PodLogs(unreadable=f"{directory} cannot be read, so pods have no UID: {exc.strerror or exc}.")


def index_pod_logs(entries: Iterable[str]) -> PodLogs:
    """Index directory names; those of another shape are not the kubelet's and are left aside."""
    claims: defaultdict[str, set[Name]] = defaultdict(set)
    for entry in entries:
        parts = entry.split("_")
        if len(parts) == 3 and all(parts):
            namespace, name, uid = parts
            claims[uid].add((namespace, name))
    uids: defaultdict[Name, set[str]] = defaultdict(set)
    names: dict[str, Name] = {}
    for uid, (pod, *others) in claims.items():
        if not others:
            uids[pod].add(uid)
            names[uid] = pod
    disputed = {uid: frozenset(pods) for uid, pods in claims.items() if len(pods) > 1}
    return PodLogs({pod: frozenset(each) for pod, each in uids.items()}, names, disputed)
