"""A policy that changes while the service runs: which proofs stay valid, and what an invalid one changes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

from scrubber.domain.errors import InvalidConfiguration
from scrubber.domain.policy import Limits, Policy, SharingMode
from scrubber.engine.loops.policy import follow_policy
from scrubber.ports.record import Event
from tests.world.timeline import in_virtual_time
from tests.world.world import DEFAULT, World, a_world

OTHER = replace(DEFAULT, name="other", digest="sha256:other", sharing=SharingMode.NEVER)


class File:
    """:class:`scrubber.ports.PolicyProvider` whose next content a test sets."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.next: Policy | InvalidConfiguration | None = None
        self.has_changed = False

    @property
    def policy(self) -> Policy:
        return self._world.policy

    def write(self, content: Policy | InvalidConfiguration) -> None:
        self.next, self.has_changed = content, True

    def reload(self) -> bool:
        self.has_changed = False
        if isinstance(self.next, InvalidConfiguration):
            raise self.next
        before, self._world.policy = self._world.policy, self.next or self._world.policy
        return before != self._world.policy


@asynccontextmanager
async def followed(world: World) -> AsyncIterator[tuple[File, asyncio.Event]]:
    assert world.service is not None
    file, asked = File(world), asyncio.Event()
    following = follow_policy(
        world.node, provider=file, reload_requested=asked, dependencies=world.service.dependencies
    )
    task = asyncio.create_task(following)
    try:
        yield file, asked
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def told(world: World, name: str) -> list[Event]:
    return [event for event in world.vault.events if event.name == name]


@in_virtual_time
async def test_changed_policy_applies_within_seconds_and_devices_are_scrubbed_again_under_it() -> None:
    async with a_world() as world, followed(world) as (file, _):
        before = world.record().certificate
        assert before is not None
        file.write(OTHER)
        await world.run(3.0)
        (event,) = told(world, "policy.accepted")
        assert (event.fields["policy"], event.fields["changed"]) == ("other", True)
        await world.until(world.settled)
        after = world.record().certificate
        assert after is not None
        assert (before.policy_digest, after.policy_digest) == (DEFAULT.digest, OTHER.digest)


@in_virtual_time
async def test_policy_reload_request_applies_a_changed_file_at_once() -> None:
    async with a_world() as world, followed(world) as (file, asked):
        await world.run(0.1)
        file.write(OTHER)
        asked.set()
        await world.run(0.1)
        assert world.policy == OTHER


@in_virtual_time
async def test_invalid_policy_file_keeps_the_old_policy_and_is_logged_once() -> None:
    async with a_world() as world, followed(world) as (file, _):
        before = world.record().certificate
        file.write(InvalidConfiguration("mine.yaml:2: sharing: no."))
        await world.run(60.0)
        (event,) = told(world, "policy.rejected")
        assert event.fields["message"] == "mine.yaml:2: sharing: no. The policy default stays in force."
        assert world.policy == DEFAULT
        assert world.record().certificate == before


@in_virtual_time
async def test_rewritten_policy_without_changes_triggers_no_scrub() -> None:
    async with a_world() as world, followed(world) as (file, _):
        before = world.record().certificate
        file.write(DEFAULT)
        await world.run(60.0)
        (event,) = told(world, "policy.accepted")
        assert event.fields["changed"] is False
        assert world.record().certificate == before


@in_virtual_time
async def test_policy_change_that_needs_a_restart_is_logged_with_that_hint() -> None:
    async with a_world() as world, followed(world) as (file, _):
        file.write(replace(OTHER, limits=replace(Limits(), eraser_slots=5)))
        await world.run(3.0)
        (event,) = told(world, "policy.accepted")
        assert event.fields["message"] == "eraserSlots count from the next start of the service."


@in_virtual_time
async def test_running_pod_keeps_its_device_when_the_policy_changes() -> None:
    async with a_world() as world, followed(world) as (file, _):
        tenant = await world.admit("acme", "train-0")
        assert tenant is not None
        await world.until(lambda: tenant.running)
        file.write(OTHER)
        await world.run(30.0)
        assert tenant.first is not None
        assert tenant.first in world.matter.living()
        assert world.record().last_grant is not None
