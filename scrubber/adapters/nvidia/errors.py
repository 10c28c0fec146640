"""What each error of NVML means to this service: one row a code, translated here and nowhere else.

A row says which fault the parent hears of, and what a person can do. Codes that mean "this GPU or driver has no such
thing" are no faults where a value is optional: the value is then absent, which is never the same as fine.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from scrubber.adapters.children.child import Fault

__all__ = [
    "CORRUPTED_INFOROM",
    "MEANINGS",
    "RESET_REQUIRED",
    "DriverAway",
    "Kind",
    "Meaning",
    "NvmlFault",
    "meaning_of",
]

RESET_REQUIRED = 16
CORRUPTED_INFOROM = 14


class Kind(StrEnum):
    """What follows from an error. All but the last are codes of :data:`scrubber.adapters.children.questions.FAULTS`."""

    LOST = "lost"
    UNREADABLE = "unreadable"
    AWAY = "away"
    HELD = "held"
    STUCK = "stuck"
    NOT_APPLICABLE = "not-applicable"


@dataclass(frozen=True, slots=True)
class Meaning:
    """One row: what follows, and a sentence for the operator."""

    kind: Kind
    sentence: str


class NvmlFault(Fault):
    """An error of NVML as an answer to the parent; ``number`` is NVML's code."""

    def __init__(self, number: int, about: str) -> None:
        meaning = meaning_of(number)
        kind = Kind.UNREADABLE if meaning.kind is Kind.NOT_APPLICABLE else meaning.kind
        super().__init__(kind.value, f"{about}: {meaning.sentence}")
        self.number = number
        self.not_applicable = meaning.kind is Kind.NOT_APPLICABLE


class DriverAway(Fault):
    """A failed initialisation. It says nothing about any GPU, so the driver is away, whatever the code."""

    def __init__(self, number: int) -> None:
        super().__init__(Kind.AWAY.value, f"{meaning_of(number).sentence} (NVML error {number} at initialisation)")
        self.number = number


MEANINGS: Mapping[int, Meaning] = {
    1: Meaning(Kind.AWAY, "NVML is not initialised; the driver is asked again with the next look."),
    2: Meaning(
        Kind.UNREADABLE,
        "NVML calls an argument invalid: the GPU is not there as it was described, or the library is older than we know.",
    ),
    3: Meaning(Kind.NOT_APPLICABLE, "This GPU does not support it."),
    4: Meaning(Kind.UNREADABLE, "NVML denies permission: run the scrub service as root with CAP_SYS_ADMIN."),
    5: Meaning(Kind.UNREADABLE, "NVML says that it was initialised twice, which is a defect of this service."),
    6: Meaning(Kind.LOST, "The driver does not find it any more; look for it with lspci and nvidia-smi -L."),
    7: Meaning(
        Kind.UNREADABLE, "What the driver has to say does not fit what it asked for a moment ago; it is asked again."
    ),
    8: Meaning(Kind.UNREADABLE, "The GPU gets too little power: check its external power cables."),
    9: Meaning(Kind.AWAY, "The driver is not loaded: load it (modprobe nvidia) or wait for the driver's container."),
    10: Meaning(
        Kind.STUCK, "The driver gave up waiting for the GPU; if this goes on, reset the GPU or reboot the node."
    ),
    11: Meaning(
        Kind.UNREADABLE,
        "The kernel sees a problem with the GPU's interrupts: look into dmesg, then reseat the GPU or move it to another slot.",
    ),
    12: Meaning(
        Kind.AWAY,
        "The driver's library (libnvidia-ml.so.1) is not found: install the driver, or say where it is (--nvidia-driver-root).",
    ),
    13: Meaning(Kind.NOT_APPLICABLE, "The driver's library has no such function: it is older than this service knows."),
    14: Meaning(Kind.UNREADABLE, "The GPU's InfoROM is corrupt: have the GPU serviced."),
    15: Meaning(Kind.LOST, "The GPU has fallen off the bus or is inaccessible: reset it, or reboot the node."),
    16: Meaning(Kind.UNREADABLE, "The GPU answers nothing until it is reset (nvidia-smi --gpu-reset)."),
    17: Meaning(
        Kind.UNREADABLE,
        "The operating system denies access to the GPU: check the device cgroup and the permissions of /dev/nvidia*.",
    ),
    18: Meaning(
        Kind.AWAY,
        "The driver and its library are of different versions: reboot, or reload the driver after its update.",
    ),
    19: Meaning(Kind.HELD, "Somebody is using it; it can be done once nobody does."),
    20: Meaning(Kind.AWAY, "The node has too little memory for the driver's library."),
    21: Meaning(Kind.UNREADABLE, "The driver has no data about it."),
    22: Meaning(Kind.NOT_APPLICABLE, "vGPUs do not support this with ECC on."),
    23: Meaning(Kind.AWAY, "The driver is short of resources; it is asked again."),
    24: Meaning(
        Kind.UNREADABLE, "The GPU does not know this frequency: name one that nvidia-smi -q -d SUPPORTED_CLOCKS lists."
    ),
    25: Meaning(
        Kind.NOT_APPLICABLE,
        "The driver's library does not know this version of the question: it is older than this service.",
    ),
    26: Meaning(Kind.NOT_APPLICABLE, "The driver has given this function up."),
    27: Meaning(Kind.AWAY, "The GPU is not ready yet; with confidential computing it must be set ready first."),
    28: Meaning(Kind.LOST, "There is no such GPU; look for it with lspci and nvidia-smi -L."),
    29: Meaning(Kind.UNREADABLE, "The GPU is in a state that does not allow this."),
    30: Meaning(Kind.UNREADABLE, "The GPU does not support this type of reset."),
    999: Meaning(
        Kind.UNREADABLE, "The driver reports an internal error: look into dmesg; a reset or a reboot may cure it."
    ),
}

_IN_NO_TABLE = Meaning(Kind.UNREADABLE, "The driver answers with an error that this service does not know.")


def meaning_of(number: int) -> Meaning:
    """The row for NVML's code ``number``; a code in no row is unreadable, never fine."""
    return MEANINGS.get(number, _IN_NO_TABLE)
