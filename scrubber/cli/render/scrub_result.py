"""Results of scrubs and resets: a line for each device, all properties of a single one, and one exit code for all.

Invariants: 0 is returned only for a proved result; after a reset, only if the device is not quarantined. A device whose
result was not received is reported as such, and never counts as clean.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import typer

from scrubber.cli.exit_codes import ExitCode, exit_code_for, worst_exit_code
from scrubber.cli.render.device_facts import OUT_OF_SERVICE, cause_text, out_of_service_text, recovery_text
from scrubber.cli.render.output import (
    CommandResult,
    OutputColumn,
    OutputFormat,
    TableSection,
    print_error,
    print_message,
    print_result,
)
from scrubber.cli.scrub_updates import FollowEnd, FollowResult, TargetStatus
from scrubber.domain.errors import PermissionDenied, Unavailable

if TYPE_CHECKING:
    from scrubber.api import scrubber_pb2 as pb

__all__ = ["exit_code", "format_bytes", "outcome_word", "report_and_exit", "still_running_text"]

_SEVERITIES = ("fault", "blocking", "warning", "note")


def outcome_word(status: TargetStatus) -> str:
    """Return the outcome in one word: ``under-way`` before the end, ``unknown`` when no status was received."""
    if status.result is not None:
        if status.result.scrub.outcome == "passed" and not _is_proved(status.result):
            return "not-certified"
        return status.result.scrub.outcome or "unknown"
    if status.error is not None:
        return "refused" if exit_code_for(status.error) in (ExitCode.REFUSED, ExitCode.USAGE) else "unknown"
    return "unknown" if status.progress is None else "under-way"


def exit_code(follow_result: FollowResult, operation: str) -> ExitCode:
    """Return the worst exit code of all devices: 130, else 1, 2, 3, 4, and 0 only if each was proved clean.

    Args:
        operation: "scrub" or "reset". A device that stays quarantined after its reset is a negative verdict.
    """
    if follow_result.end is FollowEnd.INTERRUPTED:
        return ExitCode.INTERRUPTED
    return worst_exit_code(_target_exit_code(status, follow_result.end, operation) for status in follow_result.statuses)


def _target_exit_code(status: TargetStatus, end: FollowEnd, operation: str) -> ExitCode:
    if status.error is not None:
        return exit_code_for(status.error)
    match outcome_word(status):
        case "passed":
            return ExitCode.FAILED if _ineffective_reset_text(status, operation) else ExitCode.OK
        case "blocked":
            return ExitCode.REFUSED
        case "under-way":
            return ExitCode.TIMED_OUT if end is FollowEnd.TIMED_OUT else ExitCode.OK
        case _:
            return ExitCode.FAILED


def _is_proved(result: pb.ScrubResult) -> bool:
    """Return whether the result is proved. The fast path issues no certificate; any other passed scrub has one."""
    return result.scrub.path == "fast" or result.HasField("certificate")


def report_and_exit(
    follow_result: FollowResult, operation: str, output: OutputFormat, *, single: bool, waited: bool, no_headers: bool
) -> NoReturn:
    """Report the results, and exit.

    Args:
        operation: "scrub" or "reset".
        single: the command named one device, so that the data is one object; else a list.
        waited: whether the command waited for the end; if not, only the start can be reported.
        no_headers: omit the titles of the table's columns.

    Raises:
        ScrubberError: why nothing was done to a single device, or to any.
        typer.Exit: in all other cases, with the exit code.
    """
    statuses = follow_result.statuses
    if statuses and statuses[0].error is not None and (single or _has_same_error(statuses)):
        raise statuses[0].error
    if follow_result.end is not FollowEnd.COMPLETED:
        for status in statuses:
            if status.result is None and status.error is None:
                print_message(
                    still_running_text(status, operation),
                    "Note: " if follow_result.end is FollowEnd.INTERRUPTED else "Error: ",
                )
    if not single or statuses[0].result is not None or (_has_begun(statuses[0]) and not waited):
        print_result(_summary(statuses, follow_result.end, operation, single=single), output, no_headers=no_headers)
    for status in statuses:
        if message := _ineffective_reset_text(status, operation):
            print_error(message)
    raise typer.Exit(exit_code(follow_result, operation))


def _has_same_error(statuses: Sequence[TargetStatus]) -> bool:
    """Return whether the service, not a single device, is the reason why none of them started."""
    same = len({str(status.error) for status in statuses}) == 1 and not any(map(_has_begun, statuses))
    return same and (len(statuses) > 1 or isinstance(statuses[0].error, Unavailable | PermissionDenied))


def _has_begun(status: TargetStatus) -> bool:
    return status.progress is not None or status.result is not None


def _summary(statuses: Sequence[TargetStatus], end: FollowEnd, operation: str, *, single: bool) -> CommandResult:
    """Return a row for each device, and all properties of a single one."""
    # A message has already reported the devices that are still in progress.
    reported = [status for status in statuses if end is FollowEnd.COMPLETED or status.result or status.error]
    data = [_data(status) for status in statuses]
    alone = statuses[0].result if single else None
    return CommandResult(
        data=data[0] if single else data,
        names=[name for status in statuses if (name := _scrub(status))],
        header=(
            OutputColumn("INDEX"),
            OutputColumn("DEVICE", holds_ids=True),
            OutputColumn("OUTCOME"),
            OutputColumn("DURATION"),
            OutputColumn("DETAILS", min_width=20),
            OutputColumn("CERTIFICATE", holds_ids=True, wide=True),
        ),
        rows=[_target_row(status) for status in reported],
        empty_message="No scrub has finished yet." if statuses else "No device is idle.",
        sections=() if alone is None else [TableSection("Scrub", (), list(_properties(alone)))],
        notes=[
            message
            for status in statuses
            for message in (_unexplained_note(status), _out_of_service_note(status, operation))
            if message
        ],
        kind="ScrubResult",
    )


def _unexplained_note(status: TargetStatus) -> str:
    """Return what an operator must investigate although the device is clean now; empty for nothing."""
    if status.result is None or not status.result.unexplained_residue:
        return ""
    name = _device_index(status) or status.device_id
    return (
        f"Device {name}: {status.result.unexplained_residue} Follow docs/runbooks/ScrubberResidueAfterCertificate.md; run "
        f"`scrubber history --device {name} --event residue.unexplained` to list every case."
    )


def _out_of_service_note(status: TargetStatus, operation: str) -> str:
    """Return why the device is not handed over after its scrub; empty if it is, or if an error reports it."""
    result = status.result
    if result is None or not result.HasField("device") or _ineffective_reset_text(status, operation):
        return ""
    return out_of_service_text(result.device)


def _ineffective_reset_text(status: TargetStatus, operation: str) -> str:
    """Return why a reset that passed did not return the device to service, and what does; empty in all other cases."""
    result = status.result
    if (
        operation != "reset"
        or result is None
        or outcome_word(status) != "passed"
        or result.device.health not in OUT_OF_SERVICE
    ):
        return ""
    device = result.device
    why = (
        f"{cause_text(device.cause)} {recovery_text(device)}"
        if device.HasField("cause")
        else f"Its state is {device.state}."
    )
    return f"Device {device.index or device.id} was reset and proved clean, but is still {device.health}: {why}"


def _data(status: TargetStatus) -> dict[str, Any]:
    from scrubber.api import scrubber_pb2 as pb
    from scrubber.cli.render import json_objects

    result, progress = status.result, status.progress
    scrub = None if result is None else json_objects.scrub(result.scrub)
    if scrub is None and progress is not None:
        scrub = json_objects.scrub(pb.Scrub(id=progress.scrub_id, device_id=progress.device_id))
    certified = result is not None and result.HasField("certificate")
    described = result is not None and result.HasField("device")
    return {
        "target": status.device_id,
        "scrub": scrub,
        "certificate": json_objects.certificate(result.certificate) if result is not None and certified else None,
        "device": json_objects.device(result.device) if result is not None and described else None,
        "unexplainedResidue": (result.unexplained_residue or None) if result is not None else None,
        "error": None if status.error is None else {"code": status.error.code, "message": str(status.error)},
    }


def _scrub(status: TargetStatus) -> str:
    if status.result is not None:
        return status.result.scrub.id
    return "" if status.progress is None else status.progress.scrub_id


def _target_row(status: TargetStatus) -> Sequence[str]:
    result = status.result
    return (
        _device_index(status) or "-",
        status.device_id,
        outcome_word(status),
        "-" if result is None else _duration_text(result.scrub),
        _finding_text(status),
        result.certificate.id if result is not None and result.HasField("certificate") else "-",
    )


def _device_index(status: TargetStatus) -> str:
    if status.result is not None and status.result.HasField("device"):
        return status.result.device.index
    # A device is called by its index, unless the requested name is a prefix of its id.
    name = "" if status.device_id.startswith(status.target.requested_name) else status.target.requested_name
    return status.target.index or name


def _duration_text(scrub: pb.Scrub) -> str:
    return f"{max(0.0, scrub.finished_at - scrub.started_at):.1f} s" if scrub.finished_at else "-"


def _finding_text(status: TargetStatus) -> str:
    if status.error is not None:
        return str(status.error)
    if status.result is None:
        if status.progress is None:
            return "no status received"
        begin = "joined" if status.progress.joined else "started"
        return f"{begin} scrub {status.progress.scrub_id}, which continues"
    scrub = status.result.scrub
    if scrub.outcome == "passed":
        return _cleared_text(scrub)
    return _worst_finding(scrub) or f"scrub {scrub.id} has no verdict"


def _cleared_text(scrub: pb.Scrub) -> str:
    from scrubber.cli.render import json_objects

    measured = {
        each.step: found
        for each in scrub.steps
        if isinstance(found := json_objects.parse_embedded_json(each.measurements_json), dict)
    }
    cleared = _number(measured.get("memory", {}).get("cleared_bytes"))
    residue = sum(_number(each.get("residue_bytes")) for each in measured.values())
    if not cleared:
        return "checks only" if scrub.path == "fast" else "no memory cleared"
    # Residue is counted only where the policy requires it, so its absence must not be claimed here.
    return f"{format_bytes(cleared)} cleared" + (f", {format_bytes(residue)} of residue" if residue else "")


def _number(value: object) -> int:
    return int(value) if isinstance(value, int | float) and math.isfinite(value) else 0


def _worst_finding(scrub: pb.Scrub) -> str:
    findings = [each for step in scrub.steps for each in step.findings]
    for weight in _SEVERITIES:
        for each in findings:
            if each.severity == weight:
                return each.message
    return ""


def format_bytes(count: float) -> str:
    """Format bytes with about three digits: ``12 bytes``, ``64 MiB``, ``79.2 GiB``."""
    if count < 1024:
        return f"{count:.0f} bytes" if round(count) != 1 else "1 byte"
    units = ("KiB", "MiB", "GiB", "TiB")
    power = 0
    count /= 1024
    while count >= 1023.95 and power + 1 < len(units):
        count /= 1024
        power += 1
    return f"{count:.1f}".removesuffix(".0") + f" {units[power]}"


def _properties(result: pb.ScrubResult) -> Iterator[tuple[str, str]]:
    scrub, certificate = result.scrub, result.certificate
    yield ("device", scrub.device_id)
    yield ("scrub", scrub.id)
    yield ("path", scrub.path)
    yield ("certificate", certificate.id or "none")
    for step in scrub.steps:
        yield ("step", f"{step.step}: {step.verdict} ({step.duration_seconds:.3f} s)")
        yield from (("finding", f"{each.severity}: {each.message}") for each in step.findings)
    if result.HasField("certificate"):
        yield from (("covered", each) for each in certificate.covered)
        yield from (("not covered", each) for each in certificate.not_covered)
    if result.HasField("device"):
        yield ("state", result.device.state)
        if result.device.HasField("cause"):
            yield ("cause", f"{result.device.cause.code}: {result.device.cause.message}")
            yield ("recovery", recovery_text(result.device))


def still_running_text(status: TargetStatus, operation: str) -> str:
    """Return the message for a device that is no longer followed before its end.

    Args:
        operation: "scrub" or "reset".
    """
    name = _device_index(status) or status.device_id
    if status.progress is None:
        action = "reset" if operation == "reset" else "scrubbed"
        return (
            f"The service has not reported on device {status.target} yet. Run `scrubber device {name}` to see whether it is "
            f"being {action}."
        )
    # A scrub that belongs to a reset can be joined like any other; repeating the reset would be refused.
    return (
        f"The {operation} {status.progress.scrub_id} of device {status.device_id} continues. Run `scrubber scrub {name}` to "
        f"wait for it, or `scrubber device {name}` to see its result."
    )
