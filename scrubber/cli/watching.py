"""``scrubber devices --watch``: the devices as they change, until one has seen enough.

Promise: what stands there says as of when it is known, and a service that has gone is told of, and asked again until it is
back; nobody takes an old picture for a live one. However it ends, the terminal is left as it was found, with the last
picture on it.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import termios
import time
from collections.abc import AsyncIterator, Awaitable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import typer

from scrubber.cli.asking import run
from scrubber.cli.cells import wrapped
from scrubber.cli.listing import answer, chosen
from scrubber.cli.output import Output, delivering, emit, emit_one, plain, room, table, tell, wants_colour
from scrubber.domain.errors import ScrubberError
from scrubber.domain.quantities import utc

if TYPE_CHECKING:
    from scrubber.api import scrubber_pb2 as pb
    from scrubber.api.client import ReadClient

__all__ = ["watch_devices"]

_AGAIN = 1.0
"""Seconds until a service that has gone is asked again, and after which ages are drawn anew."""
_SILENCE = 2.0
"""Seconds without a change after which the service is asked whether it is still there."""
_PATIENCE = 2.0
"""Seconds that it may take to answer that before what is shown is not called live any more."""


def watch_devices(socket: Path, wanted: Sequence[str], output: Output) -> None:
    """Show the devices that ``wanted`` names (all if none) until interrupted.

    Raises:
        ScrubberError: the service did not answer the first time, or there is no such device.
        KeyboardInterrupt: a person has seen enough.
    """
    if output is Output.NAME:
        raise typer.BadParameter("names do not change: watch with -o table, json or yaml.", param_hint="--watch")
    on_terminal = output is Output.TABLE and room(sys.stdout) is not None and os.environ.get("TERM") != "dumb"
    view = _Terminal() if on_terminal else _Lines(output)
    try:
        run(_watch(socket, wanted, view))
    except KeyboardInterrupt:
        if view.ended_by is not None:
            # Whoever ended us is told by the system that it was he.
            signal.signal(view.ended_by, signal.SIG_DFL)
            os.kill(os.getpid(), view.ended_by)
        raise


class _View(Protocol):
    """Where pictures go."""

    ended_by: signal.Signals | None

    def show(self, found: Sequence[pb.Device], info: pb.ServiceInfo) -> None: ...

    def lose(self, sentence: str) -> None:
        """The service does not answer any more, or says nothing of the devices."""

    async def live(self) -> None:
        """Do what has to be done meanwhile; never returns."""

    def close(self) -> None: ...


async def _watch(socket: Path, wanted: Sequence[str], view: _View) -> None:
    try:
        await _until_one_ends(_follow(socket, wanted, view), view.live())
    finally:
        view.close()


async def _until_one_ends(*works: Awaitable[None]) -> None:
    tasks = [asyncio.ensure_future(each) for each in works]
    try:
        ended, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for each in ended:
            each.result()
    finally:
        for each in tasks:
            each.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _follow(socket: Path, wanted: Sequence[str], view: _View) -> None:
    from scrubber.api.client import ReadClient

    heard = False
    while True:
        try:
            async with ReadClient(socket) as client:
                async for found, info in _states(client):
                    view.show(chosen(found, wanted), info)
                    heard = True
        except ScrubberError as error:
            if not heard:
                raise
            view.lose(str(error))
        await asyncio.sleep(_AGAIN)


async def _states(client: ReadClient) -> AsyncIterator[tuple[Sequence[pb.Device], pb.ServiceInfo]]:
    """The devices and the service after every change, and now and then without one."""
    stream = client.watch_devices()
    found: Sequence[pb.Device] | None = None
    coming = asyncio.ensure_future(anext(stream))
    try:
        while True:
            if (await asyncio.wait({coming}, timeout=_SILENCE))[0]:
                found = coming.result().devices
                coming = asyncio.ensure_future(anext(stream))
            info = await client.info()
            if found is not None:
                yield found, info
    finally:
        coming.cancel()
        with suppress(asyncio.CancelledError, ScrubberError, StopAsyncIteration):
            await coming
        await stream.aclose()


class _Lines:
    """No terminal: a table, or a document, after every change, each below the last."""

    def __init__(self, output: Output) -> None:
        self.ended_by: signal.Signals | None = None
        self._output = output
        self._shown: object = None

    def show(self, found: Sequence[pb.Device], info: pb.ServiceInfo) -> None:
        picture = [each.SerializeToString(deterministic=True) for each in found]
        if self._output is Output.TABLE:
            picture.append(info.breaker.SerializeToString(deterministic=True))
        if picture == self._shown:
            return
        self._shown = picture
        now = time.time()
        told = answer(found, info, now)
        if self._output is Output.TABLE:
            with delivering():
                print(utc(now))
                emit(told, self._output)
                print()
        else:
            emit_one(told.data, told.kind, self._output)

    def lose(self, sentence: str) -> None:
        if self._shown != sentence:
            self._shown = sentence
            tell(f"{sentence} It is asked again until it answers.", "Note: ")

    async def live(self) -> None:
        await asyncio.Event().wait()

    def close(self) -> None:
        pass


class _Terminal:
    """A screen of its own, drawn anew after every change, every second, and when its size changes."""

    def __init__(self) -> None:
        self.ended_by: signal.Signals | None = None
        self._found: Sequence[pb.Device] = ()
        self._info: pb.ServiceInfo | None = None
        self._as_of = 0.0
        self._lost = ""
        self._entered = False
        self._drawn_at: os.terminal_size | None = None
        self._keyboard: list[Any] | None = None

    def show(self, found: Sequence[pb.Device], info: pb.ServiceInfo) -> None:
        self._found, self._info, self._as_of, self._lost = found, info, time.time(), ""
        self._draw()

    def lose(self, sentence: str) -> None:
        self._lost = sentence
        self._draw()

    async def live(self) -> None:
        loop, ours = asyncio.get_running_loop(), asyncio.current_task()
        assert ours is not None
        loop.add_signal_handler(signal.SIGWINCH, self._draw_anew)
        loop.add_signal_handler(signal.SIGTSTP, self._step_aside)
        for each in (signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(each, self._end, each, ours)
        try:
            while True:
                await asyncio.sleep(_AGAIN)
                self._draw_anew()
        finally:
            for each in (signal.SIGWINCH, signal.SIGTSTP, signal.SIGTERM, signal.SIGHUP):
                loop.remove_signal_handler(each)

    def close(self) -> None:
        if not self._entered:
            return
        # The terminal may be what has gone.
        with suppress(OSError), delivering():
            self._leave()
            for line in self._picture(room(sys.stdout) or 80):
                print(line)

    def _end(self, number: signal.Signals, ours: asyncio.Task[Any]) -> None:
        self.ended_by = number
        ours.cancel()

    def _step_aside(self) -> None:
        drawn = self._entered
        if drawn:
            self._leave()
        os.kill(os.getpid(), signal.SIGSTOP)
        if drawn:
            self._draw()

    def _enter(self) -> None:
        self._keyboard = None
        if sys.stdin.isatty():
            self._keyboard = termios.tcgetattr(sys.stdin.fileno())
            silent = termios.tcgetattr(sys.stdin.fileno())
            silent[3] &= ~termios.ECHO
            termios.tcsetattr(sys.stdin.fileno(), termios.TCSADRAIN, silent)
        self._entered = True
        sys.stdout.write("\x1b[?1049h\x1b[?25l")

    def _leave(self) -> None:
        self._entered, self._drawn_at = False, None
        try:
            sys.stdout.write("\x1b[?25h\x1b[?1049l")
            sys.stdout.flush()
        finally:
            if self._keyboard is not None:
                # What was typed meanwhile was for us, not for the shell.
                termios.tcsetattr(sys.stdin.fileno(), termios.TCSAFLUSH, self._keyboard)

    def _draw_anew(self) -> None:
        if self._entered:
            self._draw()

    def _draw(self) -> None:
        with delivering():
            self._drawn_at = self._drawn()

    def _drawn(self) -> os.terminal_size:
        if not self._entered:
            self._enter()
        size = os.get_terminal_size(sys.stdout.fileno())
        columns, rows = size.columns or 80, size.lines or 24
        lines = self._picture(columns)
        if len(lines) > rows:
            hidden = len(lines) - rows + 1
            more = f"… {hidden} more lines: make the window taller, or name devices."
            lines = [*lines[: rows - 1], wrapped(more, columns)[0]]
        # A line is erased before it is written: behind its last cell an erasure would take that cell with it.
        sys.stdout.write("\x1b[H" if size == self._drawn_at else "\x1b[2J\x1b[H")
        sys.stdout.write("\r\n".join(f"\x1b[2K{line}" for line in lines))
        sys.stdout.write("\x1b[J" if len(lines) < rows else "")
        return size

    def _picture(self, columns: int) -> list[str]:
        """State of the connection, what a person must not miss, and the table."""
        colours = wants_colour(sys.stdout)
        now = time.time()
        told = answer(self._found, self._info, now)
        head = f"{utc(now)}  live"
        lost = self._lost
        if not lost and now - self._as_of > _SILENCE + _PATIENCE:
            lost = "Nothing was heard of the service since."
        if lost:
            head = f"{utc(now)}  NOT LIVE: this is as of {utc(self._as_of)}. {plain(lost)} It is asked again."
        lines = wrapped(head, columns)
        if colours:
            lines = [f"\x1b[{'31' if lost else '2'}m{line}\x1b[0m" for line in lines]
        for each in told.notes:
            lines += wrapped(f"Note: {plain(each)}", columns)
        return [*lines, "", *(table(told, columns, colours=colours) if told.rows else [told.empty])]
