"""A pod's processes by its cgroups: what the kernel itself keeps, and no process can leave without privilege.

An answer "nobody" is what lets the next tenant in, so it is given only on evidence: the pod's cgroup is gone, or the
kernel says that nothing populates it, or every process listed was looked at and is dead.
"""

from __future__ import annotations

import asyncio
import errno
import os
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from scrubber.adapters.containers.ending import Proof, Roll, end, strike
from scrubber.adapters.containers.hierarchy import hierarchy_of
from scrubber.adapters.containers.paths import kubepods_below, pod_directories, pod_uid_in, usable_uid
from scrubber.adapters.containers.procfs import Proc, boot_ticks
from scrubber.domain.assignment import Pod, Process
from scrubber.domain.errors import Unreadable

__all__ = ["CgroupContainers"]

_REMEMBERED_PODS = 512
_MOST_CGROUPS = 4096  # of one pod: who can make cgroups could otherwise make every look take seconds
_LOOKS = 50  # how often a pod that changes under our eyes is looked at again, 2 ms apart
_PAUSE = 0.002

_T = TypeVar("_T")


class CgroupContainers:
    """:class:`scrubber.ports.containers.Containers` by cgroups, v2 or v1.

    Args:
        root: directory of a cgroup hierarchy below which the kubelet keeps ``kubepods`` (:func:`discover_root`).
        proc: the node's proc file system; the service must be in the node's PID namespace.

    Raises:
        BadConfiguration: ``root`` is not inside a mounted cgroup hierarchy.
    """

    def __init__(self, root: Path, *, proc: Path = Path("/proc")) -> None:
        self._hierarchy = hierarchy_of(root, (proc / "self" / "mountinfo").read_text())
        self._root = self._hierarchy.root
        self._proc = Proc(proc)
        self._directories: OrderedDict[str, Path] = OrderedDict()
        self._rolls: OrderedDict[str, Roll] = OrderedDict()

    async def processes(self, pod: Pod) -> tuple[Process, ...]:
        roll = await self.roll(pod)
        _remember(self._rolls, _uid(pod), roll)
        return roll.processes

    async def pod_uid_of(self, pid: int) -> str | None:
        return self._uid_of(pid)

    async def end(self, pod: Pod, leftovers: Iterable[Process], deadline: float) -> tuple[Process, ...]:
        return await end(self, self._proc, pod, leftovers, deadline, self._rolls.get(_uid(pod)))

    def not_covered(self) -> tuple[str, ...]:
        return ()

    # --- what ending asks (ending.Surroundings) ---

    async def roll(self, pod: Pod) -> Roll:
        """Everybody in ``pod`` now; looks again while the pod changes under our eyes.

        Raises:
            Unreadable: the cgroups cannot be read, or say that somebody is there whom nobody can find.
        """
        uid = _uid(pod)
        for _ in range(_LOOKS):
            tick = boot_ticks()
            found = self._look(uid)
            if found is not None:
                return Roll(tick, found)
            await asyncio.sleep(_PAUSE)
        raise Unreadable(
            f"The cgroup of pod {uid} holds processes that cannot be found in {self._proc.root}: "
            "run the service in the node's PID namespace, as root."
        )

    def holds(self, pod: Pod, pid: int) -> bool:
        return self._uid_of(pid) == pod.uid

    def end_whole(self, pod: Pod, container: str, proof: Proof) -> bool:
        directory = self._directory_of(_uid(pod))
        if directory is None:
            return False
        cgroup = directory / container
        switch = self._kill_switch(cgroup)
        if switch is not None:
            members = self._all_proved(cgroup, proof)
            if not members or not _write(switch, "1"):
                return False
            for process in members:
                # cgroup.kill signals first threads only: where that one is dead, the others live on (seen on 6.18).
                strike(self, self._proc, pod, process)
            return True
        with self._frozen(cgroup, proof) as frozen:
            struck: set[Process] = set()
            while frozen:
                # Freezing takes a moment, and a fork that was under way still appears; it is frozen from birth.
                fresh = set(self._members(cgroup, container) or ()) - struck
                if not fresh or not proof.covers(tuple(fresh)):
                    break
                for process in fresh:
                    strike(self, self._proc, pod, process)
                struck |= fresh
            return bool(struck)

    # --- reading ---

    def _look(self, uid: str) -> tuple[Process, ...] | None:
        """One look at the pod; None when it changed meanwhile, so that nothing can be concluded."""
        directory = self._directory_of(uid)
        if directory is None:
            self._refuse_another_hierarchy(uid)
            return ()
        if self._hierarchy.version == 2 and _populated(directory) is False:
            return ()
        found = self._members(directory, "", deep=False)
        for cgroup in _children(directory):
            members = self._members(cgroup, cgroup.name)
            if found is None or members is None:
                return None
            found += members
        return None if found is None else tuple(sorted(set(found)))

    def _directory_of(self, uid: str) -> Path | None:
        known = self._directories.get(uid)
        if known is not None and known.is_dir():
            return known
        self._directories.pop(uid, None)
        try:
            os.listdir(self._root)
            kubepods = kubepods_below(self._root)
        except OSError as exc:
            raise Unreadable(f"The cgroups at {self._root} cannot be read: {exc.strerror or exc}.") from exc
        for base in kubepods:
            for directory in pod_directories(base, uid):
                if directory.is_dir():
                    _remember(self._directories, uid, directory)
                    return directory
        return None

    def _refuse_another_hierarchy(self, uid: str) -> None:
        """A root without any pod may be the wrong root; then, and only then, every process is asked."""
        if kubepods_below(self._root):
            return
        for pid in self._proc.pids():
            if self._uid_of(pid) == uid:
                raise Unreadable(
                    f"Process {pid} belongs to pod {uid}, but there is no pod below {self._root}: "
                    "name the cgroup hierarchy that the kubelet uses."
                )

    def _members(self, cgroup: Path, container: str, *, deep: bool = True) -> list[Process] | None:
        """The living processes of ``cgroup`` (``deep``: and of all below it); None when another look is needed.

        "Nobody" needs more than a list in which nobody was found alive: a process that forks and exits, or moves
        between two cgroups below, hides from lists. It does not hide from the kernel's count.
        """
        found: list[Process] = []
        lost = False
        for directory in _tree(cgroup) if deep else (cgroup,):
            for pid in _pids(directory):
                if pid == 0:
                    raise Unreadable(
                        f"{directory} holds processes of another PID namespace: run the service in the node's own."
                    )
                stat = self._proc.living(pid)
                if stat is not None:
                    found.append(Process(pid, stat.started, container))
                elif _exists(pid) and self._proc.stat(pid) is None:
                    return None  # it is there, and we may not see it
                else:
                    lost = True
        if not found and (lost or (deep and self._hierarchy.version == 2 and _populated(cgroup))):
            return None
        return found

    def _all_proved(self, cgroup: Path, proof: Proof) -> list[Process]:
        """Everybody in ``cgroup`` if they are proved one and all; else nobody."""
        for _ in range(_LOOKS):
            members = self._members(cgroup, cgroup.name)
            if members is not None:
                return members if proof.covers(members) else []
        return []

    def _uid_of(self, pid: int) -> str | None:
        stat = self._proc.living(pid)
        text = self._proc.cgroup(stat) if stat is not None else None
        if text is None:
            return None
        return pod_uid_in(text, controllers=self._hierarchy.controllers, below=self._hierarchy.below)

    def _kill_switch(self, cgroup: Path) -> Path | None:
        """The file that kills a whole cgroup, forks under way included; v2 since Linux 5.14."""
        switch = cgroup / "cgroup.kill"
        return switch if self._hierarchy.version == 2 and switch.exists() else None

    @contextmanager
    def _frozen(self, cgroup: Path, proof: Proof) -> Iterator[bool]:
        """Stop ``cgroup`` from forking while its processes are signalled; yields whether that was possible.

        Nothing but proved leftovers is ever frozen, and what was frozen is thawed whatever happens: a v1 process dies
        of its signal only then.
        """
        if self._hierarchy.version == 2:
            switch, stop, go = cgroup / "cgroup.freeze", "1", "0"
        elif self._hierarchy.freezer is not None:
            switch = self._hierarchy.freezer / cgroup.relative_to(self._root) / "freezer.state"
            stop, go = "FROZEN", "THAWED"
        else:
            yield False
            return
        if not switch.exists() or not self._all_proved(switch.parent, proof):
            yield False
            return
        frozen = _write(switch, stop)
        try:
            yield frozen
        finally:
            if frozen:
                _write(switch, go)


def _uid(pod: Pod) -> str:
    if pod.uid is None or not usable_uid(pod.uid):
        raise Unreadable(f"The processes of pod {pod.namespace}/{pod.name} cannot be told: its UID is {pod.uid!r}.")
    return pod.uid


def _remember(memory: OrderedDict[str, _T], uid: str, value: _T) -> None:
    memory[uid] = value
    memory.move_to_end(uid)
    while len(memory) > _REMEMBERED_PODS:
        memory.popitem(last=False)


def _populated(cgroup: Path) -> bool | None:
    """Whether any living process is in the cgroup or below it; None when the kernel does not say."""
    try:
        words = (cgroup / "cgroup.events").read_text().split()
    except FileNotFoundError:
        return None if cgroup.is_dir() else False
    except OSError as exc:
        if exc.errno == errno.ENODEV:
            return False
        raise Unreadable(f"{cgroup} cannot be read: {exc.strerror or exc}.") from exc
    events = dict(zip(words[::2], words[1::2], strict=False))
    return {"0": False, "1": True}.get(events.get("populated", ""))


def _children(cgroup: Path) -> list[Path]:
    try:
        with os.scandir(cgroup) as entries:
            return [Path(entry.path) for entry in entries if entry.is_dir(follow_symlinks=False)]
    except FileNotFoundError:
        return []
    except OSError as exc:
        raise Unreadable(f"{cgroup} cannot be read: {exc.strerror or exc}.") from exc


def _tree(cgroup: Path) -> Iterator[Path]:
    waiting, seen = [cgroup], 0
    while waiting:
        seen += 1
        if seen > _MOST_CGROUPS:
            raise Unreadable(f"{cgroup} has more than {_MOST_CGROUPS} cgroups below it: delete the pod that made them.")
        directory = waiting.pop()
        yield directory
        waiting += _children(directory)


def _pids(cgroup: Path) -> list[int]:
    try:
        return [int(word) for word in (cgroup / "cgroup.procs").read_text().split()]
    except FileNotFoundError:
        return []
    except OSError as exc:
        if exc.errno == errno.ENODEV:
            return []  # removed while it was read, and only an empty cgroup can be removed
        if exc.errno == errno.EOPNOTSUPP:
            return []  # threads only; their processes are listed by the cgroup above
        raise Unreadable(f"{cgroup}/cgroup.procs cannot be read: {exc.strerror or exc}.") from exc


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _write(file: Path, text: str) -> bool:
    try:
        file.write_text(text)
    except OSError:
        return False  # gone, or a read-only mount: the processes are then signalled one by one, and looked at again
    return True
