"""Mapping between a pod's name and its UID, from the directories that the kubelet creates for pod logs.

``<namespace>_<name>_<uid>`` exists before the pod's sandbox does, and remains for a while after the pod. Neither
namespaces nor names contain an underscore.

A UID belongs to one pod forever. If it appears with two names, one of them is forged (by a process with write access to
the directory, such as a log collector), and nothing indicates which one: the UID then maps to no pod.
"""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

from scrubber.domain.assignment import Pod

__all__ = ["PodLogs", "count_container_starts", "index_pod_logs", "read_pod_logs"]

PodName = tuple[str, str]

_LOG = re.compile(r"([0-9]{1,9})\.log(?:\..*)?", re.ASCII | re.DOTALL)
_MAX_PODS = 16_384
"""Maximum number of entries in the directory of all pods: a process that can write it must not control what a reading costs."""
_MAX_LOGS = 4096
"""Maximum number of entries read from one pod's log directory: rotated logs remain next to the current one."""


@dataclass(frozen=True, slots=True)
class PodLogs:
    """Both directions of the mapping. Several UIDs of one name are a pod and the pods it replaced.

    Attributes:
        uids: UIDs by namespace and name.
        names: namespace and name by UID.
        disputed: UIDs that appear with several names, and those names. They are in neither of the two mappings above.
        error: message why the mapping is empty; empty when the directory could be read.
    """

    uids: Mapping[PodName, frozenset[str]] = field(default_factory=dict)
    names: Mapping[str, PodName] = field(default_factory=dict)
    disputed: Mapping[str, frozenset[PodName]] = field(default_factory=dict)
    error: str = ""

    def names_of(self, uid: str) -> frozenset[PodName]:
        """Return every name under which ``uid`` left logs: at most one, unless the UID is disputed."""
        return frozenset({self.names[uid]}) if uid in self.names else self.disputed.get(uid, frozenset())


def read_pod_logs(directory: Path) -> PodLogs:
    """Read ``directory`` (``/var/log/pods``); never raises."""
    try:
        with os.scandir(directory) as entries:
            found = [entry.name for entry in islice(entries, _MAX_PODS + 1)]
    except FileNotFoundError:
        return PodLogs(error=f"The directory {directory} does not exist, so pods have no UID.")
    except OSError as exc:
        return PodLogs(error=f"{directory} cannot be read, so pods have no UID: {exc.strerror or exc}.")
    if len(found) > _MAX_PODS:
        return PodLogs(
            error=f"{directory} has more than {_MAX_PODS} entries, so pods have no UID: remove those that are no pod's."
        )
    return index_pod_logs(found)


def count_container_starts(directory: Path, pod: Pod) -> Mapping[str, int] | None:
    """Return how often each container of ``pod`` was started, from its logs in ``directory`` (``/var/log/pods``).

    The runtime opens ``<container>/<restarts>.log`` at each start, after ``PreStartContainer`` was answered. A
    container directory without logs is included with 0 starts. None when the pod's UID is unknown, or when its
    directory does not exist or cannot be read.
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
    """Index directory names; names in another format are not the kubelet's and are ignored."""
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
