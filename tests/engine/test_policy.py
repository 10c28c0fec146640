"""A policy that changes while the service runs: what it proves from then on, and what a bad one changes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

from scrubber.domain.errors import BadConfiguration
from scrubber.domain.policy import Limits, Policy, Sharing
from scrubber.engine.policy import follow_policy
from scrubber.ports.record import Event
from tests.world.timeline import in_virtual_time
from tests.world.world import DEFAULT, World, a_world

OTHER = replace(DEFAULT, name="other", digest="sha256:other", sharing=Sharing.NEVER)


class File:
    """:class:`scrubber.ports.Policies` whose next content a test writes."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.next: Policy | BadConfiguration | None = None
        self.touched = False

    @property
    def policy(self) -> Policy:
        return self._world.policy

    def write(self, content: Policy | BadConfiguration) -> None:
        self.next, self.touched = content, True

    def reload(self) -> bool:
        self.touched = False
        if isinstance(self.next, BadConfiguration):
            raise self.next
        before, self._world.policy = self._world.policy, self.next or self._world.policy
        return before != self._world.policy


@asynccontextmanager
async def followed(world: World) -> AsyncIterator[tuple[File, asyncio.Event]]:
    assert world.service is not None
    file, asked = File(world), asyncio.Event()
    following = follow_policy(world.node, policies=file, asked=asked, dependencies=world.service.dependencies)
    task = asyncio.create_task(following)
    try:
        yield file, asked
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def told(world: World, name: str) -> list[Event]:
    return [event for event in world.vault.events if event.name == name]


@in_virtual_time
async def test_a_changed_file_is_in_force_within_seconds_and_what_was_proved_under_the_old_one_is_proved_again() -> (
    None
):
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
async def test_somebody_who_asks_need_not_wait_for_the_next_look() -> None:
    async with a_world() as world, followed(world) as (file, asked):
        await world.run(0.1)
        file.write(OTHER)
        asked.set()
        await world.run(0.1)
        assert world.policy == OTHER


@in_virtual_time
async def test_a_bad_file_keeps_the_old_policy_and_is_told_once() -> None:
    async with a_world() as world, followed(world) as (file, _):
        before = world.record().certificate
        file.write(BadConfiguration("mine.yaml:2: sharing: no."))
        await world.run(60.0)
        (event,) = told(world, "policy.rejected")
        assert event.fields["sentence"] == "mine.yaml:2: sharing: no. The policy default stays in force."
        assert world.policy == DEFAULT
        assert world.record().certificate == before


@in_virtual_time
async def test_a_file_that_says_the_same_proves_nothing_anew() -> None:
    async with a_world() as world, followed(world) as (file, _):
        before = world.record().certificate
        file.write(DEFAULT)
        await world.run(60.0)
        (event,) = told(world, "policy.accepted")
        assert event.fields["changed"] is False
        assert world.record().certificate == before


@in_virtual_time
async def test_what_counts_from_the_next_start_only_is_said() -> None:
    async with a_world() as world, followed(world) as (file, _):
        file.write(replace(OTHER, limits=replace(Limits(), eraser_slots=5)))
        await world.run(3.0)
        (event,) = told(world, "policy.accepted")
        assert event.fields["sentence"] == "eraser-slots count from the next start of the service."


@in_virtual_time
async def test_a_pod_that_runs_keeps_its_device_under_another_policy() -> None:
    async with a_world() as world, followed(world) as (file, _):
        tenant = await world.admit("acme", "train-0")
        assert tenant is not None
        await world.until(lambda: tenant.running)
        file.write(OTHER)
        await world.run(30.0)
        assert tenant.first is not None
        assert tenant.first in world.matter.living()
        assert world.record().last_grant is not None
