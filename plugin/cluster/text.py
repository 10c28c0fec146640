"""Text of others for messages of this plugin: the API server's, and that of objects which other clients have written."""

from __future__ import annotations

__all__ = ["MAX_TEXT_CHARS", "one_line"]

MAX_TEXT_CHARS = 300


def one_line(text: object) -> str:
    """Return ``text`` as at most :data:`MAX_TEXT_CHARS` printable characters, with others escaped; empty for None."""
    words = " ".join(("" if text is None else str(text)).split())[: MAX_TEXT_CHARS + 1]
    shown = "".join(each if each.isprintable() else each.encode("unicode_escape").decode("ascii") for each in words)
    return shown if len(shown) <= MAX_TEXT_CHARS else f"{shown[: MAX_TEXT_CHARS - 1]}…"
