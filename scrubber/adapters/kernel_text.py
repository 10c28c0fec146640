"""Parsing of text that the kernel writes: lines, fields, and the ``stat`` and ``cgroup`` files of a process.

The kernel ends a line with ``\\n`` and separates fields with spaces or tabs. Everything else in a line may be a name
that a tenant chose: a cgroup, a mount point, a command. Python's own functions accept more line ends and more
whitespace: ``splitlines()``, ``split()``, ``strip()``, ``\\s`` and text mode also act on carriage returns, form feeds,
U+0085, U+00A0 or U+2028, so a name could forge a line or a field. Therefore kernel text stays ``bytes`` until it is
split here, and names are decoded to ``str`` like file names (:func:`os.fsdecode`), regardless of the bytes they
contain.

``/proc/PID/stat`` distinguishes a process from a later one with the same PID, and two adapters signal processes based
on what they read here. This module imports only the standard library and the errors, because child processes import it
too.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

from scrubber.domain.errors import Unreadable

__all__ = ["ProcStat", "cgroup_paths", "fields_in", "lines_in", "number_in", "parse_stat", "value_in"]

_SEPARATOR = re.compile(rb"[ \t]+")

_KERNEL_THREAD = 0x00200000  # PF_KTHREAD
_EXITING = 0x00000004  # PF_EXITING


@dataclass(frozen=True, slots=True)
class ProcStat:
    """The fields of ``/proc/PID/stat`` (or of a thread's ``stat``) that this project uses.

    Attributes:
        started: start time in clock ticks since boot.
        exiting: whether the process is exiting, which may take long; it has already released its files and memory, or
            soon will.
        threads: the kernel's count of the threads of the process, including dead threads that have not been reaped.
        environment_range: start and end address of the environment in memory (changes with every exec); (0, 0) when
            there is none or it may not be read.
    """

    pid: int
    state: str
    parent: int
    started: int
    kernel_thread: bool
    exiting: bool
    threads: int
    environment_range: tuple[int, int]

    @property
    def identity(self) -> tuple[int, int]:
        return (self.pid, self.started)

    @property
    def is_dead(self) -> bool:
        """Whether this thread is dead; other threads of its process may still run."""
        return self.state in ("Z", "X")

    @property
    def has_exited(self) -> bool:
        """Whether all threads of the process have ended; valid for the ``stat`` of a process, not of a thread.

        This does not list the threads: a thread that creates the next one and ends is missing from every list by the
        time the list is read.
        """
        return self.is_dead and self.threads <= 1

    @property
    def has_empty_environment(self) -> bool:
        """Whether the process was started with an empty environment, rather than not having received one yet."""
        start, end = self.environment_range
        return start == end != 0


def parse_stat(data: bytes) -> ProcStat:
    """Parse the text of ``/proc/PID/stat``. A command name may contain spaces and brackets: the last ``)`` ends it.

    Raises:
        Unreadable: The text does not have this format.
    """
    head, _, tail = data.rpartition(b")")
    fields = fields_in(tail.removesuffix(b"\n"))
    try:
        state, flags = fields[0].decode("ascii"), number_in(fields[6])
        if len(state) != 1 or not state.isalpha():
            raise ValueError("the state is no letter")
        return ProcStat(
            pid=number_in(head.partition(b" ")[0]),
            state=state,
            parent=number_in(fields[1]),
            started=number_in(fields[19]),
            kernel_thread=bool(flags & _KERNEL_THREAD),
            exiting=bool(flags & _EXITING),
            threads=number_in(fields[17]),
            environment_range=(number_in(fields[47]), number_in(fields[48])),
        )
    except (IndexError, ValueError) as exc:
        raise Unreadable(f"The kernel's description of a process is invalid: {data[:80]!r}.") from exc


def cgroup_paths(data: bytes) -> Mapping[str, str]:
    """Return a process's path in each cgroup hierarchy, from the text of ``/proc/PID/cgroup``.

    The key is the kernel's name for the hierarchy: ``""`` for v2; ``pids``, ``cpu,cpuacct`` or ``name=systemd`` for v1.

    Raises:
        Unreadable: A line does not have the kernel's format, or two lines describe the same hierarchy. A kernel before
            5.13 allows a v1 cgroup to be renamed to a name with a line break; then it is impossible to know which of
            two lines the kernel wrote.
    """
    paths: dict[str, str] = {}
    seen: set[bytes] = set()
    for line in lines_in(data):
        number, names, path = (*line.split(b":", 2), b"", b"")[:3]
        hierarchy = {b"number " + number, *names.split(b",")}
        if not (number.isdigit() and path.startswith(b"/") and (number == b"0") == (not names)) or hierarchy & seen:
            raise Unreadable(
                "The cgroups of a process cannot be determined: a line of its /proc/PID/cgroup is not in the "
                "kernel's format, so a cgroup's name contains a line break. Find that cgroup and remove it; "
                "Linux 5.13 and newer refuse such names."
            )
        seen |= hierarchy
        paths[os.fsdecode(names)] = os.fsdecode(path)
    return paths


# See docs/decisions/0018-kernel-text-and-cgroups.md.
def lines_in(data: bytes) -> list[bytes]:
    """Return the lines of a kernel text, without line ends."""
    return data.removesuffix(b"\n").split(b"\n") if data else []


def fields_in(line: bytes) -> list[bytes]:
    """Return the fields of a line in which the kernel separates them with spaces or tabs."""
    return [field for field in _SEPARATOR.split(line) if field]


def value_in(data: bytes) -> str:
    """Return the value of a file with a single value on one line, such as most sysfs files and every PID file."""
    return data.partition(b"\n")[0].strip(b" \t").decode("ascii", "replace")


def number_in(field: bytes) -> int:
    """Return the decimal number in ``field``; signs, underscores and digits of other scripts are not accepted.

    Raises:
        ValueError: ``field`` is anything else.
    """
    if not field.isdigit():
        raise ValueError(f"{field[:80]!r} is not a decimal number")
    return int(field)
