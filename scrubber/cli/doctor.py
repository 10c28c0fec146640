"""``scrubber doctor``: whether this node is set up so that what the service promises holds.

Most of it is outside the service: a container toolkit that lets any pod name itself a GPU undoes every hand-over. So
this looks for itself, works without the service, changes nothing, and says for each thing that is wrong what to do.

A check is a function of :class:`Node` in :data:`CHECKS`; to add one, write it in :mod:`scrubber.cli.checks` and put it
there.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated

import typer

from scrubber.cli.checks.finding import Check, Examination, Level, Node, ServiceSaid
from scrubber.cli.checks.gpus import device_nodes, driver, persistenced, scrub_on_free
from scrubber.cli.checks.pods import cdi_annotations, toolkit
from scrubber.cli.checks.surroundings import kubelet, pid_namespace, service
from scrubber.cli.exits import Exit
from scrubber.cli.options import KubeletDirOption, OutputOption, SocketOption
from scrubber.cli.output import Answer, Output, emit
from scrubber.domain.errors import ScrubberError

__all__ = ["CHECKS", "Check", "Level", "Node", "ServiceSaid", "add_commands", "examine"]

ToolkitConfigOption = Annotated[
    Path | None,
    typer.Option(
        "--toolkit-config",
        envvar="SCRUBBER_TOOLKIT_CONFIG",
        metavar="FILE",
        help="The container toolkit's configuration.",
        show_default="where its packages and the GPU Operator put it",
    ),
]
NodeRootOption = Annotated[
    Path,
    typer.Option(
        "--node-root",
        envvar="SCRUBBER_NODE_ROOT",
        metavar="DIR",
        help="Where the node's root directory is seen from here; every path but --socket is taken below it.",
    ),
]

CHECKS: tuple[Examination, ...] = (
    service,
    toolkit,
    cdi_annotations,
    driver,
    device_nodes,
    scrub_on_free,
    persistenced,
    kubelet,
    pid_namespace,
)
"""Every check, in the order in which people read them."""


def examine(node: Node) -> tuple[Check, ...]:
    """What every check found about ``node``. Raises nothing: what cannot be looked at is a finding."""
    return tuple(found for check in CHECKS for found in check(node))


def add_commands(app: typer.Typer) -> None:
    app.command()(doctor)


def doctor(
    socket: SocketOption = Path("/run/scrubber"),
    toolkit_config: ToolkitConfigOption = None,
    kubelet_dir: KubeletDirOption = Path("/var/lib/kubelet"),
    node_root: NodeRootOption = Path("/"),
    output: OutputOption = Output.TABLE,
) -> None:
    """Look for what would undo a hand-over on this node. Exits with 0 if all is well, 1 on an error, 5 on warnings only."""
    node = Node(
        service=asyncio.run(_service_said(socket)),
        root=node_root.absolute(),
        kubelet_dir=kubelet_dir.absolute(),
        toolkit_configs=() if toolkit_config is None else (toolkit_config.absolute(),),
    )
    checks = examine(node)
    emit(_answer(checks), output)
    raise typer.Exit(_exit_for(checks))


async def _service_said(socket: Path) -> ServiceSaid:
    from scrubber.api.client import ReadClient

    try:
        async with ReadClient(socket) as client:
            info = await client.info()
    except ScrubberError as error:
        return ServiceSaid(refusal=str(error))
    return ServiceSaid(
        version=info.version,
        backend=info.backend,
        policy=info.policy,
        enforcement=info.enforcement,
        ledger=info.ledger,
    )


def _worst(checks: Sequence[Check]) -> Level:
    levels = {check.level for check in checks}
    return next((level for level in (Level.ERROR, Level.WARNING) if level in levels), Level.OK)


def _exit_for(checks: Sequence[Check]) -> Exit:
    return {Level.OK: Exit.OK, Level.WARNING: Exit.WARNINGS, Level.ERROR: Exit.NEGATIVE}[_worst(checks)]


def _answer(checks: Sequence[Check]) -> Answer:
    return Answer(
        data={
            "verdict": _worst(checks).value,
            "checks": [
                {
                    "name": check.name,
                    "level": check.level.value,
                    "sentence": check.sentence,
                    "remedy": check.remedy or None,
                }
                for check in checks
            ],
        },
        names=[check.name for check in checks if check.level is not Level.OK],
        header=("LEVEL", "CHECK", "FOUND"),
        rows=[row for check in checks for row in _rows(check)],
    )


def _rows(check: Check) -> Iterator[tuple[str, str, str]]:
    yield (check.level.value, check.name, check.sentence)
    if check.remedy:
        yield ("", "", f"To do: {check.remedy}")
