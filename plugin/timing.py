"""How long the kubelet's calls take, in the one place through which all of them pass, whoever answers.

A ``ListAndWatch`` is no call in this sense: it lasts as long as the kubelet does.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, TypeAlias

import grpc

from plugin.observing import CallObserver

__all__ = ["Timing"]

Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"


class Timing(grpc.aio.ServerInterceptor):
    """Tells ``observer`` of every unary call.

    Args:
        clock: monotonic seconds.
    """

    def __init__(self, observer: CallObserver, clock: Callable[[], float]) -> None:
        self._observer = observer
        self._clock = clock

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler | None:
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
