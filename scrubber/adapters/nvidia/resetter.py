"""Resets of NVIDIA GPUs: everything that has the GPU open lets go of it, ``nvidia-smi`` resets it, all of it comes back.

Promise: whatever happens, and also when the caller is gone, persistence mode and the watch for events are put back; a
reset that cannot be done now touches nothing; and no other GPU goes unasked or unwatched meanwhile.

NVML has no call for a reset. ``nvidia-smi`` refuses one while anybody has the GPU open, this service included, so its
own handles are closed first: the events' child, and every child that has asked about the GPU.
"""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import AsyncIterator, Callable, Collection, Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from scrubber.adapters.children.process import AbandonedChild, ChildDied, Children
from scrubber.adapters.children.request_pool import RequestPool, parse_answer
from scrubber.adapters.deadlines import stall_tolerant_timeout
from scrubber.adapters.nvidia.driver_paths import DriverPaths
from scrubber.adapters.nvidia.driver_requests import (
    DRIVER_MODULE,
    device_request,
    driver_arguments,
    gpu_uuid,
    pci_address_of,
    text,
)
from scrubber.adapters.nvidia.reset_facts import EraserLookup, ResetFactsReader, nvlink_group, persistence_request
from scrubber.adapters.nvidia.reset_planner import ResetFacts, plan_reset, reset_targets
from scrubber.adapters.nvidia.smi import NvidiaSmi
from scrubber.domain.device import Access, AccessKind, Device
from scrubber.domain.errors import (
    DeviceBusy,
    DeviceFault,
    DeviceLost,
    DriverTimeout,
    ScrubberError,
    Unavailable,
    Unreadable,
)
from scrubber.domain.reset_plan import ResetPlan
from scrubber.ports.device import Holders

__all__ = ["EraserLookup", "EventChildren", "NvidiaResetter", "Suspendable"]

_NODE = re.compile(r"/dev/nvidia\d+")
_RESTORE_TIMEOUT = 10.0
"""Seconds that each act of putting things back may take: it is not cut short by the reset's own deadline."""
_DESCRIBE_TIMEOUT = 10.0
"""Seconds that the driver gets to describe a GPU that was just reset."""
_RELEASE_GRACE = 1.0
"""Seconds that a daemon which was told to let go of the GPU gets for it."""
_POLL = 0.1
_RELEASE_SHARE = 0.5
"""The part of its deadline after which no reset is begun any more: to break one off is worse than not to begin it."""


class EventChildren(Protocol):
    """The children that wait for events, one a GPU; each has its GPU open."""

    async def pause(self, gpu: str) -> None:
        """End the child of ``gpu`` (a UUID) and wait for its end; nobody starts another until :meth:`resume`.

        Raises:
            DriverTimeout: it cannot be ended.
        """

    async def resume(self, gpu: str, deadline: float) -> None:
        """Start one again, and return once it hears its events; also when it does not after ``deadline`` seconds.

        Who looks at the GPU after that misses nothing that came since, or finds it unheard.
        """

    def forget(self, device: str) -> None:
        """The XIDs seen of ``device`` so far were cured by a reset."""


class Suspendable(Protocol):
    """Whatever has children that open GPUs: a pool of questions, the inventory."""

    def suspend(self, devices: Collection[str], /) -> AbstractAsyncContextManager[None]:
        """While this is open none of its children has ``devices`` open (UUIDs and PCI addresses; others are ignored)."""


class NvidiaResetter:
    """:class:`scrubber.ports.Resetter` by ``nvidia-smi --gpu-reset``.

    Args:
        devices: all devices as they were last listed; asked anew each time, and never anybody who may hang.
        driver_pool: the pool of the driver's children; it is asked, and lets go of the GPU.
        suspendables: whoever else has to let go of it.
        children: starts the one that switches persistence mode.
        uid: the user that this service runs as.
    """

    def __init__(
        self,
        *,
        devices: Callable[[], Sequence[Device]],
        holders: Holders,
        erasers: EraserLookup,
        events: EventChildren,
        driver_pool: RequestPool,
        suspendables: Sequence[Suspendable] = (),
        children: Children,
        paths: DriverPaths,
        uid: Callable[[], int] = os.geteuid,
    ) -> None:
        self._facts_reader = ResetFactsReader(
            devices=devices, holders=holders, erasers=erasers, driver_pool=driver_pool, paths=paths, uid=uid
        )
        self._devices = devices
        self._events = events
        self._driver_pool = driver_pool
        self._suspendables: tuple[Suspendable, ...] = (driver_pool, *suspendables)
        self._children = children
        self._paths = paths
        self._locks: dict[str, asyncio.Lock] = {}
        self._smi = NvidiaSmi(paths, kill_timeout=children.kill_timeout)

    @property
    def abandoned(self) -> tuple[AbandonedChild, ...]:
        """Runs of nvidia-smi that could not be ended."""
        return self._smi.abandoned

    async def plan(self, device: Device) -> ResetPlan:
        return plan_reset((await self._facts_reader.read(device))[0])

    async def reset(self, device: Device, deadline: float) -> None:
        """As :meth:`scrubber.ports.Resetter.reset`. A cancelled call ends once everything is put back."""
        letting_go = deadline * _RELEASE_SHARE
        left = deadline
        async with AsyncExitStack() as stack:
            try:
                async with stall_tolerant_timeout(letting_go) as over:  # after that none would be begun
                    await stack.enter_async_context(self._exclusive(device))
                    left -= over()
            except TimeoutError as error:
                raise DeviceBusy(
                    f"Device {device.index}, or one that is reset with it, is being reset already."
                ) from error
            try:
                async with stall_tolerant_timeout(left) as over:
                    facts, concerned = await self._facts_reader.read(device)
                    left -= over()
            except TimeoutError as error:
                raise DriverTimeout(
                    f"What a reset of device {device.index} needs was not known within {deadline:g} s."
                ) from error
            _require_feasible(plan_reset(facts))
            end = asyncio.get_running_loop().time() + left
            await _run_to_completion(self._carry_out(facts, concerned, end - (deadline - letting_go), end))

    @asynccontextmanager
    async def _exclusive(self, device: Device) -> AsyncIterator[None]:
        """Nobody else resets the GPU of ``device``, or one that is joined with it, while this is open."""
        everything = {each.id: each for each in self._devices()}
        async with AsyncExitStack() as stack:
            for gpu in sorted({gpu_uuid(device), *nvlink_group(device, everything)}):
                await stack.enter_async_context(self._locks.setdefault(gpu, asyncio.Lock()))
            yield

    async def _carry_out(self, facts: ResetFacts, concerned: Sequence[Device], latest: float, end: float) -> None:
        """Let go until ``latest``, reset until ``end``, put back; and only then say how it went."""
        gpus = {gpu_uuid(each): each for each in concerned}
        persistent = [device for gpu, device in gpus.items() if gpu in facts.persistence_enabled]
        failure: ScrubberError | None = None
        paused: list[str] = []
        switched: list[Device] = []
        try:
            await self._pause_events(gpus, paused)
            for device in persistent:
                if not _remaining(latest):
                    raise _out_of_time(facts)
                switched.append(device)  # before it is told to: one that did not say so may have done it
                with suppress(
                    DeviceLost, Unreadable
                ):  # of a GPU that answers nothing nvidia-smi says what is in the way
                    await self._set_persistence(device, "disabled", _remaining(end))
            await self._recheck_blockers(facts, concerned, latest)
            async with AsyncExitStack() as stack:
                await self._release_handles(stack, gpus, paused, facts, latest)
                await self._smi.reset(reset_targets(facts), f"Device {facts.device.index}", _remaining(end))
            for each in concerned:
                self._events.forget(each.id)
        except ScrubberError as error:
            failure = error
        except BaseException:  # a defect of ours, or the end of the loop
            await self._restore(switched, paused)
            raise
        problems = await self._restore(switched, paused)
        if failure is None:
            problems += await self._missing_after_reset(gpus)
            if not problems:
                return
            failure = Unreadable(f"Device {facts.device.index} was reset, but needs somebody to look at it.")
        if not problems:
            raise failure
        raise type(failure)(" ".join([str(failure), *problems])) from failure

    async def _pause_events(self, gpus: Iterable[str], paused: list[str]) -> None:
        for gpu in gpus:
            if gpu not in paused:
                paused.append(gpu)
                await self._events.pause(gpu)

    async def _release_handles(
        self,
        stack: AsyncExitStack,
        gpus: Mapping[str, Device],
        paused: list[str],
        facts: ResetFacts,
        latest: float,
    ) -> None:
        """Close every handle of this service's own, until ``stack`` is left.

        Some drivers open every GPU for whoever initialises NVML. Then whoever waits for events of another GPU has these
        open as well, and all of them are left alone.

        Raises:
            DeviceBusy: that took longer than until ``latest``.
            DriverTimeout: one cannot be ended.
        """
        try:
            async with asyncio.timeout_at(latest):
                for holding in self._suspendables:
                    await stack.enter_async_context(holding.suspend(_names(gpus)))
                if self._still_open(gpus):
                    everything = {gpu_uuid(each): each for each in self._devices()}
                    await self._pause_events(everything, paused)
                    for holding in self._suspendables:
                        await stack.enter_async_context(holding.suspend(_names(everything) - _names(gpus)))
        except TimeoutError as error:
            raise _out_of_time(facts) from error
        if not _remaining(latest):
            raise _out_of_time(facts)

    def _still_open(self, gpus: Mapping[str, Device]) -> bool:
        """Whether a child of ours has the node of one of ``gpus`` open."""
        nodes = [Path(each.host_path) for device in gpus.values() for each in device.access if _is_gpu_node(each)]
        numbers = {node.stat().st_rdev for node in nodes if node.exists()}
        return any(not numbers.isdisjoint(_open_numbers(pid)) for pid in self._children.pids())

    async def _recheck_blockers(self, facts: ResetFacts, concerned: Sequence[Device], latest: float) -> None:
        """Somebody may have come since the plan was made, and a daemon may need a moment to let go.

        Raises:
            DeviceBusy: somebody is in the way.
        """
        loop = asyncio.get_running_loop()
        until = min(latest, loop.time() + _RELEASE_GRACE)
        while True:
            now = plan_reset(
                await self._facts_reader.with_current_holders(
                    replace(facts, persistence_enabled=frozenset()), concerned
                )
            )
            if not now.blockers or loop.time() >= until:
                break
            await asyncio.sleep(_POLL)
        _require_feasible(now)

    async def _restore(self, switched: Sequence[Device], paused: Sequence[str]) -> list[str]:
        """Persistence mode, then the watch for events; sentences about a mode that could not be."""
        problems: list[str] = []
        for device in switched:
            try:
                await self._set_persistence(device, "enabled", _RESTORE_TIMEOUT)
            except ScrubberError as error:
                problems.append(f"Persistence mode could not be switched on again (nvidia-smi -pm 1): {error}")
        # Side by side: it may be every GPU of the node.
        await asyncio.gather(*(self._events.resume(gpu, _RESTORE_TIMEOUT) for gpu in paused))
        return problems

    async def _set_persistence(self, device: Device, mode: str, deadline: float) -> None:
        """Set persistence mode in a child that is over when this returns, so that it has no GPU open."""
        child = await self._children.start(
            DRIVER_MODULE,
            *driver_arguments(self._paths),
            device=gpu_uuid(device),
            environment=self._paths.environment(),
        )
        try:
            parse_answer(await child.call(persistence_request(device, mode), deadline))
        except ChildDied as died:
            raise Unreadable(f"The driver did not switch persistence mode: {died}") from died
        except TimeoutError as error:
            raise DriverTimeout("The driver did not answer when it was asked to switch persistence mode.") from error
        finally:
            ended = await child.kill()
        if not ended:
            raise DriverTimeout(
                f"Process {child.pid}, which switched persistence mode, has not returned from the driver."
            )

    async def _missing_after_reset(self, gpus: Mapping[str, Device]) -> list[str]:
        """Sentences about GPUs that the driver does not know again after their reset."""
        problems: list[str] = []
        for gpu, device in gpus.items():
            try:
                answer = await self._driver_pool.request(
                    gpu, device_request(device, "describe"), deadline=_DESCRIBE_TIMEOUT
                )
                if text(answer, "uuid") != gpu:
                    problems.append(f"At {pci_address_of(device)} there is another GPU now.")
            except (DeviceFault, Unavailable) as error:
                problems.append(f"The driver does not describe it: {error} If that stays, it needs a reboot.")
        return problems


def _require_feasible(made: ResetPlan) -> None:
    """Go on only with a plan that can be carried out.

    Raises:
        Unreadable: it never can.
        DeviceBusy: something blocks it now.
    """
    if made.unavailable is not None:
        raise Unreadable(made.unavailable)
    if made.blockers:
        raise DeviceBusy(" ".join(made.blockers))


def _out_of_time(facts: ResetFacts) -> DeviceBusy:
    return DeviceBusy(
        f"Device {facts.device.index} was not reset: before everything had let go of it, the time was over."
    )


async def _run_to_completion(work: Coroutine[Any, Any, None]) -> None:
    """Run ``work`` to its end even if the caller is cancelled meanwhile; the cancellation is raised afterwards."""
    task = asyncio.ensure_future(work)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError as stop:
            cancelled = stop
    if cancelled is not None:
        raise cancelled from task.exception()
    task.result()


def _is_gpu_node(access: Access) -> bool:
    return access.kind is AccessKind.DEVICE_NODE and _NODE.fullmatch(access.container_path) is not None


def _open_numbers(pid: int) -> Iterator[int]:
    """Device numbers of what a child of ours has open; none of one that is just ending."""
    with suppress(OSError):
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):  # closed meanwhile
                yield descriptor.stat().st_rdev


def _names(gpus: Mapping[str, Device]) -> set[str]:
    """Everything that a pool may call these GPUs."""
    return {name for gpu, device in gpus.items() for name in (gpu, device.id, pci_address_of(device))}


def _remaining(end: float) -> float:
    return max(0.0, end - asyncio.get_running_loop().time())
