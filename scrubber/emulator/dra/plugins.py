"""The DRA drivers that have registered: their connections, their calls, and the ResourceSlices of absent ones.

Promise: several instances of a driver can be registered, and the newest one that is connected is called; a driver that
had no connection for some time, and every driver when the kubelet starts, loses its ResourceSlices of this node.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import grpc
from google.protobuf.message import Message

from plugin.api import dra_health_pb2 as health_api
from plugin.api import dra_health_pb2_grpc as health_rpc
from plugin.api import dra_v1_pb2 as api
from plugin.api import pluginregistration_pb2 as registration
from scrubber.emulator import sockets
from scrubber.emulator.cluster.api import EmulatedApi
from scrubber.emulator.cluster.resources import NODES, SLICES, Selection
from scrubber.emulator.cluster.status import StatusError
from scrubber.emulator.events import KubeletEvent, Recorder, go_code_name
from scrubber.emulator.registration import RegistrationRefused
from scrubber.emulator.timings import KubeletTimings

PLUGIN_TYPE = "DRAPlugin"
VERSIONS: Mapping[str, str] = {"v1.DRAPlugin": "v1", "v1beta1.DRAPlugin": "v1beta1"}
"""Services of the protocol that the kubelet knows; a driver's first one of them is used."""

Request = TypeVar("Request", bound=Message)
Response = TypeVar("Response", bound=Message)


class DraDriverAbsent(Exception):
    """No instance of the driver is registered."""


@dataclass(frozen=True, slots=True)
class ClaimRef:
    """What a driver gets of a claim."""

    namespace: str
    uid: str
    name: str

    @property
    def message(self) -> api.Claim:
        return api.Claim(namespace=self.namespace, uid=self.uid, name=self.name)


class DraClient:
    """One registered instance of a driver. Its connection is opened once, and again by itself when it breaks."""

    def __init__(self, driver: str, endpoint: Path, version: str, timings: KubeletTimings, recorder: Recorder) -> None:
        self.driver = driver
        self.endpoint = endpoint
        self.connected = False
        self._package = f"k8s.io.kubelet.pkg.apis.dra.{version}"
        self._timings = timings
        self._recorder = recorder
        first, longest = timings.dra_reconnect
        options = (
            *sockets.CHANNEL_OPTIONS,
            ("grpc.initial_reconnect_backoff_ms", max(100, round(1000 * first))),
            ("grpc.max_reconnect_backoff_ms", max(100, round(1000 * longest))),
        )
        self.channel = grpc.aio.insecure_channel(f"unix:{endpoint}", options=options)

    async def prepare(
        self, claims: Sequence[ClaimRef], *, pod: str, uid: str
    ) -> Mapping[str, api.NodePrepareResourceResponse]:
        """Prepare claims, within ``timings.dra_call``; the pod's name is for the record only.

        Raises:
            RpcFailed: the driver refused all, disconnected or took too long.
        """
        request = api.NodePrepareResourcesRequest(claims=[each.message for each in claims])
        answer = await self._call(request, api.NodePrepareResourcesResponse, "NodePrepareResources", claims, pod, uid)
        return answer.claims

    async def unprepare(
        self, claims: Sequence[ClaimRef], *, pod: str, uid: str
    ) -> Mapping[str, api.NodeUnprepareResourceResponse]:
        """Release claims, within ``timings.dra_call``.

        Raises:
            RpcFailed: the driver refused all, disconnected or took too long.
        """
        request = api.NodeUnprepareResourcesRequest(claims=[each.message for each in claims])
        answer = await self._call(
            request, api.NodeUnprepareResourcesResponse, "NodeUnprepareResources", claims, pod, uid
        )
        return answer.claims

    async def _call(
        self, request: Message, response: type[Response], name: str, claims: Sequence[ClaimRef], pod: str, uid: str
    ) -> Response:
        # The messages of both versions are the same; only the name of the service differs.
        method: grpc.aio.UnaryUnaryMultiCallable[Message, Response] = self.channel.unary_unary(
            f"/{self._package}.DRAPlugin/{name}",
            request_serializer=type(request).SerializeToString,
            response_deserializer=response.FromString,
        )
        event = KubeletEvent(
            0.0, name, resource=self.driver, devices=tuple(sorted(each.uid for each in claims)), pod=pod, pod_uid=uid
        )
        return await self._recorder.call(event, lambda: method(request, timeout=self._timings.dra_call))


class DraPlugins:
    """Every instance of every driver, in the order of registration."""

    deregisters_unnotified = True

    def __init__(
        self,
        cluster: EmulatedApi,
        node_name: str,
        timings: KubeletTimings,
        recorder: Recorder,
        *,
        on_health: Callable[[str, Iterable[health_api.DeviceHealth]], None],
        on_health_end: Callable[[str], None],
    ) -> None:
        """Initialise without a driver.

        Args:
            on_health: called with the driver and the devices of each message of a health stream.
            on_health_end: called with the driver when one of its health streams has ended.
        """
        self._cluster = cluster
        self._node_name = node_name
        self._timings = timings
        self._recorder = recorder
        self._on_health = on_health
        self._on_health_end = on_health_end
        self._clients: dict[str, list[DraClient]] = {}
        self._followers: dict[DraClient, list[asyncio.Task[None]]] = {}
        self._wipes: dict[str, asyncio.Task[None]] = {}

    def start(self) -> None:
        """Delete the ResourceSlices of all drivers on this node: none of them is usable until it has registered."""
        self._wipes[""] = asyncio.get_running_loop().create_task(self._wipe("", 0.0))

    async def close(self) -> None:
        """End every connection, with the kubelet's process."""
        for task in self._wipes.values():
            task.cancel()
        await asyncio.gather(*self._wipes.values(), return_exceptions=True)
        for client in [each for clients in self._clients.values() for each in clients]:
            await self._close_client(client)

    def get(self, driver: str) -> DraClient:
        """Return the newest connected instance of a driver; where none is connected, the newest one.

        Raises:
            DraDriverAbsent: no instance is registered.
        """
        clients = self._clients.get(driver)
        if not clients:
            raise DraDriverAbsent(f"DRA driver {driver} is not registered")
        return next((each for each in reversed(clients) if each.connected), clients[-1])

    def instances(self, driver: str) -> Sequence[Path]:
        """Return the endpoints of the registered instances of a driver, oldest first."""
        return [each.endpoint for each in self._clients.get(driver, ())]

    def connected(self, driver: str) -> Sequence[Path]:
        """Return the endpoints of the instances of a driver that are connected, oldest first."""
        return [each.endpoint for each in self._clients.get(driver, ()) if each.connected]

    @property
    def pending_deletions(self) -> set[str]:
        """The drivers whose slices will be deleted unless they connect in time."""
        return {driver for driver, task in self._wipes.items() if not task.done()}

    # Registration, by the plugin watcher

    async def register(self, info: registration.PluginInfo, socket: Path) -> None:
        """Add an instance.

        Raises:
            RegistrationRefused: it has no version in common, or its endpoint is registered already.
        """
        version = next((VERSIONS[each] for each in info.supported_versions if each in VERSIONS), None)
        endpoint = Path(info.endpoint) if info.endpoint else socket
        if version is None:
            raise RegistrationRefused(
                f"invalid supported gRPC versions of DRA driver plugin {info.name} at endpoint {endpoint}: "
                f"none of {list(info.supported_versions)} is supported"
            )
        clients = self._clients.setdefault(info.name, [])
        if any(each.endpoint == endpoint for each in clients):
            raise RegistrationRefused(f"endpoint {endpoint} already registered for DRA driver plugin {info.name}")
        client = DraClient(info.name, endpoint, version, self._timings, self._recorder)
        clients.append(client)
        loop = asyncio.get_running_loop()
        self._followers[client] = [
            loop.create_task(self._follow_connection(client)),
            loop.create_task(self._follow_health(client)),
        ]
        self._sync(info.name)

    async def deregister(self, info: registration.PluginInfo, socket: Path) -> None:
        """Forget an instance whose registration socket is gone."""
        endpoint = Path(info.endpoint) if info.endpoint else socket
        for client in [each for each in self._clients.get(info.name, ()) if each.endpoint == endpoint]:
            self._clients[info.name].remove(client)
            await self._close_client(client)
        self._sync(info.name)

    async def _close_client(self, client: DraClient) -> None:
        tasks = self._followers.pop(client, [])
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await client.channel.close()

    # Connections and slices

    async def _follow_connection(self, client: DraClient) -> None:
        while True:
            state = client.channel.get_state(try_to_connect=True)
            connected = state is grpc.ChannelConnectivity.READY
            if connected is not client.connected:
                client.connected = connected
                self._sync(client.driver)
            await client.channel.wait_for_state_change(state)

    def _sync(self, driver: str) -> None:
        """Schedule the deletion of the driver's slices when it has no connection; cancel it when it has one."""
        pending = self._wipes.get(driver)
        if any(each.connected for each in self._clients.get(driver, ())):
            if pending is not None:
                pending.cancel()
                del self._wipes[driver]
        elif pending is None:
            wipe = self._wipe(driver, self._timings.slice_wipe_delay)
            self._wipes[driver] = asyncio.get_running_loop().create_task(wipe)

    async def _wipe(self, driver: str, delay: float) -> None:
        """Delete the driver's slices of this node after ``delay`` seconds, and try again until that succeeds."""
        await asyncio.sleep(delay)
        pause, longest = self._timings.slice_wipe_retry
        fields = f"spec.nodeName={self._node_name}" + (f",spec.driver={driver}" if driver else "")
        while True:
            try:
                self._cluster.get(NODES, self._node_name)
                deleted = self._cluster.delete_collection(SLICES, Selection(fields=fields))
            except StatusError:
                await asyncio.sleep(pause)
                pause = min(2 * pause, longest)
                continue
            now = asyncio.get_running_loop().time()
            self._recorder.record(
                KubeletEvent(now, "SlicesDeleted", resource=driver, detail=f"{len(deleted)} of {self._node_name}")
            )
            return

    # Health

    async def _follow_health(self, client: DraClient) -> None:
        """Call ``NodeWatchResources`` for ever, whether the driver implements it or not."""
        stub = health_rpc.DRAResourceHealthStub(client.channel)
        while True:
            await self._follow_stream(client, stub)
            await asyncio.sleep(self._timings.health_stream_retry)

    async def _follow_stream(self, client: DraClient, stub: health_rpc.DRAResourceHealthStub) -> None:
        clock = asyncio.get_running_loop().time
        begun = clock()
        outcome, received = "OK", False
        try:
            async for response in stub.NodeWatchResources(health_api.NodeWatchResourcesRequest()):
                received = True
                self._on_health(client.driver, response.devices)
        except grpc.aio.AioRpcError as error:
            outcome = go_code_name(error.code())
        if received or outcome != go_code_name(grpc.StatusCode.UNAVAILABLE):
            # The cache of the driver is cleared even if another of its instances has sent what is in it.
            self._on_health_end(client.driver)
            self._recorder.record(KubeletEvent(clock(), "HealthStreamEnded", outcome, clock() - begun, client.driver))
