"""NVML's side of a node for tests: the components that query the driver, over a simulated machine."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

from scrubber.adapters.children.message import Message
from scrubber.adapters.children.process import Children
from scrubber.adapters.children.request_pool import RequestPool
from scrubber.adapters.nvidia.driver_requests import DRIVER_MODULE, device_request, driver_arguments, gpu_uuid
from scrubber.adapters.nvidia.holders import NvidiaHolders
from scrubber.adapters.nvidia.inventory import NvidiaInventory
from scrubber.adapters.nvidia.settings import NvidiaSettings
from scrubber.adapters.nvidia.telemetry import NvidiaTelemetry
from scrubber.domain.device import Device
from scrubber.domain.telemetry import Signal, Snapshot
from tests.nvidia.machine import Gpu, Instance, Machine

__all__ = ["NvidiaNode", "ScriptedEvents", "nvidia_node"]


class ScriptedEvents:
    """Driver events as a test sets them."""

    def __init__(self) -> None:
        self.seen: dict[str, Mapping[int, int]] = {}
        self.deaf: dict[str, str] = {}
        self.corrupt: set[str] = set()

    def xids(self, device: str) -> Mapping[int, int]:
        return self.seen.get(device, {})

    def event_stream_error(self, device: str) -> str | None:
        return self.deaf.get(device)

    def inforom_corrupt(self, device: str) -> bool:
        return device in self.corrupt

    async def listen(self) -> AsyncIterator[Signal]:
        for device in self.seen:
            yield Signal(device, "xid")


class NvidiaNode:
    """A machine, and all components that query its driver."""

    def __init__(self, machine: Machine, deadline: float) -> None:
        self.machine = machine
        self.children = Children()
        places = machine.places
        self.inventory = NvidiaInventory(places, self.children, node="node-1", deadline=deadline)
        self.questions = RequestPool(
            self.children,
            DRIVER_MODULE,
            arguments=driver_arguments(places),
            environment=places.environment(),
            deadline=deadline,
        )
        self.events = ScriptedEvents()
        self.holders = NvidiaHolders(self.children, self.questions, places, infrastructure=_no_infrastructure)
        self.telemetry = NvidiaTelemetry(self.questions, self.events, self.holders)
        self.settings = NvidiaSettings(self.questions)

    def devices(self) -> tuple[Device, ...]:
        """Return what the inventory would list, as far as a request needs it, without starting children."""
        found: list[Device] = []
        for gpu in self.machine.gpus:
            parts: tuple[Gpu | Instance, ...] = gpu.instances or (gpu,)
            traits = (("pci_address", gpu.pci_address),)
            parent = gpu.uuid if gpu.instances else None
            for part in parts:
                index = str(len(found))
                found.append(Device(part.uuid, index, "NVIDIA H200", part.number("total"), parent, traits=traits))
        return tuple(found)

    async def snapshot(self, number: int = 0) -> Snapshot:
        return await self.telemetry.snapshot(self.devices()[number])

    async def query(self, device: Device, question: str, **more: object) -> Message:
        return await self.questions.request(gpu_uuid(device), device_request(device, question, **more))

    def gpu(self, device: Device) -> Gpu:
        return self.machine.find(device.id)[0]

    async def close(self) -> None:
        await self.holders.close()
        await self.questions.close()
        await self.inventory.close()
        await self.children.close()


async def _no_infrastructure(pid: int, *, has_context: bool) -> None:
    """Treat no process as infrastructure."""


@asynccontextmanager
async def nvidia_node(
    directory: Path, *, gpus: int = 2, mebibytes: int = 16, deadline: float = 10.0
) -> AsyncIterator[NvidiaNode]:
    """Provide a node of healthy GPUs in ``directory``; no request to a child takes longer than ``deadline`` seconds."""
    with Machine.create(directory / "node", gpus=gpus, mebibytes=mebibytes, reserved_mebibytes=1) as machine:
        made = NvidiaNode(machine, deadline)
        try:
            yield made
        finally:
            await made.close()
