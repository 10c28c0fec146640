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
from tests.simulation.cluster import DEFAULT, SimulatedCluster, simulated_cluster
from tests.simulation.timeline import in_virtual_time

OTHER = replace(DEFAULT, name="other", digest="sha256:other", sharing=SharingMode.NEVER)


class File:
    """:class:`scrubber.ports.PolicyProvider` whose next content a test sets."""

    def __init__(self, cluster: SimulatedCluster) -> None:
        self._cluster = cluster
        self.next: Policy | InvalidConfiguration | None = None
        self.has_changed = False

    @property
    def policy(self) -> Policy:
        return self._cluster.policy

    def write(self, content: Policy | InvalidConfiguration) -> None:
        self.next, self.has_changed = content, True

    def reload(self) -> bool:
        self.has_changed = False
        if isinstance(self.next, InvalidConfiguration):
            raise self.next
        before, self._cluster.policy = self._cluster.policy, self.next or self._cluster.policy
        return before != self._cluster.policy


@asynccontextmanager
async def followed(cluster: SimulatedCluster) -> AsyncIterator[tuple[File, asyncio.Event]]:
    assert cluster.service is not None
    file, requested = File(cluster), asyncio.Event()
    following = follow_policy(
        cluster.node, provider=file, reload_requested=requested, dependencies=cluster.service.dependencies
    )
    task = asyncio.create_task(following)
    try:
        yield file, requested
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def logged(cluster: SimulatedCluster, name: str) -> list[Event]:
    return [event for event in cluster.ledger_store.events if event.name == name]


@in_virtual_time
async def test_changed_policy_applies_within_seconds_and_devices_are_scrubbed_again_under_it() -> None:
    async with simulated_cluster() as cluster, followed(cluster) as (file, _):
        before = cluster.record().certificate
        assert before is not None
        file.write(OTHER)
        await cluster.run(3.0)
        (event,) = logged(cluster, "policy.accepted")
        assert (event.fields["policy"], event.fields["changed"]) == ("other", True)
        await cluster.until(cluster.settled)
        after = cluster.record().certificate
        assert after is not None
        assert (before.policy_digest, after.policy_digest) == (DEFAULT.digest, OTHER.digest)


@in_virtual_time
async def test_policy_reload_request_applies_a_changed_file_at_once() -> None:
    async with simulated_cluster() as cluster, followed(cluster) as (file, requested):
        await cluster.run(0.1)
        file.write(OTHER)
        requested.set()
        await cluster.run(0.1)
        assert cluster.policy == OTHER


@in_virtual_time
async def test_invalid_policy_file_keeps_the_old_policy_and_is_logged_once() -> None:
    async with simulated_cluster() as cluster, followed(cluster) as (file, _):
        before = cluster.record().certificate
        file.write(InvalidConfiguration("mine.yaml:2: sharing: no."))
        await cluster.run(60.0)
        (event,) = logged(cluster, "policy.rejected")
        assert event.fields["message"] == "mine.yaml:2: sharing: no. The policy default stays in force."
        assert cluster.policy == DEFAULT
        assert cluster.record().certificate == before


@in_virtual_time
async def test_rewritten_policy_without_changes_triggers_no_scrub() -> None:
    async with simulated_cluster() as cluster, followed(cluster) as (file, _):
        before = cluster.record().certificate
        file.write(DEFAULT)
        await cluster.run(60.0)
        (event,) = logged(cluster, "policy.accepted")
        assert event.fields["changed"] is False
        assert cluster.record().certificate == before


@in_virtual_time
async def test_policy_change_that_needs_a_restart_is_logged_with_that_hint() -> None:
    async with simulated_cluster() as cluster, followed(cluster) as (file, _):
        file.write(replace(OTHER, limits=replace(Limits(), driver_call=2.0)))
        await cluster.run(3.0)
        (event,) = logged(cluster, "policy.accepted")
        assert event.fields["message"] == "Changes of limits.driverCall take effect at the next start of the service."


@in_virtual_time
async def test_running_pod_keeps_its_device_when_the_policy_changes() -> None:
    async with simulated_cluster() as cluster, followed(cluster) as (file, _):
        tenant = await cluster.admit("acme", "train-0")
        assert tenant is not None
        await cluster.until(lambda: tenant.running)
        file.write(OTHER)
        await cluster.run(30.0)
        assert tenant.first is not None
        assert tenant.first in cluster.process_table.living()
        assert cluster.record().last_grant is not None
