"""Errors of GPUs since the last reset by this service.

The driver counts from its start on and a reset does not set its counters to zero, so an error that a reset has cured
would be reported for ever. What was counted at the last reset is subtracted. Records of errors are distinguished by
their identity and not counted, because the driver overwrites old ones. Both are kept in a file, because they outlive the
service. The file is of no use after a reboot, and is ignored then.
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

__all__ = ["ErrorCounters"]


@dataclass(frozen=True, slots=True)
class _AtReset:
    errors: Mapping[str, int] = field(default_factory=dict)
    records: Collection[str] = ()


class ErrorCounters:
    """What each GPU (by its PCI address) had counted and recorded at its last reset.

    Args:
        boot: the boot ID; counts of another boot are ignored.
    """

    def __init__(self, file: Path, boot: str) -> None:
        self._file = file
        self._boot = boot
        self._at_reset = _load(file, boot)

    def since_reset(self, gpu: str, counted: Mapping[str, int]) -> dict[str, int]:
        """Return the errors by block since the last reset. A counter that has fallen started again from zero: all of it counts."""
        before = self._at_reset.get(gpu, _AtReset()).errors
        return {
            block: count - before.get(block, 0) if count >= before.get(block, 0) else count
            for block, count in counted.items()
        }

    def records_since_reset(self, gpu: str, records: Iterable[str]) -> int:
        """Return how many of ``records`` were not there at the last reset."""
        before = self._at_reset.get(gpu, _AtReset()).records
        return sum(record not in before for record in records)

    def record_reset(self, gpu: str, counted: Mapping[str, int], records: Iterable[str]) -> None:
        """Record that ``gpu`` was reset, and what its counters and records are now.

        Where that cannot be written, it holds for this run of the service, and the next one resets the GPU once more.
        """
        self._at_reset[gpu] = _AtReset(dict(counted), frozenset(records))
        draft = self._file.with_suffix(".new")
        with suppress(OSError):
            with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600), "w") as file:
                at_reset = {
                    each: {"errors": found.errors, "records": sorted(found.records)}
                    for each, found in self._at_reset.items()
                }
                json.dump({"boot": self._boot, "atReset": at_reset}, file)
            draft.replace(self._file)


def _load(path: Path, boot: str) -> dict[str, _AtReset]:
    """Return what is on record for this boot; nothing where the file is missing or damaged: then more errors count."""
    try:
        found = json.loads(path.read_bytes())
        if found["boot"] != boot:
            return {}
        return {gpu: _parse(at_reset) for gpu, at_reset in found["atReset"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return {}


def _parse(at_reset: Mapping[str, Any]) -> _AtReset:
    """Return one GPU's entry; raises ValueError and others for what was not written here."""
    errors, records = at_reset["errors"], at_reset["records"]
    if not all(type(count) is int and count >= 0 for count in errors.values()):
        raise ValueError("an error counter is not a count")
    if not isinstance(records, list) or not all(isinstance(record, str) for record in records):
        raise ValueError("the records are not a list of strings")
    return _AtReset(errors, frozenset(records))
