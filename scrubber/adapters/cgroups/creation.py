"""Detection of container creation: the first cgroup that appears in a pod's own cgroup, as reported by the kernel.

A runtime creates one cgroup for each container, directly in the pod's cgroup, and only root can create one there:
cgroups that a tenant may write to are deeper. Source: inotify(7); cgroupfs reports directories created through the file
system, which is how runc, crun and systemd create them.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from pathlib import Path

from scrubber.adapters.inotify import OVERFLOW, Inotify

__all__ = ["CreationWatcher"]


class CreationWatcher:
    """One inotify instance for all watched pods; opened with the first one and closed by :meth:`close`."""

    def __init__(self) -> None:
        self._inotify: Inotify | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._pending: dict[asyncio.Future[str], tuple[frozenset[Path], frozenset[str]]] = {}

    def watch_first(self, directories: Sequence[Path]) -> asyncio.Future[str]:
        """Return a future for the name of the first directory created in one of ``directories`` from now on.

        Raises:
            OSError: A directory cannot be watched or listed.
        """
        loop = asyncio.get_running_loop()
        if self._inotify is None or self._loop is not loop:
            self.close()
            self._inotify, self._loop = Inotify(), loop
            loop.add_reader(self._inotify.fileno(), self._read)
        future: asyncio.Future[str] = loop.create_future()
        self._pending[future] = (frozenset(directories), frozenset())
        future.add_done_callback(self._forget)
        try:
            for directory in directories:
                self._inotify.add(directory)
            known = frozenset(name for directory in directories for name in os.listdir(directory))
        except OSError:
            future.cancel()
            raise
        self._pending[future] = (frozenset(directories), known)
        return future

    def close(self) -> None:
        """Stop watching; pending futures are cancelled."""
        for future in list(self._pending):
            future.cancel()
        self._pending.clear()
        if self._inotify is not None and self._loop is not None:
            if not self._loop.is_closed():
                self._loop.remove_reader(self._inotify.fileno())
            self._inotify.close()
        self._inotify = self._loop = None

    def _read(self) -> None:
        if self._inotify is None:
            return
        for directory, name in self._inotify.read():
            for future, (watched, known) in list(self._pending.items()):
                if (directory, name) == OVERFLOW:
                    future.cancel()  # the first creation may be among the events that the kernel dropped
                elif name and directory in watched and name not in known and not future.done():
                    future.set_result(name)

    def _forget(self, future: asyncio.Future[str]) -> None:
        directories, _ = self._pending.pop(future, (frozenset(), frozenset()))
        needed = {each for watched, _ in self._pending.values() for each in watched}
        for directory in directories - needed:
            if self._inotify is not None:
                self._inotify.remove(directory)
