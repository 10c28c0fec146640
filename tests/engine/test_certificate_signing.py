"""Every certificate that the engine issues is signed by the node's key and unchanged since."""

from __future__ import annotations

import base64
from collections.abc import Iterable
from dataclasses import fields, replace
from typing import Any

import pytest

from scrubber.adapters.signing.ed25519 import EphemeralKey, verify_signature
from scrubber.domain.errors import InvalidRequest
from scrubber.domain.evidence import Certificate, PathKind
from scrubber.domain.handover_kind import Basis
from scrubber.domain.policy import Enforcement
from scrubber.domain.statement import UNSIGNED_FIELDS, sign_certificate, statement
from scrubber.engine.views import CertificateStatus
from tests.api.service import CERTIFICATE
from tests.world.asking import admitted, ask, started
from tests.world.timeline import in_virtual_time
from tests.world.world import DEFAULT, World, a_world

KEY, ANOTHER = EphemeralKey(), EphemeralKey()
SIGNED = sign_certificate(CERTIFICATE, KEY.key_id, KEY.sign)


def is_signed(certificate: Certificate, by: EphemeralKey) -> bool:
    return certificate.key_id == by.key_id and verify_signature(
        by.public_key, statement(certificate), base64.b64decode(certificate.signature or "", validate=True)
    )


def all_signed(world: World) -> Iterable[Certificate]:
    """Return all certificates ever issued in ``world``, as they are stored now; asserts that all are signed."""
    issued = world.vault.certificates.values()
    assert [each.id for each in issued if not is_signed(each, world.signer)] == []
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
    async with a_world(devices=2) as world:
        tenant = await started(world)
        await world.run(3.0)
        world.kubelet.exit(tenant, again=True)
        await world.until(lambda: tenant.starts == 2)
        world.kubelet.delete(tenant)
        await world.until(world.settled)
        issued = list(all_signed(world))
        kinds = {(each.path, each.next_grant is not None) for each in issued}
        assert kinds == {(PathKind.SLOW, False), (PathKind.SLOW, True), (PathKind.FAST, True)}
        assert any(each.rests_on is not None for each in issued)


@in_virtual_time
async def test_certificate_issued_under_an_observing_policy_is_signed_and_names_the_uncleared_memory() -> None:
    async with a_world(devices=1, policy=replace(DEFAULT, enforcement=Enforcement.OBSERVE)) as world:
        world.gpu().xids[79] = 1
        world.signal(0)
        await world.until(lambda: not world.record().advertised)
        (granted,) = await ask(world, await admitted(world))
        assert granted.basis is Basis.OBSERVE_MODE
        fast = {each.id: each for each in all_signed(world)}[granted.certificate or ""]
        assert "memory: left as it was, because the policy only observes" in fast.not_covered


@in_virtual_time
async def test_certificates_after_a_recovery_and_after_an_operator_reset_are_signed() -> None:
    async with a_world(devices=1) as world:
        world.gpu().came(95)
        world.signal(0)
        await world.until(lambda: world.gpu().resets == 1)
        await world.until(lambda: world.record().advertised and world.settled())
        _ = [each async for each in world.node.actions.reset("0", "hangs", "uid:1000")]
        assert [each.covered.count("reset: done") for each in all_signed(world)].count(1) == 2


@in_virtual_time
async def test_certificate_on_the_device_record_equals_the_stored_certificate() -> None:
    async with a_world(devices=1) as world:
        certificate = world.record().certificate
        assert certificate is not None
        assert is_signed(certificate, world.signer)
        assert world.vault.certificates[certificate.id] == certificate


@in_virtual_time
async def test_service_with_another_key_signs_with_that_key_and_logs_the_key_at_its_start() -> None:
    async with a_world(devices=1) as world:
        before, old = world.record().certificate, world.signer
        assert before is not None
        world.kill()
        world.signer = EphemeralKey()
        await world.start_service()
        await world.until(world.settled)
        after = world.record().certificate
        assert after is not None
        assert is_signed(after, world.signer)
        assert is_signed(world.vault.certificates[before.id], old)
        starts = [event.fields["key_id"] for event in world.vault.events if event.name == "service.started"]
        assert starts == [old.key_id, world.signer.key_id]


# -- query by id -------------------------------------------------------------------------------------------------------


@in_virtual_time
async def test_certificate_is_returned_with_its_status() -> None:
    async with a_world(devices=1) as world:
        first = world.record().certificate
        assert first is not None
        assert (await world.node.certificate(first.id)).status is CertificateStatus.UNUSED
        (granted,) = await ask(world, await admitted(world))
        for name in (first.id, granted.certificate or ""):
            found = await world.node.certificate(name)
            assert (found.certificate.id, found.status) == (name, CertificateStatus.CONSUMED)
            assert is_signed(found.certificate, world.signer)


@in_virtual_time
async def test_unused_certificate_replaced_by_a_newer_one_is_voided() -> None:
    async with a_world(devices=1) as world:
        first = world.record().certificate
        assert first is not None
        assert world.service is not None
        await world.service.scrub(world.gpu().id)
        assert (await world.node.certificate(first.id)).status is CertificateStatus.VOIDED


@in_virtual_time
async def test_certificate_of_an_earlier_service_is_voided_and_still_verifies() -> None:
    async with a_world(devices=1) as world:
        first = world.record().certificate
        assert first is not None
        world.kill()
        await world.start_service()
        await world.until(world.settled)
        found = await world.node.certificate(first.id)
        assert (found.status, is_signed(found.certificate, world.signer)) == (CertificateStatus.VOIDED, True)


@pytest.mark.parametrize("name", ["", "cert-9.9", "GPU-0000", "x" * 10_000])
@in_virtual_time
async def test_request_for_an_unknown_certificate_is_refused(name: str) -> None:
    async with a_world(devices=1) as world:
        with pytest.raises(InvalidRequest, match="has no certificate"):
            await world.node.certificate(name)
