"""The form in which a certificate leaves the node: a DSSE envelope, one JSON document that holds all that was signed.

Promise: whatever bytes come in, reading them ends soon, with an envelope or with a sentence. An envelope that could be
read in two ways is not read at all. Nothing in it is believed here; :mod:`scrubber.adapters.signing.verification` judges.
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
"""Bytes of an envelope, at most: a certificate has a few thousand."""
_MAX_SIGNATURES = 64

_STANDARD = str.maketrans("-_", "+/")


@dataclass(frozen=True, slots=True)
class EnvelopeSignature:
    """Somebody's signature. ``key_id`` is a hint, written by anybody: None where there is none."""

    key_id: str | None
    value: bytes


@dataclass(frozen=True, slots=True)
class Envelope:
    """What was in an envelope, decoded and not judged."""

    payload_type: str
    payload: bytes
    signatures: tuple[EnvelopeSignature, ...]


def write_envelope(payload: bytes, key_id: str, signature: bytes) -> str:
    """One JSON document, on several lines, with what is needed to verify it and nothing else."""
    document = {
        "payloadType": PAYLOAD_TYPE,
        "payload": base64.b64encode(payload).decode("ascii"),
        "signatures": [{"keyid": key_id, "sig": base64.b64encode(signature).decode("ascii")}],
    }
    return json.dumps(document, indent=2) + "\n"


def read_envelope(data: bytes) -> Envelope:
    """The envelope in ``data``. Keys that DSSE does not have are passed over; both alphabets of base64 are read.

    Raises:
        InvalidRequest: this is no DSSE envelope, or one that is too large, or that has a key twice.
    """
    if len(data) > MAX_ENVELOPE_BYTES:
        raise InvalidRequest(f"That is no envelope of a certificate: it is longer than {MAX_ENVELOPE_BYTES} bytes.")
    document = _json(data)
    if not isinstance(document, dict):
        raise InvalidRequest("That is no DSSE envelope: it is no JSON object.")
    signatures = document.get("signatures")
    if not isinstance(signatures, list):
        raise InvalidRequest("That is no DSSE envelope: it has no list of signatures.")
    if len(signatures) > _MAX_SIGNATURES:
        raise InvalidRequest(f"The envelope has {len(signatures)} signatures; {_MAX_SIGNATURES} are read at most.")
    return Envelope(
        payload_type=_text(document, "payloadType"),
        payload=_bytes(document, "payload"),
        signatures=tuple(_signature(each) for each in signatures),
    )


def _json(data: bytes) -> Any:
    try:
        return json.loads(data.decode("utf-8"), object_pairs_hook=_reject_duplicates, parse_constant=_reject_constant)
    except UnicodeDecodeError:
        raise InvalidRequest("That is no DSSE envelope: it is not UTF-8.") from None
    except ValueError as error:
        raise InvalidRequest(f"That is no DSSE envelope: it is no JSON ({error}).") from None
    except RecursionError:
        raise InvalidRequest("That is no DSSE envelope: it is nested too deeply.") from None


def _reject_duplicates(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise InvalidRequest("The envelope has a key twice, so what it says depends on who reads it.")
    return found


def _reject_constant(word: str) -> Any:
    raise ValueError(f"{word} is no JSON value")


def _signature(value: object) -> EnvelopeSignature:
    if not isinstance(value, dict):
        raise InvalidRequest("A signature in the envelope is no JSON object.")
    key_id = value.get("keyid")
    if key_id is not None and not isinstance(key_id, str):
        raise InvalidRequest("A signature's keyid in the envelope is no text.")
    return EnvelopeSignature(key_id or None, _bytes(value, "sig"))


def _text(document: dict[str, Any], name: str) -> str:
    value = document.get(name)
    if not isinstance(value, str):
        raise InvalidRequest(f"That is no DSSE envelope: its {name} is no text, or missing.")
    return value


def _bytes(document: dict[str, Any], name: str) -> bytes:
    written = _text(document, name)
    try:
        return base64.b64decode(written.translate(_STANDARD), validate=True)
    except (binascii.Error, ValueError):
        raise InvalidRequest(f"That is no DSSE envelope: its {name} is no base64.") from None
