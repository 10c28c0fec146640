"""Who holds an NVIDIA device: the driver's lists, whoever has its node open or mapped, and memory that is nobody's.

No witness is enough alone. The driver lists who has a context, and nobody who only has the node open; a walk over
``/proc`` sees the node, and nobody in another PID namespace's dark corner; memory in use without anyone is what a process
left that no one can name any more. Whatever one of them says and the others cannot explain counts as held. A process that
the walk had no time for is told of as such: it explains what cannot be explained otherwise, and nobody is let in.
"""

from __future__ import annotations

import asyncio
import os
import re
import stat
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from scrubber.adapters.children.message import Message
from scrubber.adapters.children.process import Children
from scrubber.adapters.children.questions import QuestionPool
from scrubber.adapters.nvidia.places import Places
from scrubber.adapters.nvidia.question import about, count, gpu_of
from scrubber.adapters.proc import fields_in, lines_in, number_in
from scrubber.adapters.walk import Found, Nodes, Relay, Unfinished, living_since, name_of, start_time
from scrubber.adapters.walker import WALKER_MODULE, budget_within, read_walk, uninspected
from scrubber.adapters.walker import about as about_walk
from scrubber.domain.device import Access, AccessKind, Device
from scrubber.domain.errors import Away, Unreadable
from scrubber.domain.telemetry import Holder, HolderKind, HolderReport

__all__ = ["ALLOWANCE", "MARGIN", "IdleLevel", "NvidiaHolders"]

MIB = 1 << 20
ALLOWANCE = 64 * MIB
"""Memory in use that may be the driver's own, on a whole GPU or for each slice of an instance, as long as nobody knows
better. Idle whole GPUs are seen with 0 to 4 MiB, instances with 36 MiB a slice (an A100 of 80 GB, driver 570).
"""
MARGIN = 16 * MIB
"""What the driver's own use may differ by from one look to the next."""

_UNSEEN_BY_A_WALK = (
    "holders: no walk over /proc sees descriptors in flight in sockets or moved while their process is looked at, files "
    "registered with io_uring, what is held by way of /dev/nvidia-uvm or /dev/dri alone, and device nodes that are opened "
    "after it without a context of the driver's"
)
_UNASKED = (
    "holders: processes that have {nodes} open without a context of the driver's were not looked for on this path"
)

_POLL, _LOOK_AGAIN = 0.02, 0.2
_GPU_NODE = re.compile(r"/dev/nvidia\d+")
_SLICES = re.compile(r"\b([1-9])g\.")
_CAPABILITIES = b"nvidia-caps"
_CAPABILITY_NODE = re.compile(r"/dev/nvidia-caps/nvidia-cap([0-9]+)")


class IdleLevel:
    """How much memory of a device is in use while nobody uses it.

    Never what was found when the service started: that would make a leftover of yesterday the measure for today. The
    level begins at ``allowance``, for each slice, and only falls, to ``margin`` above the least that was ever in use:
    nobody can take less than nothing away.
    """

    def __init__(self, allowance: int = ALLOWANCE, margin: int = MARGIN) -> None:
        self._allowance = allowance
        self._margin = margin
        self._least: dict[str, int] = {}

    def of(self, device: str, slices: int = 1) -> int:
        """Bytes that may be in use on ``device`` (an id), which has ``slices`` of its GPU; a whole one counts as one."""
        least, allowance = self._least.get(device), self._allowance * slices
        return allowance if least is None else min(allowance, least + self._margin)

    def above(self, device: str, used: int, slices: int = 1) -> int:
        """How many of ``used`` bytes are somebody's; 0 when the device is idle."""
        return max(0, used - self.of(device, slices))

    def seen(self, device: str, used: int) -> None:
        """``used`` bytes were in use while the driver listed no process."""
        self._least[device] = min(used, self._least.get(device, used))

    def forget(self, device: str) -> None:
        """The driver was loaded anew, or the device was reset: what it keeps for itself may be another amount now."""
        self._least.pop(device, None)


@dataclass(frozen=True, slots=True)
class _Usage:
    """The driver's answer: bytes in use, and bytes by PID (0 where it cannot say). PID 0 is one it cannot name."""

    used: int
    processes: Mapping[int, int]


@dataclass(frozen=True, slots=True)
class _Look:
    """One look at a device.

    Attributes:
        members: who holds it, our own children left out.
        names: those of ``members`` that are infrastructure, by PID.
        gone: PIDs that the driver lists and the kernel does not have.
        orphaned: bytes in use that none of ``members`` explains; 0 while anybody is unfinished, who may be their owner.
        unfinished: who may hold it as well, and is neither one of ``members`` nor infrastructure.
        relays: groups whose processes come and go, which may hold it as well.
        more: how many more of them there are than ``members``.
    """

    members: tuple[Found, ...]
    names: Mapping[int, str]
    gone: frozenset[int]
    orphaned: int
    not_covered: tuple[str, ...]
    unfinished: tuple[Unfinished, ...]
    relays: tuple[Relay, ...]
    more: int

    @property
    def hung(self) -> frozenset[tuple[int, int]]:
        return frozenset((each.pid, each.started) for each in self.members if each.hung)


class NvidiaHolders:
    """:class:`scrubber.ports.Holders` of GPUs and MIG instances. The service must be in the node's PID namespace.

    A descriptor of a GPU's node ties nobody to one of its instances. For an instance count its own list of processes,
    its capability nodes and its memory. Compute instances of one GPU instance share their memory: each counts as held
    while another is.

    Args:
        children: ours; they are no holders. Those that walk over ``/proc`` are started here.
        questions: asks children of :data:`~scrubber.adapters.nvidia.question.DRIVER_MODULE`.
        walk_deadline: seconds within which one walk over ``/proc`` is answered.
        look_budget: seconds of a walk that one process may take at most; None for half of what all have.
        infrastructure: the name by which the policy knows a PID as infrastructure, or None.
        settle: seconds that a ghost or an unkillable holder must stay one before it is called so. A process that is
            just ending looks like both for as long as the driver takes its memory back, and either takes a device out
            of service.
    """

    def __init__(
        self,
        children: Children,
        questions: QuestionPool,
        places: Places,
        *,
        infrastructure: Callable[[int], Awaitable[str | None]],
        walk_deadline: float = 10.0,
        look_budget: float | None = None,
        idle: IdleLevel | None = None,
        settle: float = 2.0,
    ) -> None:
        self._children = children
        self._questions = questions
        self._walks = QuestionPool(children, WALKER_MODULE, deadline=walk_deadline, blames=Away)
        self._budget = budget_within(walk_deadline, look_budget)
        self._kernel_s_devices = places.proc_driver.parent.with_name("devices")
        self._infrastructure = infrastructure
        self._idle = idle or IdleLevel()
        self._settle = settle

    async def held(self, device: Device) -> bool:
        return await self.held_by(device, await self._ask(device))

    async def held_by(self, device: Device, answer: Message) -> bool:
        """As :meth:`held`, by an answer to ``used`` that was just given."""
        usage = self._read(device, answer)
        names = await self._names(usage.processes)
        return len(names) < len(usage.processes) or self._orphaned(device, usage, names) > 0

    async def holders(self, device: Device, had: Collection[str] = (), scrub: str | None = None) -> HolderReport:
        look = await self._look(device, had, scrub)
        gone, hung, orphaned = look.gone, look.hung, look.orphaned
        loop = asyncio.get_running_loop()
        end = loop.time() + self._settle
        while (gone or hung or orphaned) and loop.time() < end:
            await asyncio.sleep(min(_LOOK_AGAIN, end - loop.time()))
            look = await self._look(device, had, scrub)
            gone, hung, orphaned = gone & look.gone, hung & look.hung, min(orphaned, look.orphaned)
        report = [_holder(each, look.names.get(each.pid), hung) for each in look.members]
        return HolderReport(
            (*report, *_ghosts(gone, orphaned)),
            look.not_covered,
            uninspected(look.unfinished, look.relays),
            look.more,
        )

    async def users(self, device: Device) -> tuple[Holder, ...]:
        """Whoever is in one of the driver's lists. One that it cannot name (PID 0) is nobody's to compare with."""
        usage = await self._usage(device)
        started = {pid: each for pid in sorted(usage.processes) if pid and (each := living_since(pid)) is not None}
        names = await self._names(started, started=True)
        return tuple(
            Holder(pid, since, HolderKind.INFRASTRUCTURE, names[pid])
            if pid in names
            else Holder(pid, since, HolderKind.PROCESS, name_of(pid))
            for pid, since in started.items()
        )

    def not_asked(self, device: Device) -> tuple[str, ...]:
        nodes = "the device's node" if device.parent is None else "the instance's or its GPU's nodes"
        return (_UNASKED.format(nodes=nodes),)

    async def settled(self, device: Device, deadline: float) -> int:
        """Wait until no more memory of ``device`` is in use than when it is idle: the driver clears what is freed, and
        that takes a while.

        Returns:
            Bytes above that level after ``deadline`` seconds; 0 as soon as it is settled.

        Raises:
            Stuck, Lost, Unreadable, Away: as :meth:`scrubber.ports.Telemetry.snapshot`.
        """
        loop = asyncio.get_running_loop()
        end = loop.time() + deadline
        while True:
            usage = await self._usage(device)
            above = self._orphaned(device, usage, await self._names(usage.processes))
            if not above or loop.time() >= end:
                return above
            await asyncio.sleep(min(_POLL, max(0.0, end - loop.time())))

    def forget(self, device: str) -> None:
        """See :meth:`IdleLevel.forget`."""
        self._idle.forget(device)

    async def close(self) -> None:
        """End the children that walk."""
        await self._walks.close()

    # --- looking

    async def _look(self, device: Device, had: Collection[str], scrub: str | None) -> _Look:
        usage = await self._usage(device)
        own, beside, not_covered = _nodes(device, self._kernel_s_devices)
        question = about_walk(
            Nodes(own | beside),
            excluded=self._ours(),
            named=usage.processes,
            budget=self._budget,
            first=had,
            own=own,
            scrub=scrub,
        )
        walk = read_walk(await self._walks.ask(device.id, question))
        found, cut_short = walk.holders, walk.unfinished
        members = tuple(each for each in found if each.pid in usage.processes or not own.isdisjoint(each.parts))
        passing = len(found) - len(members)
        if passing:
            sentence = (
                f"holders: {passing} process(es) have only the whole GPU's node open, which ties them to no instance"
            )
            not_covered = (*not_covered, sentence)
        known = {each.pid: each.started for each in cut_short} | {each.pid: each.started for each in members}
        names = await self._names(known, started=True)
        holding = {each.pid for each in members}
        unfinished = tuple(each for each in cut_short if each.pid not in holding and each.pid not in names)
        # A confined process would need a context to have memory, and be in the driver's lists.
        maybe = any(not each.confined for each in unfinished) or any(not each.confined for each in walk.relays)
        explained = maybe or any(pid not in names for pid in holding)
        return _Look(
            members,
            names,
            frozenset() if walk.more else frozenset(usage.processes) - known.keys(),
            0 if explained else self._orphaned(device, usage, names),
            (*not_covered, *walk.not_covered, _UNSEEN_BY_A_WALK),
            unfinished,
            walk.relays,
            walk.more,
        )

    async def _ask(self, device: Device) -> Message:
        return await self._questions.ask(gpu_of(device), about(device, "used"))

    async def _usage(self, device: Device) -> _Usage:
        return self._read(device, await self._ask(device))

    def _read(self, device: Device, answer: Message) -> _Usage:
        usage = _read_usage(answer, self._ours())
        if not usage.processes:
            self._idle.seen(device.id, usage.used)
        return usage

    def _orphaned(self, device: Device, usage: _Usage, names: Iterable[int]) -> int:
        """Bytes above the idle level, without what the infrastructure has."""
        explained = sum(usage.processes.get(pid, 0) for pid in names)
        return self._idle.above(device.id, usage.used - explained, _slices(device))

    async def _names(self, pids: Mapping[int, int], *, started: bool = False) -> dict[int, str]:
        """Those of ``pids`` that are infrastructure, with the name that the policy has for them.

        Args:
            started: the values are start times, and a later process of the same PID is not meant.
        """
        names: dict[int, str] = {}
        for pid in pids:
            name = await self._infrastructure(pid) if pid else None
            if name is not None and (not started or start_time(pid) == pids[pid]):
                names[pid] = name
        return names

    def _ours(self) -> frozenset[int]:
        return frozenset({os.getpid(), *self._children.pids()})


def _read_usage(answer: Message, ours: frozenset[int]) -> _Usage:
    """The answer to ``used``. A process that is in several lists has its memory once.

    Raises:
        Unreadable: it makes no sense.
    """
    rows = answer.get("processes")
    if not isinstance(rows, list):
        raise Unreadable("The driver's answer makes no sense: it has no list of processes.")
    processes: dict[int, int] = {}
    for row in rows:
        if not isinstance(row, list) or len(row) != 3 or not isinstance(row[0], int):
            raise Unreadable("The driver's answer makes no sense: a process is a PID, bytes and a list.")
        pid, used = row[0], row[1] if isinstance(row[1], int) else 0
        if pid not in ours:
            processes[pid] = max(used, processes.get(pid, 0))
    return _Usage(count(answer, "used"), processes)


def _slices(device: Device) -> int:
    """How many slices of its GPU an instance has; 1 for a whole GPU, and where the profile does not say."""
    found = _SLICES.search(device.profile or "")
    return 1 if found is None else int(found[1])


def _nodes(device: Device, kernel_s_devices: Path) -> tuple[frozenset[int], frozenset[int], tuple[str, ...]]:
    """Device numbers that are of ``device`` alone, the whole GPU's when it is an instance, and what is not known.

    Raises:
        Unreadable: the GPU's node is not there.
    """
    nodes = [each for each in device.access if each.kind is AccessKind.NODE]
    whole = frozenset(_number_of(each) for each in nodes if _GPU_NODE.fullmatch(each.container_path))
    if not whole:
        raise Unreadable(f"Device {device.index} has no device node, so who has it open is not known.")
    if device.parent is None:
        return whole, frozenset(), ()
    numbers = [_capability(each, kernel_s_devices) for each in nodes if _CAPABILITY_NODE.fullmatch(each.container_path)]
    own = frozenset(number for number in numbers if number is not None)
    if numbers and len(own) == len(numbers):
        return own, whole, ()
    sentence = "holders: not all capability nodes of the instance are known; who has them open was not looked at"
    return own, whole, (sentence,)


def _capability(node: Access, kernel_s_devices: Path) -> int | None:
    """The number of a capability node. Often nobody has made the node on the host: a container may have one all the
    same, so the number is then put together from the kernel's list of devices; None where that does not name it.
    """
    matched = _CAPABILITY_NODE.fullmatch(node.container_path)
    if matched is None or os.path.exists(node.host_path):
        return _number_of(node)
    try:
        rows = [fields_in(line) for line in lines_in(kernel_s_devices.read_bytes())]
    except OSError:
        return None
    major = next((row[0] for row in rows if row[1:] == [_CAPABILITIES] and row[0].isdigit()), None)
    return None if major is None else os.makedev(number_in(major), int(matched[1]))


def _number_of(node: Access) -> int:
    try:
        found = os.stat(node.host_path)
    except OSError as error:
        raise Unreadable(
            f"{node.host_path} cannot be looked at ({error.strerror}), so who has it open is not known: make the node "
            "(nvidia-modprobe), or say where the driver's device nodes are."
        ) from error
    if not stat.S_ISCHR(found.st_mode):
        raise Unreadable(f"{node.host_path} is no device node, so who has the device open is not known.")
    return found.st_rdev


def _holder(found: Found, name: str | None, hung: frozenset[tuple[int, int]]) -> Holder:
    if name is not None:
        return Holder(found.pid, found.started, HolderKind.INFRASTRUCTURE, name)
    stays = (found.pid, found.started) in hung
    return Holder(found.pid, found.started, HolderKind.UNKILLABLE if stays else HolderKind.PROCESS, found.command)


def _ghosts(gone: frozenset[int], orphaned: int) -> tuple[Holder, ...]:
    """One ghost at most, with the reason to believe in it."""
    reasons = []
    if gone:
        pids = ", ".join(str(pid) for pid in sorted(gone) if pid) or "none that it can name"
        reasons.append(f"the driver lists processes that are gone (PID {pids})")
    if orphaned:
        reasons.append(f"{orphaned} bytes of memory are in use above the idle level, and by nobody")
    return (Holder(0, 0, HolderKind.GHOST, "; ".join(reasons)),) if reasons else ()
