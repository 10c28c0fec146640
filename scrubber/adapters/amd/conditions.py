"""Problems of a GPU that AMD's driver reports, and what each one means.

Numbered errors are the driver's RAS blocks: an uncorrected error of a block other than the memory has the number that
the driver gives the block.
"""

from __future__ import annotations

from collections.abc import Mapping

from scrubber.domain.evidence import Severity
from scrubber.domain.health.signal_table import COMMON_SIGNALS, Classification, ErrorClass, ErrorCodeFormat
from scrubber.domain.states import RecoveryMethod

__all__ = ["AMD_SIGNALS", "ERROR_SIGNAL", "MEMORY_BLOCK", "block_number"]

ERROR_SIGNAL = "ras"
MEMORY_BLOCK = "umc"
"""The memory's controller: its uncorrected errors are the ECC errors of the device."""

_BLOCKS = (
    *(MEMORY_BLOCK, "sdma", "gfx", "mmhub", "athub", "pcie_bif", "hdp", "xgmi_wafl", "df", "smn", "sem", "mp0", "mp1"),
    *("fuse", "mca", "vcn", "jpeg", "ih", "mpio"),
)
"""Blocks in the order of the driver's enumeration."""
_OTHER_BLOCK = 99

_FAULT, _WARNING = Severity.FAULT, Severity.WARNING
_RESET, _PERSON = RecoveryMethod.RESET, RecoveryMethod.OPERATOR

_CONDITIONS: Mapping[str, Classification] = {
    "page-retirement-pending": Classification(_FAULT, _RESET, "memory pages are waiting for a reset to be retired"),
    "bad-page-threshold": Classification(
        _FAULT, _PERSON, "more memory pages are broken than the driver accepts: the GPU must be replaced"
    ),
    "cper-fatal": Classification(_FAULT, _RESET, "the driver has recorded a fatal hardware error (CPER)"),
    "page-retirement-failure": Classification(_FAULT, _PERSON, "memory pages are broken and could not be retired"),
    "pcie-width": Classification(_WARNING, _RESET, "the PCIe link is narrower than its maximum", acceptable=True),
}


def block_number(name: str) -> int:
    """Return the number of a block's uncorrected errors; 99 for a block that this version does not know."""
    return _BLOCKS.index(name) if name in _BLOCKS else _OTHER_BLOCK


AMD_SIGNALS = COMMON_SIGNALS.with_conditions(
    _CONDITIONS,
    ErrorCodeFormat(prefix=ERROR_SIGNAL, name="Uncorrected RAS error in block"),
    error_classes=dict.fromkeys((*range(1, len(_BLOCKS)), _OTHER_BLOCK), ErrorClass.RESET),
)
"""Every signal that can report a problem with an AMD GPU."""
