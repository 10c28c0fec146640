"""The work gate: when devices in a confidential-computing mode accept work, and what follows from a failure."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from scrubber.domain.attestation import attestation_nonce
from scrubber.domain.codes import ErrorCode
from scrubber.domain.device import Device
from scrubber.domain.errors import NotReady, Unavailable, Unreadable
from scrubber.domain.states import Health, Hygiene
from tests.simulation.cluster import SimulatedCluster, simulated_cluster
from tests.simulation.start_requests import admitted, refusal_of, request_start, started
from tests.simulation.timeline import in_virtual_time


class Mode:
    """:class:`scrubber.ports.ConfidentialComputing` in memory; ``calls`` are the positions of the switch, in order."""

    def __init__(self, *, enabled: bool = True) -> None:
        self.enabled = enabled
        self.accepting = True  # as a service that was killed may have left it
        self.calls: list[bool] = []
        self.failure: str | None = None
        self.nonces: list[bytes] = []
        self.attestable = True

    async def set_accepting(self, accepting: bool) -> None:
        if self.failure is not None:
            raise Unavailable(self.failure)
        self.calls.append(accepting)
        self.accepting = accepting

    async def attest(self, device: Device, nonce: bytes) -> str | None:
        if not self.attestable:
            raise Unreadable(f"GPU {device.index}: no attestation report.")
        self.nonces.append(nonce)
        return f"digest of {device.id}"


@asynccontextmanager
async def confidential(mode: Mode, devices: int = 1) -> AsyncIterator[SimulatedCluster]:
    """Provide a cluster whose service has just started; no device has been scrubbed."""
    async with simulated_cluster(devices, settled=False) as cluster:
        cluster.confidential = mode
        await cluster.start_service()
        yield cluster


def clean(cluster: SimulatedCluster) -> bool:
    return all(record.hygiene is Hygiene.CLEAN for record in cluster.ledger_store.records.values())


@in_virtual_time
async def test_devices_accept_work_after_the_last_certificate_and_not_before() -> None:
    mode = Mode()
    async with confidential(mode, devices=2) as cluster:
        await cluster.until(lambda: not mode.accepting)
        await cluster.until(lambda: clean(cluster))
        await cluster.until(lambda: mode.accepting)
        assert mode.calls[0] is False


@in_virtual_time
async def test_certificate_carries_the_digest_for_the_nonce_of_its_own_scrub() -> None:
    mode = Mode()
    async with confidential(mode) as cluster:
        await cluster.until(lambda: clean(cluster))
        certificate = cluster.record().certificate
        assert certificate is not None
        assert certificate.attestation is not None
        assert certificate.attestation.digest == f"digest of {certificate.device}"
        nonce = attestation_nonce(
            node=certificate.node,
            boot=certificate.boot,
            device=certificate.device,
            scrub=certificate.scrub,
            previous_grant=certificate.previous_grant,
        )
        assert certificate.attestation.nonce == nonce.hex() == mode.nonces[-1].hex()


@in_virtual_time
async def test_tenant_of_one_device_keeps_accepting_work_while_another_device_is_dirty() -> None:
    mode = Mode()
    async with confidential(mode, devices=2) as cluster:
        await cluster.until(lambda: clean(cluster))
        tenant = await started(cluster)
        other = await started(cluster, "umbrella", "serve-0", 1)
        await cluster.run(5.0)
        mode.calls.clear()
        cluster.kubelet.force_delete(other, lives_on=4.0)
        await cluster.until(lambda: cluster.record(1).hygiene is Hygiene.CLEAN)
        assert tenant.running
        assert False not in mode.calls


@in_virtual_time
async def test_device_that_stays_dirty_does_not_keep_a_clean_device_from_its_tenant() -> None:
    mode = Mode()
    async with confidential(mode, devices=2) as cluster:
        cluster.gpu(1).ghost = True
        await cluster.until(lambda: cluster.record(0).hygiene is Hygiene.CLEAN)
        await cluster.run(20.0)
        tenant = await admitted(cluster)
        await request_start(cluster, tenant)
        assert mode.accepting


@in_virtual_time
async def test_start_is_refused_while_the_gate_cannot_be_opened_and_follows_once_it_can() -> None:
    mode = Mode()
    async with confidential(mode) as cluster:
        await cluster.until(lambda: clean(cluster) and mode.accepting)
        tenant = await admitted(cluster)
        mode.failure = "NVML says no."
        refusal = await refusal_of(request_start(cluster, tenant))
        assert isinstance(refusal, NotReady)
        assert refusal.code == ErrorCode.WORK_GATE_CLOSED
        assert "NVML says no." in str(refusal)
        assert cluster.record().hygiene is Hygiene.CLEAN
        mode.failure = None
        await request_start(cluster, tenant)
        assert cluster.record().hygiene is Hygiene.IN_USE


@in_virtual_time
async def test_switch_that_others_have_changed_is_corrected() -> None:
    mode = Mode()
    async with confidential(mode) as cluster:
        await cluster.until(lambda: clean(cluster) and mode.accepting)
        mode.accepting = False
        await cluster.run(6.0)
        assert mode.accepting


@in_virtual_time
async def test_device_without_an_attestation_report_gets_no_certificate() -> None:
    mode = Mode()
    mode.attestable = False
    async with confidential(mode) as cluster:
        await cluster.until(lambda: cluster.record().health is Health.QUARANTINED)
        record = cluster.record()
        assert record.certificate is None
        assert record.cause is not None
        assert "no attestation report" in record.cause.message
        assert not mode.accepting
        mode.attestable = True
        await cluster.until(lambda: cluster.record().health is Health.HEALTHY, within=3600.0)


@in_virtual_time
@pytest.mark.parametrize("in_use", [False, True])
async def test_gate_is_closed_at_the_end_of_the_service_unless_a_device_is_in_use(in_use: bool) -> None:
    mode = Mode()
    async with confidential(mode) as cluster:
        await cluster.until(lambda: clean(cluster) and mode.accepting)
        if in_use:
            await started(cluster)
        await cluster.node.work_gate.close()
        assert mode.accepting is in_use


@in_virtual_time
async def test_without_the_mode_there_is_no_call() -> None:
    mode = Mode(enabled=False)
    async with confidential(mode) as cluster:
        await started(cluster)
        assert (mode.calls, mode.nonces) == ([], [])
