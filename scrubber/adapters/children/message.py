"""The one form in which parent and child speak: a length, then a JSON object, and never more than a megabyte.

Both sides import this, so it loads nothing but ``json``. A child is not trusted to speak sense: whatever does not parse
is :class:`MalformedMessage`, and the parent then kills it.
"""

from __future__ import annotations

import json

__all__ = ["HEADER_SIZE", "MAX_BODY_SIZE", "MalformedMessage", "Message", "body_length", "pack", "unpack"]

Message = dict[str, object]

HEADER_SIZE = 4
"""Bytes of the length in front of each message, big-endian."""

MAX_BODY_SIZE = 1 << 20
"""The longest body in bytes; a longer one is refused before it is sent and before it is read."""


class MalformedMessage(ValueError):
    """What came is no message: too long, not JSON, or not an object."""


def pack(message: Message) -> bytes:
    """``message`` as header and body.

    Raises:
        MalformedMessage: it is longer than :data:`MAX_BODY_SIZE`.
    """
    body = json.dumps(message, separators=(",", ":")).encode()
    if len(body) > MAX_BODY_SIZE:
        raise MalformedMessage(f"A message of {len(body)} bytes is longer than {MAX_BODY_SIZE}.")
    return len(body).to_bytes(HEADER_SIZE, "big") + body


def body_length(header: bytes) -> int:
    """How many bytes follow ``header``.

    Raises:
        MalformedMessage: more than :data:`MAX_BODY_SIZE`.
    """
    length = int.from_bytes(header, "big")
    if length > MAX_BODY_SIZE:
        raise MalformedMessage(f"A message announces {length} bytes; {MAX_BODY_SIZE} is the limit.")
    return length


def unpack(body: bytes) -> Message:
    """The object in ``body``.

    Raises:
        MalformedMessage: it is not a JSON object.
    """
    try:
        message = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise MalformedMessage(f"A message of {len(body)} bytes is not JSON: {error}") from error
    if not isinstance(message, dict):
        raise MalformedMessage(f"A message is a JSON {type(message).__name__}, not an object.")
    return message
