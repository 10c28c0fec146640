"""The gRPC servers of the scrub service: three servers on three sockets, one for each purpose.

Invariants: a socket serves only its own service and the health of it. An unauthorized caller never reaches the engine.
A second instance, and a path that is not ours, are refused before anything is changed. Stopping ends every stream at
once, so that the grace period is available for calls that do work.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import structlog
from grpc_reflection.v1alpha import reflection

from scrubber.api import grpc_health, scrubber_pb2_grpc
from scrubber.api.interceptor import ApiInterceptor, JoinTrace, RpcObserver
from scrubber.api.peer_auth import PeerAuthProxy, authorized_actor
from scrubber.api.peer_versions import PeerVersions
from scrubber.api.servicers import AdminServicer, PluginServicer, ReadServicer
from scrubber.api.socket_permissions import SocketDirectory, gid_of
from scrubber.api.sockets import Purpose, Sockets, grpc_target
from scrubber.api.view_streams import ViewStreams
from scrubber.domain.errors import InvalidConfiguration
from scrubber.engine.views import Service

__all__ = ["MAX_CALLS", "STOP_GRACE_SECONDS", "GrpcServer", "serve"]

MAX_CALLS = 256
"""Calls of one connection at a time, open streams included; further calls wait in the caller."""
STOP_GRACE_SECONDS = 2.0
"""Grace period in seconds for calls in progress when the service stops."""


class GrpcServer:
    """Serves ``service`` on ``sockets``; started once and stopped once.

    Args:
        reflection: whether tools may list the methods.
        log: log for refusals and failures; structlog's default when None.
        observer: receives every call.
        join_trace: makes calls on the plugin and admin sockets part of the caller's trace; None: calls join no trace.
    """

    def __init__(
        self,
        service: Service,
        sockets: Sockets,
        *,
        reflection: bool = False,
        log: structlog.typing.FilteringBoundLogger | None = None,
        observer: RpcObserver | None = None,
        join_trace: JoinTrace | None = None,
    ) -> None:
        self._service = service
        self._sockets = sockets
        self._reflection = reflection
        self._log: structlog.typing.FilteringBoundLogger = structlog.get_logger() if log is None else log
        self._observer = observer
        self._join_trace = join_trace
        self._streams = ViewStreams(service)
        self._peer_versions = PeerVersions(self._log)
        self._directory = SocketDirectory(sockets)
        self._servers: list[grpc.aio.Server] = []
        self._admin_proxy: PeerAuthProxy | None = None

    async def start(self) -> None:
        """Start to serve. Returns once every socket answers; an error leaves nothing behind.

        Raises:
            AlreadyRunning: another service, or another program, serves there.
            InvalidConfiguration: the directory, its group, or a file in the place of a socket cannot be used.
        """
        self._directory.acquire()
        try:
            await self._start_server(Purpose.PLUGIN, self._directory.prepare_bind_path(Purpose.PLUGIN))
            await self._start_server(Purpose.READ, self._directory.prepare_bind_path(Purpose.READ))
            await self._start_admin_proxy(
                self._directory.prepare_bind_path(Purpose.ADMIN), self._directory.prepare_internal_bind_path()
            )
            for purpose in Purpose:
                self._directory.publish(purpose)
        except BaseException:
            await self.stop(0)
            raise
        self._log.info("api.serving", directory=str(self._sockets.directory))

    async def stop(self, grace: float = STOP_GRACE_SECONDS) -> None:
        """Stop accepting, end the streams, wait ``grace`` seconds for calls in progress, and release the directory."""
        self._streams.stop()
        self._directory.unpublish()
        if self._admin_proxy is not None:
            self._admin_proxy.close()
        await asyncio.gather(*(server.stop(grace) for server in self._servers))
        if self._admin_proxy is not None:
            await self._admin_proxy.abort_connections()
        self._directory.release()

    async def _start_server(self, purpose: Purpose, path: Path) -> None:
        # The peer is checked where the proxy identifies it; the other two sockets are protected only by their mode.
        admit = authorized_actor if purpose is Purpose.ADMIN else None
        join = None if purpose is Purpose.READ else self._join_trace  # read-only callers join no trace
        server = grpc.aio.server(
            interceptors=(
                ApiInterceptor(
                    purpose,
                    log=self._log,
                    authorize=admit,
                    observer=self._observer,
                    join_trace=join,
                    # The other sockets serve operators, who need them most while versions do not match.
                    peer_versions=self._peer_versions if purpose is Purpose.PLUGIN else None,
                ),
            ),
            options=(("grpc.so_reuseport", 0), ("grpc.max_concurrent_streams", MAX_CALLS)),
        )
        self._add_services(server, purpose)
        try:
            server.add_insecure_port(grpc_target(path))
        except RuntimeError as error:
            raise InvalidConfiguration(f"The {purpose.value} socket cannot be bound at {path}: {error}.") from error
        self._servers.append(server)
        await server.start()

    def _add_services(self, server: grpc.aio.Server, purpose: Purpose) -> None:
        match purpose:
            case Purpose.PLUGIN:
                plugin = PluginServicer(self._service, self._streams)
                scrubber_pb2_grpc.add_PluginServicer_to_server(plugin, server)
            case Purpose.READ:
                read = ReadServicer(self._service, self._streams, self._peer_versions.versions)
                scrubber_pb2_grpc.add_ReadServicer_to_server(read, server)
            case Purpose.ADMIN:
                scrubber_pb2_grpc.add_AdminServicer_to_server(AdminServicer(self._service), server)
        grpc_health.add_health_servicer(server, grpc_health.HealthServicer(self._service, self._streams, purpose))
        if self._reflection:
            names = (purpose.service, grpc_health.SERVICE_NAME, reflection.SERVICE_NAME)
            reflection.enable_server_reflection(names, server)

    async def _start_admin_proxy(self, path: Path, server_path: Path) -> None:
        await self._start_server(Purpose.ADMIN, server_path)
        operators = None if self._sockets.admin_group is None else gid_of(self._sockets.admin_group)
        self._admin_proxy = PeerAuthProxy(server_path, log=self._log, operator_gid=operators)
        try:
            await self._admin_proxy.listen(path)
        except OSError as error:
            raise InvalidConfiguration(f"The admin socket cannot be bound at {path}: {error.strerror}.") from error


@asynccontextmanager
async def serve(
    service: Service,
    sockets: Sockets,
    *,
    reflection: bool = False,
    grace: float = STOP_GRACE_SECONDS,
    log: structlog.typing.FilteringBoundLogger | None = None,
) -> AsyncIterator[GrpcServer]:
    """Serve while the body runs; raises the errors of :meth:`GrpcServer.start`."""
    server = GrpcServer(service, sockets, reflection=reflection, log=log)
    await server.start()
    try:
        yield server
    finally:
        await server.stop(grace)
