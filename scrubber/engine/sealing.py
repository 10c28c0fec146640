"""The node's signature under what it issues."""

from __future__ import annotations

import base64
from dataclasses import replace

from scrubber.domain.evidence import Certificate
from scrubber.domain.statement import statement
from scrubber.ports.record import Signer

__all__ = ["sealed"]


def sealed(certificate: Certificate, signer: Signer) -> Certificate:
    """``certificate``, signed. That it is used up later is no part of what was signed."""
    signature = base64.b64encode(signer.sign(statement(certificate))).decode("ascii")
    return replace(certificate, key_id=signer.key_id, signature=signature)
