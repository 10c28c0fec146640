"""The committed rules on a faster clock, so that what takes an hour on a node happens within a test.

Every duration of the rules (``for``, windows, offsets) is replaced by the shorter one of one table, which keeps their
order, and a duration that the table lacks is an error. Whole hours in numbers of seconds
(``3 * 3600``) go by the same clock, and so does the number of starts in an hour. The originals are tried in their own time
by promtool (``test_rules.py``) and on a recorded hour (``test_calm_hour.py``).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import yaml

__all__ = ["HOUR", "SECONDS", "STARTS", "faster"]

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
"""Duration of the rules → seconds that stand for it. ``2m`` is longer than a restart of either daemon takes here."""

HOUR: Final = 10
"""Seconds that stand for an hour where the rules say 3600: three of them pass within a story."""

STARTS: Final = {20: 5}
"""Starts in an hour → starts in the seconds that stand for it. Each takes seconds on a machine with other work."""

_STARTS = re.compile(r"(?<=\[1h\]\)\) > )([1-9]\d*)")
_IN_QUERY = re.compile(r"(?<=\[)([^\]\[]+)(?=\])|(?<=\boffset )(\w+)")


def faster(rules: Path, into: Path) -> Path:
    """Write the rules of the file ``rules`` into the directory ``into``, on the faster clock; where they are now.

    Raises:
        ValueError: a duration that the table lacks.
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
    def shorter(found: re.Match[str]) -> str:
        return _shorter(found[0])

    expression = _STARTS.sub(lambda found: str(STARTS[int(found[0])]), rule["expr"])
    rule["expr"] = re.sub(r"\b3600\b", str(HOUR), _IN_QUERY.sub(shorter, expression))
    if "for" in rule:
        rule["for"] = _shorter(rule["for"])


def _shorter(duration: str) -> str:
    if duration not in SECONDS:
        raise ValueError(f"no shorter duration stands for {duration} of the rules: add it to SECONDS")
    return f"{SECONDS[duration]}s"
