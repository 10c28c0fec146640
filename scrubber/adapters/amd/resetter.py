"""Resets AMD GPUs by their PCI function, with the driver unbound meanwhile.

The driver's own file for a reset is in debugfs, where reading it is the reset; it is never opened. GPUs of an XGMI hive
are reset together, because a reset of one can disturb the memory of the others. All partitions of a GPU are reset with
it, and made again afterwards: as the policy requires, if it says so, and as before otherwise.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Protocol

from scrubber.adapters.amd.driver_settings import COMPUTE_MODE, MEMORY_MODE
from scrubber.adapters.amd.holders import AmdHolders
from scrubber.adapters.amd.inventory import AmdInventory
from scrubber.adapters.amd.kernel_files import AmdPaths
from scrubber.adapters.amd.requests import DRIVER_MODULE, Trait, driver_arguments, pci_address
from scrubber.adapters.amd.settings import AmdSettings
from scrubber.adapters.amd.telemetry import AmdTelemetry
from scrubber.adapters.children.driver_response import optional_text
from scrubber.adapters.children.message import Message
from scrubber.adapters.children.process import ChildDied, Children
from scrubber.adapters.children.request_pool import RequestPool, parse_answer
from scrubber.completion import run_to_completion
from scrubber.domain.device import Device
from scrubber.domain.errors import DeviceBusy, DriverTimeout, ScrubberError, Unavailable, Unreadable
from scrubber.domain.reset_plan import ResetPlan
from scrubber.domain.telemetry import Holder, HolderKind

__all__ = ["AmdResetter", "OrphanLookup"]

_BIND_TIMEOUT = 60.0
"""Seconds for the driver to take the GPUs back: it initialises their memory and firmware."""


class OrphanLookup(Protocol):
    async def find_orphan(self, device: Device) -> int | None:
        """See :meth:`scrubber.ports.Eraser.find_orphan`."""


class AmdResetter:
    """:class:`scrubber.ports.Resetter` of GPUs and partitions; one reset at a time on the node.

    Args:
        devices: returns all devices as last listed.
        requests: children of :data:`~scrubber.adapters.amd.requests.DRIVER_MODULE`, which release the GPUs.
    """

    def __init__(
        self,
        paths: AmdPaths,
        children: Children,
        requests: RequestPool,
        *,
        devices: Callable[[], Sequence[Device]],
        inventory: AmdInventory,
        holders: AmdHolders,
        erasers: OrphanLookup,
        telemetry: AmdTelemetry,
        settings: AmdSettings,
    ) -> None:
        self._paths = paths
        self._children = children
        self._requests = requests
        self._devices = devices
        self._inventory = inventory
        self._holders = holders
        self._erasers = erasers
        self._telemetry = telemetry
        self._settings = settings
        self._lock = asyncio.Lock()

    async def plan(self, device: Device) -> ResetPlan:
        address = pci_address(device)
        facts = await self._requests.request(address, {"ask": "describe", "pci": address})
        methods = optional_text(facts, "reset_methods")
        concerned = self._concerned(device)
        others = tuple(each for each in concerned if each.id != device.id)
        unavailable = None
        if methods is None:
            unavailable = (
                f"The kernel offers no reset of {address}, as in most virtual machines: reboot the node, or let its "
                "hypervisor reset the GPU."
            )
        blockers: list[str] = []
        agents: list[str] = []
        for each in (device, *others):
            async for blocker, is_agent in self._blockers(each):
                blockers.append(blocker)
                if is_agent:
                    agents.append(blocker)
        return ResetPlan(
            device=device.id,
            method=f"PCI function reset ({methods or 'none'})",
            actions=tuple(self._actions(concerned, facts)),
            unavailable=unavailable,
            blockers=tuple(blockers),
            also_reset=tuple(each.id for each in others),
            agents=tuple(agents),
        )

    async def reset(self, device: Device, deadline: float) -> None:
        """Implement :meth:`scrubber.ports.Resetter.reset`. A cancelled call ends once the driver is bound again.

        Raises:
            DeviceBusy: also if the reset has changed a partition mode: the device is another one now, and is scrubbed
                when it has been listed again.
        """
        if self._lock.locked():
            raise DeviceBusy(f"Device {device.index} was not reset: another reset is in progress on this node.")
        async with self._lock:
            plan = await self.plan(device)
            if plan.unavailable is not None:
                raise Unreadable(plan.unavailable)
            if plan.blockers:
                raise DeviceBusy(" ".join(plan.blockers))
            await run_to_completion(self._carry_out(device, self._concerned(device), deadline))

    def _concerned(self, device: Device) -> tuple[Device, ...]:
        """Return all devices that are reset with ``device``: partitions of its GPU, and the GPUs of its hive."""
        addresses = {pci_address(device), *(pci_address(each) for each in self._devices() if each.id in device.peers)}
        return tuple(each for each in self._devices() if pci_address(each) in addresses) or (device,)

    async def _blockers(self, device: Device) -> AsyncIterator[tuple[str, bool]]:
        """Yield what blocks a reset of ``device``, each with whether it is an agent.

        Use that no process explains does not block: a reset is its cure.
        """
        if (eraser := await self._erasers.find_orphan(device)) is not None:
            yield f"Device {device.index} is being cleared (PID {eraser}): wait until that has ended.", False
        for holder in (await self._holders.list_holders(device)).holders:
            if holder.kind is not HolderKind.UNTRACEABLE:
                is_agent = holder.kind is HolderKind.INFRASTRUCTURE and holder.is_monitoring
                yield _blocker(holder, device), is_agent

    def _actions(self, concerned: Sequence[Device], facts: Message) -> Iterator[str]:
        gpus = ", ".join(_gpus(concerned))
        yield "Check once more for holders."
        yield f"Unbind the amdgpu driver from {gpus}."
        yield f"Write to the file reset of each of them ({optional_text(facts, 'reset_methods') or 'no method'})."
        yield f"Bind the amdgpu driver to {gpus} again, whether or not the reset succeeded."
        if changed := self._changes(concerned):
            yield f"Change {', '.join(changed)}, as the policy requires; the mode of the memory changes as the driver is unbound."
        elif any(each.parent is not None for each in concerned):
            yield "Set the partition mode from before the reset again."
        masks = [optional_text(facts, name) for name in ("gfx_reset_mask", "compute_reset_mask")]
        if known := "; ".join(mask for mask in masks if mask):
            yield f"The driver itself can also reset: {known}. This service does not use that."
        yield "Read its description and error counters; then health, settings and memory are checked."

    async def _carry_out(self, device: Device, concerned: Sequence[Device], deadline: float) -> None:
        gpus = _gpus(concerned)
        memory_modes = self._modes(concerned, MEMORY_MODE, Trait.MEMORY_MODE)
        modes = self._modes(concerned, COMPUTE_MODE, Trait.COMPUTE_MODE)
        requested = self._changes(concerned)
        for address in gpus:
            self._settings.forget(address)
        async with self._released(gpus):
            failure: ScrubberError | None = None
            try:
                await self._call(device, {"ask": "reset", "gpus": gpus, "memory_modes": memory_modes}, deadline)
            except ScrubberError as error:
                failure = error
            try:
                await self._call(device, {"ask": "bind", "gpus": gpus}, _BIND_TIMEOUT)
            except ScrubberError as error:
                message = f"The amdgpu driver did not take {', '.join(gpus)} back: {error} Reboot the node."
                raise Unreadable(f"{failure} {message}" if failure else message) from error
            try:
                await self._call(device, {"ask": "partition", "modes": modes}, _BIND_TIMEOUT)
            except ScrubberError as error:
                message = f"{', '.join(gpus)} could not be partitioned: {error}"
                raise Unreadable(f"{failure} {message}" if failure else message) from error
        if failure is not None:
            raise failure
        for each in concerned:
            await self._telemetry.record_reset(each)
            self._holders.forget(each.id)
        if requested:
            self._telemetry.report_change()
        if ignored := await self._ignored({MEMORY_MODE: memory_modes, COMPUTE_MODE: modes}, gpus):
            raise Unreadable(
                f"The driver accepted the partition modes and did not apply all of them: {', '.join(ignored)}. Choose modes in the "
                "policy that the GPU supports, or reboot the node."
            )
        if requested:
            raise DeviceBusy(
                f"The reset has changed {', '.join(requested)}, as the policy requires. The devices of these GPUs are listed "
                "again, and each is scrubbed."
            )

    def _modes(self, concerned: Sequence[Device], setting: str, trait_name: str) -> dict[str, str]:
        """Return the mode that each GPU should have after a reset, by address: the requested one, or its present one."""
        modes = {pci_address(each): dict(each.traits).get(trait_name) for each in concerned}
        wanted = {address: self._settings.requested_mode(address, setting) or mode for address, mode in modes.items()}
        return {address: mode for address, mode in wanted.items() if mode is not None}

    def _changes(self, concerned: Sequence[Device]) -> list[str]:
        """Return the changes of modes that the policy requested, as text."""
        return [
            f"{address} from {present} to {mode}"
            for setting, name in ((MEMORY_MODE, Trait.MEMORY_MODE), (COMPUTE_MODE, Trait.COMPUTE_MODE))
            for address, present in {pci_address(each): dict(each.traits).get(name) for each in concerned}.items()
            if (mode := self._settings.requested_mode(address, setting)) is not None
        ]

    async def _ignored(self, modes: Mapping[str, Mapping[str, str]], gpus: Sequence[str]) -> list[str]:
        """Return, as text, which of ``modes`` (setting → address → mode) the GPUs do not have."""
        found = {gpu: await self._requests.request(gpu, {"ask": "describe", "pci": gpu}) for gpu in gpus}
        return [
            f"{setting} of {gpu} is {present or 'unknown'}, not {mode}"
            for setting, by_gpu in modes.items()
            for gpu, mode in by_gpu.items()
            if (present := optional_text(found[gpu], setting)) != mode
        ]

    @asynccontextmanager
    async def _released(self, gpus: Sequence[str]) -> AsyncIterator[None]:
        """Keep this service's own children away from the GPUs while open."""
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(self._inventory.suspend(gpus))
            await stack.enter_async_context(self._requests.suspend(gpus))
            yield

    async def _call(self, device: Device, request: Message, deadline: float) -> None:
        """Have a child of its own handle ``request``: it takes long, and requests about other GPUs continue."""
        child = await self._children.start(DRIVER_MODULE, *driver_arguments(self._paths), device=device.id)
        try:
            parse_answer(await child.call(request, deadline))
        except ChildDied as died:
            raise Unreadable(f"The reset of device {device.index} exited without a result: {died}") from died
        except TimeoutError as error:
            raise DriverTimeout(f"The reset of device {device.index} did not finish within {deadline:g} s.") from error
        except Unavailable as error:
            raise Unreadable(str(error)) from error
        finally:
            await child.kill()


def _gpus(devices: Sequence[Device]) -> list[str]:
    return sorted({pci_address(device) for device in devices})


def _blocker(holder: Holder, device: Device) -> str:
    who = f"{holder.owner or holder.command or 'An unnamed process'} (PID {holder.pid})"
    match holder.kind:
        case HolderKind.UNKILLABLE:
            return f"{who} holds device {device.index} and cannot be killed: reboot the node."
        case HolderKind.INFRASTRUCTURE:
            return f"{who} holds device {device.index}; it is infrastructure and is not killed: stop it for the reset."
        case _:
            return f"{who} holds device {device.index}: it must end first."
