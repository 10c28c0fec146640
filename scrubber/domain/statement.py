"""The signed statement of a certificate: equal certificates give equal bytes, and different ones different bytes.

The bytes are canonical JSON and contain everything that was signed: a verifier needs no other record. The signature is
made over the pre-authentication encoding of DSSE v1 (Dead Simple Signing Envelope), which includes the type of the
payload, so no other document signed with the node's key can be passed off as a certificate.
"""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from scrubber.domain.errors import InvalidRequest
from scrubber.domain.evidence import Attestation, Certificate, PathKind

__all__ = [
    "PAYLOAD_TYPE",
    "STATEMENT_FORMAT",
    "UNSIGNED_FIELDS",
    "pae",
    "parse_statement",
    "sign_certificate",
    "statement",
]

STATEMENT_FORMAT = 1
PAYLOAD_TYPE = "application/vnd.scrubber.certificate+json"

UNSIGNED_FIELDS = frozenset({"next_grant", "key_id", "signature"})
"""Fields of a certificate that its statement excludes: its later use, and the signature itself."""

_CANONICAL = json.JSONEncoder(sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)


def statement(certificate: Certificate) -> bytes:
    """Return the bytes to sign for ``certificate``: all fields except :data:`UNSIGNED_FIELDS`, and the format number.

    Sorted keys, no whitespace, ASCII; numbers as Python's ``repr`` writes them, which reads back as the same number.

    Raises:
        ValueError: ``issued_at`` is not finite.
    """
    values = {
        "format": STATEMENT_FORMAT,
        "id": certificate.id,
        "nodeName": certificate.node,
        "bootID": certificate.boot,
        "driverVersion": certificate.driver,
        "deviceID": certificate.device,
        "sequence": int(certificate.sequence),
        "previousGrant": int(certificate.previous_grant),
        "path": certificate.path.value,
        "scrubID": certificate.scrub,
        "covered": list(certificate.covered),
        "notCovered": list(certificate.not_covered),
        "policy": certificate.policy,
        "policyDigest": certificate.policy_digest,
        "issuedAt": float(certificate.issued_at),
        "baseCertificateID": certificate.rests_on,
        "attestation": _attestation_values(certificate.attestation),
    }
    return _CANONICAL.encode(values).encode("ascii")


# See docs/decisions/0033-signed-certificates.md.
def sign_certificate(certificate: Certificate, key_id: str, sign: Callable[[bytes], bytes]) -> Certificate:
    """Return ``certificate`` with the node's signature. The signature does not cover its later use."""
    signature = base64.b64encode(sign(statement(certificate))).decode("ascii")
    return replace(certificate, key_id=key_id, signature=signature)


def parse_statement(payload: bytes) -> Certificate:
    """Return the certificate that ``payload`` states, without key and signature. Does not verify any signature.

    Raises:
        InvalidRequest: the payload is not the result of :func:`statement` for any certificate.
    """
    try:
        values: Any = json.loads(payload.decode("ascii"))
        if not isinstance(values, dict):
            raise InvalidRequest("The payload is not a certificate's statement: it is not a JSON object.")
        written = values.get("format")
        if written != STATEMENT_FORMAT and type(written) is int:
            raise InvalidRequest(f"The statement has format {written}; this program reads format {STATEMENT_FORMAT}.")
        found = Certificate(
            id=_text(values["id"]),
            node=_text(values["nodeName"]),
            boot=_text(values["bootID"]),
            driver=_text(values["driverVersion"]),
            device=_text(values["deviceID"]),
            sequence=_whole(values["sequence"]),
            previous_grant=_whole(values["previousGrant"]),
            path=PathKind(values["path"]),
            scrub=_text(values["scrubID"]),
            covered=tuple(_text(each) for each in values["covered"]),
            not_covered=tuple(_text(each) for each in values["notCovered"]),
            policy=_text(values["policy"]),
            policy_digest=_text(values["policyDigest"]),
            issued_at=_seconds(values["issuedAt"]),
            rests_on=None if values["baseCertificateID"] is None else _text(values["baseCertificateID"]),
            attestation=_attestation(values["attestation"]),
        )
        # Catches everything else at once: duplicate keys, unknown keys, whitespace, another order, another format.
        if statement(found) != payload:
            raise InvalidRequest("The payload is not in the canonical form of a certificate's statement.")
    except KeyError as missing:
        raise InvalidRequest(f"The payload is not a certificate's statement: {missing.args[0]} is missing.") from None
    except (ValueError, TypeError, RecursionError):
        raise InvalidRequest("The payload is not a certificate's statement.") from None
    return found


def pae(payload: bytes, payload_type: str = PAYLOAD_TYPE) -> bytes:
    """Return the pre-authentication encoding of DSSE v1: the bytes that are actually signed for ``payload``."""
    kind = payload_type.encode()
    return b"DSSEv1 %d %s %d %s" % (len(kind), kind, len(payload), payload)


def _attestation_values(attestation: Attestation | None) -> dict[str, str] | None:
    return None if attestation is None else {"digest": attestation.digest, "nonce": attestation.nonce}


def _attestation(value: Any) -> Attestation | None:
    return None if value is None else Attestation(_text(value["digest"]), _text(value["nonce"]))


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError
    return value


def _whole(value: object) -> int:
    if type(value) is not int:
        raise TypeError
    return value


def _seconds(value: object) -> float:
    if not isinstance(value, float) or not math.isfinite(value):
        raise TypeError
    return value
