"""The meaning of each signal code for a device, in tables that its backend completes.

A policy contains the table that applies to its devices: :attr:`scrubber.domain.policy.Policy.signals`.
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
    REPAIR = "repair"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Classification:
    """What a code means for its device.

    Attributes:
        severity: ``FAULT`` takes the device out of service immediately; ``WARNING`` makes it suspect, and where it is
            soft (:attr:`SignalTable.soft`) quarantines it once it has lasted for the time in the policy.
        recovery_method: how a device that was quarantined for it can return.
        message: what it means for the device; empty where the code that finds it writes the message.
        acceptable: whether it can be a permanent property of a device, for example due to its slot: an operator may
            accept the value read as normal for the device.
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
    # Other values of a snapshot.
    "too-hot": Classification(_WARNING, _WAIT),
    "baseline-mismatch": Classification(_WARNING, _OPERATOR),
    ErrorCode.COMMAND_BROKEN.value: Classification(_WARNING, _WAIT),
    "ecc-uncorrected": Classification(_FAULT, _RESET),
    "driver-requests-reset": Classification(_FAULT, _RESET),
    "driver-requests-reboot": Classification(_FAULT, _REBOOT),
    "driver-requests-operator": Classification(_FAULT, _OPERATOR),
    # Counters that the device itself stores across resets and driver reloads.
    "lifetime-ecc-uncorrected-aggregate": Classification(_FAULT, _RESET, "uncorrected ECC errors"),
    "lifetime-remapped-rows-uncorrectable": Classification(_FAULT, _RESET, "rows remapped after uncorrectable errors"),
    "lifetime-retired-pages": Classification(_WARNING, _RESET, "retired pages"),
    # A device that gives no answer, or a wrong one.
    ErrorCode.DEVICE_FAULT: Classification(_FAULT, _OPERATOR),
    ErrorCode.DRIVER_TIMEOUT: Classification(_FAULT, _WAIT),
    ErrorCode.DEVICE_LOST: Classification(_FAULT, _RESET),
    ErrorCode.DEVICE_UNREADABLE: Classification(_FAULT, _WAIT),
    # Findings of a scrub.
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
    # Use without a grant, where the policy quarantines the device for it.
    FindingCode.UNAUTHORIZED_USE: Classification(_FAULT, _WAIT),
}
"""Signals of the devices of any backend. Conditions that a driver reports while they last are in its backend's table.
"""

ERROR_CLASSES: Mapping[ErrorClass, Classification] = {
    ErrorClass.IGNORE: Classification(_NOTE, _OPERATOR, "is informational"),
    ErrorClass.APPLICATION: Classification(_NOTE, _OPERATOR, "is caused by the application"),
    ErrorClass.RESET: Classification(_FAULT, _RESET, "requires a GPU reset"),
    ErrorClass.REBOOT: Classification(_FAULT, _REBOOT, "requires a reboot of the node"),
    ErrorClass.CONTEXT: Classification(_WARNING, _OPERATOR, "depends on the context"),
    ErrorClass.REPAIR: Classification(_FAULT, _OPERATOR, "requires hardware service"),
    ErrorClass.UNKNOWN: Classification(_WARNING, _OPERATOR, "is not in the table of error codes"),
}
"""The meaning of an error code by its class.

An error that only warns is an event: it makes the device suspect when it is new.
"""

UNKNOWN_CONDITION = Classification(_WARNING, _OPERATOR, "the condition is unknown")
"""The classification of a condition that a driver reports and no table contains."""


@dataclass(frozen=True, slots=True)
class ErrorCodeFormat:
    """How the numbered errors of a driver are named.

    Attributes:
        prefix: prefix in the code of a finding: ``error-95``.
        name: name in a message: ``Error 95``.
        only_by_policy: whether no table of the project contains their classes, so that only the policy names any.
    """

    prefix: str = "error"
    name: str = "Error"
    only_by_policy: bool = False

    def format(self, number: int) -> str:
        """Return the code of a finding about error ``number``."""
        return f"{self.prefix}-{number}"

    def parse(self, code: str) -> int | None:
        """Return the number in a code that :meth:`format` made; None for any other code."""
        number = code.removeprefix(f"{self.prefix}-")
        return int(number) if number != code and number.isdecimal() else None


@dataclass(frozen=True)
class SignalTable:
    """The signals of a backend's devices.

    Attributes:
        classifications: by code; without numbered errors, because the policy defines their classes.
        errors: how numbered errors are named.
        error_classes: classes of numbered errors whose numbers are the backend's own; None: the policy defines them.
    """

    classifications: Mapping[str, Classification]
    errors: ErrorCodeFormat = ErrorCodeFormat()
    error_classes: Mapping[int, ErrorClass] | None = None

    def with_conditions(
        self,
        conditions: Mapping[str, Classification],
        errors: ErrorCodeFormat,
        error_classes: Mapping[int, ErrorClass] | None = None,
    ) -> SignalTable:
        """Return the table with a backend's own conditions and error codes."""
        return SignalTable({**conditions, **self.classifications}, errors, error_classes)

    def merged_with(self, others: Iterable[SignalTable]) -> SignalTable:
        """Return a table of the codes of several backends, for what concerns the node; of a code in two, the first.

        What a code means for a device only the table of its own backend says.
        """
        classifications = dict(self.classifications)
        for each in others:
            classifications = {**each.classifications, **classifications}
        return SignalTable(classifications, self.errors, self.error_classes)

    @cached_property
    def soft(self) -> frozenset[str]:
        """Conditions that may end without intervention: a policy sets how long each may last."""
        return frozenset(
            code
            for code, meaning in self.classifications.items()
            if meaning.severity is Severity.WARNING and not code.startswith("lifetime-")
        )

    @cached_property
    def limited_by_breaker(self) -> frozenset[str]:
        """Soft conditions for which the breaker limits quarantines: many devices that overheat share a cause.

        Excludes modified firmware: it does not end without intervention, and a tenant that modifies more devices must
        not have more of them left in service.
        """
        return self.soft - {"baseline-mismatch"}

    @cached_property
    def acceptable(self) -> frozenset[str]:
        """Conditions that an operator may accept as normal for a device."""
        return frozenset(code for code, meaning in self.classifications.items() if meaning.acceptable)

    def classify(self, code: str) -> Classification:
        """Return the meaning of ``code``.

        A code in no table is a warning, and only an operator can release a device that was quarantined for it.
        """
        return self.classifications.get(code, UNKNOWN_CONDITION)

    def finding_codes(self, numbers: Iterable[int]) -> frozenset[str]:
        """Return the codes of findings about errors ``numbers``."""
        return frozenset(self.errors.format(number) for number in numbers)


COMMON_SIGNALS = SignalTable(_CLASSIFICATIONS)
"""The table of a backend without conditions of its own."""
