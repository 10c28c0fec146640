"""Children that a child forks: for what takes long to load and must be fresh each time.

A zygote is a child that has loaded a library and done nothing with it. It forks one child for each piece of work, which
then starts in milliseconds instead of in the seconds that loading takes. What it forks is a :class:`Child` like any
other: asked, killed, abandoned and counted in the same way, its end known by a pidfd that the zygote passes up, so that
no later process of the same PID is ever meant.

Promise: a zygote that cannot be had costs a sentence and no device's health; one that dies takes what it forked with it
(the kernel sees to that), and the next piece of work gets a new one.

What the zygote's side has to do is in :mod:`scrubber.adapters.children.zygote_server`.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Mapping, Sequence
from weakref import WeakKeyDictionary

from scrubber.adapters.children.message import Message
from scrubber.adapters.children.process import Child, ChildDied, ChildNotStarted, Children, wait_for_exit
from scrubber.adapters.children.request_pool import parse_answer
from scrubber.domain.errors import ScrubberError

__all__ = ["Zygote"]

_EXIT_NOTICE_DELAY = 0.5
"""Seconds by which the end of a zygote may be heard of later than the end of what died with it."""


class Zygote:
    """Forks programs; its process is started with the first of them, or by :meth:`warm_up`.

    Args:
        module: runs the zygote's side; its arguments are ``programs``.
        programs: modules with a function ``run(link)``, loaded before anything is forked.
        nice: the nice value of everything that is forked.
        environment: variables of the zygote and of all that it forks.
    """

    def __init__(
        self,
        children: Children,
        module: str,
        *,
        programs: Sequence[str],
        nice: int = 0,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._children = children
        self._module = module
        self._programs = tuple(programs)
        self._nice = nice
        self._environment = environment
        self._process: Child | None = None
        self._lock = asyncio.Lock()
        self._forking: set[asyncio.Task[Child]] = set()
        self._forked_by: WeakKeyDictionary[Child, Child] = WeakKeyDictionary()
        self._closed = False

    @property
    def pid(self) -> int | None:
        """Of the zygote's process; None while there is none. Its memory is shared with all that it forks."""
        return None if self._process is None else self._process.pid

    async def warm_up(self) -> None:
        """Have the process started and everything loaded.

        Raises:
            Unavailable: it cannot be; the sentence says why, and what to install where that is missing.
        """
        async with self._lock:
            await self._request({}, ())

    async def fork(
        self, program: str, *, device: str | None = None, environment: Mapping[str, str] | None = None
    ) -> Child:
        """A fresh child that runs ``program``, ready to be asked.

        When the caller is cancelled, the fork goes on and what comes of it is ended: the zygote's answers must not be
        taken for those to the next question.

        Args:
            environment: variables for this child alone.

        Raises:
            Unavailable: there is none; no device was touched.
        """
        task = asyncio.create_task(self._fork(program, device, dict(environment or {})))
        self._forking.add(task)
        task.add_done_callback(self._forking.discard)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            task.add_done_callback(_discard_result)
            raise

    async def died_with_zygote(self, child: Child) -> bool:
        """Whether ``child``, which is over, was killed by the kernel because the process that had forked it ended."""
        process = self._forked_by.get(child)
        return process is not None and await process.wait(_EXIT_NOTICE_DELAY)

    async def close(self) -> None:
        """End the process, for good; what it forked ends with it."""
        self._closed = True
        process, self._process = self._process, None
        if process is not None:
            await process.kill()

    async def _fork(self, program: str, device: str | None, environment: Mapping[str, str]) -> Child:
        try:
            ours, theirs = socket.socketpair()
        except OSError as error:
            raise ChildNotStarted(f"A child ({program}) cannot be started: {error}.") from error
        try:
            async with self._lock:
                pid, handles = await self._request({"program": program, "environment": environment}, (theirs.fileno(),))
                process = self._process
            if len(handles) != 1:
                _close_all(handles)
                raise ChildNotStarted(
                    f"A child ({program}) was forked and its handle was lost, so it was let go: this process has too "
                    "many files open. This is retried."
                )
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        child = Child(self._children, pid, handles[0], wait_for_exit(handles[0]), ours, program, device)
        if process is not None:
            self._forked_by[child] = process
        await self._children.wait_until_ready(child)
        return child

    async def _request(self, message: Message, descriptors: Sequence[int]) -> tuple[int, Sequence[int]]:
        """The PID that it answers, and what came with it; a zygote that died by itself is replaced, once."""
        for last in (False, True):
            process = await self._running_process()
            try:
                async with asyncio.timeout(self._children.start_timeout):
                    await process.send(message, descriptors)
                    pid = parse_answer(await process.receive()).get("pid")
                if not isinstance(pid, int) or pid <= 0:
                    raise ChildDied(f"it calls {pid!r} a PID")
                return pid, process.take_descriptors()
            except ChildDied as died:
                self._drop()
                if last:
                    raise ChildNotStarted(f"The zygote ({self._module}) cannot fork: {died}") from died
            except TimeoutError as error:
                self._drop()
                raise ChildNotStarted(
                    f"The zygote ({self._module}) did not answer within {self._children.start_timeout:g} s; it was killed."
                ) from error
            except ScrubberError:  # it says that it cannot, and why; others that it forked go on
                raise
            except BaseException:  # the next answer would be the one to this question
                self._drop()
                raise
        raise AssertionError("the last round returns or raises")

    async def _running_process(self) -> Child:
        if self._process is None and not self._closed:
            self._process = await self._children.start(
                self._module, *self._programs, nice=self._nice, environment=self._environment
            )
        if self._process is None or self._closed:
            self._drop()
            raise ChildNotStarted(f"No zygote ({self._module}) is started any more: the service is stopping.")
        return self._process

    def _drop(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.start_kill()


def _discard_result(task: asyncio.Task[Child]) -> None:
    if not task.cancelled() and task.exception() is None:
        task.result().start_kill()


def _close_all(descriptors: Sequence[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)
