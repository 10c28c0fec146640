"""The devices of the node: their controllers, and devices that come and go."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import AsyncExitStack, asynccontextmanager

from scrubber.domain.codes import ErrorCode
from scrubber.domain.device import Device, find_device
from scrubber.domain.errors import Held, LedgerFailure
from scrubber.domain.evidence import Finding, Severity, Step
from scrubber.domain.hygiene import Hygiene
from scrubber.domain.record import DeviceRecord, Grant
from scrubber.engine.breaker import CircuitBreaker
from scrubber.engine.dependencies import Dependencies
from scrubber.engine.device.controller import DeviceController, NodeContext
from scrubber.engine.eraser_pool import EraserPool
from scrubber.engine.pods import PodWatch
from scrubber.engine.views import DeviceView

__all__ = ["Devices"]


class Devices:
    """The devices of one node.

    Args:
        resources: returns the kubelet's resources under which the device of a record is handed out.
        changed: called after every change that a reader may want to see.

    Attributes:
        controllers: those of the devices that are handed out, scrubbed and shown, by the id of the device.
        known: ids of the devices that the kubelet is queried about, including those that are about to be added.
        gone: the last records of devices that left the node.
        breaker: what recoveries of the node may still do.
        eraser_pool: how many erasers work at once on the node.
        maintenance: held by the one device that is scrubbed for maintenance.
        inventory_changed: set when devices may have come or gone.
    """

    def __init__(
        self,
        *,
        dependencies: Dependencies,
        pods: PodWatch,
        resources: Callable[[DeviceRecord], frozenset[str]],
        changed: Callable[[], None],
    ) -> None:
        self._dependencies = dependencies
        self._pods = pods
        self._changed = changed
        self._ordered: list[DeviceController] = []
        self._leaving: set[str] = set()
        self.controllers: dict[str, DeviceController] = {}
        self.known: frozenset[str] = frozenset()
        self.gone: dict[str, DeviceRecord] = {}
        self.breaker = CircuitBreaker(self.records, dependencies)
        self.eraser_pool = EraserPool(dependencies.policy().limits.eraser_slots)
        self.maintenance = asyncio.Lock()
        self.inventory_changed = asyncio.Event()
        self._context = NodeContext(
            changed=changed,
            pods=pods,
            still=self.still,
            resources=resources,
            records=self.records,
            breaker=self.breaker,
            eraser_pool=self.eraser_pool,
        )

    def records(self) -> list[DeviceRecord]:
        return [controller.state.record for controller in self.controllers.values()]

    def views(self) -> tuple[DeviceView, ...]:
        """Return the view of each device, in the order of their indices."""
        return tuple(controller.view for controller in self._ordered)

    def find(self, wanted: str) -> DeviceController:
        """Return the controller of the device that operators call ``wanted``.

        Raises:
            InvalidRequest: no device or more than one is called so.
        """
        described = (controller.state.device for controller in self.controllers.values())
        return self.controllers[find_device(described, wanted).id]

    def open_grants(self) -> Iterable[Grant]:
        """Yield all grants whose pods still matter, and each device's last one."""
        for record in self.records():
            yield from record.open_grants
            if record.last_grant is not None:
                yield record.last_grant

    def track_pods(self) -> None:
        """Tell the pod watch which pods matter."""
        grants = [grant for record in self.records() for grant in record.open_grants]
        self._pods.track(grant.pod for grant in grants if grant.pod is not None)

    def make_controller(self, device: Device, record: DeviceRecord) -> DeviceController:
        """Make the controller of ``device``, whose ``record`` is as the ledger has it. It is not used before :meth:`add`."""
        self.known |= {device.id}
        return DeviceController(device, record, dependencies=self._dependencies, node=self._context)

    def add(self, controller: DeviceController) -> None:
        """Hand the device out, scrub it and show it from now on."""
        self.known |= {controller.id}
        self.controllers[controller.id] = controller
        self.breaker.moved()
        self._ordered = sorted(self.controllers.values(), key=lambda each: _index(each.state.device))
        self._changed()

    async def remove(self, device: str) -> None:
        """Forget a device that is gone; its record stays in the ledger, and in memory in case it comes back.

        Raises:
            Held: it is in use, or being scrubbed.
        """
        controller = self.controllers[device]
        self.gone[device] = await controller.state.retire()
        del self.controllers[device]
        self.known -= {device}
        self.breaker.moved()
        self._ordered.remove(controller)
        self._changed()

    def described(self, device: Device) -> None:
        """Take over what the inventory says of a device, unless it is in another place now."""
        controller = self.controllers.get(device.id)
        if controller is not None and device.is_where(controller.state.device):
            self._leaving.discard(device.id)
            controller.state.describe(device)

    async def lost(self, device: str) -> None:
        """Remove a device that the inventory no longer lists, or lists in another place, as soon as it is free."""
        controller = self.controllers[device]
        try:
            await self.remove(device)
        except Held:
            self._leaving.add(device)
            sentence = "The device is no longer in the inventory, or is somewhere else now."
            await controller.health.report([Finding(Step.HEALTH, ErrorCode.LOST, Severity.FAULT, sentence)])
        else:
            self._leaving.discard(device)

    def retry_removals(self) -> None:
        """Have the inventory compared again if a device that was lost while it was in use is free now."""
        left = [controller for device, controller in self.controllers.items() if device in self._leaving]
        if any(each.state.record.hygiene is not Hygiene.IN_USE and each.state.job is None for each in left):
            self.inventory_changed.set()

    @asynccontextmanager
    async def still(self, devices: Iterable[str]) -> AsyncIterator[None]:
        """Keep ``devices`` out of use while this is open; ids that are not handed out here are ignored.

        Raises:
            Held: one of them is in use, or being scrubbed.
        """
        async with AsyncExitStack() as stack:
            for device in sorted(self.controllers.keys() & set(devices)):
                await stack.enter_async_context(self.controllers[device].occupancy.still())
            yield

    async def drain(self) -> None:
        """Stop all scrubs; the devices that they worked on are dirty."""
        stopping = [controller.scrubs.abandon() for controller in self.controllers.values()]
        results = await asyncio.gather(*stopping, return_exceptions=True)
        failures = [each for each in results if isinstance(each, LedgerFailure)]
        if failures:
            raise failures[0]


def _index(device: Device) -> tuple[tuple[int, str], ...]:
    """Return the sort key that puts ``0:10`` after ``0:9``."""
    return tuple((int(part) if part.isdigit() else 1 << 30, part) for part in device.index.split(":"))
