"""What ``scrubber demo --stay`` does once the story is told: the node stays as it is, its metrics can be scraped.

Promise: nothing listens but on loopback.
"""

from __future__ import annotations

import asyncio
import json
import shlex
from contextlib import suppress

from rich.console import Console
from rich.markup import escape

from scrubber.emulator.stage import Daemon, Stage

__all__ = ["serve_metrics", "until_interrupted"]


def serve_metrics(stage: Stage) -> None:
    """Have both daemons serve metrics, each on a free port of loopback. To be called before they are started."""
    for daemon in (stage.service, stage.plugin):
        daemon.arguments = (*daemon.arguments, "--metrics-address", "127.0.0.1:0")


async def until_interrupted(stage: Stage, console: Console) -> None:
    """Say where the metrics are and what can be tried, then wait to be cancelled; that is taken for an end like any other."""
    sockets, node = shlex.quote(str(stage.sockets)), shlex.quote(str(stage.sim))
    console.print("\n[bold]The node stays until Ctrl-C[/]")
    for words, what in (
        ("service's metrics", f"http://{_metrics_address(stage.service)}/metrics"),
        ("plugin's metrics", f"http://{_metrics_address(stage.plugin)}/metrics"),
        ("ask the service", f"scrubber devices --socket {sockets}"),
        ("break something", f"scrubber sim fault --dir {node} --device 0 --xid 95"),
    ):
        console.print(f"  {words:<19}{escape(what)}")
    waiting = asyncio.current_task()
    assert waiting is not None
    with suppress(asyncio.CancelledError):
        await asyncio.Event().wait()
    waiting.uncancel()


def _metrics_address(daemon: Daemon) -> str:
    """``HOST:PORT`` by the last start's log, for the system chose the port.

    Raises:
        RuntimeError: it serves none.
    """
    lines = [json.loads(line) for line in daemon.log.read_text().splitlines() if '"metrics.serving"' in line]
    if not lines:
        raise RuntimeError(f"no metrics are served; {daemon.log} says why")
    return str(lines[-1]["address"])
