"""Output of certificates for people and scripts: what was signed, and the current status."""

from __future__ import annotations

from collections.abc import Iterator
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from scrubber.domain.formatting import format_utc, rfc3339

if TYPE_CHECKING:
    from scrubber.adapters.signing.verification import SignatureVerdict
    from scrubber.api import scrubber_pb2 as pb
    from scrubber.domain.evidence import Certificate

__all__ = ["SignatureCheck", "certificate_json", "certificate_rows", "certificate_status", "claim_json", "verdict_rows"]


class SignatureCheck(StrEnum):
    """Result of checking a signature."""

    VALID = "valid"
    INVALID = "invalid"
    OTHER_KEY = "wrong-key"
    """It names a key that the service does not have now, so whether that key signed it is unknown."""


def claim_json(certificate: Certificate) -> dict[str, Any]:
    """Return what was signed, with the keys of the kind "Certificate"."""
    return {
        "metadata": {"name": certificate.id},
        "deviceID": certificate.device,
        "sequence": certificate.sequence,
        "path": certificate.path.value,
        "scrubID": certificate.scrub,
        "issuedAt": rfc3339(certificate.issued_at),
        "previousGrant": certificate.previous_grant,
        "covered": list(certificate.covered),
        "notCovered": list(certificate.not_covered),
        "policy": certificate.policy,
        "policyDigest": certificate.policy_digest,
        "baseCertificateID": certificate.rests_on,
        "nodeName": certificate.node,
        "bootID": certificate.boot,
        "driverVersion": certificate.driver,
        "attestation": None
        if certificate.attestation is None
        else {"digest": certificate.attestation.digest, "nonce": certificate.attestation.nonce},
    }


def certificate_json(signed: pb.SignedCertificate, verdict: SignatureCheck | None) -> dict[str, Any]:
    """Return a certificate as JSON, as it was signed; ``verdict`` is None where the signature was not checked."""
    from scrubber.cli.render import json_objects
    from scrubber.domain.statement import parse_statement

    return {
        **json_objects.certificate(signed.certificate),
        **claim_json(parse_statement(signed.payload)),
        "status": signed.status or None,
        "signatureStatus": None if verdict is None else verdict.value,
    }


def certificate_status(signed: pb.SignedCertificate) -> str:
    """Return the status in a few words: unused, voided, or consumed and by which grant."""
    if signed.certificate.HasField("next_grant"):
        return f"consumed, grant {signed.certificate.next_grant}"
    return signed.status or "unknown"


def _claim_rows(certificate: Certificate) -> Iterator[tuple[str, str]]:
    yield ("certificate", f"{certificate.id} (number {certificate.sequence} of its device)")
    yield ("device", certificate.device)
    yield ("node", f"{certificate.node} (boot {certificate.boot}, driver {certificate.driver})")
    yield ("issued", format_utc(certificate.issued_at))
    yield ("path", certificate.path.value)
    yield from (("covered", each) for each in certificate.covered or ("nothing",))
    yield from (("not covered", each) for each in certificate.not_covered or ("-",))
    yield ("policy", f"{certificate.policy} ({certificate.policy_digest[:16]})")
    yield ("scrub", certificate.scrub)
    if certificate.rests_on is not None:
        yield ("base certificate", certificate.rests_on)
    if certificate.attestation is not None:
        yield ("attestation digest", certificate.attestation.digest)
        yield ("attestation nonce", certificate.attestation.nonce)
    yield ("previous grant", str(certificate.previous_grant) if certificate.previous_grant else "none")


def certificate_rows(signed: pb.SignedCertificate, verdict: SignatureCheck) -> Iterator[tuple[str, str]]:
    """Yield a certificate as a list of properties: the signed ones first."""
    from scrubber.domain.statement import parse_statement

    yield from _claim_rows(parse_statement(signed.payload))
    yield ("status", certificate_status(signed))
    yield ("key", signed.certificate.key_id or "-")
    match verdict:
        case SignatureCheck.VALID:
            yield ("signature", "valid: signed with the node's current key")
        case SignatureCheck.INVALID:
            yield ("signature", "invalid: not signed with the node's key")
        case SignatureCheck.OTHER_KEY:
            yield (
                "signature",
                "unknown: it names a different key than the node's current one; export it and verify it with --key",
            )


def verdict_rows(verdict: SignatureVerdict) -> Iterator[tuple[str, str]]:
    """Yield a verdict as a list of properties, followed by the certificate if it is valid."""
    yield ("verdict", "invalid" if verdict.certificate is None else "valid")
    if verdict.certificate is None:
        yield ("reason", verdict.reason)
    yield ("key", verdict.key_id)
    if verdict.certificate is not None:
        yield from _claim_rows(verdict.certificate)
