"""Verification that an envelope holds a certificate by the owner of a key. Anything else is a negative verdict."""

from __future__ import annotations

from dataclasses import dataclass

from scrubber.adapters.signing.ed25519 import key_id, verify_signature
from scrubber.adapters.signing.envelope import Envelope
from scrubber.domain.errors import InvalidRequest
from scrubber.domain.evidence import Certificate
from scrubber.domain.statement import PAYLOAD_TYPE, parse_statement

__all__ = ["SignatureVerdict", "verify_envelope"]


@dataclass(frozen=True, slots=True)
class SignatureVerdict:
    """The result of verifying an envelope with one key.

    Attributes:
        key_id: ID of the key used for the verification.
        certificate: the certificate that the owner of that key signed. None unless the verdict is positive: no other
            content is authenticated.
        reason: why the verdict is negative; empty when it is positive. May contain unauthenticated content of the
            envelope.
    """

    key_id: str
    certificate: Certificate | None
    reason: str = ""


def verify_envelope(envelope: Envelope, public_pem: str) -> SignatureVerdict:
    """Verify ``envelope`` with one public key; one valid signature is enough; all other content is ignored.

    Raises:
        InvalidRequest: ``public_pem`` is not an Ed25519 public key.
    """
    ours = key_id(public_pem)
    if envelope.payload_type != PAYLOAD_TYPE:
        return SignatureVerdict(
            ours, None, f"The envelope contains {envelope.payload_type!r:.200}, not a certificate of this kind."
        )
    if not envelope.signatures:
        return SignatureVerdict(ours, None, "It has no signature.")
    if not any(verify_signature(public_pem, envelope.payload, each.value) for each in envelope.signatures):
        return SignatureVerdict(ours, None, _other_key_reason(envelope, ours))
    try:
        return SignatureVerdict(ours, parse_statement(envelope.payload))
    except InvalidRequest as error:
        return SignatureVerdict(
            ours, None, f"The signature of this key is valid, but the certificate cannot be read. {error}"
        )


def _other_key_reason(envelope: Envelope, ours: str) -> str:
    named = [each.key_id for each in envelope.signatures]
    if ours in named or None in named:
        return "The signature is not valid for this key: the certificate or the signature was changed."
    others = ", ".join(f"{each:.100}" for each in named[:3] if each)
    return f"It is signed by another key ({others}), not by this one."
