"""The holders of an AMD device, from the compute driver's lists, open device nodes, and memory that no process explains.

No source is enough alone. The compute driver (KFD) lists no process that uses the graphics interface only, and removes
an entry before the memory of the process is free. A walk over ``/proc`` finds processes with a node of the device open,
but not those that it cannot see; ``/dev/kfd`` is the node of all GPUs, so having it open means no device. Memory in use
without a process is what a process left behind. What one source reports and the others cannot explain counts as held.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from scrubber.adapters.amd.requests import Trait, device_request, pci_address, process_memory, trait
from scrubber.adapters.children.driver_response import optional_count
from scrubber.adapters.children.message import Message
from scrubber.adapters.children.process import Children
from scrubber.adapters.children.request_pool import RequestPool
from scrubber.adapters.idle_memory import IdleMemory
from scrubber.adapters.procwalk import (
    ChurningGroup,
    DeviceNodeTarget,
    ProcessMatch,
    UnfinishedProcess,
    live_start_time,
    process_name,
    start_time,
)
from scrubber.adapters.shared_walks import Search, SharedWalks
from scrubber.adapters.walker import uninspected_from
from scrubber.domain.device import Device
from scrubber.domain.errors import ScrubberError, Unreadable
from scrubber.domain.infrastructure import InfrastructureProcess
from scrubber.domain.telemetry import Holder, HolderKind, HolderReport
from scrubber.ports.device import InfrastructureLookup

__all__ = ["AmdHolders"]

_MIB = 1 << 20
_IDLE_ALLOWANCE = 512 * _MIB
"""Bytes in use that may be the driver's own until less is measured. Not measured on hardware: an idle GPU of 192 GiB is
reported with about 300 MiB in use."""
_IDLE_MARGIN = 32 * _MIB

_WALK_LIMITS = (
    "holders: a walk over /proc does not detect descriptors in flight in sockets or moved while their process is "
    "inspected, files registered with io_uring, and device nodes that are opened later"
)
_NOT_WALKED = (
    "holders: processes that have the device's nodes open without a compute context were not searched for on this path"
)
_SHARED_COUNTER = (
    "holders: memory of a partition that no process explains: the driver counts only the memory of its whole GPU"
)
_POLL, _RESCAN_INTERVAL = 0.02, 0.2


@dataclass(frozen=True, slots=True)
class _Usage:
    """The driver's reply: bytes in use (None for a partition), and bytes by PID."""

    used: int | None
    processes: Mapping[int, int]


@dataclass(frozen=True, slots=True)
class _Scan:
    """One scan for the holders of a device.

    Attributes:
        processes: the holders, without this service's own children.
        infrastructure: those of ``processes`` that are infrastructure, by PID.
        memory: bytes by PID, as far as the driver attributes them.
        gone: PIDs that the driver lists and the kernel does not have.
        orphaned_bytes: bytes in use that none of ``processes`` explains; 0 while an unfinished process may own them.
    """

    processes: tuple[ProcessMatch, ...]
    infrastructure: Mapping[int, InfrastructureProcess]
    memory: Mapping[int, int]
    gone: frozenset[int]
    orphaned_bytes: int
    not_covered: tuple[str, ...]
    unfinished: tuple[UnfinishedProcess, ...]
    relays: tuple[ChurningGroup, ...]
    omitted: int

    @property
    def hung(self) -> frozenset[tuple[int, int]]:
        return frozenset((each.pid, each.started) for each in self.processes if each.hung)


class AmdHolders:
    """:class:`scrubber.ports.Holders` of GPUs and partitions. The service must be in the node's PID namespace.

    Args:
        children: this service's children, which are not holders.
        requests: children of :data:`~scrubber.adapters.amd.requests.DRIVER_MODULE`.
        infrastructure: recognizes infrastructure that the policy allows.
        walk_deadline: seconds within which one walk over ``/proc`` returns its report.
        confirm_seconds: seconds for which untraceable use or an unkillable holder must persist before it is reported:
            a process that is just ending looks like both while the driver frees its memory.
    """

    def __init__(
        self,
        children: Children,
        requests: RequestPool,
        *,
        infrastructure: InfrastructureLookup,
        walk_deadline: float = 10.0,
        idle: IdleMemory | None = None,
        confirm_seconds: float = 2.0,
    ) -> None:
        self._children = children
        self._requests = requests
        self._walks = SharedWalks.in_children(children, walk_deadline)
        self._infrastructure = infrastructure
        self._idle = idle or IdleMemory(_IDLE_ALLOWANCE, _IDLE_MARGIN)
        self._confirm_seconds = confirm_seconds

    async def is_held(self, device: Device) -> bool:
        return await self.usage_shows_holder(device, await self._request_usage(device))

    async def usage_shows_holder(self, device: Device, answer: Message) -> bool:
        """Evaluate :meth:`is_held` from a reply to ``used`` that was just received."""
        usage = self._parse_usage(device, answer)
        allowed = _allowed(await self._find_infrastructure(dict.fromkeys(usage.processes, 0), usage, started=False))
        return (
            len(allowed) < len(usage.processes)
            or self._orphaned_bytes(device, usage.used, usage.processes, allowed) > 0
        )

    async def list_holders(
        self, device: Device, pod_uids: Collection[str] = (), scrub: str | None = None
    ) -> HolderReport:
        scan = await self._scan(device, pod_uids, scrub)
        gone, hung, orphaned = scan.gone, scan.hung, scan.orphaned_bytes
        loop = asyncio.get_running_loop()
        end = loop.time() + self._confirm_seconds
        while (gone or hung or orphaned) and loop.time() < end:
            await asyncio.sleep(min(_RESCAN_INTERVAL, end - loop.time()))
            scan = await self._scan(device, pod_uids, scrub)
            gone, hung, orphaned = gone & scan.gone, hung & scan.hung, min(orphaned, scan.orphaned_bytes)
        found = [
            _holder(each, scan.infrastructure.get(each.pid), scan.memory.get(each.pid, 0), hung)
            for each in scan.processes
        ]
        return HolderReport(
            (*found, *_untraceable(gone, orphaned)),
            scan.not_covered,
            uninspected_from(scan.unfinished, scan.relays),
            scan.omitted,
        )

    async def list_users(self, device: Device) -> tuple[Holder, ...]:
        """Return the processes with a compute context on the device."""
        usage = self._parse_usage(device, await self._request_usage(device))
        started = {pid: each for pid in usage.processes if (each := live_start_time(pid)) is not None}
        known = await self._find_infrastructure(started, usage, started=True)
        return tuple(
            Holder(
                pid,
                since,
                known[pid].kind if pid in known else HolderKind.PROCESS,
                process_name(pid),
                known[pid].owner if pid in known else "",
                usage.processes[pid],
                is_monitoring=pid in known and known[pid].is_monitoring,
            )
            for pid, since in started.items()
        )

    def not_covered(self, device: Device) -> tuple[str, ...]:
        return (_NOT_WALKED,) if device.parent is None else (_NOT_WALKED, _SHARED_COUNTER)

    async def wait_until_idle(self, device: Device, deadline: float) -> int:
        """Wait until ``device`` uses no more memory than when idle: the driver clears freed memory, which takes time.

        Returns:
            Bytes above that level after ``deadline`` seconds; 0 as soon as it is reached, and for a partition.

        Raises:
            DriverTimeout, DeviceLost, Unreadable, Unavailable: as :meth:`scrubber.ports.Telemetry.snapshot`.
        """
        loop = asyncio.get_running_loop()
        end = loop.time() + deadline
        while True:
            usage = self._parse_usage(device, await self._request_usage(device))
            allowed = _allowed(await self._find_infrastructure(dict.fromkeys(usage.processes, 0), usage, started=False))
            above = self._orphaned_bytes(device, usage.used, usage.processes, allowed)
            if not above or loop.time() >= end:
                return above
            await asyncio.sleep(min(_POLL, max(0.0, end - loop.time())))

    def forget(self, device: str) -> None:
        """Forget what the driver itself uses on the device with this id; see :meth:`IdleMemory.forget`."""
        self._idle.forget(device)

    async def close(self) -> None:
        """End the children that walk over ``/proc``."""
        await self._walks.close()

    # --- scanning

    async def _scan(self, device: Device, had: Collection[str], scrub: str | None) -> _Scan:
        usage = self._parse_usage(device, await self._request_usage(device))
        own, shared = _numbers(device, (Trait.NUMBER, Trait.CARD_NUMBER)), _numbers(device, (Trait.KFD_NUMBER,))
        search = Search(
            device=device.id,
            target=DeviceNodeTarget(own | shared),
            own_numbers=own,
            pids=frozenset(usage.processes),
            priority_pods=frozenset(had),
            scrub=scrub,
        )
        walk = await self._walks.walk(search)
        members = tuple(each for each in walk.holders if each.pid in usage.processes or not own.isdisjoint(each.parts))
        not_covered = [*walk.not_covered, _WALK_LIMITS]
        if passing := len(walk.holders) - len(members):
            not_covered.append(
                f"holders: {passing} process(es) have only /dev/kfd open, which does not show which GPU they use"
            )
        if device.parent is not None:
            not_covered.append(_SHARED_COUNTER)
        memory = await self._memory_of(device, members, usage, own)
        known = {each.pid: each.started for each in walk.unfinished} | {each.pid: each.started for each in members}
        infrastructure = await self._find_infrastructure(known, usage, started=True)
        allowed = _allowed(infrastructure)
        holding = {each.pid for each in members}
        unfinished = tuple(each for each in walk.unfinished if each.pid not in holding and each.pid not in allowed)
        maybe = any(not each.confined for each in unfinished) or any(not each.confined for each in walk.churning_groups)
        explained = maybe or any(pid not in allowed for pid in holding)
        return _Scan(
            members,
            infrastructure,
            memory,
            frozenset() if walk.holders_omitted else frozenset(usage.processes) - known.keys(),
            0 if explained else self._orphaned_bytes(device, usage.used, memory, allowed),
            tuple(not_covered),
            unfinished,
            walk.churning_groups,
            walk.holders_omitted,
        )

    async def _memory_of(
        self, device: Device, members: Iterable[ProcessMatch], usage: _Usage, numbers: frozenset[int]
    ) -> dict[int, int]:
        """Return bytes by PID: the larger of what the compute driver and the graphics interface attribute to it."""
        memory = dict(usage.processes)
        pids = [each.pid for each in members]
        if not pids:
            return memory
        request = device_request(device, "memory", pids=pids, numbers=sorted(numbers))
        try:
            opened = process_memory(await self._requests.request(pci_address(device), request))
        except ScrubberError:
            return memory  # an attribution only: what it would explain stays unexplained
        return memory | {pid: max(size, memory.get(pid, 0)) for pid, size in opened.items()}

    async def _request_usage(self, device: Device) -> Message:
        return await self._requests.request(pci_address(device), device_request(device, "used"))

    def _parse_usage(self, device: Device, answer: Message) -> _Usage:
        ours = self._own_pids()
        processes = {pid: size for pid, size in process_memory(answer).items() if pid not in ours}
        used = optional_count(answer, "used")
        if used is None and device.parent is None:
            raise Unreadable(f"The driver does not report how much memory of device {device.index} is in use.")
        if used is not None and not process_memory(answer):
            self._idle.record_idle(device.id, used)
        return _Usage(used, processes)

    def _orphaned_bytes(
        self, device: Device, used: int | None, memory: Mapping[int, int], allowed: Iterable[int]
    ) -> int:
        """Return the bytes above the idle level that allowed infrastructure does not account for."""
        if used is None:
            return 0
        return self._idle.excess(device.id, used - sum(memory.get(pid, 0) for pid in allowed))

    async def _find_infrastructure(
        self, pids: Mapping[int, int], usage: _Usage, *, started: bool
    ) -> dict[int, InfrastructureProcess]:
        """Return those of ``pids`` that are infrastructure.

        Args:
            started: whether the values are start times, so that a later process with the same PID does not match.
        """
        found: dict[int, InfrastructureProcess] = {}
        for pid in pids:
            known = await self._infrastructure(pid, has_context=pid in usage.processes)
            if known is not None and (not started or start_time(pid) == pids[pid]):
                found[pid] = known
        return found

    def _own_pids(self) -> frozenset[int]:
        return frozenset({os.getpid(), *self._children.pids()})


def _allowed(infrastructure: Mapping[int, InfrastructureProcess]) -> frozenset[int]:
    """Return the PIDs that do not hold a device: infrastructure, but no program that it runs on the device."""
    return frozenset(pid for pid, each in infrastructure.items() if each.kind is HolderKind.INFRASTRUCTURE)


def _numbers(device: Device, names: Iterable[str]) -> frozenset[int]:
    """Return the device numbers in traits of ``device``.

    Raises:
        Unreadable: one is missing or malformed, so it is unknown which processes have the node open.
    """
    found: set[int] = set()
    for name in names:
        major, _, minor = trait(device, name).partition(":")
        if not (major.isdigit() and minor.isdigit()):
            raise Unreadable(f"Device {device.index} has the {name} {major}:{minor}, which is not a device number.")
        found.add(os.makedev(int(major), int(minor)))
    return frozenset(found)


def _holder(
    found: ProcessMatch, known: InfrastructureProcess | None, memory: int, hung: frozenset[tuple[int, int]]
) -> Holder:
    if known is not None:
        return Holder(
            found.pid, found.started, known.kind, found.command, known.owner, memory, is_monitoring=known.is_monitoring
        )
    kind = HolderKind.UNKILLABLE if (found.pid, found.started) in hung else HolderKind.PROCESS
    return Holder(found.pid, found.started, kind, found.command, memory_bytes=memory)


def _untraceable(gone: frozenset[int], orphaned: int) -> tuple[Holder, ...]:
    """Return at most one holder for use that no process explains, with the reasons."""
    reasons: list[str] = []
    if gone:
        reasons.append(f"the driver lists processes that are gone (PID {', '.join(map(str, sorted(gone)))})")
    if orphaned:
        reasons.append(f"{orphaned} bytes of memory above the idle level are in use by no process")
    return (Holder(0, 0, HolderKind.UNTRACEABLE, "; ".join(reasons)),) if reasons else ()
