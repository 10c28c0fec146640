"""The policy, followed: a changed file is in force within seconds, a bad one keeps the old policy and is told of."""

from __future__ import annotations

import asyncio
from contextlib import suppress

from scrubber.domain.errors import InvalidConfiguration, LedgerFailure
from scrubber.domain.policy import Policy
from scrubber.engine.dependencies import Dependencies
from scrubber.engine.node import Node
from scrubber.ports.record import Event, LedgerChange
from scrubber.ports.runtime import PolicyProvider

__all__ = ["follow_policy"]

_INTERVAL = 2.0
"""Seconds between two looks at the file."""


async def follow_policy(
    node: Node,
    *,
    provider: PolicyProvider,
    reload_requested: asyncio.Event,
    dependencies: Dependencies,
    interval: float = _INTERVAL,
) -> None:
    """Until cancelled. A certificate names its policy's digest, so devices that were proved under another one are scrubbed.

    Args:
        reload_requested: set when somebody wants the file read now (SIGHUP).
    """
    while True:
        with suppress(TimeoutError):
            async with dependencies.clock.timeout(interval):
                await reload_requested.wait()
        if not reload_requested.is_set() and not provider.has_changed:
            continue
        reload_requested.clear()
        before = provider.policy
        try:
            changed = provider.reload()
        except InvalidConfiguration as error:
            message = f"{error} The policy {before.name} stays in force."
            await _record_event(
                Event("policy.rejected", dependencies.clock.wall(), fields={"sentence": message}), dependencies
            )
            continue
        now = provider.policy
        fields: dict[str, str | int | float | bool | None] = {
            "policy": now.name,
            "digest": now.digest,
            "changed": changed,
        }
        fields["sentence"] = _restart_message(before, now)
        await _record_event(Event("policy.accepted", dependencies.clock.wall(), fields=fields), dependencies)
        if changed:
            node.on_policy_change()


def _restart_message(before: Policy, now: Policy) -> str | None:
    """What a service takes from its policy when it starts, and only then."""
    pairs = {
        "question": (before.limits.driver_call, now.limits.driver_call),
        "eraserSlots": (before.limits.eraser_slots, now.limits.eraser_slots),
    }
    names = [name for name, (old, new) in pairs.items() if old != new]
    return f"{' and '.join(names)} count from the next start of the service." if names else None


async def _record_event(event: Event, dependencies: Dependencies) -> None:
    """A full ledger does not keep a policy from being followed; the log line is written all the same."""
    with suppress(LedgerFailure):
        await dependencies.ledger.commit(LedgerChange(events=(event,)))
    dependencies.journal.record([event])
