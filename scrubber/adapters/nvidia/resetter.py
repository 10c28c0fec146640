"""Resets NVIDIA GPUs: every handle on the GPU is closed, ``nvidia-smi`` resets it, and the previous state is restored.

Promise: in every case, also when the caller is cancelled, persistence mode and the event watch are restored; a reset
that cannot be done now touches nothing; and no other GPU goes without driver calls or event watch meanwhile.

NVML has no call for a reset. ``nvidia-smi`` refuses one while any process has the GPU open, this service included, so
its own handles are closed first: those of the event child, and of every child that has queried the GPU.
"""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from scrubber.adapters.children.driver_response import text
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
)
from scrubber.adapters.nvidia.reset_facts import EraserLookup, ResetFactsReader, nvlink_group, persistence_request
from scrubber.adapters.nvidia.reset_planner import ResetFacts, plan_reset, reset_targets
from scrubber.adapters.nvidia.smi import NvidiaSmi
from scrubber.completion import run_to_completion
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
"""Timeout of each restoring step, in seconds; independent of the reset's own deadline, which does not interrupt it."""
_DESCRIBE_TIMEOUT = 10.0
"""Seconds that the driver gets to describe a GPU that was just reset."""
_RELEASE_GRACE = 1.0
"""Seconds that a daemon gets to close the GPU after it was requested to."""
_POLL = 0.1
_RELEASE_SHARE = 0.5
"""The part of the deadline after which no reset is started any more: interrupting one is worse than not starting it."""


class EventChildren(Protocol):
    """The children that wait for events, one per GPU; each has its GPU open."""

    async def pause(self, gpu: str) -> None:
        """End the child of ``gpu`` (a UUID) and wait for its end; no other is started until :meth:`resume`.

        Raises:
            DriverTimeout: the child cannot be ended.
        """

    async def resume(self, gpu: str, deadline: float) -> None:
        """Start a child again, and return once it receives events, or after ``deadline`` seconds without.

        A caller that then checks the GPU misses no later event, or finds its event stream reported as lost.
        """

    def forget(self, device: str) -> None:
        """Drop the XIDs of ``device`` seen so far, which a reset cured."""


class Suspendable(Protocol):
    """An owner of children that open GPUs: a pool of driver requests, the inventory."""

    def suspend(self, devices: Collection[str], /) -> AbstractAsyncContextManager[None]:
        """While this is open, none of its children has ``devices`` open (UUIDs, PCI addresses; others are ignored)."""


class NvidiaResetter:
    """:class:`scrubber.ports.Resetter` by ``nvidia-smi --gpu-reset``.

    Args:
        devices: returns all devices as last listed; called each time, and must not call anything that may hang.
        driver_pool: the pool of the driver's children; it serves requests, and releases the GPU.
        suspendables: the other owners of children that have to release the GPU.
        children: starts the child that switches persistence mode.
        uid: returns the user id that this service runs as.
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
        self._smi = NvidiaSmi(paths, children)

    @property
    def abandoned(self) -> tuple[AbandonedChild, ...]:
        """Runs of nvidia-smi that could not be ended."""
        return self._smi.abandoned

    async def plan(self, device: Device) -> ResetPlan:
        return plan_reset((await self._facts_reader.read(device))[0])

    async def reset(self, device: Device, deadline: float) -> None:
        """Implement :meth:`scrubber.ports.Resetter.reset`. A cancelled call ends once everything is restored."""
        letting_go = deadline * _RELEASE_SHARE
        left = deadline
        async with AsyncExitStack() as stack:
            try:
                async with stall_tolerant_timeout(letting_go) as over:  # after that, no reset would be started
                    await stack.enter_async_context(self._exclusive(device))
                    left -= over()
            except TimeoutError as error:
                raise DeviceBusy(
                    f"Device {device.index}, or one that is reset with it, is already being reset."
                ) from error
            try:
                async with stall_tolerant_timeout(left) as over:
                    facts, concerned = await self._facts_reader.read(device)
                    left -= over()
            except TimeoutError as error:
                raise DriverTimeout(
                    f"The facts for a reset of device {device.index} could not be read within {deadline:g} s."
                ) from error
            _require_feasible(plan_reset(facts))
            end = asyncio.get_running_loop().time() + left
            await run_to_completion(self._carry_out(facts, concerned, end - (deadline - letting_go), end))

    @asynccontextmanager
    async def _exclusive(self, device: Device) -> AsyncIterator[None]:
        """Exclude any other reset of the GPU of ``device``, or of one that NVLink connects to it, while open."""
        everything = {each.id: each for each in self._devices()}
        async with AsyncExitStack() as stack:
            for gpu in sorted({gpu_uuid(device), *nvlink_group(device, everything)}):
                await stack.enter_async_context(self._locks.setdefault(gpu, asyncio.Lock()))
            yield

    async def _carry_out(self, facts: ResetFacts, concerned: Sequence[Device], latest: float, end: float) -> None:
        """Release the GPU until ``latest``, reset it until ``end``, restore the previous state, then raise errors."""
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
                switched.append(device)  # before the call: one that fails may still have switched it
                with suppress(
                    DeviceLost, Unreadable
                ):  # for a GPU that replies to nothing, nvidia-smi reports what is in the way
                    await self._set_persistence(device, "disabled", _remaining(end))
            await self._recheck_blockers(facts, concerned, latest)
            async with AsyncExitStack() as stack:
                await self._release_handles(stack, gpus, paused, facts, latest)
                await self._smi.reset(reset_targets(facts), f"Device {facts.device.index}", _remaining(end))
            for each in concerned:
                self._events.forget(each.id)
        except ScrubberError as error:
            failure = error
        except BaseException:  # a defect of this service, or the end of the event loop
            await self._restore(switched, paused)
            raise
        problems = await self._restore(switched, paused)
        if failure is None:
            problems += await self._missing_after_reset(gpus)
            if not problems:
                return
            failure = Unreadable(f"Device {facts.device.index} was reset, but an operator must inspect it.")
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
        """Close every handle that this service has on the GPUs, until ``stack`` is closed.

        Some drivers open every GPU for any process that initialises NVML. Then the children that wait for events of
        other GPUs have these GPUs open as well, and all of them are suspended.

        Raises:
            DeviceBusy: the handles were not closed before ``latest``.
            DriverTimeout: a child cannot be ended.
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
        """Whether a child of this service has the node of one of ``gpus`` open."""
        nodes = [Path(each.host_path) for device in gpus.values() for each in device.access if _is_gpu_node(each)]
        numbers = {node.stat().st_rdev for node in nodes if node.exists()}
        return any(not numbers.isdisjoint(_open_numbers(pid)) for pid in self._children.pids())

    async def _recheck_blockers(self, facts: ResetFacts, concerned: Sequence[Device], latest: float) -> None:
        """Check again for blockers: a process may have opened the GPU since, and a daemon may need time to close it.

        Raises:
            DeviceBusy: something blocks the reset.
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
        """Restore persistence mode, then the event watch; return messages about modes that could not be restored."""
        problems: list[str] = []
        for device in switched:
            try:
                await self._set_persistence(device, "enabled", _RESTORE_TIMEOUT)
            except ScrubberError as error:
                problems.append(f"Persistence mode could not be enabled again (nvidia-smi -pm 1): {error}")
        # Concurrently: it may be every GPU of the node.
        await asyncio.gather(*(self._events.resume(gpu, _RESTORE_TIMEOUT) for gpu in paused))
        return problems

    async def _set_persistence(self, device: Device, mode: str, deadline: float) -> None:
        """Set persistence mode in a child that has ended when this returns, so that it has no GPU open."""
        child = await self._children.start(
            DRIVER_MODULE,
            *driver_arguments(self._paths),
            device=gpu_uuid(device),
            environment=self._paths.environment(),
        )
        try:
            parse_answer(await child.call(persistence_request(device, mode), deadline))
        except ChildDied as died:
            raise Unreadable(f"The driver did not set persistence mode: {died}") from died
        except TimeoutError as error:
            raise DriverTimeout("The driver did not respond when persistence mode was set.") from error
        finally:
            ended = await child.kill()
        if not ended:
            raise DriverTimeout(f"Process {child.pid}, which set persistence mode, has not returned from the driver.")

    async def _missing_after_reset(self, gpus: Mapping[str, Device]) -> list[str]:
        """Return messages about GPUs that the driver does not find again after their reset."""
        problems: list[str] = []
        for gpu, device in gpus.items():
            try:
                answer = await self._driver_pool.request(
                    gpu, device_request(device, "describe"), deadline=_DESCRIBE_TIMEOUT
                )
                if text(answer, "uuid") != gpu:
                    problems.append(f"Another GPU is at {pci_address_of(device)} now.")
            except (DeviceFault, Unavailable) as error:
                problems.append(f"The driver does not describe the device: {error} If this persists, reboot the node.")
        return problems


def _require_feasible(made: ResetPlan) -> None:
    """Return only for a plan that can be carried out.

    Raises:
        Unreadable: it never can.
        DeviceBusy: something blocks it now.
    """
    if made.unavailable is not None:
        raise Unreadable(made.unavailable)
    if made.blockers:
        raise DeviceBusy(" ".join(made.blockers))


def _out_of_time(facts: ResetFacts) -> DeviceBusy:
    return DeviceBusy(f"Device {facts.device.index} was not reset: its handles were not released before the deadline.")


def _is_gpu_node(access: Access) -> bool:
    return access.kind is AccessKind.DEVICE_NODE and _NODE.fullmatch(access.container_path) is not None


def _open_numbers(pid: int) -> Iterator[int]:
    """Return the device numbers that a child has open; none for one that is just ending."""
    with suppress(OSError):
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):  # closed meanwhile
                yield descriptor.stat().st_rdev


def _names(gpus: Mapping[str, Device]) -> set[str]:
    """Return every name that a pool may use for these GPUs."""
    return {name for gpu, device in gpus.items() for name in (gpu, device.id, pci_address_of(device))}


def _remaining(end: float) -> float:
    return max(0.0, end - asyncio.get_running_loop().time())
