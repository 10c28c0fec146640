"""The reference: a bare gRPC echo on a Unix socket, server and client in two processes, like plugin and kubelet.

Invariant: it does only what grpc.aio does for any call: bytes in, the same bytes out, without parsing. Run as ``python
-m bench.echo SOCKET``, it serves until its standard input ends, so that it never outlives its parent process.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import grpc

from bench.figures import Quantiles, Timing

__all__ = ["REFERENCE", "Echo", "measure_interleaved"]

REFERENCE = "bare gRPC echo"
_METHOD = "/bench.Echo/Echo"
_START_SECONDS = 20.0


class Echo:
    """A client of the echo server.

    Attributes:
        pid: of the server.
    """

    def __init__(self, channel: grpc.aio.Channel, pid: int) -> None:
        self.pid = pid
        self._call: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(_METHOD)

    async def __call__(self, message: bytes) -> float:
        """Return the seconds from the call to the response."""
        began = time.perf_counter()
        answer = await self._call(message)
        seconds = time.perf_counter() - began
        assert answer == message
        return seconds

    @classmethod
    @asynccontextmanager
    async def start(cls, socket: Path) -> AsyncIterator[Echo]:
        """Run an echo server at ``socket`` in a separate process, and yield once it responds."""
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "bench.echo", str(socket), stdin=asyncio.subprocess.PIPE
        )
        assert process.stdin is not None
        try:
            async with grpc.aio.insecure_channel(f"unix:{socket}") as channel:
                async with asyncio.timeout(_START_SECONDS):
                    await channel.channel_ready()
                yield cls(channel, process.pid)
        finally:
            process.stdin.close()
            await process.wait()


async def measure_interleaved(
    name: str,
    title: str,
    measure: Callable[[int], Awaitable[float]],
    echo: Echo,
    message: bytes,
    *,
    samples: int,
    warm_up: int = 20,
) -> Timing:
    """Measure ``measure`` (called with the sample's number; returns seconds) and the echo alternately.

    The first ``warm_up`` rounds do not count, because they open connections and load code.
    """
    measured: list[float] = []
    reference: list[float] = []
    for number in range(-warm_up, samples):
        beside = await echo(message)
        seconds = await measure(number)
        if number >= 0:
            reference.append(beside)
            measured.append(seconds)
    return Timing(name, title, Quantiles.of(measured), Quantiles.of(reference), REFERENCE)


async def _serve(socket: str) -> None:
    async def answer(request: bytes, context: grpc.aio.ServicerContext[bytes, bytes]) -> bytes:
        return request

    handler: grpc.RpcMethodHandler[bytes, bytes] = grpc.unary_unary_rpc_method_handler(answer)
    server = grpc.aio.server()
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler("bench.Echo", {"Echo": handler})])
    server.add_insecure_port(f"unix:{socket}")
    await server.start()
    await asyncio.to_thread(sys.stdin.buffer.read)
    await server.stop(None)


if __name__ == "__main__":
    asyncio.run(_serve(sys.argv[1]))
