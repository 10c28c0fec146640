"""Who is never taken for a stranger, and what looking for strangers must not cost."""

from __future__ import annotations

from dataclasses import replace
from itertools import count

import pytest

from scrubber.domain.device import Device
from scrubber.domain.evidence import Occasion, Outcome
from scrubber.domain.health import Health
from scrubber.domain.hygiene import Hygiene
from scrubber.domain.policy import Enforcement, Limits, Ungranted
from scrubber.domain.telemetry import Holder, HolderKind
from tests.world.asking import started
from tests.world.matter import Proc
from tests.world.sharing import a_shared_world
from tests.world.timeline import in_virtual_time
from tests.world.world import DEFAULT, World, a_world


def told(world: World) -> int:
    assert world.journal is not None
    return sum(event.name == "use.ungranted" for event in world.journal.events)


def of_the_host(world: World, pod: str | None = None) -> Proc:
    proc = world.matter.start(pod, f"{pod or 'host'}/x#1", "host/x/x#1", mounted=frozenset({world.gpu().id}))
    world.matter.open(proc, world.gpu().id)
    return proc


@in_virtual_time
async def test_a_daemon_that_the_administrator_named_uses_every_device_and_is_no_stranger() -> None:
    end = replace(DEFAULT, ungranted=Ungranted.END, limits=replace(Limits(), dying_grace=5.0))
    async with a_world(devices=1, policy=end) as world:
        await started(world)
        assert world.service is not None
        holders = world.service.dependencies.holders
        exporter = Holder(4242, 1, HolderKind.INFRASTRUCTURE, "dcgm-exporter")
        asked = holders.users

        async def users(device: Device) -> tuple[Holder, ...]:
            return (exporter, *await asked(device))

        holders.users = users  # type: ignore[method-assign]
        await world.run(30.0)
        assert told(world) == 0
        assert not world.record().tainted


@in_virtual_time
async def test_a_tenants_process_that_shows_no_pod_at_one_look_is_no_stranger() -> None:
    """It is just being executed, while a true stranger has everybody looked at again."""
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
        told_of = {event.fields["pid"] for event in world.journal.events if event.name == "use.ungranted"}
        assert told_of == {stranger.pid}


@pytest.mark.parametrize("ungranted", [Ungranted.QUARANTINE, Ungranted.END])
def test_where_the_policy_only_observes_a_stranger_is_told_of_and_nothing_is_done(ungranted: Ungranted) -> None:
    policy = replace(
        DEFAULT, ungranted=ungranted, enforcement=Enforcement.OBSERVE, limits=replace(Limits(), dying_grace=5.0)
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
async def test_nobody_looks_at_a_device_while_it_is_cleared() -> None:
    """The question opens it: an eraser that is disturbed by it begins anew, and would never end."""
    async with a_world(devices=1) as world:
        assert world.service is not None
        holders = world.service.dependencies.holders
        disturbed: list[str] = []

        held_by, used_by = holders.held, holders.users

        async def held(device: Device) -> bool:
            disturbed.extend(world.erasers.running)
            return await held_by(device)

        async def users(device: Device) -> tuple[Holder, ...]:
            disturbed.extend(world.erasers.running)
            return await used_by(device)

        holders.held, holders.users = held, users  # type: ignore[method-assign]
        world.gpu().slow = 4.0
        job = await world.controller().scrubs.start(Occasion.ON_DEMAND)
        assert (await job.wait()).outcome is Outcome.PASSED
        assert disturbed == []
        assert world.record().hygiene is Hygiene.CLEAN


@in_virtual_time
async def test_nobody_joins_beside_a_pod_that_the_kubelet_started_without_asking() -> None:
    """It is one of the same tenant's, and nobody proved the device clean before it."""
    async with a_shared_world() as world:
        await world.start("acme", "train-0", world.share(0))
        unasked = await world.admit_shares("acme", "train-1", world.share(1), starts=False)
        joining = await world.admit_shares("acme", "train-2", world.share(2), starts=False)
        world.use(world.gpu(), unasked.uid)
        refusal = await world.refused(joining, wait=0.05)
        assert refusal.code == "sharing"
        assert "without a grant" in str(refusal)
