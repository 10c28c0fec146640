"""How the containers of a pod begin and end, as changes of the pod's own cgroup that the kernel reports.

A runtime creates one cgroup for each container, directly in the pod's cgroup, and removes it after the container's end;
the kubelet removes the pod's. Only root can do either: cgroups that a tenant may write to are deeper. Source:
inotify(7). cgroupfs reports directories that are created and removed through the file system, which is how runc, crun
and systemd do it, to watches of the parent directory. In v2 it also reports changes of ``cgroup.events``, thus the end of
the last process, to watches of that file.
"""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from scrubber.adapters.inotify import OVERFLOW, Inotify

__all__ = ["CgroupWatcher"]

_EVENTS_FILE = "cgroup.events"
_Change = tuple[Path, str]


class _FirstContainer:
    """A wait for the first directory in ``directories`` whose name is not in ``known``."""

    def __init__(self, directories: Sequence[Path]) -> None:
        self.directories = frozenset(directories)
        self.files: frozenset[Path] = frozenset()
        self.paths = self.directories
        self.known: frozenset[str] = frozenset()
        self.future: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    def note(self, change: _Change) -> None:
        directory, name = change
        if change == OVERFLOW:
            self.future.cancel()  # the first creation may be among the events that the kernel dropped
        elif name and directory in self.directories and name not in self.known:
            self.future.set_result(name)


class _End:
    """A wait for the removal of one of ``pods`` or of a directory in it, and for a change of its events file."""

    def __init__(self, pods: Sequence[Path]) -> None:
        self._pods = frozenset(pods)
        self._entries = {(pod.parent, pod.name) for pod in pods}
        self.directories = self._pods | {pod.parent for pod in pods}
        self.files = frozenset(pod / _EVENTS_FILE for pod in pods)
        self.paths = self.directories | self.files
        self.future: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def note(self, change: _Change) -> None:
        where, _ = change
        if change == OVERFLOW or change in self._entries or where in self._pods or where in self.files:
            self.future.set_result(None)


class CgroupWatcher:
    """One inotify instance for all watched pods; opened with the first one and closed by :meth:`close`."""

    def __init__(self) -> None:
        self._inotify: Inotify | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._waits: set[_FirstContainer | _End] = set()
        self._uses: Counter[Path] = Counter()
        """How many of the waits need a path."""

    def watch_first(self, pods: Sequence[Path]) -> asyncio.Future[str]:
        """Return a future for the name of the first directory created in one of ``pods`` from now on.

        Raises:
            OSError: A directory cannot be watched or listed.
        """
        wait = _FirstContainer(pods)
        self._start(wait)
        try:
            wait.known = frozenset(name for pod in pods for name in os.listdir(pod))
        except OSError:
            wait.future.cancel()
            raise
        return wait.future

    def watch_end(self, pods: Sequence[Path]) -> asyncio.Future[None]:
        """Return a future that is done when one of ``pods``, or a directory in it, is removed or becomes empty.

        It may also be done for another change of these directories.

        Raises:
            OSError: A directory cannot be watched.
        """
        wait = _End(pods)
        self._start(wait)
        return wait.future

    def close(self) -> None:
        """Stop watching; pending futures are cancelled."""
        waits, self._waits = self._waits, set()
        self._uses.clear()
        for wait in waits:
            wait.future.cancel()
        if self._inotify is not None and self._loop is not None:
            if not self._loop.is_closed():
                self._loop.remove_reader(self._inotify.fileno())
            self._inotify.close()
        self._inotify = self._loop = None

    def _start(self, wait: _FirstContainer | _End) -> None:
        loop = asyncio.get_running_loop()
        if self._inotify is None or self._loop is not loop:
            self.close()
            self._inotify, self._loop = Inotify(), loop
            loop.add_reader(self._inotify.fileno(), self._read)
        self._waits.add(wait)
        self._uses.update(wait.paths)
        wait.future.add_done_callback(lambda _: self._forget(wait))
        try:
            for directory in wait.directories:
                self._inotify.add(directory)
            for file in wait.files:
                self._inotify.add_file(file)
        except OSError:
            wait.future.cancel()
            raise

    def _read(self) -> None:
        if self._inotify is None:
            return
        for change in self._inotify.read():
            for wait in list(self._waits):
                if not wait.future.done():
                    wait.note(change)

    def _forget(self, wait: _FirstContainer | _End) -> None:
        if wait not in self._waits:
            return  # closed meanwhile
        self._waits.remove(wait)
        self._uses.subtract(wait.paths)
        for path in wait.paths:
            if not self._uses[path]:
                del self._uses[path]
                if self._inotify is not None:
                    self._inotify.remove(path)
