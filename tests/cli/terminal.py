"""A terminal for tests: a command runs on a pty of a given size, and its output is read as displayed.

The emulation covers what our commands use: movement, erasing, the alternate screen. Output beyond the last column is
recorded, because on a real terminal it would break every line that is drawn after it.
"""

from __future__ import annotations

import asyncio
import errno
import fcntl
import os
import pty
import re
import struct
import termios
import time
from collections.abc import AsyncIterator, Collection, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from scrubber.cli.render.table import display_width
from tests import forkserver

__all__ = ["WIDTHS", "Screen", "Terminal", "TerminalResult", "agrees_with", "at_terminal", "terminal"]

WIDTHS = (80, 200)
"""The widths at which every command is tested."""
_SOON = 30.0
_GOLDEN = Path(__file__).parent / "golden"
_SEQUENCE = re.compile(r"\x1b(?:\[([?0-9;]*)([@-~])|\][^\x07]*\x07|[()].|[=>78MDE])")


@dataclass
class Screen:
    """The content of a terminal ``columns`` wide; ``lines`` grows where a real one scrolls."""

    columns: int
    lines: list[str] = field(default_factory=lambda: [""])
    too_wide: dict[int, str] = field(default_factory=dict)
    cursor_shown: bool = True
    alternate: bool = False
    _row: int = 0
    _column: int = 0
    _main: tuple[list[str], int, int] = ([""], 0, 0)

    @property
    def text(self) -> str:
        """Return the lines, without trailing blanks and without empty lines at the end."""
        return "\n".join(line.rstrip() for line in self.lines).rstrip("\n") + "\n"

    def feed(self, written: str) -> str:
        """Display ``written``; return the part of it that is an incomplete escape sequence."""
        place = 0
        while place < len(written):
            if written[place] != "\x1b":
                self._put(written[place])
                place += 1
                continue
            sequence = _SEQUENCE.match(written, place)
            if sequence is None:
                if len(written) - place < 32:
                    return written[place:]
                raise AssertionError(f"a terminal does not know {written[place : place + 16]!r}")
            self._act(sequence[1] or "", sequence[2] or "")
            place = sequence.end()
        return ""

    def _put(self, letter: str) -> None:
        match letter:
            case "\n":
                self._row += 1
            case "\r":
                self._column = 0
            case "\b":
                self._column = max(0, self._column - 1)
            case "\x07":
                pass
            case _:
                self._print(letter)
        self._room_for(self._row)

    def _print(self, letter: str) -> None:
        self._room_for(self._row)
        line = self.lines[self._row].ljust(self._column)
        self.lines[self._row] = line[: self._column] + letter + line[self._column + 1 :]
        self._column += 1
        if display_width(self.lines[self._row][: self._column]) > self.columns:
            self.too_wide[self._row] = self.lines[self._row]

    def _room_for(self, row: int) -> None:
        self.lines.extend("" for _ in range(row + 1 - len(self.lines)))

    def _act(self, parameters: str, letter: str) -> None:
        number = int(first) if (first := parameters.partition(";")[0]).isdecimal() else 0
        match letter:
            case "A":
                self._row = max(0, self._row - (number or 1))
            case "B":
                self._row += number or 1
            case "C":
                self._column += number or 1
            case "D":
                self._column = max(0, self._column - (number or 1))
            case "G":
                self._column = max(0, number - 1)
            case "H":
                row, _, column = parameters.partition(";")
                self._row, self._column = int(row or 1) - 1, int(column or 1) - 1
            case "J":
                self._erase_below(whole=number >= 2)
            case "K":
                self._room_for(self._row)
                kept = "" if number == 2 else self.lines[self._row][: self._column]
                self.lines[self._row] = kept
            case "h" | "l":
                self._switch(parameters, on=letter == "h")
        self._room_for(self._row)

    def _erase_below(self, *, whole: bool) -> None:
        self._room_for(self._row)
        first = 0 if whole else self._row
        kept = "" if whole else self.lines[self._row][: self._column]
        self.lines[first:] = [kept] + [""] * (len(self.lines) - first - 1)

    def _switch(self, mode: str, *, on: bool) -> None:
        if mode == "?25":
            self.cursor_shown = on
        if mode == "?1049" and on != self.alternate:
            self.alternate = on
            if on:
                self._main = (self.lines, self._row, self._column)
                self.lines, self._row, self._column = [""], 0, 0
            else:
                self.lines, self._row, self._column = self._main


@dataclass(frozen=True)
class TerminalResult:
    """The exit status of a command at a terminal, and its output: lines as displayed, and the bytes behind them."""

    code: int
    text: str
    raw: bytes
    out: str
    screen: Screen


class Terminal:
    """A running command on a terminal."""

    def __init__(self, process: asyncio.subprocess.Process, ours: int, theirs: int, columns: int) -> None:
        self.process = process
        self.screen = Screen(columns)
        self.raw = b""
        self._ours = ours
        self._half = ""
        self._half_bytes = b""
        self._changed = asyncio.Event()
        self._over = False
        self._attributes = termios.tcgetattr(ours)
        asyncio.get_running_loop().add_reader(ours, self._read)
        self._closing = asyncio.ensure_future(self._close_behind(theirs))

    def type(self, keys: str) -> None:
        r"""Type keys; ``"\x03"`` is Ctrl-C, ``"\x04"`` Ctrl-D, ``"\x1a"`` Ctrl-Z."""
        os.write(self._ours, keys.encode())

    def resize(self, columns: int, rows: int = 50) -> None:
        """Resize the window; the kernel notifies the command. The alternate screen is cut off, as on a real terminal."""
        self.screen.columns = columns
        if self.screen.alternate:
            self.screen.lines = [line[:columns] for line in self.screen.lines[:rows]]
        _set_size(self._ours, columns, rows)

    async def shows(self, text: str | re.Pattern[str], seconds: float = _SOON) -> re.Match[str]:
        """Wait until ``text`` is on the screen."""
        pattern = re.compile(re.escape(text)) if isinstance(text, str) else text
        deadline = time.monotonic() + seconds
        while (found := pattern.search(self.screen.text)) is None:
            left = deadline - time.monotonic()
            assert left > 0, f"{pattern.pattern!r} was not shown but:\n{self.screen.text}"
            assert not self._over, f"it ended without {pattern.pattern!r}:\n{self.screen.text}"
            await self._news(left)
        return found

    async def ended(self, seconds: float = _SOON) -> TerminalResult:
        """Wait until the command has ended; asserts that no output exceeded the width."""
        async with asyncio.timeout(seconds):
            reading = self.process.stdout
            piped = b"" if reading is None else await reading.read()
            code = await self.process.wait()
            while not self._over:
                await self._news(seconds)
        assert not self.screen.too_wide, f"wider than {self.screen.columns}: {list(self.screen.too_wide.values())}"
        assert b"Traceback" not in self.raw, self.screen.text
        return TerminalResult(code, self.screen.text, self.raw, piped.decode(), self.screen)

    @property
    def is_as_before(self) -> bool:
        """Return whether the terminal is restored: cursor, screen, echo."""
        return self.screen.cursor_shown and not self.screen.alternate and self.attributes == self._attributes

    @property
    def attributes(self) -> list[Any]:
        return termios.tcgetattr(self._ours)

    async def _news(self, seconds: float) -> None:
        self._changed.clear()
        try:
            await asyncio.wait_for(self._changed.wait(), seconds)
        except TimeoutError:
            return

    async def _close_behind(self, theirs: int) -> None:
        # Until it has ended: reading stops when the other end is closed by all processes, even for a moment.
        try:
            await self.process.wait()
        finally:
            os.close(theirs)

    def _read(self) -> None:
        try:
            got = os.read(self._ours, 65536)
        except OSError as error:
            # The error of a pty's master once no process has the other end open.
            if error.errno != errno.EIO:
                raise
            got = b""
        self._changed.set()
        if not got:
            self._over = True
            asyncio.get_running_loop().remove_reader(self._ours)
            return
        self.raw += got
        bytes_ = self._half_bytes + got
        text = bytes_.decode(errors="ignore")
        self._half_bytes = b"" if text.encode() == bytes_ else bytes_[len(text.encode()) :]
        self._half = self.screen.feed(self._half + text)

    async def close(self) -> None:
        await self._closing
        asyncio.get_running_loop().remove_reader(self._ours)
        os.close(self._ours)


@asynccontextmanager
async def terminal(
    *words: str,
    columns: int = 80,
    rows: int = 50,
    environment: Mapping[str, str] | None = None,
    streams: Collection[str] = ("stdin", "stdout", "stderr"),
    program: Collection[str] | None = None,
) -> AsyncIterator[Terminal]:
    """Run a command on a terminal; it is killed at the end if it is still running.

    Args:
        words: its arguments.
        environment: in addition to that of this process, except ``SCRUBBER_*``, ``NO_COLOR`` and ``COLUMNS``.
        streams: which of its streams are the terminal; another stdin is empty, another stdout is :attr:`TerminalResult.out`.
        program: the program to run; ``scrubber`` when None.
    """
    ours, theirs = pty.openpty()
    _set_size(ours, columns, rows)
    name = os.ttyname(theirs)
    kept = {
        each: value
        for each, value in os.environ.items()
        if not each.startswith("SCRUBBER_") and each not in ("NO_COLOR", "COLUMNS", "LINES")
    }
    numbers = {"stdin": 0, "stdout": 1, "stderr": 2}
    options: dict[str, Any] = {
        "env": kept | {"TERM": "xterm", "LC_ALL": "C.UTF-8"} | dict(environment or {}),
        "stdin": asyncio.subprocess.DEVNULL,
        "stdout": None if "stdout" in streams else asyncio.subprocess.PIPE,
        "stderr": None if "stderr" in streams else asyncio.subprocess.DEVNULL,
    }
    if program is None:
        process = await forkserver.start(
            "scrubber.cli.main", *words, terminal=name, on_terminal=[numbers[each] for each in streams], **options
        )
    else:
        # The first terminal that a session leader opens becomes its controlling terminal: Ctrl-C and resizes reach it.
        opened = " ".join(f"{numbers[each]}<>{name}" for each in streams)
        process = await asyncio.create_subprocess_exec(
            *("/bin/sh", "-c", f'exec "$0" "$@" {opened}', *program, *words), **options, start_new_session=True
        )
    session = Terminal(process, ours, theirs, columns)
    try:
        yield session
    finally:
        if process.returncode is None:
            process.kill()
        await session.close()


async def at_terminal(
    *words: str, columns: int, environment: Mapping[str, str] | None = None, **more: Any
) -> TerminalResult:
    """Run a command on a terminal until it exits."""
    async with terminal(*words, columns=columns, environment=environment, **more) as session:
        return await session.ended()


def agrees_with(name: str, text: str) -> None:
    """Assert that ``text`` equals ``golden/NAME.txt``; ``GOLDEN=write`` in the environment replaces the file."""
    file = _GOLDEN / f"{name}.txt"
    if os.environ.get("GOLDEN") == "write":
        _GOLDEN.mkdir(exist_ok=True)
        file.write_text(text)
    assert text == file.read_text(), f"golden/{name}.txt says something else; GOLDEN=write replaces it"


def _set_size(descriptor: int, columns: int, rows: int) -> None:
    fcntl.ioctl(descriptor, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
