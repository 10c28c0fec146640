"""The kubelet's plugin watcher: it finds the sockets in ``plugins_registry/`` and registers the plugins behind them.

Promise: a plugin found here needs to do nothing when the kubelet is restarted; its socket is not removed, and the
kubelet finds it again. It does so only after its first node status, which therefore reports that the node has none of
the plugin's devices, until the next one. A socket created again is a new plugin. One that is gone is deregistered, and
with it, as in the real kubelet, the plugin that is registered for its resource *now*, even if it is another one.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from plugin.api import pluginregistration_pb2 as api
from plugin.api import pluginregistration_pb2_grpc as rpc
from scrubber.emulator import sockets
from scrubber.emulator.events import KubeletEvent, Recorder, RpcFailed
from scrubber.emulator.pluginclient import VERSION
from scrubber.emulator.registration import DevicePluginClients, RegistrationRefused, check_resource_name
from scrubber.emulator.timings import KubeletTimings

DEVICE_PLUGIN = "DevicePlugin"


class PluginHandler(Protocol):
    """Connects to plugins of one type."""

    deregisters_unnotified: bool
    """Whether a plugin that cannot be notified of its registration is deregistered, and registered again later."""

    async def register(self, info: api.PluginInfo, socket: Path) -> None:
        """Connect to the plugin behind a registration socket.

        Raises:
            RegistrationRefused: the plugin is not accepted; it is notified of the message.
        """

    async def deregister(self, info: api.PluginInfo, socket: Path) -> None:
        """Handle the removal of a registration socket."""


class DevicePluginHandler:
    """Handler of device plugins: the table of clients that the classic registration fills as well."""

    deregisters_unnotified = False

    def __init__(self, clients: DevicePluginClients) -> None:
        self._clients = clients

    async def register(self, info: api.PluginInfo, socket: Path) -> None:
        """Check version and resource, dial the plugin, and follow its devices."""
        if VERSION not in info.supported_versions:
            raise RegistrationRefused(
                f"manager version, {VERSION}, is not among plugin supported versions {list(info.supported_versions)}"
            )
        check_resource_name(info.name)
        await self._clients.connect(info.name, Path(info.endpoint) if info.endpoint else socket)

    async def deregister(self, info: api.PluginInfo, socket: Path) -> None:
        """Disconnect the plugin that is registered for the resource now."""
        await self._clients.disconnect(info.name)


@dataclass(slots=True)
class _RegisteredSocket:
    """A socket that was found, and the result of its registration."""

    incarnation: sockets.Incarnation
    info: api.PluginInfo | None = None
    """Set once registered."""
    not_before: float = 0.0
    delay: float = 0.0


class PluginWatcher:
    """Compares the directory with what is registered, once every ``timings.watcher_period``."""

    def __init__(
        self,
        directory: Path,
        handlers: Mapping[str, PluginHandler],
        timings: KubeletTimings,
        recorder: Recorder,
    ) -> None:
        """Initialise the watcher of ``directory``; ``handlers`` are by the plugins' type."""
        self._directory = directory
        self._handlers = handlers
        self._timings = timings
        self._recorder = recorder
        self._sockets: dict[Path, _RegisteredSocket] = {}

    async def run(self) -> None:
        """Reconcile periodically until cancelled."""
        while True:
            await self.reconcile()
            await asyncio.sleep(self._timings.watcher_period)

    async def reconcile(self) -> None:
        """Reconcile once: drop sockets that are gone, register new ones, retry failed ones that are due."""
        now = asyncio.get_running_loop().time()
        present = self._list_sockets()
        for path, found in list(self._sockets.items()):
            if present.get(path) != found.incarnation:
                del self._sockets[path]
                if found.info is not None:
                    await self._handlers[found.info.type].deregister(found.info, path)
                    self._recorder.record(KubeletEvent(now, "Deregistered", resource=found.info.name, detail=path.name))
        for path, incarnation in present.items():
            found = self._sockets.setdefault(path, _RegisteredSocket(incarnation))
            if found.info is None and found.not_before <= now:
                await self._register(path, found)

    def _list_sockets(self) -> dict[Path, sockets.Incarnation]:
        present: dict[Path, sockets.Incarnation] = {}
        for directory, below, files in os.walk(self._directory):
            below[:] = [name for name in below if not name.startswith(".")]
            for path in (Path(directory, name) for name in files if not name.startswith(".")):
                # Checked once: the plugin may remove the socket between two checks.
                if (incarnation := sockets.incarnation(path)) is not None:
                    present[path] = incarnation
        return present

    async def _register(self, path: Path, found: _RegisteredSocket) -> None:
        first, longest = self._timings.watcher_retry
        channel = sockets.channel(path)
        watched = rpc.RegistrationStub(channel)
        try:
            info = await self._recorder.call(
                KubeletEvent(0.0, "GetInfo"),
                lambda: watched.GetInfo(api.InfoRequest(), timeout=self._timings.watcher_get_info, wait_for_ready=True),
            )
            problem = await self._connect(path, info)
            if problem is None:
                found.info = info
            status = api.RegistrationStatus(plugin_registered=problem is None, error=problem or "")
            await self._recorder.call(
                KubeletEvent(0.0, "NotifyRegistrationStatus", resource=info.name, detail=problem or ""),
                lambda: watched.NotifyRegistrationStatus(status, timeout=self._timings.watcher_notify),
            )
        except RpcFailed:
            # Recorded. A device plugin that is not notified of its registration is registered all the same.
            if found.info is not None and self._handlers[found.info.type].deregisters_unnotified:
                await self._handlers[found.info.type].deregister(found.info, path)
                found.info = None
        finally:
            await channel.close()
        if found.info is None:
            found.delay = min(max(first, 2 * found.delay), longest)
            found.not_before = asyncio.get_running_loop().time() + found.delay

    async def _connect(self, path: Path, info: api.PluginInfo) -> str | None:
        """Validate and connect; return the error that the plugin is notified of when that fails."""
        try:
            if info.type not in self._handlers:
                raise RegistrationRefused(f"no handler registered for plugin type: {info.type} at socket {path}")
            await self._handlers[info.type].register(info, path)
        except RegistrationRefused as error:
            return f"RegisterPlugin error -- {error}"
        return None
