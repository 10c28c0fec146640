"""The list of attack programs, and what each says about itself."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Program", "names", "program"]

_OTHERS = ("__init__", "__main__", "programs", "reader", "tools")


@dataclass(frozen=True, slots=True)
class Program:
    """What an attack says about itself.

    Attributes:
        tries: what it tries.
        holds: what must hold.
        threats: ids of the threat model's rows that it tests.
        devices: how many devices its pod requests.
        has_accomplice: whether it needs a second pod, without a device.
        accomplice_keeps_device: whether that pod keeps the device after the end of the attacking pod: no other pod may then
            get the device before that pod is deleted.
        targets: what it attacks besides the device: ``sockets``, ``logs`` or ``mounts``.
    """

    name: str
    tries: str
    holds: str
    threats: tuple[str, ...]
    devices: int
    has_accomplice: bool
    accomplice_keeps_device: bool
    targets: str


def names() -> list[str]:
    """Return the names of all attacks."""
    found = (path.stem for path in Path(__file__).parent.glob("*.py"))
    return sorted(name for name in found if name not in _OTHERS and not name.startswith("test_"))


def program(name: str) -> Program:
    """Return what the attack ``name`` says about itself."""
    module = importlib.import_module(f"tests.attacks.{name}")
    return Program(
        name,
        module.TRIES,
        module.HOLDS,
        module.THREATS,
        devices=getattr(module, "DEVICES", 1),
        has_accomplice=hasattr(module, "accomplice"),
        accomplice_keeps_device=getattr(module, "ACCOMPLICE_KEEPS_DEVICE", False),
        targets=getattr(module, "TARGETS", ""),
    )
