"""Invalid requests, what a refused pod may read, and what observe mode changes."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from scrubber.domain.errors import InvalidRequest, NotReady
from scrubber.domain.handover_kind import Basis
from scrubber.domain.policy import Enforcement
from scrubber.engine.views import HandOverCall
from tests.world.asking import admitted, answered, ask, started
from tests.world.kubelet import Gone
from tests.world.timeline import in_virtual_time
from tests.world.world import DEFAULT, World, a_world

# -- invalid requests --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("devices", "message"),
    [
        ((), "names no device"),
        (("GPU-0000", "GPU-0000"), "names a device twice"),
        (("GPU-0000", "GPU-9999"), "no device GPU-9999"),
    ],
)
def test_malformed_request_is_refused_with_the_reason(devices: tuple[str, ...], message: str) -> None:
    @in_virtual_time
    async def ask_for_it() -> None:
        async with a_world() as world:
            assert world.service is not None
            with pytest.raises(InvalidRequest, match=message):
                await world.service.hand_over(HandOverCall(devices))
            assert world.record().grant_sequence == 0

    ask_for_it()


@in_virtual_time
async def test_no_device_is_handed_over_before_every_device_was_read_at_the_start() -> None:
    async with a_world(settled=False) as world:
        starting = asyncio.create_task(world.start_service())
        await world.run(0.0)
        tenant = world.kubelet.admit("acme", "train-0", [world.gpu().id], starts=False)
        with pytest.raises((NotReady, Gone)):
            await ask(world, tenant)
        await starting


@in_virtual_time
async def test_refusal_shown_to_a_pod_names_no_other_pod() -> None:
    async with a_world(devices=1) as world:
        first = await started(world, "acme-secret", "steal-0")
        world.kubelet.force_delete(first, lives_on=300.0)
        tenant = await admitted(world)
        refusal = await answered(ask(world, tenant, wait=1.0))
        assert "acme-secret/steal-0" in str(refusal)
        assert "acme-secret" not in refusal.public_message
        assert world.gpu().id in refusal.public_message


# -- observe mode ------------------------------------------------------------------------------------------------------


@in_virtual_time
async def test_observing_policy_refuses_no_start_and_kills_no_process() -> None:
    observe = replace(DEFAULT, enforcement=Enforcement.OBSERVE)
    world = World(1, observe)
    await world.start_service()
    await world.until(world.settled)
    first = await started(world)
    world.kubelet.force_delete(first, lives_on=300.0)
    tenant = await admitted(world)
    (granted,) = await ask(world, tenant, wait=1.0)
    assert granted.basis is Basis.OBSERVE_MODE
    assert granted.certificate is not None
    issued = world.vault.certificates[granted.certificate]
    assert any(line.startswith("holders") for line in issued.not_covered)
    assert next(world.matter.living(first.uid)).alive
    await world.end()


@in_virtual_time
async def test_grant_under_an_observing_policy_does_not_consume_a_void_certificate() -> None:
    observe = replace(DEFAULT, enforcement=Enforcement.OBSERVE)
    async with a_world(1, observe) as world:
        tenant = await admitted(world)
        await world.run(1.0)
        void = world.record().certificate
        assert void is not None
        world.policy = replace(observe, digest="sha256:changed")
        (granted,) = await ask(world, tenant)
        assert granted.basis is Basis.OBSERVE_MODE
        assert world.vault.certificates[void.id].next_grant is None
