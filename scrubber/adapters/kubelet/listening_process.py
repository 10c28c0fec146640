"""Identification of the process behind the kubelet's socket by the kernel, because a path does not prove who listens.

Any process that can write into the directory can put its own socket in place of the kubelet's. The kernel records the
process that makes a socket listen, and reports it to every process that connects (``SO_PEERCRED``, unix(7)).

Guarantee: the process that is checked is the one that is then used. A path may lead elsewhere a moment later, a
descriptor cannot. So the socket file is opened once (``O_PATH``), and every connection is made through that descriptor.
A socket file belongs to one socket for as long as it exists: ``bind`` always creates a new one.
"""

from __future__ import annotations

import errno
import os
import select
import socket
import stat
import struct
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from scrubber.domain.errors import ScrubberError, Unavailable

__all__ = ["ListeningProcess", "PinnedSocket", "PodUidLookup", "listening_process", "reason_not_kubelet"]

PodUidLookup = Callable[[int], Awaitable[str | None]]
"""Returns the UID of the pod that a PID runs in, None when it is in no pod (``Containers.pod_uid_of``)."""

_SO_PEERPIDFD = 77  # include/uapi/asm-generic/socket.h, Linux 6.5


# See docs/decisions/0007-when-the-kubelets-list-is-trusted.md.
class PinnedSocket:
    """The socket that is at ``path`` now, even if another one replaces it later.

    Attributes:
        address: address to connect to while this object is open. Short, regardless of the length of the path.

    Raises:
        Unavailable: The path does not exist, or is not a socket.
    """

    def __init__(self, path: Path) -> None:
        try:
            self._descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
        except OSError as exc:
            raise Unavailable(
                f"The kubelet's PodResources socket {path} does not exist ({exc.strerror or exc}): is the "
                "kubelet running?"
            ) from exc
        self.address = f"/proc/self/fd/{self._descriptor}"
        self.file_stat = os.fstat(self._descriptor)
        if not stat.S_ISSOCK(self.file_stat.st_mode):
            self.close()
            raise Unavailable(f"{path} is not a socket: pass the kubelet's pod-resources/kubelet.sock.")

    def close(self) -> None:
        """Close the descriptor; a second call does nothing."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)


@dataclass(frozen=True, slots=True)
class ListeningProcess:
    """The process that made a socket listen.

    Attributes:
        pid: PID in this service's PID namespace; 0 when it has none there.
        uid: uid in this service's user namespace.
        pidfd: a pidfd of the process; None when it has exited, or is not in this PID namespace.
    """

    pid: int
    uid: int
    pidfd: int | None

    @property
    def is_running(self) -> bool:
        """Whether that very process still runs: if so, everything read about its PID before this call applies to it."""
        if self.pidfd is None:
            return False
        poll = select.poll()
        poll.register(self.pidfd, select.POLLIN)
        return not poll.poll(0)


@contextmanager
def listening_process(address: str) -> Iterator[ListeningProcess]:
    """Connect to the socket at ``address``, query the listening process, and disconnect without sending. Never waits.

    Raises:
        OSError: No process listens, or the accept queue is full.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        probe.connect(address)
        pid, uid, _ = struct.unpack("3i", probe.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        process = _pidfd(probe, pid) if pid > 0 else None
    try:
        yield ListeningProcess(pid, uid & 0xFFFFFFFF, process)
    finally:
        if process is not None:
            os.close(process)


def _pidfd(connection: socket.socket, pid: int) -> int | None:
    try:
        return struct.unpack("i", connection.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD, 4))[0]  # type: ignore[no-any-return]
    except OSError as exc:
        if exc.errno != errno.ENOPROTOOPT:
            return None  # the kernel reports this way that the process has exited
    try:
        # Before Linux 6.5 only the PID is known: if it was reused since, the new process is checked.
        return os.pidfd_open(pid)
    except OSError:
        return None


async def reason_not_kubelet(address: str, *, own_uid: int, pod_uid_of: PodUidLookup | None) -> str:
    """Return why the process that listens at ``address`` cannot be the kubelet, as a predicate; empty if it may be.

    The name of the program is not checked, because any program may use it.

    Args:
        own_uid: the service's uid: in a test setup the kubelet runs as the same user as the service; a real one is
            root.

    Raises:
        OSError: See :func:`listening_process`.
    """
    with listening_process(address) as found:
        if found.pid == 0:
            return (
                "is in a PID namespace that is not visible from here: the service must run in the node's "
                "(hostPID: true in its pod)"
            )
        if found.uid not in (0, own_uid):
            return (
                f"runs as uid {found.uid} (PID {found.pid}), but a kubelet runs as root: check which process "
                "created the socket"
            )
        uid: str | None = None
        if pod_uid_of is not None:
            try:
                uid = await pod_uid_of(found.pid)
            except (ScrubberError, OSError) as exc:
                return f"may belong to a pod: the cgroup of its process {found.pid} cannot be read ({exc})"
        if not found.is_running:
            return (
                f"is not the process that opened the socket: that one (PID {found.pid}) has exited; restart the kubelet"
            )
        if uid is not None:
            return (
                f"belongs to pod {uid} (PID {found.pid}): delete that pod, and restart the kubelet, which "
                "recreates its socket"
            )
        return ""
