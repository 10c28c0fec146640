"""A service with answers set by a test, on real sockets, and the command as a process that queries it."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc

from scrubber.api import scrubber_pb2 as pb
from scrubber.api import scrubber_pb2_grpc
from scrubber.api.sockets import Purpose, Sockets, grpc_target
from scrubber.api.status import status_from_error
from tests import forkserver

__all__ = ["BROKEN", "CLEAN", "HALFWAY", "PASSED", "SICK", "Ended", "Service", "environment", "run", "serving", "start"]

CLEAN = pb.Device(
    id="SIM-GPU-aa",
    index="0",
    model="Simulated GPU",
    memory_bytes=256 * 1024 * 1024,
    state="clean",
    hygiene="clean",
    health="healthy",
    certificate=pb.Certificate(
        id="c-7",
        node_name="n1",
        boot_id="b1",
        driver_version="sim-1",
        device_id="SIM-GPU-aa",
        sequence=7,
        previous_grant=3,
        path="slow",
        scrub_id="s-9",
        covered=["memory: 268435456 of 268435456 bytes cleared and verified"],
        not_covered=["on-chip memory"],
        policy="default",
        policy_digest="d",
        issued_at=1.5,
    ),
    grant_count=3,
    numa_node=0,
    profile="1g.10gb",
    peers=["SIM-GPU-bb"],
    attributes={"vbios": "96.00.89", "pci_address": "0000:01:00.0"},
    advertised=True,
    policy="default",
    enforcement="enforce",
)
SICK = pb.Device(
    id="SIM-GPU-bb",
    index="1",
    model="Simulated GPU",
    memory_bytes=1000,
    state="quarantined",
    hygiene="in-use",
    health="quarantined",
    cause=pb.Cause(
        code="xid-95", message="XID 95 was \x1b[31mseen.", recovery_method="reset", since=2.5, actor="service"
    ),
    tenant="red",
    pod="train",
    container="main",
    next_attempt_at=9.5,
    parent="SIM-GPU-aa",
    active_scrub_id="s-10",
    policy="default",
    enforcement="enforce",
    failed_recoveries=2,
)
BROKEN = pb.Device(
    id="SIM-GPU-cc",
    index="2",
    state="quarantined",
    advertised=True,
    policy="h200",
    enforcement="observe",
    break_glass=pb.BreakGlass(expires_at=60.0, reason="a deadline\x1b[2J", actor="uid:7"),
)
PASSED = pb.ScrubUpdate(
    result=pb.ScrubResult(
        scrub=pb.Scrub(
            id="s-9",
            device_id="SIM-GPU-aa",
            path="slow",
            trigger="on-demand",
            started_at=1.0,
            finished_at=1.5,
            outcome="passed",
            certificate_id="c-7",
            actor="uid:0",
            steps=[
                pb.StepResult(
                    step="memory",
                    verdict="passed",
                    duration_seconds=0.25,
                    measurements_json='{"residue_bytes": 12}',
                    findings=[
                        pb.Finding(
                            step="memory",
                            code="residue",
                            severity="note",
                            message="12 bytes were not zero.",
                            evidence_json='{"first_offset": 0}',
                        )
                    ],
                )
            ],
        ),
        certificate=CLEAN.certificate,
        device=CLEAN,
    )
)
HALFWAY = pb.ScrubUpdate(
    progress=pb.ScrubProgress(
        scrub_id="s-9", device_id="SIM-GPU-aa", step="memory", phase="clear", done_bytes=50, total_bytes=100
    )
)


@dataclass
class Service(scrubber_pb2_grpc.ReadServicer, scrubber_pb2_grpc.AdminServicer):
    """Returns or raises what a test set; records the requests."""

    devices: list[pb.Device] = field(default_factory=lambda: [CLEAN, SICK])
    info: pb.ServiceInfo = field(default_factory=lambda: pb.ServiceInfo(policy="default", enforcement="enforce"))
    entries: list[pb.HistoryEntry] = field(default_factory=list)
    page: pb.GetHistoryResponse | None = None
    """The answer to every query of the history; None: a selection of ``entries`` as requested."""
    released: pb.Device = field(default_factory=lambda: CLEAN)
    """The device after its release from quarantine."""
    updates: list[pb.ScrubUpdate] = field(default_factory=lambda: [HALFWAY, PASSED])
    error: Exception | None = None
    endless: bool = False
    requests: list[Any] = field(default_factory=list)
    reached: asyncio.Event = field(default_factory=asyncio.Event)
    left: asyncio.Event = field(default_factory=asyncio.Event)
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    def becomes(self, *devices: pb.Device) -> None:
        """Replace the devices; watchers are notified."""
        self.devices = list(devices)
        self.changed.set()

    async def _answer(self, request: Any, context: Any) -> None:
        self.requests.append(request)
        self.reached.set()
        if self.error is not None:
            status = status_from_error(self.error, public=False)
            await context.abort(status.code, status.details, status.metadata)

    async def ListDevices(self, request: Any, context: Any) -> pb.ListDevicesResponse:
        await self._answer(request, context)
        return pb.ListDevicesResponse(version=1, devices=self.devices)

    async def WatchDevices(self, request: Any, context: Any) -> AsyncIterator[pb.ListDevicesResponse]:
        await self._answer(request, context)
        while True:
            self.changed.clear()
            yield pb.ListDevicesResponse(version=1, devices=self.devices)
            await self.changed.wait()

    async def GetServiceInfo(self, request: Any, context: Any) -> pb.ServiceInfo:
        await self._answer(request, context)
        return self.info

    async def GetHistory(self, request: Any, context: Any) -> pb.GetHistoryResponse:
        await self._answer(request, context)
        older = [
            each for each in self.entries if not request.before_sequence or each.sequence < request.before_sequence
        ]
        page = older[: request.limit]
        if self.page is not None:
            return self.page
        return pb.GetHistoryResponse(
            entries=page, next_before_sequence=page[-1].sequence if len(page) < len(older) else 0
        )

    async def Scrub(self, request: Any, context: Any) -> AsyncIterator[pb.ScrubUpdate]:
        await self._answer(request, context)
        try:
            for update in self.updates:
                yield update
            if self.endless:
                await asyncio.Event().wait()
        finally:
            self.left.set()

    async def Quarantine(self, request: Any, context: Any) -> pb.DeviceResponse:
        await self._answer(request, context)
        return pb.DeviceResponse(device=SICK)

    async def Unquarantine(self, request: Any, context: Any) -> pb.DeviceResponse:
        await self._answer(request, context)
        return pb.DeviceResponse(device=self.released)

    async def BreakGlass(self, request: Any, context: Any) -> pb.DeviceResponse:
        await self._answer(request, context)
        return pb.DeviceResponse(device=BROKEN if request.duration_seconds else SICK)


@asynccontextmanager
async def serving(directory: Path, servicer: Service | None = None) -> AsyncIterator[Service]:
    """Provide a service on the read and the admin socket below ``directory``, which is the value of ``--socket-dir``."""
    servicer, server = servicer or Service(), grpc.aio.server()
    scrubber_pb2_grpc.add_ReadServicer_to_server(servicer, server)
    scrubber_pb2_grpc.add_AdminServicer_to_server(servicer, server)
    for purpose in (Purpose.READ, Purpose.ADMIN):
        path = Sockets(directory).path(purpose)
        path.parent.mkdir(exist_ok=True)
        server.add_insecure_port(grpc_target(path))
    await server.start()
    try:
        yield servicer
    finally:
        await server.stop(None)


@dataclass(frozen=True)
class Ended:
    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)

    @property
    def items(self) -> Any:
        return self.json["items"]


def environment(sockets: Path, **more: str) -> dict[str, str]:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("SCRUBBER_")}
    return inherited | {"SCRUBBER_SOCKET_DIR": str(sockets)} | more


async def start(
    sockets: Path,
    *words: str,
    stdin: int = asyncio.subprocess.DEVNULL,
    stdout: int = asyncio.subprocess.PIPE,
    stderr: int = asyncio.subprocess.PIPE,
) -> asyncio.subprocess.Process:
    return await forkserver.start(
        "scrubber.cli.main", *words, env=environment(sockets), stdin=stdin, stdout=stdout, stderr=stderr
    )


async def run(sockets: Path, *words: str) -> Ended:
    process = await start(sockets, *words)
    out, err = await process.communicate()
    assert process.returncode is not None
    assert "Traceback" not in err.decode()
    return Ended(process.returncode, out.decode(), err.decode())
