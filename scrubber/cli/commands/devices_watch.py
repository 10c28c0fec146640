"""``scrubber devices --watch``: show the devices as they change, until interrupted.

Invariants: the output shows the time of its data. A lost service is reported and queried until it is back, so old data
is never presented as live. On every exit, the terminal is restored, with the last output on it.
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

from scrubber.cli.client_run import run
from scrubber.cli.render.device_list import device_list_result, select_devices
from scrubber.cli.render.output import (
    OutputFormat,
    flushed_stdout,
    print_document,
    print_message,
    print_result,
    printable,
    table_text,
    terminal_width,
    use_colour,
)
from scrubber.cli.render.text_layout import wrap
from scrubber.domain.errors import ScrubberError
from scrubber.domain.formatting import format_utc

if TYPE_CHECKING:
    from scrubber.api import scrubber_pb2 as pb
    from scrubber.api.client import ReadClient

__all__ = ["watch_devices"]

_RETRY_SECONDS = 1.0
"""Seconds between attempts to reach a lost service, and between updates of ages."""
_PROBE_AFTER = 2.0
"""Seconds without a change after which the service is probed."""
_PROBE_TIMEOUT = 2.0
"""Seconds for the response to a probe, after which the data no longer counts as live."""


def watch_devices(socket: Path, names: Sequence[str], output: OutputFormat) -> None:
    """Show the devices that ``names`` selects (all if empty) until interrupted.

    Raises:
        ScrubberError: the first request failed, or there is no such device.
        KeyboardInterrupt: the user ended it.
    """
    if output is OutputFormat.NAME:
        raise typer.BadParameter("names do not change: watch with -o table, json or yaml.", param_hint="--watch")
    on_terminal = (
        output is OutputFormat.TABLE and terminal_width(sys.stdout) is not None and os.environ.get("TERM") != "dumb"
    )
    view = _TerminalView() if on_terminal else _LineView(output)
    try:
        run(_watch(socket, names, view))
    except KeyboardInterrupt:
        if view.end_signal is not None:
            # Die of the same signal, so that the parent process sees the cause.
            signal.signal(view.end_signal, signal.SIG_DFL)
            os.kill(os.getpid(), view.end_signal)
        raise


class _View(Protocol):
    """Output of the device lists."""

    end_signal: signal.Signals | None

    def show(self, found: Sequence[pb.Device], info: pb.ServiceInfo) -> None: ...

    def show_disconnected(self, message: str) -> None:
        """Report that the service no longer responds, or no longer reports devices."""

    async def run(self) -> None:
        """Do the background work of the output; never returns."""

    def close(self) -> None: ...


async def _watch(socket: Path, wanted: Sequence[str], view: _View) -> None:
    try:
        await _run_until_first(_follow(socket, wanted, view), view.run())
    finally:
        view.close()


async def _run_until_first(*works: Awaitable[None]) -> None:
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
                    view.show(select_devices(found, wanted), info)
                    heard = True
        except ScrubberError as error:
            if not heard:
                raise
            view.show_disconnected(str(error))
        await asyncio.sleep(_RETRY_SECONDS)


async def _states(client: ReadClient) -> AsyncIterator[tuple[Sequence[pb.Device], pb.ServiceInfo]]:
    """Yield the devices and the service information after every change, and periodically without one."""
    stream = client.watch_devices()
    found: Sequence[pb.Device] | None = None
    coming = asyncio.ensure_future(anext(stream))
    try:
        while True:
            if (await asyncio.wait({coming}, timeout=_PROBE_AFTER))[0]:
                found = coming.result().devices
                coming = asyncio.ensure_future(anext(stream))
            info = await client.service_info()
            if found is not None:
                yield found, info
    finally:
        coming.cancel()
        with suppress(asyncio.CancelledError, ScrubberError, StopAsyncIteration):
            await coming
        await stream.aclose()


class _LineView:
    """Output without a terminal: a table, or a document, after every change, each below the last."""

    def __init__(self, output: OutputFormat) -> None:
        self.end_signal: signal.Signals | None = None
        self._output = output
        self._shown: object = None

    def show(self, found: Sequence[pb.Device], info: pb.ServiceInfo) -> None:
        picture = [each.SerializeToString(deterministic=True) for each in found]
        if self._output is OutputFormat.TABLE:
            picture.append(info.breaker.SerializeToString(deterministic=True))
        if picture == self._shown:
            return
        self._shown = picture
        now = time.time()
        told = device_list_result(found, info, now)
        if self._output is OutputFormat.TABLE:
            with flushed_stdout():
                print(format_utc(now))
                print_result(told, self._output)
                print()
        else:
            print_document(told.data, told.kind, self._output)

    def show_disconnected(self, message: str) -> None:
        if self._shown != message:
            self._shown = message
            print_message(f"{message} It is asked again until it answers.", "Note: ")

    async def run(self) -> None:
        await asyncio.Event().wait()

    def close(self) -> None:
        pass


class _TerminalView:
    """A full-screen view, drawn again after every change, every second, and when its size changes."""

    def __init__(self) -> None:
        self.end_signal: signal.Signals | None = None
        self._found: Sequence[pb.Device] = ()
        self._info: pb.ServiceInfo | None = None
        self._as_of = 0.0
        self._disconnect_message = ""
        self._entered = False
        self._rendered_size: os.terminal_size | None = None
        self._keyboard: list[Any] | None = None

    def show(self, found: Sequence[pb.Device], info: pb.ServiceInfo) -> None:
        self._found, self._info, self._as_of, self._disconnect_message = found, info, time.time(), ""
        self._draw()

    def show_disconnected(self, message: str) -> None:
        self._disconnect_message = message
        self._draw()

    async def run(self) -> None:
        loop, ours = asyncio.get_running_loop(), asyncio.current_task()
        assert ours is not None
        loop.add_signal_handler(signal.SIGWINCH, self._redraw)
        loop.add_signal_handler(signal.SIGTSTP, self._suspend)
        for each in (signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(each, self._end, each, ours)
        try:
            while True:
                await asyncio.sleep(_RETRY_SECONDS)
                self._redraw()
        finally:
            for each in (signal.SIGWINCH, signal.SIGTSTP, signal.SIGTERM, signal.SIGHUP):
                loop.remove_signal_handler(each)

    def close(self) -> None:
        if not self._entered:
            return
        # The terminal itself may be gone.
        with suppress(OSError), flushed_stdout():
            self._leave()
            for line in self._screen_lines(terminal_width(sys.stdout) or 80):
                print(line)

    def _end(self, number: signal.Signals, ours: asyncio.Task[Any]) -> None:
        self.end_signal = number
        ours.cancel()

    def _suspend(self) -> None:
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
        self._entered, self._rendered_size = False, None
        try:
            sys.stdout.write("\x1b[?25h\x1b[?1049l")
            sys.stdout.flush()
        finally:
            if self._keyboard is not None:
                # Keys typed meanwhile were meant for this view, not for the shell.
                termios.tcsetattr(sys.stdin.fileno(), termios.TCSAFLUSH, self._keyboard)

    def _redraw(self) -> None:
        if self._entered:
            self._draw()

    def _draw(self) -> None:
        with flushed_stdout():
            self._rendered_size = self._render()

    def _render(self) -> os.terminal_size:
        if not self._entered:
            self._enter()
        size = os.get_terminal_size(sys.stdout.fileno())
        columns, rows = size.columns or 80, size.lines or 24
        lines = self._screen_lines(columns)
        if len(lines) > rows:
            hidden = len(lines) - rows + 1
            more = f"… {hidden} more lines: make the window taller, or name devices."
            lines = [*lines[: rows - 1], wrap(more, columns)[0]]
        # Each line is erased before it is written: erasing after its last cell would remove that cell.
        sys.stdout.write("\x1b[H" if size == self._rendered_size else "\x1b[2J\x1b[H")
        sys.stdout.write("\r\n".join(f"\x1b[2K{line}" for line in lines))
        sys.stdout.write("\x1b[J" if len(lines) < rows else "")
        return size

    def _screen_lines(self, columns: int) -> list[str]:
        """Return the lines of the screen: connection state, notes, and the table."""
        colours = use_colour(sys.stdout)
        now = time.time()
        told = device_list_result(self._found, self._info, now)
        head = f"{format_utc(now)}  live"
        lost = self._disconnect_message
        if not lost and now - self._as_of > _PROBE_AFTER + _PROBE_TIMEOUT:
            lost = "Nothing was heard of the service since."
        if lost:
            head = f"{format_utc(now)}  NOT LIVE: this is as of {format_utc(self._as_of)}. {printable(lost)} It is asked again."
        lines = wrap(head, columns)
        if colours:
            lines = [f"\x1b[{'31' if lost else '2'}m{line}\x1b[0m" for line in lines]
        for each in told.notes:
            lines += wrap(f"Note: {printable(each)}", columns)
        return [*lines, "", *(table_text(told, columns, colours=colours) if told.rows else [told.empty_message])]
