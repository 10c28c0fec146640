"""What is shown of a certificate: to people, and to scripts. It is what was signed, and besides it what became of it."""

from __future__ import annotations

from collections.abc import Iterator
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from scrubber.domain.formatting import format_utc

if TYPE_CHECKING:
    from scrubber.adapters.signing.verification import SignatureVerdict
    from scrubber.api import scrubber_pb2 as pb
    from scrubber.domain.evidence import Certificate

__all__ = ["SignatureCheck", "certificate_json", "certificate_rows", "certificate_status", "claim_json", "verdict_rows"]


class SignatureCheck(StrEnum):
    """What became of the check of a signature."""

    VALID = "valid"
    INVALID = "invalid"
    OTHER_KEY = "other-key"
    """It names another key than the service has now, so whether that one signed it is unknown."""


def claim_json(certificate: Certificate) -> dict[str, Any]:
    """What was signed, in the keys of the kind "Certificate"."""
    return {
        "id": certificate.id,
        "device": certificate.device,
        "sequence": certificate.sequence,
        "path": certificate.path.value,
        "scrub": certificate.scrub,
        "issued_at": certificate.issued_at,
        "previous_grant": certificate.previous_grant,
        "covered": list(certificate.covered),
        "not_covered": list(certificate.not_covered),
        "policy": certificate.policy,
        "policy_digest": certificate.policy_digest,
        "rests_on": certificate.rests_on,
        "node": certificate.node,
        "boot": certificate.boot,
        "driver": certificate.driver,
    }


def certificate_json(signed: pb.SignedCertificate, verdict: SignatureCheck | None) -> dict[str, Any]:
    """A certificate in JSON, as it was signed; ``verdict`` is None where the signature was not looked at."""
    from scrubber.cli.render import json_objects
    from scrubber.domain.statement import parse_statement

    return {
        **json_objects.certificate(signed.certificate),
        **claim_json(parse_statement(signed.payload)),
        "standing": signed.standing or None,
        "signature_verdict": None if verdict is None else verdict.value,
    }


def certificate_status(signed: pb.SignedCertificate) -> str:
    """What became of it, in a few words: unused, void, or used and by which grant."""
    if signed.certificate.HasField("next_grant"):
        return f"used, grant {signed.certificate.next_grant}"
    return signed.standing or "unknown"


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
        yield ("rests on", certificate.rests_on)
    yield ("after", f"grant {certificate.previous_grant}" if certificate.previous_grant else "no grant before it")


def certificate_rows(signed: pb.SignedCertificate, verdict: SignatureCheck) -> Iterator[tuple[str, str]]:
    """A certificate as a list of properties: what was signed, then what was not."""
    from scrubber.domain.statement import parse_statement

    yield from _claim_rows(parse_statement(signed.payload))
    yield ("standing", certificate_status(signed))
    yield ("key", signed.certificate.key_id or "-")
    match verdict:
        case SignatureCheck.VALID:
            yield ("signature", "valid, by the key that the service on this node has now")
        case SignatureCheck.INVALID:
            yield ("signature", "invalid: the node's key did not sign this")
        case SignatureCheck.OTHER_KEY:
            yield (
                "signature",
                "unknown: it names another key than the service has now; export it, and verify it with --key",
            )


def verdict_rows(verdict: SignatureVerdict) -> Iterator[tuple[str, str]]:
    """A verdict as a list of properties; what was certified follows a positive one only."""
    yield ("verdict", "invalid" if verdict.certificate is None else "valid")
    if verdict.certificate is None:
        yield ("because", verdict.reason)
    yield ("key", verdict.key_id)
    if verdict.certificate is not None:
        yield from _claim_rows(verdict.certificate)
