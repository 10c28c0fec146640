"""``scrubber reset`` and ``reset-plan``: reset a device that nobody has, and see beforehand what that would do.

The plan is shown and changes nothing. Whether the reset is done is the service's decision, at the moment of the reset: what
stood in the way of the plan may be gone by then, and something else may have come.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from scrubber.cli.acting import ReasonOption
from scrubber.cli.asking import run
from scrubber.cli.consent import NoInputOption, YesOption, admitted, ask, asks
from scrubber.cli.exits import Exit
from scrubber.cli.options import DeviceArgument, OutputOption, SocketOption
from scrubber.cli.output import Answer, Output, complain, emit, show
from scrubber.cli.scrub import TimeoutOption, WaitOption

if TYPE_CHECKING:
    from scrubber.api import scrubber_pb2 as pb
    from scrubber.cli.following import Followed

__all__ = ["add_commands"]


def add_commands(app: typer.Typer) -> None:
    app.command("reset-plan")(reset_plan)
    app.command()(reset)


def reset_plan(
    device: DeviceArgument, socket: SocketOption = Path("/run/scrubber"), output: OutputOption = Output.TABLE
) -> None:
    """Show what a reset of a device would do. Exits with 0 if it could be reset now, 3 if blocked, 1 if never here."""
    plan = run(_plan(socket, device))
    emit(_answer(plan), output)
    raise typer.Exit(_exit_for(plan))


def reset(
    device: DeviceArgument,
    reason: ReasonOption,
    yes: YesOption = False,
    no_input: NoInputOption = False,
    wait: WaitOption = True,
    timeout: TimeoutOption = None,
    socket: SocketOption = Path("/run/scrubber"),
    output: OutputOption = Output.TABLE,
) -> None:
    """Reset a device that nobody has, and scrub it. Shows what is reset together with it, and asks.

    Exits with 0 only if the device was reset, proved clean and is not quarantined afterwards, 1 if not, 3 if it is refused
    or cannot be reset here, 4 if the wait was over first. Ctrl-C ends the waiting, never the reset.
    """
    from scrubber.cli.verdict import conclude

    # Before anything is looked up: where nobody can say yes or may act, that is all there is to say.
    if asks(yes=yes, no_input=no_input):
        admitted(socket)
    plan = run(_plan(socket, device))
    show(_answer(plan), sys.stderr)
    if plan.unavailable:
        complain(plan.unavailable)
        raise typer.Exit(Exit.REFUSED)
    together = f", together with {', '.join(plan.together)}" if plan.together else ""
    ask(
        f"Device {plan.device} is reset ({plan.method}){together}, and scrubbed. Nobody gets it before it has been proved "
        "clean.",
        yes=yes,
        no_input=no_input,
    )
    conclude(run(_reset(socket, device, reason, wait=wait, timeout=timeout)), "reset", output, single=True, waited=wait)


async def _plan(socket: Path, device: str) -> pb.ResetPlan:
    from scrubber.api.client import ReadClient

    async with ReadClient(socket) as client:
        return await client.reset_plan(device)


async def _reset(socket: Path, device: str, reason: str, *, wait: bool, timeout: float | None) -> Followed:
    from scrubber.api.client import AdminClient
    from scrubber.cli.following import Target, follow
    from scrubber.cli.progress import display

    async with AdminClient(socket) as client:
        return await follow(
            [Target(device)], lambda called: client.reset(called, reason), display(), wait=wait, timeout=timeout
        )


def _exit_for(plan: pb.ResetPlan) -> Exit:
    if plan.unavailable:
        return Exit.NEGATIVE
    return Exit.REFUSED if plan.blockers else Exit.OK


def _answer(plan: pb.ResetPlan) -> Answer:
    return Answer(
        data={
            "device": plan.device,
            "possible": _exit_for(plan) is Exit.OK,
            "method": plan.method,
            "acts": list(plan.acts),
            "unavailable": plan.unavailable or None,
            "blockers": list(plan.blockers),
            "together": list(plan.together),
        },
        names=[plan.device],
        header=(),
        rows=list(_rows(plan)),
        kind="ResetPlan",
    )


def _rows(plan: pb.ResetPlan) -> Iterator[tuple[str, str]]:
    yield ("device", plan.device)
    yield ("method", plan.method)
    yield from (("together with", each) for each in plan.together)
    yield from ((f"act {number}", each) for number, each in enumerate(plan.acts, 1))
    if plan.unavailable:
        yield ("unavailable", plan.unavailable)
    yield from (("blocked", each) for each in plan.blockers)
    match _exit_for(plan):
        case Exit.OK:
            yield ("verdict", "could be reset now")
        case Exit.REFUSED:
            yield ("verdict", "could be reset once nothing blocks it")
        case _:
            yield ("verdict", "cannot be reset here")
