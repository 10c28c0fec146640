"""``scrubber reset`` and ``reset-plan``: reset an idle device, and show the effects beforehand.

Showing the plan changes nothing. The service decides at the moment of the reset whether it is done: a blocker of the
plan may be gone by then, and another may have appeared.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from scrubber.cli.client_run import run
from scrubber.cli.commands.quarantine import ReasonOption
from scrubber.cli.commands.scrub import TimeoutOption, WaitOption
from scrubber.cli.confirmation import NoInputOption, YesOption, check_admin_access, confirm, needs_confirmation
from scrubber.cli.exit_codes import ExitCode
from scrubber.cli.options import DeviceArgument, NoHeadersOption, OutputOption, SocketOption
from scrubber.cli.render.output import CommandResult, OutputFormat, print_error, print_result, print_table
from scrubber.domain.agent_pause import PauseWay

if TYPE_CHECKING:
    from scrubber.api import scrubber_pb2 as pb
    from scrubber.cli.scrub_updates import FollowResult

__all__ = ["add_commands"]


def add_commands(app: typer.Typer) -> None:
    app.command("reset-plan")(reset_plan)
    app.command()(reset)


def reset_plan(
    device: DeviceArgument, socket: SocketOption = Path("/run/scrubber"), output: OutputOption = OutputFormat.TABLE
) -> None:
    """Show what a reset would do and what blocks it.

    Exits with 0 if the device could be reset now, 3 if something blocks the reset, 1 if it cannot be reset on this node.
    """
    plan = run(_fetch_plan(socket, device))
    print_result(_answer(plan), output)
    raise typer.Exit(_exit_for(plan))


def reset(
    device: DeviceArgument,
    reason: ReasonOption,
    yes: YesOption = False,
    no_input: NoInputOption = False,
    wait: WaitOption = True,
    timeout: TimeoutOption = None,
    socket: SocketOption = Path("/run/scrubber"),
    output: OutputOption = OutputFormat.TABLE,
    no_headers: NoHeadersOption = False,
) -> None:
    """Reset an idle device and scrub it.

    Shows which devices are reset together with it, and asks for confirmation.

    Exits with 0 only if the device was reset, proved clean and is not quarantined afterwards, 1 if not, 3 if the reset is
    refused or impossible on this node, 4 if the wait timed out. Ctrl-C ends the wait, never the reset.
    """
    from scrubber.cli.render.scrub_result import report_and_exit

    # Before any request: without confirmation or permission, nothing else matters.
    if needs_confirmation(yes=yes, no_input=no_input):
        check_admin_access(socket)
    plan = run(_fetch_plan(socket, device))
    print_table(_answer(plan), sys.stderr)
    if plan.unavailable_reason:
        print_error(plan.unavailable_reason)
        raise typer.Exit(ExitCode.REFUSED)
    together = f", together with {', '.join(plan.also_reset_ids)}" if plan.also_reset_ids else ""
    confirm(
        f"This resets device {plan.device_id} ({plan.method}){together}, and scrubs it. It is not handed over until it is "
        "proved clean.",
        yes=yes,
        no_input=no_input,
    )
    report_and_exit(
        run(_reset(socket, device, reason, wait=wait, timeout=timeout)),
        "reset",
        output,
        single=True,
        waited=wait,
        no_headers=no_headers,
    )


async def _fetch_plan(socket: Path, device: str) -> pb.ResetPlan:
    from scrubber.api.client import ReadClient

    async with ReadClient(socket) as client:
        return await client.reset_plan(device)


async def _reset(socket: Path, device: str, reason: str, *, wait: bool, timeout: float | None) -> FollowResult:
    from scrubber.api.client import AdminClient
    from scrubber.cli.progress_display import progress_display
    from scrubber.cli.scrub_updates import ScrubTarget, follow_scrubs

    async with AdminClient(socket) as client:
        return await follow_scrubs(
            [ScrubTarget(device)],
            lambda called: client.reset(called, reason),
            progress_display(),
            wait=wait,
            timeout=timeout,
        )


def _exit_for(plan: pb.ResetPlan) -> ExitCode:
    if plan.unavailable_reason:
        return ExitCode.FAILED
    return ExitCode.REFUSED if plan.blockers else ExitCode.OK


def _answer(plan: pb.ResetPlan) -> CommandResult:
    return CommandResult(
        data={
            "deviceID": plan.device_id,
            "possible": _exit_for(plan) is ExitCode.OK,
            "method": plan.method,
            "actions": list(plan.actions),
            "unavailableReason": plan.unavailable_reason or None,
            "blockers": list(plan.blockers),
            "alsoResetIDs": list(plan.also_reset_ids),
            "agents": list(plan.agents),
            "pauseWays": [{"way": each.way, "actions": list(each.actions)} for each in plan.pause_ways],
        },
        names=[plan.device_id],
        header=(),
        rows=list(_rows(plan)),
        kind="ResetPlan",
    )


def _actions(plan: pb.ResetPlan) -> Iterator[str]:
    """Yield every action in order: agents are paused by the first way, the device is reset, agents are restored.

    Where the first way is a reset by another service, its actions are all.
    """
    if not plan.pause_ways:
        yield from plan.actions
        return
    way = plan.pause_ways[0]
    if way.way == PauseWay.EXTERNAL_RESET:
        yield from (f"By another service ({way.way}): {each}." for each in way.actions)
        return
    yield from (f"Pause agents ({way.way}): {each}." for each in way.actions)
    yield "Wait until they have released the device."
    yield from plan.actions
    yield f"Restore the agents ({way.way}): undo what was changed, in reverse order."


def _rows(plan: pb.ResetPlan) -> Iterator[tuple[str, str]]:
    yield ("device", plan.device_id)
    yield ("method", plan.method)
    yield from (("also reset", each) for each in plan.also_reset_ids)
    yield from (("agent", each) for each in plan.agents)
    yield from ((f"action {number}", each) for number, each in enumerate(_actions(plan), 1))
    yield from ((f"or by {way.way}", action) for way in plan.pause_ways[1:] for action in way.actions)
    if plan.unavailable_reason:
        yield ("unavailable", plan.unavailable_reason)
    yield from (("blocker", each) for each in plan.blockers)
    match _exit_for(plan):
        case ExitCode.OK:
            yield (
                "verdict",
                "can be reset now; agents are paused meanwhile" if plan.pause_ways else "can be reset now",
            )
        case ExitCode.REFUSED:
            yield ("verdict", "can be reset when nothing blocks it")
        case _:
            yield ("verdict", "cannot be reset on this node")
