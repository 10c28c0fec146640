"""Direct calls of NVML: a separate process in which the unmodified binding has loaded a machine's library.

The loader searches for a library when a process starts, and a library belongs to one machine; each test that calls NVML
directly therefore starts one console. Values without a JSON form stay in that process: handles are represented by
tokens, structures by objects.
"""

from __future__ import annotations

import json
import select
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from ctypes import Array, Structure, Union, byref
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

__all__ = ["Console", "Handle", "Refused", "Struct", "console"]


class Refused(Exception):
    """NVML returned an error."""

    def __init__(self, code: int) -> None:
        super().__init__(f"NVML error {code}")
        self.code = code


@dataclass(frozen=True, slots=True)
class Handle:
    """A value that is meaningful only inside the console: a device, an event set."""

    number: int


@dataclass(frozen=True, slots=True)
class Struct:
    """A structure to be passed by reference; the result is the structure as NVML filled it."""

    name: str
    fields: tuple[tuple[str, int], ...]


class Console:
    """The parent's end of a console."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    @property
    def pid(self) -> int:
        return self._process.pid

    def call(self, function: str, *arguments: object, **named: object) -> Any:
        """Return the result of ``function`` of the binding.

        Raises:
            Refused: an NVML error.
        """
        self.send(function, *arguments, **named)
        return self.answer()

    def send(self, function: str, *arguments: object, **named: object) -> None:
        """Send a call without reading its result: for calls that never return."""
        assert self._process.stdin is not None
        packed = {name: _pack(value) for name, value in named.items()}
        message = {"call": function, "arguments": [_pack(each) for each in arguments], "named": packed}
        self._process.stdin.write(json.dumps(message) + "\n")
        self._process.stdin.flush()

    def answers_within(self, seconds: float) -> bool:
        """Return whether the last call is answered within ``seconds``; its result can still be read."""
        assert self._process.stdout is not None
        return bool(select.select([self._process.stdout], [], [], seconds)[0])

    def answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, f"the console ended with {self._process.wait()}"
        answer = json.loads(line)
        if "refused" in answer:
            raise Refused(answer["refused"])
        return _unpack(answer["ok"])


def _pack(value: object) -> object:
    match value:
        case Handle(number):
            return {"handle": number}
        case Struct(name, fields):
            return {"struct": name, "fields": dict(fields)}
        case _:
            return value


def _unpack(value: Any) -> Any:
    match value:
        case {"handle": int(number)}:
            return Handle(number)
        case {"fields": dict(fields)}:
            return SimpleNamespace(**{name: _unpack(each) for name, each in fields.items()})
        case list():
            return [_unpack(each) for each in value]
        case _:
            return value


@contextmanager
def console(environment: dict[str, str]) -> Iterator[Console]:
    """Run a console whose loader sees only ``environment``; killed at the end, hanging or not."""
    process = subprocess.Popen(
        [sys.executable, "-P", "-s", __file__],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    )
    try:
        yield Console(process)
    finally:
        process.kill()
        process.wait()
        for stream in (process.stdin, process.stdout):
            if stream is not None:
                stream.close()


def serve() -> None:
    """Run the child's end of a console."""
    import pynvml

    kept: list[object] = []
    structures: list[Structure] = []

    def take(value: object) -> object:
        match value:
            case {"handle": int(number)}:
                return kept[number]
            case {"struct": str(name), "fields": dict(fields)}:
                made = getattr(pynvml, name)()  # some structures set their version, and take no arguments
                for field, given in fields.items():
                    setattr(made, field, given)
                structures.append(made)
                return byref(made)
            case _:
                return value

    def give(value: Any) -> object:
        if value is None or isinstance(value, bool | int | float | str):
            return value
        if isinstance(value, bytes):
            return value.decode(errors="replace")
        if isinstance(value, (list, tuple, Array)):
            return [give(each) for each in value]
        if isinstance(value, Structure | Union):
            return {"fields": {each[0]: give(getattr(value, each[0])) for each in value._fields_}}
        if isinstance(value, pynvml.nvmlFriendlyObject):
            return {"fields": {name: give(each) for name, each in vars(value).items()}}
        if hasattr(value, "value"):
            return give(value.value)
        kept.append(value)
        return {"handle": len(kept) - 1}

    for line in sys.stdin:
        message = json.loads(line)
        structures.clear()
        arguments = [take(each) for each in message["arguments"]]
        named = {name: take(each) for name, each in message["named"].items()}
        try:
            result = getattr(pynvml, message["call"])(*arguments, **named)
            answer = {"ok": give(structures[0] if structures else result)}
        except pynvml.NVMLError as error:
            answer = {"refused": error.value}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    serve()
