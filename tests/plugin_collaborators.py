"""Minimal fakes of the device plugin's two peers, a scrub service and a kubelet, on real sockets.

Both ring a bell at every event, so that a test waits for a condition and never for a fixed time.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import grpc

from plugin.api import deviceplugin_pb2 as api
from plugin.api import deviceplugin_pb2_grpc as rpc
from plugin.api import pluginregistration_pb2 as registration
from plugin.api import pluginregistration_pb2_grpc as registration_rpc
from scrubber.api import scrubber_pb2 as pb
from scrubber.api import scrubber_pb2_grpc
from scrubber.api.status import status_from_error
from scrubber.domain.errors import ScrubberError

DEADLINE = 20.0
"""Seconds after which a test gives up; nothing here is expected to take a noticeable part of it."""


class Bell:
    """Rung at every change; :meth:`until` checks its condition each time."""

    def __init__(self) -> None:
        self._rung = asyncio.Event()

    def ring(self) -> None:
        self._rung.set()
        self._rung = asyncio.Event()

    async def rung(self) -> None:
        await self._rung.wait()

    async def until(self, holds: Callable[[], bool]) -> None:
        async with asyncio.timeout(DEADLINE):
            while not holds():
                await self.rung()


def device(number: int, sim: Path = Path("/sim"), **facts: Any) -> pb.SnapshotDevice:
    """Return device ``sim-<number>``: the file ``<number>/memory`` below ``sim``, by default advertised."""
    facts.setdefault("advertised", True)
    memory = sim / str(number) / "memory"
    mount = pb.Access(kind="mount", host_path=str(memory), container_path=f"/dev/simgpu{number}")
    return pb.SnapshotDevice(id=f"sim-{number}", index=str(number), access=[mount], **facts)


def snapshot(*devices: pb.SnapshotDevice, version: int = 1, ready: bool = True, epoch: str = "first") -> pb.Snapshot:
    return pb.Snapshot(version=version, devices=devices, ready=ready, epoch=epoch)


class FakeService(scrubber_pb2_grpc.PluginServicer):
    """The plugin socket of a scrub service whose responses the test determines."""

    def __init__(self, directory: Path, shown: pb.Snapshot) -> None:
        self.path = directory / "plugin" / "plugin.sock"
        self.bell = Bell()
        self.announced: list[tuple[str, dict[str, str]]] = []
        """Every announcement: resource, and the meaning of its ids."""
        self.reserved: list[list[str]] = []
        self.yields: list[str] = []
        """The reason of every request to yield the node, empty where it was withdrawn."""
        self.yield_requesters: set[str] = set()
        self.pause_reports: list[pb.AgentPauseReport] = []
        self.on_pause_report: Callable[[pb.AgentPauseReport], Awaitable[None]] = _nothing
        self.requests: list[pb.HandOverRequest] = []
        self.cancelled = 0
        self.on_announce: Callable[[pb.SetResourceMappingRequest], Awaitable[None]] = _nothing
        self.on_reserve: Callable[[pb.ReserveRequest], Awaitable[None]] = _nothing
        self.on_hand_over: Callable[[pb.HandOverRequest], Awaitable[None]] = _nothing
        self._shown = shown
        self._server: grpc.aio.Server | None = None

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.stop()

    async def start(self, shown: pb.Snapshot | None = None) -> None:
        self._shown = shown or self._shown
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._server = grpc.aio.server()
        scrubber_pb2_grpc.add_PluginServicer_to_server(self, self._server)
        self._server.add_insecure_port(f"unix:{self.path}")
        await self._server.start()

    async def stop(self) -> None:
        if self._server is not None:
            server, self._server = self._server, None
            await server.stop(None)

    def show(self, shown: pb.Snapshot) -> None:
        self._shown = shown
        self.bell.ring()

    async def GetSnapshot(self, request: pb.GetSnapshotRequest, context: Any) -> pb.Snapshot:
        return self._shown

    async def WatchSnapshots(self, request: pb.GetSnapshotRequest, context: Any) -> AsyncIterator[pb.Snapshot]:
        while True:
            shown = self._shown
            yield shown
            while self._shown is shown:
                await self.bell.rung()

    async def ListClaims(self, request: pb.ListClaimsRequest, context: Any) -> pb.ListClaimsResponse:
        return pb.ListClaimsResponse()

    async def SetYield(self, request: pb.SetYieldRequest, context: Any) -> pb.NodeYield:
        self.yields.append(request.reason)
        self.yield_requesters.add(request.plugin)
        self.bell.ring()
        return pb.NodeYield()

    async def ReportAgentPause(self, request: pb.AgentPauseReport, context: Any) -> pb.AgentPauseReportResponse:
        """Record it as the service does: a plan durably, and a pause that was restored is over."""
        await self._do(self.on_pause_report(request), context)
        self.pause_reports.append(request)
        shown, pause = pb.Snapshot(), self._shown.agent_pause
        shown.CopyFrom(self._shown)
        if request.pause_id and request.pause_id == pause.id:
            if request.state == "planned":
                del shown.agent_pause.changes[:]
                shown.agent_pause.changes.extend(request.changes)
            if request.state == "failed":
                shown.agent_pause.ending = True
            if request.state == "restored":
                shown.ClearField("agent_pause")
            self._shown = shown
        self.bell.ring()
        return pb.AgentPauseReportResponse()

    def show_pause(self, pause: pb.AgentPause | None) -> None:
        """Show another pause; None: it stays as it is, and ends."""
        shown = pb.Snapshot()
        shown.CopyFrom(self._shown)
        if pause is None:
            shown.agent_pause.ending = True
        else:
            shown.agent_pause.CopyFrom(pause)
        self.show(shown)

    @property
    def pause(self) -> pb.AgentPause | None:
        return self._shown.agent_pause if self._shown.HasField("agent_pause") else None

    def pause_states(self) -> list[str]:
        """Return the states of a pause that were reported, without reports of progress."""
        return [each.state for each in self.pause_reports if each.state]

    async def SetResourceMapping(
        self, request: pb.SetResourceMappingRequest, context: Any
    ) -> pb.SetResourceMappingResponse:
        self.announced.append((request.resource, {each.id: each.device_id for each in request.mappings}))
        self.bell.ring()
        await self._do(self.on_announce(request), context)
        return pb.SetResourceMappingResponse()

    async def Reserve(self, request: pb.ReserveRequest, context: Any) -> pb.ReserveResponse:
        self.reserved.append(sorted(request.device_ids))
        self.bell.ring()
        await self._do(self.on_reserve(request), context)
        return pb.ReserveResponse()

    async def HandOver(self, request: pb.HandOverRequest, context: Any) -> pb.HandOverResponse:
        self.requests.append(request)
        self.bell.ring()
        await self._do(self.on_hand_over(request), context)
        known = {
            id_: each for resource, ids in self.announced if resource == request.resource for id_, each in ids.items()
        }
        devices = sorted({known.get(id_, id_) for id_ in request.device_ids})
        return pb.HandOverResponse(devices=[pb.GrantedDevice(id=each, path="fast") for each in devices])

    async def _do(self, deed: Awaitable[None], context: Any) -> None:
        try:
            await deed
        except ScrubberError as error:
            status = status_from_error(error, public=True)
            await context.abort(status.code, status.details, status.metadata)
        except asyncio.CancelledError:
            self.cancelled += 1
            self.bell.ring()
            raise


async def _nothing(request: Any) -> None:
    return


@dataclass
class Registered:
    """The state of one registration of a plugin with the kubelet."""

    socket: Path
    channel: grpc.aio.Channel
    options: api.DevicePluginOptions
    lists: list[dict[str, str]] = field(default_factory=list)
    """Every list the plugin sent: id → health."""
    topologies: dict[str, list[int]] = field(default_factory=dict)
    ended: bool = False
    error: BaseException | None = None
    """The error that ended the stream; None when the plugin ended it regularly."""

    @property
    def plugin(self) -> rpc.DevicePluginStub:
        return rpc.DevicePluginStub(self.channel)

    @property
    def healthy(self) -> set[str]:
        return {id_ for id_, health in self.lists[-1].items() if health == "Healthy"} if self.lists else set()


class FakeKubelet(rpc.RegistrationServicer):
    """Accepts registrations in both ways and follows every plugin's list; it makes no other call on its own."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.classic = root / "device-plugins"
        self.registry = root / "plugins_registry"
        self.bell = Bell()
        self.requests: list[api.RegisterRequest] = []
        self.registered: list[Registered] = []
        self.listed: list[Registered] = []
        self.refuse_with = ""
        self.wipes = True
        self._server: grpc.aio.Server | None = None
        self._streams: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.stop()

    async def start(self) -> None:
        """Start as the kubelet does: delete every socket in ``device-plugins``, then create ``kubelet.sock``."""
        for directory in (self.classic, self.registry):
            directory.mkdir(parents=True, exist_ok=True)
        for socket in self.classic.glob("*.sock"):
            if self.wipes or socket.name == "kubelet.sock":
                socket.unlink()
        self._server = grpc.aio.server()
        rpc.add_RegistrationServicer_to_server(self, self._server)
        self._server.add_insecure_port(f"unix:{self.classic / 'kubelet.sock'}")
        await self._server.start()

    async def stop(self) -> None:
        """End the process: every stream ends."""
        if self._server is not None:
            server, self._server = self._server, None
            await server.stop(None)
        for each in self.registered:
            await each.channel.close()
        if self._streams:
            await asyncio.wait(self._streams)

    async def Register(self, request: api.RegisterRequest, context: Any) -> api.Empty:
        self.requests.append(request)
        self.bell.ring()
        if self.refuse_with:
            await context.abort(grpc.StatusCode.UNKNOWN, self.refuse_with)
        await self.connect(self.classic / request.endpoint)
        return api.Empty()

    async def visit(self, socket: Path) -> registration.PluginInfo:
        """Do what the plugin watcher does with a socket that it found."""
        async with grpc.aio.insecure_channel(f"unix:{socket}") as channel:
            stub = registration_rpc.RegistrationStub(channel)
            info: registration.PluginInfo = await stub.GetInfo(registration.InfoRequest(), timeout=DEADLINE)
            await self.connect(Path(info.endpoint))
            await stub.NotifyRegistrationStatus(registration.RegistrationStatus(plugin_registered=True))
            return info

    async def connect(self, socket: Path) -> Registered:
        """Dial the plugin back, then follow its list."""
        channel = grpc.aio.insecure_channel(f"unix:{socket}")
        options = await rpc.DevicePluginStub(channel).GetDevicePluginOptions(api.Empty(), timeout=DEADLINE)
        registered = Registered(socket, channel, options)
        self.registered.append(registered)
        task = asyncio.create_task(self._follow(registered))
        self._streams.add(task)
        task.add_done_callback(self._streams.discard)
        return registered

    async def drop(self, registered: Registered) -> None:
        """End a plugin's stream, as the kubelet does when another instance of the plugin ends."""
        await registered.channel.close()

    async def until(self, holds: Callable[[], bool]) -> None:
        await self.bell.until(holds)

    async def new_registration(self, after: int = 0) -> Registered:
        """Wait for and return registration number ``after + 1`` of those that have sent a list.

        A plugin whose wait for our stream timed out abandons a registration that has sent no list.
        """
        await self.until(lambda: len(self.listed) > after)
        return self.listed[after]

    async def _follow(self, registered: Registered) -> None:
        try:
            async for response in registered.plugin.ListAndWatch(api.Empty()):
                if not registered.lists:
                    self.listed.append(registered)
                registered.lists.append({each.ID: each.health for each in response.devices})
                registered.topologies = {each.ID: [n.ID for n in each.topology.nodes] for each in response.devices}
                self.bell.ring()
        except (grpc.aio.AioRpcError, asyncio.CancelledError) as error:
            registered.error = error
        registered.ended = True
        self.bell.ring()


def allocation(*device_ids: str) -> api.AllocateRequest:
    return api.AllocateRequest(container_requests=[api.ContainerAllocateRequest(devices_ids=device_ids)])


def start(*device_ids: str) -> api.PreStartContainerRequest:
    return api.PreStartContainerRequest(devices_ids=device_ids)


def preference(available: Iterable[str], size: int, must: Sequence[str] = ()) -> api.PreferredAllocationRequest:
    return api.PreferredAllocationRequest(
        container_requests=[
            api.ContainerPreferredAllocationRequest(
                available_deviceIDs=available, must_include_deviceIDs=must, allocation_size=size
            )
        ]
    )
