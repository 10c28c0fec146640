"""Ed25519 signatures: the only module that uses the crypto library. It never shows, copies or logs a private key.

Guarantee: :func:`verify_signature` accepts exactly what :meth:`EphemeralKey.sign` or a node's key signs, with the
matching public key. The ID of a key is the digest of the public key, so no key can take another key's ID.
"""

from __future__ import annotations

import hashlib

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from scrubber.domain.errors import InvalidRequest
from scrubber.domain.statement import pae

__all__ = ["Ed25519Key", "EphemeralKey", "encode_private_key", "key_id", "load_private_key", "verify_signature"]


class Ed25519Key:
    """A :class:`scrubber.ports.record.Signer` with an existing private key."""

    def __init__(self, private: Ed25519PrivateKey) -> None:
        public = private.public_key()
        self._private = private
        self._key_id = _public_key_id(public)
        self._public_pem = public.public_bytes(
            serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
        ).decode("ascii")

    @property
    def key_id(self) -> str:
        return self._key_id

    @property
    def public_key(self) -> str:
        return self._public_pem

    def sign(self, payload: bytes) -> bytes:
        return self._private.sign(pae(payload))


class EphemeralKey(Ed25519Key):
    """A key that exists only in this process: for tests, demonstrations and measurements. Nothing is written."""

    def __init__(self) -> None:
        super().__init__(Ed25519PrivateKey.generate())


def encode_private_key(private: Ed25519PrivateKey) -> bytes:
    """Return the stored form of ``private``: PKCS #8 in PEM, without a passphrase."""
    return private.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def load_private_key(pem: bytes) -> Ed25519PrivateKey:
    """Return the key that :func:`encode_private_key` wrote.

    Raises:
        ValueError: It is something else; the message is a predicate that describes it.
    """
    try:
        found = serialization.load_pem_private_key(pem, password=None)
    except TypeError:
        raise ValueError("is a private key that needs a passphrase") from None
    except (ValueError, UnsupportedAlgorithm):
        raise ValueError("is not a private key in PEM format") from None
    if not isinstance(found, Ed25519PrivateKey):
        raise ValueError("is a private key of another algorithm than Ed25519")
    return found


def key_id(public_pem: str) -> str:
    """Return the ID of the public key in ``public_pem``.

    Raises:
        InvalidRequest: It is not an Ed25519 public key in PEM form; the message describes what it is instead, if known.
    """
    return _public_key_id(_load_public_key(public_pem))


def verify_signature(public_pem: str, payload: bytes, signature: bytes) -> bool:
    """Whether the holder of this key signed ``payload`` as a certificate.

    Args:
        public_pem: one Ed25519 public key in PEM form.
        signature: a signature of any length; one that is not 64 bytes long is always invalid.

    Raises:
        InvalidRequest: As for :func:`key_id`.
    """
    public = _load_public_key(public_pem)
    try:
        public.verify(signature, pae(payload))
    except InvalidSignature:
        return False
    return True


def _load_public_key(pem: str) -> Ed25519PublicKey:
    if "PRIVATE KEY" in pem:
        raise InvalidRequest(
            "This is a private key. Verification needs the public key: scrubber certificate key prints it."
        )
    try:
        found = serialization.load_pem_public_key(pem.encode())
    except (ValueError, UnsupportedAlgorithm):
        raise InvalidRequest(
            "This is not a public key in PEM format: scrubber certificate key prints the node's."
        ) from None
    if not isinstance(found, Ed25519PublicKey):
        raise InvalidRequest("This is a public key of another algorithm; certificates are signed with Ed25519.")
    return found


def _public_key_id(public: Ed25519PublicKey) -> str:
    der = public.public_bytes(serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)
    return f"sha256:{hashlib.sha256(der).hexdigest()}"
