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
from scrubber.domain.health import WayBack

__all__ = ["COMMON", "ERROR_CLASSES", "UNKNOWN_CONDITION", "ErrorClass", "ErrorCodes", "Meaning", "SignalTable"]


class ErrorClass(StrEnum):
    """What an error code of a driver means for the device."""

    IGNORE = "ignore"
    APPLICATION = "application"
    RESET = "reset"
    REBOOT = "reboot"
    CONTEXT = "context"
    SERVICE = "service"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Meaning:
    """What a code means for its device.

    Attributes:
        severity: ``FAULT`` takes the device out at once; ``WARNING`` makes it suspect, and where it is soft
            (:attr:`SignalTable.soft`) takes it out once it has lasted for as long as the policy says.
        way_back: how a device that was taken out for it can return.
        sentence: what it says about the device; empty where whoever finds it writes the sentence.
        acceptable: it can be a device's lasting nature, by its slot for example: an operator may accept what is read as
            normal for the device.
    """

    severity: Severity
    way_back: WayBack
    sentence: str = ""
    acceptable: bool = False


_FAULT, _WARNING, _NOTE = Severity.FAULT, Severity.WARNING, Severity.NOTE
_SCRUB, _RESET, _WAIT, _REBOOT, _PERSON = (
    WayBack.SCRUB,
    WayBack.RESET,
    WayBack.WAIT,
    WayBack.REBOOT,
    WayBack.PERSON,
)

_MEANINGS: Mapping[str, Meaning] = {
    # What else a snapshot shows.
    "too-hot": Meaning(_WARNING, _WAIT),
    "baseline-changed": Meaning(_WARNING, _PERSON),
    "ecc-uncorrected": Meaning(_FAULT, _RESET),
    "recovery-reset": Meaning(_FAULT, _RESET),
    "recovery-reboot": Meaning(_FAULT, _REBOOT),
    "recovery-service": Meaning(_FAULT, _PERSON),
    # Counters that the device itself keeps, over resets and reloads of its driver.
    "lifetime-ecc-uncorrected-aggregate": Meaning(_FAULT, _RESET, "uncorrected ECC errors"),
    "lifetime-remapped-rows-uncorrectable": Meaning(_FAULT, _RESET, "rows remapped after uncorrectable errors"),
    "lifetime-retired-pages": Meaning(_WARNING, _RESET, "retired pages"),
    # A device that gives no answer, or the wrong one.
    ErrorCode.DEVICE_FAULT: Meaning(_FAULT, _PERSON),
    ErrorCode.DRIVER_STUCK: Meaning(_FAULT, _WAIT),
    ErrorCode.LOST: Meaning(_FAULT, _RESET),
    ErrorCode.UNREADABLE: Meaning(_FAULT, _WAIT),
    # What a scrub meets.
    FindingCode.DIAGNOSTICS_FAILED: Meaning(_FAULT, _RESET),
    FindingCode.DIAGNOSTICS_SLOW: Meaning(_FAULT, _RESET),
    FindingCode.ERASE_TIMEOUT: Meaning(_FAULT, _SCRUB),
    FindingCode.ERASER_UNKILLABLE: Meaning(_FAULT, _WAIT),
    FindingCode.GHOST: Meaning(_FAULT, _RESET),
    FindingCode.MEMORY_NOT_BACK: Meaning(_FAULT, _RESET),
    FindingCode.NOT_ALL_CLEARED: Meaning(_FAULT, _SCRUB),
    FindingCode.ON_CHIP_FAILED: Meaning(_FAULT, _RESET),
    FindingCode.RESET_FAILED: Meaning(_FAULT, _RESET),
    FindingCode.RESET_UNAVAILABLE: Meaning(_FAULT, _PERSON),
    FindingCode.SCRUB_OVERDUE: Meaning(_FAULT, _SCRUB),
    FindingCode.SETTINGS_STAY: Meaning(_FAULT, _RESET),
    FindingCode.UNKILLABLE: Meaning(_FAULT, _WAIT),
    FindingCode.VERIFICATION_FAILED: Meaning(_FAULT, _RESET),
    # Use without a grant, where the policy takes the device out for it.
    FindingCode.UNGRANTED_USE: Meaning(_FAULT, _WAIT),
}
"""What can go wrong with a device of any backend. What a driver says while it lasts is in the table of its backend."""

ERROR_CLASSES: Mapping[ErrorClass, Meaning] = {
    ErrorClass.IGNORE: Meaning(_NOTE, _PERSON, "is informational"),
    ErrorClass.APPLICATION: Meaning(_NOTE, _PERSON, "is the application's own fault"),
    ErrorClass.RESET: Meaning(_FAULT, _RESET, "asks for a reset of the GPU"),
    ErrorClass.REBOOT: Meaning(_FAULT, _REBOOT, "asks for a reboot of the node"),
    ErrorClass.CONTEXT: Meaning(_WARNING, _PERSON, "depends on its context"),
    ErrorClass.SERVICE: Meaning(_FAULT, _PERSON, "asks for hardware service"),
    ErrorClass.UNKNOWN: Meaning(_WARNING, _PERSON, "is in no table"),
}
"""What an error code means, by its class. One that only warns is an event: it makes the device suspect when it is new."""

UNKNOWN_CONDITION = Meaning(_WARNING, _PERSON, "this condition is in no table")
"""A condition that a driver reports and no table has."""


@dataclass(frozen=True, slots=True)
class ErrorCodes:
    """How a driver's numbered errors are called.

    Attributes:
        prefix: of the code of a finding: ``error-95``.
        name: in a message: ``Error 95``.
    """

    prefix: str = "error"
    name: str = "Error"

    def code(self, number: int) -> str:
        """Return the code of a finding about error ``number``."""
        return f"{self.prefix}-{number}"

    def number(self, code: str) -> int | None:
        """Return the number in a code that :meth:`code` made; None for any other code."""
        number = code.removeprefix(f"{self.prefix}-")
        return int(number) if number != code and number.isdecimal() else None


@dataclass(frozen=True)
class SignalTable:
    """What can go wrong with the devices of a backend.

    Attributes:
        meanings: by code; numbered errors are not among them, because their classes are the policy's.
        errors: how numbered errors are called.
    """

    meanings: Mapping[str, Meaning]
    errors: ErrorCodes = ErrorCodes()

    def with_conditions(self, conditions: Mapping[str, Meaning], errors: ErrorCodes) -> SignalTable:
        """Return the table with a backend's own conditions and error codes."""
        return SignalTable({**conditions, **self.meanings}, errors)

    @cached_property
    def soft(self) -> frozenset[str]:
        """Conditions that may pass by themselves: a policy says how long each may last."""
        return frozenset(
            code
            for code, meaning in self.meanings.items()
            if meaning.severity is Severity.WARNING and not code.startswith("lifetime-")
        )

    @cached_property
    def spared(self) -> frozenset[str]:
        """Soft conditions for which the breaker keeps most devices in service: many that turn hot share a cause.

        Firmware that was written does not pass, and a tenant that writes more of it must not have more of it left.
        """
        return self.soft - {"baseline-changed"}

    @cached_property
    def acceptable(self) -> frozenset[str]:
        """Conditions that an operator may accept as normal for a device."""
        return frozenset(code for code, meaning in self.meanings.items() if meaning.acceptable)

    def of(self, code: str) -> Meaning:
        """Return the meaning of ``code``; one that is in no table warns, and only a person knows the way back."""
        return self.meanings.get(code, UNKNOWN_CONDITION)

    def codes(self, numbers: Iterable[int]) -> frozenset[str]:
        """Return the codes of findings about errors ``numbers``."""
        return frozenset(self.errors.code(number) for number in numbers)


COMMON = SignalTable(_MEANINGS)
"""The table of a backend that has no conditions of its own."""
