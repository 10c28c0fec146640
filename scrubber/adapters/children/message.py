"""The one form in which parent and child speak: a length, then a JSON object, and never more than a megabyte.

Both sides import this, so it loads nothing but ``json``. A child is not trusted to speak sense: whatever does not parse
is :class:`Garbled`, and the parent then kills it.
"""

from __future__ import annotations

import json

__all__ = ["HEADER", "LIMIT", "Garbled", "Message", "body_length", "pack", "unpack"]

Message = dict[str, object]

HEADER = 4
"""Bytes of the length in front of each message, big-endian."""

LIMIT = 1 << 20
"""The longest body in bytes; a longer one is refused before it is sent and before it is read."""


class Garbled(ValueError):
    """What came is no message: too long, not JSON, or not an object."""


def pack(message: Message) -> bytes:
    """``message`` as header and body.

    Raises:
        Garbled: it is longer than :data:`LIMIT`.
    """
    body = json.dumps(message, separators=(",", ":")).encode()
    if len(body) > LIMIT:
        raise Garbled(f"A message of {len(body)} bytes is longer than {LIMIT}.")
    return len(body).to_bytes(HEADER, "big") + body


def body_length(header: bytes) -> int:
    """How many bytes follow ``header``.

    Raises:
        Garbled: more than :data:`LIMIT`.
    """
    length = int.from_bytes(header, "big")
    if length > LIMIT:
        raise Garbled(f"A message announces {length} bytes; {LIMIT} is the limit.")
    return length


def unpack(body: bytes) -> Message:
    """The object in ``body``.

    Raises:
        Garbled: it is not a JSON object.
    """
    try:
        message = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise Garbled(f"A message of {len(body)} bytes is not JSON: {error}") from error
    if not isinstance(message, dict):
        raise Garbled(f"A message is a JSON {type(message).__name__}, not an object.")
    return message
