"""What can go wrong with a device: what each code means for it, in tables that its backend completes.

A policy carries the table that counts for its devices: :attr:`scrubber.domain.policy.Policy.signals`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property

from scrubber.domain.codes import ErrorCode
from scrubber.domain.evidence import FindingCode, Severity
from scrubber.domain.states import RecoveryMethod

__all__ = [
    "COMMON_SIGNALS",
    "ERROR_CLASSES",
    "UNKNOWN_CONDITION",
    "Classification",
    "ErrorClass",
    "ErrorCodeFormat",
    "SignalTable",
]


class ErrorClass(StrEnum):
    """What an error code of a driver means for the device."""

    IGNORE = "ignore"
    APPLICATION = "application"
    RESET = "reset"
    REBOOT = "reboot"
    CONTEXT = "context"
    REPAIR = "service"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Classification:
    """What a code means for its device.

    Attributes:
        severity: ``FAULT`` takes the device out at once; ``WARNING`` makes it suspect, and where it is soft
            (:attr:`SignalTable.soft`) takes it out once it has lasted for as long as the policy says.
        recovery_method: how a device that was taken out for it can return.
        message: what it says about the device; empty where whoever finds it writes the sentence.
        acceptable: it can be a device's lasting nature, by its slot for example: an operator may accept what is read as
            normal for the device.
    """

    severity: Severity
    recovery_method: RecoveryMethod
    message: str = ""
    acceptable: bool = False


_FAULT, _WARNING, _NOTE = Severity.FAULT, Severity.WARNING, Severity.NOTE
_SCRUB, _RESET, _WAIT, _REBOOT, _OPERATOR = (
    RecoveryMethod.SCRUB,
    RecoveryMethod.RESET,
    RecoveryMethod.WAIT,
    RecoveryMethod.REBOOT,
    RecoveryMethod.OPERATOR,
)

_CLASSIFICATIONS: Mapping[str, Classification] = {
    # What else a snapshot shows.
    "too-hot": Classification(_WARNING, _WAIT),
    "baseline-changed": Classification(_WARNING, _OPERATOR),
    "ecc-uncorrected": Classification(_FAULT, _RESET),
    "recovery-reset": Classification(_FAULT, _RESET),
    "recovery-reboot": Classification(_FAULT, _REBOOT),
    "recovery-service": Classification(_FAULT, _OPERATOR),
    # Counters that the device itself keeps, over resets and reloads of its driver.
    "lifetime-ecc-uncorrected-aggregate": Classification(_FAULT, _RESET, "uncorrected ECC errors"),
    "lifetime-remapped-rows-uncorrectable": Classification(_FAULT, _RESET, "rows remapped after uncorrectable errors"),
    "lifetime-retired-pages": Classification(_WARNING, _RESET, "retired pages"),
    # A device that gives no answer, or the wrong one.
    ErrorCode.DEVICE_FAULT: Classification(_FAULT, _OPERATOR),
    ErrorCode.DRIVER_TIMEOUT: Classification(_FAULT, _WAIT),
    ErrorCode.DEVICE_LOST: Classification(_FAULT, _RESET),
    ErrorCode.DEVICE_UNREADABLE: Classification(_FAULT, _WAIT),
    # What a scrub meets.
    FindingCode.DIAGNOSTICS_FAILED: Classification(_FAULT, _RESET),
    FindingCode.DIAGNOSTICS_SLOW: Classification(_FAULT, _RESET),
    FindingCode.ERASE_TIMEOUT: Classification(_FAULT, _SCRUB),
    FindingCode.ERASER_UNKILLABLE: Classification(_FAULT, _WAIT),
    FindingCode.UNTRACEABLE_HOLDER: Classification(_FAULT, _RESET),
    FindingCode.MEMORY_NOT_RELEASED: Classification(_FAULT, _RESET),
    FindingCode.CLEARING_INCOMPLETE: Classification(_FAULT, _SCRUB),
    FindingCode.ON_CHIP_FAILED: Classification(_FAULT, _RESET),
    FindingCode.RESET_FAILED: Classification(_FAULT, _RESET),
    FindingCode.RESET_UNAVAILABLE: Classification(_FAULT, _OPERATOR),
    FindingCode.SCRUB_TIMEOUT: Classification(_FAULT, _SCRUB),
    FindingCode.SETTINGS_NOT_RESTORED: Classification(_FAULT, _RESET),
    FindingCode.HOLDER_UNKILLABLE: Classification(_FAULT, _WAIT),
    FindingCode.VERIFICATION_FAILED: Classification(_FAULT, _RESET),
    # Use without a grant, where the policy takes the device out for it.
    FindingCode.UNAUTHORIZED_USE: Classification(_FAULT, _WAIT),
}
"""What can go wrong with a device of any backend. What a driver says while it lasts is in the table of its backend."""

ERROR_CLASSES: Mapping[ErrorClass, Classification] = {
    ErrorClass.IGNORE: Classification(_NOTE, _OPERATOR, "is informational"),
    ErrorClass.APPLICATION: Classification(_NOTE, _OPERATOR, "is the application's own fault"),
    ErrorClass.RESET: Classification(_FAULT, _RESET, "asks for a reset of the GPU"),
    ErrorClass.REBOOT: Classification(_FAULT, _REBOOT, "asks for a reboot of the node"),
    ErrorClass.CONTEXT: Classification(_WARNING, _OPERATOR, "depends on its context"),
    ErrorClass.REPAIR: Classification(_FAULT, _OPERATOR, "asks for hardware service"),
    ErrorClass.UNKNOWN: Classification(_WARNING, _OPERATOR, "is in no table"),
}
"""What an error code means, by its class. One that only warns is an event: it makes the device suspect when it is new."""

UNKNOWN_CONDITION = Classification(_WARNING, _OPERATOR, "this condition is in no table")
"""A condition that a driver reports and no table has."""


@dataclass(frozen=True, slots=True)
class ErrorCodeFormat:
    """How a driver's numbered errors are called.

    Attributes:
        prefix: of the code of a finding: ``error-95``.
        name: in a message: ``Error 95``.
    """

    prefix: str = "error"
    name: str = "Error"

    def format(self, number: int) -> str:
        """Return the code of a finding about error ``parse``."""
        return f"{self.prefix}-{number}"

    def parse(self, code: str) -> int | None:
        """Return the number in a code that :meth:`format` made; None for any other code."""
        number = code.removeprefix(f"{self.prefix}-")
        return int(number) if number != code and number.isdecimal() else None


@dataclass(frozen=True)
class SignalTable:
    """What can go wrong with the devices of a backend.

    Attributes:
        classifications: by code; numbered errors are not among them, because their classes are the policy's.
        errors: how numbered errors are called.
    """

    classifications: Mapping[str, Classification]
    errors: ErrorCodeFormat = ErrorCodeFormat()

    def with_conditions(self, conditions: Mapping[str, Classification], errors: ErrorCodeFormat) -> SignalTable:
        """Return the table with a backend's own conditions and error codes."""
        return SignalTable({**conditions, **self.classifications}, errors)

    @cached_property
    def soft(self) -> frozenset[str]:
        """Conditions that may pass by themselves: a policy says how long each may last."""
        return frozenset(
            code
            for code, meaning in self.classifications.items()
            if meaning.severity is Severity.WARNING and not code.startswith("lifetime-")
        )

    @cached_property
    def limited_by_breaker(self) -> frozenset[str]:
        """Soft conditions for which the breaker keeps most devices in service: many that turn hot share a cause.

        Firmware that was written does not pass, and a tenant that writes more of it must not have more of it left.
        """
        return self.soft - {"baseline-changed"}

    @cached_property
    def acceptable(self) -> frozenset[str]:
        """Conditions that an operator may accept as normal for a device."""
        return frozenset(code for code, meaning in self.classifications.items() if meaning.acceptable)

    def classify(self, code: str) -> Classification:
        """Return the meaning of ``code``; one that is in no table warns, and only a person knows the way back."""
        return self.classifications.get(code, UNKNOWN_CONDITION)

    def finding_codes(self, numbers: Iterable[int]) -> frozenset[str]:
        """Return the codes of findings about errors ``numbers``."""
        return frozenset(self.errors.format(number) for number in numbers)


COMMON_SIGNALS = SignalTable(_CLASSIFICATIONS)
"""The table of a backend that has no conditions of its own."""
