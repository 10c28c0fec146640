"""What steps find, as labels: the combinations of step, severity and code that there are. Any other code is ``other``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from scrubber.adapters.journal.labels import OTHER, XID, codes
from scrubber.domain import errors
from scrubber.domain.baseline import ACCEPTABLE
from scrubber.domain.evidence import Finding, FindingCode, Severity, Step
from scrubber.domain.signals import SIGNALS, XIDS

__all__ = ["KNOWN", "labels_of"]


def _known() -> Iterator[tuple[str, str, str]]:
    for found in FindingCode:
        yield from ((step, severity, found) for step, severity in found.places)
    for step in Step:
        # What a port raises, whichever step asks it.
        yield from ((step, Severity.FAULT, code) for code in codes(errors.DeviceFault))
        yield from ((step, Severity.DIRTY, code) for code in codes(errors.Retry))
    for code, meaning in SIGNALS.items():
        yield Step.HEALTH, meaning.severity, code
        if code in ACCEPTABLE or code.startswith("lifetime-"):
            yield Step.HEALTH, Severity.NOTE, code
    yield from (
        (Step.HEALTH, severity, XID) for severity in {Severity.NOTE, *(each.severity for each in XIDS.values())}
    )


KNOWN: Final = frozenset(_known())
"""Step, severity and code of everything that is known to be found; all XIDs are one code."""


def labels_of(finding: Finding) -> tuple[str, str, str]:
    """Step, severity and code under which ``finding`` is counted."""
    code = XID if finding.code.startswith(f"{XID}-") else finding.code
    labels = (finding.step, finding.severity, code)
    return labels if labels in KNOWN else (finding.step, finding.severity, OTHER)
