"""The rule that decides whether a list from PodResources is trusted. Pure.

For a while after its start a kubelet returns an empty or short list, although containers continue to run (43 s were
observed while the API server was unreachable). Trusting it would make legitimate processes look like leftovers. So
after each known start, a list must prove itself before the absence of a pod counts.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from scrubber.domain.assignment import Trust

__all__ = ["ListAttempt", "SocketIdentity", "TrustState", "TrustVerdict", "judge_trust"]


@dataclass(frozen=True, slots=True)
class SocketIdentity:
    """The identity of a socket. Inode numbers are reused immediately, so the creation time is part of it.

    Attributes:
        created_ns: modification time of the socket file. ``bind`` sets it; use and changes of mode, owner or label do
            not change it (they change ``st_ctime``). ``touch`` does, and then the socket counts as another one, which
            is the safe error.
        age: seconds since that time, by the wall clock; not part of the identity.
    """

    inode: int
    created_ns: int
    age: float = 0.0

    def is_same_socket(self, other: SocketIdentity) -> bool:
        return (self.inode, self.created_ns) == (other.inode, other.created_ns)


@dataclass(frozen=True, slots=True)
class ListAttempt:
    """One attempt to read the list.

    Attributes:
        started_at: monotonic seconds.
        socket: None when there was none.
        pod_count: number of listed pods; None when the list could not be read.
        missing_pods: pods that the checkpoint still assigns our devices, whose log directories exist, and that the list
            lacks.
        checkpoint_unreliable: whether the checkpoint exists and could not be read, or is not this kubelet's, so that
            ``missing_pods`` proves nothing.
        answered: whether the kubelet that owns the socket answered, even if only to reject the request as one too many.
        failure: message why the list could not be read.
    """

    started_at: float
    socket: SocketIdentity | None
    pod_count: int | None = None
    missing_pods: tuple[str, ...] = ()
    checkpoint_unreliable: bool = False
    answered: bool = False
    failure: str = ""


@dataclass(frozen=True, slots=True)
class TrustState:
    """State kept between two readings.

    Attributes:
        socket: the last one seen; None before the first.
        untrusted_since: monotonic seconds of the kubelet's last known start, while its lists have not proved themselves
            since; None once they have.
    """

    socket: SocketIdentity | None = None
    untrusted_since: float | None = None
    queried_before: bool = False


@dataclass(frozen=True, slots=True)
class TrustVerdict:
    """The verdict, a message if it is not "trusted", and the state to keep."""

    trust: Trust
    untrusted_reason: str
    state: TrustState


# See docs/decisions/0007-when-the-kubelets-list-is-trusted.md.
def judge_trust(state: TrustState, attempt: ListAttempt, *, restart_grace: float) -> TrustVerdict:
    """Judge one attempt, given the previous state.

    - Not read: ``UNREADABLE``; the next list must prove itself, because the kubelet may have restarted meanwhile. The
      exception is a kubelet with the same socket that was busy: what it has proved remains valid.
    - After a start (another socket, a failed attempt, or a socket younger than ``restart_grace`` seconds at the first
      query): an empty list proves itself only by age (``restart_grace`` seconds), and not at all while the checkpoint
      contains pods that still exist. A list with pods proves itself when it lacks none of those, or by age.
    - Once proved, every list of the same kubelet is trusted, empty or not.
    """
    if attempt.pod_count is None or attempt.socket is None:
        known = state.socket is not None and attempt.socket is not None and state.socket.is_same_socket(attempt.socket)
        if attempt.answered and known:
            return TrustVerdict(Trust.UNREADABLE, attempt.failure, state)
        waiting = TrustState(attempt.socket or state.socket, attempt.started_at, queried_before=True)
        return TrustVerdict(Trust.UNREADABLE, attempt.failure, waiting)

    since = state.untrusted_since
    if not state.queried_before:
        # A wall clock that was set back yields a negative age: treat it as zero.
        age = max(attempt.socket.age, 0.0)
        since = attempt.started_at - age if age < restart_grace else None
    elif state.socket is None or not state.socket.is_same_socket(attempt.socket):
        since = attempt.started_at
    now = TrustState(attempt.socket, since, queried_before=True)
    if since is None:
        return TrustVerdict(Trust.TRUSTED, "", now)

    settled = attempt.started_at - since >= restart_grace
    complete = not attempt.missing_pods and not attempt.checkpoint_unreliable
    if (complete and attempt.pod_count) or (settled and (attempt.pod_count or not attempt.missing_pods)):
        return TrustVerdict(Trust.TRUSTED, "", replace(now, untrusted_since=None))
    return TrustVerdict(Trust.EMPTY_AFTER_RESTART, _untrusted_message(attempt, since, restart_grace), now)


def _untrusted_message(seen: ListAttempt, since: float, settle: float) -> str:
    began = f"The kubelet started, or could not be reached, {seen.started_at - since:.0f} s ago, and "
    if seen.missing_pods:
        return f"{began}its list lacks {', '.join(seen.missing_pods)}, whose devices its checkpoint still contains."
    if seen.checkpoint_unreliable:
        return f"{began}its checkpoint cannot be read, so its list is trusted after {settle:.0f} s only."
    return f"{began}lists no pod yet; an empty list is trusted after {settle:.0f} s."
