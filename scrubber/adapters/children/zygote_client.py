"""Children forked by a child: for programs that take long to load and must be fresh each time.

A zygote is a child that has loaded a library and not used it yet. It forks one child for each piece of work, which then
starts in milliseconds instead of the seconds that loading takes. A forked process is a :class:`Child` like any other:
queried, killed, abandoned and counted in the same way. Its exit is detected through a pidfd that the zygote passes up,
so that a later process with the same PID is never affected.

Guarantee: a zygote that cannot be started costs an error message and no device's health. When a zygote dies, the kernel
kills the processes it forked, and the next piece of work gets a new zygote.

The zygote's side is in :mod:`scrubber.adapters.children.zygote_server`.
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
"""Seconds by which the exit of a zygote may be noticed later than the exit of a process that died with it."""


class Zygote:
    """Forks programs; its process is started on the first fork, or by :meth:`warm_up`.

    Args:
        module: runs the zygote's side; its arguments are ``programs``.
        programs: modules with a function ``run(link)``, loaded before anything is forked.
        nice: nice value of all forked processes.
        environment: environment variables of the zygote and of all forked processes.
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
        """PID of the zygote's process; None while there is none. It shares its memory with all forked processes."""
        return None if self._process is None else self._process.pid

    async def warm_up(self) -> None:
        """Start the process and load everything.

        Raises:
            Unavailable: That is impossible; the message contains the reason, and what to install where something is
                missing.
        """
        async with self._lock:
            await self._request({}, ())

    async def fork(
        self, program: str, *, device: str | None = None, environment: Mapping[str, str] | None = None
    ) -> Child:
        """Fork a fresh child that runs ``program``, ready for requests.

        If the caller is cancelled, the fork continues and the resulting child is killed: the zygote's answer must not
        be mistaken for the answer to the next request.

        Args:
            environment: environment variables for this child alone.

        Raises:
            Unavailable: There is no child; no device was touched.
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
        """Whether ``child``, which has exited, was killed by the kernel because the process that forked it ended."""
        process = self._forked_by.get(child)
        return process is not None and await process.wait(_EXIT_NOTICE_DELAY)

    async def close(self) -> None:
        """Kill the process permanently; the processes it forked end with it."""
        self._closed = True
        process, self._process = self._process, None
        if process is not None:
            await process.kill()

    async def _fork(self, program: str, device: str | None, environment: Mapping[str, str]) -> Child:
        try:
            ours, child_end = socket.socketpair()
        except OSError as error:
            raise ChildNotStarted(f"A child process ({program}) cannot be started: {error}.") from error
        try:
            async with self._lock:
                pid, handles = await self._request(
                    {"program": program, "environment": environment}, (child_end.fileno(),)
                )
                process = self._process
            if len(handles) != 1:
                _close_all(handles)
                raise ChildNotStarted(
                    f"A child process ({program}) was forked and abandoned, because its pidfd could not be "
                    "received: this process has too many open files. This is retried."
                )
        except BaseException:
            ours.close()
            raise
        finally:
            child_end.close()
        child = Child(self._children, pid, handles[0], wait_for_exit(handles[0]), ours, program, device)
        if process is not None:
            self._forked_by[child] = process
        await self._children.wait_until_ready(child)
        return child

    async def _request(self, message: Message, descriptors: Sequence[int]) -> tuple[int, Sequence[int]]:
        """Return the PID in the answer and its descriptors; replaces a zygote that died on its own, once."""
        for last in (False, True):
            process = await self._running_process()
            try:
                answer = await process.call(message, self._children.start_timeout, descriptors)
                pid = parse_answer(answer).get("pid")
                if type(pid) is not int or pid <= 0:
                    raise ChildDied(f"it returned the invalid PID {pid!r}")
                return pid, process.take_descriptors()
            except ChildDied as died:
                self._drop()
                if last:
                    raise ChildNotStarted(f"The zygote ({self._module}) cannot fork: {died}") from died
            except TimeoutError as error:
                self._drop()
                raise ChildNotStarted(
                    f"The zygote ({self._module}) did not answer within {self._children.start_timeout:g} s; "
                    "it was killed."
                ) from error
            except ScrubberError:  # the zygote reports why it cannot fork; its other children continue
                raise
            except BaseException:  # the next answer would be the one to this request
                self._drop()
                raise
        raise AssertionError("the last attempt returns or raises")

    async def _running_process(self) -> Child:
        if self._process is None and not self._closed:
            self._process = await self._children.start(
                self._module, *self._programs, nice=self._nice, environment=self._environment
            )
        if self._process is None or self._closed:
            self._drop()
            raise ChildNotStarted(f"The zygote ({self._module}) is not started: the service is stopping.")
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
