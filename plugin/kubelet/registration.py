"""Registers the plugin with the kubelet, and again whenever the kubelet may have lost it.

Invariants: the plugin serves before it registers. It registers again whenever the kubelet's socket is created again,
the plugin's socket is removed, or a ``ListAndWatch`` stream ends for any reason: the kubelet never reconnects, and
until then it starts containers without calling the plugin. At any time the plugin has a socket in only one of the
kubelet's two directories, and only one instance of the plugin on a node is registered (:mod:`plugin.instance_lock`).

There are two modes. In *classic* mode the plugin calls ``Register``, which takes milliseconds; a restarted kubelet
knows the plugin before its first node status. In *watcher* mode the kubelet connects to a socket in
``plugins_registry/``. After a restart, however, it reads that directory only after it has published that the node has
no devices, and that remains so until the next node status, 10 s later. ``auto`` is the classic mode; it is the watcher
mode only where ``device-plugins/`` does not exist.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import NoReturn

import grpc

from plugin.api import deviceplugin_pb2, deviceplugin_pb2_grpc, pluginregistration_pb2, pluginregistration_pb2_grpc
from plugin.instance_lock import InstanceLock
from plugin.kubelet.devices import AdvertisedDevices
from plugin.kubelet.server import ListAndWatchStreams, PluginServer
from plugin.kubelet.sockets import SocketFile, check_path_length, remove_stale_sockets
from plugin.logs import Logger, WaitLogger
from plugin.observers import KubeletObserver, NullObserver, RegistrationObserver
from scrubber.domain.errors import InvalidConfiguration, Unavailable

__all__ = [
    "KubeletPaths",
    "PluginInfoService",
    "Registrar",
    "RegistrationMode",
    "RegistrationTimes",
    "resource_name_error",
]

API_VERSION = "v1beta1"
NO_ANSWER_CODES = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED)
"""Status codes that mean that the kubelet did not respond; any other one is a response of the kubelet."""


# See docs/decisions/0014-plugin-registration.md.
class RegistrationMode(StrEnum):
    """Mode of registration."""

    AUTO = "auto"
    WATCHER = "watcher"
    CLASSIC = "classic"


class RegistrationEnd(StrEnum):
    """Why an incarnation of the plugin ended."""

    STREAM_ENDED = "the kubelet's stream ended"
    NO_STREAM = "the kubelet accepted the plugin but opened no stream"
    SOCKET_REMOVED = "the plugin's socket was removed"
    KUBELET_RESTARTED = "the kubelet's socket was recreated"
    WATCHER_DID_NOT_CALL = "the kubelet did not connect to the socket in plugins_registry/"

    @property
    def label(self) -> str:
        """Label value for metrics."""
        return _END_LABELS[self]


_END_LABELS = {
    RegistrationEnd.STREAM_ENDED: "stream-ended",
    RegistrationEnd.NO_STREAM: "no-stream",
    RegistrationEnd.SOCKET_REMOVED: "socket-removed",
    RegistrationEnd.KUBELET_RESTARTED: "kubelet-restarted",
    RegistrationEnd.WATCHER_DID_NOT_CALL: "watcher-did-not-call",
}


@dataclass(frozen=True, slots=True)
class RegistrationTimes:
    """Times of registration, in seconds.

    Attributes:
        poll: interval of checks of socket files while the plugin is not registered; a kubelet that has just started is
            noticed within this time.
        idle_poll: the same while it is registered; a kubelet that stops ends its stream, which is noticed at once.
        watcher_fallback: how long ``device-plugins/`` may be missing before ``auto`` uses the watcher: the first start
            of a kubelet creates both directories, one after the other.
        watcher_call: how long the kubelet may take to connect in ``plugins_registry/`` before the wait is logged.
        register: limit of ``Register``; the kubelet dials the plugin back within the call and takes up to 10 s.
        stream: from an accepted registration to the kubelet's stream, which arrives within milliseconds, or never if
            the end of an older stream removed the new client; doubled after each consecutive failure, up to
            ``stream_max``.
        retry: between attempts to register with a kubelet that does not respond or refuses.
        lock_poll: interval of checks whether another instance of the plugin has stopped.
        reregister_delay: from the end of a stream to the next ``Register``, by any instance. The kubelet first drops
            the connection and then marks the resource's endpoint, whichever it is by then, as stopped; an endpoint that
            registered in between is not notified.
        stable: a registration that the kubelet dropped is repeated at once when it lasted this long, or was the first
            of a series of shorter ones.
        back_off: pause after the second of such a series, doubling up to ``back_off_max``.
        log_interval: between log lines about a wait.
    """

    poll: float = 0.05
    idle_poll: float = 1.0
    watcher_fallback: float = 5.0
    watcher_call: float = 2.0
    register: float = 15.0
    stream: float = 0.3
    stream_max: float = 10.0
    retry: float = 0.5
    lock_poll: float = 0.01
    reregister_delay: float = 0.01
    stable: float = 10.0
    back_off: float = 0.05
    back_off_max: float = 5.0
    log_interval: float = 30.0


@dataclass(frozen=True, slots=True)
class KubeletPaths:
    """The kubelet's files for a device plugin, below ``root`` (``/var/lib/kubelet``)."""

    root: Path
    resource: str

    @property
    def device_plugins(self) -> Path:
        return self.root / "device-plugins"

    @property
    def plugins_registry(self) -> Path:
        return self.root / "plugins_registry"

    @property
    def kubelet_socket(self) -> Path:
        return self.device_plugins / "kubelet.sock"

    @property
    def socket_prefix(self) -> str:
        """Prefix of the names of the plugin's sockets."""
        return f"scrubber-{self.resource.rpartition('/')[2][:24]}"

    def writer_lock_directory(self, mode: RegistrationMode) -> Path:
        """Return the directory for the lock of the writing instance: one that ``mode`` registers in.

        The instance that holds this lock writes to the API server.
        """
        by_watcher = (
            mode is RegistrationMode.AUTO and not self.device_plugins.is_dir() and self.plugins_registry.is_dir()
        )
        return self.plugins_registry if mode is RegistrationMode.WATCHER or by_watcher else self.device_plugins

    def plugin_socket(self, directory: Path, token: str) -> Path:
        return directory / f"{self.socket_prefix}-{token}.sock"

    def check(self) -> None:
        """Refuse settings that cannot work, before anything is tried.

        Raises:
            InvalidConfiguration: a resource name that the kubelet would refuse; a directory that is a file or whose
                sockets' paths would be too long; a file where the kubelet's socket should be.
        """
        if error := resource_name_error(self.resource):
            raise InvalidConfiguration(error)
        for directory in (self.root, self.device_plugins, self.plugins_registry):
            if directory.exists() and not directory.is_dir():
                raise InvalidConfiguration(f"{directory} is a file. Use the kubelet's directory.")
            check_path_length(self.plugin_socket(directory, "0" * 8), "this plugin's socket")
        check_path_length(self.kubelet_socket, "the kubelet's socket")
        SocketFile.of(self.kubelet_socket)


def resource_name_error(name: str) -> str:
    """Return why the kubelet would refuse a resource of this name; empty when it would not."""
    domain, _, base = name.partition("/")
    label = r"[a-z0-9]([-a-z0-9]*[a-z0-9])?"
    hint = "Use DOMAIN/NAME, such as scrubber.dev/gpu."
    name_part = r"[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?"
    if not re.fullmatch(rf"{label}(\.{label})*", domain) or not re.fullmatch(name_part, base):
        return f"{name!r} is not a valid resource name. {hint}"
    if len(domain) > 244 or len(base) > 63:
        return f"{name!r} is too long: at most 244 characters before the slash and 63 after it. {hint}"
    if "kubernetes.io/" in name or name.startswith("requests."):
        return f"{name!r} is reserved for Kubernetes: use a domain of your own. {hint}"
    return ""


class Registrar:
    """Keeps the plugin registered with the kubelet.

    Args:
        plugin: creates the servicer of one incarnation.
        token: creates eight characters that were never used before.
        clock: monotonic seconds.

    Attributes:
        is_ready: this instance has been ready to register since its start, except that another instance may be
            registered.
    """

    def __init__(
        self,
        paths: KubeletPaths,
        mode: RegistrationMode,
        *,
        plugin: Callable[[ListAndWatchStreams], deviceplugin_pb2_grpc.DevicePluginServicer],
        advertised: AdvertisedDevices,
        times: RegistrationTimes,
        token: Callable[[], str],
        log: Logger,
        clock: Callable[[], float],
        observer: KubeletObserver | None = None,
    ) -> None:
        self._observer = observer or NullObserver()
        self._paths = paths
        self._mode = mode
        self._plugin = plugin
        self._advertised = advertised
        self._times = times
        self._token = token
        self._log = log
        self._clock = clock
        self._reminder = WaitLogger(log, every=times.log_interval, clock=clock)
        self._stream_timeout = times.stream
        self._locks: dict[Path, InstanceLock] = {}
        self.is_ready = False

    async def run(self) -> NoReturn:
        """Run until cancelled; on exit, end the streams and remove the plugin's socket."""
        pause = self._times.reregister_delay
        over: RegistrationEnd | None = None
        self._observer.on_registration_status(self._paths.resource, registered=False)
        try:
            while True:
                way = await self._choose_mode()
                began = self._clock()
                try:
                    over = await (self._run_watcher() if way is RegistrationMode.WATCHER else self._run_classic())
                except Unavailable as error:
                    self._log_waiting(str(error))
                    await asyncio.sleep(self._times.retry)
                    continue
                self._observer.on_registration_end(self._paths.resource, over.label)
                if over is RegistrationEnd.NO_STREAM:
                    self._stream_timeout = min(2 * self._stream_timeout, self._times.stream_max)
                elif over is RegistrationEnd.STREAM_ENDED:
                    self._stream_timeout = self._times.stream
                self._log.warning(
                    "kubelet.registration-lost",
                    resource=self._paths.resource,
                    reason=over.label,
                    message=f"{over.value.capitalize()}.",
                    mode=way.value,
                )
                dropped = over in (RegistrationEnd.STREAM_ENDED, RegistrationEnd.NO_STREAM)
                if not dropped or self._clock() - began >= self._times.stable:
                    pause = self._times.reregister_delay
                if dropped:
                    await asyncio.sleep(pause)
                    pause = min(max(2 * pause, self._times.back_off), self._times.back_off_max)
        finally:
            for lock in self._locks.values():
                lock.release()

    async def _choose_mode(self) -> RegistrationMode:
        """Return how to register this time; wait until there is a directory for it."""
        places = self._paths
        since = self._clock()
        while True:
            if self._mode is not RegistrationMode.WATCHER and places.device_plugins.is_dir():
                return RegistrationMode.CLASSIC
            given_up = self._mode is RegistrationMode.WATCHER or self._clock() - since >= self._times.watcher_fallback
            if self._mode is not RegistrationMode.CLASSIC and given_up and places.plugins_registry.is_dir():
                return RegistrationMode.WATCHER
            directory = places.plugins_registry if self._mode is RegistrationMode.WATCHER else places.device_plugins
            self._log_waiting(f"{directory} does not exist.")
            await asyncio.sleep(self._times.poll)

    async def _run_watcher(self) -> RegistrationEnd:
        """Run one incarnation in ``plugins_registry/`` until it ends."""
        times = self._times
        path = self._paths.plugin_socket(self._paths.plugins_registry, self._token())
        info = pluginregistration_pb2.PluginInfo(
            type="DevicePlugin", name=self._paths.resource, endpoint=str(path), supported_versions=[API_VERSION]
        )
        watcher = PluginInfoService(info, log=self._log, observer=self._observer)
        accepted_at: float | None = None
        await self._wait_for_lock(path.parent, None)  # first: the kubelet connects to a socket as soon as it exists
        expected = self._clock() + times.watcher_call
        async with self._serving(path, watcher) as endpoint:
            while True:
                over = await self._poll_once(endpoint, None)
                if over is not None:
                    return over
                now = self._clock()
                if endpoint.streams.opened.is_set():
                    continue
                if watcher.accepted:
                    accepted_at = accepted_at if accepted_at is not None else now
                    if now - accepted_at >= self._stream_timeout:
                        return RegistrationEnd.NO_STREAM
                elif not watcher.contacted:
                    if self._mode is RegistrationMode.AUTO and self._paths.device_plugins.is_dir():
                        return RegistrationEnd.WATCHER_DID_NOT_CALL
                    if now >= expected:
                        self._log_waiting("The kubelet has not connected to the socket in plugins_registry/ yet.")

    async def _run_classic(self) -> RegistrationEnd:
        """Run one incarnation in ``device-plugins/`` until it ends."""
        kubelet = await self._wait_for_kubelet()
        path = self._paths.plugin_socket(self._paths.device_plugins, self._token())
        async with self._serving(path, None) as endpoint:
            over = await self._wait_for_lock(path.parent, endpoint, kubelet)
            while over is None:
                try:
                    await self._register(path.name)
                    break
                except Unavailable as error:
                    self._log_waiting(str(error))
                over = await self._poll_until(endpoint, kubelet, self._times.retry)
            if over is None:
                over = await self._poll_until(endpoint, kubelet, self._stream_timeout)
            while over is None:
                if not endpoint.streams.opened.is_set():
                    return RegistrationEnd.NO_STREAM
                over = await self._poll_once(endpoint, kubelet)
            return over

    async def _wait_for_lock(
        self, directory: Path, endpoint: PluginServer | None, kubelet: SocketFile | None = None
    ) -> RegistrationEnd | None:
        """Wait until no other instance is registered; return why ``endpoint`` ended, if it ends before that."""
        self.is_ready = True
        lock = self._locks.setdefault(directory, InstanceLock(directory, self._paths.resource))
        waited = 0
        while not lock.try_acquire():
            if not waited:
                self._log.info("plugin.standby", resource=self._paths.resource)
            waited += 1
            await asyncio.sleep(self._times.lock_poll)
            if (
                endpoint is not None
                and waited % 10 == 0
                and (over := self._socket_change(endpoint, kubelet)) is not None
            ):
                return over
        return None

    async def _wait_for_kubelet(self) -> SocketFile:
        """Return the kubelet's socket; wait until it exists."""
        while (identity := SocketFile.of(self._paths.kubelet_socket)) is None:
            self._log_waiting(f"{self._paths.kubelet_socket} does not exist.")
            await asyncio.sleep(self._times.poll)
        return identity

    async def _register(self, endpoint: str) -> None:
        """Call ``Register`` on a new channel, because a channel that failed once backs off for seconds.

        Raises:
            Unavailable: the kubelet does not respond, or refuses; the message contains its response.
        """
        request = deviceplugin_pb2.RegisterRequest(
            version=API_VERSION, endpoint=endpoint, resource_name=self._paths.resource
        )
        async with grpc.aio.insecure_channel(f"unix:{self._paths.kubelet_socket}") as channel:
            try:
                await deviceplugin_pb2_grpc.RegistrationStub(channel).Register(request, timeout=self._times.register)
            except grpc.aio.AioRpcError as error:
                reason = f"{error.code().name}: {error.details()}"
                outcome = "failed" if error.code() in NO_ANSWER_CODES else "refused"
                self._observer.on_registration_attempt(self._paths.resource, RegistrationMode.CLASSIC.value, outcome)
                raise Unavailable(f"Register at {self._paths.kubelet_socket} failed: {reason}") from error

    @asynccontextmanager
    async def _serving(self, path: Path, watcher: PluginInfoService | None) -> AsyncIterator[PluginServer]:
        try:
            own = list(path.parent.glob(f"{self._paths.socket_prefix}-*.sock"))
        except OSError as error:
            raise Unavailable(f"{path.parent} cannot be read ({error}).") from error
        dead = await remove_stale_sockets(own, older_than=1.0, now=time.time())
        if dead:
            self._log.info("plugin.sockets-removed", paths=[str(path) for path in dead])
        streams = ListAndWatchStreams(self._advertised, self._paths.resource, observer=self._observer)
        endpoint = PluginServer(
            path, plugin=self._plugin(streams), streams=streams, registration=watcher, observer=self._observer
        )
        async with endpoint:
            self._log.info("plugin.serving", resource=self._paths.resource, socket=str(path))
            announcement = asyncio.create_task(self._report_registered(endpoint), name="announcement")
            try:
                yield endpoint
            except asyncio.CancelledError:
                await self._release_to_successor(endpoint)
                raise
            finally:
                announcement.cancel()
                self._observer.on_registration_status(self._paths.resource, registered=False)

    async def _release_to_successor(self, endpoint: PluginServer) -> None:
        """End the streams and let the next instance register, before waiting for the calls in progress."""
        await endpoint.withdraw()
        await asyncio.sleep(self._times.reregister_delay)
        for lock in self._locks.values():
            lock.release()

    def _log_waiting(self, message: str) -> None:
        self._reminder.log_waiting("kubelet.unavailable", resource=self._paths.resource, message=message)

    async def _report_registered(self, endpoint: PluginServer) -> None:
        await endpoint.streams.opened.wait()
        self._reminder.log_ended("kubelet.available", resource=self._paths.resource)
        way = (
            RegistrationMode.WATCHER
            if endpoint.path.parent == self._paths.plugins_registry
            else RegistrationMode.CLASSIC
        )
        self._observer.on_registration_attempt(self._paths.resource, way.value, "ok")
        self._observer.on_registration_status(self._paths.resource, registered=True)
        self._log.info("kubelet.registered", resource=self._paths.resource, mode=way.value, socket=str(endpoint.path))

    async def _poll_until(
        self, endpoint: PluginServer, kubelet: SocketFile | None, seconds: float
    ) -> RegistrationEnd | None:
        """Poll until the incarnation ends, a stream is open, or ``seconds`` have passed."""
        until = self._clock() + seconds
        while not endpoint.streams.opened.is_set() and self._clock() < until:
            over = await self._poll_once(endpoint, kubelet)
            if over is not None:
                return over
        return None

    async def _poll_once(self, endpoint: PluginServer, kubelet: SocketFile | None) -> RegistrationEnd | None:
        """Return why the incarnation ended, or None. Takes one poll interval unless a stream ends."""
        registered = endpoint.streams.opened.is_set()
        try:
            async with asyncio.timeout(self._times.idle_poll if registered else self._times.poll):
                await endpoint.streams.ended.wait()
            return RegistrationEnd.STREAM_ENDED
        except TimeoutError:
            return self._socket_change(endpoint, kubelet)

    def _socket_change(self, endpoint: PluginServer, kubelet: SocketFile | None) -> RegistrationEnd | None:
        """Return why the incarnation ended according to the socket files, or None."""
        if not endpoint.is_intact:
            return RegistrationEnd.SOCKET_REMOVED
        if kubelet is not None and SocketFile.of(self._paths.kubelet_socket) not in (None, kubelet):
            return RegistrationEnd.KUBELET_RESTARTED
        return None


class PluginInfoService(pluginregistration_pb2_grpc.RegistrationServicer):
    """Answers the kubelet's plugin watcher when it connects to the plugin's socket, and records its response.

    Args:
        info: what is registered; its name is the resource, or a DRA driver's name.

    Attributes:
        contacted: the kubelet has called.
        accepted: the kubelet reported that it registered the plugin.
    """

    def __init__(self, info: pluginregistration_pb2.PluginInfo, *, log: Logger, observer: RegistrationObserver) -> None:
        self._info = info
        self._log = log
        self._observer = observer
        self.contacted = False
        self.accepted = False

    async def GetInfo(
        self,
        request: pluginregistration_pb2.InfoRequest,
        context: grpc.aio.ServicerContext[pluginregistration_pb2.InfoRequest, pluginregistration_pb2.PluginInfo],
    ) -> pluginregistration_pb2.PluginInfo:
        self.contacted = True
        return self._info

    async def NotifyRegistrationStatus(
        self,
        request: pluginregistration_pb2.RegistrationStatus,
        context: grpc.aio.ServicerContext[
            pluginregistration_pb2.RegistrationStatus, pluginregistration_pb2.RegistrationStatusResponse
        ],
    ) -> pluginregistration_pb2.RegistrationStatusResponse:
        self.contacted = True
        self.accepted = request.plugin_registered
        if not request.plugin_registered:
            self._observer.on_registration_attempt(self._info.name, "watcher", "refused")
            self._log.error("kubelet.registration-refused", resource=self._info.name, message=request.error)
        return pluginregistration_pb2.RegistrationStatusResponse()
