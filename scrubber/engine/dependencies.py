"""The engine's dependencies, passed by keyword from the composition root: ports, settings, identity, IDs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from scrubber.domain.device import NodeIdentity
from scrubber.domain.policy import Policy
from scrubber.engine.agent_pauses import AgentPauses
from scrubber.ports.device import (
    ConfidentialComputing,
    Diagnostics,
    Eraser,
    Holders,
    Inventory,
    Resetter,
    Settings,
    Telemetry,
)
from scrubber.ports.node import Assignments, Containers, Owners, PodCgroups
from scrubber.ports.record import AuditLog, Certificates, Journal, Ledger, Signer
from scrubber.ports.runtime import NOOP_TRACER, Clock, Tracer

__all__ = ["Dependencies"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Dependencies:
    """The dependencies of one node's engine.

    Attributes:
        policy: a function, because a policy can be replaced while the service runs.
        spawn: runs a scrub as a named task; a bug in one ends the service, which its supervisor restarts.
        new_id: makes IDs: ``new_id("scrub")`` → ``"scrub-…"``; injected, so that tests control randomness.
    """

    clock: Clock
    inventory: Inventory
    holders: Holders
    telemetry: Telemetry
    settings: Settings
    resetter: Resetter
    eraser: Eraser
    diagnostics: Diagnostics
    assignments: Assignments
    containers: Containers
    pod_cgroups: PodCgroups
    owners: Owners
    ledger: Ledger
    audit_log: AuditLog
    certificates: Certificates
    signer: Signer
    journal: Journal
    identity: NodeIdentity
    agent_pauses: AgentPauses
    policy: Callable[[], Policy]
    new_id: Callable[[str], str]
    confidential: ConfidentialComputing | None = None
    tracer: Tracer = NOOP_TRACER
    spawn: Callable[[Coroutine[Any, Any, None], str], asyncio.Task[None]] = lambda work, name: asyncio.create_task(
        work, name=name
    )
