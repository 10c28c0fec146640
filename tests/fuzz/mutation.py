"""Generates inputs without coverage, for ``make test``, the same in every run; and minimises the input of a finding."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from random import Random
from typing import Final

from tests.fuzz.target import Target

__all__ = ["generated", "minimise"]

_HOSTILE: Final = (
    *(b"\0", b"\n", b"\r", b"\t", b" ", b"\\", b'"', b"/", b"..", b":", b"-1", b"0", b"\x80", b"\xff\xff\xff\xff"),
    *(b"9" * 5000, b"1e999", b"NaN", b"-Infinity", b"null", b"[]", b"{}", b"true", b"[" * 3000, b'{"a":' * 1500),
    *(b"18446744073709551616", "\u2028\u0085".encode(), b'"\\ud800"', b"\xed\xa0\x80", b"\xc3"),
)
"""Fragments that have broken parsers: line ends, huge numbers, words that JSON readers accept, deep nesting, no UTF-8."""


def generated(target: Target, seed: int) -> Iterator[bytes]:
    """Return an endless sequence of inputs that depends on ``seed`` alone."""
    random = Random(f"{target.name} {seed}")
    words = (*_HOSTILE, *target.words)
    while True:
        data = bytearray(random.choice(target.seeds))
        for _ in range(random.choice((1, 1, 2, 3, 6))):
            _mutate(random, data, target, words)
        yield bytes(data[: target.longest])


def _mutate(random: Random, data: bytearray, target: Target, words: tuple[bytes, ...]) -> None:
    start = random.randrange(len(data) + 1)
    end = min(len(data), start + random.choice((1, 1, 2, 4, 16)))
    match random.randrange(7):
        case 0:
            data[start:end] = b""
        case 1:
            data[start:end] = random.choice(words)
        case 2:
            data[start:start] = random.choice(words)
        case 3:
            data[start:end] = random.randbytes(end - start)
        case 4:
            data[start:start] = data[start:end] * random.choice((1, 3, 100))
        case 5:
            other = random.choice(target.seeds)
            data[start:] = other[random.randrange(len(other) + 1) :]
        case _:
            del data[start:]


def minimise(data: bytes, still_fails: Callable[[bytes], bool], *, attempts: int = 2000) -> bytes:
    """Return the shortest input found that still fails, by leaving out ever smaller parts."""

    def without_a_part(data: bytes) -> Iterator[bytes]:
        size = len(data)
        while size > 1:
            size = (size + 1) // 2
            for start in range(0, len(data), size):
                yield data[:start] + data[start + size :]

    found = True
    while found and data:
        found = False
        for candidate in islice(without_a_part(data), attempts):
            if still_fails(candidate):
                data, found = candidate, True
                break
    return data
