"""Conditions of a GPU that NVIDIA's driver can report while they last, and what each one means. XIDs: ``xid.yaml``."""

from __future__ import annotations

from collections.abc import Mapping

from scrubber.domain.evidence import Severity
from scrubber.domain.health.signal_table import COMMON_SIGNALS, Classification, ErrorCodeFormat
from scrubber.domain.states import RecoveryMethod

__all__ = ["NVIDIA_SIGNALS"]

_FAULT, _WARNING, _NOTE = Severity.FAULT, Severity.WARNING, Severity.NOTE
_RESET, _WAIT, _PERSON = RecoveryMethod.RESET, RecoveryMethod.WAIT, RecoveryMethod.OPERATOR

_CONDITIONS: Mapping[str, Classification] = {
    "reset-required": Classification(_FAULT, _RESET, "the driver refuses to work with it until it is reset"),
    "row-remap-pending": Classification(_FAULT, _RESET, "rows of its memory wait for a reset to be remapped"),
    "row-remap-failure": Classification(_FAULT, _PERSON, "rows of its memory are broken and could not be remapped"),
    "page-retirement-pending": Classification(_FAULT, _RESET, "pages of its memory wait for a reset to be retired"),
    "page-retirement-limit": Classification(_FAULT, _PERSON, "it has retired as many pages of its memory as it can"),
    "fabric-failed": Classification(_FAULT, _RESET, "it could not join the NVLink fabric"),
    "hw-slowdown": Classification(_WARNING, _WAIT, "the hardware has slowed it down"),
    "hw-thermal-slowdown": Classification(_WARNING, _WAIT, "the hardware has slowed it down because it is too hot"),
    "power-brake": Classification(_WARNING, _WAIT, "a power brake slows it down"),
    "pcie-width": Classification(_WARNING, _RESET, "its PCIe link is narrower than it should be", acceptable=True),
    "pcie-generation": Classification(_WARNING, _RESET, "its PCIe link is slower than it should be", acceptable=True),
    "nvlink-down": Classification(_WARNING, _RESET, "NVLinks are down", acceptable=True),
    "inforom-corrupt": Classification(_WARNING, _PERSON, "its InfoROM does not check out", acceptable=True),
    "ecc-mode-pending": Classification(_WARNING, _RESET, "a change of its ECC mode waits for a reset"),
    "mig-mode-pending": Classification(_WARNING, _RESET, "a change of its MIG mode waits for a reset"),
    "event-stream-lost": Classification(
        _WARNING, _WAIT, "what its driver reports by itself, XIDs among it, may go unseen"
    ),
    "scrub-on-free-disabled": Classification(_NOTE, _PERSON, "the driver was told not to clear memory that is freed"),
}

NVIDIA_SIGNALS = COMMON_SIGNALS.with_conditions(_CONDITIONS, ErrorCodeFormat(prefix="xid", name="XID"))
"""Every signal that can report a problem with an NVIDIA GPU."""
