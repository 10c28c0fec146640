"""What each NVML error means to this service: one row per code, translated here and nowhere else.

A row defines the fault that is reported to the parent, and what an operator can do. Codes that mean "this GPU or driver
has no such feature" are not faults where a value is optional: the value is then absent, and an absent value never
counts as fine.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from scrubber.adapters.children.child import Fault

__all__ = [
    "CORRUPTED_INFOROM",
    "NVML_ERRORS",
    "RESET_REQUIRED",
    "DriverUnavailable",
    "NvmlErrorInfo",
    "NvmlErrorKind",
    "NvmlFault",
    "error_info",
]

RESET_REQUIRED = 16
CORRUPTED_INFOROM = 14


class NvmlErrorKind(StrEnum):
    """The consequence of an error.

    All but the last are codes of :data:`scrubber.adapters.children.request_pool.FAULT_TYPES`.
    """

    LOST = "lost"
    UNREADABLE = "unreadable"
    AWAY = "away"
    HELD = "held"
    STUCK = "stuck"
    NOT_APPLICABLE = "not-applicable"


@dataclass(frozen=True, slots=True)
class NvmlErrorInfo:
    """One row: the kind of the error, and a message for the operator."""

    kind: NvmlErrorKind
    message: str


class NvmlFault(Fault):
    """An NVML error as a reply to the parent; ``nvml_code`` is NVML's code."""

    def __init__(self, nvml_code: int, subject: str) -> None:
        meaning = error_info(nvml_code)
        kind = NvmlErrorKind.UNREADABLE if meaning.kind is NvmlErrorKind.NOT_APPLICABLE else meaning.kind
        super().__init__(kind.value, f"{subject}: {meaning.message}")
        self.nvml_code = nvml_code
        self.not_applicable = meaning.kind is NvmlErrorKind.NOT_APPLICABLE


class DriverUnavailable(Fault):
    """A failed initialisation. It is not about any GPU, so the driver is unavailable, whichever the code."""

    def __init__(self, nvml_code: int) -> None:
        super().__init__(
            NvmlErrorKind.AWAY.value, f"{error_info(nvml_code).message} (NVML error {nvml_code} at initialisation)"
        )
        self.nvml_code = nvml_code


NVML_ERRORS: Mapping[int, NvmlErrorInfo] = {
    1: NvmlErrorInfo(NvmlErrorKind.AWAY, "NVML is not initialised; the driver is queried again with the next check."),
    2: NvmlErrorInfo(
        NvmlErrorKind.UNREADABLE,
        "NVML reports an invalid argument: the GPU is not as it was described, or the library is older than "
        "this service supports.",
    ),
    3: NvmlErrorInfo(NvmlErrorKind.NOT_APPLICABLE, "This GPU does not support the request."),
    4: NvmlErrorInfo(
        NvmlErrorKind.UNREADABLE, "NVML denies permission: run the scrub service as root with CAP_SYS_ADMIN."
    ),
    5: NvmlErrorInfo(NvmlErrorKind.UNREADABLE, "NVML was initialised twice, which is a bug in this service."),
    6: NvmlErrorInfo(
        NvmlErrorKind.LOST, "The driver no longer finds the GPU; look for it with lspci and nvidia-smi -L."
    ),
    7: NvmlErrorInfo(
        NvmlErrorKind.UNREADABLE,
        "The driver's data no longer fits the buffer size that it requested; the query is retried.",
    ),
    8: NvmlErrorInfo(NvmlErrorKind.UNREADABLE, "The GPU gets too little power: check its external power cables."),
    9: NvmlErrorInfo(
        NvmlErrorKind.AWAY, "The driver is not loaded: load it (modprobe nvidia) or wait for the driver's container."
    ),
    10: NvmlErrorInfo(
        NvmlErrorKind.STUCK,
        "The driver timed out waiting for the GPU; if this persists, reset the GPU or reboot the node.",
    ),
    11: NvmlErrorInfo(
        NvmlErrorKind.UNREADABLE,
        "The kernel has a problem with the GPU's interrupts: check dmesg, then reseat the GPU or move it to "
        "another slot.",
    ),
    12: NvmlErrorInfo(
        NvmlErrorKind.AWAY,
        "The driver's library (libnvidia-ml.so.1) was not found: install the driver, or pass its location "
        "(--nvidia-driver-root).",
    ),
    13: NvmlErrorInfo(
        NvmlErrorKind.NOT_APPLICABLE,
        "The driver's library does not have this function: it is older than this service supports.",
    ),
    14: NvmlErrorInfo(NvmlErrorKind.UNREADABLE, "The GPU's InfoROM is corrupt: have the GPU serviced."),
    15: NvmlErrorInfo(
        NvmlErrorKind.LOST, "The GPU has fallen off the bus or is inaccessible: reset it, or reboot the node."
    ),
    16: NvmlErrorInfo(NvmlErrorKind.UNREADABLE, "The GPU does not respond until it is reset (nvidia-smi --gpu-reset)."),
    17: NvmlErrorInfo(
        NvmlErrorKind.UNREADABLE,
        "The operating system denies access to the GPU: check the device cgroup and the permissions of /dev/nvidia*.",
    ),
    18: NvmlErrorInfo(
        NvmlErrorKind.AWAY,
        "The versions of the driver and its library differ: reboot, or reload the driver after its update.",
    ),
    19: NvmlErrorInfo(NvmlErrorKind.HELD, "A process is using the GPU; retry once none does."),
    20: NvmlErrorInfo(NvmlErrorKind.AWAY, "The node has too little memory for the driver's library."),
    21: NvmlErrorInfo(NvmlErrorKind.UNREADABLE, "The driver has no data."),
    22: NvmlErrorInfo(NvmlErrorKind.NOT_APPLICABLE, "vGPUs do not support this with ECC enabled."),
    23: NvmlErrorInfo(NvmlErrorKind.AWAY, "The driver is short of resources; the query is retried."),
    24: NvmlErrorInfo(
        NvmlErrorKind.UNREADABLE,
        "The GPU does not support this frequency: use one that nvidia-smi -q -d SUPPORTED_CLOCKS lists.",
    ),
    25: NvmlErrorInfo(
        NvmlErrorKind.NOT_APPLICABLE,
        "The driver's library does not support this version of the request: it is older than this service.",
    ),
    26: NvmlErrorInfo(NvmlErrorKind.NOT_APPLICABLE, "The driver no longer supports this function."),
    27: NvmlErrorInfo(
        NvmlErrorKind.AWAY, "The GPU is not ready; with confidential computing it must be set ready first."
    ),
    28: NvmlErrorInfo(NvmlErrorKind.LOST, "This GPU does not exist; look for it with lspci and nvidia-smi -L."),
    29: NvmlErrorInfo(NvmlErrorKind.UNREADABLE, "The GPU is in a state that does not allow this."),
    30: NvmlErrorInfo(NvmlErrorKind.UNREADABLE, "The GPU does not support this type of reset."),
    999: NvmlErrorInfo(
        NvmlErrorKind.UNREADABLE,
        "The driver reports an internal error: check dmesg; a reset or a reboot may help.",
    ),
}

_UNKNOWN_ERROR = NvmlErrorInfo(NvmlErrorKind.UNREADABLE, "The driver reports an error that this service does not know.")


def error_info(nvml_code: int) -> NvmlErrorInfo:
    """Return the row for NVML's code ``nvml_code``; a code without a row is unreadable, never fine."""
    return NVML_ERRORS.get(nvml_code, _UNKNOWN_ERROR)
