"""The nonce of an attestation report: derived from the scrub that the report belongs to."""

from __future__ import annotations

import hashlib
import json

__all__ = ["NONCE_BYTES", "attestation_nonce"]

NONCE_BYTES = 32

_PURPOSE = "scrubber attestation v1"


# See docs/decisions/0042-confidential-computing.md.
def attestation_nonce(*, node: str, boot: str, device: str, scrub: str, previous_grant: int) -> bytes:
    """Return the nonce of the report that belongs to one scrub of ``device``.

    It is the SHA-256 of a canonical JSON list. All of its values are in the certificate, so a verifier can compute it.
    """
    values = [_PURPOSE, node, boot, device, scrub, previous_grant]
    return hashlib.sha256(json.dumps(values, separators=(",", ":"), ensure_ascii=True).encode("ascii")).digest()
