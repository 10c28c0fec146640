"""What ``/proc/PID/stat`` says, read in one place: it tells a process from a later one of the same PID.

Two adapters signal processes by what they read here. Standard library and errors only, because children read it too.
"""

from __future__ import annotations

from dataclasses import dataclass

from scrubber.domain.errors import Unreadable

__all__ = ["Stat", "parse_stat"]

_KERNEL_THREAD = 0x00200000  # PF_KTHREAD
_EXITING = 0x00000004  # PF_EXITING


@dataclass(frozen=True, slots=True)
class Stat:
    """The fields of ``/proc/PID/stat``, or of a thread's, that are used here.

    Attributes:
        started: clock ticks since boot.
        exiting: it is ending, and may stay at that for long; it has no files and no memory of its own any more, or soon.
        threads: of the process, by the kernel's own count; one that has died and was not waited for counts as well.
        environment: where the environment lies in memory (changes with every exec); (0, 0) when there is none or it
            may not be seen.
    """

    pid: int
    state: str
    parent: int
    started: int
    kernel_thread: bool
    exiting: bool
    threads: int
    environment: tuple[int, int]

    @property
    def identity(self) -> tuple[int, int]:
        return (self.pid, self.started)

    @property
    def dead(self) -> bool:
        """Whether this thread runs no more; others of its process may."""
        return self.state in ("Z", "X")

    @property
    def over(self) -> bool:
        """Whether nothing of the process runs any more; of a process, not of a thread.

        Not asked by listing threads: one that makes the next and ends is in no list that is still true when it is read.
        """
        return self.dead and self.threads <= 1

    @property
    def given_empty(self) -> bool:
        """Whether the environment looks as if the process had been given none, rather than none yet."""
        start, end = self.environment
        return start == end != 0


def parse_stat(data: bytes) -> Stat:
    """Read the text of ``/proc/PID/stat``. A command name may hold spaces and brackets: the last ``)`` ends it.

    Raises:
        Unreadable: it does not look like that.
    """
    head, _, tail = data.rpartition(b")")
    fields = tail.split()
    try:
        pid = int(head.split(b" ", 1)[0])
        return Stat(
            pid=pid,
            state=fields[0].decode("ascii"),
            parent=int(fields[1]),
            started=int(fields[19]),
            kernel_thread=bool(int(fields[6]) & _KERNEL_THREAD),
            exiting=bool(int(fields[6]) & _EXITING),
            threads=int(fields[17]),
            environment=(int(fields[47]), int(fields[48])),
        )
    except (IndexError, ValueError) as exc:
        raise Unreadable(f"The kernel's description of a process makes no sense: {data[:80]!r}.") from exc
