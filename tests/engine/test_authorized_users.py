"""Processes that never count as unauthorized users, and effects that the search for them must not have."""

from __future__ import annotations

from dataclasses import replace
from itertools import count

import pytest

from scrubber.domain.device import Device
from scrubber.domain.evidence import Outcome, ScrubTrigger
from scrubber.domain.policy import Enforcement, Limits, UnauthorizedUseAction
from scrubber.domain.states import Health, Hygiene
from scrubber.domain.telemetry import Holder, HolderKind
from tests.world.asking import started
from tests.world.matter import Proc
from tests.world.sharing import a_shared_world
from tests.world.timeline import in_virtual_time
from tests.world.world import DEFAULT, World, a_world


def told(world: World) -> int:
    assert world.journal is not None
    return sum(event.name == "unauthorized.use.detected" for event in world.journal.events)


def of_the_host(world: World, pod: str | None = None) -> Proc:
    proc = world.matter.start(pod, f"{pod or 'host'}/x#1", "host/x/x#1", mounted=frozenset({world.gpu().id}))
    world.matter.open(proc, world.gpu().id)
    return proc


@in_virtual_time
async def test_daemon_named_by_the_administrator_may_use_every_device() -> None:
    end = replace(
        DEFAULT, unauthorized_use=UnauthorizedUseAction.KILL, limits=replace(Limits(), leftover_grace_period=5.0)
    )
    async with a_world(devices=1, policy=end) as world:
        await started(world)
        assert world.service is not None
        holders = world.service.dependencies.holders
        exporter = Holder(4242, 1, HolderKind.INFRASTRUCTURE, "dcgm-exporter")
        asked = holders.list_users

        async def users(device: Device) -> tuple[Holder, ...]:
            return (exporter, *await asked(device))

        holders.list_users = users  # type: ignore[method-assign]
        await world.run(30.0)
        assert told(world) == 0
        assert not world.record().contaminated


@in_virtual_time
async def test_tenant_process_read_without_its_pod_once_is_not_an_unauthorized_user() -> None:
    """Its pod cannot be read at times (as during ``execve``), while a real unauthorized user causes more inspections."""
    async with a_world(devices=2) as world:
        other = await started(world, "acme", "train-1", 1)
        tenant = await started(world)
        assert world.service is not None
        assert tenant.first is not None
        mine, looks = tenant.first.pid, count(1)
        containers = world.service.dependencies.containers
        uid_of = containers.pod_uid_of

        async def now_and_then(pid: int) -> str | None:
            return None if pid == mine and next(looks) % 2 == 0 else await uid_of(pid)

        containers.pod_uid_of = now_and_then  # type: ignore[method-assign]
        stranger = of_the_host(world, other.uid)
        await world.run(5.0)
        assert next(looks) > 4
        assert world.journal is not None
        told_of = {event.fields["pid"] for event in world.journal.events if event.name == "unauthorized.use.detected"}
        assert told_of == {stranger.pid}


@pytest.mark.parametrize("ungranted", [UnauthorizedUseAction.QUARANTINE, UnauthorizedUseAction.KILL])
def test_observing_policy_logs_unauthorized_use_and_takes_no_action(
    ungranted: UnauthorizedUseAction,
) -> None:
    policy = replace(
        DEFAULT,
        unauthorized_use=ungranted,
        enforcement=Enforcement.OBSERVE,
        limits=replace(Limits(), leftover_grace_period=5.0),
    )

    @in_virtual_time
    async def observe() -> None:
        async with a_world(devices=2, policy=policy) as world:
            other = await started(world, "acme", "train-1", 1)
            await started(world)
            proc = of_the_host(world, other.uid)
            await world.run(30.0)
            assert told(world) == 1
            assert proc.alive
            assert world.record().health is Health.HEALTHY

    observe()


@in_virtual_time
async def test_device_is_not_inspected_while_its_memory_is_cleared() -> None:
    """The inspection opens the device: an eraser that it disturbs starts again, and would never finish."""
    async with a_world(devices=1) as world:
        assert world.service is not None
        holders = world.service.dependencies.holders
        disturbed: list[str] = []

        held_by, used_by = holders.is_held, holders.list_users

        async def held(device: Device) -> bool:
            disturbed.extend(world.erasers.running)
            return await held_by(device)

        async def users(device: Device) -> tuple[Holder, ...]:
            disturbed.extend(world.erasers.running)
            return await used_by(device)

        holders.is_held, holders.list_users = held, users  # type: ignore[method-assign]
        world.gpu().slow = 4.0
        job = await world.controller().scrubs.start(ScrubTrigger.ON_DEMAND)
        assert (await job.wait()).outcome is Outcome.PASSED
        assert disturbed == []
        assert world.record().hygiene is Hygiene.CLEAN


@in_virtual_time
async def test_shared_start_beside_a_pod_that_was_started_without_a_grant_is_refused() -> None:
    """Its pod belongs to the same tenant, and the device was not proved clean before it."""
    async with a_shared_world() as world:
        await world.start("acme", "train-0", world.share(0))
        unasked = await world.admit_shares("acme", "train-1", world.share(1), starts=False)
        joining = await world.admit_shares("acme", "train-2", world.share(2), starts=False)
        world.use(world.gpu(), unasked.uid)
        refusal = await world.refused(joining, wait=0.05)
        assert refusal.code == "sharing-not-allowed"
        assert "without a grant" in str(refusal)
