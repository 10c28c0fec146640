"""How plugins reach the kubelet: they register on its socket, or it finds them in ``plugins_registry/``.

Promise: both ways end in one table of clients, and it has the real kubelet's race: when any stream of a resource ends,
the client that is registered for the resource *now* is disconnected, even if it is another one.
"""

from __future__ import annotations

import asyncio
import random
import re
from pathlib import Path

import grpc

from plugin.api import deviceplugin_pb2 as api
from plugin.api import deviceplugin_pb2_grpc as rpc
from scrubber.emulator.devicemanager import DeviceManager
from scrubber.emulator.events import KubeletEvent, Recorder, RpcFailed, go_code_name
from scrubber.emulator.pluginclient import VERSION, DevicePluginClient, DialFailed
from scrubber.emulator.timings import KubeletTimings

DOMAIN_PATTERN = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
NAME_PATTERN = re.compile(r"([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9]")
MAX_DOMAIN_LENGTH = 244
MAX_NAME_LENGTH = 63


class RegistrationRefused(Exception):
    """The kubelet does not accept the plugin; the message is its reply."""


def check_resource_name(resource: str) -> None:
    """Check that ``resource`` is the name of an extended resource: ``domain/name``, not one of Kubernetes' own.

    Raises:
        RegistrationRefused: it is not.
    """
    domain, slash, name = resource.partition("/")
    ours = "kubernetes.io/" in resource or resource.startswith("requests.")
    fits = len(domain) <= MAX_DOMAIN_LENGTH and len(name) <= MAX_NAME_LENGTH
    if not slash or ours or not fits or not DOMAIN_PATTERN.fullmatch(domain) or not NAME_PATTERN.fullmatch(name):
        raise RegistrationRefused(f'the ResourceName "{resource}" is invalid')


class DevicePluginClients:
    """The clients by resource, and the streams that they follow."""

    def __init__(self, devices: DeviceManager, timings: KubeletTimings, recorder: Recorder, rng: random.Random) -> None:
        self._devices = devices
        self._timings = timings
        self._recorder = recorder
        self._rng = rng
        self._clients: dict[str, DevicePluginClient] = {}
        self._open: set[DevicePluginClient] = set()
        self._streams: set[asyncio.Task[None]] = set()

    async def connect(self, resource: str, socket: Path) -> None:
        """Dial the plugin back, get its options, then follow its stream in the background.

        Raises:
            RegistrationRefused: there is no reply, or it is not that of a device plugin.
        """
        client = DevicePluginClient(resource, socket, self._timings, self._recorder, self._rng)
        self._clients[resource] = client
        self._open.add(client)
        try:
            await client.dial()
            await self._devices.plugin_connected(client)
        except (DialFailed, RpcFailed) as error:
            if self._clients.get(resource) is client:
                del self._clients[resource]
            self._open.discard(client)
            await client.close()
            raise RegistrationRefused(f"failed to connect to the device plugin of {resource}: {error}") from error
        task = asyncio.get_running_loop().create_task(self._follow(client))
        self._streams.add(task)
        task.add_done_callback(self._streams.discard)

    async def disconnect(self, resource: str) -> None:
        """Disconnect the client that is registered for ``resource`` now."""
        client = self._clients.pop(resource, None)
        if client is not None:
            self._devices.plugin_disconnected(resource)
            self._open.discard(client)
            await client.close()

    async def close(self) -> None:
        """End every stream, with the kubelet's process; no device's health changes any more."""
        for task in self._streams:
            task.cancel()
        await asyncio.gather(*self._streams, return_exceptions=True)
        for client in self._open:
            await client.close()

    async def _follow(self, client: DevicePluginClient) -> None:
        await client.watch(lambda devices: self._devices.devices_reported(client.resource, devices))
        if client in self._open and self._clients.get(client.resource) is not client:
            self._open.discard(client)
            await client.close()
        await self.disconnect(client.resource)


class RegistrationService(rpc.RegistrationServicer):
    """``kubelet.sock`` in ``device-plugins/``: the classic way."""

    def __init__(self, directory: Path, clients: DevicePluginClients, recorder: Recorder) -> None:
        self._directory = directory
        self._clients = clients
        self._recorder = recorder

    async def Register(
        self, request: api.RegisterRequest, context: grpc.aio.ServicerContext[api.RegisterRequest, api.Empty]
    ) -> api.Empty:
        """Register a plugin. Refuses with code ``Unknown`` and a message, as the kubelet's plain errors arrive."""
        clock = asyncio.get_running_loop().time
        begun = clock()
        outcome, detail = "OK", ""
        try:
            if request.version != VERSION:
                raise RegistrationRefused(
                    f'requested API version "{request.version}" is not supported by kubelet. '
                    f'Supported version is ["{VERSION}"]'
                )
            check_resource_name(request.resource_name)
            await self._clients.connect(request.resource_name, self._directory / request.endpoint)
        except RegistrationRefused as error:
            outcome, detail = go_code_name(grpc.StatusCode.UNKNOWN), str(error)
        self._recorder.record(
            KubeletEvent(begun, "Register", outcome, clock() - begun, request.resource_name, detail=detail)
        )
        if detail:
            await context.abort(grpc.StatusCode.UNKNOWN, detail)
        return api.Empty()
