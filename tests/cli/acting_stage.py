"""A service whose scrubs and resets go as a test wrote them down, device by device."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc

from scrubber.api import scrubber_pb2 as pb
from scrubber.api import scrubber_pb2_grpc
from scrubber.api.sockets import Purpose, Sockets, grpc_target
from scrubber.api.status import status_from_error
from tests.cli.stage import CLEAN, Service

__all__ = ["NEVER", "Node", "Script", "begun", "device", "passed", "result", "served"]

MIB = 1024 * 1024
NEVER = asyncio.Event
"""In a script: no more updates follow."""

Script = Sequence["pb.ScrubUpdate | Exception | asyncio.Event | type[asyncio.Event]"]
"""The updates about a device, in order: updates, a refusal, or an event to wait for."""


def device(index: int, **more: Any) -> pb.Device:
    """Device ``GPU-<index>a-0000…`` that is not assigned."""
    usual: dict[str, Any] = {"state": "dirty", "hygiene": "dirty", "health": "healthy", "advertised": True}
    return pb.Device(id=f"GPU-{index}a-0000-1111-2222-333344445555", index=str(index), **(usual | more))


def begun(of: pb.Device, step: str = "memory", phase: str = "clear", done: int = 0, **more: Any) -> pb.ScrubUpdate:
    """The news that ``of`` is being scrubbed."""
    progress = pb.ScrubProgress(
        scrub_id=f"s-{of.index}",
        device_id=of.id,
        step=step,
        phase=phase,
        done_bytes=done,
        total_bytes=256 * MIB,
        **more,
    )
    return pb.ScrubUpdate(progress=progress)


def result(of: pb.Device, outcome: str, *findings: pb.Finding, **more: Any) -> pb.ScrubUpdate:
    """The news that the scrub of ``of`` has ended, with what its first step found."""
    usual: dict[str, Any] = {
        "path": "slow",
        "started_at": 1.0,
        "finished_at": 2.25,
        "trigger": "on-demand",
        "actor": "uid:0",
    }
    step = pb.StepResult(step="holders", verdict="passed" if outcome == "passed" else "failed", findings=findings)
    scrub = pb.Scrub(id=f"s-{of.index}", device_id=of.id, outcome=outcome, steps=[step], **(usual | more))
    return pb.ScrubUpdate(result=pb.ScrubResult(scrub=scrub, device=of))


def passed(of: pb.Device, cleared: int = 64 * MIB, residue: int = 12) -> pb.ScrubUpdate:
    """The news that ``of`` was proved clean."""
    update = result(of, "passed")
    measured = f'{{"cleared_bytes": {cleared}, "residue_bytes": {residue}}}'
    update.result.scrub.steps.append(pb.StepResult(step="memory", verdict="passed", measurements_json=measured))
    update.result.scrub.certificate_id = f"cert-{of.index}"
    update.result.certificate.CopyFrom(CLEAN.certificate)
    update.result.certificate.id = f"cert-{of.index}"
    return update


@dataclass
class Node(Service):
    """A :class:`Service` with a script for each device, by the kind of request.

    Attributes:
        scripts: of scrubs and resets; a device without one passes at once.
        plan: of a reset.
        accepted: the device after its baseline was accepted.
        refusal: of accepting one, after all.
        open, most_open: streams that are listened to now, and the most there ever were.
    """

    scripts: dict[str, Script] = field(default_factory=dict)
    plan: pb.ResetPlan = field(default_factory=pb.ResetPlan)
    accepted: pb.Device = field(default_factory=pb.Device)
    refusal: Exception | None = None
    open: int = 0
    most_open: int = 0
    _moved: asyncio.Condition = field(default_factory=asyncio.Condition)

    async def Scrub(self, request: Any, context: Any) -> AsyncIterator[pb.ScrubUpdate]:
        async for update in self._updates(request, context):
            yield update

    async def Reset(self, request: Any, context: Any) -> AsyncIterator[pb.ScrubUpdate]:
        async for update in self._updates(request, context):
            yield update

    async def GetResetPlan(self, request: Any, context: Any) -> pb.ResetPlan:
        await self._answer(request, context)
        return self.plan

    async def AcceptBaseline(self, request: Any, context: Any) -> pb.DeviceResponse:
        await self._answer(request, context)
        if self.refusal is not None:
            status = status_from_error(self.refusal, public=False)
            await context.abort(status.code, status.details, status.metadata)
        return pb.DeviceResponse(device=self.accepted)

    async def _updates(self, request: Any, context: Any) -> AsyncIterator[pb.ScrubUpdate]:
        await self._answer(request, context)
        async with self._listening():
            for each in self.scripts.get(request.device, [passed(device(9))]):
                match each:
                    case pb.ScrubUpdate():
                        yield each
                    case asyncio.Event():
                        await each.wait()
                    case Exception():
                        status = status_from_error(each, public=False)
                        await context.abort(status.code, status.details, status.metadata)
                    case _:
                        await asyncio.Event().wait()

    async def listened(self, streams: int) -> None:
        """Wait until as many ``streams`` are listened to at once."""
        async with asyncio.timeout(60), self._moved:
            await self._moved.wait_for(lambda: self.open >= streams)

    @asynccontextmanager
    async def _listening(self) -> AsyncIterator[None]:
        self.open += 1
        self.most_open = max(self.most_open, self.open)
        async with self._moved:
            self._moved.notify_all()
        try:
            yield
        finally:
            self.open -= 1
            self.left.set()


@asynccontextmanager
async def served(directory: Path, *purposes: Purpose, node: Node | None = None) -> AsyncIterator[Node]:
    """``node`` (a new one) on the sockets for ``purposes`` (the read and the admin one) below ``directory``."""
    node, server = node or Node(), grpc.aio.server()
    scrubber_pb2_grpc.add_ReadServicer_to_server(node, server)
    scrubber_pb2_grpc.add_AdminServicer_to_server(node, server)
    for purpose in purposes or (Purpose.READ, Purpose.ADMIN):
        path = Sockets(directory).path(purpose)
        path.parent.mkdir(exist_ok=True)
        server.add_insecure_port(grpc_target(path))
    await server.start()
    try:
        yield node
    finally:
        await server.stop(None)
