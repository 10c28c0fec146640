"""The node's own key: who says what a certificate says."""

from __future__ import annotations

from typing import Protocol

__all__ = ["Signer"]


class Signer(Protocol):
    """A private key that never leaves its holder, and what verifiers need of it. Ed25519."""

    @property
    def key_id(self) -> str:
        """``sha256:`` and the SHA-256, in hexadecimal digits, of the public key's DER SubjectPublicKeyInfo."""

    @property
    def public_key(self) -> str:
        """PEM of the SubjectPublicKeyInfo; ends with a line feed."""

    def sign(self, payload: bytes) -> bytes:
        """64 bytes over the DSSE encoding of ``payload`` (:func:`scrubber.domain.statement.pae`).

        The same payload always makes the same signature. Takes well below a millisecond; nothing is written or waited for.
        """
