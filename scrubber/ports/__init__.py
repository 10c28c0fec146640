"""What the engine needs from the outside, as Protocols of at most five methods each.

Each docstring states preconditions, units and errors. Unless it says otherwise a method raises
:class:`scrubber.domain.errors.DeviceFault` (or a subclass) when the device cannot be trusted, and never returns
made-up data. Methods may be cancelled at any ``await``; a cancelled method leaves nothing running on the device except
where its docstring says so.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from scrubber.ports.assignments import Assignments
    from scrubber.ports.clock import Clock
    from scrubber.ports.containers import Containers
    from scrubber.ports.diagnostics import Diagnostics
    from scrubber.ports.eraser import Eraser, EraseReport, EraseRequest, OnChip, Progress
    from scrubber.ports.holders import Holders
    from scrubber.ports.inventory import Inventory
    from scrubber.ports.journal import Event, Journal
    from scrubber.ports.ledger import (
        AuditTrail,
        Certificates,
        Change,
        HistoryEntry,
        HistoryQuery,
        Ledger,
        LedgerState,
    )
    from scrubber.ports.policies import Policies
    from scrubber.ports.resetter import Resetter
    from scrubber.ports.settings import Settings
    from scrubber.ports.signer import Signer
    from scrubber.ports.telemetry import Telemetry
    from scrubber.ports.tracer import UNTRACED, Attribute, Span, Tracer

__all__ = [
    "UNTRACED",
    "Assignments",
    "Attribute",
    "AuditTrail",
    "Certificates",
    "Change",
    "Clock",
    "Containers",
    "Diagnostics",
    "EraseReport",
    "EraseRequest",
    "Eraser",
    "Event",
    "HistoryEntry",
    "HistoryQuery",
    "Holders",
    "Inventory",
    "Journal",
    "Ledger",
    "LedgerState",
    "OnChip",
    "Policies",
    "Progress",
    "Resetter",
    "Settings",
    "Signer",
    "Span",
    "Telemetry",
    "Tracer",
]

_MODULES = {
    "assignments": ("Assignments",),
    "clock": ("Clock",),
    "containers": ("Containers",),
    "diagnostics": ("Diagnostics",),
    "eraser": (
        "Eraser",
        "EraseReport",
        "EraseRequest",
        "OnChip",
        "Progress",
    ),
    "holders": ("Holders",),
    "inventory": ("Inventory",),
    "journal": (
        "Event",
        "Journal",
    ),
    "ledger": (
        "AuditTrail",
        "Certificates",
        "Change",
        "HistoryEntry",
        "HistoryQuery",
        "Ledger",
        "LedgerState",
    ),
    "policies": ("Policies",),
    "resetter": ("Resetter",),
    "settings": ("Settings",),
    "signer": ("Signer",),
    "telemetry": ("Telemetry",),
    "tracer": (
        "UNTRACED",
        "Attribute",
        "Span",
        "Tracer",
    ),
}
"""Where each name is. Loaded on demand: the plugin needs the tracer only, and is to be registered soon after its start."""


def __getattr__(name: str) -> Any:
    for module, names in _MODULES.items():
        if name in names:
            found = getattr(importlib.import_module(f"{__name__}.{module}"), name)
            globals()[name] = found
            return found
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
