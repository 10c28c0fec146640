"""What the driver reports by itself, gathered from one child a GPU, and the XIDs that stand until a reset.

Promises: a GPU that hangs costs its own child and no other GPU's events; a child that died is replaced; what may have
been missed meanwhile is told as "changed", so that somebody looks. Silence says nothing: health is read from snapshots.

NVML tells an XID once, as an event, and has no call that lists them. So they are kept here, for the GPU and the instance
that they were told for, until :meth:`EventWatch.forget`.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from scrubber.adapters.children.message import Message
from scrubber.adapters.children.process import Child, ChildDied, Children, NotStarted
from scrubber.adapters.nvidia.places import Places
from scrubber.adapters.nvidia.question import count, driver_arguments, gpu_of, optional_count, pci_address_of
from scrubber.adapters.signals import Signals, SignalStream
from scrubber.domain.device import Device
from scrubber.domain.errors import Stuck, Unreadable
from scrubber.domain.telemetry import Signal

__all__ = ["EVENTS_MODULE", "EventWatch", "meaning"]

EVENTS_MODULE = "scrubber.adapters.nvidia.events"

# NVML's event types (nvml.h). This process loads no NVML, so they are numbers here; a test compares them.
_XID = 0x8
_MIG_CONFIGURED = 0x100
_UNAVAILABLE = 0x4000
_MEMORY = frozenset({0x1, 0x2, 0x200, 0x400, 0x800, 0x1000, 0x2000})
"""ECC errors of one and two bits, storms of them, retired rows or pages, poison contained and not."""

_Part = tuple[int | None, int | None]
"""A GPU instance and a compute instance; None is all of them."""


def meaning(device: str, kind: int, data: int) -> Signal:
    """The signal for ``device`` that an event of NVML's type ``kind`` makes."""
    if kind == _XID:
        return Signal(device, "xid", data)
    if kind in _MEMORY:
        return Signal(device, "ecc")
    return Signal(device, "lost" if kind == _UNAVAILABLE else "changed")


def _concerns(told: _Part, part: _Part) -> bool:
    """Whether an event that names ``told`` is one of ``part``. What names nobody is everybody's: it is the GPU's."""
    return all(None in pair or pair[0] == pair[1] for pair in zip(told, part, strict=True))


@dataclass(slots=True, eq=False)
class _Gpu:
    """A GPU that is followed. ``parts`` are its devices, by id; ``child`` becomes its child, or the error of its start.

    ``first`` is set once it is known whether its events can be heard. ``unheard`` says why its last child failed, until
    another one has registered. ``ending`` is the last end of its child, under way or over; see :meth:`EventWatch._end`.
    """

    uuid: str
    address: str
    parts: Mapping[str, _Part]
    unwatched: str | None = "Its events are not watched yet."
    unheard: str | None = None
    inforom_corrupt: bool = False
    first: asyncio.Event = field(default_factory=asyncio.Event)
    task: asyncio.Task[None] | None = None
    child: asyncio.Future[Child] | None = None
    ending: asyncio.Task[Child | None] | None = None


class EventWatch:
    """Watches the GPUs that it was last told to :meth:`follow`, from :meth:`start` to :meth:`close`.

    Args:
        fingerprint: changes when a GPU or an instance comes or goes; asked every ``poll`` seconds.
        patience: seconds without a word after which a child is replaced; the first word may take that long as well.
        pauses: seconds before a child is started again, longer from one failure to the next; the last is repeated.
    """

    def __init__(
        self,
        children: Children,
        places: Places,
        fingerprint: Callable[[], Awaitable[str]],
        *,
        poll: float = 3.0,
        patience: float = 30.0,
        pauses: Sequence[float] = (1.0, 2.0, 5.0, 15.0, 60.0),
    ) -> None:
        self._children = children
        self._places = places
        self._fingerprint = fingerprint
        self._poll = poll
        self._patience = patience
        self._pauses = tuple(pauses)
        self._signals = Signals()
        self._gpus: dict[str, _Gpu] = {}
        self._whose: dict[str, tuple[str, _Part]] = {}
        self._seen: dict[str, Counter[tuple[_Part, int]]] = {}
        self._paused: Counter[str] = Counter()
        self._polling: asyncio.Task[None] | None = None
        self._ending: set[asyncio.Task[object]] = set()

    # --- for telemetry

    def xids(self, device: str) -> Mapping[int, int]:
        """XIDs of ``device`` (an id) since the last :meth:`forget`, each with how often it was seen.

        One that names an instance is that instance's; one that names none is the whole GPU's, and so each instance's.
        """
        found: Counter[int] = Counter()
        if device in self._whose:
            gpu, part = self._whose[device]
            for (told, code), times in self._seen.get(gpu, Counter()).items():
                if _concerns(told, part):
                    found[code] += times
        return found

    def unheard(self, device: str) -> str | None:
        """Why XIDs of ``device`` (an id) may go unseen at present; None while they are heard, and where there are none."""
        gpu = self._gpus.get(self._whose[device][0]) if device in self._whose else None
        return None if gpu is None else gpu.unheard

    def inforom_corrupt(self, device: str) -> bool:
        """Whether the InfoROM of the GPU of ``device`` (an id) was found corrupt."""
        gpu = self._gpus.get(self._whose[device][0]) if device in self._whose else None
        return gpu is not None and gpu.inforom_corrupt

    def listen(self) -> SignalStream:
        """Signals from now on, for one consumer."""
        return self._signals.listen()

    @property
    def unwatched(self) -> Mapping[str, str]:
        """GPUs (by UUID) whose events cannot be heard at present, each with the reason."""
        return {gpu.uuid: gpu.unwatched for gpu in self._gpus.values() if gpu.unwatched is not None}

    # --- for the composition root

    def start(self) -> None:
        """Begin to look for GPUs that come and go."""
        self._polling = asyncio.create_task(self._look_for_changes(), name="nvidia inventory changes")

    def follow(self, devices: Iterable[Device]) -> None:
        """Watch the GPUs of ``devices`` and no others. To be told after each reading of the inventory.

        XIDs of a GPU that is not followed are kept: it may come back, and nothing was done about them.
        """
        groups: dict[str, list[Device]] = {}
        for device in devices:
            groups.setdefault(gpu_of(device), []).append(device)
        self._whose = {each.id: (gpu, _part(each)) for gpu, group in groups.items() for each in group}
        for uuid in self._gpus.keys() - groups.keys():
            self._drop(uuid)
        for uuid, group in groups.items():
            parts, address = {each.id: _part(each) for each in group}, pci_address_of(group[0])
            known = self._gpus.get(uuid)
            if known is not None and known.address != address:
                self._drop(uuid)
                known = None
            if known is not None:
                known.parts = parts
            else:
                self._gpus[uuid] = _Gpu(uuid, address, parts)
                self._watch(self._gpus[uuid])

    async def ready(self, deadline: float) -> None:
        """Return once it is known of every GPU whether its events are heard, or after ``deadline`` seconds."""
        await _known(self._gpus.values(), deadline)

    async def close(self) -> None:
        """End every child and every stream of signals."""
        for uuid in tuple(self._gpus):
            self._drop(uuid)
        polling, self._polling = self._polling, None
        if polling is not None:
            polling.cancel()
            self._ending.add(polling)
        if self._ending:
            await asyncio.wait(self._ending)
        self._signals.close()

    # --- for resets

    async def pause(self, gpu: str) -> None:
        """End the child of ``gpu`` (a UUID), which has it open, and start none until as many calls of :meth:`resume`.

        Whoever waits in :meth:`resume` for the same GPU waits no longer. The end goes on when the caller is cancelled.

        Raises:
            Stuck: it cannot be ended.
        """
        self._paused[gpu] += 1
        watched = self._gpus.get(gpu)
        if watched is None:
            return
        watched.unwatched = "It is being reset."
        undying = await asyncio.shield(self._end(watched))
        if undying is not None:
            raise Stuck(_cannot_be_ended(undying, gpu))

    async def resume(self, gpu: str, deadline: float) -> None:
        """Watch ``gpu`` again, from the return on, as what comes before that is never told; what it missed is a change.

        Where that is not known after ``deadline`` seconds, or another reset pauses it before, its events are
        :meth:`unheard` until they are heard.
        """
        if not self._paused[gpu]:
            return
        self._paused[gpu] -= 1
        watched = self._gpus.get(gpu)
        if watched is None:
            return
        watched.unheard = "Its events have not been watched since it was reset."
        if self._paused[gpu]:
            return
        watched.first.clear()
        self._watch(watched)
        await _known([watched], deadline)

    def forget(self, device: str) -> None:
        """The XIDs of ``device`` were cured by a reset; one is always of the whole GPU, with all its instances."""
        if device in self._whose:
            self._seen.pop(self._whose[device][0], None)

    # --- inventory

    async def _look_for_changes(self) -> None:
        before = await self._mark()
        while True:
            await asyncio.sleep(self._poll)
            now = await self._mark()
            if now != before:
                before = now
                self._signals.tell([Signal(None, "changed")])

    async def _mark(self) -> str:
        try:
            return await self._fingerprint()
        except OSError as error:  # the kernel's own files: somebody shall look, and go on looking
            return f"unreadable: {error}"

    # --- children

    def _watch(self, gpu: _Gpu) -> None:
        if self._paused[gpu.uuid]:
            gpu.first.set()
            return
        gpu.task = asyncio.create_task(self._attend(gpu), name=f"nvidia events {gpu.address}")

    def _drop(self, uuid: str) -> None:
        self._end(self._gpus.pop(uuid))

    def _end(self, gpu: _Gpu) -> asyncio.Task[Child | None]:
        """Stop attending to ``gpu`` and end its child, also one that is just being started, whoever waits for that.

        The result is the child where it does not die.
        """
        attending, gpu.task = gpu.task, None
        if attending is not None:
            attending.cancel()
        gpu.first.set()  # nobody is going to hear it now
        before: set[asyncio.Task[object]] = {each for each in (attending, gpu.ending) if each is not None}
        gpu.ending = asyncio.create_task(self._ended(gpu, before))
        self._ending.add(gpu.ending)
        gpu.ending.add_done_callback(self._ending.discard)
        return gpu.ending

    async def _ended(self, gpu: _Gpu, before: set[asyncio.Task[object]]) -> Child | None:
        """As the result of :meth:`_end`; two in conversation with one child would not hear it, so ``before`` ends first."""
        if before:
            await asyncio.wait(before)
        if gpu.child is None:
            return None
        await asyncio.wait({gpu.child})
        if gpu.child.exception() is not None:
            return None
        child = gpu.child.result()
        last_words = asyncio.create_task(self._hear_out(gpu, child))  # runs first, and is still in it when it is killed
        dead = await child.kill() or await child.wait(0.0)
        await last_words
        return None if dead else child

    async def _hear_out(self, gpu: _Gpu, child: Child) -> None:
        """Take what ``child`` says until its end: an XID that nobody has read yet would be told by nobody else."""
        with suppress(ChildDied, Unreadable, _NoMore):
            while True:
                message = await child.receive()
                if "registered" not in message:  # it was, and whoever asks now would call the GPU heard
                    self._take(gpu, message)

    async def _attend(self, gpu: _Gpu) -> None:
        """Keep a child at ``gpu``, for as long as this is not cancelled; the first once that of before has ended."""
        undying = None if gpu.ending is None else await asyncio.shield(gpu.ending)
        if undying is not None:
            gpu.unwatched = gpu.unheard = _cannot_be_ended(undying, gpu.uuid)
            gpu.first.set()
            await _death(undying)
        failures = 0
        while True:
            healthy = await self._one_child(gpu)
            gpu.first.set()
            failures = 1 if healthy else failures + 1
            await asyncio.sleep(self._pauses[min(failures, len(self._pauses)) - 1])

    async def _one_child(self, gpu: _Gpu) -> bool:
        """One child from its start to its end; whether it was of any use. Leaves the reason in ``unwatched``."""
        gpu.child = asyncio.ensure_future(
            self._children.start(
                EVENTS_MODULE,
                *(*driver_arguments(self._places), gpu.address),
                device=gpu.uuid,
                environment=self._places.environment(),
            )
        )
        try:
            child = await asyncio.shield(gpu.child)
        except NotStarted as pressure:
            gpu.unwatched = gpu.unheard = str(pressure)
            return False
        heard = False
        try:
            while True:
                heard = self._take(gpu, await child.hear(self._patience)) or heard
        except TimeoutError:
            gpu.unwatched = f"The driver did not answer about its events for {self._patience:g} s."
        except (ChildDied, Unreadable) as error:
            gpu.unwatched = str(error)
        except _NoMore as end:
            gpu.unwatched = end.sentence
            if end.for_ever:
                gpu.unheard = None
                child.discard()
                gpu.first.set()
                await asyncio.Event().wait()  # until it is dropped or paused
        gpu.unheard = gpu.unwatched
        gpu.first.set()
        if not await child.kill():
            await _death(child)  # a second one would hang as well: one process that cannot be ended is enough
        return heard

    def _take(self, gpu: _Gpu, message: Message) -> bool:
        """Whether ``message`` shows that the child does its work: more than that it began.

        Raises:
            _NoMore: it was the child's last.
            Unreadable: it makes no sense.
        """
        if "registered" in message:
            gpu.unwatched = gpu.unheard = None
            gpu.first.set()
            self._signals.tell(Signal(device, "changed") for device in gpu.parts)
            return False
        if "watching" in message:
            return True
        if "inforom" in message:
            before, gpu.inforom_corrupt = gpu.inforom_corrupt, message["inforom"] is not True
            if gpu.inforom_corrupt is not before:
                self._signals.tell(Signal(device, "changed") for device in gpu.parts)
            return False
        if "fault" in message:
            lost = message["fault"] == "lost"
            self._signals.tell(Signal(device, "lost" if lost else "changed") for device in gpu.parts)
            raise _NoMore(str(message.get("sentence")), for_ever=message["fault"] == "not-applicable")
        kind, data = count(message, "event"), count(message, "data")
        self._note(gpu, kind, data, (optional_count(message, "gi"), optional_count(message, "ci")))
        return True

    def _note(self, gpu: _Gpu, kind: int, data: int, told: _Part) -> None:
        if kind == _XID:
            self._seen.setdefault(gpu.uuid, Counter())[told, data] += 1
        signals = [meaning(device, kind, data) for device, part in gpu.parts.items() if _concerns(told, part)]
        if kind == _MIG_CONFIGURED:
            signals.append(Signal(None, "changed"))
        self._signals.tell(signals)


class _NoMore(Exception):
    """A child says why it ends, and whether another one could do better."""

    def __init__(self, sentence: str, *, for_ever: bool) -> None:
        super().__init__(sentence)
        self.sentence = sentence
        self.for_ever = for_ever


async def _known(gpus: Iterable[_Gpu], deadline: float) -> None:
    """Return once it is known of each of ``gpus`` whether its events are heard, or after ``deadline`` seconds."""
    waiting = [asyncio.create_task(gpu.first.wait()) for gpu in gpus]
    try:
        if waiting:
            await asyncio.wait(waiting, timeout=deadline)
    finally:
        for each in waiting:
            each.cancel()


def _cannot_be_ended(child: Child, gpu: str) -> str:
    return (
        f"Process {child.pid}, which waits for events of {gpu}, has not returned from the driver and cannot be ended. "
        "If it stays, reboot the node."
    )


async def _death(child: Child) -> None:
    while not await child.wait(60.0):
        continue


def _part(device: Device) -> _Part:
    """Which part of its GPU ``device`` is; all of it, unless the driver said otherwise."""
    traits = dict(device.traits)
    return _number(traits.get("gpu_instance")), _number(traits.get("compute_instance"))


def _number(text: str | None) -> int | None:
    return int(text) if text is not None and text.isdecimal() else None
