"""Combines several backends in one service: every query about a device goes to the backend of that device.

A failure in one backend is a fault of its own devices and affects no other: while it is unavailable, or raises an
exception that no port may raise, its devices stay as last seen and answer no query, which takes them out of service,
and the other backends continue.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, suppress
from dataclasses import replace
from typing import TypeVar

from scrubber.domain.device import Device, NodeIdentity
from scrubber.domain.diagnostics import DiagnosticCheck, DiagnosticLevel
from scrubber.domain.errors import ScrubberError, Unavailable, Unreadable
from scrubber.domain.reset_plan import ResetPlan
from scrubber.domain.telemetry import Holder, HolderReport, Signal, Snapshot
from scrubber.ports.device import ConfidentialComputing, DeviceBackend, EraseProgress, EraseReport, EraseRequest

__all__ = ["composite_backend"]

_T = TypeVar("_T")

_INVENTORY_SECONDS = 60.0
"""Seconds for a backend to list its devices, after which it counts as unavailable."""
_RELISTEN_DELAY = 1.0
"""Seconds until a signal stream that ended is opened again."""


@asynccontextmanager
async def composite_backend(
    members: Mapping[str, AbstractAsyncContextManager[DeviceBackend]],
) -> AsyncIterator[DeviceBackend]:
    """Open ``members`` and yield one backend with the devices of all of them.

    Args:
        members: backends by name, in the order in which their devices are listed.

    Raises:
        InvalidConfiguration: one of them cannot be opened.
    """
    async with AsyncExitStack() as stack:
        opened = [_Member(name, await stack.enter_async_context(each)) for name, each in members.items()]
        router = _CompositePorts(opened)
        yield DeviceBackend(
            inventory=router,
            holders=router,
            telemetry=router,
            settings=router,
            resetter=router,
            eraser=router,
            diagnostics=router,
            children=router,
            not_advertised=router.not_advertised,
            confidential=router,
            poll_interval=router.poll_interval,
        )


class _Member:
    """One backend and its last known state."""

    def __init__(self, name: str, ports: DeviceBackend) -> None:
        self.name = name
        self.ports = ports
        self.devices: tuple[Device, ...] = ()
        self.unavailable_reason = ""
        self.driver = ""

    async def refresh(self, *, devices: bool) -> NodeIdentity | None:
        """Query the node's identity and list the devices again; None while the backend is unavailable.

        The devices then stay as they were.

        Args:
            devices: whether to list them in any case; False: only when the backend was unavailable or its driver
                changed.
        """
        try:
            async with asyncio.timeout(_INVENTORY_SECONDS):
                identity = await self.ports.inventory.identity()
                if devices or self.unavailable_reason or self.driver != identity.driver:
                    found = await self.ports.inventory.devices()
                    self.devices = tuple(replace(each, driver=identity.driver, backend=self.name) for each in found)
        except Exception as error:  # noqa: BLE001  # no failure of one backend may affect the others
            self.unavailable_reason = str(error) or repr(error)
            return None
        self.unavailable_reason, self.driver = "", identity.driver
        return identity

    def signals(self) -> AsyncIterator[Signal] | None:
        """Return the signals of the backend from now on; None when they cannot be read."""
        try:
            return self.ports.telemetry.signals()
        except Exception:  # noqa: BLE001  # no failure of one backend may affect the others
            return None

    async def call(self, awaitable: Awaitable[_T]) -> _T:
        """Return the result of ``awaitable``.

        Raises:
            Unreadable: the backend raised an exception that no port may raise.
        """
        try:
            return await awaitable
        except ScrubberError:
            raise
        except Exception as error:
            raise Unreadable(f"The backend {self.name} raised an unexpected error: {error!r}.") from error


class _CompositePorts:
    """All ports of :mod:`scrubber.ports.device`; each query goes to the backend of its device."""

    def __init__(self, members: Sequence[_Member]) -> None:
        self._members = members
        self._by_device: dict[str, _Member] = {}
        self._changed = asyncio.Event()

    def _member_of(self, device: Device) -> _Member:
        member = self._by_device.get(device.id)
        if member is None:
            raise Unreadable(f"No backend of this service manages device {device.id}.")
        return member

    # --- inventory

    async def devices(self) -> tuple[Device, ...]:
        await self._refresh(devices=True)
        found: dict[str, Device] = {}
        for member in self._members:
            for device in member.devices:
                if self._by_device.setdefault(device.id, member) is member:
                    found[device.id] = device
        return tuple(found.values())

    async def identity(self) -> NodeIdentity:
        """The node's identity.

        Each device has its own driver version, so this one names the backends, and never changes.
        """
        first = await self._refresh(devices=False)
        return replace(first, driver=" and ".join(member.name for member in self._members))

    async def _refresh(self, *, devices: bool) -> NodeIdentity:
        before = [member.devices for member in self._members]
        identities = await asyncio.gather(*(member.refresh(devices=devices) for member in self._members))
        if before != [member.devices for member in self._members]:
            self._changed.set()
        first = next((each for each in identities if each is not None), None)
        if first is None:
            raise Unavailable(" ".join(f"{member.name}: {member.unavailable_reason}" for member in self._members))
        return first

    def not_advertised(self) -> Mapping[str, str]:
        reasons = {device: why for member in self._members for device, why in member.ports.not_advertised().items()}
        return reasons | {
            member.name: member.unavailable_reason for member in self._members if member.unavailable_reason
        }

    # --- holders

    async def is_held(self, device: Device) -> bool:
        member = self._member_of(device)
        return await member.call(member.ports.holders.is_held(device))

    async def list_holders(
        self, device: Device, pod_uids: Collection[str] = (), scrub: str | None = None
    ) -> HolderReport:
        member = self._member_of(device)
        return await member.call(member.ports.holders.list_holders(device, pod_uids, scrub))

    async def list_users(self, device: Device) -> tuple[Holder, ...]:
        member = self._member_of(device)
        return await member.call(member.ports.holders.list_users(device))

    def not_covered(self, device: Device) -> tuple[str, ...]:
        return self._member_of(device).ports.holders.not_covered(device)

    # --- telemetry and settings

    def poll_interval(self, device: Device) -> float:
        member = self._by_device.get(device.id)
        return 0.0 if member is None else member.ports.poll_interval(device)

    async def snapshot(self, device: Device) -> Snapshot:
        member = self._member_of(device)
        return await member.call(member.ports.telemetry.snapshot(device))

    def signals(self) -> AsyncIterator[Signal]:
        self._changed.clear()
        return self._merge_signals([(member, member.signals()) for member in self._members])

    async def _merge_signals(
        self, streams: Sequence[tuple[_Member, AsyncIterator[Signal] | None]]
    ) -> AsyncIterator[Signal]:
        queue: asyncio.Queue[Signal] = asyncio.Queue(
            1
        )  # while the reader is slow, each backend merges its unread signals

        async def listen(member: _Member, stream: AsyncIterator[Signal] | None) -> None:
            while True:
                if stream is not None:
                    with suppress(Exception):  # its devices are checked anyway, only later
                        async for signal in stream:
                            await queue.put(signal)
                await asyncio.sleep(_RELISTEN_DELAY)
                stream = member.signals()

        async def follow_inventory() -> None:
            while True:
                await self._changed.wait()
                self._changed.clear()
                await queue.put(Signal(None, "changed"))

        listening = [asyncio.create_task(listen(*each), name=f"signals of {each[0].name}") for each in streams]
        listening.append(asyncio.create_task(follow_inventory(), name="inventories"))
        try:
            while True:
                yield await queue.get()
        finally:
            for task in listening:
                task.cancel()
            await asyncio.gather(*listening, return_exceptions=True)

    async def restore(self, device: Device, expected: Mapping[str, str]) -> Mapping[str, str]:
        member = self._member_of(device)
        return await member.call(member.ports.settings.restore(device, expected))

    # --- resets

    async def plan(self, device: Device) -> ResetPlan:
        member = self._member_of(device)
        return await member.call(member.ports.resetter.plan(device))

    async def reset(self, device: Device, deadline: float) -> None:
        member = self._member_of(device)
        await member.call(member.ports.resetter.reset(device, deadline))

    # --- erasure and diagnostics

    async def erase(
        self, device: Device, request: EraseRequest, progress: Callable[[EraseProgress], None]
    ) -> EraseReport:
        member = self._member_of(device)
        return await member.call(member.ports.eraser.erase(device, request, progress))

    async def find_orphan(self, device: Device) -> int | None:
        member = self._member_of(device)
        return await member.call(member.ports.eraser.find_orphan(device))

    async def terminate_orphan(self, device: Device, deadline: float) -> bool:
        member = self._member_of(device)
        return await member.call(member.ports.eraser.terminate_orphan(device, deadline))

    async def diagnose(self, device: Device, level: DiagnosticLevel, deadline: float) -> tuple[DiagnosticCheck, ...]:
        member = self._member_of(device)
        return await member.call(member.ports.diagnostics.diagnose(device, level, deadline))

    # --- confidential computing

    @property
    def enabled(self) -> bool:
        return any(each.enabled for each in self._confidential())

    async def set_accepting(self, accepting: bool) -> None:
        for each in self._confidential():
            if each.enabled:
                await each.set_accepting(accepting)

    async def attest(self, device: Device, nonce: bytes) -> str | None:
        member = self._member_of(device)
        port = member.ports.confidential
        return None if port is None or not port.enabled else await member.call(port.attest(device, nonce))

    def _confidential(self) -> list[ConfidentialComputing]:
        return [each.ports.confidential for each in self._members if each.ports.confidential is not None]

    # --- children

    @property
    def starts(self) -> Mapping[str, int]:
        return sum((Counter(member.ports.children.starts) for member in self._members), Counter[str]())

    @property
    def abandoned_total(self) -> int:
        return sum(member.ports.children.abandoned_total for member in self._members)

    def pids(self) -> frozenset[int]:
        return frozenset(pid for member in self._members for pid in member.ports.children.pids())
