"""The exported form of a certificate: a DSSE envelope, one JSON document that contains everything that was signed.

Guarantee: reading any input ends quickly, with an envelope or with an error message. An envelope that could be read in
two ways is rejected. Nothing in it is trusted here; :mod:`scrubber.adapters.signing.verification` verifies it.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from scrubber.domain.errors import InvalidRequest
from scrubber.domain.statement import PAYLOAD_TYPE

__all__ = ["MAX_ENVELOPE_BYTES", "Envelope", "EnvelopeSignature", "read_envelope", "write_envelope"]

MAX_ENVELOPE_BYTES = 1024 * 1024
"""Maximum size of an envelope in bytes: a certificate has a few thousand."""
_MAX_SIGNATURES = 64

_STANDARD = str.maketrans("-_", "+/")


@dataclass(frozen=True, slots=True)
class EnvelopeSignature:
    """One signature. ``key_id`` is an unauthenticated hint that anyone could have written: None where there is none."""

    key_id: str | None
    value: bytes


@dataclass(frozen=True, slots=True)
class Envelope:
    """The decoded, unverified content of an envelope."""

    payload_type: str
    payload: bytes
    signatures: tuple[EnvelopeSignature, ...]


def write_envelope(payload: bytes, key_id: str, signature: bytes) -> str:
    """Return one JSON document, on several lines, with exactly what is needed to verify it."""
    document = {
        "payloadType": PAYLOAD_TYPE,
        "payload": base64.b64encode(payload).decode("ascii"),
        "signatures": [{"keyid": key_id, "sig": base64.b64encode(signature).decode("ascii")}],
    }
    return json.dumps(document, indent=2) + "\n"


def read_envelope(data: bytes) -> Envelope:
    """Parse the envelope in ``data``. Keys that DSSE does not define are ignored; both base64 alphabets are accepted.

    Raises:
        InvalidRequest: This is not a DSSE envelope, or it is too large, or it has a duplicate key.
    """
    if len(data) > MAX_ENVELOPE_BYTES:
        raise InvalidRequest(f"This is not an envelope of a certificate: it is longer than {MAX_ENVELOPE_BYTES} bytes.")
    document = _json(data)
    if not isinstance(document, dict):
        raise InvalidRequest("This is not a DSSE envelope: it is not a JSON object.")
    signatures = document.get("signatures")
    if not isinstance(signatures, list):
        raise InvalidRequest("This is not a DSSE envelope: it has no list of signatures.")
    if len(signatures) > _MAX_SIGNATURES:
        raise InvalidRequest(f"The envelope has {len(signatures)} signatures; the limit is {_MAX_SIGNATURES}.")
    return Envelope(
        payload_type=_text(document, "payloadType"),
        payload=_bytes(document, "payload"),
        signatures=tuple(_signature(each) for each in signatures),
    )


def _json(data: bytes) -> Any:
    try:
        return json.loads(data.decode("utf-8"), object_pairs_hook=_reject_duplicates, parse_constant=_reject_constant)
    except UnicodeDecodeError:
        raise InvalidRequest("This is not a DSSE envelope: it is not UTF-8.") from None
    except ValueError as error:
        raise InvalidRequest(f"This is not a DSSE envelope: it is not JSON ({error}).") from None
    except RecursionError:
        raise InvalidRequest("This is not a DSSE envelope: it is nested too deeply.") from None


def _reject_duplicates(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise InvalidRequest("The envelope contains a key twice, so its meaning depends on the reader.")
    return found


def _reject_constant(word: str) -> Any:
    raise ValueError(f"{word} is not a JSON value")


def _signature(value: object) -> EnvelopeSignature:
    if not isinstance(value, dict):
        raise InvalidRequest("A signature in the envelope is not a JSON object.")
    key_id = value.get("keyid")
    if key_id is not None and not isinstance(key_id, str):
        raise InvalidRequest("A signature's keyid in the envelope is not a string.")
    return EnvelopeSignature(key_id or None, _bytes(value, "sig"))


def _text(document: dict[str, Any], name: str) -> str:
    value = document.get(name)
    if not isinstance(value, str):
        raise InvalidRequest(f"This is not a DSSE envelope: its {name} is missing or not a string.")
    return value


def _bytes(document: dict[str, Any], name: str) -> bytes:
    written = _text(document, name)
    try:
        return base64.b64decode(written.translate(_STANDARD), validate=True)
    except (binascii.Error, ValueError):
        raise InvalidRequest(f"This is not a DSSE envelope: its {name} is not base64.") from None
