"""The holders of an NVIDIA device, from the driver's process lists, open or mapped device nodes, and orphaned memory.

No source is enough alone. The driver lists the processes that have a context, but none that only have the node open. A
walk over ``/proc`` finds processes with the node open, but not those in another PID namespace that it cannot see.
Memory in use without a process is what a process left behind that can no longer be identified. What one source reports
and the others cannot explain counts as held. A process that the walk had no time for is reported as such: it accounts
for memory that is otherwise unexplained, and the device is not granted.
"""

from __future__ import annotations

import asyncio
import os
import re
import stat
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from scrubber.adapters.children.driver_response import count
from scrubber.adapters.children.message import Message
from scrubber.adapters.children.process import Children
from scrubber.adapters.children.request_pool import RequestPool
from scrubber.adapters.idle_memory import IdleMemory
from scrubber.adapters.kernel_text import fields_in, lines_in, number_in
from scrubber.adapters.nvidia.driver_paths import DriverPaths
from scrubber.adapters.nvidia.driver_requests import device_request, gpu_uuid
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
from scrubber.domain.device import Access, AccessKind, Device
from scrubber.domain.errors import Unreadable
from scrubber.domain.infrastructure import InfrastructureProcess
from scrubber.domain.telemetry import Holder, HolderKind, HolderReport
from scrubber.ports.device import InfrastructureLookup

__all__ = ["IDLE_ALLOWANCE", "IDLE_MARGIN", "NvidiaHolders"]

MIB = 1 << 20
IDLE_ALLOWANCE = 64 * MIB
"""Bytes in use that may be the driver's own, per whole GPU or per slice of an instance, until less is measured.

Idle whole GPUs were measured with 0 to 4 MiB, instances with 36 MiB per slice (an A100 of 80 GB, driver 570).
"""
IDLE_MARGIN = 16 * MIB
"""Bytes by which the driver's own use may vary between two readings."""

_WALK_LIMITS = (
    "holders: a walk over /proc does not detect descriptors in flight in sockets or moved while their "
    "process is inspected, files registered with io_uring, access through /dev/nvidia-uvm or /dev/dri only, "
    "and device nodes that are opened later without a driver context"
)
_NOT_WALKED = "holders: processes that have {nodes} open without a driver context were not searched for on this path"

_POLL, _RESCAN_INTERVAL = 0.02, 0.2
_GPU_NODE = re.compile(r"/dev/nvidia\d+")
_SLICES = re.compile(r"\b([1-9])g\.")
_CAPABILITIES = b"nvidia-caps"
_MAJOR = re.compile(rb"[0-9]{1,3}")
_CAPABILITY_NODE = re.compile(r"/dev/nvidia-caps/nvidia-cap([0-9]+)")


@dataclass(frozen=True, slots=True)
class _Usage:
    """The driver's reply: bytes in use, and bytes by PID (0 where it cannot report them).

    PID 0 is one it cannot name.
    """

    used: int
    processes: Mapping[int, int]


@dataclass(frozen=True, slots=True)
class _HolderScan:
    """One scan for the holders of a device.

    Attributes:
        processes: the holders, without this service's own children.
        infrastructure: those of ``processes`` that are infrastructure, by PID.
        memory: bytes by PID, of those in the driver's lists.
        gone: PIDs that the driver lists and the kernel does not have.
        orphaned_bytes: bytes in use that none of ``processes`` explains; 0 while an unfinished process may own them.
        unfinished: processes that may hold it as well, and are neither in ``processes`` nor infrastructure.
        relays: groups whose processes come and go, which may hold it as well.
        omitted: how many more holders there are than ``processes``.
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


class NvidiaHolders:
    """:class:`scrubber.ports.Holders` of GPUs and MIG instances. The service must be in the node's PID namespace.

    A descriptor of a GPU's node does not tie its process to any of the GPU's instances. For an instance, its own
    process list, its capability nodes and its memory count. Compute instances of one GPU instance share their memory:
    each counts as held while another is.

    Args:
        children: this service's children, which are not holders. Those that walk over ``/proc`` are started through it.
        driver_pool: the pool of children of :data:`~scrubber.adapters.nvidia.driver_requests.DRIVER_MODULE`.
        walk_deadline: seconds within which one walk over ``/proc`` returns its report.
        process_budget: maximum seconds of a walk for one process; None for half of the budget of all processes.
        infrastructure: recognizes infrastructure that the policy allows.
        confirm_seconds: seconds for which untraceable use or an unkillable holder must persist before it is reported as
            such. A process that is just ending looks like both while the driver reclaims its memory, and either takes a
            device out of service.
    """

    def __init__(
        self,
        children: Children,
        driver_pool: RequestPool,
        paths: DriverPaths,
        *,
        infrastructure: InfrastructureLookup,
        walk_deadline: float = 10.0,
        process_budget: float | None = None,
        idle: IdleMemory | None = None,
        confirm_seconds: float = 2.0,
    ) -> None:
        self._children = children
        self._driver_pool = driver_pool
        self._walks = SharedWalks.in_children(children, walk_deadline, process_budget)
        self._proc_devices = paths.proc_driver.parent.with_name("devices")
        self._infrastructure = infrastructure
        self._idle = idle or IdleMemory(IDLE_ALLOWANCE, IDLE_MARGIN)
        self._confirm_seconds = confirm_seconds

    async def is_held(self, device: Device) -> bool:
        return await self.usage_shows_holder(device, await self._request_usage(device))

    async def usage_shows_holder(self, device: Device, answer: Message) -> bool:
        """Evaluate :meth:`is_held` from a reply to ``used`` that was just received."""
        usage = self._parse_usage(device, answer)
        allowed = _allowed(await self._find_infrastructure(usage.processes, usage))
        return len(allowed) < len(usage.processes) or self._orphaned_bytes(device, usage, allowed) > 0

    async def list_holders(
        self, device: Device, pod_uids: Collection[str] = (), scrub: str | None = None
    ) -> HolderReport:
        walk_report = await self._scan(device, pod_uids, scrub)
        gone, hung, orphaned = walk_report.gone, walk_report.hung, walk_report.orphaned_bytes
        loop = asyncio.get_running_loop()
        end = loop.time() + self._confirm_seconds
        while (gone or hung or orphaned) and loop.time() < end:
            await asyncio.sleep(min(_RESCAN_INTERVAL, end - loop.time()))
            walk_report = await self._scan(device, pod_uids, scrub)
            gone, hung, orphaned = (
                gone & walk_report.gone,
                hung & walk_report.hung,
                min(orphaned, walk_report.orphaned_bytes),
            )
        report = [
            _holder(each, walk_report.infrastructure.get(each.pid), walk_report.memory.get(each.pid, 0), hung)
            for each in walk_report.processes
        ]
        return HolderReport(
            (*report, *_ghosts(gone, orphaned)),
            walk_report.not_covered,
            uninspected_from(walk_report.unfinished, walk_report.relays),
            walk_report.omitted,
        )

    async def list_users(self, device: Device) -> tuple[Holder, ...]:
        """Return the processes in the driver's lists.

        One that the driver cannot name (PID 0) cannot be compared with grants.
        """
        usage = await self._read_usage(device)
        started = {pid: each for pid in sorted(usage.processes) if pid and (each := live_start_time(pid)) is not None}
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
        nodes = "the device's node" if device.parent is None else "the instance's or its GPU's nodes"
        return (_NOT_WALKED.format(nodes=nodes),)

    async def wait_until_idle(self, device: Device, deadline: float) -> int:
        """Wait until ``device`` uses no more memory than when idle: clearing freed memory takes the driver time.

        Returns:
            Bytes above that level after ``deadline`` seconds; 0 as soon as the level is reached.

        Raises:
            DriverTimeout, DeviceLost, Unreadable, Unavailable: as :meth:`scrubber.ports.Telemetry.snapshot`.
        """
        loop = asyncio.get_running_loop()
        end = loop.time() + deadline
        while True:
            usage = await self._read_usage(device)
            allowed = _allowed(await self._find_infrastructure(usage.processes, usage))
            above = self._orphaned_bytes(device, usage, allowed)
            if not above or loop.time() >= end:
                return above
            await asyncio.sleep(min(_POLL, max(0.0, end - loop.time())))

    def forget(self, device: str) -> None:
        """See :meth:`IdleMemory.forget`."""
        self._idle.forget(device)

    async def close(self) -> None:
        """End the children that walk over ``/proc``."""
        await self._walks.close()

    # --- scanning

    async def _scan(self, device: Device, had: Collection[str], scrub: str | None) -> _HolderScan:
        usage = await self._read_usage(device)
        own, beside, not_covered = _nodes(device, self._proc_devices)
        search = Search(
            device=device.id,
            target=DeviceNodeTarget(own | beside),
            own_numbers=own,
            pids=frozenset(usage.processes),
            priority_pods=frozenset(had),
            scrub=scrub,
        )
        walk = await self._walks.walk(search)
        found, cut_short = walk.holders, walk.unfinished
        members = tuple(each for each in found if each.pid in usage.processes or not own.isdisjoint(each.parts))
        passing = len(found) - len(members)
        if passing:
            message = (
                f"holders: {passing} process(es) have only the whole GPU's node open, which does not show "
                "which instance they use"
            )
            not_covered = (*not_covered, message)
        known = {each.pid: each.started for each in cut_short} | {each.pid: each.started for each in members}
        infrastructure = await self._find_infrastructure(known, usage, started=True)
        allowed = _allowed(infrastructure)
        holding = {each.pid for each in members}
        unfinished = tuple(each for each in cut_short if each.pid not in holding and each.pid not in allowed)
        # A confined process would need a context to have memory, and would then be in the driver's lists.
        maybe = any(not each.confined for each in unfinished) or any(not each.confined for each in walk.churning_groups)
        explained = maybe or any(pid not in allowed for pid in holding)
        return _HolderScan(
            members,
            infrastructure,
            usage.processes,
            frozenset() if walk.holders_omitted else frozenset(usage.processes) - known.keys(),
            0 if explained else self._orphaned_bytes(device, usage, allowed),
            (*not_covered, *walk.not_covered, _WALK_LIMITS),
            unfinished,
            walk.churning_groups,
            walk.holders_omitted,
        )

    async def _request_usage(self, device: Device) -> Message:
        return await self._driver_pool.request(gpu_uuid(device), device_request(device, "used"))

    async def _read_usage(self, device: Device) -> _Usage:
        return self._parse_usage(device, await self._request_usage(device))

    def _parse_usage(self, device: Device, answer: Message) -> _Usage:
        usage = _parse_usage(answer, self._own_pids())
        if not usage.processes:
            self._idle.record_idle(device.id, usage.used)
        return usage

    def _orphaned_bytes(self, device: Device, usage: _Usage, allowed: Iterable[int]) -> int:
        """Return the bytes above the idle level that allowed infrastructure does not account for."""
        explained = sum(usage.processes.get(pid, 0) for pid in allowed)
        return self._idle.excess(device.id, usage.used - explained, _slices(device))

    async def _find_infrastructure(
        self, pids: Mapping[int, int], usage: _Usage, *, started: bool = False
    ) -> dict[int, InfrastructureProcess]:
        """Return those of ``pids`` that are infrastructure.

        Args:
            usage: the driver's lists: the processes in them have a context.
            started: whether the values are start times, so that a later process with the same PID does not match.
        """
        found: dict[int, InfrastructureProcess] = {}
        for pid in pids:
            known = await self._infrastructure(pid, has_context=pid in usage.processes) if pid else None
            if known is not None and (not started or start_time(pid) == pids[pid]):
                found[pid] = known
        return found

    def _own_pids(self) -> frozenset[int]:
        return frozenset({os.getpid(), *self._children.pids()})


def _allowed(infrastructure: Mapping[int, InfrastructureProcess]) -> frozenset[int]:
    """Return the PIDs that do not hold a device: infrastructure, but no program that it runs on the device."""
    return frozenset(pid for pid, each in infrastructure.items() if each.kind is HolderKind.INFRASTRUCTURE)


def _parse_usage(answer: Message, ours: frozenset[int]) -> _Usage:
    """Parse the reply to ``used``. The memory of a process that is in several lists counts once.

    Raises:
        Unreadable: the reply is malformed.
    """
    rows = answer.get("processes")
    if not isinstance(rows, list):
        raise Unreadable("The driver's response is invalid: it has no list of processes.")
    processes: dict[int, int] = {}
    for row in rows:
        if not isinstance(row, list) or len(row) != 3 or type(row[0]) is not int or row[0] < 0:
            raise Unreadable("The driver's response is invalid: a process needs a PID, bytes and a list.")
        pid, used = row[0], max(0, row[1]) if type(row[1]) is int else 0
        if pid not in ours:
            processes[pid] = max(used, processes.get(pid, 0))
    if (total := count(answer, "used")) < 0:
        raise Unreadable("The driver's response is invalid: the memory in use is negative.")
    return _Usage(total, processes)


def _slices(device: Device) -> int:
    """Return how many slices of its GPU an instance has; 1 for a whole GPU, or if the profile does not say."""
    found = _SLICES.search(device.profile or "")
    return 1 if found is None else int(found[1])


def _nodes(device: Device, kernel_s_devices: Path) -> tuple[frozenset[int], frozenset[int], tuple[str, ...]]:
    """Return the device numbers of ``device`` alone, the whole GPU's if it is an instance, and what is not covered.

    Raises:
        Unreadable: the GPU's node does not exist.
    """
    nodes = [each for each in device.access if each.kind is AccessKind.DEVICE_NODE]
    whole = frozenset(_number_of(each) for each in nodes if _GPU_NODE.fullmatch(each.container_path))
    if not whole:
        raise Unreadable(f"Device {device.index} has no device node, so it is unknown which processes have it open.")
    if device.parent is None:
        return whole, frozenset(), ()
    numbers = [_capability(each, kernel_s_devices) for each in nodes if _CAPABILITY_NODE.fullmatch(each.container_path)]
    own = frozenset(number for number in numbers if number is not None)
    if numbers and len(own) == len(numbers):
        return own, whole, ()
    message = (
        "holders: not all capability nodes of the instance are known; processes that have them open were not "
        "searched for"
    )
    return own, whole, (message,)


def _capability(node: Access, kernel_s_devices: Path) -> int | None:
    """Return the number of a capability node; None when the kernel's list of devices does not name its driver.

    Often the node does not exist on the host, but a container may have one all the same, so its number is then composed
    from the kernel's list of devices.
    """
    matched = _CAPABILITY_NODE.fullmatch(node.container_path)
    if matched is None or os.path.exists(node.host_path):
        return _number_of(node)
    try:
        rows = [fields_in(line) for line in lines_in(kernel_s_devices.read_bytes())]
    except OSError:
        return None
    majors = (number_in(row[0]) for row in rows if row[1:] == [_CAPABILITIES] and _MAJOR.fullmatch(row[0]))
    major = next(majors, None)
    return None if major is None else os.makedev(major, int(matched[1]))


def _number_of(node: Access) -> int:
    try:
        found = os.stat(node.host_path)
    except OSError as error:
        raise Unreadable(
            f"{node.host_path} cannot be inspected ({error.strerror}), so it is unknown which processes have "
            "it open: create the node (nvidia-modprobe), or pass the location of the driver's device nodes."
        ) from error
    if not stat.S_ISCHR(found.st_mode):
        raise Unreadable(
            f"{node.host_path} is not a device node, so it is unknown which processes have the device open."
        )
    return found.st_rdev


def _holder(
    found: ProcessMatch, known: InfrastructureProcess | None, memory: int, hung: frozenset[tuple[int, int]]
) -> Holder:
    if known is not None:
        return Holder(
            found.pid, found.started, known.kind, found.command, known.owner, memory, is_monitoring=known.is_monitoring
        )
    stays = (found.pid, found.started) in hung
    kind = HolderKind.UNKILLABLE if stays else HolderKind.PROCESS
    return Holder(found.pid, found.started, kind, found.command, memory_bytes=memory)


def _ghosts(gone: frozenset[int], orphaned: int) -> tuple[Holder, ...]:
    """Return at most one holder for use that no process explains, with the reasons."""
    reasons = []
    if gone:
        pids = ", ".join(str(pid) for pid in sorted(gone) if pid) or "none with a PID"
        reasons.append(f"the driver lists processes that are gone (PID {pids})")
    if orphaned:
        reasons.append(f"{orphaned} bytes of memory above the idle level are in use by no process")
    return (Holder(0, 0, HolderKind.UNTRACEABLE, "; ".join(reasons)),) if reasons else ()
