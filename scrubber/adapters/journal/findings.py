"""What steps find, as labels: the combinations of step, severity and code that there are. Any other code is ``other``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from scrubber.adapters.journal.labels import OTHER, XID, codes
from scrubber.domain import errors
from scrubber.domain.baseline import ACCEPTABLE
from scrubber.domain.evidence import Finding, Severity, Step
from scrubber.domain.signals import SIGNALS, XIDS

__all__ = ["KNOWN", "labels_of"]

_NOTE, _DIRTY, _FAULT = Severity.NOTE, Severity.DIRTY, Severity.FAULT

_STEPS: Final = {
    Step.HOLDERS: {
        _NOTE: "ghost holders-unreadable infrastructure leftovers more-holders orphaned-eraser pod-ended stranger-ended "
        "uninspected-ended walk-unfinished",
        _DIRTY: "earlier-pod-lives held held-by-own-pod leftovers-observed leftovers-unreadable more-holders unknown-holder "
        "walk-unfinished",
        _FAULT: "eraser-unkillable ghost ungranted-use unkillable",
    },
    Step.RESET: {_NOTE: "reset-unavailable", _DIRTY: "held", _FAULT: "reset-failed reset-unavailable"},
    Step.DIAGNOSTICS: {_DIRTY: "held", _FAULT: "diagnostics-failed diagnostics-slow"},
    Step.MEMORY: {
        _NOTE: "residue size-mended",
        _DIRTY: "fence-broken held",
        _FAULT: "erase-timeout memory-not-back not-all-cleared verification-failed",
    },
    Step.ON_CHIP: {_NOTE: "on-chip-residue", _FAULT: "on-chip-failed"},
    Step.SETTINGS: {_NOTE: "settings-restored", _DIRTY: "settings-off", _FAULT: "settings-stay"},
}
"""Steps but the last: severity → codes that only that step gives."""


def _known() -> Iterator[tuple[str, str, str]]:
    for step in Step:
        for severity, words in _STEPS.get(step, {}).items():
            yield from ((step, severity, code) for code in words.split(" "))
        # What a port raises, whichever step asks it.
        yield from ((step, _FAULT, code) for code in codes(errors.DeviceFault) | {"scrub-overdue"})
        yield from ((step, _DIRTY, code) for code in codes(errors.Retry))
    for code, meaning in SIGNALS.items():
        yield Step.HEALTH, meaning.severity, code
        if code in ACCEPTABLE or code.startswith("lifetime-"):
            yield Step.HEALTH, _NOTE, code
    yield from ((Step.HEALTH, severity, XID) for severity in {_NOTE, *(each.severity for each in XIDS.values())})


KNOWN: Final = frozenset(_known())
"""Step, severity and code of everything that is known to be found; all XIDs are one code."""


def labels_of(finding: Finding) -> tuple[str, str, str]:
    """Step, severity and code under which ``finding`` is counted."""
    code = XID if finding.code.startswith(f"{XID}-") else finding.code
    labels = (finding.step, finding.severity, code)
    return labels if labels in KNOWN else (finding.step, finding.severity, OTHER)
