"""Clears a simulated device: one eraser child per scrub, forked by a zygote, killed at its deadline, never two at once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from scrubber.adapters.children.eraser_report import parse_byte_count, parse_seconds_by_phase, wait_for_report
from scrubber.adapters.children.message import Message
from scrubber.adapters.children.orphans import terminate_lock_holder
from scrubber.adapters.children.process import ChildDied, Children
from scrubber.adapters.children.zygote_client import Zygote
from scrubber.adapters.deadlines import stall_tolerant_timeout
from scrubber.adapters.locks import lock_holder, lock_path
from scrubber.adapters.sim.inventory import SimInventory
from scrubber.adapters.sim.layout import SimDevice
from scrubber.domain.device import Device
from scrubber.domain.errors import DriverTimeout, Unavailable, Unreadable
from scrubber.ports.device import EraseProgress, EraseReport, EraseRequest

__all__ = ["ERASER_MODULE", "SimEraser", "eraser_zygote"]

ERASER_MODULE = "scrubber.adapters.sim.eraser"

_ZYGOTE_MODULE = "scrubber.adapters.sim.zygote"
_NICE = 19


def eraser_zygote(children: Children) -> Zygote:
    """Return the zygote that forks the erasers of a node; its process starts with the first of them."""
    return Zygote(children, _ZYGOTE_MODULE, programs=(ERASER_MODULE,), nice=_NICE)


class SimEraser:
    """:class:`scrubber.ports.Eraser` on the memory file. ``locks`` is the directory of the devices' lock files."""

    def __init__(self, inventory: SimInventory, zygote: Zygote, locks: Path) -> None:
        self._inventory = inventory
        self._zygote = zygote
        self._locks = locks

    async def erase(
        self, device: Device, request: EraseRequest, progress: Callable[[EraseProgress], None]
    ) -> EraseReport:
        found = self._inventory.find_sim_device(device)
        child = await self._zygote.fork(ERASER_MODULE, device=device.id)
        try:
            async with stall_tolerant_timeout(
                request.deadline
            ):  # a node that is slow to start a child uses up none of it
                await child.send(self._request(found, request))
                report = _report(found, await wait_for_report(child, progress))
        except TimeoutError as error:
            how = "it was killed" if await child.kill() else "it could not be killed and was abandoned"
            raise DriverTimeout(
                f"The eraser of device {device.index} did not finish within {request.deadline:g} s; {how}."
            ) from error
        except ChildDied as died:
            if await self._zygote.died_with_zygote(child):
                raise Unavailable(
                    f"The eraser of device {device.index} was killed together with its zygote; the kernel log shows "
                    "whether memory was short. This is retried."
                ) from died
            raise Unreadable(f"The eraser of device {device.index} gave no valid report: {died}") from died
        finally:
            gone = await child.kill()
        if not gone:
            raise DriverTimeout(
                f"The eraser of device {device.index} has reported and does not exit; it was abandoned."
            )
        return report

    async def find_orphan(self, device: Device) -> int | None:
        return lock_holder(self._lock(device))

    async def terminate_orphan(self, device: Device, deadline: float) -> bool:
        return await terminate_lock_holder(self._lock(device), deadline)

    def _request(self, found: SimDevice, request: EraseRequest) -> Message:
        return {
            "scrub": request.scrub,
            "lock": str(self._lock(found.device)),
            "memory": str(found.memory),
            "bytes": found.device.memory_bytes,
            "inode": found.inode,
            "control": [str(place / "control.json") for place in found.control_directories],
            "audit": request.audit,
            "pattern": request.pattern,
        }

    def _lock(self, device: Device) -> Path:
        return lock_path(self._locks, device.id)


def _report(found: SimDevice, answer: Message) -> EraseReport:
    total = parse_byte_count(answer, "total_bytes")
    if total != found.device.memory_bytes:
        raise Unreadable(f"The eraser worked on {total} bytes instead of {found.device.memory_bytes}.")
    restored = answer.get("restored")
    if not isinstance(restored, str | None):
        raise Unreadable("The eraser's report is invalid.")
    return EraseReport(
        total_bytes=total,
        cleared_bytes=parse_byte_count(answer, "cleared_bytes"),
        verified_bytes=parse_byte_count(answer, "verified_bytes"),
        residue_bytes=None if answer.get("residue_bytes") is None else parse_byte_count(answer, "residue_bytes"),
        failed_bytes=parse_byte_count(answer, "failed_bytes"),
        fence_broken=answer.get("fence_broken") is not False,
        size_restored=restored,
        seconds_by_phase=parse_seconds_by_phase(answer),
    )
