"""The parent's side of child processes: start children, send requests, and end them in every case.

Guarantee: a child never outlives the socket that it was given. A kill hits that child and no later process with its
PID. A child that does not die of SIGKILL is abandoned and counted, and is not waited for. Silence, or a death that went
unnoticed, does not count against a child while the event loop itself was stalled.

Children are fresh interpreters over a socketpair (never ``multiprocessing``, never a fork of the service), in their own
session, with an environment that this module defines. Processes forked by a zygote child use the same communication,
kill and counting.
"""

from __future__ import annotations

import asyncio
import os
import select
import signal
import socket
import sys
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import scrubber
from scrubber.adapters.children.child_socket import ChildDied, ChildSocket
from scrubber.adapters.children.message import Message
from scrubber.adapters.deadlines import stall_tolerant_timeout
from scrubber.domain.errors import Unavailable

__all__ = ["AbandonedChild", "Child", "ChildDied", "ChildNotStarted", "Children", "wait_for_exit"]

_EXIT_NOTICE_DELAY = 1.0
"""Seconds until the event loop notices a death that the kernel already reports."""


class ChildNotStarted(Unavailable):
    """There is no child: too many processes or descriptors, or too little memory or time.

    No device has been touched yet, so this is a resource shortage of the node and never a device fault.
    """


@dataclass(frozen=True, slots=True)
class AbandonedChild:
    """A child that SIGKILL did not end in time: it is blocked in the kernel. ``device``: what it was working on."""

    pid: int
    module: str
    device: str | None


class Children:
    """All children of this process: starts them, and tracks which are alive and which had to be abandoned.

    Args:
        kill_timeout: seconds after SIGKILL until a child is abandoned.
        start_timeout: seconds that a fresh interpreter gets to report "ready"; generous, because a loaded node is not a
            broken one.
        send_signal: ``pidfd_send_signal``, or a test double for a child that cannot be killed.

    Attributes:
        starts: number of children started, by module; includes those that were never ready.
    """

    def __init__(
        self,
        *,
        kill_timeout: float = 2.0,
        start_timeout: float = 20.0,
        send_signal: Callable[[int, int], object] = signal.pidfd_send_signal,
    ) -> None:
        self.kill_timeout = kill_timeout
        self.start_timeout = start_timeout
        self.send_signal = send_signal
        self.abandoned_total = 0
        self.starts: Counter[str] = Counter()
        self._live: set[Child] = set()
        self._abandoned: dict[Child, AbandonedChild] = {}
        self._programs: set[asyncio.subprocess.Process] = set()

    @property
    def abandoned(self) -> tuple[AbandonedChild, ...]:
        """Abandoned children that are not dead yet; ``abandoned_total`` also counts those that died later."""
        return tuple(self._abandoned.values())

    def pids(self) -> frozenset[int]:
        """Return the PIDs of all processes that are not known to be dead, including abandoned ones."""
        self._programs = {each for each in self._programs if each.returncode is None}
        return frozenset(child.pid for child in (*self._live, *self._abandoned)) | {each.pid for each in self._programs}

    def count_program(self, process: asyncio.subprocess.Process, name: str) -> None:
        """Count ``process``, a program that is no :class:`Child`, among the PIDs until it has exited."""
        self.starts[name] += 1
        self._programs = {each for each in self._programs if each.returncode is None} | {process}

    async def start(
        self,
        module: str,
        *arguments: str,
        device: str | None = None,
        nice: int = 0,
        environment: Mapping[str, str] | None = None,
        interpreter: str = sys.executable,
    ) -> Child:
        """Run ``python -m module`` and wait until it is ready for requests.

        Its environment is defined here: the service's environment never reaches it. ``environment`` is added and takes
        precedence.

        Must be called in a thread that lives as long as the service (the event loop's): the kernel kills the child when
        the *thread* that started it ends.

        Raises:
            ChildNotStarted: It could not be started, or was not ready within ``start_timeout``.
        """
        try:
            ours, child_end = socket.socketpair()
        except OSError as error:
            raise _not_started(module, error) from error
        try:
            process = await asyncio.create_subprocess_exec(
                interpreter,
                *("-s", "-P", "-m", module, str(child_end.fileno()), str(os.getpid()), str(nice), *arguments),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.DEVNULL,
                cwd="/",
                env={"PATH": os.defpath, "LANG": "C.UTF-8", "PYTHONPATH": _package_root(), **(environment or {})},
                pass_fds=(child_end.fileno(),),
                start_new_session=True,
            )
        except (OSError, RuntimeError) as error:  # RuntimeError: no thread left to wait for the child's exit
            ours.close()
            raise _not_started(module, error) from error
        except BaseException:
            ours.close()
            raise
        finally:
            child_end.close()
        try:
            pidfd: int | None = os.pidfd_open(process.pid)
        except ProcessLookupError:  # it has exited and was reaped by the event loop
            pidfd = None
        except OSError as error:  # no descriptor is left for its pidfd: it exits at the end of its file
            ours.close()
            raise _not_started(module, error) from error
        child = Child(self, process.pid, pidfd, process.wait(), ours, module, device)
        await self.wait_until_ready(child)
        return child

    async def wait_until_ready(self, child: Child) -> None:
        """Register ``child``, which was just created, as live, and wait until it reports "ready".

        Raises:
            ChildNotStarted: It did not within ``start_timeout``; it was killed.
        """
        module = child.module
        self.starts[module] += 1
        self._live.add(child)
        try:
            async with asyncio.timeout(self.start_timeout):
                await child.receive()
        except TimeoutError as error:
            await child.kill()
            raise ChildNotStarted(
                f"A child process ({module}) was not ready within {self.start_timeout:g} s; the node is overloaded."
            ) from error
        except ChildDied as died:
            await child.kill()
            raise ChildNotStarted(f"A child process ({module}) exited before it was ready: {died}") from died
        except BaseException:  # cancelled: no caller waits
            child.start_kill()
            raise

    async def close(self) -> None:
        """Kill every child and wait for each as long as a kill may take."""
        await asyncio.gather(*(child.kill() for child in tuple(self._live)))

    def remove(self, child: Child) -> None:
        """Called by ``child``, once, when its process has exited."""
        self._live.discard(child)
        self._abandoned.pop(child, None)

    def abandon(self, child: Child) -> None:
        """Called by ``child`` when SIGKILL did not end it in time."""
        if child in self._live:
            self._live.discard(child)
            self._abandoned[child] = AbandonedChild(child.pid, child.module, child.device)
            self.abandoned_total += 1


class Child:
    """One child and the socket to it; created by :meth:`Children.start`, or forked. One conversation at a time.

    Args:
        pidfd: pidfd of the process; closed after its exit. None when it had exited, and was reaped, before the pidfd
            could be opened.
        exited: returns when the process has exited.
        sock: the parent's end of its socket.
    """

    def __init__(
        self,
        children: Children,
        pid: int,
        pidfd: int | None,
        exited: Coroutine[object, object, object],
        sock: socket.socket,
        module: str,
        device: str | None,
    ) -> None:
        self.pid = pid
        self.module = module
        self.device = device
        """The device it works on, as far as known; may be set when it hangs."""
        self._children = children
        self._socket = ChildSocket(sock, f"Child {pid} ({module})")
        self._pidfd = pidfd
        self._exited = asyncio.ensure_future(exited)
        self._exited.add_done_callback(self._on_exit)
        self._kill_task: asyncio.Task[bool] | None = None
        self._abandoned = False

    async def call(self, message: Message, deadline: float, descriptors: Sequence[int] = ()) -> Message:
        """Send ``message``, with copies of ``descriptors``, and wait ``deadline`` seconds for the answer.

        After an error or a cancellation, kill the child: the next answer would be the one to this request.

        Time during which the event loop was stalled does not count against the child: see
        :func:`stall_tolerant_timeout`. An answer that is available at the final check is in time.

        Raises:
            TimeoutError: No answer in time.
            ChildDied: There will be no answer.
        """
        return await self._within(self._exchange(message, descriptors), deadline)

    async def receive_within(self, deadline: float) -> Message:
        """Return the next message within ``deadline`` seconds; stalls of the event loop are treated as in :meth:`call`.

        Raises:
            TimeoutError: None arrived in time. A partly received message is kept for the next call.
            ChildDied: There will be no message.
        """
        return await self._within(self.receive(), deadline)

    async def _exchange(self, message: Message, descriptors: Sequence[int]) -> Message:
        await self.send(message, descriptors)
        return await self.receive()

    async def _within(self, conversation: Coroutine[object, object, Message], deadline: float) -> Message:
        try:
            async with stall_tolerant_timeout(deadline):
                return await conversation
        except TimeoutError:
            answer = self._socket.receive_nowait()
            if answer is None:
                raise
            return answer

    async def send(self, message: Message, descriptors: Sequence[int] = ()) -> None:
        """Write one message; see :meth:`ChildSocket.send`."""
        await self._socket.send(message, descriptors)

    async def receive(self) -> Message:
        """Return the next message; see :meth:`ChildSocket.receive`."""
        return await self._socket.receive()

    def receive_nowait(self) -> Message | None:
        """Return the next message if it has arrived; see :meth:`ChildSocket.receive_nowait`."""
        return self._socket.receive_nowait()

    def take_descriptors(self) -> list[int]:
        """Return the descriptors received so far; see :meth:`ChildSocket.take_descriptors`."""
        return self._socket.take_descriptors()

    async def wait(self, deadline: float) -> bool:
        """Return whether the process exits within ``deadline`` seconds."""
        done, _ = await asyncio.wait({self._exited}, timeout=deadline)
        if done or not self._is_dead():
            return bool(done)
        await asyncio.wait(
            {self._exited}, timeout=_EXIT_NOTICE_DELAY
        )  # the loop was late; this lets it report the death to others first
        return True

    @property
    def has_exited(self) -> bool:
        """Whether the process is known to have exited."""
        return self._exited.done()

    @property
    def is_abandoned(self) -> bool:
        """Whether SIGKILL did not end it in time, and it has not exited since."""
        return self._abandoned and not self._exited.done()

    async def kill(self) -> bool:
        """Kill the child and wait for its exit; True once it is dead, False when it had to be abandoned.

        Every creator of a child must eventually call this (or :meth:`start_kill`), even when the child exited on its
        own. The kill continues when the caller is cancelled; a caller that still communicates with the child gets
        :class:`ChildDied`.
        """
        return await asyncio.shield(self.start_kill())

    def start_kill(self) -> asyncio.Task[bool]:
        """Start the kill without waiting; the task's result is that of :meth:`kill`."""
        if self._kill_task is None:
            self._kill_task = asyncio.ensure_future(self._kill())
        return self._kill_task

    async def _kill(self) -> bool:
        if self._pidfd is not None:
            with suppress(ProcessLookupError):  # dead, and reaped by the event loop before it notified us
                self._children.send_signal(self._pidfd, signal.SIGKILL)
        self._socket.close()
        dead = await self.wait(self._children.kill_timeout)
        if not dead:
            self._abandoned = True
            self._children.abandon(self)
        return dead

    def _is_dead(self) -> bool:
        """Whether the kernel reports that the process has exited."""
        if self._pidfd is None:
            return True
        poll = select.poll()
        poll.register(self._pidfd, select.POLLIN)
        return bool(poll.poll(0))

    def _on_exit(self, _: asyncio.Future[object]) -> None:
        self._children.remove(self)
        if self._pidfd is not None:
            os.close(self._pidfd)
            self._pidfd = None


async def wait_for_exit(pidfd: int) -> None:
    """Return when the process has exited, independent of its parent and of whether it was reaped."""
    loop = asyncio.get_running_loop()
    over = asyncio.Event()
    loop.add_reader(pidfd, over.set)
    try:
        await over.wait()
    finally:
        loop.remove_reader(pidfd)


def _not_started(module: str, error: Exception) -> ChildNotStarted:
    return ChildNotStarted(
        f"A child process ({module}) cannot be started: {error}. The node is short of a resource; this is retried."
    )


def _package_root() -> str:
    return str(Path(scrubber.__file__).parent.parent)
