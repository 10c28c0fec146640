"""The scrub service on its sockets: three servers, one for each purpose.

Promise: a socket serves its own service, the health of it, and nothing else; whoever may not use it never reaches the
engine; a second instance, and a path that is not ours, are refused before anything is touched; and stopping ends every
stream at once, so that the grace is for the calls that do work.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import structlog
from grpc_reflection.v1alpha import reflection

from scrubber.api import health, scrubber_pb2_grpc
from scrubber.api.answering import Answering, Join, Observer
from scrubber.api.binding import SocketDirectory, gid_of
from scrubber.api.frontdoor import FrontDoor, actor_of
from scrubber.api.servicers import AdminServicer, PluginServicer, ReadServicer
from scrubber.api.sockets import Purpose, Sockets, target
from scrubber.api.watching import Following
from scrubber.domain.errors import BadConfiguration
from scrubber.engine.views import Service

__all__ = ["GRACE", "ApiServer", "serve"]

GRACE = 2.0
"""Seconds that calls under way get when the service stops."""


class ApiServer:
    """Serves ``service`` on ``sockets``; started once and stopped once.

    Args:
        reflection: whether tools may ask which methods there are.
        log: where refusals and failures are told; structlog's default when None.
        observe: is told of every call.
        join: makes what a caller of the plugin or admin socket asks for part of its trace; None: callers have none.
    """

    def __init__(
        self,
        service: Service,
        sockets: Sockets,
        *,
        reflection: bool = False,
        log: structlog.typing.FilteringBoundLogger | None = None,
        observe: Observer | None = None,
        join: Join | None = None,
    ) -> None:
        self._service = service
        self._sockets = sockets
        self._reflection = reflection
        self._log: structlog.typing.FilteringBoundLogger = structlog.get_logger() if log is None else log
        self._observe = observe
        self._join = join
        self._following = Following(service)
        self._directory = SocketDirectory(sockets)
        self._servers: list[grpc.aio.Server] = []
        self._door: FrontDoor | None = None

    async def start(self) -> None:
        """Serve. Returns once every socket answers; on an error nothing is left behind.

        Raises:
            SecondInstance: another service, or another program, serves there.
            BadConfiguration: the directory, its group, or what stands in the place of a socket cannot be used.
        """
        self._directory.take()
        try:
            await self._start(Purpose.PLUGIN, self._directory.place(Purpose.PLUGIN))
            await self._start(Purpose.READ, self._directory.place(Purpose.READ))
            await self._open_door(self._directory.place(Purpose.ADMIN), self._directory.place_behind_the_door())
            for purpose in Purpose:
                self._directory.publish(purpose)
        except BaseException:
            await self.stop(0)
            raise
        self._log.info("api.serving", directory=str(self._sockets.directory))

    async def stop(self, grace: float = GRACE) -> None:
        """Stop accepting, end the streams, give calls under way ``grace`` seconds, and let another service in."""
        self._following.stop()
        self._directory.withdraw()
        if self._door is not None:
            self._door.close()
        await asyncio.gather(*(server.stop(grace) for server in self._servers))
        if self._door is not None:
            await self._door.hang_up()
        self._directory.release()

    async def _start(self, purpose: Purpose, path: Path) -> None:
        # The peer is checked where it can be told; the mode of the other two sockets is all their protection.
        admit = actor_of if purpose is Purpose.ADMIN else None
        join = None if purpose is Purpose.READ else self._join  # who may only look leaves no trace
        server = grpc.aio.server(
            interceptors=(Answering(purpose, log=self._log, admit=admit, observe=self._observe, join=join),),
            options=(("grpc.so_reuseport", 0),),
        )
        self._add_services(server, purpose)
        try:
            server.add_insecure_port(target(path))
        except RuntimeError as error:
            raise BadConfiguration(f"The {purpose.value} socket cannot be bound at {path}: {error}.") from error
        self._servers.append(server)
        await server.start()

    def _add_services(self, server: grpc.aio.Server, purpose: Purpose) -> None:
        match purpose:
            case Purpose.PLUGIN:
                plugin = PluginServicer(self._service, self._following)
                scrubber_pb2_grpc.add_PluginServicer_to_server(plugin, server)
            case Purpose.READ:
                scrubber_pb2_grpc.add_ReadServicer_to_server(ReadServicer(self._service, self._following), server)
            case Purpose.ADMIN:
                scrubber_pb2_grpc.add_AdminServicer_to_server(AdminServicer(self._service), server)
        health.add_to(server, health.Health(self._service, self._following, purpose))
        if self._reflection:
            names = (purpose.service, health.SERVICE_NAME, reflection.SERVICE_NAME)
            reflection.enable_server_reflection(names, server)

    async def _open_door(self, path: Path, behind: Path) -> None:
        await self._start(Purpose.ADMIN, behind)
        operators = None if self._sockets.group is None else gid_of(self._sockets.group)
        self._door = FrontDoor(behind, log=self._log, operators=operators)
        try:
            await self._door.open(path)
        except OSError as error:
            raise BadConfiguration(f"The admin socket cannot be bound at {path}: {error.strerror}.") from error


@asynccontextmanager
async def serve(
    service: Service,
    sockets: Sockets,
    *,
    reflection: bool = False,
    grace: float = GRACE,
    log: structlog.typing.FilteringBoundLogger | None = None,
) -> AsyncIterator[ApiServer]:
    """Serve for as long as the body runs; raises what :meth:`ApiServer.start` raises."""
    server = ApiServer(service, sockets, reflection=reflection, log=log)
    await server.start()
    try:
        yield server
    finally:
        await server.stop(grace)
