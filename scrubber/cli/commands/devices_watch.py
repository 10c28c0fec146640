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
from collections.abc import AsyncIterator, Awaitable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import typer

from scrubber.cli.client_run import run
from scrubber.cli.render.device_list import device_list_result, select_devices
from scrubber.cli.render.output import (
    CommandResult,
    OutputFormat,
    flushed_stdout,
    print_document,
    print_message,
    print_result,
)
from scrubber.cli.render.table import (
    printable,
    render_lines,
    table_lines,
    table_renderables,
    terminal_width,
    use_colour,
)
from scrubber.domain.errors import ScrubberError
from scrubber.domain.formatting import format_utc

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
    from rich.live import Live

    from scrubber.api import scrubber_pb2 as pb
    from scrubber.api.client import ReadClient

__all__ = ["watch_devices"]

_RETRY_SECONDS = 1.0
"""Seconds between attempts to reach a lost service, and between updates of ages."""
_PROBE_AFTER = 2.0
"""Seconds without a change after which the service is probed."""
_PROBE_TIMEOUT = 2.0
"""Seconds for the response to a probe, after which the data no longer counts as live."""


def watch_devices(socket: Path, names: Sequence[str], output: OutputFormat, *, no_headers: bool) -> None:
    """Show the devices that ``names`` selects (all if empty) until interrupted.

    Args:
        no_headers: omit the titles of the table's columns.

    Raises:
        ScrubberError: the first request failed, or there is no such device.
        KeyboardInterrupt: the user ended it.
    """
    if output is OutputFormat.NAME:
        raise typer.BadParameter(
            "-o name cannot be watched, because names do not change. Use table, wide, json or yaml.",
            param_hint="--watch",
        )
    view: _View
    if output.is_table and terminal_width(sys.stdout) is not None and os.environ.get("TERM") != "dumb":
        view = _TerminalView(wide=output is OutputFormat.WIDE, no_headers=no_headers)
    else:
        view = _LineView(output, no_headers=no_headers)
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

    def show(self, devices: Sequence[pb.Device], info: pb.ServiceInfo) -> None: ...

    def show_disconnected(self, message: str) -> None:
        """Report that the service no longer responds, or no longer reports devices."""

    async def run(self) -> None:
        """Do the background work of the output; never returns."""

    def close(self) -> None: ...


async def _watch(socket: Path, names: Sequence[str], view: _View) -> None:
    try:
        await _run_until_first(_follow(socket, names, view), view.run())
    finally:
        view.close()


async def _run_until_first(*awaitables: Awaitable[None]) -> None:
    tasks = [asyncio.ensure_future(each) for each in awaitables]
    try:
        ended, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for each in ended:
            each.result()
    finally:
        for each in tasks:
            each.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _follow(socket: Path, names: Sequence[str], view: _View) -> None:
    from scrubber.api.client import ReadClient

    connected = False
    while True:
        try:
            async with ReadClient(socket) as client:
                async for devices, info in _states(client):
                    view.show(select_devices(devices, names), info)
                    connected = True
        except ScrubberError as error:
            if not connected:
                raise
            view.show_disconnected(str(error))
        await asyncio.sleep(_RETRY_SECONDS)


async def _states(client: ReadClient) -> AsyncIterator[tuple[Sequence[pb.Device], pb.ServiceInfo]]:
    """Yield the devices and the service information after every change, and periodically without one."""
    stream = client.watch_devices()
    devices: Sequence[pb.Device] | None = None
    pending = asyncio.ensure_future(anext(stream))
    try:
        while True:
            if (await asyncio.wait({pending}, timeout=_PROBE_AFTER))[0]:
                devices = pending.result().devices
                pending = asyncio.ensure_future(anext(stream))
            info = await client.service_info()
            if devices is not None:
                yield devices, info
    finally:
        pending.cancel()
        with suppress(asyncio.CancelledError, ScrubberError, StopAsyncIteration):
            await pending
        await stream.aclose()


class _LineView:
    """Output without a terminal: a table, or a document, whenever its content has changed, each below the last."""

    def __init__(self, output: OutputFormat, *, no_headers: bool) -> None:
        self.end_signal: signal.Signals | None = None
        self._output = output
        self._no_headers = no_headers
        self._shown: object = None

    def show(self, devices: Sequence[pb.Device], info: pb.ServiceInfo) -> None:
        content = self._content(device_list_result(devices, info, now=0.0))  # without ages, which always change
        if content == self._shown:
            return
        self._shown = content
        now = time.time()
        result = device_list_result(devices, info, now)
        if self._output.is_table:
            with flushed_stdout():
                print(format_utc(now))
                print_result(result, self._output, no_headers=self._no_headers)
                print()
        else:
            print_document(result.data, result.kind, self._output)

    def _content(self, result: CommandResult) -> object:
        """Return what the output shows of ``result``."""
        if not self._output.is_table:
            return result.data
        return table_lines(result.tables, None, wide=self._output is OutputFormat.WIDE), result.notes

    def show_disconnected(self, message: str) -> None:
        if self._shown != message:
            self._shown = message
            print_message(f"{message} Retrying until the service responds.", "Note: ")

    async def run(self) -> None:
        await asyncio.Event().wait()

    def close(self) -> None:
        pass


class _TerminalView:
    """A full-screen view, drawn again after every change, every second, and when its size changes."""

    def __init__(self, *, wide: bool, no_headers: bool) -> None:
        from rich.console import Console

        self.end_signal: signal.Signals | None = None
        self._wide = wide
        self._no_headers = no_headers
        self._devices: Sequence[pb.Device] = ()
        self._info: pb.ServiceInfo | None = None
        self._updated_at = 0.0
        self._disconnect_message = ""
        self._live: Live | None = None
        self._keyboard: list[Any] | None = None
        self._console = Console(
            file=sys.stdout,
            force_terminal=True,
            force_interactive=True,
            color_system="standard" if use_colour(sys.stdout) else None,
            no_color=False,
            highlight=False,
            markup=False,
            emoji=False,
        )

    def show(self, devices: Sequence[pb.Device], info: pb.ServiceInfo) -> None:
        self._devices, self._info, self._updated_at, self._disconnect_message = devices, info, time.time(), ""
        self._draw()

    def show_disconnected(self, message: str) -> None:
        self._disconnect_message = message
        self._draw()

    async def run(self) -> None:
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None
        loop.add_signal_handler(signal.SIGWINCH, self._redraw)
        loop.add_signal_handler(signal.SIGTSTP, self._suspend)
        for each in (signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(each, self._end, each, task)
        try:
            while True:
                await asyncio.sleep(_RETRY_SECONDS)
                self._redraw()
        finally:
            for each in (signal.SIGWINCH, signal.SIGTSTP, signal.SIGTERM, signal.SIGHUP):
                loop.remove_signal_handler(each)

    def close(self) -> None:
        if self._live is None:
            return
        # The terminal itself may be gone.
        with suppress(OSError), flushed_stdout():
            self._leave()
            width = terminal_width(sys.stdout) or 80
            for line in render_lines(self._renderables(width), width, colours=use_colour(sys.stdout)):
                print(line)

    def _end(self, number: signal.Signals, task: asyncio.Task[Any]) -> None:
        self.end_signal = number
        task.cancel()

    def _suspend(self) -> None:
        drawn = self._live is not None
        if drawn:
            self._leave()
        os.kill(os.getpid(), signal.SIGSTOP)
        if drawn:
            self._draw()

    def _enter(self) -> Live:
        from rich.live import Live

        self._keyboard = None
        if sys.stdin.isatty():
            self._keyboard = termios.tcgetattr(sys.stdin.fileno())
            silent = termios.tcgetattr(sys.stdin.fileno())
            silent[3] &= ~termios.ECHO
            termios.tcsetattr(sys.stdin.fileno(), termios.TCSADRAIN, silent)
        self._live = Live(
            self, console=self._console, screen=True, auto_refresh=False, redirect_stdout=False, redirect_stderr=False
        )
        self._live.start()
        return self._live

    def _leave(self) -> None:
        live, self._live = self._live, None
        assert live is not None
        try:
            live.stop()
            sys.stdout.flush()
        finally:
            if self._keyboard is not None:
                # Keys typed meanwhile were meant for this view, not for the shell.
                termios.tcsetattr(sys.stdin.fileno(), termios.TCSAFLUSH, self._keyboard)

    def _redraw(self) -> None:
        if self._live is not None:
            self._draw()

    def _draw(self) -> None:
        with flushed_stdout():
            size = os.get_terminal_size(sys.stdout.fileno())
            self._console.width, self._console.height = size.columns or 80, size.lines or 24
            (self._live or self._enter()).refresh()

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yield the lines that fit the screen; the last one counts the others."""
        from rich.console import Group
        from rich.segment import Segment
        from rich.text import Text

        unlimited = options.update(height=None)
        lines = console.render_lines(Group(*self._renderables(options.max_width)), unlimited, pad=False)
        rows = options.size.height
        if len(lines) > rows:
            more = f"… {len(lines) - rows + 1} more lines: enlarge the window, or name devices."
            lines = [*lines[: rows - 1], console.render_lines(Text(more), unlimited, pad=False)[0]]
        for line in lines:
            yield from line
            yield Segment.line()

    def _renderables(self, width: int) -> Iterator[RenderableType]:
        """Yield the content of the screen: connection state, notes, and the table."""
        from rich.text import Text

        now = time.time()
        result = device_list_result(self._devices, self._info, now)
        lost = self._disconnect_message
        if not lost and now - self._updated_at > _PROBE_AFTER + _PROBE_TIMEOUT:
            lost = "The service does not respond."
        if lost:
            last = f"NOT LIVE: last update at {format_utc(self._updated_at)}. {printable(lost)} Retrying."
            yield Text(f"{format_utc(now)}  {last}", "red")
        else:
            yield Text(f"{format_utc(now)}  live", "dim")
        for each in result.notes:
            yield Text(f"Note: {printable(each)}")
        yield Text()
        if result.rows:
            yield from table_renderables(result.tables, width, wide=self._wide, headers=not self._no_headers)
        else:
            yield Text(result.empty_message)
