"""The message format between parent and child: a length, then a JSON object, at most one megabyte.

Both sides import this module, so it loads nothing but ``json``. A child is not trusted to send valid data: everything
that cannot be parsed is a :class:`MalformedMessage`, and the parent then kills the child.
"""

from __future__ import annotations

import json

__all__ = ["HEADER_SIZE", "MAX_BODY_SIZE", "MalformedMessage", "Message", "body_length", "pack", "unpack"]

Message = dict[str, object]

HEADER_SIZE = 4
"""Size in bytes of the big-endian length in front of each message."""

MAX_BODY_SIZE = 1 << 20
"""Maximum size of a body in bytes; a longer one is rejected before it is sent and before it is read."""


class MalformedMessage(ValueError):
    """The received data is not a message: too long, not JSON, or not an object."""


def pack(message: Message) -> bytes:
    """Return ``message`` as header and body.

    Raises:
        MalformedMessage: It is longer than :data:`MAX_BODY_SIZE`.
    """
    body = json.dumps(message, separators=(",", ":")).encode()
    if len(body) > MAX_BODY_SIZE:
        raise MalformedMessage(f"A message of {len(body)} bytes is longer than {MAX_BODY_SIZE}.")
    return len(body).to_bytes(HEADER_SIZE, "big") + body


def body_length(header: bytes) -> int:
    """Return the number of bytes that follow ``header``.

    Raises:
        MalformedMessage: More than :data:`MAX_BODY_SIZE`.
    """
    length = int.from_bytes(header, "big")
    if length > MAX_BODY_SIZE:
        raise MalformedMessage(f"A message announces {length} bytes; the limit is {MAX_BODY_SIZE}.")
    return length


def unpack(body: bytes) -> Message:
    """Return the object in ``body``.

    Raises:
        MalformedMessage: It is not a JSON object.
    """
    try:
        message = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise MalformedMessage(f"A message of {len(body)} bytes is not JSON: {error}") from error
    if not isinstance(message, dict):
        raise MalformedMessage(f"A message is a JSON {type(message).__name__}, not an object.")
    return message
