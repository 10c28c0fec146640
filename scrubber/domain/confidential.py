"""Whether devices in a confidential-computing mode may accept work: one switch for all devices of the node."""

from __future__ import annotations

from collections.abc import Iterable

from scrubber.domain.record import DeviceRecord
from scrubber.domain.states import Hygiene

__all__ = ["may_accept_work"]


# See docs/decisions/0042-confidential-computing.md.
def may_accept_work(records: Iterable[DeviceRecord]) -> bool:
    """Return whether devices may accept work while no grant and no child of the service is in progress.

    A device that is in use keeps the switch on, because a tenant could open no further context without it. Otherwise
    every device in service must be proved clean; devices that are out of service do not count.
    """
    known = tuple(records)
    if any(record.hygiene is Hygiene.IN_USE for record in known):
        return True
    served = [record for record in known if record.advertised]
    return bool(served) and all(record.hygiene is Hygiene.CLEAN for record in served)
