"""Certificates of a real service: signed with the node's key, and verified by programs that have only that key.

Verifiers check the same files and must agree: the command, the script in ``docs`` that uses no code of this project, the
service itself, and the libraries of the DSSE and in-toto projects.
"""

from __future__ import annotations

import base64
import json
import math
import re
import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import load_pem_public_key
from google.protobuf import json_format
from in_toto_attestation.v1.statement import Statement
from in_toto_attestation.v1.statement_pb2 import Statement as StatementMessage
from securesystemslib.dsse import Envelope
from securesystemslib.exceptions import VerificationError
from securesystemslib.signer import SSlibKey  # type: ignore[attr-defined]

from scrubber.adapters.signing.ed25519 import Ed25519Key, EphemeralKey, key_id
from scrubber.adapters.signing.envelope import MAX_ENVELOPE_BYTES, write_envelope
from scrubber.adapters.signing.node_key import FILE_NAME
from scrubber.cli.commands.certificate import app
from scrubber.cli.render.certificate import claim_json
from scrubber.domain.statement import PAYLOAD_TYPE, PREDICATE_TYPE, STATEMENT_TYPE, pae, statement
from scrubber.emulator.playground import Playground
from tests.api.service import CERTIFICATE
from tests.cli.test_certificate import offline
from tests.integration.acting import SOON, history, running, staged, writer

SCRIPT = Path(__file__).parents[2] / "docs" / "verify_certificate.py"
PRIVATE = Ed25519PrivateKey.generate()
KEY = Ed25519Key(PRIVATE)
PAYLOAD = statement(CERTIFICATE)
GOOD = write_envelope(PAYLOAD, KEY.key_id, KEY.sign(PAYLOAD))


def changed(**changes: Any) -> bytes:
    return json.dumps(json.loads(GOOD) | changes).encode()


def signed(payload: bytes) -> bytes:
    return write_envelope(payload, KEY.key_id, KEY.sign(payload)).encode()


OTHER_STATEMENTS = (
    PAYLOAD.replace(b"scrubber.dev/certificate/v1", b"slsa.dev/provenance/v1"),
    PAYLOAD.replace(b"scrubber.dev/certificate/v1", b"scrubber.dev/certificate/v2"),
    PAYLOAD.replace(b"Statement/v1", b"Statement/v0.1"),
    PAYLOAD.replace(b'"_type"', b'"_types"'),
    b"[]",
)
"""What the node's key could sign besides certificates, in envelopes of the same type."""


def by_script(envelope: Path, key: Path) -> tuple[int, str]:
    """Run the script; return its exit code and output. Isolated mode excludes accidental imports of this project."""
    words = [sys.executable, "-I", str(SCRIPT), str(envelope), str(key)]
    ended = subprocess.run(words, capture_output=True, text=True, check=False, cwd="/")
    assert "Traceback" not in ended.stderr
    return ended.returncode, ended.stdout


def by_in_toto(envelope: bytes, public_pem: str) -> dict[str, Any] | None:
    """Return the statement in ``envelope`` as the libraries of DSSE and in-toto read it; None if they do not accept it.

    Unlike DSSE itself, that library requires the key's id in the envelope.
    """
    key = SSlibKey.from_crypto(load_pem_public_key(public_pem.encode()), keyid=key_id(public_pem))
    try:
        opened = Envelope.from_dict(json.loads(envelope))
        opened.verify([key], threshold=1)
    except (ValueError, KeyError, VerificationError):
        return None
    assert opened.payload_type == PAYLOAD_TYPE
    found = Statement.copy_from_pb(json_format.Parse(opened.payload, StatementMessage()))
    found.validate()
    return json_format.MessageToDict(found.pb)


def as_shown(certified: dict[str, Any]) -> dict[str, Any]:
    """What the command shows of a payload."""
    shown = {name: value for name, value in certified["predicate"].items() if name != "id"}
    return shown | {"metadata": {"name": certified["predicate"]["id"]}, "deviceID": certified["subject"][0]["name"]}


async def by_command(envelope: Path, key: Path) -> int:
    return (await offline("verify", str(envelope), "--key", str(key))).code


class TestVerificationScript:
    def test_verification_script_is_short_and_imports_nothing_of_this_project(self) -> None:
        source = SCRIPT.read_text()
        assert len(source.splitlines()) < 60
        imported = {
            line.split()[1].partition(".")[0] for line in source.splitlines() if line.startswith(("import", "from"))
        }
        assert imported == {"base64", "json", "sys", "cryptography"}

    def test_verification_script_prints_the_certificate(self, tmp_path: Path) -> None:
        (tmp_path / "c.json").write_text(GOOD)
        (tmp_path / "key.pem").write_text(KEY.public_key)
        code, out = by_script(tmp_path / "c.json", tmp_path / "key.pem")
        assert code == 0
        certified = json.loads(out)
        assert certified == by_in_toto(GOOD.encode(), KEY.public_key)
        assert as_shown(certified) == claim_json(CERTIFICATE)

    def test_verification_script_without_two_files_prints_its_usage(self) -> None:
        ended = subprocess.run([sys.executable, str(SCRIPT)], capture_output=True, text=True, check=False)
        assert (ended.returncode, ended.stdout) == (2, "")
        assert "ENVELOPE.json KEY.pem" in ended.stderr

    @pytest.mark.parametrize(
        ("envelope", "verdict"),
        [
            (GOOD.encode(), 0),
            (changed(signatures=[{"sig": base64.urlsafe_b64encode(KEY.sign(PAYLOAD)).decode()}]), 0),
            (changed(signatures=[{"sig": "AAAA"}, *json.loads(GOOD)["signatures"]], more=1), 0),
            (changed(payload=base64.b64encode(PAYLOAD + b" ").decode()), 1),
            (changed(payload=""), 1),
            (changed(payloadType="application/json"), 1),
            (
                changed(
                    payloadType="x", signatures=[{"sig": base64.b64encode(PRIVATE.sign(pae(PAYLOAD, "x"))).decode()}]
                ),
                1,
            ),
            (changed(signatures=[]), 1),
            (changed(signatures=[{"keyid": KEY.key_id, "sig": ""}]), 1),
            (write_envelope(PAYLOAD, KEY.key_id, EphemeralKey().sign(PAYLOAD)).encode(), 1),
            *((signed(replaced), 1) for replaced in OTHER_STATEMENTS),
            (write_envelope(b"[", KEY.key_id, KEY.sign(b"[")).encode(), 1),
            (b"", 2),
            (b"\xff\xfe", 2),
            (b"[]", 2),
            (b"null", 2),
            (b"7" * 5000, 2),
            (b"[" * 200_000, 2),
            (b" " * MAX_ENVELOPE_BYTES + GOOD.encode(), 2),
            *((changed(more=number), 2) for number in (math.nan, math.inf, -math.inf)),
            (signed(PAYLOAD.replace(b"{", b'{"more":NaN,', 1)), 1),
            (changed(payload="!"), 2),
            (changed(payload=7), 2),
            (changed(signatures=[7]), 2),
            (changed(signatures=[{}]), 2),
            (changed(signatures=7), 2),
            (changed(signatures=[{"sig": "A"}]), 2),
            (GOOD.replace("{\n", '{"payload": "AA==",\n', 1).encode(), 2),
        ],
        ids=lambda value: "" if isinstance(value, bytes) else str(value),
    )
    async def test_verification_script_and_command_agree(self, tmp_path: Path, envelope: bytes, verdict: int) -> None:
        (tmp_path / "c.json").write_bytes(envelope)
        (tmp_path / "key.pem").write_text(KEY.public_key)
        assert by_script(tmp_path / "c.json", tmp_path / "key.pem")[0] == verdict
        assert await by_command(tmp_path / "c.json", tmp_path / "key.pem") == verdict

    @pytest.mark.parametrize("key", [b"", b"hello", GOOD.encode()], ids=["empty", "words", "an envelope"])
    async def test_invalid_key_gives_no_verdict_from_script_or_command(self, tmp_path: Path, key: bytes) -> None:
        (tmp_path / "c.json").write_text(GOOD)
        (tmp_path / "key.pem").write_bytes(key)
        assert by_script(tmp_path / "c.json", tmp_path / "key.pem")[0] == 2
        assert await by_command(tmp_path / "c.json", tmp_path / "key.pem") == 2


@pytest.mark.parametrize(
    ("envelope", "accepted"),
    [
        (GOOD.encode(), True),
        (changed(payload=base64.urlsafe_b64encode(PAYLOAD).decode()), True),
        (changed(payload=base64.b64encode(PAYLOAD + b" ").decode()), False),
        (changed(payloadType="application/json"), False),
        (changed(signatures=[]), False),
        (changed(signatures=[{"keyid": KEY.key_id, "sig": ""}]), False),
        (
            changed(signatures=[{"keyid": EphemeralKey().key_id, "sig": json.loads(GOOD)["signatures"][0]["sig"]}]),
            False,
        ),
        (write_envelope(PAYLOAD, KEY.key_id, EphemeralKey().sign(PAYLOAD)).encode(), False),
    ],
)
def test_libraries_of_in_toto_accept_exactly_what_the_node_signed(envelope: bytes, accepted: bool) -> None:
    assert by_in_toto(envelope, KEY.public_key) == (json.loads(PAYLOAD) if accepted else None)


class TestCertificatePage:
    PAGE = (SCRIPT.parent / "certificates.md").read_text()

    def test_certificate_page_documents_every_key_of_the_payload(self) -> None:
        _, _, payload = self.PAGE.partition("## The payload")
        rows = re.findall(r"^\| (`.*?) \|", payload.partition("\n## ")[0], re.MULTILINE)
        assert sorted(re.findall(r"`(\w+)`", " ".join(rows))) == sorted(
            [*json.loads(PAYLOAD), *json.loads(PAYLOAD)["predicate"]]
        )

    def test_lines_of_the_page_verify_a_certificate_with_the_libraries_of_in_toto(self, tmp_path: Path) -> None:
        (lines,) = re.findall(r"^```python\n(import json\n.*?)^```$", self.PAGE, re.MULTILINE | re.DOTALL)
        (tmp_path / "certificate.json").write_text(GOOD)
        for key, code in ((KEY, 0), (EphemeralKey(), 1)):
            (tmp_path / "node.pem").write_text(key.public_key)
            ended = subprocess.run(
                [sys.executable, "-I", "-W", "ignore", "-c", lines],
                cwd=tmp_path,
                capture_output=True,
                text=True,
                check=False,
            )
            assert ended.returncode == code, ended.stderr
            assert (CERTIFICATE.device in ended.stdout, "VerificationError" in ended.stderr) == (not code, bool(code))

    def test_certificate_page_names_existing_commands_only(self) -> None:
        typed = set(re.findall(r"scrubber certificate (\w+)", self.PAGE))
        assert typed == set(typer.main.get_group(app).commands)
        assert all(f"`{each}`" in self.PAGE for each in (PAYLOAD_TYPE, STATEMENT_TYPE, PREDICATE_TYPE))
        assert f"`{FILE_NAME}`" in self.PAGE


async def command_json(stage: Playground, *words: str) -> Any:
    ended = await stage.run_command("certificate", *words, "-o", "json")
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout)


async def exported(stage: Playground, id_: str) -> Path:
    """Export the envelope of the certificate to a file."""
    ended = await stage.run_command("certificate", "export", id_)
    assert (ended.returncode, ended.stderr) == (0, "")
    (stage.directory / f"{id_}.json").write_text(ended.stdout)
    return stage.directory / f"{id_}.json"


async def key_of(stage: Playground) -> Path:
    """Export the node's public key to a file."""
    ended = await stage.run_command("certificate", "key")
    assert ended.returncode == 0
    key_id = (await stage.read_client.service_info()).key_id
    assert key_id in ended.stderr
    path = stage.directory / f"{key_id[7:]}.pem"
    path.write_text(ended.stdout)
    return path


async def test_every_certificate_of_a_node_can_be_verified_elsewhere() -> None:
    async with staged(devices=2) as stage:
        key, wrong = await key_of(stage), stage.directory / "wrong.pem"
        wrong.write_text(EphemeralKey().public_key)
        items = (await command_json(stage, "list"))["items"]
        assert len(items) == 2
        for item in items:
            file = await exported(stage, item["metadata"]["name"])
            code, out = by_script(file, key)
            assert code == 0
            certified = json.loads(out)
            assert certified == by_in_toto(file.read_bytes(), key.read_text())
            assert by_in_toto(file.read_bytes(), wrong.read_text()) is None
            shown = as_shown(certified)
            assert {name: item[name] for name in shown} == shown
            assert certified["predicate"]["covered"], "what was measured is in there"
            assert await by_command(file, key) == 0
            assert (by_script(file, wrong)[0], await by_command(file, wrong)) == (1, 1)
            ended = await stage.run_command("certificate", "verify", str(file))
            assert ended.returncode == 0
            assert "Using the key of the service on this node" in ended.stderr


async def test_grant_consumes_a_certificate_and_its_signature_stays_valid() -> None:
    async with staged(devices=1) as stage:
        (before,) = (await command_json(stage, "list"))["items"]
        first = (await exported(stage, before["metadata"]["name"])).read_bytes()
        await running(stage, writer("a", "team-a"))
        (device,) = (await stage.read_client.devices()).devices
        (tenancy,) = device.open_grants
        for id_ in {before["metadata"]["name"], tenancy.certificate_id}:
            after = await command_json(stage, "show", id_)
            assert (after["status"], after["nextGrant"]) == ("consumed", tenancy.sequence)
            assert after["signatureStatus"] == "valid"
        assert (await command_json(stage, "show", "--device", "0"))["metadata"]["name"] == tenancy.certificate_id
        assert (await exported(stage, before["metadata"]["name"])).read_bytes() == first


async def test_signing_key_and_certificates_survive_a_service_restart() -> None:
    async with staged(devices=1) as stage:
        key, created = await key_of(stage), await history(stage, "key.created")
        (item,) = (await command_json(stage, "list"))["items"]
        assert [each["key_id"] for each in created] == [item["keyID"]]
        file = await exported(stage, item["metadata"]["name"])
        await stage.service.kill()
        await stage.service.start()
        await stage.wait_until_clean(SOON)
        assert (await key_of(stage)).read_text() == key.read_text()
        assert await history(stage, "key.created") == created
        shown = await command_json(stage, "show", item["metadata"]["name"])
        assert (shown["status"], shown["signatureStatus"]) == ("voided", "valid")
        assert by_script(file, key)[0] == 0


async def test_deleted_signing_key_is_replaced_and_the_new_key_is_reported() -> None:
    async with staged(devices=1) as stage:
        old_key = await key_of(stage)
        (old,) = (await command_json(stage, "list"))["items"]
        old_file = await exported(stage, old["metadata"]["name"])
        await stage.service.stop()
        (stage.directory / "state" / FILE_NAME).unlink()
        await stage.service.start()
        await stage.wait_until_clean(SOON)
        new_key = await key_of(stage)
        assert new_key != old_key
        assert len(await history(stage, "key.created")) == 2
        (new,) = (await command_json(stage, "list"))["items"]
        new_file = await exported(stage, new["metadata"]["name"])
        verdicts = [[by_script(file, key)[0] for file in (old_file, new_file)] for key in (old_key, new_key)]
        assert verdicts == [[0, 1], [1, 0]], "each key vouches for its own time"
        shown = await stage.run_command("certificate", "show", old["metadata"]["name"], "-o", "json")
        assert (shown.returncode, json.loads(shown.stdout)["signatureStatus"]) == (1, "wrong-key")


async def test_certificate_changed_in_the_ledger_has_an_invalid_signature() -> None:
    async with staged(devices=1) as stage:
        (item,) = (await command_json(stage, "list"))["items"]
        key = await key_of(stage)
        await stage.service.stop()
        with sqlite3.connect(stage.directory / "state" / "ledger.db") as ledger:
            (document,) = ledger.execute(
                "SELECT document FROM certificates WHERE id = ?", (item["metadata"]["name"],)
            ).fetchone()
            assert '"not_covered":["' in document
            forged = re.sub(r'"not_covered":\[[^]]*\]', '"not_covered":[]', document)
            ledger.execute("UPDATE certificates SET document = ? WHERE id = ?", (forged, item["metadata"]["name"]))
        ledger.close()
        await stage.service.start()
        await stage.wait_until_clean(SOON)
        shown = await stage.run_command("certificate", "show", item["metadata"]["name"], "-o", "json")
        assert (shown.returncode, json.loads(shown.stdout)["signatureStatus"]) == (1, "invalid")
        file = await exported(stage, item["metadata"]["name"])
        assert (by_script(file, key)[0], await by_command(file, key)) == (1, 1)


async def test_signing_key_readable_by_others_stops_the_service_until_its_mode_is_fixed() -> None:
    async with staged(devices=1) as stage:
        key = await key_of(stage)
        await stage.service.stop()
        file = stage.directory / "state" / FILE_NAME
        file.chmod(0o644)
        await stage.service.start()
        assert stage.service.process is not None
        assert await stage.service.process.wait() == 2
        assert f"chmod 600 {file}" in stage.service.log.read_text().splitlines()[-1]
        file.chmod(0o600)
        await stage.service.start()
        await stage.wait_until_clean(SOON)
        assert (await key_of(stage)).read_text() == key.read_text()
