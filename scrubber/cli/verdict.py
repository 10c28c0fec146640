"""What came of scrubs and resets: a line for each device, every property of a single one, and one exit code for all.

Promise: 0 is given only for what was proved; of a reset, only if the device is not quarantined afterwards. A device whose
end was not heard is reported as such, and never counts as clean.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import typer

from scrubber.cli.causes import OUT, leads_back, out_of_service, said
from scrubber.cli.exits import Exit, exit_for, worst
from scrubber.cli.following import Course, Ended, Followed
from scrubber.cli.output import Answer, Column, Output, Section, complain, emit, tell
from scrubber.domain.errors import Away, NotPermitted

if TYPE_CHECKING:
    from scrubber.api import scrubber_pb2 as pb

__all__ = ["amount", "conclude", "exit_code", "going_on", "word"]

_BY_WEIGHT = ("fault", "dirty", "warning", "note")


def word(course: Course) -> str:
    """How it ended in one word, or that it has not: ``under-way``, or ``unknown`` when nothing was heard."""
    if course.result is not None:
        if course.result.scrub.outcome == "passed" and not _proved(course.result):
            return "not-certified"
        return course.result.scrub.outcome or "unknown"
    if course.error is not None:
        return "refused" if exit_for(course.error) in (Exit.REFUSED, Exit.USAGE) else "unknown"
    return "unknown" if course.progress is None else "under-way"


def exit_code(followed: Followed, doing: str) -> Exit:
    """The worst of all devices: 130, else 1, 2, 3, 4, and 0 only if each was proved clean.

    Args:
        doing: "scrub" or "reset". A device that stays quarantined after its reset is a negative verdict.
    """
    if followed.ended is Ended.INTERRUPTED:
        return Exit.INTERRUPTED
    return worst(_code(course, followed.ended, doing) for course in followed.courses)


def _code(course: Course, ended: Ended, doing: str) -> Exit:
    if course.error is not None:
        return exit_for(course.error)
    match word(course):
        case "passed":
            return Exit.NEGATIVE if _reset_in_vain(course, doing) else Exit.OK
        case "held-up":
            return Exit.REFUSED
        case "under-way":
            return Exit.TIMED_OUT if ended is Ended.TIME_OVER else Exit.OK
        case _:
            return Exit.NEGATIVE


def _proved(result: pb.ScrubResult) -> bool:
    """Checks alone are no certificate's worth; whatever else passed has one."""
    return result.scrub.path == "fast" or result.HasField("certificate")


def conclude(followed: Followed, doing: str, output: Output, *, single: bool, waited: bool) -> NoReturn:
    """Tell what came of it, and end the command.

    Args:
        doing: "scrub" or "reset".
        single: the command named one device, so that the data are one object; else a list.
        waited: whether the end was waited for; if not, that it began is all there is to tell.

    Raises:
        ScrubberError: why nothing was done to a single device, or to any.
        typer.Exit: in all other cases, with the exit code.
    """
    courses = followed.courses
    if courses and courses[0].error is not None and (single or _same_for_all(courses)):
        raise courses[0].error
    if followed.ended is not Ended.ALL_SAID:
        for course in courses:
            if course.result is None and course.error is None:
                tell(going_on(course, doing), "Note: " if followed.ended is Ended.INTERRUPTED else "Error: ")
    if not single or courses[0].result is not None or (_begun(courses[0]) and not waited):
        emit(_summary(courses, followed.ended, doing, single=single), output)
    for course in courses:
        if sentence := _reset_in_vain(course, doing):
            complain(sentence)
    raise typer.Exit(exit_code(followed, doing))


def _same_for_all(courses: Sequence[Course]) -> bool:
    """Whether it is the service, and no device, that keeps every one of them from being begun."""
    alike = len({str(course.error) for course in courses}) == 1 and not any(map(_begun, courses))
    return alike and (len(courses) > 1 or isinstance(courses[0].error, Away | NotPermitted))


def _begun(course: Course) -> bool:
    return course.progress is not None or course.result is not None


def _summary(courses: Sequence[Course], ended: Ended, doing: str, *, single: bool) -> Answer:
    """A line for each device, and below a single one all of its properties."""
    # Of what goes on while nobody waits, a sentence has told already.
    told = [course for course in courses if ended is Ended.ALL_SAID or course.result or course.error]
    data = [_data(course) for course in courses]
    alone = courses[0].result if single else None
    return Answer(
        data=data[0] if single else data,
        names=[name for course in courses if (name := _scrub(course))],
        header=(
            Column("INDEX"),
            Column("DEVICE", ids=True),
            Column("OUTCOME"),
            Column("TOOK", drop=1),
            Column("FOUND", least=20, below=True),
            Column("CERTIFICATE", drop=2, ids=True),
        ),
        rows=[_line(course) for course in told],
        empty="None of them has ended yet." if courses else "No device is idle.",
        sections=() if alone is None else [Section("The scrub", (), list(_properties(alone)))],
        notes=[
            sentence for course in courses for sentence in (_unexplained(course), _still_out(course, doing)) if sentence
        ],
        kind="ScrubResult",
    )


def _unexplained(course: Course) -> str:
    """What a person has to look into although the device is clean now; empty for nothing."""
    if course.result is None or not course.result.unexplained:
        return ""
    called = _index(course) or course.device
    return (
        f"Device {called}: {course.result.unexplained} It is looked into as docs/runbooks/ScrubberResidueAfterCertificate.md "
        f"says; scrubber history --device {called} --event residue.unexplained shows each time."
    )


def _still_out(course: Course, doing: str) -> str:
    """Why nobody is handed the device although its scrub has ended; empty where somebody may be, or an error says it."""
    result = course.result
    if result is None or not result.HasField("device") or _reset_in_vain(course, doing):
        return ""
    return out_of_service(result.device)


def _reset_in_vain(course: Course, doing: str) -> str:
    """Why a reset that passed did not bring the device back, and what does; empty if it did, or was no reset."""
    result = course.result
    if doing != "reset" or result is None or word(course) != "passed" or result.device.health not in OUT:
        return ""
    device = result.device
    why = f"{said(device.cause)} {leads_back(device)}" if device.HasField("cause") else f"Its state is {device.state}."
    return f"Device {device.index or device.id} was reset and proved clean, and is still {device.health}: {why}"


def _data(course: Course) -> dict[str, Any]:
    from scrubber.api import scrubber_pb2 as pb
    from scrubber.cli import shapes

    result, progress = course.result, course.progress
    scrub = None if result is None else shapes.scrub(result.scrub)
    if scrub is None and progress is not None:
        scrub = shapes.scrub(pb.Scrub(id=progress.scrub, device=progress.device))
    certified = result is not None and result.HasField("certificate")
    described = result is not None and result.HasField("device")
    return {
        "target": course.device,
        "scrub": scrub,
        "certificate": shapes.certificate(result.certificate) if result is not None and certified else None,
        "device": shapes.device(result.device) if result is not None and described else None,
        "unexplained": (result.unexplained or None) if result is not None else None,
        "error": None if course.error is None else {"code": course.error.code, "sentence": str(course.error)},
    }


def _scrub(course: Course) -> str:
    if course.result is not None:
        return course.result.scrub.id
    return "" if course.progress is None else course.progress.scrub


def _line(course: Course) -> Sequence[str]:
    result = course.result
    return (
        _index(course) or "-",
        course.device,
        word(course),
        "-" if result is None else _took(result.scrub),
        _found(course),
        result.certificate.id if result is not None and result.HasField("certificate") else "-",
    )


def _index(course: Course) -> str:
    if course.result is not None and course.result.HasField("device"):
        return course.result.device.index
    # What a device is called is its index, unless its id begins so.
    called = "" if course.device.startswith(course.target.called) else course.target.called
    return course.target.index or called


def _took(scrub: pb.Scrub) -> str:
    return f"{max(0.0, scrub.ended - scrub.started):.1f} s" if scrub.ended else "-"


def _found(course: Course) -> str:
    if course.error is not None:
        return str(course.error)
    if course.result is None:
        said = "nothing was heard of it"
        if course.progress is not None:
            said = f"scrub {course.progress.scrub} {'was joined' if course.progress.joined else 'began'} and goes on"
        return said
    scrub = course.result.scrub
    if scrub.outcome == "passed":
        return _cleared(scrub)
    return _worst_finding(scrub) or f"scrub {scrub.id} came to no verdict"


def _cleared(scrub: pb.Scrub) -> str:
    from scrubber.cli import shapes

    measured = {
        each.step: found for each in scrub.steps if isinstance(found := shapes.embedded(each.measured_json), dict)
    }
    cleared = _number(measured.get("memory", {}).get("cleared_bytes"))
    residue = sum(_number(each.get("residue_bytes")) for each in measured.values())
    if not cleared:
        return "checks only" if scrub.path == "fast" else "no memory cleared"
    # Residue is counted only where the policy wants that: none is not a thing to claim here.
    return f"{amount(cleared)} cleared" + (f", {amount(residue)} of residue" if residue else "")


def _number(value: object) -> int:
    return int(value) if isinstance(value, int | float) and math.isfinite(value) else 0


def _worst_finding(scrub: pb.Scrub) -> str:
    findings = [each for step in scrub.steps for each in step.findings]
    for weight in _BY_WEIGHT:
        for each in findings:
            if each.severity == weight:
                return each.sentence
    return ""


def amount(count: float) -> str:
    """Bytes for people, to three figures or so: ``12 bytes``, ``64 MiB``, ``79.2 GiB``."""
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
    yield ("device", scrub.device)
    yield ("scrub", scrub.id)
    yield ("path", scrub.path)
    yield ("certificate", certificate.id or "none")
    for step in scrub.steps:
        yield ("step", f"{step.step}: {step.verdict} ({step.seconds:.3f} s)")
        yield from (("finding", f"{each.severity}: {each.sentence}") for each in step.findings)
    if result.HasField("certificate"):
        yield from (("covered", each) for each in certificate.covered)
        yield from (("not covered", each) for each in certificate.not_covered)
    if result.HasField("device"):
        yield ("state", result.device.state)
        if result.device.HasField("cause"):
            yield ("cause", f"{result.device.cause.code}: {result.device.cause.sentence}")
            yield ("way back", leads_back(result.device))


def going_on(course: Course, doing: str) -> str:
    """What is told of a device whose end nobody waits for any more.

    Args:
        doing: "scrub" or "reset".
    """
    short = _index(course) or course.device
    if course.progress is None:
        doubt = "reset" if doing == "reset" else "scrubbed"
        return (
            f"The service said nothing about device {course.target} in time; "
            f"scrubber device {short} shows whether it is being {doubt}."
        )
    # A scrub that a reset is part of can be joined as any other; the same reset again would be refused.
    return (
        f"The {doing} {course.progress.scrub} of device {course.device} goes on; scrubber scrub {short} joins it, "
        f"scrubber device {short} shows how it ends."
    )
