"""What a node signs of a certificate: the same certificate always makes the same bytes, and another one makes others.

The bytes are canonical JSON, and they alone say what was signed: whoever verifies needs no record of ours beside them.
The signature is made over the pre-authentication encoding of DSSE v1 (Dead Simple Signing Envelope), which binds the
type of the payload, so that no other document of the node's key can be passed off as a certificate.
"""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from scrubber.domain.errors import InvalidRequest
from scrubber.domain.evidence import Certificate, PathKind

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
"""Fields of a certificate that its statement does not hold: what becomes of it later, and the signature itself."""

_CANONICAL = json.JSONEncoder(sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)


def statement(certificate: Certificate) -> bytes:
    """What is signed of ``certificate``: all of its fields but those in :data:`UNSIGNED_FIELDS`, and the number of this format.

    Sorted keys, no blanks, ASCII; numbers as Python's ``repr`` writes them, which reads back as the same number.

    Raises:
        ValueError: ``issued_at`` is not finite.
    """
    values = {
        "format": STATEMENT_FORMAT,
        "id": certificate.id,
        "node": certificate.node,
        "boot": certificate.boot,
        "driver": certificate.driver,
        "device": certificate.device,
        "sequence": int(certificate.sequence),
        "previous_grant": int(certificate.previous_grant),
        "path": certificate.path.value,
        "scrub": certificate.scrub,
        "covered": list(certificate.covered),
        "not_covered": list(certificate.not_covered),
        "policy": certificate.policy,
        "policy_digest": certificate.policy_digest,
        "issued_at": float(certificate.issued_at),
        "rests_on": certificate.rests_on,
    }
    return _CANONICAL.encode(values).encode("ascii")


def sign_certificate(certificate: Certificate, key_id: str, sign: Callable[[bytes], bytes]) -> Certificate:
    """Return ``certificate`` with the node's signature. That it is used up later is not part of what is signed."""
    signature = base64.b64encode(sign(statement(certificate))).decode("ascii")
    return replace(certificate, key_id=key_id, signature=signature)


def parse_statement(payload: bytes) -> Certificate:
    """The certificate that ``payload`` states, without key and signature. Whether anybody signed it is another question.

    Raises:
        InvalidRequest: these are not bytes that :func:`statement` makes, of any certificate.
    """
    try:
        values: Any = json.loads(payload.decode("ascii"))
        if not isinstance(values, dict):
            raise InvalidRequest("The payload is no certificate's statement: it is no JSON object.")
        written = values.get("format")
        if written != STATEMENT_FORMAT and type(written) is int:
            raise InvalidRequest(f"The statement is of format {written}; this program reads format {STATEMENT_FORMAT}.")
        found = Certificate(
            id=_text(values["id"]),
            node=_text(values["node"]),
            boot=_text(values["boot"]),
            driver=_text(values["driver"]),
            device=_text(values["device"]),
            sequence=_whole(values["sequence"]),
            previous_grant=_whole(values["previous_grant"]),
            path=PathKind(values["path"]),
            scrub=_text(values["scrub"]),
            covered=tuple(_text(each) for each in values["covered"]),
            not_covered=tuple(_text(each) for each in values["not_covered"]),
            policy=_text(values["policy"]),
            policy_digest=_text(values["policy_digest"]),
            issued_at=_seconds(values["issued_at"]),
            rests_on=None if values["rests_on"] is None else _text(values["rests_on"]),
        )
        # Catches all else at once: doubled keys, keys that nobody knows, blanks, another order, another format.
        if statement(found) != payload:
            raise InvalidRequest("The payload is not written as a certificate's statement is.")
    except KeyError as missing:
        raise InvalidRequest(f"The payload is no certificate's statement: {missing.args[0]} is missing.") from None
    except (ValueError, TypeError, RecursionError):
        raise InvalidRequest("The payload is no certificate's statement.") from None
    return found


def pae(payload: bytes, payload_type: str = PAYLOAD_TYPE) -> bytes:
    """The pre-authentication encoding of DSSE v1: what is really signed in the name of ``payload``."""
    kind = payload_type.encode()
    return b"DSSEv1 %d %s %d %s" % (len(kind), kind, len(payload), payload)


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
