"""``scrubber scrub``: scrub devices now, and wait for the verdicts.

Leaving early never ends a scrub: it continues in the service, and the next caller joins it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from scrubber.cli.client_run import resolve_device, run
from scrubber.cli.completers import complete_device
from scrubber.cli.options import NoHeadersOption, OutputOption, SocketOption, device_name, seconds
from scrubber.cli.render.device_facts import is_in_use, job_name, tenant_name
from scrubber.cli.render.output import OutputFormat, print_note

if TYPE_CHECKING:
    from scrubber.api import scrubber_pb2 as pb
    from scrubber.cli.scrub_updates import FollowResult, ScrubTarget

__all__ = ["TimeoutOption", "WaitOption", "add_commands"]


class ScrubPathChoice(StrEnum):
    FAST = "fast"
    SLOW = "slow"


DevicesArgument = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="DEVICE",
        parser=device_name,
        autocompletion=complete_device,
        help="UUIDs, unique prefixes of UUIDs, or indexes.",
        show_default=False,
    ),
]
AllIdleOption = Annotated[
    bool,
    typer.Option("--all-idle", help="Scrub every idle device, and join running scrubs."),
]
PathOption = Annotated[
    ScrubPathChoice,
    typer.Option("--path", help="fast: checks only; slow: all steps, including memory."),
]
WaitOption = Annotated[bool, typer.Option("--wait/--no-wait", help="Wait for the scrub to finish.")]
TimeoutOption = Annotated[
    float | None,
    typer.Option(
        "--timeout",
        metavar="TIME",
        parser=seconds,
        help="Wait at most this long, such as 30s, then exit with 4; the scrub continues. With --no-wait: how "
        "long to wait for its start.",
        show_default="no limit",
    ),
]


def add_commands(app: typer.Typer) -> None:
    app.command()(scrub)


def scrub(
    devices: DevicesArgument = None,
    all_idle: AllIdleOption = False,
    path: PathOption = ScrubPathChoice.SLOW,
    wait: WaitOption = True,
    timeout: TimeoutOption = None,
    socket: SocketOption = Path("/run/scrubber"),
    output: OutputOption = OutputFormat.TABLE,
    no_headers: NoHeadersOption = False,
) -> None:
    """Scrub idle devices, or join running scrubs.

    Exits with 0 only if every device was proved clean, otherwise with the worst of: 130 interrupted, 1 failed or no
    verdict, 2 no such device, 3 refused or blocked by a holder, 4 the wait timed out. Ctrl-C ends the wait, never the
    scrub. With --no-wait, 0 means only that every scrub has started.
    """
    from scrubber.cli.render.scrub_result import report_and_exit

    names = list(dict.fromkeys(devices or ()))
    if bool(names) == all_idle:
        raise typer.BadParameter(
            "Pass either a DEVICE or --all-idle, not both." if all_idle else "Pass a DEVICE, or --all-idle."
        )
    followed = run(_scrub(socket, names, path, wait=wait, timeout=timeout))
    report_and_exit(followed, "scrub", output, single=len(names) == 1, waited=wait, no_headers=no_headers)


async def _scrub(
    socket: Path, names: Sequence[str], path: ScrubPathChoice, *, wait: bool, timeout: float | None
) -> FollowResult:
    from scrubber.api.client import AdminClient
    from scrubber.cli.progress_display import progress_display
    from scrubber.cli.scrub_updates import follow_scrubs

    targets = await _targets(socket, names, path)
    async with AdminClient(socket) as client:
        return await follow_scrubs(
            targets, lambda device: client.scrub(device, path.value), progress_display(), wait=wait, timeout=timeout
        )


async def _targets(socket: Path, names: Sequence[str], path: ScrubPathChoice) -> Sequence[ScrubTarget]:
    """Return the devices called ``names``, or all idle ones if there are none; print which are skipped.

    Raises:
        InvalidRequest: there is no such device; none is scrubbed then.
    """
    from scrubber.api.client import ReadClient
    from scrubber.cli.scrub_updates import ScrubTarget

    if len(names) == 1:
        return [ScrubTarget(names[0])]
    async with ReadClient(socket) as client:
        known = (await client.devices()).devices
    if names:
        return list(_named_targets(known, names))
    why = {each.id: _skip_reason(each, path) for each in known}
    for each in known:
        if why[each.id]:
            print_note(f"Device {each.index} ({each.id}) is skipped: {why[each.id]}.")
    return [ScrubTarget(each.id, each.id, each.index) for each in known if not why[each.id]]


def _named_targets(known: Sequence[pb.Device], names: Sequence[str]) -> Iterator[ScrubTarget]:
    from scrubber.cli.scrub_updates import ScrubTarget

    found = {device.id: device for device in (resolve_device(known, each) for each in names)}
    return (ScrubTarget(each.id, each.id, each.index) for each in found.values())


def _skip_reason(device: pb.Device, path: ScrubPathChoice) -> str:
    """Return why ``device`` is not scrubbed with the idle ones; empty if it is."""
    if device.hygiene == "scrubbing" or device.active_scrub_id:
        # A device being scrubbed is idle. Checks, however, would interrupt its scrub, so they cannot join it.
        if path is ScrubPathChoice.SLOW:
            return ""
        return f"it is being scrubbed ({device.active_scrub_id})" if device.active_scrub_id else "it is being scrubbed"
    if is_in_use(device):
        who = tenant_name(device)
        return f"it is in use by {who}" if who else "it is in use"
    if device.open_grants:
        had = (
            "/".join((each.tenant, each.pod or f"claim {each.claim.name}"))
            if each.pod or each.HasField("claim")
            else job_name(each.job)
            if each.HasField("job")
            else "unknown pod"
            for each in device.open_grants
        )
        who = ", ".join(had)
        return f"no scrub has shown yet that its previous pods have ended ({who})"
    return ""
