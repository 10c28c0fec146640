"""What a command does to a device: clear it, diagnose it, reset it. The fence around it is the service's.

Before and after the command, the service looks for holders itself, and the command's numbers are passed on as claims.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

from scrubber.adapters.command.answers import Answer, Verb
from scrubber.adapters.command.holders import CommandHolders
from scrubber.adapters.command.runner import CommandRunner
from scrubber.domain.device import Device
from scrubber.domain.diagnostics import DiagnosticCheck, DiagnosticLevel
from scrubber.domain.errors import DeviceBusy
from scrubber.domain.reset_plan import ResetPlan
from scrubber.domain.telemetry import Holder, HolderKind
from scrubber.ports.device import EraseProgress, EraseReport, EraseRequest

__all__ = ["CommandResetter", "CommandWork"]

_NO_RESET = "The command has no reset for this device."
_RESULTS = ("pass", "fail", "skip")
_PHASE = re.compile(r"[a-z][a-z-]{0,30}")
_YEAR = 365 * 86400.0
_UNITS = ("bytes", "operations")


async def _holding(holders: CommandHolders, device: Device) -> tuple[Holder, ...]:
    """Return the holders that keep the device from being worked on; what is not inspected counts."""
    report = await holders.list_holders(device)
    unknown = tuple(Holder(each.pid, each.started, command=each.command) for each in report.uninspected)
    return (*(each for each in report.holders if each.kind is not HolderKind.INFRASTRUCTURE), *unknown)


async def _require_free(holders: CommandHolders, device: Device) -> None:
    found = await _holding(holders, device)
    if found:
        raise DeviceBusy(f"Device {device.index} is held by {_names(found)}.")


def _names(found: tuple[Holder, ...]) -> str:
    return ", ".join(f"process {each.pid}" if each.pid else "an unknown process" for each in found)


class CommandWork:
    """:class:`scrubber.ports.Eraser` and :class:`scrubber.ports.Diagnostics`."""

    def __init__(self, runner: CommandRunner, holders: CommandHolders) -> None:
        self._runner = runner
        self._holders = holders

    async def erase(
        self, device: Device, request: EraseRequest, progress: Callable[[EraseProgress], None]
    ) -> EraseReport:
        await _require_free(self._holders, device)
        body: dict[str, object] = {"scrub": request.scrub, "audit": request.audit, "pattern": request.pattern}
        answer = await self._runner.run(Verb.ERASE, device, body, deadline=request.deadline, progress=progress)
        report = _report(answer, device, request)
        return replace(report, fence_broken=bool(await _holding(self._holders, device)))

    async def find_orphan(self, device: Device) -> int | None:
        return self._runner.find_orphan(device)

    async def terminate_orphan(self, device: Device, deadline: float) -> bool:
        return await self._runner.terminate_orphan(device, deadline)

    async def diagnose(self, device: Device, level: DiagnosticLevel, deadline: float) -> tuple[DiagnosticCheck, ...]:
        if level is DiagnosticLevel.NONE or Verb.DIAGNOSE not in self._runner.verbs:
            return ()
        await _require_free(self._holders, device)
        body: dict[str, object] = {"seconds": level.seconds}
        answer = await self._runner.run(Verb.DIAGNOSE, device, body, deadline=deadline)
        rows = [answer.part(each, f"checks[{at}]") for at, each in enumerate(answer.objects("checks"))]
        return tuple(_check(row) for row in rows if row.text("result") != "skip")


class CommandResetter:
    """:class:`scrubber.ports.Resetter`."""

    def __init__(self, runner: CommandRunner, holders: CommandHolders) -> None:
        self._runner = runner
        self._holders = holders

    async def plan(self, device: Device) -> ResetPlan:
        if not {Verb.RESET, Verb.RESET_PLAN} <= self._runner.verbs:
            return ResetPlan(device.id, "none", (), unavailable=_NO_RESET)
        answer = await self._runner.run(Verb.RESET_PLAN, device)
        found = await _holding(self._holders, device)
        return ResetPlan(
            device.id,
            answer.text("method"),
            answer.texts("actions"),
            unavailable=answer.text("unavailable", "") or None,
            blockers=(
                *answer.texts("blockers"),
                *(f"Device {device.index} is held by {_names((each,))}." for each in found),
            ),
            also_reset=answer.texts("alsoReset"),
        )

    async def reset(self, device: Device, deadline: float) -> None:
        plan = await self.plan(device)
        if plan.unavailable is not None or plan.blockers:
            raise DeviceBusy(plan.unavailable or " ".join(plan.blockers))
        await self._runner.run(Verb.RESET, device, deadline=deadline)


def _report(answer: Answer, device: Device, request: EraseRequest) -> EraseReport:
    total, cleared = answer.required_number("totalBytes"), answer.required_number("clearedBytes")
    verified, failed = answer.number("verifiedBytes"), answer.number("failedBytes")
    residue = answer.number("residueBytes")
    not_covered = answer.texts("notCovered")
    if total != device.memory_bytes:
        raise answer.broken(f"totalBytes is {total}, and the inventory has {device.memory_bytes}")
    if cleared > total or (verified or 0) > total:
        raise answer.broken("more bytes were cleared or verified than the device has")
    if cleared < total and not not_covered:
        raise answer.broken(f"only {cleared} of {total} bytes were cleared, and notCovered does not name the rest")
    if not total and not not_covered:
        raise answer.broken("the device has no memory to clear, and notCovered does not say what remains on it")
    lines = [f"memory: {each}" for each in not_covered]
    lines += ["memory: not read back after clearing"] if verified is None and total else []
    return EraseReport(
        total_bytes=total,
        cleared_bytes=cleared,
        verified_bytes=verified,
        residue_bytes=residue if request.audit else None,
        failed_bytes=failed or 0,
        seconds_by_phase=_seconds_by_phase(answer),
        not_covered=tuple(lines),
        not_covered_bytes=total - cleared,
    )


def _seconds_by_phase(answer: Answer) -> tuple[tuple[str, float], ...]:
    found = answer.mapping("secondsByPhase") or {"erase": answer.seconds}
    for phase, seconds in found.items():
        if not _PHASE.fullmatch(phase) or not isinstance(seconds, int | float) or not 0 <= seconds < _YEAR:
            raise answer.broken(f"the phase {phase!r} took {seconds!r} s")
    return tuple((phase, float(str(seconds))) for phase, seconds in found.items())


def _check(row: Answer) -> DiagnosticCheck:
    result, unit = row.text("result"), row.text("unit", "")
    if result not in _RESULTS:
        raise row.broken(f"the result {result!r} of a check is not one of {', '.join(_RESULTS)}")
    measured: dict[str, float] = {}
    done, seconds = row.number("done"), row.values.get("seconds")
    if unit:
        if unit not in _UNITS or not done or not isinstance(seconds, int | float) or not seconds > 0:
            raise row.broken(f"a check did {done} {unit} in {seconds} s")
        measured = {unit: float(done), "seconds": float(seconds), f"{unit}_per_second": done / seconds}
    errors = row.number("errors") or (1 if result == "fail" else 0)
    return DiagnosticCheck(row.text("name"), errors, measured)
