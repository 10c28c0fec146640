"""The policy, followed: a changed file is in force within seconds, a bad one keeps the old policy and is told of."""

from __future__ import annotations

import asyncio
from contextlib import suppress

from scrubber.domain.errors import BadConfiguration, LedgerFailure
from scrubber.domain.policy import Policy
from scrubber.engine.dependencies import Dependencies
from scrubber.engine.node import Node
from scrubber.ports.record import Change, Event
from scrubber.ports.runtime import Policies

__all__ = ["follow_policy"]

_EVERY = 2.0
"""Seconds between two looks at the file."""


async def follow_policy(
    node: Node, *, policies: Policies, asked: asyncio.Event, dependencies: Dependencies, every: float = _EVERY
) -> None:
    """Until cancelled. A certificate names its policy's digest, so devices that were proved under another one are scrubbed.

    Args:
        asked: set when somebody wants the file read now (SIGHUP).
    """
    while True:
        with suppress(TimeoutError):
            async with dependencies.clock.timeout(every):
                await asked.wait()
        if not asked.is_set() and not policies.touched:
            continue
        asked.clear()
        before = policies.policy
        try:
            changed = policies.reload()
        except BadConfiguration as error:
            sentence = f"{error} The policy {before.name} stays in force."
            await _tell(
                Event("policy.rejected", dependencies.clock.wall(), fields={"sentence": sentence}), dependencies
            )
            continue
        now = policies.policy
        fields: dict[str, str | int | float | bool | None] = {
            "policy": now.name,
            "digest": now.digest,
            "changed": changed,
        }
        fields["sentence"] = _static(before, now)
        await _tell(Event("policy.accepted", dependencies.clock.wall(), fields=fields), dependencies)
        if changed:
            node.policy_changed()


def _static(before: Policy, now: Policy) -> str | None:
    """What a service takes from its policy when it starts, and only then."""
    pairs = {
        "question": (before.limits.question, now.limits.question),
        "eraser-slots": (before.limits.eraser_slots, now.limits.eraser_slots),
    }
    names = [name for name, (old, new) in pairs.items() if old != new]
    return f"{' and '.join(names)} count from the next start of the service." if names else None


async def _tell(event: Event, dependencies: Dependencies) -> None:
    """A full ledger does not keep a policy from being followed; the log line is written all the same."""
    with suppress(LedgerFailure):
        await dependencies.ledger.commit(Change(events=(event,)))
    dependencies.journal.tell([event])
