"""Counts the lines of the modules under test that a set of inputs reaches: ``python -m tests.fuzz.lines MODULE NAME FILE…``.

Prints the number of lines inside functions that were reached, and how many there are. A process of its own, because it
traces every line.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from tests.fuzz.table import targets_in

__all__ = ["lines_of", "reached_lines"]


def lines_of(module: str) -> set[tuple[str, int]]:
    """Return file and number of each line inside a function of ``module``."""
    path = import_module(module).__file__
    assert path is not None  # modules of the product have source files
    return set(_lines(compile(Path(path).read_bytes(), path, "exec"), inside=False))


def _lines(code: CodeType, *, inside: bool) -> Iterator[tuple[str, int]]:
    if inside:
        # The first one is the line of the definition.
        yield from ((code.co_filename, line) for _, _, line in code.co_lines() if line and line != code.co_firstlineno)
    for each in code.co_consts:
        if isinstance(each, CodeType):
            yield from _lines(each, inside=inside or bool(each.co_flags & 0x02))  # CO_NEWLOCALS: not a class body


def reached_lines(module: str, name: str, inputs: list[bytes]) -> tuple[int, int]:
    """Return how many lines of the modules under test ``inputs`` reach, and how many there are."""
    target = next(each for each in targets_in(module) if each.name == name)
    there = {line for covered in target.covers for line in lines_of(covered)}
    files = {file for file, _ in there}
    reached: set[tuple[str, int]] = set()

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        file = frame.f_code.co_filename
        if file not in files:
            return None
        reached.add((file, frame.f_lineno))
        return trace

    sys.settrace(trace)
    try:
        for each in inputs:
            target.check(each)
    finally:
        sys.settrace(None)
    return len(reached & there), len(there)


if __name__ == "__main__":
    print(*reached_lines(sys.argv[1], sys.argv[2], [Path(each).read_bytes() for each in sys.argv[3:]]))
