"""Collects what the driver reports on its own initiative, from one child per GPU, and the XIDs that last until a reset.

Promises: a GPU that hangs costs its own child and no other GPU's events. A child that died is replaced. The children are
forked by one process that calls no driver, and share its memory. Events that may
have been missed meanwhile are reported as "changed", so that the device is checked. Silence proves nothing: health is
read from snapshots.

NVML reports an XID once, as an event, and has no call that lists XIDs. So they are recorded here, for the GPU and the
instance that the event names, until :meth:`EventWatch.forget`.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Protocol

from scrubber.adapters.children.driver_response import count, optional_count
from scrubber.adapters.children.message import Message
from scrubber.adapters.children.process import Child, ChildDied, Children
from scrubber.adapters.children.zygote_client import Zygote
from scrubber.adapters.nvidia.driver_paths import DriverPaths
from scrubber.adapters.nvidia.driver_requests import gpu_uuid, pci_address_of
from scrubber.adapters.signal_stream import SignalBroadcaster, SignalStream
from scrubber.domain.device import Device
from scrubber.domain.errors import DriverTimeout, Unavailable, Unreadable
from scrubber.domain.telemetry import Signal

__all__ = ["EVENTS_MODULE", "EventWatch", "Forks", "event_request", "event_signal", "event_zygote"]

EVENTS_MODULE = "scrubber.adapters.nvidia.events"
_ZYGOTE_MODULE = "scrubber.adapters.nvidia.zygote"

# NVML's event types (nvml.h). This process loads no NVML, so they are numbers here; a test compares them.
_XID = 0x8
_MIG_CONFIGURED = 0x100
_UNAVAILABLE = 0x4000
_MEMORY = frozenset({0x1, 0x2, 0x200, 0x400, 0x800, 0x1000, 0x2000})
"""ECC errors of one and two bits, storms of such errors, retired rows or pages, and poison, contained or not."""

_Part = tuple[int | None, int | None]
"""A GPU instance and a compute instance; None means all of them."""


class Forks(Protocol):
    """Forks the children; :class:`Zygote` implements it."""

    async def fork(self, program: str, *, device: str | None = None) -> Child:
        """Return a fresh child that runs ``program``.

        Raises:
            Unavailable: there is no child, and no device was touched.
        """


def event_zygote(children: Children, paths: DriverPaths) -> Zygote:
    """Return the zygote of the event children; its process starts with the first child."""
    return Zygote(children, _ZYGOTE_MODULE, programs=(EVENTS_MODULE,), environment=paths.environment())


def event_request(paths: DriverPaths, address: str) -> Message:
    """Return the request to a child for the events of the GPU at ``address`` on the PCI bus."""
    return {"proc_driver": str(paths.proc_driver), "pci_devices": str(paths.pci_devices), "address": address}


def event_signal(device: str, kind: int, data: int) -> Signal:
    """Return the signal for ``device`` of an event with NVML's type ``kind``."""
    if kind == _XID:
        return Signal(device, "xid", data)
    if kind in _MEMORY:
        return Signal(device, "ecc")
    return Signal(device, "lost" if kind == _UNAVAILABLE else "changed")


def _concerns(place: _Part, part: _Part) -> bool:
    """Whether an event that names ``place`` concerns ``part``.

    An event without instances is the GPU's, and concerns all.
    """
    return all(None in pair or pair[0] == pair[1] for pair in zip(place, part, strict=True))


@dataclass(slots=True, eq=False)
class _WatchedGpu:
    """A GPU whose events are watched.

    ``parts`` are its devices, by id. ``child`` resolves to its child, or to the error of its start. ``ready`` is set
    once it is known whether its events are received. ``stream_error`` is the reason why its last child failed, until
    another one has registered. ``ending`` is the task that last ended its child, running or finished; see
    :meth:`EventWatch._end`.
    """

    uuid: str
    address: str
    parts: Mapping[str, _Part]
    unwatched_reason: str | None = "Its events are not watched yet."
    stream_error: str | None = None
    inforom_corrupt: bool = False
    ready: asyncio.Event = field(default_factory=asyncio.Event)
    task: asyncio.Task[None] | None = None
    child: asyncio.Future[Child] | None = None
    ending: asyncio.Task[Child | None] | None = None


# See docs/decisions/0024-xids-and-error-counters.md.
class EventWatch:
    """Watches the GPUs of the last call of :meth:`follow`, from :meth:`start` to :meth:`close`.

    Args:
        zygote: forks the children; the caller closes it after this.
        fingerprint: returns a text that changes when a GPU or an instance appears or disappears; called every
            ``poll_interval`` seconds.
        silence_timeout: seconds without a message after which a child is replaced; the first message may take that long
            as well.
        restart_delays: seconds before a child is restarted, increasing from one failure to the next; the last is
            repeated.
    """

    def __init__(
        self,
        zygote: Forks,
        paths: DriverPaths,
        fingerprint: Callable[[], Awaitable[str]],
        *,
        poll_interval: float = 3.0,
        silence_timeout: float = 30.0,
        restart_delays: Sequence[float] = (1.0, 2.0, 5.0, 15.0, 60.0),
    ) -> None:
        self._zygote = zygote
        self._paths = paths
        self._fingerprint = fingerprint
        self._poll_interval = poll_interval
        self._silence_timeout = silence_timeout
        self._restart_delays = tuple(restart_delays)
        self._signals = SignalBroadcaster()
        self._gpus: dict[str, _WatchedGpu] = {}
        self._gpu_parts: dict[str, tuple[str, _Part]] = {}
        self._xids: dict[str, Counter[tuple[_Part, int]]] = {}
        self._paused: Counter[str] = Counter()
        self._polling: asyncio.Task[None] | None = None
        self._ending: set[asyncio.Task[object]] = set()

    # --- for telemetry

    def xids(self, device: str) -> Mapping[int, int]:
        """Return the XIDs of ``device`` (an id) since the last :meth:`forget`, each with how often it was seen.

        An XID that names an instance belongs to that instance. One that names none belongs to the whole GPU, and so to
        each of its instances.
        """
        found: Counter[int] = Counter()
        if device in self._gpu_parts:
            gpu, part = self._gpu_parts[device]
            for (place, code), times in self._xids.get(gpu, Counter()).items():
                if _concerns(place, part):
                    found[code] += times
        return found

    def event_stream_error(self, device: str) -> str | None:
        """Return why XIDs of ``device`` (an id) may be missed at present.

        Return None while they are received, and where the driver reports none.
        """
        gpu = self._gpus.get(self._gpu_parts[device][0]) if device in self._gpu_parts else None
        return None if gpu is None else gpu.stream_error

    def inforom_corrupt(self, device: str) -> bool:
        """Whether the InfoROM of the GPU of ``device`` (an id) was found corrupt."""
        gpu = self._gpus.get(self._gpu_parts[device][0]) if device in self._gpu_parts else None
        return gpu is not None and gpu.inforom_corrupt

    def listen(self) -> SignalStream:
        """Return the signals from now on, for one consumer."""
        return self._signals.subscribe()

    @property
    def unwatched_gpus(self) -> Mapping[str, str]:
        """GPUs (by UUID) whose events are not received at present, each with the reason."""
        return {gpu.uuid: gpu.unwatched_reason for gpu in self._gpus.values() if gpu.unwatched_reason is not None}

    # --- for the composition root

    def start(self) -> None:
        """Start polling for GPUs that appear or disappear."""
        self._polling = asyncio.create_task(self._look_for_changes(), name="nvidia inventory changes")

    def follow(self, devices: Iterable[Device]) -> None:
        """Watch the GPUs of ``devices`` and no others. The caller calls this after each reading of the inventory.

        XIDs of a GPU that is no longer watched are kept: it may return, and nothing was done about them.
        """
        groups: dict[str, list[Device]] = {}
        for device in devices:
            groups.setdefault(gpu_uuid(device), []).append(device)
        self._gpu_parts = {each.id: (gpu, _part(each)) for gpu, group in groups.items() for each in group}
        for uuid in self._gpus.keys() - groups.keys():
            self._unwatch(uuid)
        for uuid, group in groups.items():
            parts, address = {each.id: _part(each) for each in group}, pci_address_of(group[0])
            known = self._gpus.get(uuid)
            if known is not None and known.address != address:
                self._unwatch(uuid)
                known = None
            if known is not None:
                known.parts = parts
            else:
                self._gpus[uuid] = _WatchedGpu(uuid, address, parts)
                self._watch(self._gpus[uuid])

    async def wait_until_ready(self, deadline: float) -> None:
        """Return once it is known of every GPU whether its events are received, or after ``deadline`` seconds."""
        await _wait_until_known(self._gpus.values(), deadline)

    async def close(self) -> None:
        """Kill every child and close every stream of signals."""
        for uuid in tuple(self._gpus):
            self._unwatch(uuid)
        polling, self._polling = self._polling, None
        if polling is not None:
            polling.cancel()
            self._ending.add(polling)
        if self._ending:
            await asyncio.wait(self._ending)
        self._signals.close()

    # --- for resets

    async def pause(self, gpu: str) -> None:
        """End the child of ``gpu`` (a UUID), which has it open.

        No other child is started until :meth:`resume` was called as often as this.

        A caller that waits in :meth:`resume` for the same GPU stops waiting. Ending the child continues when the caller
        is cancelled.

        Raises:
            DriverTimeout: the child cannot be killed.
        """
        self._paused[gpu] += 1
        watched = self._gpus.get(gpu)
        if watched is None:
            return
        watched.unwatched_reason = "The GPU is being reset."
        undying = await asyncio.shield(self._end(watched))
        if undying is not None:
            raise DriverTimeout(_cannot_be_ended(undying, gpu))

    async def resume(self, gpu: str, deadline: float) -> None:
        """Watch ``gpu`` again, and return once its events are received.

        Events before that are never reported; a "changed" signal covers them.

        If its events are still not received after ``deadline`` seconds, or another reset pauses it before then,
        :meth:`event_stream_error` returns an error until they are.
        """
        if not self._paused[gpu]:
            return
        self._paused[gpu] -= 1
        watched = self._gpus.get(gpu)
        if watched is None:
            return
        watched.stream_error = "Its events have not been watched since it was reset."
        if self._paused[gpu]:
            return
        watched.ready.clear()
        self._watch(watched)
        await _wait_until_known([watched], deadline)

    def forget(self, device: str) -> None:
        """Drop the XIDs of ``device``, which a reset cured; a reset covers the whole GPU with all its instances."""
        if device in self._gpu_parts:
            self._xids.pop(self._gpu_parts[device][0], None)

    # --- inventory

    async def _look_for_changes(self) -> None:
        before = await self._read_fingerprint()
        while True:
            await asyncio.sleep(self._poll_interval)
            now = await self._read_fingerprint()
            if now != before:
                before = now
                self._signals.publish([Signal(None, "changed")])

    async def _read_fingerprint(self) -> str:
        try:
            return await self._fingerprint()
        except OSError as error:  # the kernel's own files: report a change, and continue polling
            return f"unreadable: {error}"

    # --- children

    def _watch(self, gpu: _WatchedGpu) -> None:
        if self._paused[gpu.uuid]:
            gpu.ready.set()
            return
        gpu.task = asyncio.create_task(self._supervise(gpu), name=f"nvidia events {gpu.address}")

    def _unwatch(self, uuid: str) -> None:
        self._end(self._gpus.pop(uuid))

    def _end(self, gpu: _WatchedGpu) -> asyncio.Task[Child | None]:
        """Stop supervising ``gpu`` and kill its child, even one that is just being started.

        This happens whether or not the caller awaits the returned task. Its result is the child if it does not die.
        """
        attending, gpu.task = gpu.task, None
        if attending is not None:
            attending.cancel()
        gpu.ready.set()  # no task will receive its events now
        before: set[asyncio.Task[object]] = {each for each in (attending, gpu.ending) if each is not None}
        gpu.ending = asyncio.create_task(self._end_after(gpu, before))
        self._ending.add(gpu.ending)
        gpu.ending.add_done_callback(self._ending.discard)
        return gpu.ending

    async def _end_after(self, gpu: _WatchedGpu, before: set[asyncio.Task[object]]) -> Child | None:
        """Implement :meth:`_end`.

        Two readers of one child would interfere with each other, so ``before`` has to end first.
        """
        if before:
            await asyncio.wait(before)
        if gpu.child is None:
            return None
        await asyncio.wait({gpu.child})
        if gpu.child.exception() is not None:
            return None
        child = gpu.child.result()
        last_words = asyncio.create_task(self._drain(gpu, child))  # is already reading when the child is killed
        dead = await child.kill() or await child.wait(0.0)
        await last_words
        return None if dead else child

    async def _drain(self, gpu: _WatchedGpu, child: Child) -> None:
        """Read the last messages of ``child`` until its end: an XID that was not read yet is reported nowhere else."""
        with suppress(ChildDied, Unreadable, _EventsEnded):
            while True:
                message = await child.receive()
                if "registered" not in message:  # handling that would mark the GPU as watched
                    self._handle_message(gpu, message)

    async def _supervise(self, gpu: _WatchedGpu) -> None:
        """Keep a child running for ``gpu`` until cancelled. The first one starts after the end of its predecessor."""
        undying = None if gpu.ending is None else await asyncio.shield(gpu.ending)
        if undying is not None:
            gpu.unwatched_reason = gpu.stream_error = _cannot_be_ended(undying, gpu.uuid)
            gpu.ready.set()
            await _wait_for_exit(undying)
        failures = 0
        while True:
            healthy = await self._run_child(gpu)
            gpu.ready.set()
            failures = 1 if healthy else failures + 1
            await asyncio.sleep(self._restart_delays[min(failures, len(self._restart_delays)) - 1])

    async def _run_child(self, gpu: _WatchedGpu) -> bool:
        """Run one child from start to end, and return whether it did its work.

        Sets the reason in ``unwatched_gpus``.
        """
        gpu.child = asyncio.ensure_future(self._start_child(gpu))
        try:
            child = await asyncio.shield(gpu.child)
        except Unavailable as pressure:
            gpu.unwatched_reason = gpu.stream_error = str(pressure)
            return False
        received = False
        try:
            while True:
                received = self._handle_message(gpu, await child.receive_within(self._silence_timeout)) or received
        except TimeoutError:
            gpu.unwatched_reason = f"The driver did not respond about its events for {self._silence_timeout:g} s."
        except (ChildDied, Unreadable) as error:
            gpu.unwatched_reason = str(error)
        except _EventsEnded as end:
            gpu.unwatched_reason = end.message
            if end.permanent:
                gpu.stream_error = None
                child.start_kill()
                gpu.ready.set()
                await asyncio.Event().wait()  # until the GPU is dropped or paused
        gpu.stream_error = gpu.unwatched_reason
        gpu.ready.set()
        if not await child.kill():
            await _wait_for_exit(child)  # another child would hang as well: one process that cannot be killed is enough
        return received

    async def _start_child(self, gpu: _WatchedGpu) -> Child:
        child = await self._zygote.fork(EVENTS_MODULE, device=gpu.uuid)
        with suppress(ChildDied):  # its reader notices that as well
            await child.send(event_request(self._paths, gpu.address))
        return child

    def _handle_message(self, gpu: _WatchedGpu, message: Message) -> bool:
        """Handle ``message``, and return whether it shows that the child does its work, not only that it started.

        Raises:
            _EventsEnded: it was the child's last message.
            Unreadable: the message is malformed.
        """
        if "registered" in message:
            gpu.unwatched_reason = gpu.stream_error = None
            gpu.ready.set()
            self._signals.publish(Signal(device, "changed") for device in gpu.parts)
            return False
        if "watching" in message:
            return True
        if "inforom" in message:
            before, gpu.inforom_corrupt = gpu.inforom_corrupt, message["inforom"] is not True
            if gpu.inforom_corrupt is not before:
                self._signals.publish(Signal(device, "changed") for device in gpu.parts)
            return False
        if "fault" in message:
            lost = message["fault"] == "lost"
            self._signals.publish(Signal(device, "lost" if lost else "changed") for device in gpu.parts)
            raise _EventsEnded(str(message.get("message")), permanent=message["fault"] == "not-applicable")
        kind, data = count(message, "event", bits=64), count(message, "data", bits=64)
        self._record_event(gpu, kind, data, (optional_count(message, "gi"), optional_count(message, "ci")))
        return True

    def _record_event(self, gpu: _WatchedGpu, kind: int, data: int, place: _Part) -> None:
        if kind == _XID:
            self._xids.setdefault(gpu.uuid, Counter())[place, data] += 1
        signals = [event_signal(device, kind, data) for device, part in gpu.parts.items() if _concerns(place, part)]
        if kind == _MIG_CONFIGURED:
            signals.append(Signal(None, "changed"))
        self._signals.publish(signals)


class _EventsEnded(Exception):
    """The reason why a child ends, and whether a new child would end the same way (``permanent``)."""

    def __init__(self, message: str, *, permanent: bool) -> None:
        super().__init__(message)
        self.message = message
        self.permanent = permanent


async def _wait_until_known(gpus: Iterable[_WatchedGpu], deadline: float) -> None:
    """Return once it is known of each of ``gpus`` whether its events are received, or after ``deadline`` seconds."""
    waiting = [asyncio.create_task(gpu.ready.wait()) for gpu in gpus]
    try:
        if waiting:
            await asyncio.wait(waiting, timeout=deadline)
    finally:
        for each in waiting:
            each.cancel()


def _cannot_be_ended(child: Child, gpu: str) -> str:
    return (
        f"Process {child.pid}, which waits for events of {gpu}, has not returned from the driver and cannot "
        "be killed. If this persists, reboot the node."
    )


async def _wait_for_exit(child: Child) -> None:
    while not await child.wait(60.0):
        continue


def _part(device: Device) -> _Part:
    """Return the part of its GPU that ``device`` is: all of it, unless the driver reports an instance."""
    traits = dict(device.traits)
    return _number(traits.get("gpu_instance")), _number(traits.get("compute_instance"))


def _number(text: str | None) -> int | None:
    return int(text) if text is not None and text.isdecimal() else None
