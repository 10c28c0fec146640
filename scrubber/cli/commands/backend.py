"""``scrubber backend``: checks the program of a command backend before the service uses it.

No request is sent to the service: an administrator who writes a program runs this on their own machine.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from scrubber.cli.app import App
from scrubber.cli.client_run import run
from scrubber.cli.confirmation import NoInputOption, YesOption, confirm
from scrubber.cli.exit_codes import ExitCode
from scrubber.cli.options import NoHeadersOption, OutputOption, device_name, seconds
from scrubber.cli.render.output import CommandResult, OutputColumn, OutputFormat, print_result

if TYPE_CHECKING:
    from scrubber.backend_check import ContractCheck

__all__ = ["app"]

app = App("Check the program of a command backend.")


@app.command()
def check(
    config: Annotated[
        Path,
        typer.Option(
            "--config",
            envvar="SCRUBBER_CONFIG",
            metavar="FILE",
            help="Configuration file of the command backend: program, deadlines, environment.",
        ),
    ],
    erase: Annotated[
        str | None,
        typer.Option(
            "--erase",
            metavar="DEVICE",
            parser=device_name,
            help="Also reset and diagnose this device, clear it twice, and restore its settings; all data on it is lost. "
            "UUID, unique prefix of a UUID, or index.",
            show_default="no device is touched",
        ),
    ] = None,
    timeout: Annotated[
        float,
        typer.Option(
            "--timeout",
            metavar="TIME",
            parser=seconds,
            help="How long one reset, diagnosis or erasure may take.",
            show_default="10m",
        ),
    ] = 600.0,
    state_dir: Annotated[
        Path,
        typer.Option(
            "--state-dir",
            envvar="SCRUBBER_STATE_DIR",
            metavar="DIR",
            help="State directory of the service, which must be stopped for --erase.",
        ),
    ] = Path("/var/lib/scrubber"),
    yes: YesOption = False,
    no_input: NoInputOption = False,
    output: OutputOption = OutputFormat.TABLE,
    no_headers: NoHeadersOption = False,
) -> None:
    """Check whether a program fulfils the contract of every backend.

    Without --erase, only queries are made.

    Each check ends as ok, skipped, missing or slow (more than half of its deadline), or fails: wrong (the program),
    fault (the device), held, timed-out or unanswered.

    Exit status: 0; 1 if a check failed; 2 for an invalid file or device; 3 while a service runs; 5 if something is only
    missing or slow.
    """
    from scrubber.backend_check import check_program
    from scrubber.config.command_file import CommandFileSource

    source = CommandFileSource(config)
    if erase is not None:
        confirm(
            f"{source.current().program} resets and clears device {erase}: everything on it is lost, also what belongs to "
            "a tenant.",
            yes=yes,
            no_input=no_input,
        )
    checks = run(check_program(source, erase=erase, state_dir=state_dir.absolute(), deadline=timeout))
    print_result(_answer(str(source.current().program), checks), output, no_headers=no_headers)
    raise typer.Exit(_exit_for(checks))


def _exit_for(checks: Sequence[ContractCheck]) -> ExitCode:
    if any(each.outcome.is_error for each in checks):
        return ExitCode.FAILED
    return ExitCode.WARNINGS if any(each.outcome.is_warning for each in checks) else ExitCode.OK


_VERDICTS = {ExitCode.OK: "ok", ExitCode.WARNINGS: "warning", ExitCode.FAILED: "error"}


def _answer(program: str, checks: Sequence[ContractCheck]) -> CommandResult:
    return CommandResult(
        data={
            "program": program,
            "verdict": _VERDICTS[_exit_for(checks)],
            "checks": [_check_data(each) for each in checks],
        },
        names=[each.name for each in checks if each.outcome.is_error or each.outcome.is_warning],
        header=(
            OutputColumn("CHECK"),
            OutputColumn("DEVICE"),
            OutputColumn("RESULT"),
            OutputColumn("SECONDS"),
            OutputColumn("MESSAGE", min_width=30),
        ),
        rows=[
            (
                each.name,
                each.device or "-",
                each.outcome.value,
                f"{each.seconds:.1f}" if each.seconds else "-",
                each.message,
            )
            for each in checks
        ],
        notes=(_summary(checks),),
        kind="BackendCheck",
    )


def _check_data(check: ContractCheck) -> dict[str, Any]:
    return {
        "name": check.name,
        "deviceID": check.device or None,
        "result": check.outcome.value,
        "message": check.message,
        "seconds": round(check.seconds, 3) or None,
    }


def _summary(checks: Sequence[ContractCheck]) -> str:
    errors = sum(each.outcome.is_error for each in checks)
    warnings = sum(each.outcome.is_warning for each in checks)
    return f"Checks: {len(checks)}; {errors} failed, {warnings} missing or slow."
