"""The signed statement of a certificate: equal certificates give equal bytes, others differ, the rest is refused."""

import base64
import json
import math
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scrubber.adapters.ledger.documents import CERTIFICATE
from scrubber.domain.errors import InvalidRequest
from scrubber.domain.evidence import Attestation, Certificate, PathKind
from scrubber.domain.statement import PAYLOAD_TYPE, UNSIGNED_FIELDS, pae, parse_statement, statement

PLAIN = Certificate(
    id="c-7",
    node="n1",
    boot="b1",
    driver="1.0",
    device="GPU-a",
    sequence=7,
    previous_grant=3,
    path=PathKind.SLOW,
    scrub="s-9",
    covered=("memory: 8 of 8 bytes cleared and verified",),
    not_covered=("on-chip memory",),
    policy="default",
    policy_digest="d",
    issued_at=1.5,
)
WRITTEN = (
    b'{"_type":"https://in-toto.io/Statement/v1","predicate":{"attestation":null,"baseCertificateID":null,"bootID":"b1",'
    b'"covered":["memory: 8 of 8 bytes cleared and verified"],"driverVersion":"1.0","id":"c-7",'
    b'"issuedAt":"1970-01-01T00:00:01.500000Z","nodeName":"n1","notCovered":["on-chip memory"],"path":"slow",'
    b'"policy":"default","policyDigest":"d","previousGrant":3,"scrubID":"s-9","sequence":7},'
    b'"predicateType":"https://scrubber.dev/certificate/v1","subject":[{"digest":{"sha256":'
    b'"0afda203ca4dce022783dbd2d3a4beed187cb32bbf1f5443f4f7aab536f11c8a"},"name":"GPU-a"}]}'
)
NAMES_IN_STATEMENTS = {
    "boot": "bootID",
    "device": "deviceID",
    "driver": "driverVersion",
    "issued_at": "issuedAt",
    "node": "nodeName",
    "not_covered": "notCovered",
    "policy_digest": "policyDigest",
    "previous_grant": "previousGrant",
    "rests_on": "baseCertificateID",
    "scrub": "scrubID",
}

words = st.text(max_size=8)
counts = st.integers(min_value=0, max_value=2**63)
certificates = st.builds(
    Certificate,
    id=words,
    node=words,
    boot=words,
    driver=words,
    device=words,
    sequence=counts,
    previous_grant=counts,
    path=st.sampled_from(PathKind),
    scrub=words,
    covered=st.lists(words, max_size=3).map(tuple),
    not_covered=st.lists(words, max_size=3).map(tuple),
    policy=words,
    policy_digest=words,
    issued_at=st.integers(0, 7_258_118_400_000_000).map(lambda microseconds: microseconds / 1e6),
    next_grant=st.none() | counts,
    rests_on=st.none() | words,
    attestation=st.none() | st.builds(Attestation, digest=words, nonce=words),
    key_id=st.none() | words,
    signature=st.none() | st.binary(max_size=8).map(lambda value: base64.b64encode(value).decode()),
)
SCHEMA = jsonschema.Draft202012Validator(
    json.loads((Path(__file__).parents[2] / "docs" / "certificate.schema.json").read_text())
)
SIGNED_FIELDS = sorted({each.name for each in fields(Certificate)} - UNSIGNED_FIELDS)


def test_statement_is_canonical_json_in_a_fixed_format() -> None:
    """Signatures of an earlier version must verify with this one: a change here requires a new predicate type."""
    assert statement(PLAIN) == WRITTEN


def test_every_certificate_field_is_signed_or_listed_as_unsigned() -> None:
    in_predicate = {NAMES_IN_STATEMENTS.get(each, each) for each in SIGNED_FIELDS} - {NAMES_IN_STATEMENTS["device"]}
    assert json.loads(WRITTEN)["predicate"].keys() == in_predicate
    assert sorted(UNSIGNED_FIELDS) == ["key_id", "next_grant", "signature"]


@given(certificates)
def test_statement_parses_to_the_certificate_without_signature_and_consumption(certificate: Certificate) -> None:
    bare = replace(certificate, next_grant=None, key_id=None, signature=None)
    assert parse_statement(statement(certificate)) == bare
    assert statement(certificate) == statement(bare)


@given(certificates)
def test_statement_is_what_the_published_schema_describes(certificate: Certificate) -> None:
    written = json.loads(statement(certificate))
    SCHEMA.validate(written)
    for part, names in ((written, list(written)), (written["predicate"], list(written["predicate"]))):
        for name in names:
            value = part.pop(name)
            assert not SCHEMA.is_valid(written), f"{name} is required"
            part[name] = value


@given(certificates)
def test_certificate_read_from_the_ledger_makes_the_same_statement(certificate: Certificate) -> None:
    assert statement(CERTIFICATE.decode(CERTIFICATE.encode(certificate))) == statement(certificate)


@given(certificates, certificates, st.sampled_from(SIGNED_FIELDS))
def test_changed_value_of_any_signed_field_changes_the_statement(
    one: Certificate, other: Certificate, name: str
) -> None:
    changed = replace(one, **{name: getattr(other, name)})
    assert (statement(changed) == statement(one)) == (repr(getattr(one, name)) == repr(getattr(other, name)))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("covered", ("a", "b")),
        ("covered", ("a,b",)),
        ("covered", ()),
        ("covered", ("",)),
        ("not_covered", ("on-chip memory", "on-chip memory")),
        ("rests_on", ""),
        ("rests_on", "null"),
        ("attestation", Attestation("", "")),
        ("issued_at", 1.500001),
        ("node", "n1\u0000"),
        ("node", "n\u0131"),
    ],
)
def test_similar_values_make_different_statements(name: str, value: Any) -> None:
    assert statement(replace(PLAIN, **{name: value})) != WRITTEN


def test_integer_and_float_times_make_the_same_statement() -> None:
    assert statement(replace(PLAIN, issued_at=2)) == statement(replace(PLAIN, issued_at=2.0))


@pytest.mark.parametrize("moment", [math.nan, math.inf, -math.inf, 1e12])
def test_time_outside_the_calendar_cannot_be_signed(moment: float) -> None:
    with pytest.raises(ValueError, match=r"Invalid isoformat|month must be"):
        statement(replace(PLAIN, issued_at=moment))


@pytest.mark.parametrize(
    ("payload", "message"),
    [
        (b"", "not a certificate's statement"),
        (b"\xff\xfe", "not a certificate's statement"),
        (b"[]", "not a JSON object"),
        (b"7", "not a JSON object"),
        (b"{}", "_type is missing"),
        (
            WRITTEN.replace(b"Statement/v1", b"Statement/v0.1"),
            "_type is 'https://in-toto.io/Statement/v0.1'; that of a",
        ),
        (
            WRITTEN.replace(b"certificate/v1", b"certificate/v2"),
            "predicateType is 'https://scrubber.dev/certificate/v2'",
        ),
        (WRITTEN.replace(b'"id":"c-7",', b""), "id is missing"),
        (b"[" * 100_000, "not a certificate's statement"),
        (WRITTEN + b"\n", "not in the canonical form"),
        (b" " + WRITTEN, "not in the canonical form"),
        (WRITTEN.replace(b"0afd", b"0afe"), "not in the canonical form"),
        (WRITTEN.replace(b'"name":"GPU-a"', b'"name":"GPU-b"'), "not in the canonical form"),
        (WRITTEN.replace(b'"name":"GPU-a"', b'"name":7'), "not a certificate's statement"),
        (WRITTEN.replace(b'"digest":{"sha256"', b'"digest":{"sha512":"","sha256"'), "not in the canonical form"),
        (WRITTEN[:-2] + b',{"digest":{},"name":"GPU-b"}]}', "not a certificate's statement"),
        (WRITTEN[: WRITTEN.index(b'"subject"')] + b'"subject":[]}', "not a certificate's statement"),
        (WRITTEN[: WRITTEN.index(b'"subject"')] + b'"subject":7}', "not a certificate's statement"),
        (WRITTEN.replace(b'"id":"c-7"', b'"id":"c-8","id":"c-7"'), "not in the canonical form"),
        (WRITTEN.replace(b'"nodeName":"n1"', b'"more":1,"nodeName":"n1"'), "not in the canonical form"),
        (WRITTEN.replace(b'"sequence":7', b'"sequence":7.0'), "not a certificate's statement"),
        (WRITTEN.replace(b'"sequence":7', b'"sequence":true'), "not a certificate's statement"),
        (WRITTEN.replace(b'"sequence":7', b'"sequence":' + b"7" * 5000), "not a certificate's statement"),
        (WRITTEN.replace(b"01.500000Z", b"01.5Z"), "not in the canonical form"),
        (WRITTEN.replace(b"01.500000Z", b"01.500000+00:00"), "not in the canonical form"),
        (WRITTEN.replace(b"1970-01-01", b"1970-02-30"), "not a certificate's statement"),
        (WRITTEN.replace(b'"1970-01-01T00:00:01.500000Z"', b"1.5"), "not a certificate's statement"),
        (WRITTEN.replace(b'"path":"slow"', b'"path":"scenic"'), "not a certificate's statement"),
        (WRITTEN.replace(b'"path":"slow"', b'"path":[]'), "not a certificate's statement"),
        (WRITTEN.replace(b'"covered":["', b'"covered":[7,"'), "not a certificate's statement"),
        (WRITTEN.replace(b'["on-chip memory"]', b'"on-chip memory"'), "not in the canonical form"),
        (WRITTEN.replace(b'["on-chip memory"]', b"null"), "not a certificate's statement"),
        (WRITTEN.replace(b'"baseCertificateID":null', b'"baseCertificateID":0'), "not a certificate's statement"),
        (WRITTEN.replace(b'"attestation":null', b'"attestation":[]'), "not a certificate's statement"),
        (WRITTEN.replace(b'"attestation":null', b'"attestation":{"digest":"d"}'), "nonce is missing"),
        (WRITTEN.replace(b"slow", b"sl\\u006fw"), "not in the canonical form"),
    ],
)
def test_malformed_statement_is_refused(payload: bytes, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        parse_statement(payload)


@given(st.binary(max_size=300))
def test_arbitrary_bytes_are_refused_as_a_statement_without_another_error(payload: bytes) -> None:
    with pytest.raises(InvalidRequest):
        parse_statement(payload)


def test_pre_authentication_encoding_is_that_of_dsse() -> None:
    """The example from the DSSE protocol, version 1.0.0."""
    encoded = pae(b"hello world", "http://example.com/HelloWorld")
    assert encoded == b"DSSEv1 29 http://example.com/HelloWorld 11 hello world"


def test_pre_authentication_encoding_counts_bytes() -> None:
    assert pae("\N{EURO SIGN}".encode(), "\N{EURO SIGN}") == b"DSSEv1 3 \xe2\x82\xac 3 \xe2\x82\xac"
    assert pae(b"") == b"DSSEv1 %d %s 0 " % (len(PAYLOAD_TYPE), PAYLOAD_TYPE.encode())
