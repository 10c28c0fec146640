"""Every certificate that the engine issues is signed by the node's key and unchanged since."""

from __future__ import annotations

import base64
from collections.abc import Iterable
from dataclasses import fields, replace
from typing import Any

import pytest

from scrubber.adapters.signing.ed25519 import EphemeralKey, verify_signature
from scrubber.domain.errors import InvalidRequest
from scrubber.domain.evidence import Attestation, Certificate, PathKind
from scrubber.domain.handover_kind import Basis
from scrubber.domain.policy import Enforcement
from scrubber.domain.statement import UNSIGNED_FIELDS, sign_certificate, statement
from scrubber.engine.views import CertificateStatus
from tests.api.service import CERTIFICATE
from tests.simulation.cluster import DEFAULT, SimulatedCluster, simulated_cluster
from tests.simulation.start_requests import admitted, request_start, started
from tests.simulation.timeline import in_virtual_time

KEY, ANOTHER = EphemeralKey(), EphemeralKey()
SIGNED = sign_certificate(CERTIFICATE, KEY.key_id, KEY.sign)


def is_signed(certificate: Certificate, by: EphemeralKey) -> bool:
    return certificate.key_id == by.key_id and verify_signature(
        by.public_key, statement(certificate), base64.b64decode(certificate.signature or "", validate=True)
    )


def all_signed(cluster: SimulatedCluster) -> Iterable[Certificate]:
    """Return all certificates ever issued in ``cluster``, as they are stored now; asserts that all are signed."""
    issued = cluster.ledger_store.certificates.values()
    assert [each.id for each in issued if not is_signed(each, cluster.signer)] == []
    return issued


# -- the signature -----------------------------------------------------------------------------------------------------


def test_signed_certificate_is_unchanged_and_names_its_key() -> None:
    assert replace(SIGNED, key_id=None, signature=None) == CERTIFICATE
    assert SIGNED.key_id == KEY.key_id
    assert is_signed(SIGNED, KEY)


def test_signature_does_not_verify_with_another_key() -> None:
    assert not verify_signature(ANOTHER.public_key, statement(SIGNED), base64.b64decode(SIGNED.signature or ""))


def test_signature_stays_valid_after_the_certificate_is_consumed() -> None:
    assert is_signed(replace(SIGNED, next_grant=7), KEY)


ANOTHER_ONE: dict[str, Any] = {
    **dict.fromkeys(["id", "node", "boot", "driver", "device", "scrub", "policy", "policy_digest"], "another"),
    **dict.fromkeys(["sequence", "previous_grant"], 99),
    **dict.fromkeys(["covered", "not_covered"], ("all of it",)),
    "attestation": Attestation("another", "another"),
    "path": PathKind.FAST if CERTIFICATE.path is PathKind.SLOW else PathKind.SLOW,
    "issued_at": 9.5,
    "rests_on": "another",
}


def test_every_certificate_field_except_consumption_and_signature_is_signed() -> None:
    assert {each.name for each in fields(Certificate)} - ANOTHER_ONE.keys() == UNSIGNED_FIELDS


@pytest.mark.parametrize("name", ANOTHER_ONE)
def test_change_of_any_signed_field_invalidates_the_signature(name: str) -> None:
    assert not is_signed(replace(SIGNED, **{name: ANOTHER_ONE[name]}), KEY)


# -- everything the engine issues --------------------------------------------------------------------------------------


@in_virtual_time
async def test_slow_and_fast_certificates_verify_whether_consumed_or_unused() -> None:
    async with simulated_cluster(devices=2) as cluster:
        tenant = await started(cluster)
        await cluster.run(3.0)
        cluster.kubelet.exit(tenant, again=True)
        await cluster.until(lambda: tenant.starts == 2)
        cluster.kubelet.delete(tenant)
        await cluster.until(cluster.settled)
        issued = list(all_signed(cluster))
        kinds = {(each.path, each.next_grant is not None) for each in issued}
        assert kinds == {(PathKind.SLOW, False), (PathKind.SLOW, True), (PathKind.FAST, True)}
        assert any(each.rests_on is not None for each in issued)


@in_virtual_time
async def test_certificate_issued_under_an_observing_policy_is_signed_and_names_the_uncleared_memory() -> None:
    async with simulated_cluster(devices=1, policy=replace(DEFAULT, enforcement=Enforcement.OBSERVE)) as cluster:
        cluster.gpu().xids[79] = 1
        cluster.signal(0)
        await cluster.until(lambda: not cluster.record().advertised)
        (granted,) = await request_start(cluster, await admitted(cluster))
        assert granted.basis is Basis.OBSERVE_MODE
        fast = {each.id: each for each in all_signed(cluster)}[granted.certificate or ""]
        assert "memory: not cleared, because the policy is in observe mode" in fast.not_covered


@in_virtual_time
async def test_certificates_after_a_recovery_and_after_an_operator_reset_are_signed() -> None:
    async with simulated_cluster(devices=1) as cluster:
        cluster.gpu().report_xid(95)
        cluster.signal(0)
        await cluster.until(lambda: cluster.gpu().resets == 1)
        await cluster.until(lambda: cluster.record().advertised and cluster.settled())
        _ = [each async for each in cluster.node.actions.reset("0", "hangs", "uid:1000")]
        assert [each.covered.count("reset: done") for each in all_signed(cluster)].count(1) == 2


@in_virtual_time
async def test_certificate_on_the_device_record_equals_the_stored_certificate() -> None:
    async with simulated_cluster(devices=1) as cluster:
        certificate = cluster.record().certificate
        assert certificate is not None
        assert is_signed(certificate, cluster.signer)
        assert cluster.ledger_store.certificates[certificate.id] == certificate


@in_virtual_time
async def test_service_with_another_key_signs_with_that_key_and_logs_the_key_at_its_start() -> None:
    async with simulated_cluster(devices=1) as cluster:
        before, old = cluster.record().certificate, cluster.signer
        assert before is not None
        cluster.kill()
        cluster.signer = EphemeralKey()
        await cluster.start_service()
        await cluster.until(cluster.settled)
        after = cluster.record().certificate
        assert after is not None
        assert is_signed(after, cluster.signer)
        assert is_signed(cluster.ledger_store.certificates[before.id], old)
        starts = [event.fields["key_id"] for event in cluster.ledger_store.events if event.name == "service.started"]
        assert starts == [old.key_id, cluster.signer.key_id]


# -- query by id -------------------------------------------------------------------------------------------------------


@in_virtual_time
async def test_certificate_is_returned_with_its_status() -> None:
    async with simulated_cluster(devices=1) as cluster:
        first = cluster.record().certificate
        assert first is not None
        assert (await cluster.node.certificate(first.id)).status is CertificateStatus.UNUSED
        (granted,) = await request_start(cluster, await admitted(cluster))
        for name in (first.id, granted.certificate or ""):
            found = await cluster.node.certificate(name)
            assert (found.certificate.id, found.status) == (name, CertificateStatus.CONSUMED)
            assert is_signed(found.certificate, cluster.signer)


@in_virtual_time
async def test_unused_certificate_replaced_by_a_newer_one_is_voided() -> None:
    async with simulated_cluster(devices=1) as cluster:
        first = cluster.record().certificate
        assert first is not None
        assert cluster.service is not None
        await cluster.service.scrub(cluster.gpu().id)
        assert (await cluster.node.certificate(first.id)).status is CertificateStatus.VOIDED


@in_virtual_time
async def test_certificate_of_an_earlier_service_is_voided_and_still_verifies() -> None:
    async with simulated_cluster(devices=1) as cluster:
        first = cluster.record().certificate
        assert first is not None
        cluster.kill()
        await cluster.start_service()
        await cluster.until(cluster.settled)
        found = await cluster.node.certificate(first.id)
        assert (found.status, is_signed(found.certificate, cluster.signer)) == (CertificateStatus.VOIDED, True)


@pytest.mark.parametrize("name", ["", "cert-9.9", "GPU-0000", "x" * 10_000])
@in_virtual_time
async def test_request_for_an_unknown_certificate_is_refused(name: str) -> None:
    async with simulated_cluster(devices=1) as cluster:
        with pytest.raises(InvalidRequest, match="has no certificate"):
            await cluster.node.certificate(name)
