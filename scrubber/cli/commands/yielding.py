"""``scrubber yield`` and ``resume``: leave the driver of the node to others, and return to it.

The service answers a request once it is durable; then it closes or opens the driver, for which it replaces its sockets.
The commands wait until that is done.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from scrubber.cli.client_run import run
from scrubber.cli.commands.quarantine import ReasonOption
from scrubber.cli.exit_codes import ExitCode
from scrubber.cli.options import NoHeadersOption, OutputOption, SocketOption, seconds
from scrubber.cli.render.device_list import yield_notes
from scrubber.cli.render.output import CommandResult, OutputFormat, print_error, print_result
from scrubber.domain.errors import RetryableError, Unavailable
from scrubber.domain.formatting import rfc3339

if TYPE_CHECKING:
    from scrubber.api import scrubber_pb2 as pb
    from scrubber.api.client import AdminClient

__all__ = ["add_commands"]

_POLL_SECONDS = 0.2
_ABSENCE_SECONDS = 10.0
"""Seconds for which the sockets may be absent: the service replaces them when it closes or opens the driver."""


def add_commands(app: typer.Typer) -> None:
    app.command("yield")(yield_node)
    app.command()(resume)


TimeoutOption = Annotated[
    float,
    typer.Option(
        "--timeout",
        metavar="TIME",
        parser=seconds,
        help="Wait at most this long for the driver to be closed (`yield`) or reopened (`resume`), then exit with 4; the "
        "request stays recorded.",
    ),
]


def yield_node(
    reason: ReasonOption,
    timeout: TimeoutOption = 60.0,
    socket: SocketOption = Path("/run/scrubber"),
    output: OutputOption = OutputFormat.TABLE,
    no_headers: NoHeadersOption = False,
) -> None:
    """Release the driver and take every device out of service.

    For work that needs the driver for itself: to replace it, to partition or reset GPUs with other tools, to unload its kernel
    module. Scrubs in progress are abandoned; a reset in progress is completed. Running pods keep their devices. Nothing that
    happens to a device meanwhile is counted as a fault of the device. The node stays yielded, also when the service is restarted, until
    `scrubber resume`; then every device is dirty.
    """
    info = run(_request(socket, timeout, lambda client: client.yield_node(reason), _is_closed))
    _show(info, output, no_headers=no_headers)


def resume(
    reason: ReasonOption,
    everyone: Annotated[
        bool, typer.Option("--all", help="End the requests of plugins too, although a node label still requests it.")
    ] = False,
    timeout: TimeoutOption = 60.0,
    socket: SocketOption = Path("/run/scrubber"),
    output: OutputOption = OutputFormat.TABLE,
    no_headers: NoHeadersOption = False,
) -> None:
    """Take the driver back after a yield.

    Every device is dirty and is scrubbed. Where a plugin has requested a yield too, because of a label of its node, the node
    stays yielded until the label changes.
    """
    info = run(
        _request(
            socket,
            timeout,
            lambda client: client.resume_node(reason, all_requests=everyone),
            _is_resumed,
        )
    )
    _show(info, output, no_headers=no_headers)


async def _request(
    socket: Path,
    timeout: float,
    action: Callable[[AdminClient], Awaitable[pb.NodeYield]],
    done: Callable[[pb.ServiceInfo], bool],
) -> pb.ServiceInfo:
    """Run ``action``, and return the description of the service once ``done`` holds for it.

    Raises:
        Unavailable: there is no service; one that is closing or opening the driver is back within seconds.
        typer.Exit: it did not hold within ``timeout`` seconds.
    """
    from scrubber.api.client import AdminClient, ReadClient

    retry_until = time.monotonic() + min(timeout, _ABSENCE_SECONDS)
    while True:
        try:
            async with AdminClient(socket) as client:
                await action(client)
            break
        except Unavailable:
            if time.monotonic() >= retry_until:
                raise
            await asyncio.sleep(_POLL_SECONDS)
    waiting_for = "the service did not respond"
    try:
        async with asyncio.timeout(timeout), ReadClient(socket) as reader:
            while True:
                try:
                    info = await reader.service_info()
                    if done(info):
                        if not info.HasField("node_yield"):
                            await reader.devices()  # refused until every device was inspected
                        return info
                    waiting_for = _remaining(info)
                except RetryableError as error:  # the service replaces its sockets
                    waiting_for = str(error)
                await asyncio.sleep(_POLL_SECONDS)
    except TimeoutError:
        print_error(f"The request is recorded, but was not completed within {timeout:g} s: {waiting_for}")
        raise typer.Exit(ExitCode.TIMED_OUT) from None


def _is_closed(info: pb.ServiceInfo) -> bool:
    return info.HasField("node_yield") and info.node_yield.driver_closed


def _is_resumed(info: pb.ServiceInfo) -> bool:
    """Whether nothing but requests of others keeps the node yielded."""
    return not info.HasField("node_yield") or bool(info.node_yield.requests)


def _remaining(info: pb.ServiceInfo) -> str:
    if info.node_yield.remaining_pids:
        pids = ", ".join(map(str, info.node_yield.remaining_pids))
        return f"these processes of the service cannot be killed and may use the driver: PID {pids}."
    return "the service is still closing or opening the driver."


def _show(info: pb.ServiceInfo, output: OutputFormat, *, no_headers: bool) -> None:
    print_result(_result(info), output, no_headers=no_headers)


def _result(info: pb.ServiceInfo) -> CommandResult:
    requests = info.node_yield.requests
    yielded = info.HasField("node_yield")
    state = "open" if not yielded else "closed" if info.node_yield.driver_closed else "closing"
    document = {
        "node": info.node_name,
        "yielded": yielded,
        "driver": state,
        "remainingPids": list(info.node_yield.remaining_pids),
        "requests": [
            {"requester": each.requester, "actor": each.actor, "reason": each.reason, "since": rfc3339(each.since)}
            for each in requests
        ],
    }
    rows = [(info.node_name, state, each.requester, each.actor, each.reason) for each in requests]
    return CommandResult(
        data=document,
        names=[info.node_name],
        header=("NODE", "DRIVER", "REQUESTER", "ACTOR", "REASON"),
        rows=rows or [(info.node_name, state, "-", "-", "-")],
        notes=list(yield_notes(info)),
        kind="NodeYield",
    )
