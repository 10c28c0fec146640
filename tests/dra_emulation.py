"""A minimal DRA driver and a node with its control plane, for tests of the kubelet's side of DRA."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
from google.protobuf.message import Message

from plugin.api import dra_health_pb2 as health
from plugin.api import dra_health_pb2_grpc as health_rpc
from plugin.api import dra_v1_pb2 as api
from plugin.api import dra_v1_pb2_grpc as rpc
from plugin.api import dra_v1beta1_pb2 as beta
from plugin.api import dra_v1beta1_pb2_grpc as beta_rpc
from plugin.api import pluginregistration_pb2 as watched
from plugin.api import pluginregistration_pb2_grpc as watched_rpc
from scrubber.emulator import (
    ContainerSpec,
    EmulatedPod,
    Kubelet,
    KubeletEvent,
    PodClaim,
    PodPhase,
    PodSpec,
    RestartPolicy,
)
from scrubber.emulator.cluster import ApiServer, ControlPlane, EmulatedApi
from scrubber.emulator.cluster.resources import CLAIMS, DEVICE_CLASSES, NODES, PODS, SLICES
from scrubber.emulator.timings import ClusterTimings
from tests.cluster.emulated import DRIVER, Json, claim, device, slice_of
from tests.emulation import SOON, timings

Context = Any
Claims = Sequence[api.Claim]
PrepareHook = Callable[[Claims], Awaitable[Mapping[str, api.NodePrepareResourceResponse]]]
UnprepareHook = Callable[[Claims], Awaitable[Mapping[str, api.NodeUnprepareResourceResponse]]]
CDI_KIND = "scrubber.dev/claim"
V1, V1BETA1 = "v1.DRAPlugin", "v1beta1.DRAPlugin"


class TinyDriver:
    """A driver whose claims have the devices that ``devices`` names, each with a CDI device of its own.

    Its hooks receive the claims of a request, and answer by the claim's UID.
    """

    def __init__(self, name: str = DRIVER, *, versions: Sequence[str] = (V1, V1BETA1), has_health: bool = True) -> None:
        self.name = name
        self.devices: dict[str, list[str]] = {}
        """Name of the claim → its devices; without an entry ``gpu-0``."""
        self.on_prepare: PrepareHook = self.accept
        self.on_unprepare: UnprepareHook = self.release
        self.prepares: list[list[str]] = []
        """The names of the claims of each call."""
        self.unprepares: list[list[str]] = []
        self.uids: set[str] = set()
        self.seconds_left: list[float | None] = []
        self.statuses: list[watched.RegistrationStatus] = []
        self.versions = versions
        self.services: list[str] = []
        """The version of the service that each call came for."""
        self.health: dict[str, health.DeviceHealth] = {}
        self.notify_fails = 0
        self._has_health = has_health
        self._health_changed = asyncio.Condition()
        self._servers: list[grpc.aio.Server] = []
        self.endpoint = Path()

    async def start(self, kubelet: Kubelet, instance: str = "", endpoint: Path | None = None) -> Path:
        """Serve, then register; return the registration socket, which the kubelet finds by itself.

        With ``endpoint`` the driver names that of another driver.
        """
        suffix = f"-{instance}" if instance else ""
        self.endpoint = kubelet.plugins / f"dra{suffix}.sock"
        server = grpc.aio.server()
        rpc.add_DRAPluginServicer_to_server(_Service(self, "v1", api), server)
        beta_rpc.add_DRAPluginServicer_to_server(_Service(self, "v1beta1", beta), server)
        if self._has_health:
            health_rpc.add_DRAResourceHealthServicer_to_server(_Health(self), server)
        await self._serve(server, self.endpoint)
        self.endpoint = endpoint or self.endpoint
        registration = grpc.aio.server()
        watched_rpc.add_RegistrationServicer_to_server(_Registration(self), registration)
        path = kubelet.plugins_registry / f"{self.name}{suffix}-reg.sock"
        await self._serve(registration, path)
        return path

    async def _serve(self, server: grpc.aio.Server, path: Path) -> None:
        server.add_insecure_port(f"unix:{path}")
        await server.start()
        self._servers.append(server)

    async def stop(self) -> None:
        """End both servers, which removes their sockets."""
        for server in self._servers:
            await server.stop(None)
        self._servers.clear()

    async def stop_service(self) -> None:
        """End the driver's service only; its registration socket stays."""
        await self._servers[0].stop(None)

    async def stop_registration(self) -> None:
        """End the registration server only, whose socket is then removed."""
        await self._servers.pop().stop(None)

    async def accept(self, claims: Claims) -> Mapping[str, api.NodePrepareResourceResponse]:
        """Answer with the claims' devices."""
        return {each.uid: api.NodePrepareResourceResponse(devices=self.answer(each)) for each in claims}

    def answer(self, of: api.Claim) -> list[api.Device]:
        return [
            api.Device(
                request_names=["main"],
                pool_name="node-a",
                device_name=name,
                cdi_device_ids=[f"{CDI_KIND}={of.uid}-{name}"],
            )
            for name in self.devices.get(of.name, ["gpu-0"])
        ]

    async def release(self, claims: Claims) -> Mapping[str, api.NodeUnprepareResourceResponse]:
        """Answer that the claims are released."""
        return {each.uid: api.NodeUnprepareResourceResponse() for each in claims}

    async def report_health(self, message: str = "", **devices: int) -> None:
        """Send the health of all devices; ``gpu_0=health.HEALTHY``."""
        async with self._health_changed:
            self.health = {
                name.replace("_", "-"): health.DeviceHealth(
                    device=health.DeviceIdentifier(pool_name="node-a", device_name=name.replace("_", "-")),
                    health=each,  # type: ignore[arg-type]  # the enum's values are integers
                    message=message,
                )
                for name, each in devices.items()
            }
            self._health_changed.notify_all()

    async def watch_health(self) -> AsyncIterator[health.NodeWatchResourcesResponse]:
        while True:
            sent = self.health
            if sent:
                yield health.NodeWatchResourcesResponse(devices=list(sent.values()))
            async with self._health_changed:
                while self.health is sent:
                    await self._health_changed.wait()


class _Service(rpc.DRAPluginServicer):
    """One version of the protocol; the messages of ``messages`` are those of version 1 by another name."""

    def __init__(self, driver: TinyDriver, version: str, messages: Any) -> None:
        self._driver = driver
        self._version = version
        self._messages = messages

    async def NodePrepareResources(self, request: Message, context: Context) -> Message:
        claims = api.NodePrepareResourcesRequest.FromString(request.SerializeToString()).claims
        self._record(self._driver.prepares, claims, context)
        answer = api.NodePrepareResourcesResponse(claims=await self._driver.on_prepare(claims))
        translated: Message = self._messages.NodePrepareResourcesResponse.FromString(answer.SerializeToString())
        return translated

    async def NodeUnprepareResources(self, request: Message, context: Context) -> Message:
        claims = api.NodeUnprepareResourcesRequest.FromString(request.SerializeToString()).claims
        self._record(self._driver.unprepares, claims, context)
        answer = api.NodeUnprepareResourcesResponse(claims=await self._driver.on_unprepare(claims))
        translated: Message = self._messages.NodeUnprepareResourcesResponse.FromString(answer.SerializeToString())
        return translated

    def _record(self, calls: list[list[str]], claims: Claims, context: Context) -> None:
        calls.append(sorted(each.name for each in claims))
        self._driver.uids |= {each.uid for each in claims}
        self._driver.services.append(self._version)
        self._driver.seconds_left.append(context.time_remaining())


class _Health(health_rpc.DRAResourceHealthServicer):
    def __init__(self, driver: TinyDriver) -> None:
        self._driver = driver

    async def NodeWatchResources(
        self, request: health.NodeWatchResourcesRequest, context: Context
    ) -> AsyncIterator[health.NodeWatchResourcesResponse]:
        async for response in self._driver.watch_health():
            yield response


class _Registration(watched_rpc.RegistrationServicer):
    def __init__(self, driver: TinyDriver) -> None:
        self._driver = driver

    async def GetInfo(self, request: watched.InfoRequest, context: Context) -> watched.PluginInfo:
        return watched.PluginInfo(
            type="DRAPlugin",
            name=self._driver.name,
            endpoint=str(self._driver.endpoint),
            supported_versions=self._driver.versions,
        )

    async def NotifyRegistrationStatus(
        self, request: watched.RegistrationStatus, context: Context
    ) -> watched.RegistrationStatusResponse:
        self._driver.statuses.append(request)
        if self._driver.notify_fails:
            self._driver.notify_fails -= 1
            await context.abort(grpc.StatusCode.INTERNAL, "not now")
        return watched.RegistrationStatusResponse()


class DraNode:
    """A node with an API server, a scheduler, and shorthands."""

    def __init__(self, server: ApiServer, kubelet: Kubelet) -> None:
        self.server = server
        """The API server over HTTP, for drivers that are clients of it."""
        self.api = server.api
        self.kubelet = kubelet

    def publish(self, *names: str, driver: str = DRIVER, **more: Any) -> Json:
        return self.api.create(SLICES, slice_of(*(device(each) for each in names), driver=driver, **more))

    def claim(self, name: str = "claim", **request: Any) -> Json:
        return self.api.create(CLAIMS, claim(name, **request))

    async def run(self, spec: PodSpec, phase: PodPhase = PodPhase.RUNNING) -> EmulatedPod:
        """Have a pod scheduled, and wait for its phase."""
        pod = await self.kubelet.submit(spec, SOON)
        await pod.wait(phase, SOON)
        return pod

    def cdi(self, claim_uid: str, name: str, **edits: Any) -> None:
        """Write the CDI specification of one device of a claim."""
        entry = {"name": f"{claim_uid}-{name}", "containerEdits": edits or {"env": [f"DEVICE={name}"]}}
        spec = {"cdiVersion": "0.5.0", "kind": CDI_KIND, "devices": [entry]}
        (self.kubelet.cdi_directory / f"{claim_uid}-{name}.json").write_text(json.dumps(spec))

    def calls(self, name: str) -> list[KubeletEvent]:
        """Return the recorded events of a name."""
        return [each for each in self.kubelet.events if each.name == name]

    async def until(self, holds: Callable[[], Any]) -> None:
        await self.kubelet.wait_until(lambda _: bool(holds()), SOON)

    def delete_claim(self, name: str = "claim") -> None:
        self.api.delete(CLAIMS, name, "default")

    def pod_object(self, name: str) -> Json | None:
        return self.api.find(PODS, name, "default")


def claiming(
    name: str = "a",
    *claims: str,
    command: str = "exec sleep 60",
    restart: RestartPolicy = RestartPolicy.NEVER,
    template: str = "",
    requests: Sequence[str] = (),
    **more: Any,
) -> PodSpec:
    """Return a pod with one container that uses the claims, by default ``claim``."""
    references = [PodClaim(each, claim=each) for each in claims or (() if template else ("claim",))]
    references += [PodClaim("gpu", template=template)] if template else []
    used = requests or [each.name for each in references]
    main = ContainerSpec("main", ["sh", "-c", command], restart=restart, claims=used)
    return PodSpec(name, containers=[main], claims=references, **more)


@asynccontextmanager
async def dra_node(
    root: Path, *, published: Sequence[str] = ("gpu-0",), gates: Mapping[str, bool] | None = None, **changes: Any
) -> AsyncIterator[DraNode]:
    """Run a node with a control plane and a device class ``gpu``, and publish devices once the kubelet has started.

    What the kubelet does only after a long time, such as releasing orphans, it does not do unless a test sets the time.
    """
    rare = {
        "dra_reconcile": 3600.0,
        "slice_wipe_delay": 3600.0,
        "health_timeout": 3600.0,
        "pod_resync": (3600.0, 3600.0),
    }
    fast = timings(**{**rare, **changes})
    cluster = EmulatedApi(gates=gates or {})
    selector = {"cel": {"expression": f'device.driver == "{DRIVER}"'}}
    cluster.create(DEVICE_CLASSES, {"metadata": {"name": "gpu"}, "spec": {"selectors": [selector]}})
    async with (
        ApiServer(cluster) as server,
        ControlPlane(cluster, ClusterTimings().scaled(0.02)),
        Kubelet(root, timings=fast, cluster=cluster) as kubelet,
    ):
        node = DraNode(server, kubelet)
        await node.until(lambda: node.calls("SlicesDeleted"))
        assert cluster.find(NODES, "node-a") is not None
        if published:
            node.publish(*published)
        yield node


@asynccontextmanager
async def driving(node: DraNode, driver: TinyDriver | None = None, instance: str = "") -> AsyncIterator[TinyDriver]:
    """Run a driver; yields when it is registered and connected."""
    serving = driver or TinyDriver()
    await serving.start(node.kubelet, instance)
    try:
        await node.until(lambda: serving.endpoint in node.kubelet.dra.plugins.instances(serving.name))
        await node.until(lambda: serving.statuses)
        yield serving
    finally:
        await serving.stop()
