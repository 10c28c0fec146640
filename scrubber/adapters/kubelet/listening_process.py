"""Who answers on the kubelet's socket: asked of the kernel, because a path says nothing about who is behind it.

Whoever can write into the directory can put a socket of their own in the kubelet's place. The kernel notes the process
that makes a socket listen, and tells it to everybody who connects (``SO_PEERCRED``, unix(7)).

The promise: the process that is asked about is the one that is then spoken to. A path may lead elsewhere a moment
later, a descriptor may not; so the socket's file is opened once (``O_PATH``), and everybody connects through that
descriptor. A socket's file belongs to one socket for as long as it exists: ``bind`` always makes a new one.
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
"""The UID of the pod that a PID runs in, None for nobody's (``Containers.pod_uid_of``)."""

_SO_PEERPIDFD = 77  # include/uapi/asm-generic/socket.h, Linux 6.5


class PinnedSocket:
    """The socket that stands at ``path`` now, whatever stands there later.

    Attributes:
        address: where to connect to it, for as long as this is open. Short, however long the path.

    Raises:
        Unavailable: there is none, or something that is no socket.
    """

    def __init__(self, path: Path) -> None:
        try:
            self._descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
        except OSError as exc:
            raise Unavailable(
                f"The kubelet's PodResources socket {path} is not there ({exc.strerror or exc}): is the kubelet running?"
            ) from exc
        self.address = f"/proc/self/fd/{self._descriptor}"
        self.file_stat = os.fstat(self._descriptor)
        if not stat.S_ISSOCK(self.file_stat.st_mode):
            self.close()
            raise Unavailable(f"{path} is not a socket: name the kubelet's pod-resources/kubelet.sock.")

    def close(self) -> None:
        """Let go of it; the second call does nothing."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)


@dataclass(frozen=True, slots=True)
class ListeningProcess:
    """The process that made a socket listen.

    Attributes:
        pid: in our PID namespace; 0 when it is in none that we see.
        uid: in our user namespace.
        pidfd: a pidfd of it; None when it has ended, or is not in our PID namespace.
    """

    pid: int
    uid: int
    pidfd: int | None

    @property
    def is_running(self) -> bool:
        """Whether that very process still runs: what was read of its PID before this answered was about it."""
        if self.pidfd is None:
            return False
        poll = select.poll()
        poll.register(self.pidfd, select.POLLIN)
        return not poll.poll(0)


@contextmanager
def listening_process(address: str) -> Iterator[ListeningProcess]:
    """Connect to the socket at ``address``, ask who listens, and hang up without a word. Never waits.

    Raises:
        OSError: nobody listens, or so many wait to be accepted that there is no place for one more.
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
            return None  # the kernel's way to say that it has ended
    try:
        # Before Linux 6.5 only the number is known: if it was given to another process since, that one is asked about.
        return os.pidfd_open(pid)
    except OSError:
        return None


async def reason_not_kubelet(address: str, *, own_uid: int, pod_uid_of: PodUidLookup | None) -> str:
    """Why whoever listens at ``address`` cannot be the kubelet, as the rest of a sentence; empty if it may be.

    Not asked: what the program is called, for anybody may call it so.

    Args:
        own_uid: a test bench runs its kubelet as whoever runs the service; a real one is root.

    Raises:
        OSError: see :func:`listening_process`.
    """
    with listening_process(address) as found:
        if found.pid == 0:
            return (
                "is in no PID namespace that is seen from here: the service must run in the node's (hostPID: true in its "
                "pod)"
            )
        if found.uid not in (0, own_uid):
            return (
                f"runs as uid {found.uid} (PID {found.pid}), and a kubelet runs as root: see who put the socket there"
            )
        uid: str | None = None
        if pod_uid_of is not None:
            try:
                uid = await pod_uid_of(found.pid)
            except (ScrubberError, OSError) as exc:
                return f"may live in a pod: the cgroup of its process {found.pid} cannot be read ({exc})"
        if not found.is_running:
            return f"is not the process that opened it: that one (PID {found.pid}) has ended; restart the kubelet"
        if uid is not None:
            return f"lives in pod {uid} (PID {found.pid}): end that pod, and restart the kubelet, which makes its socket anew"
        return ""
