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
    "reset-required": Classification(_FAULT, _RESET, "the driver does not use the device until it is reset"),
    "row-remap-pending": Classification(_FAULT, _RESET, "memory rows are waiting for a reset to be remapped"),
    "row-remap-failure": Classification(_FAULT, _PERSON, "memory rows are broken and could not be remapped"),
    "page-retirement-pending": Classification(_FAULT, _RESET, "memory pages are waiting for a reset to be retired"),
    "page-retirement-limit": Classification(_FAULT, _PERSON, "the maximum number of memory pages is retired"),
    "fabric-failed": Classification(_FAULT, _RESET, "the device could not join the NVLink fabric"),
    "hw-slowdown": Classification(_WARNING, _WAIT, "the hardware has slowed the device down"),
    "hw-thermal-slowdown": Classification(
        _WARNING, _WAIT, "the hardware has slowed the device down because it is too hot"
    ),
    "power-brake": Classification(_WARNING, _WAIT, "a power brake slows the device down"),
    "pcie-width": Classification(_WARNING, _RESET, "the PCIe link is narrower than its maximum", acceptable=True),
    "pcie-generation": Classification(_WARNING, _RESET, "the PCIe link is slower than its maximum", acceptable=True),
    "nvlink-down": Classification(_WARNING, _RESET, "NVLinks are down", acceptable=True),
    "inforom-corrupt": Classification(_WARNING, _PERSON, "the InfoROM is corrupt", acceptable=True),
    "ecc-mode-pending": Classification(_WARNING, _RESET, "a change of the ECC mode is waiting for a reset"),
    "mig-mode-pending": Classification(_WARNING, _RESET, "a change of the MIG mode is waiting for a reset"),
    "event-stream-lost": Classification(_WARNING, _WAIT, "events that the driver reports, such as XIDs, may be missed"),
    "scrub-on-free-disabled": Classification(_NOTE, _PERSON, "the driver is configured not to clear freed memory"),
}

NVIDIA_SIGNALS = COMMON_SIGNALS.with_conditions(_CONDITIONS, ErrorCodeFormat(prefix="xid", name="XID"))
"""Every signal that can report a problem with an NVIDIA GPU."""
