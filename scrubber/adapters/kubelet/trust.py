"""How far a list of PodResources can be believed: one pure rule.

An empty or short list is what a kubelet answers for a while after its start (43 s were seen while the API server was
away), when containers run on unchanged. Believing it would make rightful processes look like leftovers. So after a
start, as far as we can know of one, a list must prove itself before an absence in it counts.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from scrubber.domain.assignment import Trust

__all__ = ["Judgement", "Observation", "SocketIdentity", "Standing", "judge"]


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

    def same_as(self, other: SocketIdentity) -> bool:
        return (self.inode, self.created_ns) == (other.inode, other.created_ns)


@dataclass(frozen=True, slots=True)
class Observation:
    """One attempt to read the list.

    Attributes:
        at: monotonic seconds.
        socket: None when there was none.
        pods: how many pods the list has; None when it could not be read.
        missing: pods that the checkpoint still assigns our devices, whose log directories are there, and that the
            list lacks.
        uncertain: the checkpoint was there and could not be read, or is not this kubelet's, so ``missing`` says nothing.
        answered: the kubelet that owns the socket answered, if only that it is asked too often.
        failure: why the list could not be read, in a sentence.
    """

    at: float
    socket: SocketIdentity | None
    pods: int | None = None
    missing: tuple[str, ...] = ()
    uncertain: bool = False
    answered: bool = False
    failure: str = ""


@dataclass(frozen=True, slots=True)
class Standing:
    """What is remembered between two readings.

    Attributes:
        socket: the last one seen; None before the first.
        unproved_since: monotonic seconds of the kubelet's last start, as far as we can know of it, while its lists
            have not proved themselves since; None once they have.
    """

    socket: SocketIdentity | None = None
    unproved_since: float | None = None
    asked_before: bool = False


@dataclass(frozen=True, slots=True)
class Judgement:
    """The verdict, a sentence where it is not "trusted", and what to remember."""

    trust: Trust
    detail: str
    standing: Standing


def judge(standing: Standing, seen: Observation, *, settle: float) -> Judgement:
    """Judge one attempt in the light of what came before.

    - Not read: ``UNREADABLE``; the next list must prove itself, for the kubelet may have restarted meanwhile. Unless
      it was the same kubelet that had no time: what it proved stands.
    - After a start (another socket, an attempt that failed, or a socket younger than ``settle`` seconds when we
      first ask): an empty list proves itself by age alone (``settle`` seconds), and not even so while the checkpoint
      names pods that are still there. A list with pods proves itself when it lacks none of those, or by age.
    - Once proved, every list of the same kubelet is trusted, empty or not.
    """
    if seen.pods is None or seen.socket is None:
        known = standing.socket is not None and seen.socket is not None and standing.socket.same_as(seen.socket)
        if seen.answered and known:
            return Judgement(Trust.UNREADABLE, seen.failure, standing)
        waiting = Standing(seen.socket or standing.socket, seen.at, asked_before=True)
        return Judgement(Trust.UNREADABLE, seen.failure, waiting)

    since = standing.unproved_since
    if not standing.asked_before:
        # A wall clock that was set back makes an age below zero: as young as can be.
        age = max(seen.socket.age, 0.0)
        since = seen.at - age if age < settle else None
    elif standing.socket is None or not standing.socket.same_as(seen.socket):
        since = seen.at
    now = Standing(seen.socket, since, asked_before=True)
    if since is None:
        return Judgement(Trust.TRUSTED, "", now)

    settled = seen.at - since >= settle
    complete = not seen.missing and not seen.uncertain
    if (complete and seen.pods) or (settled and (seen.pods or not seen.missing)):
        return Judgement(Trust.TRUSTED, "", replace(now, unproved_since=None))
    return Judgement(Trust.EMPTY_AFTER_RESTART, _doubt(seen, since, settle), now)


def _doubt(seen: Observation, since: float, settle: float) -> str:
    began = f"The kubelet started, or could not be asked, {seen.at - since:.0f} s ago, and "
    if seen.missing:
        return f"{began}its list lacks {', '.join(seen.missing)}, whose devices its checkpoint still holds."
    if seen.uncertain:
        return f"{began}its checkpoint cannot be read, so its list is believed after {settle:.0f} s only."
    return f"{began}lists no pod yet; an empty list is believed after {settle:.0f} s."
