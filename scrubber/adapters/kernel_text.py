"""How text that the kernel writes is read: its lines, its fields, a process's ``stat`` and ``cgroup``.

The kernel ends a line with ``\\n`` and separates fields with spaces or tabs. Everything else in a line may be a name
that a tenant chose: a cgroup, a mount point, a command. Python's own tools know more line ends and more whitespace:
``splitlines()``, ``split()``, ``strip()``, ``\\s`` and text mode also act on carriage returns, form feeds, U+0085, U+00A0
or U+2028, so a name could forge a line or a field. Therefore kernel text stays ``bytes`` until it is split here, and names
become ``str`` as the file system's names do (:func:`os.fsdecode`), whatever bytes they hold.

``/proc/PID/stat`` tells a process from a later one of the same PID, and two adapters signal processes by what they read
here. Standard library and errors only, because children read it too.
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
    """The fields of ``/proc/PID/stat``, or of a thread's, that are used here.

    Attributes:
        started: clock ticks since boot.
        exiting: it is ending, and may stay at that for long; it has no files and no memory of its own any more, or soon.
        threads: of the process, by the kernel's own count; one that has died and was not waited for counts as well.
        environment_range: where the environment lies in memory (changes with every exec); (0, 0) when there is none or it
            may not be seen.
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
        """Whether this thread runs no more; others of its process may."""
        return self.state in ("Z", "X")

    @property
    def has_exited(self) -> bool:
        """Whether nothing of the process runs any more; of a process, not of a thread.

        Not asked by listing threads: one that makes the next and ends is in no list that is still true when it is read.
        """
        return self.is_dead and self.threads <= 1

    @property
    def has_empty_environment(self) -> bool:
        """Whether the environment looks as if the process had been given none, rather than none yet."""
        start, end = self.environment_range
        return start == end != 0


def parse_stat(data: bytes) -> ProcStat:
    """Read the text of ``/proc/PID/stat``. A command name may hold spaces and brackets: the last ``)`` ends it.

    Raises:
        Unreadable: it does not look like that.
    """
    head, _, tail = data.rpartition(b")")
    fields = fields_in(tail.removesuffix(b"\n"))
    try:
        flags = number_in(fields[6])
        return ProcStat(
            pid=number_in(head.partition(b" ")[0]),
            state=fields[0].decode("ascii"),
            parent=number_in(fields[1]),
            started=number_in(fields[19]),
            kernel_thread=bool(flags & _KERNEL_THREAD),
            exiting=bool(flags & _EXITING),
            threads=number_in(fields[17]),
            environment_range=(number_in(fields[47]), number_in(fields[48])),
        )
    except (IndexError, ValueError) as exc:
        raise Unreadable(f"The kernel's description of a process makes no sense: {data[:80]!r}.") from exc


def cgroup_paths(data: bytes) -> Mapping[str, str]:
    """Return a process's path in each cgroup hierarchy, from the text of ``/proc/PID/cgroup``.

    The key is what the kernel writes for the hierarchy: ``""`` for v2, ``pids`` or ``cpu,cpuacct`` or ``name=systemd`` for v1.

    Raises:
        Unreadable: A line is not of the kernel's form, or two lines are about one hierarchy. A kernel before 5.13 lets a v1
            cgroup be renamed to a name with a line break, and which of two lines is its own cannot be known then.
    """
    paths: dict[str, str] = {}
    seen: set[bytes] = set()
    for line in lines_in(data):
        number, names, path = (*line.split(b":", 2), b"", b"")[:3]
        hierarchy = {b"number " + number, *names.split(b",")}
        if not (number.isdigit() and path.startswith(b"/") and (number == b"0") == (not names)) or hierarchy & seen:
            raise Unreadable(
                "The cgroups of a process cannot be told: a line of its /proc/PID/cgroup is not the kernel's, so a cgroup's "
                "name holds a line break. Find that cgroup and remove it; Linux 5.13 and newer refuse such names."
            )
        seen |= hierarchy
        paths[os.fsdecode(names)] = os.fsdecode(path)
    return paths


def lines_in(data: bytes) -> list[bytes]:
    """Return the lines of a kernel text, without their ends."""
    return data.removesuffix(b"\n").split(b"\n") if data else []


def fields_in(line: bytes) -> list[bytes]:
    """Return the fields of a line in which the kernel aligns them with spaces or tabs."""
    return [field for field in _SEPARATOR.split(line) if field]


def value_in(data: bytes) -> str:
    """Return what a file with one value on one line says, as most of sysfs and every PID file have it."""
    return data.partition(b"\n")[0].strip(b" \t").decode("ascii", "replace")


def number_in(field: bytes) -> int:
    """Return the decimal number that ``field`` is, and nothing but is: no sign, no underscore, no other script's digits.

    Raises:
        ValueError: It is something else.
    """
    if not field.isdigit():
        raise ValueError(f"{field[:80]!r} is not a decimal number")
    return int(field)
