"""Serves a kubelet socket for vendors' plugins, which register here instead of with the kubelet.

Invariants: the socket is created again at every start, as the kubelet does, and whenever a plugin that is gone does not
come back without it. The directory is exclusive: one that other users may write to, that another kubelet serves, or
that belongs to the real kubelet is refused. A plugin is dialled before its registration is accepted, as by the kubelet.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import stat
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

import grpc

from plugin.api import deviceplugin_pb2 as kubelet
from plugin.api import deviceplugin_pb2_grpc
from plugin.kubelet.registration import API_VERSION, resource_name_error
from plugin.kubelet.sockets import SOCKET_UMASK, SocketFile, check_path_length, has_listener
from plugin.logs import Logger, WaitLogger
from plugin.upstream.devices import UpstreamDevices
from plugin.upstream.socket_rotation import SocketRotation
from plugin.upstream.vendor import VendorPlugin, VendorTimes
from scrubber.domain.errors import InvalidConfiguration, InvalidRequest, ScrubberError

__all__ = ["UpstreamRegistry", "UpstreamRegistryTimes", "check_directory"]

KUBELET_SOCKET_NAME = "kubelet.sock"
LOCK_NAME = ".scrubber.lock"
MAX_RESOURCES = 64
MAX_CONCURRENT_DIALS = 16
"""Limit of registrations that are dialled at the same time."""


@dataclass(frozen=True, slots=True)
class UpstreamRegistryTimes:
    """Times of the registry, in seconds.

    Attributes:
        poll: interval of checks of our socket and of missing plugins.
        rotation_delay: see :class:`SocketRotation`.
        probe: how long an unknown process may take to accept a connection at our socket.
        closing: limit for registrations in progress when the socket is created again.
        log_interval: between log lines about a wait.
    """

    poll: float = 0.25
    rotation_delay: float = 2.0
    probe: float = 1.0
    closing: float = 1.0
    log_interval: float = 30.0


def check_directory(directory: Path, kubelet_dir: Path) -> None:
    """Create ``directory`` if it is missing; refuse one that cannot be exclusive.

    Raises:
        InvalidConfiguration: it is a directory of the real kubelet, is not a directory, cannot be created, belongs to
            another user, is writable for others, or the paths of its sockets would be too long.
    """
    for name in ("device-plugins", "plugins_registry"):
        real = kubelet_dir / name
        if directory.resolve() == real.resolve() or (directory.exists() and real.exists() and directory.samefile(real)):
            raise InvalidConfiguration(
                f"{directory} is the kubelet's own directory: a socket there would replace the kubelet's. Use an empty "
                "directory, and mount it where the vendor's plugin expects the kubelet's."
            )
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = directory.stat()
    except OSError as error:
        raise InvalidConfiguration(f"The directory {directory} cannot be created: {error.strerror}.") from error
    if found.st_uid not in (0, os.geteuid()) or stat.S_IMODE(found.st_mode) & 0o022:
        raise InvalidConfiguration(
            f"{directory} belongs to uid {found.st_uid} with mode {stat.S_IMODE(found.st_mode):04o}: any process that can "
            f"write there can register as a device plugin. Permit only uid {os.geteuid()} (chown, chmod 0700)."
        )
    check_path_length(directory / f".kubelet-{'0' * 8}.sock", "the registration socket for vendors' plugins")


class _Registrations(deviceplugin_pb2_grpc.RegistrationServicer):
    """Serves ``Register``, with refusals as readable messages."""

    def __init__(self, registry: UpstreamRegistry) -> None:
        self._registry = registry

    async def Register(
        self,
        request: kubelet.RegisterRequest,
        context: grpc.aio.ServicerContext[kubelet.RegisterRequest, kubelet.Empty],
    ) -> kubelet.Empty:
        try:
            await self._registry.register(request)
        except ScrubberError as error:
            self._registry.log.warning(
                "upstream.registration-refused",
                resource=request.resource_name,
                endpoint=request.endpoint,
                message=str(error),
            )
            wrong = isinstance(error, InvalidRequest)
            code = grpc.StatusCode.INVALID_ARGUMENT if wrong else grpc.StatusCode.UNAVAILABLE
            await context.abort(code, str(error))
        return kubelet.Empty()


@dataclass(slots=True)
class UpstreamRegistry:
    """Serves ``kubelet.sock`` in ``directory``.

    Attributes:
        token: creates eight characters that were never used before.
        clock: monotonic seconds.
    """

    directory: Path
    devices: UpstreamDevices
    times: UpstreamRegistryTimes
    vendor_times: VendorTimes
    log: Logger
    token: Callable[[], str]
    clock: Callable[[], float]
    _rotation: SocketRotation = field(init=False)
    _reminder: WaitLogger = field(init=False)
    _dial_slots: asyncio.Semaphore = field(init=False)
    _socket_file: SocketFile | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self._rotation = SocketRotation(self.times.rotation_delay)
        self._reminder = WaitLogger(self.log, every=self.times.log_interval, clock=self.clock)
        self._dial_slots = asyncio.Semaphore(MAX_CONCURRENT_DIALS)

    @property
    def socket(self) -> Path:
        return self.directory / KUBELET_SOCKET_NAME

    async def run(self) -> NoReturn:
        """Run until cancelled; on exit, remove the socket.

        Raises:
            InvalidConfiguration: another process serves there, or no socket can be created.
        """
        async with self._hold_lock():
            await self._refuse_running_kubelet()
            server: grpc.aio.Server | None = None
            try:
                while True:
                    server = await self._rotate_socket(server)
                    why = await self._wait_for_rotation()
                    self.log.warning("upstream-registry.socket-rotated", message=why)
            finally:
                if self._is_intact:
                    self.socket.unlink(missing_ok=True)
                if server is not None:
                    await server.stop(None)

    async def register(self, request: kubelet.RegisterRequest) -> None:
        """Dial a plugin, and follow it from now on.

        Raises:
            InvalidRequest: the registration is invalid.
            Unavailable: no process responds at its socket.
        """
        vendor = VendorPlugin(request.resource_name, self._endpoint(request), times=self.vendor_times, clock=self.clock)
        try:
            async with self._dial_slots:
                await vendor.dial()
                await self.devices.add_vendor(vendor)
        except BaseException:
            await vendor.close()
            raise
        self.log.info("upstream.registered", resource=vendor.resource, socket=str(vendor.socket))

    def _endpoint(self, request: kubelet.RegisterRequest) -> Path:
        if request.version != API_VERSION:
            raise InvalidRequest(f"Version {request.version!r} is not supported: use {API_VERSION}.")
        if name_error := resource_name_error(request.resource_name):
            raise InvalidRequest(name_error)
        if request.resource_name not in self.devices.upstreams and len(self.devices.upstreams) >= MAX_RESOURCES:
            raise InvalidRequest(f"{MAX_RESOURCES} resources are registered already, which is the limit.")
        name = request.endpoint
        if not name or name in (".", "..", KUBELET_SOCKET_NAME) or "/" in name or "\0" in name:
            raise InvalidRequest(
                f"{name!r} is not a valid endpoint: use the base name of a socket beside {KUBELET_SOCKET_NAME}."
            )
        try:
            check_path_length(self.directory / name, "the plugin's socket")
        except InvalidConfiguration as error:
            raise InvalidRequest(str(error)) from error
        return self.directory / name

    async def _rotate_socket(self, before: grpc.aio.Server | None) -> grpc.aio.Server:
        """Replace the last socket with a new one; return its server.

        The server listens before the socket gets its final name, and that name is removed and created again: plugins
        watch for either event, and try to register at once. gRPC removes its socket by path when it stops, so it gets a
        path that is never used again.
        """
        hidden = self.directory / f".kubelet-{self.token()}.sock"
        server = grpc.aio.server()
        deviceplugin_pb2_grpc.add_RegistrationServicer_to_server(_Registrations(self), server)
        mask = os.umask(SOCKET_UMASK)
        try:
            server.add_insecure_port(f"unix:{hidden}")
        except RuntimeError as error:
            raise InvalidConfiguration(
                f"Cannot create a socket in {self.directory}. Check that uid {os.geteuid()} can write to it."
            ) from error
        finally:
            os.umask(mask)
        await server.start()
        SocketFile.of(self.socket)
        self.socket.unlink(missing_ok=True)
        os.link(hidden, self.socket)
        hidden.unlink()
        self._socket_file = SocketFile.of(self.socket)
        self.log.info("upstream-registry.serving", socket=str(self.socket))
        if before is not None:
            await before.stop(self.times.closing)
        return server

    async def _wait_for_rotation(self) -> str:
        """Wait until the socket must be created again; return why."""
        while True:
            await asyncio.sleep(self.times.poll)
            if not self._is_intact:
                return "The socket for vendors' plugins was removed and is recreated."
            missing = self.devices.missing_resources()
            if self._rotation.check_due(missing, self.clock()):
                return f"No plugin serves {', '.join(sorted(missing))}; the socket is recreated so that they register again."

    @property
    def _is_intact(self) -> bool:
        return self._socket_file is not None and SocketFile.of(self.socket) == self._socket_file

    async def _refuse_running_kubelet(self) -> None:
        """Refuse a socket with a listener: we hold the lock, so it is not another instance of this plugin."""
        if await has_listener(self.socket, self.times.probe):
            raise InvalidConfiguration(
                f"Another process serves {self.socket}. {self.directory} may be the directory of a running kubelet: "
                "use an empty one."
            )

    @asynccontextmanager
    async def _hold_lock(self) -> AsyncIterator[None]:
        """Hold the directory's lock; wait for an instance that still runs.

        Two instances would take the plugins from each other by creating the socket in turns.
        """
        try:
            lock = os.open(self.directory / LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            raise InvalidConfiguration(f"{self.directory / LOCK_NAME} cannot be created: {error.strerror}.") from error
        try:
            while True:
                with contextlib.suppress(BlockingIOError):
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                self._reminder.log_waiting("upstream-registry.waiting", directory=str(self.directory))
                await asyncio.sleep(self.times.poll)
            self._reminder.log_ended("upstream-registry.acquired", directory=str(self.directory))
            yield
        finally:
            os.close(lock)
