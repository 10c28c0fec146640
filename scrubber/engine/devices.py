"""The devices of the node: their controllers, and devices that appear and disappear."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import AsyncExitStack, asynccontextmanager

from scrubber.domain.codes import ErrorCode
from scrubber.domain.device import Device, find_device
from scrubber.domain.errors import DeviceBusy, LedgerFailure
from scrubber.domain.evidence import Finding, Severity, Step
from scrubber.domain.record import DeviceRecord, Grant
from scrubber.domain.states import Hygiene
from scrubber.engine.breaker import CircuitBreaker
from scrubber.engine.dependencies import Dependencies
from scrubber.engine.device.controller import DeviceController, NodeContext
from scrubber.engine.eraser_pool import EraserPool
from scrubber.engine.pods import PodTracker
from scrubber.engine.views import DeviceView

__all__ = ["Devices"]


class Devices:
    """The devices of one node.

    Args:
        resources: returns the kubelet's resources that advertise the device of a record.
        on_change: called after every change that may interest a reader.

    Attributes:
        controllers: controllers of the devices that are handed out, scrubbed and published, by device ID.
        known_ids: IDs of the devices that the kubelet is queried about, including those that are about to be added.
        removed_records: the last records of devices that left the node, or that the ledger knows and the node lacks.
        arrivals: held while a device that returns to the node is inspected: nothing else changes removed records then.
        breaker: limits on the recoveries of the node.
        eraser_pool: limits how many children work on devices at once.
        maintenance: held by the one device that is scrubbed for maintenance.
        inventory_changed: set when devices may have appeared or disappeared.
    """

    def __init__(
        self,
        *,
        dependencies: Dependencies,
        pods: PodTracker,
        resources: Callable[[DeviceRecord], frozenset[str]],
        on_change: Callable[[], None],
    ) -> None:
        self._dependencies = dependencies
        self._pods = pods
        self._on_change = on_change
        self._ordered: list[DeviceController] = []
        self._leaving: set[str] = set()
        self.controllers: dict[str, DeviceController] = {}
        self.known_ids: frozenset[str] = frozenset()
        self.removed_records: dict[str, DeviceRecord] = {}
        self.arrivals = asyncio.Lock()
        self.breaker = CircuitBreaker(self.records, dependencies)
        self.eraser_pool = EraserPool(lambda: dependencies.policy().limits.eraser_slots)
        self.maintenance = asyncio.Lock()
        self.inventory_changed = asyncio.Event()
        self._context = NodeContext(
            on_change=on_change,
            pods=pods,
            keep_out_of_use=self.keep_out_of_use,
            resources=resources,
            records=self.records,
            breaker=self.breaker,
            eraser_pool=self.eraser_pool,
        )

    def records(self) -> list[DeviceRecord]:
        return [controller.state.record for controller in self.controllers.values()]

    @property
    def free_eraser_slots(self) -> int:
        """Number of erasers that could start now, if every device of the node were to be cleared."""
        size = self.eraser_pool.size(each.state.device.shared_resource for each in self.controllers.values())
        return max(0, size - self.eraser_pool.busy)

    def views(self) -> tuple[DeviceView, ...]:
        """Return the view of each device, ordered by index."""
        return tuple(controller.view for controller in self._ordered)

    def find(self, query: str) -> DeviceController:
        """Return the controller of the device that matches ``query``.

        Raises:
            InvalidRequest: no device or more than one matches.
        """
        described = (controller.state.device for controller in self.controllers.values())
        return self.controllers[find_device(described, query).id]

    def open_grants(self) -> Iterable[Grant]:
        """Yield all grants whose pods still matter, and the last grant of each device."""
        for record in self.records():
            yield from record.open_grants
            if record.last_grant is not None:
                yield record.last_grant

    def track_pods(self) -> None:
        """Track the pods of all open grants."""
        grants = [grant for record in self.records() for grant in record.open_grants]
        self._pods.track(pod for grant in grants for pod in grant.pods)

    def make_controller(self, device: Device, record: DeviceRecord) -> DeviceController:
        """Make the controller of ``device`` with its ``record`` from the ledger. It is not used before :meth:`add`."""
        self.known_ids |= {device.id}
        return DeviceController(device, record, dependencies=self._dependencies, node=self._context)

    def add(self, controller: DeviceController) -> None:
        """Hand out, scrub and publish the device from now on."""
        self.known_ids |= {controller.id}
        self.controllers[controller.id] = controller
        self.removed_records.pop(controller.id, None)
        self.breaker.invalidate()
        self._ordered = sorted(self.controllers.values(), key=lambda each: _index(each.state.device))
        self._on_change()

    async def remove(self, device: str) -> None:
        """Remove a device that is gone; its record stays in the ledger, and in memory in case the device returns.

        Raises:
            DeviceBusy: the device is in use or being scrubbed.
        """
        controller = self.controllers[device]
        self.removed_records[device] = await controller.state.retire()
        del self.controllers[device]
        self.known_ids -= {device}
        self.breaker.invalidate()
        self._ordered.remove(controller)
        self._on_change()

    def update_description(self, device: Device) -> None:
        """Apply the inventory's description of a device, unless the device is in another location now."""
        controller = self.controllers.get(device.id)
        if controller is not None and device.has_same_location(controller.state.device):
            self._leaving.discard(device.id)
            controller.state.describe(device)

    async def remove_missing(self, device: str) -> None:
        """Remove a device that the inventory no longer lists, or lists in another location, as soon as it is free."""
        controller = self.controllers[device]
        try:
            await self.remove(device)
        except DeviceBusy:
            self._leaving.add(device)
            message = "The device is no longer in the inventory, or its location has changed."
            await controller.health.report([Finding(Step.HEALTH, ErrorCode.DEVICE_LOST, Severity.FAULT, message)])
        else:
            self._leaving.discard(device)

    def retry_removals(self) -> None:
        """Request another inventory comparison if a device that was lost while in use is free now."""
        left = [controller for device, controller in self.controllers.items() if device in self._leaving]
        if any(each.state.record.hygiene is not Hygiene.IN_USE and each.state.job is None for each in left):
            self.inventory_changed.set()

    @asynccontextmanager
    async def keep_out_of_use(self, devices: Iterable[str]) -> AsyncIterator[None]:
        """Keep ``devices`` out of use while the context is open; IDs that are not managed here are ignored.

        Raises:
            DeviceBusy: one of them is in use or being scrubbed.
        """
        async with AsyncExitStack() as stack:
            for device in sorted(self.controllers.keys() & set(devices)):
                await stack.enter_async_context(self.controllers[device].occupancy.keep_out_of_use())
            yield

    async def drain(self) -> None:
        """Stop all scrubs; the devices being scrubbed stay dirty."""
        stopping = [controller.scrubs.abandon() for controller in self.controllers.values()]
        results = await asyncio.gather(*stopping, return_exceptions=True)
        failures = [each for each in results if isinstance(each, LedgerFailure)]
        if failures:
            raise failures[0]


def _index(device: Device) -> tuple[tuple[int, str], ...]:
    """Return a sort key that orders ``0:10`` after ``0:9``."""
    return tuple((int(part) if part.isdigit() else 1 << 30, part) for part in device.index.split(":"))
