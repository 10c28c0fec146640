"""Certificates from elsewhere: envelopes, statements and keys."""

from __future__ import annotations

import base64
import importlib.util
import json
import tempfile
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from scrubber.adapters.signing.ed25519 import Ed25519Key, key_id
from scrubber.adapters.signing.envelope import read_envelope, write_envelope
from scrubber.adapters.signing.verification import verify_envelope
from scrubber.domain.errors import InvalidRequest
from scrubber.domain.evidence import Attestation
from scrubber.domain.statement import parse_statement, statement
from tests.fuzz.structure import EDIT_SEEDS, json_input
from tests.fuzz.target import SLOW_GOAL, target
from tests.ledger_samples import certificate

_KEY = Ed25519Key(Ed25519PrivateKey.from_private_bytes(bytes(range(32))))
_CERTIFICATE = replace(certificate("C-1"), attestation=Attestation("d" * 64, "n" * 32))
_PAYLOAD = statement(_CERTIFICATE)
_ENVELOPE = write_envelope(_PAYLOAD, _KEY.key_id, _KEY.sign(_PAYLOAD))


@target(
    "certificate-statement",
    parser="the statement of a certificate",
    covers=("scrubber.domain.statement",),
    oracle="a statement is refused, or is byte for byte the statement of the certificate that is read from it",
    seeds=(*EDIT_SEEDS, _PAYLOAD, statement(certificate("C-2"))),
    words=(b'"format":1', b'"issuedAt":', b"1e999", b"NaN", b'"path":"slow"'),
)
def certificate_statement(data: bytes) -> bool:
    payload = json_input(data, json.loads(_PAYLOAD))
    if data.startswith(b"\0"):
        payload = json.dumps(json.loads(payload), sort_keys=True, separators=(",", ":")).encode()
    try:
        found = parse_statement(payload)
    except InvalidRequest as error:
        assert str(error).isascii(), error
        return False
    assert statement(found) == payload
    return True


@cache
def _script() -> ModuleType:
    """Return the script of the documentation, which verifies without this project's code."""
    path = Path(__file__).parents[3] / "docs" / "verify_certificate.py"
    spec = importlib.util.spec_from_file_location("verify_certificate", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@target(
    "certificate-envelope",
    parser="an exported certificate",
    covers=("scrubber.adapters.signing.envelope", "scrubber.adapters.signing.verification"),
    oracle="only the statement that the key signed is valid, whatever surrounds it, and the independent script of the "
    "documentation accepts it too",
    seeds=(
        *EDIT_SEEDS,
        _ENVELOPE.encode(),
        write_envelope(_PAYLOAD, "", b"\0" * 64).encode(),
        _ENVELOPE.replace("+", "-").replace("/", "_").encode(),
    ),
    words=(b'"payloadType"', b'"payload"', b'"signatures"', b'"keyid"', b'"sig"', b"="),
    longest=8192,
    goal=SLOW_GOAL,
)
def certificate_envelope(data: bytes) -> bool:
    data = json_input(data, json.loads(_ENVELOPE))
    with tempfile.TemporaryDirectory(prefix="envelope-") as directory:
        envelope, key = Path(directory) / "envelope.json", Path(directory) / "key.pem"
        envelope.write_bytes(data)
        key.write_text(_KEY.public_key)
        text, independent = _script().main(str(envelope), str(key))
    assert independent in (0, 1, 2)
    if independent == 0:
        assert json.loads(text) == json.loads(_PAYLOAD)
    try:
        found = verify_envelope(read_envelope(data), _KEY.public_key)
    except InvalidRequest as error:
        assert str(error)
        return False
    assert (found.certificate is not None) == (independent == 0) == (not found.reason), found
    if found.certificate is None:
        return False
    assert found.certificate == _CERTIFICATE
    return True


@target(
    "public-key",
    parser="a public key file",
    covers=("scrubber.adapters.signing.ed25519",),
    oracle="a file is refused with a message, or has a key ID; only this node's own key verifies what this node signed",
    seeds=(_KEY.public_key.encode(), _KEY.public_key.replace("\n", "\r\n").encode(), b"-----BEGIN PRIVATE KEY-----\n"),
    words=(b"-----BEGIN PUBLIC KEY-----\n", b"-----END PUBLIC KEY-----\n", b"MCowBQYDK2VwAyEA"),
)
def public_key(data: bytes) -> bool:
    pem = data.decode(errors="surrogateescape")
    verdicts: list[Any] = []
    for each in (pem, f"-----BEGIN PUBLIC KEY-----\n{base64.b64encode(data).decode()}\n-----END PUBLIC KEY-----\n"):
        try:
            id = key_id(each)
        except InvalidRequest:
            continue
        found = verify_envelope(read_envelope(_ENVELOPE.encode()), each)
        assert found.key_id == id
        assert (found.certificate is not None) == (id == _KEY.key_id)
        verdicts.append(id)
    return bool(verdicts)
