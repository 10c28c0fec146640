"""Questions to a driver that may hang: one child for all devices, and one of its own for each device that hangs.

Promise: a device that never answers costs the others one deadline, once, and never their answer. The child that hangs
is killed and replaced, whatever waited behind it is asked of the new one, and the stuck device is asked through a probe
child of its own until it answers the very questions that it hung over: one of its calls may hang and the others not.
While the child that hung over a device does not die, that device is not asked: it costs one process that cannot be ended,
however often somebody looks.

A device can also be held back (:meth:`RequestPool.suspend`): for that time no child of ours has touched it.
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
"""What a child may answer instead of an answer, by the code of its :class:`~scrubber.adapters.children.child.Fault`."""


def parse_answer(message: Message) -> Message:
    """What the child answered.

    Raises:
        ScrubberError: the fault that it answered instead; a code in no table is Unreadable.
    """
    answer = message.get("ok")
    if isinstance(answer, dict):
        return answer
    code, reason = message.get("fault"), message.get("sentence")
    if isinstance(code, str) and isinstance(reason, str):
        raise FAULT_TYPES.get(code, Unreadable)(reason)
    raise Unreadable("A child answered with neither an answer nor a fault.")


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
    """One child and those who wait for it. ``device`` is set on the line of a stuck device.

    ``hung_child`` is the child that was killed over a question last. The next one is started when it is dead. ``unanswered``
    are the questions that it hung over. ``lock`` is held while a question is settled.
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


class RequestPool:
    """Asks children that run ``module``; children are started when the first question comes.

    Args:
        deadline: seconds that one question may take, once a child is ready for it.
        nice: the children's nice value.
        environment: variables that the children get beside the few that every child has.
        error_type: what is raised when there is no answer. A :class:`DeviceFault` is the device's, which is then asked apart
            from the others. Where the answer depends on others than the device (a walk over ``/proc`` that any tenant can
            make slow), it is another error: nobody is asked apart, and what a child may die of is no device's fault.
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
        # Every child that was ready once and is not known to be over, in a line or not; and its line's device.
        self._live_children: dict[Child, str | None] = {}
        self._workers: set[asyncio.Task[None]] = set()
        self._closed = False

    @property
    def stuck_devices(self) -> frozenset[str]:
        """Devices that have not answered yet what they hung over."""
        return frozenset(self._probes)

    async def request(self, device: str, message: Message, *, deadline: float | None = None) -> Message:
        """What the driver answers to ``message`` about ``device``.

        When the caller is cancelled the question goes on until its deadline: nobody else is blamed for its hanging.

        Raises:
            DriverTimeout: no answer within the deadline, and the child was killed and replaced; or one that hung over this
                device before is not dead yet, and nobody was asked. The pool's ``error_type`` takes its place.
            DeviceLost, Unreadable, DeviceBusy, Unavailable: the child answered so; Unreadable also when two children died
                over it, and Unavailable when none can be started.
            ResetInProgress: the device is held back.
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
        """See to it that no child of this pool has ``devices`` open, from the start of the body to its end.

        The children that may have asked about them are ended, after the question each is at. Questions about other
        devices go on with a fresh child; those about ``devices`` are answered with :class:`ResetInProgress` meanwhile.

        Args:
            devices: every name under which they are asked about.

        Raises:
            DriverTimeout: a child that asked about one of them cannot be ended.
        """
        held = frozenset(devices)
        self._suspended.update(held)
        try:
            lines = (self._shared, *(self._probes[each] for each in sorted(held & self._probes.keys())))
            # What was the shared child once has asked about all of them, whatever it hung over or died of.
            asked = [child for child, device in self._live_children.items() if device is None or device in held]
            in_line = {line.child for line in lines}
            for child in asked:
                if child not in in_line:  # first, because those who wait in a line pay for the end of its child
                    await _ensure_exited(child, held)
            for line in lines:
                async with line.lock:
                    child_of_line, line.child = line.child, None
                    await _ensure_exited(child_of_line, held)
            for child in asked:  # some have left their line meanwhile
                await _ensure_exited(child, held)
            yield
        finally:
            self._suspended -= Counter(held)

    async def close(self) -> None:
        """End every child; whoever waits for an answer gets :class:`Unavailable`."""
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
                question.fail(Unavailable("The question was given up: the service is stopping."))
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
        """Get ``question`` its answer or its error, and draw the consequences for its device."""
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
            question.fail(self._unanswerable(f"Two children in a row could not answer for {question.device}: {died}"))
            return
        except MalformedMessage as error:
            question.fail(self._unanswerable(f"The question about {question.device} cannot be asked: {error}"))
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
                self._probes.pop(question.device, None)  # it answers again: back to the shared child with it

    async def _exchange(self, line: _ChildQueue, question: _Request) -> Message:
        try:
            return await (await self._child_of(line)).call(question.message, question.deadline)
        except ChildDied:
            line.drop_child()  # it ended by itself, which need not be this question's fault
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
        """A new shared child at once; a probe's only when its device is asked again: it will probably hang as well."""
        if line is self._shared:
            try:
                await self._child_of(line)
            except ChildNotStarted:
                return  # the next question tries again, and tells its caller

    def _unanswerable(self, message: str) -> ScrubberError:
        return (Unreadable if issubclass(self._error_type, DeviceFault) else self._error_type)(message)

    def _give_up(self, line: _ChildQueue, question: _Request) -> None:
        """Kill the child that did not answer, and blame no device. The next question has a fresh one started, once it is
        dead: while it is not, nobody is asked, so that all of this costs one process that cannot be ended.
        """
        line.hung_child = line.child
        line.drop_child()
        question.fail(
            self._error_type(
                f"A child ({self._module}) did not answer within {question.deadline:g} s and was killed. That is no "
                f"fault of {question.device}, about which it was asked; it is asked again."
            )
        )

    def _isolate(self, line: _ChildQueue, question: _Request) -> None:
        """Kill the child that did not answer, and have the device asked apart from the others from now on."""
        hung = line.child
        line.drop_child()
        stuck = DriverTimeout(
            f"The driver did not answer about {question.device} within {question.deadline:g} s; "
            "the child that asked was killed, and no other device waits for it."
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
    """Be sure that ``child`` is over; raises :class:`DriverTimeout` when it cannot be ended."""
    if child is not None and not (await child.kill() or await child.wait(0.0)):
        raise _unkillable_error(DriverTimeout, ", ".join(sorted(held)), child)


def _suspended_error(device: str) -> ResetInProgress:
    return ResetInProgress(f"The driver is not asked about {device} now: it is being reset.")


async def _has_exited(hung: Child, seconds: float) -> bool:
    """Whether a child that was killed is over, or will be within ``seconds``. For an abandoned one nobody waits again."""
    return await hung.wait(0.0 if hung.is_abandoned else seconds)


def _unkillable_error(blames: type[ScrubberError], device: str, hung: Child) -> ScrubberError:
    if not issubclass(blames, DeviceFault):
        return blames(
            f"Nobody is asked about {device}: process {hung.pid} ({hung.module}), which was asked before, has not "
            "returned from the kernel and cannot be ended. If it stays, reboot the node."
        )
    return blames(
        f"The driver is not asked about {device}: process {hung.pid}, which asked it before, has not returned from the "
        "driver and cannot be ended. It is asked again once that process is gone; if it stays, reboot the node."
    )
