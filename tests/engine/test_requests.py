"""Invalid requests, what a refused pod may read, and what observe mode changes."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from scrubber.domain.errors import InvalidRequest, NotReady
from scrubber.domain.handover_kind import Basis
from scrubber.domain.policy import Enforcement
from scrubber.engine.views import HandOverCall
from tests.simulation.cluster import DEFAULT, SimulatedCluster, simulated_cluster
from tests.simulation.kubelet import Gone
from tests.simulation.start_requests import admitted, refusal_of, request_start, started
from tests.simulation.timeline import in_virtual_time

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
    async def request() -> None:
        async with simulated_cluster() as cluster:
            assert cluster.service is not None
            with pytest.raises(InvalidRequest, match=message):
                await cluster.service.hand_over(HandOverCall(devices))
            assert cluster.record().grant_sequence == 0

    request()


@in_virtual_time
async def test_no_device_is_handed_over_before_every_device_was_read_at_the_start() -> None:
    async with simulated_cluster(settled=False) as cluster:
        starting = asyncio.create_task(cluster.start_service())
        await cluster.run(0.0)
        tenant = cluster.kubelet.admit("acme", "train-0", [cluster.gpu().id], starts=False)
        with pytest.raises((NotReady, Gone)):
            await request_start(cluster, tenant)
        await starting


@in_virtual_time
async def test_refusal_shown_to_a_pod_names_no_other_pod() -> None:
    async with simulated_cluster(devices=1) as cluster:
        first = await started(cluster, "acme-secret", "steal-0")
        cluster.kubelet.force_delete(first, lives_on=300.0)
        tenant = await admitted(cluster)
        refusal = await refusal_of(request_start(cluster, tenant, wait=1.0))
        assert "acme-secret/steal-0" in str(refusal)
        assert "acme-secret" not in refusal.public_message
        assert cluster.gpu().id in refusal.public_message


# -- observe mode ------------------------------------------------------------------------------------------------------


@in_virtual_time
async def test_observing_policy_refuses_no_start_and_kills_no_process() -> None:
    observe = replace(DEFAULT, enforcement=Enforcement.OBSERVE)
    cluster = SimulatedCluster(1, observe)
    await cluster.start_service()
    await cluster.until(cluster.settled)
    first = await started(cluster)
    cluster.kubelet.force_delete(first, lives_on=300.0)
    tenant = await admitted(cluster)
    (granted,) = await request_start(cluster, tenant, wait=1.0)
    assert granted.basis is Basis.OBSERVE_MODE
    assert granted.certificate is not None
    issued = cluster.ledger_store.certificates[granted.certificate]
    assert any(line.startswith("holders") for line in issued.not_covered)
    assert next(cluster.process_table.living(first.uid)).alive
    await cluster.end()


@in_virtual_time
async def test_grant_under_an_observing_policy_does_not_consume_a_void_certificate() -> None:
    observe = replace(DEFAULT, enforcement=Enforcement.OBSERVE)
    async with simulated_cluster(1, observe) as cluster:
        tenant = await admitted(cluster)
        await cluster.run(1.0)
        void = cluster.record().certificate
        assert void is not None
        cluster.policy = replace(observe, digest="sha256:changed")
        (granted,) = await request_start(cluster, tenant)
        assert granted.basis is Basis.OBSERVE_MODE
        assert cluster.ledger_store.certificates[void.id].next_grant is None
