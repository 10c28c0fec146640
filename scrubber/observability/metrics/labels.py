"""The allowed values of labels, which bound every metric regardless of events, drivers and tenants.

A value that the code does not know becomes ``other``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

from scrubber.domain import errors
from scrubber.domain.codes import NON_ENGINE_CODES, ErrorCode
from scrubber.domain.evidence import Finding, FindingCode, Severity, Step
from scrubber.domain.health.signal_table import ERROR_CLASSES, SignalTable
from scrubber.domain.states import OPERATOR_CAUSE
from scrubber.ports.record import Event

__all__ = [
    "OTHER",
    "REFUSAL_CODES",
    "XID",
    "KnownCodes",
    "bounded_label",
    "error_codes",
    "exemplar",
    "non_negative_number",
    "numeric_field",
    "xid_label",
]

OTHER: Final = "other"
XID: Final = "xid"

_MAX_EXEMPLAR_CHARS = 128
"""OpenMetrics: limit of all label names and values of an exemplar together."""


def error_codes(base: type[errors.ScrubberError]) -> frozenset[str]:
    """Return the codes of ``base`` and of all its subclasses in :mod:`scrubber.domain.errors`."""
    tree = (each for each in vars(errors).values() if isinstance(each, type) and issubclass(each, base))
    return frozenset(each.code for each in tree)


REFUSAL_CODES: frozenset[str] = frozenset(ErrorCode) - NON_ENGINE_CODES
"""The codes with which hand-overs are refused."""

_XID_CODE = re.compile(rf"(?:{XID}-)?([0-9]+)", re.ASCII)
_MAX_XID = 200
"""NVIDIA's catalogue ends below this; a driver may report any number."""
_XIDS = frozenset(map(str, range(1, _MAX_XID + 1)))


def bounded_label(known: frozenset[str], value: object, default: str = OTHER) -> str:
    """Return ``value`` if it is in ``known``, else ``default``."""
    return str(value) if isinstance(value, str) and value in known else default


def xid_label(code: object) -> str | None:
    """Return the number of an XID (``95`` or ``xid-95``), ``other`` for an unknown one; None for another signal."""
    if isinstance(code, int) and not isinstance(code, bool):
        return str(code) if 1 <= code <= _MAX_XID else OTHER
    match = _XID_CODE.fullmatch(code) if isinstance(code, str) else None
    return None if match is None else bounded_label(_XIDS, match[1])


def non_negative_number(value: object) -> float | None:
    """Return ``value`` if it is a non-negative number; None when it is missing or invalid (NaN, infinite)."""
    return float(value) if isinstance(value, int | float) and 0 <= value < 2.0**63 else None


def numeric_field(event: Event, name: str) -> float | None:
    """Return a numeric field of ``event``, or None, as :func:`non_negative_number` does."""
    return non_negative_number(event.fields.get(name))


def exemplar(scrub: str | None, trace: str | None) -> dict[str, str] | None:
    """Return the exemplar that names ``scrub`` and ``trace``, as far as there are such and OpenMetrics' limit allows.

    None without any. The scrub comes first: its id is in the log and in the audit log for longer than a trace is kept.
    """
    labels: dict[str, str] = {}
    for name, value in (("scrub_id", scrub), ("trace_id", trace)):
        if value and sum(map(len, (*labels, *labels.values(), name, value))) <= _MAX_EXEMPLAR_CHARS:
            labels[name] = value
    return labels or None


class KnownCodes:
    """The known codes of causes and findings, including the conditions of ``table``. All XIDs are one code.

    Attributes:
        causes: the code of every device fault, those of the table, and an operator's order.
        findings: step, severity and code of every known finding.
    """

    def __init__(self, table: SignalTable) -> None:
        self.causes = error_codes(errors.DeviceFault) | table.classifications.keys() | {XID, OPERATOR_CAUSE}
        self.findings = frozenset(_findings(table))

    def cause_class(self, code: object) -> str:
        """Return the bounded class of a cause: ``xid-95`` is ``xid``, a known code itself, an unknown one ``other``."""
        if isinstance(code, str) and code.startswith(f"{XID}-"):
            return XID
        return bounded_label(self.causes, code)

    def finding_labels(self, finding: Finding) -> tuple[str, str, str]:
        """Return step, severity and code under which ``finding`` is counted."""
        code = XID if finding.code.startswith(f"{XID}-") else finding.code
        labels = (finding.step, finding.severity, code)
        return labels if labels in self.findings else (finding.step, finding.severity, OTHER)


def _findings(table: SignalTable) -> Iterator[tuple[str, str, str]]:
    for found in FindingCode:
        yield from ((step, severity, found) for step, severity in found.allowed_severities)
    for step in Step:
        # Errors of ports, which any step may raise.
        yield from ((step, Severity.FAULT, code) for code in error_codes(errors.DeviceFault))
        yield from ((step, Severity.BLOCKING, code) for code in error_codes(errors.RetryableError))
    for code, meaning in table.classifications.items():
        yield Step.HEALTH, meaning.severity, code
        if meaning.acceptable or code.startswith("lifetime-"):
            yield Step.HEALTH, Severity.NOTE, code
    severities = {Severity.NOTE, *(each.severity for each in ERROR_CLASSES.values())}
    yield from ((Step.HEALTH, severity, XID) for severity in severities)
