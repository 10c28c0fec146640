"""What the targets of all gRPC sockets share: one call with raw bytes, and one connection with HTTP/2 frames."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Final

import grpc

__all__ = ["CONNECTION_SEEDS", "CONNECTION_WORDS", "DEADLINE", "call", "frames", "send"]

DEADLINE: Final = 20.0
"""Seconds within which every call ends, on a machine that is busy with other things."""

_PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_SETTINGS: Final = b"\0\0\0\4\0\0\0\0\0"

CONNECTION_SEEDS: Final = (
    b"P" + _PREFACE[1:] + _SETTINGS,
    b"\4\0\0\0",
    b"\1\5\1\5\x82\x86\x84\x41\x01\0\0\1\4abcd",
    b"\6\0\0\x08\0\0\0\0\0\0\0\0\3\0\1\4\0\0\0\x08",
    b"POST /scrubber.v1.Read/ListDevices HTTP/1.1\r\nHost: x\r\n\r\n",
    b"\x09\4\1\1\x82\x08\0\0\4\x7f\xff\xff\xff",
)
CONNECTION_WORDS: Final = (_PREFACE, _SETTINGS, b"\0\0\0\0\0", b"\xff\xff\xff", b"\r\n\r\n")


async def call(
    channel: grpc.aio.Channel, method: str, request: bytes, *, answers: int = 3
) -> tuple[grpc.StatusCode, list[bytes]]:
    """Call ``method`` as a stream of answers, which a single one is too; return the status and at most ``answers``."""
    stub: grpc.aio.UnaryStreamMultiCallable[bytes, bytes] = channel.unary_stream(method)
    stream = stub(request, timeout=DEADLINE)
    found: list[bytes] = []
    try:
        async for answer in stream:
            found.append(answer)
            if len(found) == answers:
                stream.cancel()
                return grpc.StatusCode.OK, found
    except grpc.aio.AioRpcError as error:
        return error.code(), found
    return await stream.code(), found


async def send(path: Path, data: bytes) -> bytes:
    """Send ``data`` over a new connection, and return what comes back until the server ends it."""
    async with asyncio.timeout(DEADLINE):
        reader, writer = await asyncio.open_unix_connection(path)
        try:
            writer.write(data)
            writer.write_eof()
            return await reader.read()
        except (ConnectionResetError, BrokenPipeError):
            return b""
        finally:
            writer.close()


def frames(data: bytes) -> bytes:
    """Return HTTP/2 frames of which ``data`` chooses type, flags, stream and content; whole data where it begins with P."""
    if data.startswith(b"P"):
        return data
    found = [_PREFACE, _SETTINGS]
    at = 0
    while at + 4 <= len(data):
        kind, flags, stream, size = data[at : at + 4]
        content = data[at + 4 : at + 4 + size]
        found.append(len(content).to_bytes(3, "big") + bytes((kind % 12, flags)) + stream.to_bytes(4, "big") + content)
        at += 4 + size
    return b"".join(found)
