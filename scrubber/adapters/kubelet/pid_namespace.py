"""Check that the service is in the node's PID namespace: otherwise process information is silently incomplete.

The driver reports the users of a GPU by PID, the walk over ``/proc`` sees the processes of one namespace and of those
below it, and a process is signalled by its PID. In a separate PID namespace, such as that of a pod without ``hostPID``,
the service sees only itself: every device looks unused.

Two facts can distinguish the node's namespace from another:

- **The initial namespace has a fixed inode number**, which no other can have (``PROC_PID_INIT_INO``,
  include/linux/proc_ns.h). A process in it sees every process of the machine. Nothing else needs to be known then: the
  service may start long before the kubelet.
- **Otherwise the kubelet is the evidence.** A node may itself be a container (kind, k3d, LXD), whose namespace is not
  the initial one. There the kubelet has a PID visible to this service if, and only if, its namespace is the same or
  below it; and the namespaces of its pods are below the kubelet's. The kernel reports this (``SO_PEERCRED``: 0 means
  "not in your namespace"). While no kubelet answers, nothing is proved.

These cannot: the name or cgroup of PID 1 (a pod may run systemd, and a cgroup namespace shows ``/`` to the processes in
it); kernel threads (absent in kind, too); the PIDs that NVML lists (no device is in use while the service starts).

Residual risk: in a node that is a container, processes outside it are invisible to all processes in it. The memory they
use is visible.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from scrubber.adapters.kernel_text import fields_in, lines_in, number_in
from scrubber.adapters.kubelet.listening_process import PinnedSocket, listening_process
from scrubber.domain.errors import InvalidConfiguration, Unavailable

__all__ = [
    "PidNamespaceProblem",
    "PidNamespaceView",
    "find_problem",
    "read_pid_namespace",
    "require_node_pid_namespace",
]

_INITIAL = 0xEFFFFFFC  # 4026531836
_REMEDY = "Set hostPID: true in the service's pod, or run it on the node itself."


@dataclass(frozen=True, slots=True)
class PidNamespaceProblem:
    """Why this is not, or may not be, the node's PID namespace, and what to do about it."""

    message: str
    remedy: str = _REMEDY


@dataclass(frozen=True, slots=True)
class PidNamespaceView:
    """What a process sees of PID namespaces.

    Attributes:
        pid: its own PID as reported by ``getpid``.
        proc_pids: its PIDs as ``/proc`` shows them: first in the namespace that ``/proc`` belongs to, then in each one
            below, down to its own; empty when ``/proc`` does not contain the process.
        namespace_inode: inode number of its PID namespace; None when it cannot be read.
        kubelet_pid: PID of the process that listens on the kubelet's PodResources socket: 0 when it has none in this
            namespace; None when no process listens.
    """

    pid: int
    proc_pids: tuple[int, ...]
    namespace_inode: int | None
    kubelet_pid: int | None


# See docs/decisions/0016-host-pid-namespace.md.
def find_problem(view: PidNamespaceView) -> PidNamespaceProblem | None:
    """Return why this may not be the node's PID namespace; None when it certainly is."""
    if view.proc_pids != (view.pid,):
        return PidNamespaceProblem(
            "/proc shows another PID namespace than that of this process, so its PIDs refer to other processes."
        )
    if view.namespace_inode == _INITIAL:
        return None
    if view.kubelet_pid is None:
        return PidNamespaceProblem(
            "This is not the host's initial PID namespace, and no kubelet answers that would prove it to be "
            "the node's.",
            f"If the node is a container, start its kubelet first. Otherwise: {_REMEDY}",
        )
    if view.kubelet_pid == 0:
        return PidNamespaceProblem(
            "The kubelet is not in this PID namespace, so neither are its pods: processes that use a GPU "
            "would not be detected."
        )
    return None


def read_pid_namespace(pod_resources_socket: Path, proc: Path = Path("/proc")) -> PidNamespaceView:
    """Return the view of this process; never raises. ``proc`` is the proc file system that is used everywhere else."""
    return PidNamespaceView(os.getpid(), _pids_in(proc), _namespace_in(proc), _kubelet_pid(pod_resources_socket))


def require_node_pid_namespace(pod_resources_socket: Path) -> None:
    """Check that this process is in the node's PID namespace; once is enough, because a process cannot change its own.

    Raises:
        InvalidConfiguration: It is not, or nothing proves that it is.
    """
    doubt = find_problem(read_pid_namespace(pod_resources_socket))
    if doubt is not None:
        raise InvalidConfiguration(
            f"The service does not start outside the node's PID namespace. {doubt.message} {doubt.remedy}"
        )


def _pids_in(proc: Path) -> tuple[int, ...]:
    try:
        lines = lines_in((proc / "self" / "status").read_bytes())
        pids = next((line.removeprefix(b"NSpid:") for line in lines if line.startswith(b"NSpid:")), b"")
        return tuple(number_in(each) for each in fields_in(pids))
    except (OSError, ValueError):
        return ()


def _namespace_in(proc: Path) -> int | None:
    try:
        found = re.fullmatch(r"pid:\[([0-9]+)\]", str((proc / "self" / "ns" / "pid").readlink()))
    except OSError:
        return None
    return int(found[1]) if found is not None else None


def _kubelet_pid(path: Path) -> int | None:
    try:
        pinned = PinnedSocket(path)
    except Unavailable:
        return None
    try:
        with listening_process(pinned.address) as found:
            return found.pid
    except OSError:
        return None
    finally:
        pinned.close()
