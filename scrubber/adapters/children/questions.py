"""Questions to a driver that may hang: one child for all devices, and one of its own for each device that hangs.

Promise: a device that never answers costs the others one deadline, once, and never their answer. The child that hangs
is killed and replaced, whatever waited behind it is asked of the new one, and the stuck device is asked through a probe
child of its own until it answers the very questions that it hung over: one of its calls may hang and the others not.
While the child that hung over a device does not die, that device is not asked: it costs one process that cannot be ended,
however often somebody looks.

A device can also be held back (:meth:`QuestionPool.hold`): for that time no child of ours has touched it.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass

from scrubber.adapters.children.message import Garbled, Message
from scrubber.adapters.children.process import Child, ChildDied, Children, NotStarted
from scrubber.domain.errors import Away, BeingReset, DeviceFault, Held, Lost, ScrubberError, Stuck, Unreadable

__all__ = ["FAULTS", "QuestionPool", "answer_of"]

FAULTS: Mapping[str, type[ScrubberError]] = {
    "away": Away,
    "held": Held,
    "lost": Lost,
    "stuck": Stuck,
    "unreadable": Unreadable,
}
"""What a child may answer instead of an answer, by the code of its :class:`~scrubber.adapters.children.child.Fault`."""


def answer_of(message: Message) -> Message:
    """What the child answered.

    Raises:
        ScrubberError: the fault that it answered instead; a code in no table is Unreadable.
    """
    answer = message.get("ok")
    if isinstance(answer, dict):
        return answer
    code, sentence = message.get("fault"), message.get("sentence")
    if isinstance(code, str) and isinstance(sentence, str):
        raise FAULTS.get(code, Unreadable)(sentence)
    raise Unreadable("A child answered with neither an answer nor a fault.")


@dataclass(frozen=True, slots=True, eq=False)
class _Question:
    device: str
    message: Message
    deadline: float
    answer: asyncio.Future[Message]

    def fail(self, error: ScrubberError) -> None:
        if not self.answer.done():
            self.answer.set_exception(error)


class _Line:
    """One child and those who wait for it. ``device`` is set on the line of a stuck device.

    ``hung`` is the child that was killed over a question last. The next one is started when it is dead. ``unanswered``
    are the questions that it hung over. ``turn`` is held while a question is settled.
    """

    def __init__(self, device: str | None) -> None:
        self.device = device
        self.waiting: asyncio.Queue[_Question] = asyncio.Queue()
        self.child: Child | None = None
        self.hung: Child | None = None
        self.unanswered: list[Message] = []
        self.worker: asyncio.Task[None] | None = None
        self.turn = asyncio.Lock()

    def drop_child(self) -> None:
        """Kill the child without waiting for its death, which may never come."""
        if self.child is not None:
            self.child.discard()
            self.child = None

    def drain(self) -> list[_Question]:
        return [self.waiting.get_nowait() for _ in range(self.waiting.qsize())]


class QuestionPool:
    """Asks children that run ``module``; children are started when the first question comes.

    Args:
        deadline: seconds that one question may take, once a child is ready for it.
        nice: the children's nice value.
        environment: variables that the children get beside the few that every child has.
        blames: what is raised when there is no answer. A :class:`DeviceFault` is the device's, which is then asked apart
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
        blames: type[ScrubberError] = Stuck,
    ) -> None:
        self._children = children
        self._module = module
        self._arguments = arguments
        self._deadline = deadline
        self._nice = nice
        self._environment = environment
        self._blames = blames
        self._shared = _Line(None)
        self._probes: dict[str, _Line] = {}
        self._held: Counter[str] = Counter()
        # Every child that was ready once and is not known to be over, in a line or not; and its line's device.
        self._ours: dict[Child, str | None] = {}
        self._workers: set[asyncio.Task[None]] = set()
        self._closed = False

    @property
    def stuck(self) -> frozenset[str]:
        """Devices that have not answered yet what they hung over."""
        return frozenset(self._probes)

    async def ask(self, device: str, message: Message, *, deadline: float | None = None) -> Message:
        """What the driver answers to ``message`` about ``device``.

        When the caller is cancelled the question goes on until its deadline: nobody else is blamed for its hanging.

        Raises:
            Stuck: no answer within the deadline, and the child was killed and replaced; or one that hung over this
                device before is not dead yet, and nobody was asked. Another error where the pool ``blames`` another.
            Lost, Unreadable, Held, Away: the child answered so; Unreadable also when two children died over it, and
                Away when none can be started.
            BeingReset: the device is held back.
        """
        if self._closed:
            raise Away("The service is stopping.")
        seconds = self._deadline if deadline is None else deadline
        if self._held[device]:
            raise _held_back(device)
        answer: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
        self._enqueue(_Question(device, message, seconds, answer))
        return await answer

    @asynccontextmanager
    async def hold(self, devices: Iterable[str]) -> AsyncIterator[None]:
        """See to it that no child of this pool has ``devices`` open, from the start of the body to its end.

        The children that may have asked about them are ended, after the question each is at. Questions about other
        devices go on with a fresh child; those about ``devices`` are answered with :class:`BeingReset` meanwhile.

        Args:
            devices: every name under which they are asked about.

        Raises:
            Stuck: a child that asked about one of them cannot be ended.
        """
        held = frozenset(devices)
        self._held.update(held)
        try:
            lines = (self._shared, *(self._probes[each] for each in sorted(held & self._probes.keys())))
            # What was the shared child once has asked about all of them, whatever it hung over or died of.
            asked = [child for child, device in self._ours.items() if device is None or device in held]
            in_line = {line.child for line in lines}
            for child in asked:
                if child not in in_line:  # first, because those who wait in a line pay for the end of its child
                    await _end(child, held)
            for line in lines:
                async with line.turn:
                    child_of_line, line.child = line.child, None
                    await _end(child_of_line, held)
            for child in asked:  # some have left their line meanwhile
                await _end(child, held)
            yield
        finally:
            self._held -= Counter(held)

    async def close(self) -> None:
        """End every child; whoever waits for an answer gets :class:`Away`."""
        self._closed = True
        workers = tuple(self._workers)
        for worker in workers:
            worker.cancel()
        await asyncio.gather(*workers, return_exceptions=True)

    def _enqueue(self, question: _Question) -> None:
        line = self._probes.get(question.device, self._shared)
        line.waiting.put_nowait(question)
        if line.worker is None:
            line.worker = asyncio.create_task(self._work(line))
            self._workers.add(line.worker)
            line.worker.add_done_callback(self._workers.discard)

    async def _work(self, line: _Line) -> None:
        question: _Question | None = None
        try:
            while line is self._shared or self._probes.get(line.device or "") is line:
                question = await line.waiting.get()
                if question.answer.done():  # its caller left before its turn
                    continue
                if line is self._shared and question.device in self._probes:
                    self._enqueue(question)
                    continue
                async with line.turn:
                    if self._held[question.device]:
                        question.fail(_held_back(question.device))
                        continue
                    await self._settle(line, question)
        finally:
            line.worker = None
            if question is not None:
                question.fail(Away("The question was given up: the service is stopping."))
            for pending in line.drain():
                if self._closed:
                    pending.fail(Away("The service is stopping."))
                else:
                    self._enqueue(pending)
            async with line.turn:
                child, line.child = line.child, None
                if child is not None:
                    await child.kill()

    async def _settle(self, line: _Line, question: _Question) -> None:
        """Get ``question`` its answer or its error, and draw the consequences for its device."""
        if line.hung is not None and not await _dead(line.hung, question.deadline):
            question.fail(_undying(self._blames, question.device, line.hung))
            return
        line.hung = None
        try:
            message = await self._exchange(line, question)
        except TimeoutError:
            if issubclass(self._blames, DeviceFault):
                self._isolate(line, question)
                await self._replace(line)
            else:
                self._give_up(line, question)
            return
        except NotStarted as pressure:
            question.fail(pressure)
            return
        except ChildDied as died:
            question.fail(self._unanswerable(f"Two children in a row could not answer for {question.device}: {died}"))
            return
        except Garbled as error:
            question.fail(self._unanswerable(f"The question about {question.device} cannot be asked: {error}"))
            return
        try:
            answer = answer_of(message)
            if not question.answer.done():
                question.answer.set_result(answer)
        except ScrubberError as fault:
            question.fail(fault)
        if line is not self._shared:
            line.unanswered = [each for each in line.unanswered if each != question.message]
            if not line.unanswered:
                self._probes.pop(question.device, None)  # it answers again: back to the shared child with it

    async def _exchange(self, line: _Line, question: _Question) -> Message:
        try:
            return await (await self._child_of(line)).call(question.message, question.deadline)
        except ChildDied:
            line.drop_child()  # it ended by itself, which need not be this question's fault
        try:
            return await (await self._child_of(line)).call(question.message, question.deadline)
        except ChildDied:
            line.drop_child()
            raise

    async def _child_of(self, line: _Line) -> Child:
        if line.child is None:
            line.child = await self._children.start(
                self._module, *self._arguments, device=line.device, nice=self._nice, environment=self._environment
            )
            self._ours = {each: device for each, device in self._ours.items() if not each.over}
            self._ours[line.child] = line.device
        return line.child

    async def _replace(self, line: _Line) -> None:
        """A new shared child at once; a probe's only when its device is asked again: it will probably hang as well."""
        if line is self._shared:
            try:
                await self._child_of(line)
            except NotStarted:
                return  # the next question tries again, and tells its caller

    def _unanswerable(self, sentence: str) -> ScrubberError:
        return (Unreadable if issubclass(self._blames, DeviceFault) else self._blames)(sentence)

    def _give_up(self, line: _Line, question: _Question) -> None:
        """Kill the child that did not answer, and blame no device. The next question has a fresh one started, once it is
        dead: while it is not, nobody is asked, so that all of this costs one process that cannot be ended.
        """
        line.hung = line.child
        line.drop_child()
        question.fail(
            self._blames(
                f"A child ({self._module}) did not answer within {question.deadline:g} s and was killed. That is no "
                f"fault of {question.device}, about which it was asked; it is asked again."
            )
        )

    def _isolate(self, line: _Line, question: _Question) -> None:
        """Kill the child that did not answer, and have the device asked apart from the others from now on."""
        hung = line.child
        line.drop_child()
        stuck = Stuck(
            f"The driver did not answer about {question.device} within {question.deadline:g} s; "
            "the child that asked was killed, and no other device waits for it."
        )
        question.fail(stuck)
        probe = self._probes.setdefault(question.device, _Line(question.device))
        if question.message not in probe.unanswered:
            probe.unanswered.append(question.message)
        if hung is not None:
            hung.device = question.device
            probe.hung = hung
        for pending in probe.drain():  # all of them about the one device that hangs
            pending.fail(stuck)


async def _end(child: Child | None, held: frozenset[str]) -> None:
    """Be sure that ``child`` is over; raises :class:`Stuck` when it cannot be ended."""
    if child is not None and not (await child.kill() or await child.wait(0.0)):
        raise _undying(Stuck, ", ".join(sorted(held)), child)


def _held_back(device: str) -> BeingReset:
    return BeingReset(f"The driver is not asked about {device} now: it is being reset.")


async def _dead(hung: Child, seconds: float) -> bool:
    """Whether a child that was killed is over, or will be within ``seconds``. For an abandoned one nobody waits again."""
    return await hung.wait(0.0 if hung.abandoned else seconds)


def _undying(blames: type[ScrubberError], device: str, hung: Child) -> ScrubberError:
    if not issubclass(blames, DeviceFault):
        return blames(
            f"Nobody is asked about {device}: process {hung.pid} ({hung.module}), which was asked before, has not "
            "returned from the kernel and cannot be ended. If it stays, reboot the node."
        )
    return blames(
        f"The driver is not asked about {device}: process {hung.pid}, which asked it before, has not returned from the "
        "driver and cannot be ended. It is asked again once that process is gone; if it stays, reboot the node."
    )
