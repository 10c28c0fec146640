"""What NVIDIA's driver can report about a GPU while it lasts, and what each condition means. XIDs have a file: ``xid.yaml``."""

from __future__ import annotations

from collections.abc import Mapping

from scrubber.domain.evidence import Severity
from scrubber.domain.health import WayBack
from scrubber.domain.signal_table import COMMON, ErrorCodes, Meaning

__all__ = ["NVIDIA_SIGNALS"]

_FAULT, _WARNING, _NOTE = Severity.FAULT, Severity.WARNING, Severity.NOTE
_RESET, _WAIT, _PERSON = WayBack.RESET, WayBack.WAIT, WayBack.PERSON

_CONDITIONS: Mapping[str, Meaning] = {
    "reset-required": Meaning(_FAULT, _RESET, "the driver refuses to work with it until it is reset"),
    "row-remap-pending": Meaning(_FAULT, _RESET, "rows of its memory wait for a reset to be remapped"),
    "row-remap-failure": Meaning(_FAULT, _PERSON, "rows of its memory are broken and could not be remapped"),
    "page-retirement-pending": Meaning(_FAULT, _RESET, "pages of its memory wait for a reset to be retired"),
    "page-retirement-limit": Meaning(_FAULT, _PERSON, "it has retired as many pages of its memory as it can"),
    "fabric-failed": Meaning(_FAULT, _RESET, "it could not join the NVLink fabric"),
    "hw-slowdown": Meaning(_WARNING, _WAIT, "the hardware has slowed it down"),
    "hw-thermal-slowdown": Meaning(_WARNING, _WAIT, "the hardware has slowed it down because it is too hot"),
    "power-brake": Meaning(_WARNING, _WAIT, "a power brake slows it down"),
    "pcie-width": Meaning(_WARNING, _RESET, "its PCIe link is narrower than it should be", acceptable=True),
    "pcie-generation": Meaning(_WARNING, _RESET, "its PCIe link is slower than it should be", acceptable=True),
    "nvlink-down": Meaning(_WARNING, _RESET, "NVLinks are down", acceptable=True),
    "inforom-corrupt": Meaning(_WARNING, _PERSON, "its InfoROM does not check out", acceptable=True),
    "ecc-mode-pending": Meaning(_WARNING, _RESET, "a change of its ECC mode waits for a reset"),
    "mig-mode-pending": Meaning(_WARNING, _RESET, "a change of its MIG mode waits for a reset"),
    "events-unheard": Meaning(_WARNING, _WAIT, "what its driver reports by itself, XIDs among it, may go unseen"),
    "scrub-on-free-disabled": Meaning(_NOTE, _PERSON, "the driver was told not to clear memory that is freed"),
}

NVIDIA_SIGNALS = COMMON.with_conditions(_CONDITIONS, ErrorCodes(prefix="xid", name="XID"))
"""Everything that can go wrong with a GPU of NVIDIA's."""
