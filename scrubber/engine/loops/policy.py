"""Follows the policy file: a changed file takes effect within seconds; an invalid one is reported and not applied."""

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
"""Seconds between two checks of the file."""


# See docs/decisions/0030-policy-changes.md.
async def follow_policy(
    node: Node,
    *,
    provider: PolicyProvider,
    reload_requested: asyncio.Event,
    dependencies: Dependencies,
    interval: float = _INTERVAL,
) -> None:
    """Follow the policy until cancelled.

    A certificate contains the digest of its policy, so devices that were certified under another policy are scrubbed.

    Args:
        reload_requested: set to request a read of the file now (SIGHUP).
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
                Event("policy.rejected", dependencies.clock.wall(), fields={"message": message}), dependencies
            )
            continue
        now = provider.policy
        fields: dict[str, str | int | float | bool | None] = {
            "policy": now.name,
            "digest": now.digest,
            "changed": changed,
        }
        fields["message"] = _restart_message(before, now)
        await _record_event(Event("policy.accepted", dependencies.clock.wall(), fields=fields), dependencies)
        if changed:
            node.on_policy_change()


def _restart_message(before: Policy, now: Policy) -> str | None:
    """Return a message about changed settings that a service reads only at its start; None when none changed."""
    if before.limits.driver_call == now.limits.driver_call:
        return None
    return "Changes of limits.driverCall take effect at the next start of the service."


async def _record_event(event: Event, dependencies: Dependencies) -> None:
    """Record ``event``.

    A ledger failure does not stop the policy from being followed, and the log line is written anyway.
    """
    with suppress(LedgerFailure):
        await dependencies.ledger.commit(LedgerChange(events=(event,)))
    dependencies.journal.record([event])
