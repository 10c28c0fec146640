"""Checks the program of a command backend against the contract of every backend: what is missing, wrong or slow.

Only queries are made, unless a device to erase is named. That one is then reset, diagnosed, cleared and set to its
defaults, as far as the program supports that.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TypeVar

from scrubber.adapters.command.answers import REQUIRED_VERBS, Verb
from scrubber.adapters.command.backend import CommandSource, command_backend
from scrubber.adapters.command.executable import ownership_problem
from scrubber.adapters.command.runner import CommandRun
from scrubber.adapters.ledger.state_directory import StateDirectory
from scrubber.domain.device import AccessKind, Device, find_device
from scrubber.domain.errors import BrokenCommand, DeviceBusy, DeviceFault, DriverTimeout, InvalidRequest, ScrubberError
from scrubber.domain.telemetry import Snapshot
from scrubber.ports import contract
from scrubber.ports.contract import ContractViolation
from scrubber.ports.device import DeviceBackend, EraseReport, EraseRequest

__all__ = ["CheckOutcome", "ContractCheck", "check_program"]

_T = TypeVar("_T")

_SLOW = 0.5
"""Part of its deadline that a verb may take: on a busy node it takes longer."""
_SCRUB_ID = "backend-check"
_CONSEQUENCES: Mapping[frozenset[Verb], str] = {
    frozenset({Verb.HOLDERS}): "only processes that have a node of the device open are found",
    frozenset({Verb.SETTINGS, Verb.SETTINGS_APPLY}): "what a tenant changes in the settings stays changed",
    frozenset({Verb.RESET, Verb.RESET_PLAN}): "a device that needs a reset waits for an operator",
    frozenset({Verb.DIAGNOSE}): "a device that computes wrongly is not noticed",
}
"""What it means that a program lacks one of these optional verbs."""


class CheckOutcome(StrEnum):
    """What a check found."""

    OK = "ok"
    SKIPPED = "skipped"
    MISSING = "missing"
    SLOW = "slow"
    TIMED_OUT = "timed-out"
    WRONG = "wrong"
    FAULT = "fault"
    HELD = "held"
    UNANSWERED = "unanswered"

    @property
    def is_warning(self) -> bool:
        """Whether the backend works nevertheless."""
        return self in (CheckOutcome.MISSING, CheckOutcome.SLOW)

    @property
    def is_error(self) -> bool:
        return self in (
            CheckOutcome.TIMED_OUT,
            CheckOutcome.WRONG,
            CheckOutcome.FAULT,
            CheckOutcome.HELD,
            CheckOutcome.UNANSWERED,
        )


@dataclass(frozen=True, slots=True)
class ContractCheck:
    """The result of one check.

    Attributes:
        device: id of the device; empty for what concerns the program.
        seconds: duration of the slowest run of the program; 0 if none was answered.
    """

    name: str
    device: str
    outcome: CheckOutcome
    message: str
    seconds: float = 0.0


async def check_program(
    source: CommandSource, *, erase: str | None = None, state_dir: Path, deadline: float, owner: int | None = None
) -> tuple[ContractCheck, ...]:
    """Return what the checks found, in their order.

    Args:
        erase: the device to work on; None: no device is touched.
        state_dir: the service's state directory; with ``erase`` no service may run in it.
        deadline: seconds for one reset, diagnosis or erasure.
        owner: uid that may own the program, besides root; None: this user's.

    Raises:
        AlreadyRunning: a service that may use the device runs.
        InvalidRequest: ``erase`` names no device, or there is no state directory.
    """
    owner = os.geteuid() if owner is None else owner
    problem = ownership_problem(source.current().program, owner)
    if problem is not None:
        return (ContractCheck("program", "", CheckOutcome.WRONG, problem),)
    async with AsyncExitStack() as stack:
        own_locks = Path(stack.enter_context(TemporaryDirectory(prefix="scrubber-backend-check-")))
        locks = own_locks
        if erase is not None:
            if not state_dir.is_dir():
                raise InvalidRequest(
                    f"The state directory {state_dir} does not exist, so nothing shows whether a service uses the device. Name "
                    "the service's with --state-dir; where no service was ever started, any empty directory."
                )
            stack.callback(os.close, StateDirectory(state_dir).lock())
            locks = state_dir / "locks"
        runs: list[CommandRun] = []
        backend = await stack.enter_async_context(
            command_backend(
                source, locks, node=socket.gethostname(), infrastructure=None, owner=owner, observe=runs.append
            )
        )
        checks = _Checks(backend, runs, deadline)
        devices = await checks.check_node()
        if devices is None:
            return tuple(checks.found)
        subject = None if erase is None else find_device(devices, erase)
        for device in devices:
            await checks.check_device(device)
        if subject is None:
            checks.skip(
                "erase", "Without --erase DEVICE no device is touched: erase, reset and diagnose are not checked."
            )
        else:
            await checks.work_on(subject)
        return tuple(checks.found)


class _Checks:
    """Runs checks and collects their results; a check that fails ends none of the others."""

    def __init__(self, backend: DeviceBackend, runs: list[CommandRun], deadline: float) -> None:
        self._backend = backend
        self._runs = runs
        self._deadline = deadline
        self._verbs: frozenset[str] = frozenset()
        self._without_reset: dict[str, str] = {}
        self._held: set[str] = set()
        self.found: list[ContractCheck] = []

    async def check_node(self) -> tuple[Device, ...] | None:
        """Check what concerns no single device; return the devices, None if they cannot be listed."""
        devices = await self._check("inventory", None, contract.check_inventory(self._backend.inventory), _listed)
        capabilities = self._capabilities()
        if devices is None:
            if capabilities is None:
                self.found[-1] = replace(self.found[-1], name=Verb.CAPABILITIES.value)
            self.skip("devices", "The devices cannot be listed, so nothing else was checked.")
            return None
        if not devices:
            self._add("devices", CheckOutcome.MISSING, "The program lists no device, so nothing else can be checked.")
        await self._check(
            "identity", None, contract.check_identity(self._backend.inventory), lambda each: f"Driver: {each.driver}."
        )
        self._verbs = (capabilities or frozenset()) | {Verb.CAPABILITIES}
        required = ", ".join(sorted(REQUIRED_VERBS - self._verbs))
        if required:
            self._add("capabilities", CheckOutcome.WRONG, f"Verbs that every program needs are missing: {required}.")
        for verbs, consequence in _CONSEQUENCES.items():
            missing = sorted(verbs - self._verbs)
            if missing:
                message = f"The program does not support {' and '.join(missing)}: {consequence}."
                self._add(missing[0].value, CheckOutcome.MISSING, message)
        return devices

    async def check_device(self, device: Device) -> None:
        ports = self._backend
        await self._check("telemetry", device, contract.check_snapshot(ports.telemetry, device), _health)
        held = await self._check(
            "holders",
            device,
            contract.check_holders(ports.holders, device),
            lambda held: "The device is held." if held else "No process holds the device.",
            lambda _: self._missing_holders(device),
        )
        if held:
            self._held.add(device.id)
        if self._supports(Verb.SETTINGS, Verb.SETTINGS_APPLY):
            await self._check(
                "settings",
                device,
                contract.check_unknown_setting(ports.settings, device),
                lambda _: "A setting that the device does not have is omitted.",
            )
        if self._supports(Verb.RESET, Verb.RESET_PLAN):
            plan = await self._check(
                "reset-plan",
                device,
                contract.check_reset_plan(ports.resetter, device),
                lambda plan: plan.unavailable or " ".join(plan.blockers) or f"Method: {plan.method}.",
            )
            if plan is not None and plan.unavailable is not None:
                self._without_reset[device.id] = plan.unavailable

    async def work_on(self, device: Device) -> None:
        """Do to ``device`` what a scrub does, in the same order; nothing while a process holds it."""
        if device.id in self._held:
            self._add("erase", CheckOutcome.HELD, "A process holds the device, so nothing was done to it.", device)
            return
        ports, deadline = self._backend, self._deadline
        if device.id in self._without_reset:
            self._add("reset", CheckOutcome.SKIPPED, self._without_reset[device.id], device)
        elif self._supports(Verb.RESET, Verb.RESET_PLAN):
            await self._check(
                "reset",
                device,
                contract.check_reset(ports.resetter, ports.telemetry, device, deadline),
                lambda _: "The device was reset and answers.",
            )
        if self._supports(Verb.DIAGNOSE):
            await self._check(
                "diagnose",
                device,
                contract.check_diagnosis(ports.diagnostics, ports.holders, device, deadline),
                lambda checks: f"Passed: {', '.join(each.name for each in checks) or 'nothing'}.",
            )
        first = EraseRequest(_SCRUB_ID, audit=True, pattern=True, deadline=deadline)
        await self._check("erase", device, self._erase(device, first), _cleared)
        await self._check(
            "erase-again", device, self._erase_again(device), _cleared, lambda report: _missing_residue(device, report)
        )
        if self._supports(Verb.SETTINGS, Verb.SETTINGS_APPLY):
            await self._check(
                "settings-apply",
                device,
                contract.check_restored_settings(ports.telemetry, ports.settings, device),
                _restored,
            )

    def skip(self, name: str, message: str) -> None:
        self._add(name, CheckOutcome.SKIPPED, message)

    def _capabilities(self) -> frozenset[str] | None:
        """Return the verbs that the program lists; None if it did not answer, or not with such a list."""
        answer = next((each.answer for each in self._runs if each.verb is Verb.CAPABILITIES), None)
        try:
            return None if answer is None else frozenset(answer.texts("verbs"))
        except BrokenCommand:
            return None

    def _missing_holders(self, device: Device) -> str:
        if self._supports(Verb.HOLDERS) or any(
            each.kind in (AccessKind.DEVICE_NODE, AccessKind.MOUNT) for each in device.access
        ):
            return ""
        return (
            f"The inventory names no node of {device.id} and the program does not support {Verb.HOLDERS}: no process that "
            "uses the device can be found."
        )

    def _supports(self, *verbs: Verb) -> bool:
        return self._verbs.issuperset(verbs)

    async def _erase(self, device: Device, request: EraseRequest) -> EraseReport:
        return await contract.check_erasure(self._backend.eraser, self._backend.holders, device, request)

    async def _erase_again(self, device: Device) -> EraseReport:
        """Erase a device that was just erased: an audit that finds residue shows that it was not."""
        report = await self._erase(device, EraseRequest(_SCRUB_ID, audit=True, pattern=False, deadline=self._deadline))
        if report.residue_bytes:
            raise ContractViolation(f"The audit found {report.residue_bytes} bytes after the device was cleared.")
        return report

    async def _check(
        self,
        name: str,
        device: Device | None,
        check: Awaitable[_T],
        describe: Callable[[_T], str],
        missing: Callable[[_T], str] = lambda _: "",
    ) -> _T | None:
        """Await ``check`` and add its result; return what it returned, None if it failed.

        Args:
            describe: returns the message of a check without a problem.
            missing: returns what the check could not show for lack of information; empty: nothing.
        """
        before = len(self._runs)
        try:
            value = await check
        except ContractViolation as violation:
            self._add(name, CheckOutcome.WRONG, str(violation), device)
        except ScrubberError as error:
            self._add(name, _outcome_of(error), str(error), device)
        else:
            runs = self._runs[before:]
            slow = next((each for each in runs if each.answer.seconds > _SLOW * each.deadline), None)
            seconds = max((each.answer.seconds for each in runs), default=0.0)
            if lack := missing(value):
                self._add(name, CheckOutcome.MISSING, lack, device, seconds)
            elif slow is None:
                self._add(name, CheckOutcome.OK, describe(value), device, seconds)
            else:
                message = (
                    f"{slow.verb} took {slow.answer.seconds:.1f} s of the {slow.deadline:g} s that it may take; make it "
                    f"faster, or raise its limit ({_limit(slow.verb)})."
                )
                self._add(name, CheckOutcome.SLOW, message, device, seconds)
            return value
        return None

    def _add(
        self, name: str, outcome: CheckOutcome, message: str, device: Device | None = None, seconds: float = 0.0
    ) -> None:
        self.found.append(ContractCheck(name, "" if device is None else device.id, outcome, message, seconds))


def _outcome_of(error: ScrubberError) -> CheckOutcome:
    match error:
        case BrokenCommand():
            return CheckOutcome.WRONG
        case DriverTimeout():
            return CheckOutcome.TIMED_OUT
        case DeviceFault():
            return CheckOutcome.FAULT
        case DeviceBusy():
            return CheckOutcome.HELD
        case _:
            return CheckOutcome.UNANSWERED


def _limit(verb: Verb) -> str:
    if verb in (Verb.ERASE, Verb.RESET, Verb.DIAGNOSE):
        return "--timeout of this check; limits in the policy of the service"
    return f"deadlines.{verb} in the file"


def _listed(devices: tuple[Device, ...]) -> str:
    return f"Devices: {', '.join(each.id for each in devices) or 'none'}."


def _health(snapshot: Snapshot) -> str:
    problems = [f"error {code}" for code in snapshot.errors] + sorted(snapshot.conditions)
    return f"The device reports: {', '.join(problems)}." if problems else "The device reports no problem."


def _restored(after: Snapshot) -> str:
    names = ", ".join(after.settings)
    return f"Every setting has its default value: {names}." if names else "The device has no settings."


def _missing_residue(device: Device, report: EraseReport) -> str:
    if report.residue_bytes is not None or not device.memory_bytes:
        return ""
    return "The program reports no residueBytes: nothing shows whether the first erasure cleared the device."


def _cleared(report: EraseReport) -> str:
    read_back = "not read back" if report.verified_bytes is None else f"{report.verified_bytes} read back"
    rest = f"; not covered: {'; '.join(report.not_covered)}" if report.not_covered else ""
    return f"{report.cleared_bytes} of {report.total_bytes} bytes cleared, {read_back}{rest}."
