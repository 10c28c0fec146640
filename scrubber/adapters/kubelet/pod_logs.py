"""From a pod's name to its UID and back, by the directories that the kubelet makes for its logs.

``<namespace>_<name>_<uid>`` is there before the pod's sandbox is, and stays for a while after the pod. Neither
namespaces nor names hold an underscore.
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
        unreadable: why there is nothing here, in a sentence; empty when the directory could be read.
    """

    uids: Mapping[Name, frozenset[str]] = field(default_factory=dict)
    names: Mapping[str, Name] = field(default_factory=dict)
    unreadable: str = ""


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
    uids: defaultdict[Name, set[str]] = defaultdict(set)
    names: dict[str, Name] = {}
    for entry in entries:
        parts = entry.split("_")
        if len(parts) == 3 and all(parts):
            namespace, name, uid = parts
            uids[namespace, name].add(uid)
            names[uid] = (namespace, name)
    return PodLogs({pod: frozenset(each) for pod, each in uids.items()}, names)
