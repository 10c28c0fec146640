"""How far a list of PodResources can be believed: one pure rule.

An empty or short list is what a kubelet answers for a while after its start (43 s were seen while the API server was
away), when containers run on unchanged. Believing it would make rightful processes look like leftovers. So after a
start, as far as we can know of one, a list must prove itself before an absence in it counts.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from scrubber.domain.assignment import Trust

__all__ = ["ListAttempt", "SocketIdentity", "TrustState", "TrustVerdict", "judge_trust"]


@dataclass(frozen=True, slots=True)
class SocketIdentity:
    """Which socket it was. Inode numbers are reused at once, so the time of its creation counts as well.

    Attributes:
        created_ns: modification time of the socket's file. ``bind`` sets it, and neither use nor a change of mode, owner or
            label does (they change ``st_ctime``). ``touch`` does, and then the socket counts as another: it errs to that side.
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
        pod_count: how many pods the list has; None when it could not be read.
        missing_pods: pods that the checkpoint still assigns our devices, whose log directories are there, and that the
            list lacks.
        checkpoint_unreliable: the checkpoint was there and could not be read, or is not this kubelet's, so ``missing_pods`` says nothing.
        answered: the kubelet that owns the socket answered, if only that it is asked too often.
        failure: why the list could not be read, in a sentence.
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
    """What is remembered between two readings.

    Attributes:
        socket: the last one seen; None before the first.
        untrusted_since: monotonic seconds of the kubelet's last start, as far as we can know of it, while its lists
            have not proved themselves since; None once they have.
    """

    socket: SocketIdentity | None = None
    untrusted_since: float | None = None
    queried_before: bool = False


@dataclass(frozen=True, slots=True)
class TrustVerdict:
    """The verdict, a sentence where it is not "trusted", and what to remember."""

    trust: Trust
    untrusted_reason: str
    state: TrustState


def judge_trust(state: TrustState, attempt: ListAttempt, *, restart_grace: float) -> TrustVerdict:
    """Judge one attempt in the light of what came before.

    - Not read: ``UNREADABLE``; the next list must prove itself, for the kubelet may have restarted meanwhile. Unless
      it was the same kubelet that had no time: what it proved stands.
    - After a start (another socket, an attempt that failed, or a socket younger than ``restart_grace`` seconds when we
      first ask): an empty list proves itself by age alone (``restart_grace`` seconds), and not even so while the checkpoint
      names pods that are still there. A list with pods proves itself when it lacks none of those, or by age.
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
        # A wall clock that was set back makes an age below zero: as young as can be.
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
    began = f"The kubelet started, or could not be asked, {seen.started_at - since:.0f} s ago, and "
    if seen.missing_pods:
        return f"{began}its list lacks {', '.join(seen.missing_pods)}, whose devices its checkpoint still holds."
    if seen.checkpoint_unreliable:
        return f"{began}its checkpoint cannot be read, so its list is believed after {settle:.0f} s only."
    return f"{began}lists no pod yet; an empty list is believed after {settle:.0f} s."
