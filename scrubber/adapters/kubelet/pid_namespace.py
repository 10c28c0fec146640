"""Whether the service is in the node's PID namespace: without that its witnesses are blind, and nothing says so.

The driver names whoever uses a GPU by PID, the walk over ``/proc`` sees the processes of one namespace and of those
below it, and a process is signalled by its PID. In a PID namespace of its own, as a pod without ``hostPID`` has, the
service sees itself and nobody else: every device looks unused.

What can tell the node's namespace from another, and why these two:

- **The initial one has a fixed inode number**, which no other can have (``PROC_PID_INIT_INO``, include/linux/proc_ns.h).
  Whoever is in it sees every process of the machine. Nothing else needs to be known then: the service may start long
  before the kubelet.
- **Elsewhere the kubelet is the witness.** A node may itself be a container (kind, k3d, LXD), whose namespace is not the
  initial one. There the kubelet has a PID for us if, and only if, its namespace is ours or below ours; and its pods' are
  below its own. The kernel says which (``SO_PEERCRED``: 0 is "none of yours"). While no kubelet answers, nothing is proved.

What cannot: PID 1's name or cgroup (a pod may run systemd, and a cgroup namespace shows ``/`` to whoever is in it);
kernel threads (absent in kind, too); the PIDs that NVML lists (none is in use while the service starts).

Residual: in a node that is a container, processes outside it are seen by nobody in it. Memory that they use is.
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
    """Why this is not the node's PID namespace, or may not be, and what to do."""

    message: str
    remedy: str = _REMEDY


@dataclass(frozen=True, slots=True)
class PidNamespaceView:
    """What a process sees of PID namespaces.

    Attributes:
        pid: its PID as it knows it itself.
        proc_pids: its PIDs as ``/proc`` shows them: in the namespace that ``/proc`` is of first, then in each one below,
            down to its own; empty when ``/proc`` does not have it.
        namespace_inode: inode number of its PID namespace; None when that cannot be read.
        kubelet_pid: PID of whoever listens on the kubelet's PodResources socket: 0 when it has none in this namespace; None
            when nobody listens.
    """

    pid: int
    proc_pids: tuple[int, ...]
    namespace_inode: int | None
    kubelet_pid: int | None


def find_problem(view: PidNamespaceView) -> PidNamespaceProblem | None:
    """Whether this is the node's PID namespace: None when that is certain."""
    if view.proc_pids != (view.pid,):
        return PidNamespaceProblem(
            "/proc shows another PID namespace than this one, so the PIDs in it mean other processes here."
        )
    if view.namespace_inode == _INITIAL:
        return None
    if view.kubelet_pid is None:
        return PidNamespaceProblem(
            "This is not the machine's own PID namespace, and no kubelet answers that would show it to be the node's.",
            f"If the node is a container, start its kubelet first. If not: {_REMEDY}",
        )
    if view.kubelet_pid == 0:
        return PidNamespaceProblem(
            "The kubelet is not in this PID namespace, so neither are its pods: whoever uses a GPU would not be seen."
        )
    return None


def read_pid_namespace(pod_resources_socket: Path, proc: Path = Path("/proc")) -> PidNamespaceView:
    """What this process sees; raises nothing. ``proc`` is the proc file system that is read for everything else."""
    return PidNamespaceView(os.getpid(), _pids_in(proc), _namespace_in(proc), _kubelet_pid(pod_resources_socket))


def require_node_pid_namespace(pod_resources_socket: Path) -> None:
    """See that this process is in the node's PID namespace; asked once, for nobody leaves the one he was born in.

    Raises:
        InvalidConfiguration: it is not, or nothing shows that it is.
    """
    doubt = find_problem(read_pid_namespace(pod_resources_socket))
    if doubt is not None:
        raise InvalidConfiguration(
            f"The service does not start outside the node's PID namespace. {doubt.message} {doubt.remedy}"
        )


def _pids_in(proc: Path) -> tuple[int, ...]:
    try:
        lines = lines_in((proc / "self" / "status").read_bytes())
    except OSError:
        return ()
    pids = next((line.removeprefix(b"NSpid:") for line in lines if line.startswith(b"NSpid:")), b"")
    return tuple(number_in(each) for each in fields_in(pids))


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
