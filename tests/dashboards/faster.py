"""The committed rules on a faster clock, so that what takes an hour on a node happens within a test.

Every duration of the rules (``for``, windows, offsets) is replaced by a shorter one from a table that keeps their
order; a duration missing in the table is an error. Whole hours in seconds (``3 * 3600``) and the number of starts in an
hour are scaled likewise. The original rules are tested with their own times by promtool (``test_rules.py``) and on a
recorded hour (``test_calm_hour.py``).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import yaml

__all__ = ["HOUR", "SECONDS", "STARTS", "WIDER", "faster"]

SECONDS: Final[Mapping[str, int]] = {
    "0m": 0,
    "1m": 5,
    "2m": 16,
    "5m": 18,
    "10m": 20,
    "15m": 22,
    "30m": 24,
    "1h": 30,
    "6h": 120,
    "1d": 600,
    "7d": 600,
}
"""Duration in the rules → seconds that replace it. ``2m`` is longer than a restart of either daemon takes here."""

WIDER: Final[Mapping[str, Mapping[str, int]]] = {"ScrubberAuditTruncated": {"1h": 300}}
"""Alert → durations for which it has other seconds: its window reaches across a restart, however long that takes."""

HOUR: Final = 10
"""Seconds that replace an hour where the rules contain 3600: three of them pass within a scenario."""

STARTS: Final = {20: 5}
"""Starts in an hour → starts in the seconds that replace it. Each takes seconds on a machine with other work."""

_STARTS = re.compile(r"(?<=\[1h\]\)\) > )([1-9]\d*)")
_IN_QUERY = re.compile(r"(?<=\[)([^\]\[]+)(?=\])|(?<=\boffset )(\w+)")


def faster(rules: Path, into: Path) -> Path:
    """Write the rules of the file ``rules`` into the directory ``into``, on the faster clock; return the new path.

    Raises:
        ValueError: a duration is missing in the table.
    """
    document = yaml.safe_load(rules.read_text())
    for group in document["groups"]:
        group["interval"] = "1s"
        for rule in group["rules"]:
            _quicken(rule)
    written = into / rules.name
    written.write_text(yaml.safe_dump(document, sort_keys=False))
    return written


def _quicken(rule: dict[str, Any]) -> None:
    seconds = {**SECONDS, **WIDER.get(rule.get("alert", ""), {})}

    def shorter(found: re.Match[str]) -> str:
        return _shorter(found[0], seconds)

    expression = _STARTS.sub(lambda found: str(STARTS[int(found[0])]), rule["expr"])
    rule["expr"] = re.sub(r"\b3600\b", str(HOUR), _IN_QUERY.sub(shorter, expression))
    if "for" in rule:
        rule["for"] = _shorter(rule["for"], seconds)


def _shorter(duration: str, seconds: Mapping[str, int]) -> str:
    """Return the replacement of a duration, or of the range and the step of a subquery (``7d:1h``)."""
    return ":".join(_shorter_part(part, seconds) for part in duration.split(":"))


def _shorter_part(duration: str, seconds: Mapping[str, int]) -> str:
    if duration not in seconds:
        raise ValueError(f"no shorter duration is defined for {duration} of the rules: add it to SECONDS")
    return f"{seconds[duration]}s"
