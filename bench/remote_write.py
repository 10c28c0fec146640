"""Prometheus' remote-write protocol, version 1: series of one node, written again for every other node.

Node names have equal length, so the message of one node becomes that of another by a replacement of bytes, and a fleet costs
the sender hardly more than one node.
"""

from __future__ import annotations

import http.client
import struct
from collections.abc import Iterable, Mapping
from typing import Final

__all__ = ["STALE", "RemoteWriter", "encode_series"]

STALE: Final[float] = struct.unpack("<d", struct.pack("<Q", 0x7FF0_0000_0000_0002))[0]
"""The value that ends a series, as a scrape writes it when a series or its target is gone."""

_LITERAL: Final = 1 << 16
"""Bytes in one element of a compressed message. Nothing is compressed: the receiver is on this machine."""


def encode_series(labels: Mapping[str, str], points: Iterable[tuple[int, float]]) -> bytes:
    """Return one series of a message; a point is (milliseconds since the epoch, value)."""
    parts = [_field(1, _field(1, name.encode()) + _field(2, value.encode())) for name, value in sorted(labels.items())]
    parts += (_field(2, b"\x09" + struct.pack("<d", value) + b"\x10" + _varint(at)) for at, value in points)
    return _field(1, b"".join(parts))


class RemoteWriter:
    """Sends messages to a Prometheus that runs with ``--web.enable-remote-write-receiver``."""

    def __init__(self, port: int, *, deadline: float) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=deadline)

    def send(self, message: bytes) -> None:
        """Send the series of one message.

        Raises:
            ValueError: Prometheus refuses them; contains its message.
        """
        headers = {
            "Content-Encoding": "snappy",
            "Content-Type": "application/x-protobuf",
            "X-Prometheus-Remote-Write-Version": "0.1.0",
        }
        self._connection.request("POST", "/api/v1/write", _snappy(message), headers)
        answer = self._connection.getresponse()
        body = answer.read()
        if answer.status >= http.HTTPStatus.BAD_REQUEST:
            raise ValueError(f"Prometheus refused the series: {body.decode(errors='replace')[:500]}")

    def close(self) -> None:
        self._connection.close()


def _snappy(message: bytes) -> bytes:
    parts: list[bytes] = [_varint(len(message))]
    for start in range(0, len(message), _LITERAL):
        part = message[start : start + _LITERAL]
        parts += [b"\xf4", struct.pack("<H", len(part) - 1), part]
    return b"".join(parts)


def _field(number: int, content: bytes) -> bytes:
    return bytes([number << 3 | 2]) + _varint(len(content)) + content


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)
