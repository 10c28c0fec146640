"""``scrubber reset-plan``: what a reset of a device would do and what blocks it.

It shows, and changes nothing: resets are the service's, when a recovery or the policy needs one.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from scrubber.cli.asking import run
from scrubber.cli.exits import Exit
from scrubber.cli.options import DeviceArgument, OutputOption, SocketOption
from scrubber.cli.output import Answer, Output, emit

if TYPE_CHECKING:
    from scrubber.api import scrubber_pb2 as pb

__all__ = ["add_commands"]


def add_commands(app: typer.Typer) -> None:
    app.command("reset-plan")(reset_plan)


def reset_plan(
    device: DeviceArgument, socket: SocketOption = Path("/run/scrubber"), output: OutputOption = Output.TABLE
) -> None:
    """Show what a reset of a device would do. Exits with 0 if it could be reset now, 3 if blocked, 1 if never here."""

    async def ask() -> pb.ResetPlan:
        from scrubber.api.client import ReadClient

        async with ReadClient(socket) as client:
            return await client.reset_plan(device)

    plan = run(ask())
    emit(_answer(plan), output)
    raise typer.Exit(_exit_for(plan))


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
