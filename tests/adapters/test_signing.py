"""The node's key: the contract of every signer, the required state of the key file, and hostile envelopes."""

import base64
import hashlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed448, x25519
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import given
from hypothesis import strategies as st

from scrubber.adapters.signing import node_key
from scrubber.adapters.signing.ed25519 import EphemeralKey, key_id, verify_signature
from scrubber.adapters.signing.envelope import MAX_ENVELOPE_BYTES, read_envelope, write_envelope
from scrubber.adapters.signing.node_key import FILE_NAME, NodeKey
from scrubber.adapters.signing.verification import verify_envelope
from scrubber.domain.errors import InvalidConfiguration, InvalidRequest
from scrubber.domain.statement import PAYLOAD_TYPE, pae, statement
from scrubber.ports.record import Signer
from tests.api.service import CERTIFICATE

PAYLOAD = statement(CERTIFICATE)
GROUP_ORDER = 2**252 + 27742317777372353535851937790883648493

PKCS8 = serialization.PrivateFormat.PKCS8
PEM, DER = serialization.Encoding.PEM, serialization.Encoding.DER
OPEN = serialization.NoEncryption()
SPKI = serialization.PublicFormat.SubjectPublicKeyInfo


@pytest.fixture(params=["ephemeral", "made", "found"])
def signer(request: pytest.FixtureRequest, tmp_path: Path) -> Signer:
    if request.param == "ephemeral":
        return EphemeralKey()
    made, created = NodeKey.open(tmp_path)
    assert created
    return made if request.param == "made" else NodeKey.open(tmp_path)[0]


class TestEverySigner:
    def test_signature_verifies_under_the_signers_public_key(self, signer: Signer) -> None:
        signature = signer.sign(PAYLOAD)
        assert len(signature) == 64
        assert verify_signature(signer.public_key, PAYLOAD, signature)

    def test_signature_of_the_same_payload_is_deterministic(self, signer: Signer) -> None:
        assert signer.sign(PAYLOAD) == signer.sign(PAYLOAD)

    def test_signature_covers_the_dsse_encoding_not_the_bare_payload(self, signer: Signer) -> None:
        public = serialization.load_pem_public_key(signer.public_key.encode())
        public.verify(signer.sign(PAYLOAD), pae(PAYLOAD))  # type: ignore[union-attr, call-arg]

    def test_key_id_is_the_digest_of_the_public_key(self, signer: Signer) -> None:
        public = serialization.load_pem_public_key(signer.public_key.encode())
        digest = hashlib.sha256(public.public_bytes(DER, SPKI)).hexdigest()
        assert signer.key_id == f"sha256:{digest}" == key_id(signer.public_key)

    def test_public_key_is_one_pem_block_with_a_final_newline(self, signer: Signer) -> None:
        assert signer.public_key.startswith("-----BEGIN PUBLIC KEY-----\n")
        assert signer.public_key.endswith("\n-----END PUBLIC KEY-----\n")

    def test_signature_does_not_verify_under_another_key(self, signer: Signer) -> None:
        other = EphemeralKey()
        assert other.key_id != signer.key_id
        assert not verify_signature(other.public_key, PAYLOAD, signer.sign(PAYLOAD))

    def test_printed_signer_never_reveals_the_private_key(self, signer: Signer) -> None:
        secret = signer._private.private_bytes_raw()  # type: ignore[attr-defined]
        shown = f"{signer!r} {signer} {signer.key_id} {signer.public_key}"
        assert secret.hex() not in shown
        assert base64.b64encode(secret).decode() not in shown


class TestVerifySignature:
    KEY = EphemeralKey()
    SIGNATURE = KEY.sign(PAYLOAD)

    @given(st.integers(min_value=0, max_value=8 * len(PAYLOAD) - 1))
    def test_any_changed_payload_bit_invalidates_the_signature(self, bit: int) -> None:
        changed = bytearray(PAYLOAD)
        changed[bit // 8] ^= 1 << bit % 8
        assert not verify_signature(self.KEY.public_key, bytes(changed), self.SIGNATURE)

    @given(st.integers(min_value=0, max_value=511))
    def test_any_changed_signature_bit_invalidates_the_signature(self, bit: int) -> None:
        changed = bytearray(self.SIGNATURE)
        changed[bit // 8] ^= 1 << bit % 8
        assert not verify_signature(self.KEY.public_key, PAYLOAD, bytes(changed))

    @given(st.binary(max_size=80))
    def test_arbitrary_bytes_are_no_valid_signature(self, made_up: bytes) -> None:
        assert not verify_signature(self.KEY.public_key, PAYLOAD, made_up)

    @pytest.mark.parametrize("length", [0, 63, 65, 128])
    def test_signature_of_another_length_is_invalid(self, length: int) -> None:
        assert not verify_signature(self.KEY.public_key, PAYLOAD, (self.SIGNATURE * 2)[:length])

    def test_malleated_signature_is_invalid(self) -> None:
        """Adding the group's order to the second half yields one that a careless verifier accepts (RFC 8032, 5.1.7)."""
        second = int.from_bytes(self.SIGNATURE[32:], "little") + GROUP_ORDER
        assert not verify_signature(self.KEY.public_key, PAYLOAD, self.SIGNATURE[:32] + second.to_bytes(32, "little"))

    def test_signature_over_another_payload_type_is_invalid(self) -> None:
        private = Ed25519PrivateKey.generate()
        public = private.public_key().public_bytes(PEM, SPKI).decode()
        assert verify_signature(public, PAYLOAD, private.sign(pae(PAYLOAD)))
        assert not verify_signature(public, PAYLOAD, private.sign(pae(PAYLOAD, "application/json")))
        assert not verify_signature(public, PAYLOAD, private.sign(PAYLOAD))

    @pytest.mark.parametrize(
        ("pem", "message"),
        [
            ("", "not a public key in PEM format"),
            ("-----BEGIN PUBLIC KEY-----\n!!!\n-----END PUBLIC KEY-----\n", "not a public key in PEM format"),
            ("-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n", "not a public key in PEM format"),
            ("\ud800", "not a public key in PEM format"),
            (Ed25519PrivateKey.generate().private_bytes(PEM, PKCS8, OPEN).decode(), "This is a private key"),
            (
                ec.generate_private_key(ec.SECP256R1()).public_key().public_bytes(PEM, SPKI).decode(),
                "another algorithm",
            ),
            (x25519.X25519PrivateKey.generate().public_key().public_bytes(PEM, SPKI).decode(), "another algorithm"),
        ],
    )
    def test_invalid_public_key_is_refused_with_the_reason(self, pem: str, message: str) -> None:
        with pytest.raises(InvalidRequest, match=message):
            verify_signature(pem, PAYLOAD, self.SIGNATURE)
        with pytest.raises(InvalidRequest, match=message):
            key_id(pem)


class TestKeyFile:
    def test_first_start_creates_a_key_readable_only_by_its_owner(self, tmp_path: Path) -> None:
        before = os.umask(0)
        try:
            _, created = NodeKey.open(tmp_path)
        finally:
            os.umask(before)
        assert created
        assert (tmp_path / FILE_NAME).stat().st_mode & 0o777 == 0o600
        assert os.listdir(tmp_path) == [FILE_NAME]

    def test_key_file_mode_does_not_depend_on_the_umask(self, tmp_path: Path) -> None:
        before = os.umask(0o777)
        try:
            made, _ = NodeKey.open(tmp_path)
        finally:
            os.umask(before)
        assert (tmp_path / FILE_NAME).stat().st_mode & 0o777 == 0o600
        assert NodeKey.open(tmp_path)[0].key_id == made.key_id

    def test_later_start_loads_the_same_key_and_changes_nothing(self, tmp_path: Path) -> None:
        made, _ = NodeKey.open(tmp_path)
        before = (tmp_path / FILE_NAME).read_bytes()
        found, created = NodeKey.open(tmp_path)
        assert (found.key_id, created) == (made.key_id, False)
        assert (tmp_path / FILE_NAME).read_bytes() == before

    def test_key_created_by_openssl_is_accepted(self, tmp_path: Path) -> None:
        private = Ed25519PrivateKey.generate()
        write(tmp_path, private.private_bytes(PEM, PKCS8, OPEN))
        found, created = NodeKey.open(tmp_path)
        assert not created
        assert found.public_key == private.public_key().public_bytes(PEM, SPKI).decode()

    def test_deleting_the_key_file_gives_the_node_another_key(self, tmp_path: Path) -> None:
        first, _ = NodeKey.open(tmp_path)
        (tmp_path / FILE_NAME).unlink()
        second, created = NodeKey.open(tmp_path)
        assert created
        assert second.key_id != first.key_id

    @pytest.mark.parametrize(
        ("content", "message"),
        [
            (b"", "is empty"),
            (b"hello", "is not a private key in PEM format"),
            (b"\xff" * 100, "is not a private key in PEM format"),
            (b"A" * 20_000, "is not a private key in PEM format"),
            (b"-----BEGIN PRIVATE KEY-----\nAAAA\n-----END PRIVATE KEY-----\n", "is not a private key in PEM format"),
            (EphemeralKey().public_key.encode(), "is not a private key in PEM format"),
            (
                Ed25519PrivateKey.generate().private_bytes(PEM, PKCS8, serialization.BestAvailableEncryption(b"x")),
                "needs a passphrase",
            ),
            (ed448.Ed448PrivateKey.generate().private_bytes(PEM, PKCS8, OPEN), "another algorithm than Ed25519"),
            (x25519.X25519PrivateKey.generate().private_bytes(PEM, PKCS8, OPEN), "another algorithm than Ed25519"),
            (ec.generate_private_key(ec.SECP256R1()).private_bytes(PEM, PKCS8, OPEN), "another algorithm than Ed25519"),
        ],
        ids=["empty", "words", "bytes", "long", "damaged", "public", "passphrase", "ed448", "x25519", "p-256"],
    )
    def test_invalid_key_file_prevents_the_start_and_is_kept(
        self, tmp_path: Path, content: bytes, message: str
    ) -> None:
        write(tmp_path, content)
        with pytest.raises(InvalidConfiguration, match=message) as refused:
            NodeKey.open(tmp_path)
        assert str(tmp_path / FILE_NAME) in str(refused.value)
        assert "or remove it" in str(refused.value), "the message states the remedy"
        assert (tmp_path / FILE_NAME).read_bytes() == content

    @pytest.mark.parametrize("length", range(0, 119, 17))
    def test_truncated_key_file_is_refused(self, tmp_path: Path, length: int) -> None:
        whole = Ed25519PrivateKey.generate().private_bytes(PEM, PKCS8, OPEN)
        write(tmp_path, whole[:length])
        with pytest.raises(InvalidConfiguration):
            NodeKey.open(tmp_path)

    @pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o622, 0o644, 0o601])
    def test_key_file_accessible_by_others_is_refused(self, tmp_path: Path, mode: int) -> None:
        NodeKey.open(tmp_path)
        (tmp_path / FILE_NAME).chmod(mode)
        with pytest.raises(InvalidConfiguration, match=f"mode {mode:04o}.*chmod 600"):
            NodeKey.open(tmp_path)
        (tmp_path / FILE_NAME).chmod(0o600)
        assert not NodeKey.open(tmp_path)[1], "the remedy of the message works"

    def test_key_file_of_another_user_is_refused(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        NodeKey.open(tmp_path)
        monkeypatch.setattr(os, "geteuid", lambda: 4711)
        with pytest.raises(
            InvalidConfiguration, match=f"belongs to uid {os.getuid()}, and the service runs as uid 4711"
        ):
            NodeKey.open(tmp_path)

    @pytest.mark.parametrize("target", ["elsewhere.key", "nowhere"])
    def test_key_file_that_is_a_symlink_is_refused(self, tmp_path: Path, target: str) -> None:
        elsewhere, home = tmp_path / "elsewhere", tmp_path / "home"
        elsewhere.mkdir()
        home.mkdir()
        NodeKey.open(elsewhere)
        (elsewhere / FILE_NAME).rename(tmp_path / "elsewhere.key")
        (home / FILE_NAME).symlink_to(tmp_path / target)
        with pytest.raises(InvalidConfiguration, match="is a symbolic link"):
            NodeKey.open(home)
        assert not (tmp_path / "nowhere").exists()

    @pytest.mark.parametrize("make", [Path.mkdir, os.mkfifo], ids=["a directory", "a pipe without a writer"])
    def test_key_path_that_is_no_regular_file_is_refused_at_once(
        self, tmp_path: Path, make: Callable[[Path], None]
    ) -> None:
        make(tmp_path / FILE_NAME)
        with pytest.raises(InvalidConfiguration, match="is not a regular file"):
            NodeKey.open(tmp_path)

    @pytest.mark.parametrize("place", ["nowhere", "a-file"])
    def test_missing_or_invalid_state_directory_is_named(self, tmp_path: Path, place: str) -> None:
        (tmp_path / "a-file").write_text("")
        with pytest.raises(InvalidConfiguration, match=f"cannot be stored in .*{place}.*--state-dir"):
            NodeKey.open(tmp_path / place)

    def test_write_error_is_reported_and_leaves_no_key_file(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def full(_: int) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(os, "fsync", full)
        with pytest.raises(InvalidConfiguration, match=r"No space left on device.*no certificate can be signed"):
            NodeKey.open(tmp_path)
        assert os.listdir(tmp_path) == []

    def test_partial_key_of_a_killed_start_is_not_used(self, tmp_path: Path) -> None:
        (tmp_path / "signing.key.new").write_bytes(b"-----BEGIN PRIV")
        _, created = NodeKey.open(tmp_path)
        assert created
        assert os.listdir(tmp_path) == [FILE_NAME]

    def test_concurrent_starts_create_one_key(self, tmp_path: Path) -> None:
        together = threading.Barrier(8)
        opened: list[tuple[str, bool]] = []

        def start() -> None:
            together.wait()
            found, created = NodeKey.open(tmp_path)
            opened.append((found.key_id, created))

        starts = [threading.Thread(target=start) for _ in range(8)]
        for each in starts:
            each.start()
        for each in starts:
            each.join()
        assert len({name for name, _ in opened}) == 1
        assert sorted(created for _, created in opened) == [False] * 7 + [True]


def write(directory: Path, content: bytes) -> None:
    descriptor = os.open(directory / FILE_NAME, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)


KILLED_AT = """
import os, signal, sys
from pathlib import Path
from scrubber.adapters.signing import node_key

directory, line = Path(sys.argv[1]), int(sys.argv[2])
seen = 0

def trace(frame, event, argument):
    global seen
    if frame.f_code.co_filename != node_key.__file__:
        return None
    if event == "line":
        seen += 1
        if seen == line:
            os.kill(os.getpid(), signal.SIGKILL)
    return trace

sys.settrace(trace)
node_key.NodeKey.open(directory)
"""


def test_start_killed_at_any_line_leaves_no_key_or_a_complete_key(tmp_path: Path) -> None:
    left: set[tuple[str, ...]] = set()
    for line in range(1, 200):
        directory = tmp_path / str(line)
        directory.mkdir()
        ended = subprocess.run([sys.executable, "-c", KILLED_AT, str(directory), str(line)], check=False)
        left.add(tuple(sorted(os.listdir(directory))))
        exists = (directory / FILE_NAME).exists()
        _, created = NodeKey.open(directory)
        assert created is not exists
        assert os.listdir(directory) == [FILE_NAME]
        if ended.returncode == 0:
            break
        assert ended.returncode == -signal.SIGKILL
    else:
        pytest.fail("no start came through")
    assert left == {(), ("signing.key.new",), ("signing.key", "signing.key.new"), ("signing.key",)}


def test_only_the_two_signing_modules_import_cryptography() -> None:
    code = (
        "import sys, scrubber.adapters.signing.envelope, scrubber.domain.statement, scrubber.ports.record\n"
        "print('cryptography' in sys.modules)"
    )
    assert subprocess.check_output([sys.executable, "-c", code], text=True) == "False\n"
    assert node_key.FILE_NAME == "signing.key"


class TestEnvelope:
    KEY = EphemeralKey()
    SIGNATURE = KEY.sign(PAYLOAD)
    WRITTEN = write_envelope(PAYLOAD, KEY.key_id, SIGNATURE)

    def changed(self, **changes: Any) -> bytes:
        return json.dumps(json.loads(self.WRITTEN) | changes).encode()

    def judged(self, data: bytes) -> str:
        return verify_envelope(read_envelope(data), self.KEY.public_key).reason

    def test_envelope_has_exactly_the_fields_of_dsse(self) -> None:
        assert json.loads(self.WRITTEN) == {
            "payloadType": PAYLOAD_TYPE,
            "payload": base64.b64encode(PAYLOAD).decode(),
            "signatures": [{"keyid": self.KEY.key_id, "sig": base64.b64encode(self.SIGNATURE).decode()}],
        }
        assert self.WRITTEN.endswith("}\n")

    def test_written_envelope_verifies_and_keeps_its_payload(self) -> None:
        verdict = verify_envelope(read_envelope(self.WRITTEN.encode()), self.KEY.public_key)
        assert (verdict.certificate, verdict.reason, verdict.key_id) == (CERTIFICATE, "", self.KEY.key_id)

    def test_both_base64_alphabets_are_accepted(self) -> None:
        payload = base64.urlsafe_b64encode(PAYLOAD).decode()
        signatures = [{"sig": base64.urlsafe_b64encode(self.SIGNATURE).decode()}]
        assert self.judged(self.changed(payload=payload, signatures=signatures)) == ""

    @pytest.mark.parametrize("key_id", ["", None, "sha256:00", "\x1b[2J"])
    def test_key_id_of_a_signature_does_not_affect_verification(self, key_id: str | None) -> None:
        signature = base64.b64encode(self.SIGNATURE).decode()
        assert self.judged(self.changed(signatures=[{"keyid": key_id, "sig": signature}])) == ""

    def test_one_valid_signature_of_ours_is_enough(self) -> None:
        ours = json.loads(self.WRITTEN)["signatures"]
        theirs = [{"keyid": "them", "sig": base64.b64encode(EphemeralKey().sign(PAYLOAD)).decode()}]
        for signatures in (ours + theirs, theirs + ours, [{"sig": ""}, *ours]):
            assert self.judged(self.changed(signatures=signatures)) == ""

    def test_unknown_envelope_fields_are_ignored(self) -> None:
        assert self.judged(self.changed(more={"id": "c-8"})) == ""

    def test_changed_payload_does_not_verify(self) -> None:
        changed = base64.b64encode(PAYLOAD.replace(b"on-chip memory", b"nothing at all")).decode()
        assert "was changed" in self.judged(self.changed(payload=changed))

    def test_signature_of_another_certificate_does_not_verify(self) -> None:
        other = base64.b64encode(self.KEY.sign(PAYLOAD.replace(b"GPU-a0", b"GPU-a1"))).decode()
        assert "was changed" in self.judged(self.changed(signatures=[{"keyid": self.KEY.key_id, "sig": other}]))

    def test_signature_of_another_key_is_named(self) -> None:
        other = EphemeralKey()
        theirs = write_envelope(PAYLOAD, other.key_id, other.sign(PAYLOAD)).encode()
        assert other.key_id in self.judged(theirs)
        assert verify_envelope(read_envelope(theirs), self.KEY.public_key).certificate is None

    def test_signed_document_of_another_type_is_no_certificate(self) -> None:
        kind = "application/vnd.scrubber.other+json"
        private = Ed25519PrivateKey.generate()
        public = private.public_key().public_bytes(PEM, SPKI).decode()
        signature = base64.b64encode(private.sign(pae(PAYLOAD, kind))).decode()
        envelope = read_envelope(self.changed(payloadType=kind, signatures=[{"sig": signature}]))
        assert kind in verify_envelope(envelope, public).reason

    def test_unsigned_envelope_does_not_verify(self) -> None:
        assert self.judged(self.changed(signatures=[])) == "It has no signature."

    def test_signed_payload_that_is_no_statement_is_no_certificate(self) -> None:
        for payload in (b"", b"{}", PAYLOAD + b" "):
            signed = write_envelope(payload, self.KEY.key_id, self.KEY.sign(payload)).encode()
            assert self.judged(signed).startswith(
                "The signature of this key is valid, but the certificate cannot be read."
            )

    @pytest.mark.parametrize(
        ("data", "message"),
        [
            (b"", "not JSON"),
            (b"\xff\xfe{\x00}\x00", "not UTF-8"),
            (b"\xef\xbb\xbf{}", "not JSON"),
            (b"[]", "not a JSON object"),
            (b"null", "not a JSON object"),
            (b"{}", "no list of signatures"),
            (b"[" * 500_000, "nested too deeply"),
            (b'{"a":' * 100_000, "nested too deeply"),
            (b'{"signatures": NaN}', "NaN is not a JSON value"),
            (b'{"signatures": ' + b"7" * 5000 + b"}", "not JSON"),
            (b" " * (MAX_ENVELOPE_BYTES + 1), "longer than"),
            (WRITTEN.encode() + WRITTEN.encode(), "not JSON"),
            (WRITTEN.replace("{\n", '{"payload": "",\n', 1).encode(), "a key twice"),
            (WRITTEN.replace('"keyid"', '"sig": "", "keyid"').encode(), "a key twice"),
            (b'{"payloadType": 7, "payload": "", "signatures": []}', "payloadType is missing or not a string"),
            (b'{"payloadType": "", "signatures": []}', "payload is missing or not a string"),
            (b'{"payloadType": "", "payload": "", "signatures": {}}', "no list of signatures"),
            (b'{"payloadType": "", "payload": "", "signatures": [7]}', "not a JSON object"),
            (b'{"payloadType": "", "payload": "", "signatures": [{}]}', "sig is missing or not a string"),
            (b'{"payloadType": "", "payload": "", "signatures": [{"keyid": 7, "sig": ""}]}', "keyid in the envelope"),
            (b'{"payloadType": "", "payload": "A", "signatures": []}', "payload is not base64"),
            (b'{"payloadType": "", "payload": "AA", "signatures": []}', "payload is not base64"),
            (b'{"payloadType": "", "payload": "A A=", "signatures": []}', "payload is not base64"),
            (b'{"payloadType": "", "payload": "\\u00e9AA=", "signatures": []}', "payload is not base64"),
            (b'{"payloadType": "", "payload": "\\ud800AA=", "signatures": []}', "payload is not base64"),
            (b'{"payloadType": "", "payload": "", "signatures": [{"sig": "!"}]}', "sig is not base64"),
            (b'{"payloadType": "", "payload": "", "signatures": [' + b"{}," * 65 + b"{}]}", "the limit is 64"),
        ],
        ids=lambda value: value if isinstance(value, str) else "",
    )
    def test_ambiguous_envelope_is_refused(self, data: bytes, message: str) -> None:
        with pytest.raises(InvalidRequest, match=message):
            read_envelope(data)

    @given(st.binary(max_size=200) | st.text(max_size=200).map(str.encode))
    def test_arbitrary_bytes_never_raise_an_unexpected_error(self, data: bytes) -> None:
        with pytest.raises(InvalidRequest):
            read_envelope(data)
