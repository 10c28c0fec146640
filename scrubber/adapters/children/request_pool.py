"""Requests to a driver that may hang: one child for all devices, and a separate one for each device that hangs.

Guarantee: a device that never answers costs the others one deadline, once, and never their answer. The child that hangs
is killed and replaced, and the requests queued behind it go to the new one. The stuck device is queried through its own
probe child until it answers the very requests that it hung on: one driver call may hang for a device while others do
not. While the child that hung on a device has not died, that device is not queried: it costs one unkillable process, no
matter how often it is requested.

A device can also be suspended (:meth:`RequestPool.suspend`): during that time no child of this pool touches it.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass

from scrubber.adapters.children.message import MalformedMessage, Message
from scrubber.adapters.children.process import Child, ChildDied, ChildNotStarted, Children
from scrubber.domain.errors import (
    DeviceBusy,
    DeviceFault,
    DeviceLost,
    DriverTimeout,
    ResetInProgress,
    ScrubberError,
    Unavailable,
    Unreadable,
)

__all__ = ["FAULT_TYPES", "RequestPool", "parse_answer"]

FAULT_TYPES: Mapping[str, type[ScrubberError]] = {
    "away": Unavailable,
    "held": DeviceBusy,
    "lost": DeviceLost,
    "stuck": DriverTimeout,
    "unreadable": Unreadable,
}
"""Errors that a child may return, by the code of its :class:`~scrubber.adapters.children.child.Fault`."""


def parse_answer(message: Message) -> Message:
    """Return the child's answer.

    Raises:
        ScrubberError: The fault that the child reported instead; an unknown code becomes Unreadable.
    """
    answer = message.get("ok")
    if isinstance(answer, dict):
        return answer
    code, reason = message.get("fault"), message.get("message")
    if isinstance(code, str) and isinstance(reason, str):
        raise FAULT_TYPES.get(code, Unreadable)(reason)
    raise Unreadable("A child process replied with neither a result nor a fault.")


@dataclass(frozen=True, slots=True, eq=False)
class _Request:
    device: str
    message: Message
    deadline: float
    answer: asyncio.Future[Message]

    def fail(self, error: ScrubberError) -> None:
        if not self.answer.done():
            self.answer.set_exception(error)


class _ChildQueue:
    """One child and the requests that wait for it. ``device`` is set on the queue of a stuck device.

    ``hung_child`` is the last child that was killed over a request; the next one is started when it is dead.
    ``unanswered`` are the requests that it hung on. ``lock`` is held while a request is processed.
    """

    def __init__(self, device: str | None) -> None:
        self.device = device
        self.pending: asyncio.Queue[_Request] = asyncio.Queue()
        self.child: Child | None = None
        self.hung_child: Child | None = None
        self.unanswered: list[Message] = []
        self.worker: asyncio.Task[None] | None = None
        self.lock = asyncio.Lock()

    def drop_child(self) -> None:
        """Kill the child without waiting for its death, which may never come."""
        if self.child is not None:
            self.child.start_kill()
            self.child = None

    def drain(self) -> list[_Request]:
        return [self.pending.get_nowait() for _ in range(self.pending.qsize())]


# See docs/decisions/0019-children-and-stall-tolerant-deadlines.md.
class RequestPool:
    """Sends requests to children that run ``module``; children are started on the first request.

    Args:
        deadline: seconds that one request may take, once a child is ready for it.
        nice: nice value of the children.
        environment: environment variables for the children, added to the few that every child has.
        error_type: raised when there is no answer. A :class:`DeviceFault` is attributed to the device, which is then
            queried separately from the others. Where the answer depends on more than the device (a walk over ``/proc``
            that any tenant can slow down), this is another error: no device is queried separately, and the death of a
            child is not attributed to a device.
    """

    def __init__(
        self,
        children: Children,
        module: str,
        *,
        arguments: tuple[str, ...] = (),
        deadline: float = 1.0,
        nice: int = 0,
        environment: Mapping[str, str] | None = None,
        error_type: type[ScrubberError] = DriverTimeout,
    ) -> None:
        self._children = children
        self._module = module
        self._arguments = arguments
        self._deadline = deadline
        self._nice = nice
        self._environment = environment
        self._error_type = error_type
        self._shared = _ChildQueue(None)
        self._probes: dict[str, _ChildQueue] = {}
        self._suspended: Counter[str] = Counter()
        # Every child that was ready once and is not known to have exited, in a queue or not; and the device of its
        # queue.
        self._live_children: dict[Child, str | None] = {}
        self._workers: set[asyncio.Task[None]] = set()
        self._closed = False

    @property
    def stuck_devices(self) -> frozenset[str]:
        """Devices that have not yet answered the requests they hung on."""
        return frozenset(self._probes)

    async def request(self, device: str, message: Message, *, deadline: float | None = None) -> Message:
        """Return the driver's answer to ``message`` about ``device``.

        If the caller is cancelled, the request continues until its deadline: a hang is then attributed to this request
        and no other.

        Raises:
            DriverTimeout: No answer within the deadline, and the child was killed and replaced; or a child that hung on
                this device before is not dead yet, and no request was sent. The pool's ``error_type`` is raised in its
                place.
            DeviceLost, Unreadable, DeviceBusy, Unavailable: The child reported this fault; Unreadable also when two
                children died over the request, and Unavailable when no child can be started.
            ResetInProgress: The device is suspended.
        """
        if self._closed:
            raise Unavailable("The service is stopping.")
        seconds = self._deadline if deadline is None else deadline
        if self._suspended[device]:
            raise _suspended_error(device)
        answer: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
        self._enqueue(_Request(device, message, seconds, answer))
        return await answer

    @asynccontextmanager
    async def suspend(self, devices: Iterable[str]) -> AsyncIterator[None]:
        """Ensure that no child of this pool has ``devices`` open, from the start of the body to its end.

        Children that may have queried them are ended, each after its current request. Requests about other devices
        continue with a new child; those about ``devices`` fail with :class:`ResetInProgress` meanwhile.

        Args:
            devices: every name under which the devices are queried.

        Raises:
            DriverTimeout: A child that queried one of them cannot be ended.
        """
        held = frozenset(devices)
        self._suspended.update(held)
        try:
            lines = (self._shared, *(self._probes[each] for each in sorted(held & self._probes.keys())))
            # A child that was ever the shared one has queried all devices, regardless of why it hung or died.
            to_suspend = [child for child, device in self._live_children.items() if device is None or device in held]
            in_line = {line.child for line in lines}
            for child in to_suspend:
                if child not in in_line:  # first, because requests in a queue wait for the end of its child
                    await _ensure_exited(child, held)
            for line in lines:
                async with line.lock:
                    child_of_line, line.child = line.child, None
                    await _ensure_exited(child_of_line, held)
            for child in to_suspend:  # some have left their queue in the meantime
                await _ensure_exited(child, held)
            yield
        finally:
            self._suspended -= Counter(held)

    async def close(self) -> None:
        """End every child; all pending requests fail with :class:`Unavailable`."""
        self._closed = True
        workers = tuple(self._workers)
        for worker in workers:
            worker.cancel()
        await asyncio.gather(*workers, return_exceptions=True)

    def _enqueue(self, question: _Request) -> None:
        line = self._probes.get(question.device, self._shared)
        line.pending.put_nowait(question)
        if line.worker is None:
            line.worker = asyncio.create_task(self._serve_queue(line))
            self._workers.add(line.worker)
            line.worker.add_done_callback(self._workers.discard)

    async def _serve_queue(self, line: _ChildQueue) -> None:
        question: _Request | None = None
        try:
            while line is self._shared or self._probes.get(line.device or "") is line:
                question = await line.pending.get()
                if question.answer.done():  # its caller left before its turn
                    continue
                if line is self._shared and question.device in self._probes:
                    self._enqueue(question)
                    continue
                async with line.lock:
                    if self._suspended[question.device]:
                        question.fail(_suspended_error(question.device))
                        continue
                    await self._resolve(line, question)
        finally:
            line.worker = None
            if question is not None:
                question.fail(Unavailable("The request was abandoned: the service is stopping."))
            for pending in line.drain():
                if self._closed:
                    pending.fail(Unavailable("The service is stopping."))
                else:
                    self._enqueue(pending)
            async with line.lock:
                child, line.child = line.child, None
                if child is not None:
                    await child.kill()

    async def _resolve(self, line: _ChildQueue, question: _Request) -> None:
        """Complete ``question`` with an answer or an error, and update the state of its device."""
        if line.hung_child is not None and not await _has_exited(line.hung_child, question.deadline):
            question.fail(_unkillable_error(self._error_type, question.device, line.hung_child))
            return
        line.hung_child = None
        try:
            message = await self._exchange(line, question)
        except TimeoutError:
            if issubclass(self._error_type, DeviceFault):
                self._isolate(line, question)
                await self._replace(line)
            else:
                self._give_up(line, question)
            return
        except ChildNotStarted as pressure:
            question.fail(pressure)
            return
        except ChildDied as died:
            question.fail(
                self._unanswerable(f"Two child processes in a row gave no valid answer for {question.device}: {died}")
            )
            return
        except MalformedMessage as error:
            question.fail(self._unanswerable(f"The request about {question.device} cannot be sent: {error}"))
            return
        try:
            answer = parse_answer(message)
            if not question.answer.done():
                question.answer.set_result(answer)
        except ScrubberError as fault:
            question.fail(fault)
        if line is not self._shared:
            line.unanswered = [each for each in line.unanswered if each != question.message]
            if not line.unanswered:
                self._probes.pop(question.device, None)  # it answers again: back to the shared child

    async def _exchange(self, line: _ChildQueue, question: _Request) -> Message:
        try:
            return await (await self._child_of(line)).call(question.message, question.deadline)
        except ChildDied:
            line.drop_child()  # the child ended on its own; this request need not be the cause
        try:
            return await (await self._child_of(line)).call(question.message, question.deadline)
        except ChildDied:
            line.drop_child()
            raise

    async def _child_of(self, line: _ChildQueue) -> Child:
        if line.child is None:
            line.child = await self._children.start(
                self._module, *self._arguments, device=line.device, nice=self._nice, environment=self._environment
            )
            self._live_children = {each: device for each, device in self._live_children.items() if not each.has_exited}
            self._live_children[line.child] = line.device
        return line.child

    async def _replace(self, line: _ChildQueue) -> None:
        """Start a new shared child at once; a probe child only on the next request, as it will probably hang too."""
        if line is self._shared:
            try:
                await self._child_of(line)
            except ChildNotStarted:
                return  # the next request retries and reports the error to its caller

    def _unanswerable(self, message: str) -> ScrubberError:
        return (Unreadable if issubclass(self._error_type, DeviceFault) else self._error_type)(message)

    def _give_up(self, line: _ChildQueue, question: _Request) -> None:
        """Kill the child that did not answer, without attributing this to a device.

        The next request starts a new child once this one is dead. Until then no request is sent, so all of this costs
        one unkillable process.
        """
        line.hung_child = line.child
        line.drop_child()
        question.fail(
            self._error_type(
                f"A child process ({self._module}) did not answer within {question.deadline:g} s and was "
                f"killed. This is not a fault of {question.device}, which the request was about; the request "
                "is retried."
            )
        )

    def _isolate(self, line: _ChildQueue, question: _Request) -> None:
        """Kill the child that did not answer, and query the device separately from the others from now on."""
        hung = line.child
        line.drop_child()
        stuck = DriverTimeout(
            f"The driver did not answer about {question.device} within {question.deadline:g} s; the child "
            "process that queried it was killed, and no other device waits for it."
        )
        question.fail(stuck)
        probe = self._probes.setdefault(question.device, _ChildQueue(question.device))
        if question.message not in probe.unanswered:
            probe.unanswered.append(question.message)
        if hung is not None:
            hung.device = question.device
            probe.hung_child = hung
        for pending in probe.drain():  # all of them about the one device that hangs
            pending.fail(stuck)


async def _ensure_exited(child: Child | None, held: frozenset[str]) -> None:
    """Ensure that ``child`` has exited; raises :class:`DriverTimeout` when it cannot be ended."""
    if child is not None and not (await child.kill() or await child.wait(0.0)):
        raise _unkillable_error(DriverTimeout, ", ".join(sorted(held)), child)


def _suspended_error(device: str) -> ResetInProgress:
    return ResetInProgress(f"The driver is not queried about {device} now: the device is being reset.")


async def _has_exited(hung: Child, seconds: float) -> bool:
    """Whether a killed child has exited or does so within ``seconds``. An abandoned child is not waited for again."""
    return await hung.wait(0.0 if hung.is_abandoned else seconds)


def _unkillable_error(blames: type[ScrubberError], device: str, hung: Child) -> ScrubberError:
    if not issubclass(blames, DeviceFault):
        return blames(
            f"No request about {device} is sent: process {hung.pid} ({hung.module}), which received an "
            "earlier one, has not returned from the kernel and cannot be killed. If this persists, reboot "
            "the node."
        )
    return blames(
        f"The driver is not queried about {device}: process {hung.pid}, which queried it before, has not "
        "returned from the driver and cannot be killed. Queries resume once that process is gone; if this "
        "persists, reboot the node."
    )
