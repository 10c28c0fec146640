"""Documents and texts that are nearly valid: an input that begins with :data:`EDITS` is a list of edits of a valid one.

A fuzzer rarely invents a document that passes the first check of its reader. Edits reach the checks behind it: each one
replaces, removes, wraps, repeats or varies one value of the document, or one word of the text.
"""

from __future__ import annotations

import copy
import json
import math
import re
from collections.abc import Iterator
from typing import Any, Final

__all__ = ["EDITS", "EDIT_SEEDS", "edited", "json_input", "mostly_edited", "text_input"]

EDITS: Final = b"\0"
EDIT_SEEDS: Final = (
    EDITS,
    EDITS + b"\x01\0\0",
    EDITS + b"\x02\x01\x03\x04\x02\x07\x07\0\x0a",
    EDITS + bytes(range(96)),
)
"""Inputs with no edit, with one, and with several."""

_VALUES: Final[tuple[Any, ...]] = (
    *(
        None,
        True,
        False,
        0,
        1,
        -1,
        2**31,
        2**53 + 1,
        2**63,
        2**64,
        10**400,
        0.5,
        -0.0,
        1e308,
        5e-324,
        math.nan,
        math.inf,
    ),
    *("", "x", "0", "-1", "1e999", "a\nb", "a\0b", "\ud800", "\u2028", "\x1b[2J", "../../etc", "é" * 300, "GPU-1"),
    *([], {}, [None], [[]], {"": None}, [0] * 100, {"a": {"b": {"c": []}}}),
)
_OPERATIONS: Final = 8
_MAX_EDITS: Final = 12
"""Repeating a value that contains repeated values doubles the document."""


def json_input(data: bytes, *documents: Any) -> bytes:
    """Return ``data``, or the JSON that it describes as edits of one of ``documents``."""
    if not data.startswith(EDITS):
        return data
    return json.dumps(edited(data[1:], *documents)).encode()


def mostly_edited(data: bytes, *documents: Any) -> bytes:
    """Return what :func:`json_input` does, but ``data`` itself only if it begins as a YAML comment does.

    For files of which nearly every change is refused: the syntax of YAML has a target of its own.
    """
    return data if data.startswith(b"#") else json_input(EDITS + data.removeprefix(EDITS), *documents)


def edited(edits: bytes, *documents: Any) -> Any:
    """Return one of ``documents`` with ``edits`` applied: three bytes name the place, the operation and the value."""
    document = {"": copy.deepcopy(documents[edits[0] % len(documents) if edits and len(documents) > 1 else 0])}
    for at in range(len(documents) > 1, min(len(edits) - 2, 3 * _MAX_EDITS), 3):
        places = list(_places(document))
        where, key = places[edits[at] % len(places)]
        value = copy.deepcopy(_VALUES[edits[at + 2] % len(_VALUES)])
        match edits[at + 1] % _OPERATIONS:
            case 0 | 1:
                where[key] = value
            case 2 if where is not document:
                del where[key]
            case 3:
                where[key] = [where[key]]
            case 4 if isinstance(where[key], list):
                where[key] = [*where[key], *where[key][:1], value]
            case 4 if isinstance(where[key], dict):
                where[key][_name(value)] = value
            case 6:
                # Something that is valid elsewhere in the document is often valid here too.
                equals = [each[name] for each, name in places if type(each[name]) is type(where[key])]
                where[key] = copy.deepcopy(equals[edits[at + 2] % len(equals)])
            case 7 if isinstance(where[key], str):
                where[key] += "-a1"[edits[at + 2] % 3]
            case 7 if type(where[key]) is int:
                where[key] += edits[at + 2]
            case _ if isinstance(where[key], str):
                where[key] += _name(value)
            case _ if isinstance(where[key], int | float):
                where[key] = -where[key]
    return document[""]


_WORD: Final = re.compile(rb"([^0-9A-Za-z_-]+)")
_TEXT_VALUES: Final = (
    *(b"", b"0", b"1", b"2", b"7", b"00", b"-1", b"1.5", b"0x1f", b"4294967295", b"18446744073709551616", b"9" * 5000),
    *(b"x", b"unknown", b"a b", b"..", b"/", b"/a/b", b"=", b":", b",", b"(", b")", b") R ", b"#", b'"', b"$(x)", b"*"),
    *(
        b" ",
        b"\t",
        b"\n",
        b"\r\n",
        b"\n\n",
        b"\f",
        b"\v",
        b"\0",
        b"\\012",
        b"\xff",
        "\u2028\u0085".encode(),
        "\u0663".encode(),
    ),
)


def text_input(data: bytes, *texts: bytes) -> bytes:
    """Return ``data``, or the text that it describes as edits of one of ``texts``, as :func:`json_input` does for JSON."""
    if not data.startswith(EDITS):
        return data
    edits = data[1:]
    words = _WORD.split(texts[edits[0] % len(texts) if edits else 0])
    for at in range(1, min(len(edits) - 2, 3 * _MAX_EDITS), 3):
        place, choice = edits[at] % len(words), edits[at + 2]
        match edits[at + 1] % 6:
            case 0:
                words[place] = _TEXT_VALUES[choice % len(_TEXT_VALUES)]
            case 1:
                words[place] += _TEXT_VALUES[choice % len(_TEXT_VALUES)]
            case 2:
                words[place] = b""
            case 3:
                words[place] = words[choice % len(words)]
            case 4:
                words[place : place + 1] = words[place : place + 2] * (1 + choice % 3)
            case _:
                words[place] = b"%d" % choice
    return b"".join(words)


def _name(value: Any) -> str:
    return value if isinstance(value, str) else "unknown"


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Return container and key of every value inside ``value``, at most a few hundred."""
    left = [value]
    found = 0
    while left and found < 250:
        container = left.pop(0)
        for key, inner in container.items() if isinstance(container, dict) else enumerate(container):
            found += 1
            yield container, key
            if isinstance(inner, dict | list):
                left.append(inner)
