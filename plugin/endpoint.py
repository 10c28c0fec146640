"""One incarnation of the plugin: a server on a socket whose name was never used before.

A new name every time, because the end of an old stream can make the kubelet drop the new client of the same name, and
because gRPC silently takes over a live socket and removes by path when it stops, whoever owns the path by then.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeAlias

import grpc

from plugin.api import deviceplugin_pb2_grpc, pluginregistration_pb2_grpc
from plugin.observing import CallObserver, Nobody
from plugin.server import Streams
from plugin.sockets import SocketIdentity
from scrubber.domain.errors import Away, BadConfiguration

__all__ = ["Endpoint"]

PRIVATE = 0o117
"""umask: the kubelet is root, and nobody else has business with this socket."""

STOP_GRACE = 0.25
"""Seconds for calls under way at a stop; streams end by themselves, the kubelet repeats the rest."""


class Endpoint:
    """Serves the device-plugin protocol, and on the same socket the kubelet's registration when it is to come here.

    Use as a context manager: it serves once entered, and its socket is gone once left.
    """

    def __init__(
        self,
        path: Path,
        *,
        plugin: deviceplugin_pb2_grpc.DevicePluginServicer,
        streams: Streams,
        registration: pluginregistration_pb2_grpc.RegistrationServicer | None = None,
        observer: CallObserver | None = None,
    ) -> None:
        self._timing = _Timing(observer or Nobody(), time.monotonic)
        self.path = path
        self.streams = streams
        self._plugin = plugin
        self._registration = registration
        self._server: grpc.aio.Server | None = None
        self._identity: SocketIdentity | None = None

    async def __aenter__(self) -> Self:
        """Serve.

        Raises:
            Away: the directory is not there (any more).
            BadConfiguration: the socket cannot be made there.
        """
        server = grpc.aio.server(interceptors=[self._timing])
        deviceplugin_pb2_grpc.add_DevicePluginServicer_to_server(self._plugin, server)
        if self._registration is not None:
            pluginregistration_pb2_grpc.add_RegistrationServicer_to_server(self._registration, server)
        before = os.umask(PRIVATE)
        try:
            server.add_insecure_port(f"unix:{self.path}")
        except RuntimeError as error:
            if not self.path.parent.is_dir():
                raise Away(f"{self.path.parent} does not exist.") from error
            raise BadConfiguration(
                f"No socket can be made at {self.path}: is the directory writable for uid {os.geteuid()}?"
            ) from error
        finally:
            os.umask(before)
        self._identity = SocketIdentity.of(self.path)
        await server.start()
        self._server = server
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.withdraw()
        if self._server is not None:
            await self._server.stop(STOP_GRACE)

    async def withdraw(self) -> None:
        """End the streams and remove the socket; calls under way go on, and the kubelet makes no new connection.

        The socket goes before another instance registers: the kubelet's plugin watcher takes a socket that has gone for the
        end of whatever is registered for the resource by then.
        """
        await self.streams.close()
        with suppress(TimeoutError):
            async with asyncio.timeout(STOP_GRACE):
                await self.streams.none_open()
        if self.intact:
            self.path.unlink(missing_ok=True)

    @property
    def intact(self) -> bool:
        """Whether the socket file is still the one that was made here; the kubelet wipes its directory at its start."""
        return self._identity is not None and SocketIdentity.of(self.path) == self._identity


_Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"


class _Timing(grpc.aio.ServerInterceptor):
    """Tells ``observer`` how long each of the kubelet's calls took: the one place through which all of them pass.

    A ``ListAndWatch`` is no call in this sense: it lasts as long as the kubelet does.

    Args:
        clock: monotonic seconds.
    """

    def __init__(self, observer: CallObserver, clock: Callable[[], float]) -> None:
        self._observer = observer
        self._clock = clock

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[_Handler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> _Handler | None:
        handler = await continuation(handler_call_details)
        if handler is None or handler.unary_unary is None:
            return handler  # None: no such method, which gRPC answers
        method = str(handler_call_details.method).rpartition("/")[2]
        return grpc.unary_unary_rpc_method_handler(
            self._timed(method, handler.unary_unary), handler.request_deserializer, handler.response_serializer
        )

    def _timed(self, method: str, behaviour: Any) -> Callable[[Any, Any], Awaitable[Any]]:
        async def answer(request: Any, context: Any) -> Any:
            began, code = self._clock(), grpc.StatusCode.OK
            try:
                return await behaviour(request, context)
            except asyncio.CancelledError:
                code = grpc.StatusCode.CANCELLED
                raise
            except grpc.aio.AbortError:
                code = context.code()
                raise
            except BaseException:
                code = grpc.StatusCode.UNKNOWN
                raise
            finally:
                self._observer.answered(method, code.name, self._clock() - began)

        return answer
