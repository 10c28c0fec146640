"""Server interceptor: the one place that every response of a socket passes, whichever service gives it.

Invariant: a caller always gets a status with a message. An error of this project becomes its status. Malformed
requests, methods served elsewhere and unauthorized callers are refused with an explanation. An unexpected exception is
logged with its traceback, without details for the caller, and the server continues.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Iterator
from contextlib import AbstractContextManager, aclosing, contextmanager, nullcontext
from time import monotonic
from typing import Any, Protocol, TypeAlias

import grpc
import structlog

from scrubber.api.peer_auth import caller_name
from scrubber.api.peer_versions import PeerVersions
from scrubber.api.sockets import Purpose
from scrubber.api.status import status_from_error
from scrubber.domain.codes import ErrorCode
from scrubber.domain.errors import InvalidRequest, PermissionDenied, Refused, ScrubberError

__all__ = ["ApiInterceptor", "Authorize", "JoinTrace", "RpcObserver"]

Context = grpc.aio.ServicerContext[Any, Any]
Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
Authorize = Callable[[str], object]
"""Takes gRPC's name of the peer; raises :class:`PermissionDenied` for an unauthorized caller."""
JoinTrace = Callable[[Iterable[tuple[str, str | bytes]] | None], None]
"""Takes the metadata of a call, within its task, and joins its work to the caller's trace. Never raises."""


class RpcObserver(Protocol):
    """Observes calls. Called in the event loop's thread; neither method may raise or block."""

    def on_call_finished(self, method: str, code: str, seconds: float) -> None:
        """A call of ``method`` (``/scrubber.v1.Read/ListDevices``) ended with the status ``code`` (``OK``)."""

    def on_open_streams_changed(self, method: str, change: int) -> None:
        """A watch stream, which ends only when its caller ends it, was opened (1) or has ended (-1)."""


class _NullRpcObserver:
    """Ignores all calls."""

    def on_call_finished(self, method: str, code: str, seconds: float) -> None: ...

    def on_open_streams_changed(self, method: str, change: int) -> None: ...


class ApiInterceptor(grpc.aio.ServerInterceptor):
    """Wraps every method of the server for ``purpose``.

    Args:
        authorize: called before every call; None admits every caller that the socket's mode allows.
        observer: receives every call of a method that is served here.
        join_trace: called for every admitted call; None: calls join no trace.
        peer_versions: refuses clients of unsupported versions, and counts those with an open watch stream; None: every
            version is admitted.
    """

    def __init__(
        self,
        purpose: Purpose,
        *,
        log: structlog.typing.FilteringBoundLogger,
        authorize: Authorize | None = None,
        observer: RpcObserver | None = None,
        join_trace: JoinTrace | None = None,
        peer_versions: PeerVersions | None = None,
    ) -> None:
        self._purpose = purpose
        self._log = log
        self._authorize = authorize
        self._observer: RpcObserver = observer or _NullRpcObserver()
        self._join_trace = join_trace
        self._peer_versions = peer_versions
        self._wrapped: dict[str, Handler] = {}

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler:
        """Return the method's handler, wrapped; for a method that is not served here, a handler that refuses it."""
        method = handler_call_details.method
        if method not in self._wrapped:
            handler = await continuation(handler_call_details)
            if handler is None:  # not cached: callers may invent any number of names
                return grpc.stream_stream_rpc_method_handler(self._unserved_handler(method))
            self._wrapped[method] = self._wrap(method, handler)
        return self._wrapped[method]

    def _wrap(self, method: str, handler: Handler) -> Handler:
        decode = None if handler.request_deserializer is None else _catch_decode_errors(handler.request_deserializer)
        encode = handler.response_serializer
        match handler.request_streaming, handler.response_streaming:
            case False, False:
                return grpc.unary_unary_rpc_method_handler(self._unary(method, handler.unary_unary), decode, encode)
            case False, True:
                return grpc.unary_stream_rpc_method_handler(self._stream(method, handler.unary_stream), decode, encode)
            case True, False:
                return grpc.stream_unary_rpc_method_handler(self._unary(method, handler.stream_unary), decode, encode)
            case _:
                return grpc.stream_stream_rpc_method_handler(
                    self._stream(method, handler.stream_stream), decode, encode
                )

    def _unary(self, method: str, behaviour: Any) -> Callable[..., Any]:
        async def answer(request: Any, context: Context) -> Any:
            with self._time_call(method, context):
                try:
                    self._check(request, context)
                    return await behaviour(request, context)
                except grpc.aio.AbortError:
                    raise
                except Exception as error:  # noqa: BLE001 - becomes a status, and a log line with its traceback
                    await self._refuse(method, error, context)

        return answer

    def _stream(self, method: str, behaviour: Any) -> Callable[..., Any]:
        counted = self._count_stream if _is_watch_stream(method) else self._time_call

        async def answer(request: Any, context: Context) -> AsyncGenerator[Any, None]:
            with counted(method, context):
                try:
                    self._check(request, context)
                    async with aclosing(behaviour(request, context)) as replies:
                        async for reply in replies:
                            yield reply
                except grpc.aio.AbortError:
                    raise
                except Exception as error:  # noqa: BLE001 - becomes a status, and a log line with its traceback
                    await self._refuse(method, error, context)

        return answer

    @contextmanager
    def _time_call(self, method: str, context: Context) -> Iterator[None]:
        began, code = monotonic(), "OK"
        try:
            yield
        except grpc.aio.AbortError:
            code = _code(context)
            raise
        except (asyncio.CancelledError, GeneratorExit):
            code = grpc.StatusCode.CANCELLED.name
            raise
        finally:
            self._observer.on_call_finished(method, code, monotonic() - began)

    @contextmanager
    def _count_stream(self, method: str, context: Context) -> Iterator[None]:
        versions: AbstractContextManager[None] = nullcontext()
        if self._peer_versions is not None:
            versions = self._peer_versions.connected(context.invocation_metadata())
        self._observer.on_open_streams_changed(method, 1)
        try:
            with versions:
                yield
        finally:
            self._observer.on_open_streams_changed(method, -1)

    def _unserved_handler(self, method: str) -> Callable[..., Any]:
        async def answer(requests: Any, context: Context) -> None:
            try:
                self._check(None, context)
            except Refused as error:
                await self._refuse(method, error, context)
            status = status_from_error(_not_served_error(method, self._purpose), public=False)
            await context.abort(status.code, status.details, status.metadata)

        return answer

    def _check(self, request: Any, context: Context) -> None:
        if self._authorize is not None:
            self._authorize(context.peer())
        if self._peer_versions is not None:
            self._peer_versions.check(context.invocation_metadata())
        if self._join_trace is not None:
            self._join_trace(context.invocation_metadata())
        if isinstance(request, InvalidRequest):
            raise request

    async def _refuse(self, method: str, error: Exception, context: Context) -> None:
        if isinstance(error, ScrubberError):
            # The plugin's socket tells its caller the public sentence only; this line has the other one.
            kind, caller = type(error).__name__, caller_name(context.peer())
            if (
                error.code != ErrorCode.VERSION_UNSUPPORTED
            ):  # logged once: the plugin calls again several times a second
                self._log.info(
                    "api.refused", method=method, error=kind, code=error.code, message=str(error), caller=caller
                )
        else:
            self._log.error("api.failed", method=method, exc_info=error)
        status = status_from_error(error, public=self._purpose is Purpose.PLUGIN)
        await context.abort(status.code, status.details, status.metadata)


def _is_watch_stream(method: str) -> bool:
    """Return whether a stream continues until its caller ends it; all other calls end when they are answered."""
    _, _, name = method.rpartition("/")
    return name.startswith("Watch") or name == "ServerReflectionInfo"


_CODE_NAMES = {each.value[0]: each.name for each in grpc.StatusCode}


def _code(context: Context) -> str:
    """Return the status of an aborted call. The library returns its number, contrary to its type annotations."""
    given: Any = context.code()
    return given.name if isinstance(given, grpc.StatusCode) else _CODE_NAMES.get(given, grpc.StatusCode.UNKNOWN.name)


def _catch_decode_errors(decode: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    """Wrap ``decode`` to return an error for malformed bytes: if it raised, the library would answer instead."""

    def decoded(received: bytes) -> Any:
        try:
            return decode(received)
        except Exception as error:  # noqa: BLE001 - bytes from outside that cause any parser error are malformed
            return InvalidRequest(
                f"The request cannot be decoded as a message of this method ({type(error).__name__})."
            )

    return decoded


def _not_served_error(method: str, purpose: Purpose) -> PermissionDenied:
    service, _, name = method.strip("/").rpartition("/")
    for other in Purpose:
        if service == other.service and other is not purpose:
            return PermissionDenied(
                f"{other.value.capitalize()}.{name} is not served on the {purpose.value} socket; use "
                f"{other.socket} in the same directory.",
                code=ErrorCode.WRONG_SOCKET,
            )
    return PermissionDenied(
        f"Unknown method {method}; the {purpose.value} socket serves {purpose.service}.",
        code=ErrorCode.UNKNOWN_METHOD,
    )
