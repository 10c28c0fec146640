"""``scrubber certificate``: list, show, and verify the node's signature, including hostile files."""

import asyncio
import base64
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import chdir
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from scrubber.adapters.signing.ed25519 import Ed25519Key, EphemeralKey
from scrubber.adapters.signing.envelope import write_envelope
from scrubber.api import scrubber_pb2 as pb
from scrubber.api.messages import certificate_message
from scrubber.api.status import status_from_error
from scrubber.cli.render import json_objects
from scrubber.cli.render.certificate import claim_json
from scrubber.domain.errors import InvalidRequest, LedgerFailure
from scrubber.domain.evidence import Attestation, Certificate
from scrubber.domain.evidence import PathKind as ScrubPath
from scrubber.domain.statement import UNSIGNED_FIELDS, statement
from tests import forkserver
from tests.cli.stage import Ended, Service, environment, run, serving
from tests.cli.terminal import WIDTHS, agrees_with, at_terminal
from tests.domain.test_statement import NAMES_IN_STATEMENTS

KEY = Ed25519Key(Ed25519PrivateKey.from_private_bytes(bytes(range(32))))
SLOW = Certificate(
    id="cert-0f3a9c51be22",
    node="n1",
    boot="b1",
    driver="sim-1",
    device="SIM-GPU-aa",
    sequence=7,
    previous_grant=3,
    path=ScrubPath.SLOW,
    scrub="scrub-9",
    covered=("memory: 268435456 of 268435456 bytes cleared and verified",),
    not_covered=("on-chip memory", "diagnostics: the policy asks for none at this occasion"),
    policy="default",
    policy_digest="d" * 64,
    issued_at=1.5,
    rests_on=None,
    attestation=Attestation("a7" * 32, "c3" * 32),
)
FAST = replace(
    SLOW,
    attestation=None,
    id="cert-77aa00112233",
    device="SIM-GPU-bb",
    path=ScrubPath.FAST,
    rests_on=SLOW.id,
    sequence=2,
    next_grant=5,
)


KEYS = {**NAMES_IN_STATEMENTS, "id": "metadata"}
"""What a field of a certificate is called in JSON, where that is another word."""


def signed(certificate: Certificate, status: str = "unused", key: Ed25519Key | None = KEY) -> pb.SignedCertificate:
    if key is not None:
        signature = base64.b64encode(key.sign(statement(certificate))).decode()
        certificate = replace(certificate, key_id=key.key_id, signature=signature)
    return pb.SignedCertificate(
        certificate=certificate_message(certificate), payload=statement(certificate), status=status
    )


def envelope(certificate: Certificate = SLOW, key: Ed25519Key = KEY) -> str:
    return write_envelope(statement(certificate), key.key_id, key.sign(statement(certificate)))


@dataclass
class Certifying(Service):
    """Two devices: one has an unused certificate, the other one's was consumed by the start of its newest pod."""

    certificates: list[pb.SignedCertificate] = field(default_factory=lambda: [signed(SLOW), signed(FAST, "consumed")])

    def __post_init__(self) -> None:
        self.info = pb.ServiceInfo(node_name="n1", key_id=KEY.key_id, public_key=KEY.public_key)
        first = pb.Device(id="SIM-GPU-aa", index="0", state="clean", certificate=certificate_message(SLOW))
        second = pb.Device(id="SIM-GPU-bb", index="1", state="in-use")
        second.open_grants.add(sequence=4, certificate_id="")
        second.open_grants.add(sequence=5, certificate_id=FAST.id)
        self.devices = [first, second, pb.Device(id="SIM-GPU-cc", index="2", state="dirty")]

    async def GetCertificate(self, request: Any, context: Any) -> pb.SignedCertificate:
        await self._answer(request, context)
        for each in self.certificates:
            if each.certificate.id == request.id:
                return each
        status = status_from_error(InvalidRequest(f"The ledger has no certificate {request.id!r}."), public=False)
        await context.abort(status.code, status.details, status.metadata)
        raise AssertionError("the call was aborted")


@pytest.fixture
async def service(short_tmp: Path) -> AsyncIterator[Certifying]:
    servicer = Certifying()
    async with serving(short_tmp, servicer):
        yield servicer


async def offline(*words: str, stdin: bytes = b"", cwd: Path | None = None) -> Ended:
    """Run the command without a service: its socket directory does not exist."""
    with chdir(cwd or Path.cwd()):
        process = await forkserver.start(
            *("scrubber.cli.main", "certificate", *words),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=environment(Path("/nonexistent")),
        )
    out, err = await process.communicate(stdin)
    assert b"Traceback" not in err
    assert process.returncode is not None
    return Ended(process.returncode, out.decode(), err.decode())


@pytest.fixture
def pem(tmp_path: Path) -> str:
    (tmp_path / "node.pem").write_text(KEY.public_key)
    return str(tmp_path / "node.pem")


class TestCertificateList:
    async def test_list_shows_unused_certificates_and_those_of_running_pods(
        self, service: Certifying, short_tmp: Path
    ) -> None:
        ended = await run(short_tmp, "certificate", "list", "-o", "wide")
        assert (ended.code, ended.err) == (0, "")
        header, first, second = (line.split() for line in ended.out.splitlines())
        assert header == ["INDEX", "DEVICE", "CERTIFICATE", "PATH", "ISSUED", "STATUS", "KEY"]
        assert first == ["0", "SIM-GPU-aa", SLOW.id, "slow", "1970-01-01T00:00:01Z", "unused", KEY.key_id[:19]]
        assert second[:4] == ["1", "SIM-GPU-bb", FAST.id, "fast"]
        assert second[5:8] == ["consumed,", "grant", "5"]

    async def test_list_is_printed_as_json_yaml_and_names(self, service: Certifying, short_tmp: Path) -> None:
        in_json = await run(short_tmp, "certificate", "list", "-o", "json")
        assert (in_json.json["apiVersion"], in_json.json["kind"]) == ("cli.scrubber.dev/v1", "CertificateList")
        assert [(each["metadata"]["name"], each["status"], each["signatureStatus"]) for each in in_json.items] == [
            (SLOW.id, "unused", None),
            (FAST.id, "consumed", None),
        ]
        in_yaml = await run(short_tmp, "certificate", "list", "-o", "yaml")
        assert yaml.safe_load(in_yaml.out) == in_json.json
        assert (await run(short_tmp, "certificate", "list", "-o", "name")).out == f"{SLOW.id}\n{FAST.id}\n"

    async def test_certificate_missing_from_the_ledger_is_named_and_the_rest_is_listed(
        self, service: Certifying, short_tmp: Path
    ) -> None:
        service.certificates = [signed(SLOW)]
        ended = await run(short_tmp, "certificate", "list", "-o", "name")
        assert ended.out == f"{SLOW.id}\n"
        # Only names are for scripts: other messages appear only beside a table.
        result = await run(short_tmp, "certificate", "list")
        assert f"Certificate {FAST.id} of device 1 is no longer in the ledger." in result.err

    async def test_empty_list_explains_how_to_get_a_certificate(self, service: Certifying, short_tmp: Path) -> None:
        service.devices = service.devices[2:]
        ended = await run(short_tmp, "certificate", "list")
        assert (ended.code, ended.out) == (0, "")
        assert "scrubber scrub DEVICE" in ended.err
        assert (await run(short_tmp, "certificate", "list", "-o", "json")).items == []


class TestCertificateShow:
    async def test_show_states_coverage_gaps_and_signer(self, service: Certifying, short_tmp: Path) -> None:
        ended = await run(short_tmp, "certificate", "show", SLOW.id)
        assert (ended.code, ended.err) == (0, "")
        shown = [line.split(maxsplit=1) for line in ended.out.splitlines()]
        assert ["device", "SIM-GPU-aa"] in shown
        assert ["covered", SLOW.covered[0]] in shown
        gaps = [rest.split(maxsplit=1) for word, rest in shown if word == "not"]
        assert gaps == [["covered", each] for each in SLOW.not_covered]
        assert ["status", "unused"] in shown
        assert ["key", KEY.key_id] in shown
        assert ["signature", "valid: signed with the node's current key"] in shown

    async def test_json_contains_the_signed_statement_and_the_signature_verdict(
        self, service: Certifying, short_tmp: Path
    ) -> None:
        document = (await run(short_tmp, "certificate", "show", FAST.id, "-o", "json")).json
        assert (document.pop("apiVersion"), document.pop("kind")) == ("cli.scrubber.dev/v1", "Certificate")
        assert document == {
            **claim_json(FAST),
            "nextGrant": 5,
            "keyID": KEY.key_id,
            "signature": base64.b64encode(KEY.sign(statement(FAST))).decode(),
            "status": "consumed",
            "signatureStatus": "valid",
        }

    async def test_show_accepts_a_device_in_place_of_its_certificate(
        self, service: Certifying, short_tmp: Path
    ) -> None:
        for device, id_ in (("0", SLOW.id), ("SIM-GPU-a…", SLOW.id), ("1", FAST.id)):
            ended = await run(short_tmp, "certificate", "show", "--device", device, "-o", "name")
            assert ended == Ended(0, f"{id_}\n", "")

    async def test_device_without_a_certificate_exits_with_one(self, service: Certifying, short_tmp: Path) -> None:
        ended = await run(short_tmp, "certificate", "show", "--device", "2")
        assert ended == Ended(1, "", "Error: Device 2 (SIM-GPU-cc) has no certificate; its state is dirty.\n")

    @pytest.mark.parametrize(
        ("words", "message"),
        [
            ((), "CERTIFICATE: is missing; pass the id of a certificate, or a device with --device."),
            (("c-1", "--device", "0"), "--device: cannot be combined with CERTIFICATE"),
            (("cert-none",), "The ledger has no certificate 'cert-none'."),
            (("--device", "7"), "No device matches '7'"),
            (("--device", "SIM"), "is the prefix of 3 device ids"),
        ],
    )
    async def test_contradictory_arguments_are_a_usage_error(
        self, service: Certifying, short_tmp: Path, words: tuple[str, ...], message: str
    ) -> None:
        for command in ("show", "export"):
            ended = await run(short_tmp, "certificate", command, *words)
            assert (ended.code, ended.out) == (2, "")
            assert message in ended.err

    async def test_certificate_not_signed_by_the_nodes_key_exits_with_one(
        self, service: Certifying, short_tmp: Path
    ) -> None:
        forged = signed(SLOW)
        forged.payload = statement(replace(SLOW, not_covered=()))
        service.certificates = [forged]
        ended = await run(short_tmp, "certificate", "show", SLOW.id)
        assert ended.code == 1
        assert "invalid: not signed with the node's key" in ended.out
        assert (await run(short_tmp, "certificate", "show", SLOW.id, "-o", "json")).json["signatureStatus"] == "invalid"

    @pytest.mark.parametrize(
        ("made", "verdict", "message"),
        [
            (
                lambda: signed(SLOW, key=EphemeralKey()),
                "wrong-key",
                "it names a different key than the node's current one",
            ),
            (lambda: signed(SLOW, key=None), "invalid", "not signed with the node's key"),
        ],
    )
    async def test_certificate_that_cannot_be_verified_exits_with_one(
        self,
        service: Certifying,
        short_tmp: Path,
        made: Callable[[], pb.SignedCertificate],
        verdict: str,
        message: str,
    ) -> None:
        service.certificates = [made()]
        ended = await run(short_tmp, "certificate", "show", SLOW.id)
        assert ended.code == 1, "what is unknown is not ok"
        assert message in ended.out
        in_json = await run(short_tmp, "certificate", "show", SLOW.id, "-o", "json")
        assert in_json.json["signatureStatus"] == verdict

    async def test_key_id_of_a_signature_does_not_affect_verification(
        self, service: Certifying, short_tmp: Path
    ) -> None:
        misnamed = signed(SLOW)
        misnamed.certificate.key_id = "sha256:00"
        service.certificates = [misnamed]
        in_json = await run(short_tmp, "certificate", "show", SLOW.id, "-o", "json")
        assert (in_json.code, in_json.json["signatureStatus"]) == (0, "valid")

    async def test_show_prints_the_signed_statement_not_the_unsigned_fields(
        self, service: Certifying, short_tmp: Path
    ) -> None:
        embellished = signed(SLOW)
        del embellished.certificate.not_covered[:]
        service.certificates = [embellished]
        ended = await run(short_tmp, "certificate", "show", SLOW.id)
        assert (ended.code, ended.out.count("not covered")) == (0, 2)
        in_json = await run(short_tmp, "certificate", "show", SLOW.id, "-o", "json")
        assert in_json.json["notCovered"] == list(SLOW.not_covered)

    async def test_void_certificate_is_shown_as_void(self, service: Certifying, short_tmp: Path) -> None:
        service.certificates = [signed(SLOW, "voided")]
        ended = await run(short_tmp, "certificate", "show", SLOW.id)
        assert ["status", "voided"] in [line.split() for line in ended.out.splitlines()]

    async def test_control_characters_in_a_certificate_are_escaped(self, service: Certifying, short_tmp: Path) -> None:
        hostile = replace(SLOW, covered=("\x1b[2J\x07memory", "\ud800", "a\nb"), node="\x1b]0;x\x07")
        service.certificates = [signed(hostile)]
        for words in (("list",), ("show", SLOW.id), ("show", SLOW.id, "-o", "yaml"), ("show", SLOW.id, "-o", "json")):
            ended = await run(short_tmp, "certificate", *words)
            assert ended.code == 0
            assert "\x1b" not in ended.out
            assert "\x07" not in ended.out

    @pytest.mark.parametrize("columns", WIDTHS)
    @pytest.mark.parametrize("words", [("list",), ("show", SLOW.id), ("show", FAST.id), ("key",)], ids=" ".join)
    async def test_certificate_output_fits_the_terminal(
        self, service: Certifying, short_tmp: Path, words: tuple[str, ...], columns: int
    ) -> None:
        result = await at_terminal(
            "certificate", *words, columns=columns, environment={"SCRUBBER_SOCKET_DIR": str(short_tmp)}
        )
        assert result.code == 0
        agrees_with(f"certificate-{'-'.join(words)}-{columns}", result.text)


async def _process(words: list[str], variables: dict[str, str]) -> tuple[int, str]:
    import asyncio

    process = await asyncio.create_subprocess_exec(*words, env=variables, stdout=asyncio.subprocess.PIPE)
    out, _ = await process.communicate()
    assert process.returncode is not None
    return process.returncode, out.decode()


class TestCertificateExport:
    async def test_export_is_one_envelope_that_verifies_with_the_key_alone(
        self, service: Certifying, short_tmp: Path, pem: str
    ) -> None:
        exported = await run(short_tmp, "certificate", "export", SLOW.id)
        assert (exported.code, exported.out, exported.err) == (0, envelope(), "")
        assert (await offline("verify", "-", "--key", pem, stdin=exported.out.encode())).code == 0

    async def test_export_accepts_a_device_in_place_of_its_certificate(
        self, service: Certifying, short_tmp: Path
    ) -> None:
        assert (await run(short_tmp, "certificate", "export", "--device", "1")).out == envelope(FAST)

    async def test_unsigned_certificate_is_not_exported(self, service: Certifying, short_tmp: Path) -> None:
        service.certificates = [signed(SLOW, key=None)]
        ended = await run(short_tmp, "certificate", "export", SLOW.id)
        assert (ended.code, ended.out) == (1, "")
        assert "Run `scrubber audit verify`" in ended.err


class TestCertificateKey:
    async def test_key_output_is_only_the_public_key(self, service: Certifying, short_tmp: Path) -> None:
        ended = await run(short_tmp, "certificate", "key")
        assert ended == Ended(0, KEY.public_key, f"The key of node n1 is {KEY.key_id}.\n")

    async def test_service_without_a_key_is_reported_as_not_signing(self, service: Certifying, short_tmp: Path) -> None:
        service.info = pb.ServiceInfo(node_name="n1")
        ended = await run(short_tmp, "certificate", "key")
        assert (ended.code, ended.out) == (1, "")
        assert "without a signing key" in ended.err


class TestCertificateVerify:
    async def test_valid_verdict_shows_the_certified_facts(self, pem: str) -> None:
        ended = await offline("verify", "-", "--key", pem, stdin=envelope().encode())
        assert (ended.code, ended.err) == (0, "")
        shown = [line.split(maxsplit=1) for line in ended.out.splitlines()]
        assert shown[:2] == [["verdict", "valid"], ["key", KEY.key_id]]
        assert ["device", "SIM-GPU-aa"] in shown
        assert ["node", "n1 (boot b1, driver sim-1)"] in shown
        assert ["issued", "1970-01-01T00:00:01Z"] in shown
        assert ["covered", SLOW.covered[0]] in shown
        gaps = [rest.split(maxsplit=1) for word, rest in shown if word == "not"]
        assert gaps == [["covered", each] for each in SLOW.not_covered]

    async def test_json_has_the_verdict_and_the_signed_statement(self, pem: str) -> None:
        document = (await offline("verify", "-", "--key", pem, "-o", "json", stdin=envelope().encode())).json
        assert document == {
            "apiVersion": "cli.scrubber.dev/v1",
            "kind": "CertificateVerdict",
            "valid": True,
            "reason": None,
            "keyID": KEY.key_id,
            "signatureKeyIDs": [KEY.key_id],
            "certificate": claim_json(SLOW),
        }

    async def test_certificate_is_read_from_a_file_even_if_named_dash(self, tmp_path: Path, pem: str) -> None:
        (tmp_path / "c.json").write_text(envelope())
        (tmp_path / "-").write_text(envelope())
        assert (await offline("verify", str(tmp_path / "c.json"), "--key", pem)).code == 0
        assert (await offline("verify", "./-", "--key", pem, cwd=tmp_path)).code == 0

    @pytest.mark.parametrize(
        ("written", "message"),
        [
            (envelope(key=EphemeralKey()), "It is signed by another key"),
            (json.dumps(json.loads(envelope()) | {"payloadType": "\x1b[2J"}), "not a certificate of this kind"),
            (json.dumps(json.loads(envelope()) | {"signatures": []}), "It has no signature."),
            (
                json.dumps(
                    json.loads(envelope())
                    | {"payload": base64.b64encode(statement(replace(SLOW, not_covered=()))).decode()}
                ),
                "the certificate or the signature was changed",
            ),
            (
                json.dumps(json.loads(envelope()) | {"signatures": [{"keyid": "\x1b[31m", "sig": "AAAA"}]}),
                "another key (",
            ),
        ],
        ids=["another key", "another kind", "unsigned", "changed", "hostile key id"],
    )
    async def test_invalid_certificate_exits_with_one_and_shows_none_of_its_content(
        self, pem: str, written: str, message: str
    ) -> None:
        ended = await offline("verify", "-", "--key", pem, stdin=written.encode())
        assert (ended.code, ended.err) == (1, "")
        assert ended.out.startswith("verdict  invalid\nreason   ")
        assert message in ended.out
        assert "SIM-GPU-aa" not in ended.out
        assert "\x1b" not in ended.out
        in_json = await offline("verify", "-", "--key", pem, "-o", "json", stdin=written.encode())
        assert (in_json.code, in_json.json["valid"], in_json.json["certificate"]) == (1, False, None)
        assert message in in_json.json["reason"]
        assert (await offline("verify", "-", "--key", pem, "-o", "name", stdin=written.encode())).out == ""

    @pytest.mark.parametrize(
        ("written", "message"),
        [
            (b"", "not a DSSE envelope: it is not JSON"),
            (b"\xff", "it is not UTF-8"),
            (b"[" * 500_000, "nested too deeply"),
            (b" " * (1024 * 1024 + 1), "Cannot read standard input: it is longer than 1048576 bytes"),
            (envelope().replace('"sig": "', '"sig": "!').encode(), "its sig is not base64"),
            (envelope().replace("{\n", '{"payload": "AA==",\n', 1).encode(), "a key twice"),
            (KEY.public_key.encode(), "not a DSSE envelope"),
        ],
        ids=["nothing", "bytes", "deep", "huge", "garbage base64", "a key twice", "a key's file"],
    )
    async def test_unreadable_input_exits_with_two(self, pem: str, written: bytes, message: str) -> None:
        ended = await offline("verify", "-", "--key", pem, stdin=written)
        assert (ended.code, ended.out) == (2, "")
        assert message in ended.err

    @pytest.mark.parametrize(("name", "message"), [("nowhere", "No such file"), (".", "Is a directory")])
    async def test_file_that_cannot_be_opened_is_named(self, tmp_path: Path, pem: str, name: str, message: str) -> None:
        for words in (("verify", name, "--key", pem), ("verify", "-", "--key", name)):
            ended = await offline(*words, stdin=envelope().encode(), cwd=tmp_path)
            assert (ended.code, ended.out) == (2, "")
            assert f"Cannot read {name}: {message}" in ended.err

    async def test_endless_input_is_read_only_up_to_the_size_limit(self, pem: str) -> None:
        ended = await offline("verify", "/dev/zero", "--key", pem)
        assert (ended.code, ended.out) == (2, "")
        assert "Cannot read /dev/zero: it is longer than 1048576 bytes" in ended.err
        assert (await offline("verify", "-", "--key", "/dev/zero", stdin=envelope().encode())).code == 2

    @pytest.mark.parametrize(
        ("content", "message"),
        [
            (b"hello", "not a public key in PEM format"),
            (b"\xff", "not a public key in PEM format"),
            (b"-----BEGIN PRIVATE KEY-----\n-----END PRIVATE KEY-----\n", "This is a private key"),
        ],
    )
    async def test_invalid_key_file_exits_with_two(self, tmp_path: Path, content: bytes, message: str) -> None:
        (tmp_path / "key").write_bytes(content)
        ended = await offline("verify", "-", "--key", str(tmp_path / "key"), stdin=envelope().encode())
        assert (ended.code, ended.out) == (2, "")
        assert message in ended.err

    async def test_verification_with_a_key_file_contacts_no_service(
        self, service: Certifying, short_tmp: Path, tmp_path: Path
    ) -> None:
        other = EphemeralKey()
        (tmp_path / "c.json").write_text(envelope(key=other))
        (tmp_path / "other.pem").write_text(other.public_key)
        ended = await run(
            short_tmp, "certificate", "verify", str(tmp_path / "c.json"), "--key", str(tmp_path / "other.pem")
        )
        assert (ended.code, ended.err, service.requests) == (0, "", [])

    async def test_verification_without_a_key_file_uses_the_services_key_and_states_so(
        self, service: Certifying, short_tmp: Path, tmp_path: Path
    ) -> None:
        (tmp_path / "c.json").write_text(envelope())
        ended = await run(short_tmp, "certificate", "verify", str(tmp_path / "c.json"))
        assert (ended.code, service.requests) == (0, [pb.GetServiceInfoRequest()])
        assert f"Using the key of the service on this node ({KEY.key_id}), because no --key was given." in ended.err
        (tmp_path / "c.json").write_text(envelope(key=EphemeralKey()))
        assert (await run(short_tmp, "certificate", "verify", str(tmp_path / "c.json"))).code == 1

    async def test_verification_without_a_key_and_a_service_gives_no_verdict(self) -> None:
        ended = await offline("verify", "-", stdin=envelope().encode())
        assert (ended.code, ended.out) == (1, "")
        assert "The scrub service is not reachable" in ended.err
        assert ended.err.endswith(" without the service, pass the public key of its node with --key.\n")

    @pytest.mark.parametrize("columns", WIDTHS)
    @pytest.mark.parametrize("good", [True, False], ids=["valid", "invalid"])
    async def test_verification_verdict_fits_the_terminal(
        self, tmp_path: Path, pem: str, columns: int, good: bool
    ) -> None:
        written = envelope() if good else json.dumps(json.loads(envelope()) | {"payload": "AAAA"})
        (tmp_path / "c.json").write_text(written)
        words = ("certificate", "verify", str(tmp_path / "c.json"), "--key", pem)
        result = await at_terminal(*words, columns=columns)
        assert result.code == (0 if good else 1)
        assert (b"\x1b[32mvalid" if good else b"\x1b[31minvalid") in result.raw
        agrees_with(f"certificate-verify-{'valid' if good else 'invalid'}-{columns}", result.text)


class TestCertificateErrors:
    @pytest.mark.parametrize("words", [("list",), ("show", "c"), ("export", "c"), ("key",)], ids=" ".join)
    async def test_unavailable_service_is_reported(self, words: tuple[str, ...]) -> None:
        ended = await offline(*words)
        assert (ended.code, ended.out) == (1, "")
        assert ended.err.startswith("Error: The scrub service is not reachable:")

    async def test_ledger_failure_is_one_error_message(self, service: Certifying, short_tmp: Path) -> None:
        service.error = LedgerFailure("The ledger is corrupt.")
        for words in (("list",), ("show", "c"), ("export", "c"), ("key",)):
            assert await run(short_tmp, "certificate", *words) == Ended(1, "", "Error: The ledger is corrupt.\n")

    def test_output_that_cannot_be_written_is_an_error(self, pem: str) -> None:
        full = os.open("/dev/full", os.O_WRONLY)
        try:
            ended = subprocess.run(
                [sys.executable, "-m", "scrubber.cli.main", "certificate", "verify", "-", "--key", pem],
                input=envelope().encode(),
                stdout=full,
                stderr=subprocess.PIPE,
                env=environment(Path("/nonexistent")),
                check=False,
            )
        finally:
            os.close(full)
        assert ended.returncode == 1
        assert ended.stderr == b"Error: Standard output could not be written: No space left on device.\n"

    def test_signed_statement_keys_are_keys_of_the_json_certificate(self) -> None:
        """The two formats must stay in sync: one describes what was signed, the other what the service sends."""
        message = json_objects.certificate(certificate_message(FAST))
        signed_fields = {each.name for each in fields(Certificate)} - UNSIGNED_FIELDS
        assert set(claim_json(FAST)) == {KEYS.get(each, each) for each in signed_fields}
        assert {name: message[name] for name in claim_json(FAST)} == claim_json(FAST)
