"""``scrubber scrub``: scrub a device now, and wait for the verdict.

Leaving early never ends the scrub: it goes on in the service, and the next caller joins it.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Protocol

import typer

from scrubber.cli.asking import run
from scrubber.cli.exits import Exit
from scrubber.cli.options import DeviceArgument, OutputOption, SocketOption, seconds
from scrubber.cli.output import Answer, Output, complain, emit, plain
from scrubber.domain.errors import Away

if TYPE_CHECKING:
    from scrubber.api import scrubber_pb2 as pb

__all__ = ["add_commands"]


class ScrubPath(StrEnum):
    FAST = "fast"
    SLOW = "slow"


PathOption = Annotated[
    ScrubPath,
    typer.Option("--path", envvar="SCRUBBER_PATH", help="fast: checks only; slow: everything, the memory included."),
]
WaitOption = Annotated[
    bool, typer.Option("--wait/--no-wait", envvar="SCRUBBER_WAIT", help="Wait until the scrub has ended.")
]
TimeoutOption = Annotated[
    float | None,
    typer.Option(
        "--timeout",
        envvar="SCRUBBER_TIMEOUT",
        metavar="TIME",
        parser=seconds,
        help="How long to wait, such as 30s; then exit with 4 while the scrub goes on.",
        show_default="until it has ended",
    ),
]


def add_commands(app: typer.Typer) -> None:
    app.command()(scrub)


def scrub(
    device: DeviceArgument,
    path: PathOption = ScrubPath.SLOW,
    wait: WaitOption = True,
    timeout: TimeoutOption = None,
    socket: SocketOption = Path("/run/scrubber"),
    output: OutputOption = Output.TABLE,
) -> None:
    """Scrub a device that nobody has, or join the scrub under way. Exits with 0 only if it was proved clean."""
    watched = run(_watch(socket, device, path, wait=wait, timeout=timeout))
    if watched.result is not None:
        emit(_verdict(watched.result), output)
        raise typer.Exit(_exit_for(watched.result.scrub.outcome))
    if watched.progress is None:
        complain(
            f"The service said nothing about device {device} in time; scrubber devices shows whether it is scrubbed."
        )
        raise typer.Exit(Exit.NEGATIVE)
    if wait:
        complain(
            f"Scrub {watched.progress.scrub} of device {watched.progress.device} is still under way and goes on; "
            "the same command joins it, scrubber devices shows its end."
        )
        raise typer.Exit(Exit.TIMED_OUT)
    emit(_started(watched.progress), output)


@dataclass(frozen=True, slots=True)
class _Watched:
    """What was seen of a scrub: its result, or the last that was heard before nobody listened any more."""

    progress: pb.ScrubProgress | None = None
    result: pb.ScrubResult | None = None


async def _watch(socket: Path, device: str, path: ScrubPath, *, wait: bool, timeout: float | None) -> _Watched:
    from scrubber.api.client import AdminClient

    progress: pb.ScrubProgress | None = None
    display = _display()
    async with AdminClient(socket) as client:
        try:
            async with asyncio.timeout(timeout):
                async for update in client.scrub(device, path.value):
                    if update.HasField("result"):
                        return _Watched(progress, update.result)
                    progress = update.progress
                    if not wait:
                        return _Watched(progress)
                    display.show(progress)
        except TimeoutError:
            return _Watched(progress)
        finally:
            display.close()
    raise Away(
        f"The service ended its answer before the scrub of device {device} had ended; scrubber devices shows it."
    )


def _exit_for(outcome: str) -> Exit:
    match outcome:
        case "passed":
            return Exit.OK
        case "held-up":
            return Exit.REFUSED
        case _:
            return Exit.NEGATIVE


def _started(progress: pb.ScrubProgress) -> Answer:
    """The answer of ``--no-wait``: the same shape, with what is not known yet as null."""
    from scrubber.api import scrubber_pb2 as pb
    from scrubber.cli import shapes

    under_way = shapes.scrub(pb.Scrub(id=progress.scrub, device=progress.device))
    return Answer(
        data={"scrub": under_way, "certificate": None, "device": None},
        names=[progress.scrub],
        header=(),
        rows=[
            ("scrub", progress.scrub),
            ("device", progress.device),
            ("state", "joined the scrub under way" if progress.joined else "started"),
        ],
    )


def _verdict(result: pb.ScrubResult) -> Answer:
    from scrubber.cli import shapes

    has_certificate = result.HasField("certificate")
    return Answer(
        data={
            "scrub": shapes.scrub(result.scrub),
            "certificate": shapes.certificate(result.certificate) if has_certificate else None,
            "device": shapes.device(result.device) if result.HasField("device") else None,
        },
        names=[result.scrub.id],
        header=(),
        rows=list(_properties(result)),
    )


def _properties(result: pb.ScrubResult) -> Sequence[tuple[str, str]]:
    scrub, certificate = result.scrub, result.certificate
    rows = [
        ("scrub", scrub.id),
        ("device", scrub.device),
        ("path", scrub.path),
        ("outcome", scrub.outcome),
        ("seconds", f"{max(0.0, scrub.ended - scrub.started):.3f}"),
    ]
    for step in scrub.steps:
        rows.append(("step", f"{step.step}: {step.verdict} ({step.seconds:.3f} s)"))
        rows.extend(("finding", f"{each.severity}: {each.sentence}") for each in step.findings)
    if result.HasField("certificate"):
        rows.append(("certificate", certificate.id))
        rows.extend(("covered", each) for each in certificate.covered)
        rows.extend(("not covered", each) for each in certificate.not_covered)
    else:
        rows.append(("certificate", "none"))
    if result.HasField("device"):
        rows.append(("state", result.device.state))
    return rows


class _Display(Protocol):
    """Where progress goes."""

    def show(self, progress: pb.ScrubProgress) -> None: ...

    def close(self) -> None: ...


class _Nowhere:
    """Standard error is not a terminal: a script reads the verdict only."""

    def show(self, progress: pb.ScrubProgress) -> None:
        pass

    def close(self) -> None:
        pass


class _Terminal:
    """A bar for each phase of each step, on standard error."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import Progress, TaskID

        self._bars = Progress(console=Console(stderr=True), transient=True)
        self._tasks: dict[tuple[str, str], TaskID] = {}
        self._bars.start()

    def show(self, progress: pb.ScrubProgress) -> None:
        key = (progress.step, progress.phase)
        if key not in self._tasks:
            words = " ".join(plain(part) for part in ("joined" if progress.joined else "", *key) if part)
            self._tasks[key] = self._bars.add_task(words.replace("[", "("), total=progress.total_bytes or None)
        self._bars.update(self._tasks[key], completed=progress.done_bytes)

    def close(self) -> None:
        self._bars.stop()


def _display() -> _Display:
    return _Terminal() if sys.stderr.isatty() else _Nowhere()
