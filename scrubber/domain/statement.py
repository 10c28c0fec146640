"""The signed statement of a certificate: equal certificates give equal bytes, and different ones different bytes.

It is an in-toto Statement (v1) with a predicate type of its own, in canonical JSON, and contains everything that was
signed: a verifier needs no other record. The signature is made over the pre-authentication encoding of DSSE v1 (Dead
Simple Signing Envelope), which includes the type of the payload. The predicate type is inside the payload: a verifier
that does not compare it may take another signed statement for a certificate.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime
from typing import Any

from scrubber.domain.errors import InvalidRequest
from scrubber.domain.evidence import Attestation, Certificate, PathKind
from scrubber.domain.formatting import rfc3339

__all__ = [
    "PAYLOAD_TYPE",
    "PREDICATE_TYPE",
    "STATEMENT_TYPE",
    "UNSIGNED_FIELDS",
    "pae",
    "parse_statement",
    "sign_certificate",
    "statement",
]

PAYLOAD_TYPE = "application/vnd.in-toto+json"
STATEMENT_TYPE = "https://in-toto.io/Statement/v1"
PREDICATE_TYPE = "https://scrubber.dev/certificate/v1"
"""Any change of what :func:`statement` writes needs another one."""

UNSIGNED_FIELDS = frozenset({"next_grant", "key_id", "signature"})
"""Fields of a certificate that its statement excludes: its later use, and the signature itself."""

_CANONICAL = json.JSONEncoder(sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)


def statement(certificate: Certificate) -> bytes:
    """Return the bytes to sign for ``certificate``: all fields except :data:`UNSIGNED_FIELDS`.

    Sorted keys, no whitespace, ASCII; the time to the microsecond.

    Raises:
        ValueError: ``issued_at`` is not a time of the calendar.
    """
    values = {
        "_type": STATEMENT_TYPE,
        "subject": [
            {
                "name": certificate.device,
                "digest": {"sha256": hashlib.sha256(certificate.device.encode()).hexdigest()},
            }
        ],
        "predicateType": PREDICATE_TYPE,
        "predicate": {
            "id": certificate.id,
            "nodeName": certificate.node,
            "bootID": certificate.boot,
            "driverVersion": certificate.driver,
            "sequence": int(certificate.sequence),
            "previousGrant": int(certificate.previous_grant),
            "path": certificate.path.value,
            "scrubID": certificate.scrub,
            "covered": list(certificate.covered),
            "notCovered": list(certificate.not_covered),
            "policy": certificate.policy,
            "policyDigest": certificate.policy_digest,
            "issuedAt": _timestamp(certificate.issued_at),
            "baseCertificateID": certificate.rests_on,
            "attestation": _attestation_values(certificate.attestation),
        },
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
        _require_type(values, "_type", STATEMENT_TYPE)
        _require_type(values, "predicateType", PREDICATE_TYPE)
        (subject,) = values["subject"]
        predicate = values["predicate"]
        found = Certificate(
            id=_text(predicate["id"]),
            node=_text(predicate["nodeName"]),
            boot=_text(predicate["bootID"]),
            driver=_text(predicate["driverVersion"]),
            device=_text(subject["name"]),
            sequence=_whole(predicate["sequence"]),
            previous_grant=_whole(predicate["previousGrant"]),
            path=PathKind(predicate["path"]),
            scrub=_text(predicate["scrubID"]),
            covered=tuple(_text(each) for each in predicate["covered"]),
            not_covered=tuple(_text(each) for each in predicate["notCovered"]),
            policy=_text(predicate["policy"]),
            policy_digest=_text(predicate["policyDigest"]),
            issued_at=_seconds(predicate["issuedAt"]),
            rests_on=None if predicate["baseCertificateID"] is None else _text(predicate["baseCertificateID"]),
            attestation=_attestation(predicate["attestation"]),
        )
        # Catches everything else at once: duplicate keys, unknown keys, whitespace, another order, another digest.
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


def _require_type(values: dict[str, Any], key: str, expected: str) -> None:
    if (found := values[key]) != expected:
        raise InvalidRequest(f"The statement's {key} is {found!a:.200}; that of a certificate is {expected}.")


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


def _timestamp(at: float) -> str:
    text = rfc3339(at)
    _seconds(text)  # raises ValueError for what is no time
    return text


def _seconds(value: object) -> float:
    return datetime.fromisoformat(_text(value)).timestamp()
