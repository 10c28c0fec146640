"""A storm of XIDs on one simulated device, from one process, as a faulty GPU or a hostile tenant can cause it.

Promise: it raises as many XIDs as requested, no faster than requested. Each XID is an event, and a separate replacement
of the control file as long as this process keeps up; late ones are raised together, so that a busy machine raises no
fewer.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce
from pathlib import Path

from scrubber.adapters.sim import control
from scrubber.adapters.sim.faults import Faults
from scrubber.domain.errors import InvalidRequest

__all__ = ["XidStormResult", "raise_xids"]

_MAX_XIDS = 10_000_000
_MAX_RATE = 100_000.0


@dataclass(frozen=True, slots=True)
class XidStormResult:
    """The result of a storm.

    Attributes:
        raised: number of XIDs.
        changes: number of changes of the control file; fewer than ``raised`` where some were late.
        seconds: time from the first to the last.
    """

    raised: int
    changes: int
    seconds: float


def raise_xids(
    directory: Path,
    device: str,
    codes: Sequence[int],
    *,
    repeat: int,
    rate: float,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], object] = time.sleep,
) -> XidStormResult:
    """Raise the XIDs ``codes`` of ``device`` in turn, ``repeat`` in all, ``rate`` per second.

    Raises:
        InvalidRequest: no such device, or a number out of its range.
        InvalidConfiguration: there is no simulated node in ``directory``.
        Unreadable: the device's control file is malformed.
    """
    if not codes or not all(1 <= code <= control.MAX_XID for code in codes):
        raise InvalidRequest(f"A storm needs at least one XID, each from 1 to {control.MAX_XID}.")
    if not 1 <= repeat <= _MAX_XIDS:
        raise InvalidRequest(f"repeat {repeat} is out of range (1 to {_MAX_XIDS}): it is the number of XIDs raised.")
    if not 0 < rate <= _MAX_RATE:
        raise InvalidRequest(f"rate {rate:g} is out of range (above 0, to {_MAX_RATE:g}): it is XIDs per second.")
    place = control.find_sim_device(directory, device).directory
    began, raised, changes = clock(), 0, 0
    while True:
        due = min(repeat, 1 + int((clock() - began) * rate))
        if due > raised:
            late = [codes[number % len(codes)] for number in range(raised, due)]
            control.update_faults(place, lambda faults, late=late: reduce(Faults.with_xid, late, faults))  # type: ignore[misc]
            raised, changes = due, changes + 1
        if raised >= repeat:
            return XidStormResult(raised, changes, clock() - began)
        sleep(max(0.0, began + raised / rate - clock()))
