"""From a pod's name to its UID and back, by the directories that the kubelet makes for its logs.

``<namespace>_<name>_<uid>`` is there before the pod's sandbox is, and stays for a while after the pod. Neither
namespaces nor names hold an underscore.

A UID is one pod's for ever. Two names that have it are somebody's forgery (whoever may write there, a log collector
perhaps), and nothing says which of them: it names nobody.
"""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from scrubber.domain.assignment import Pod

__all__ = ["PodLogs", "count_container_starts", "index_pod_logs", "read_pod_logs"]

PodName = tuple[str, str]

_LOG = re.compile(r"([0-9]{1,9})\.log(?:\..*)?", re.ASCII | re.DOTALL)
_MAX_LOGS = 4096
"""Entries of one pod's log directory that are read: rotated logs stay beside the current one."""


@dataclass(frozen=True, slots=True)
class PodLogs:
    """Both directions. Several UIDs of one name are a pod and those it replaced.

    Attributes:
        uids: by namespace and name.
        names: namespace and name by UID.
        disputed: UIDs that stand under several names, with those names. They are in neither of the two above.
        error: why there is nothing here, in a sentence; empty when the directory could be read.
    """

    uids: Mapping[PodName, frozenset[str]] = field(default_factory=dict)
    names: Mapping[str, PodName] = field(default_factory=dict)
    disputed: Mapping[str, frozenset[PodName]] = field(default_factory=dict)
    error: str = ""

    def names_of(self, uid: str) -> frozenset[PodName]:
        """Every name under which ``uid`` left logs: one at most, unless it is disputed."""
        return frozenset({self.names[uid]}) if uid in self.names else self.disputed.get(uid, frozenset())


def read_pod_logs(directory: Path) -> PodLogs:
    """What ``directory`` (``/var/log/pods``) holds; never raises."""
    try:
        return index_pod_logs(os.listdir(directory))
    except FileNotFoundError:
        return PodLogs(error=f"There is no directory {directory}, so pods have no UID.")
    except OSError as exc:
        return PodLogs(error=f"{directory} cannot be read, so pods have no UID: {exc.strerror or exc}.")


def count_container_starts(directory: Path, pod: Pod) -> Mapping[str, int] | None:
    """How often each container of ``pod`` was started, by its logs in ``directory`` (``/var/log/pods``).

    ``<container>/<restarts>.log`` is opened by the runtime at each start, after ``PreStartContainer`` was answered; a
    directory without logs counts as 0 starts, and is there. None when the pod's UID is not known, its directory is not there, or it cannot be read.
    """
    if pod.uid is None:
        return None
    starts: dict[str, int] = {}
    left = _MAX_LOGS
    try:
        for container in os.listdir(directory / f"{pod.namespace}_{pod.name}_{pod.uid}"):
            logs = os.listdir(directory / f"{pod.namespace}_{pod.name}_{pod.uid}" / container)
            left -= 1 + len(logs)
            if left < 0:
                return None
            runs = [int(match[1]) + 1 for each in logs if (match := _LOG.fullmatch(each)) is not None]
            starts[container] = max(runs, default=0)
    except OSError:
        return None
    return starts


def index_pod_logs(entries: Iterable[str]) -> PodLogs:
    """Index directory names; those of another shape are not the kubelet's and are left aside."""
    claims: defaultdict[str, set[PodName]] = defaultdict(set)
    for entry in entries:
        parts = entry.split("_")
        if len(parts) == 3 and all(parts):
            namespace, name, uid = parts
            claims[uid].add((namespace, name))
    uids: defaultdict[PodName, set[str]] = defaultdict(set)
    names: dict[str, PodName] = {}
    for uid, (pod, *others) in claims.items():
        if not others:
            uids[pod].add(uid)
            names[uid] = pod
    disputed = {uid: frozenset(pods) for uid, pods in claims.items() if len(pods) > 1}
    return PodLogs({pod: frozenset(each) for pod, each in uids.items()}, names, disputed)
