"""Keeps the driver's two sockets in place, so that the kubelet knows the driver and can call it.

Invariants: the socket for calls is served before the registration socket exists. A socket appears under its name only
once it listens, and a server never removes another server's socket: each one is created under a hidden name that is
never used again, and renamed. A call in progress survives the removal of the socket that it came through.

The kubelet looks for registration sockets when it starts, so its restart needs nothing here; it repeats a registration
that failed.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import grpc

from plugin.api import pluginregistration_pb2, pluginregistration_pb2_grpc
from plugin.dra.paths import DriverSocketPaths
from plugin.kubelet.registration import PluginInfoService
from plugin.kubelet.server import CallTimer
from plugin.kubelet.sockets import SocketFile, add_socket, has_listener, remove_stale_sockets
from plugin.logs import Logger, WaitLogger
from plugin.observers import KubeletObserver, NullObserver
from scrubber.domain.errors import InvalidConfiguration, Unavailable

__all__ = ["SUPPORTED_VERSIONS", "DriverRegistration", "DriverRegistrationTimes"]

SUPPORTED_VERSIONS = ("v1.DRAPlugin", "v1beta1.DRAPlugin")
"""In order of preference. The kubelet tries the health stream with every driver, whatever is listed."""

_MODE = "watcher"


@dataclass(frozen=True, slots=True)
class DriverRegistrationTimes:
    """Times of the registration, in seconds.

    Attributes:
        poll: interval of checks whether the sockets are still there.
        retry: between attempts to create them.
        stale: age from which a socket without a listener counts as left behind.
        drain: limit of calls in progress whose server was replaced; the kubelet gives up after 45 s.
        stop: the same when the driver ends; the kubelet repeats these calls.
        contact: how long the kubelet may take to connect before the wait is logged.
        log_interval: between log lines about a wait.
    """

    poll: float = 1.0
    retry: float = 0.5
    stale: float = 1.0
    drain: float = 45.0
    stop: float = 0.25
    contact: float = 5.0
    log_interval: float = 30.0


class _Listener:
    """One server on one of the driver's sockets."""

    def __init__(self, server: grpc.aio.Server, path: Path, identity: SocketFile | None) -> None:
        self._server = server
        self._identity = identity
        self.path = path

    @property
    def is_intact(self) -> bool:
        """Whether the file at :attr:`path` is still this server's socket."""
        return self._identity is not None and SocketFile.of(self.path) == self._identity

    def remove(self) -> None:
        """Remove the socket, so that the kubelet makes no new connection."""
        with suppress(InvalidConfiguration):
            if self.is_intact:
                self.path.unlink(missing_ok=True)

    async def stop(self, grace: float) -> None:
        """Remove the socket, and end calls in progress after ``grace`` seconds."""
        self.remove()
        await self._server.stop(grace)


class DriverRegistration:
    """Keeps the driver registered.

    Args:
        add_services: adds what the kubelet calls to a server for calls.
        token: returns eight hexadecimal digits that were never used before.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        paths: DriverSocketPaths,
        *,
        add_services: Callable[[grpc.aio.Server], None],
        times: DriverRegistrationTimes,
        token: Callable[[], str],
        log: Logger,
        clock: Callable[[], float],
        observer: KubeletObserver | None = None,
    ) -> None:
        self._paths = paths
        self._add_services = add_services
        self._times = times
        self._token = token
        self._log = log
        self._clock = clock
        self._observer = observer or NullObserver()
        self._timer = CallTimer(self._observer, clock)
        self._reminder = WaitLogger(log, every=times.log_interval, clock=clock)
        self._info: PluginInfoService | None = None
        self._draining: set[asyncio.Task[None]] = set()

    @property
    def is_registered(self) -> bool:
        """Whether the kubelet reported that it registered the driver, on the present registration socket."""
        return self._info is not None and self._info.accepted

    async def run(self) -> NoReturn:
        """Run until cancelled; on exit, remove the registration socket first, then end the calls in progress.

        Raises:
            InvalidConfiguration: a socket cannot be created in its directory.
        """
        calls: _Listener | None = None
        registration: _Listener | None = None
        self._observer.on_registration_status(self._paths.driver, registered=False)
        try:
            while True:
                try:
                    if calls is None or not calls.is_intact:
                        calls = await self._replace(calls, self._serve_calls)
                    if registration is None or not registration.is_intact:
                        registration = await self._replace(registration, self._serve_registration)
                except Unavailable as error:
                    self._log_waiting(str(error))
                    await asyncio.sleep(self._times.retry)
                    continue
                self._log.info("plugin.serving", resource=self._paths.driver, socket=str(calls.path))
                await self._watch(calls, registration)
        finally:
            await self._stop([each for each in (registration, calls) if each is not None])

    async def _watch(self, *listeners: _Listener) -> None:
        """Return once one of the sockets is gone or replaced."""
        info, since, reported = self._info, self._clock(), False
        assert info is not None
        while all(each.is_intact for each in listeners):
            if info.accepted and not reported:
                reported = True
                self._reminder.log_ended("kubelet.available", resource=self._paths.driver)
                self._observer.on_registration_attempt(self._paths.driver, _MODE, "ok")
                self._observer.on_registration_status(self._paths.driver, registered=True)
                self._log.info(
                    "kubelet.registered",
                    resource=self._paths.driver,
                    mode=_MODE,
                    socket=str(self._paths.registration_socket),
                )
            if not info.contacted and self._clock() - since >= self._times.contact:
                self._log_waiting(f"The kubelet has not connected to the socket in {self._paths.registry} yet.")
            await asyncio.sleep(self._times.poll)
        self._observer.on_registration_end(self._paths.driver, "socket-removed")
        self._observer.on_registration_status(self._paths.driver, registered=False)
        self._log.warning(
            "kubelet.registration-lost",
            resource=self._paths.driver,
            reason="socket-removed",
            message="A socket of the driver was removed or replaced. It is created again.",
            mode=_MODE,
        )

    async def _replace(self, before: _Listener | None, serve: Callable[[], Awaitable[_Listener]]) -> _Listener:
        if before is not None:
            task = asyncio.create_task(before.stop(self._times.drain), name="calls in progress")
            self._draining.add(task)
            task.add_done_callback(self._draining.discard)
        try:
            own = self._paths.sockets_of_all_instances()
        except OSError as error:
            raise Unavailable(f"The kubelet's directories for sockets cannot be read ({error}).") from error
        dead = await remove_stale_sockets(own, older_than=self._times.stale, now=time.time())
        if dead:
            self._log.info("plugin.sockets-removed", paths=[str(path) for path in dead])
        return await serve()

    async def _serve_calls(self) -> _Listener:
        try:
            self._paths.directory.mkdir(mode=0o750, exist_ok=True)
        except FileNotFoundError:
            raise Unavailable(f"{self._paths.plugins} does not exist.") from None
        except OSError as error:
            raise InvalidConfiguration(
                f"Cannot create {self._paths.directory}: {error.strerror}. Make {self._paths.plugins} writable for the "
                "driver."
            ) from error
        server = grpc.aio.server(interceptors=[self._timer])
        self._add_services(server)
        return await self._listen(server, self._paths.calls_socket)

    async def _serve_registration(self) -> _Listener:
        info = pluginregistration_pb2.PluginInfo(
            type="DRAPlugin",
            name=self._paths.driver,
            endpoint=str(self._paths.calls_socket),
            supported_versions=SUPPORTED_VERSIONS,
        )
        self._info = PluginInfoService(info, log=self._log, observer=self._observer)
        server = grpc.aio.server()
        pluginregistration_pb2_grpc.add_RegistrationServicer_to_server(self._info, server)
        return await self._listen(server, self._paths.registration_socket)

    async def _listen(self, server: grpc.aio.Server, path: Path) -> _Listener:
        """Serve at ``path``.

        Raises:
            Unavailable: the directory does not exist, or another process listens at ``path``.
            InvalidConfiguration: the socket cannot be created there.
        """
        if await has_listener(path, timeout=1.0):
            raise Unavailable(
                f"Another process listens at {path}. Only one driver with the name {self._paths.driver} may run on a "
                "node, except during a rolling update."
            )
        hidden = self._paths.hidden_socket(path, self._token())
        identity = add_socket(server, hidden)
        await server.start()
        try:
            os.rename(hidden, path)
        except OSError as error:
            await server.stop(None)
            raise Unavailable(f"Cannot create {path}: {error.strerror}.") from error
        return _Listener(server, path, identity)

    async def _stop(self, listeners: Sequence[_Listener]) -> None:
        self._observer.on_registration_status(self._paths.driver, registered=False)
        for each in listeners:
            each.remove()
        for task in self._draining:
            task.cancel()
        await asyncio.gather(
            *(each.stop(self._times.stop) for each in listeners), *self._draining, return_exceptions=True
        )

    def _log_waiting(self, message: str) -> None:
        self._reminder.log_waiting("kubelet.unavailable", resource=self._paths.driver, message=message)
