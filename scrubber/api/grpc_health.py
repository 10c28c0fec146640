"""The standard health service (grpc.health.v1), answered directly from the engine's state, not from a copy.

Invariant: SERVING means that every device has been checked once and that the ledger accepts hand-overs; any other state
is NOT_SERVING. A watcher receives NOT_SERVING before its stream ends because the service stops.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from scrubber.api.sockets import Purpose
from scrubber.api.view_streams import ViewStreams
from scrubber.domain.errors import Unavailable
from scrubber.engine.views import Service

__all__ = ["SERVICE_NAME", "HealthServicer", "add_health_servicer"]

SERVICE_NAME: str = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name

_SERVING = health_pb2.HealthCheckResponse.SERVING
_NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
_UNKNOWN = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN


class HealthServicer(health_pb2_grpc.HealthServicer):  # type: ignore[misc]  # the library ships no types
    """Health of the whole server (``""``) and of the one service on the socket for ``purpose``."""

    def __init__(self, service: Service, streams: ViewStreams, purpose: Purpose) -> None:
        self._service = service
        self._streams = streams
        self._names = ("", purpose.service)

    async def Check(self, request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
        if request.service not in self._names:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"This socket does not serve {request.service!r}.")
        return health_pb2.HealthCheckResponse(status=self._status())

    async def List(self, request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
        status = health_pb2.HealthCheckResponse(status=self._status())
        return health_pb2.HealthListResponse(statuses=dict.fromkeys(self._names, status))

    async def Watch(self, request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> AsyncGenerator[Any, None]:
        sent = None
        async with aclosing(self._streams.views()) as views:
            try:
                async for _ in views:
                    status = self._status() if request.service in self._names else _UNKNOWN
                    if status != sent:
                        sent = status
                        yield health_pb2.HealthCheckResponse(status=status)
            except Unavailable:
                if request.service in self._names:
                    yield health_pb2.HealthCheckResponse(status=_NOT_SERVING)
                raise

    def _status(self) -> Any:
        well = self._service.view().ready and self._service.service_view().ledger_status == "ok"
        return _SERVING if well else _NOT_SERVING


def add_health_servicer(server: grpc.aio.Server, servicer: HealthServicer) -> None:
    """Register ``servicer`` on ``server``."""
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
