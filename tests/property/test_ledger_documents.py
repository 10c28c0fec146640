"""Everything that the ledger stores reads back equal, and everything else is refused."""

import json
import types
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass
from enum import StrEnum
from typing import Any, Union, get_args, get_origin, get_type_hints

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scrubber.adapters.ledger.documents import CERTIFICATE, GRANT, RECORD, SCRUB, decode_fields, encode_fields
from scrubber.adapters.ledger.json_codec import INTEGER, TEXT, CodecError, Document, dataclass_codec
from scrubber.domain.assignment import Pod
from scrubber.domain.baseline import Baseline
from scrubber.domain.evidence import Certificate, PathKind, ScrubRecord
from scrubber.domain.health.history import PastQuarantine, RecoveryAttempt
from scrubber.domain.record import ActiveWarning, BreakGlass, DeviceRecord, Grant

DOCUMENTS: list[tuple[Document[Any], type]] = [
    (RECORD, DeviceRecord),
    (GRANT, Grant),
    (CERTIFICATE, Certificate),
    (SCRUB, ScrubRecord),
]
UNSIGNED = Certificate(
    *("cert-1", "node-1", "boot-1", "driver-1", "GPU-1", 1, 0, PathKind.SLOW, "scrub-1", ("holders: none",)),
    ("on-chip: the device has none",),
    *("default", "sha256:1", 9.5),
)
finite = st.floats(allow_nan=False, allow_infinity=False)
anything_json = st.recursive(
    st.none() | st.booleans() | st.integers() | finite | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=5), inner, max_size=2),
    max_leaves=4,
)


def values_of(hint: Any) -> st.SearchStrategy[Any]:
    """Return any value that the annotation ``hint`` permits, as far as the domain uses annotations."""
    if is_dataclass(hint) and isinstance(hint, type):
        hints = get_type_hints(hint)
        return st.builds(hint, **{each.name: values_of(hints[each.name]) for each in fields(hint)})
    origin, inner = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return st.one_of([values_of(each) for each in inner])
    if origin is tuple and inner[-1] is not Ellipsis:
        return st.tuples(*(values_of(each) for each in inner))
    if origin is tuple:
        return st.lists(values_of(inner[0]), max_size=2).map(tuple)
    if origin is frozenset:
        return st.frozensets(values_of(inner[0]), max_size=3)
    if origin is not None and issubclass(origin, Mapping):
        return st.dictionaries(values_of(inner[0]), values_of(inner[1]), max_size=3)
    if isinstance(hint, type) and issubclass(hint, StrEnum):
        return st.sampled_from(hint)
    plain = {str: st.text(max_size=6), int: st.integers(), float: finite, bool: st.booleans(), type(None): st.none()}
    return plain[hint]


@pytest.mark.parametrize(("document", "made"), DOCUMENTS)
@given(data=st.data())
def test_stored_document_decodes_to_an_equal_value_and_is_refused_with_an_unknown_or_missing_field(
    document: Document[Any], made: type, data: st.DataObject
) -> None:
    value = data.draw(values_of(made))
    text = document.encode(value)
    assert document.decode(text) == value
    assert document.encode(document.decode(text)) == text
    stored = json.loads(text)
    with pytest.raises(CodecError, match="unknown field surprise"):
        document.decode(json.dumps(stored | {"surprise": 1}))
    gone = data.draw(st.sampled_from(sorted(stored)))
    with pytest.raises(CodecError):
        document.decode(json.dumps({name: value for name, value in stored.items() if name != gone}))


@pytest.mark.parametrize(("document", "made"), DOCUMENTS)
@given(data=st.data())
def test_changed_field_of_a_document_is_refused_or_a_valid_value(
    document: Document[Any], made: type, data: st.DataObject
) -> None:
    stored = json.loads(document.encode(data.draw(values_of(made))))
    name = data.draw(st.sampled_from(sorted(stored)))
    changed = stored | {name: data.draw(anything_json)}
    try:
        value = document.decode(json.dumps(changed))
    except CodecError:
        return
    assert json.loads(document.encode(value)) == changed


@pytest.mark.parametrize("document", [document for document, _ in DOCUMENTS])
@given(text=st.text(max_size=20) | anything_json.map(json.dumps))
def test_text_that_is_no_document_is_refused(document: Document[Any], text: str) -> None:
    with pytest.raises(CodecError):
        document.decode(text)


def test_baseline_decodes_with_its_facts_in_order() -> None:
    baseline = Baseline(
        (("model", "One"), ("vbios", "96.00.89")), (("pcie-width", "x8 of x16"),), 9.5, "uid:1000", "new VBIOS"
    )
    record = DeviceRecord("GPU-1", baseline=baseline)
    assert RECORD.decode(RECORD.encode(record)) == record
    assert json.loads(RECORD.encode(record))["baseline"]["facts"] == [["model", "One"], ["vbios", "96.00.89"]]


@pytest.mark.parametrize(
    "change",
    [
        {"facts": [["vbios"]]},
        {"facts": [["vbios", "1", "2"]]},
        {"facts": [["vbios", 1]]},
        {"facts": [["vbios", None]]},
        {"facts": {"vbios": "1"}},
        {"conditions": [[1, "x8"]]},
        {"actor": None},
        {"reason": 7},
        {"at": "now"},
    ],
    ids=str,
)
def test_document_with_a_damaged_baseline_is_refused(change: dict[str, object]) -> None:
    stored = json.loads(RECORD.encode(DeviceRecord("GPU-1", baseline=Baseline((("model", "One"),)))))
    with pytest.raises(CodecError, match="baseline"):
        RECORD.decode(json.dumps(stored | {"baseline": stored["baseline"] | change}))


def test_history_warnings_and_break_glass_override_decode_in_order() -> None:
    record = DeviceRecord(
        "GPU-1",
        warnings=(ActiveWarning("too-hot", 2.5), ActiveWarning("nvlink-down", 3.0)),
        recent_quarantines=(PastQuarantine(1.0, "xid-95", "team-a"), PastQuarantine(2.0, "too-hot")),
        recovery_attempts=(RecoveryAttempt(1.5, reset=True), RecoveryAttempt(2.5, reset=False)),
        break_glass=BreakGlass(9.0, "the trial must not stop", "uid:1000"),
    )
    assert RECORD.decode(RECORD.encode(record)) == record


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("warnings", [{"code": "too-hot"}]),
        ("recent_quarantines", [{"at": 1.0, "code": "xid-95"}]),
        ("recovery_attempts", [{"at": 1.0, "reset": 1, "operator_ordered": False}]),
        ("recovery_attempts", [{"at": 1.0, "reset": True}]),
        ("break_glass", {"until": "for ever", "reason": "", "actor": "uid:0"}),
        ("break_glass", {"until": 1.0, "reason": ""}),
        ("break_glass", {"until": 1.0, "reason": "", "actor": None}),
    ],
)
def test_document_with_a_damaged_history_is_refused(name: str, value: object) -> None:
    stored = json.loads(RECORD.encode(DeviceRecord("GPU-1")))
    with pytest.raises(CodecError, match=name):
        RECORD.decode(json.dumps(stored | {name: value}))


@pytest.mark.parametrize("format", [0, 2, True, 1.5, "1", None])
def test_a_document_of_another_format_is_refused(format: object) -> None:
    stored = json.loads(RECORD.encode(DeviceRecord("GPU-1")))
    with pytest.raises(CodecError, match=f"in format {format!r}; this program reads format 1"):
        RECORD.decode(json.dumps(stored | {"format": format}))


def test_decoding_error_names_the_field() -> None:
    broken = RECORD.encode(DeviceRecord("GPU-1")).replace('"hygiene":"dirty"', '"hygiene":"spotless"')
    with pytest.raises(CodecError, match="hygiene: 'spotless' is not a Hygiene"):
        RECORD.decode(broken)


def test_number_that_would_be_rounded_is_refused() -> None:
    document = json.loads(CERTIFICATE.encode(UNSIGNED))
    with pytest.raises(CodecError, match="issued_at: the number has too many digits"):
        CERTIFICATE.decode(json.dumps(document | {"issued_at": 2**53 + 1}))


def test_field_names_that_are_no_valid_utf_8_survive_encoding() -> None:
    """A process may have any name; the kernel does not require UTF-8."""
    odd = b"\xff\x00\xfe".decode("utf-8", "surrogateescape")
    assert decode_fields(encode_fields({odd: odd})) == {odd: odd}


@pytest.mark.parametrize("value", [float("nan"), float("inf"), [1], {"a": 1}, b"raw", object()])
def test_only_scalars_are_encoded_as_event_fields(value: Any) -> None:
    with pytest.raises(CodecError):
        encode_fields({"value": value})


def test_dataclass_field_without_a_codec_is_detected_at_import() -> None:
    with pytest.raises(TypeError, match="uid"):
        dataclass_codec(Pod, namespace=TEXT, name=TEXT)

    @dataclass(frozen=True)
    class Grown:
        one: int
        two: int = 0

    with pytest.raises(TypeError, match="two"):
        dataclass_codec(Grown, one=INTEGER)


@pytest.mark.parametrize(
    "text", ["[" * 100_000, '{"a":' * 100_000, f'{{"a":{"9" * 5000}}}'], ids=["list", "object", "number"]
)
def test_fields_that_no_json_reader_accepts_are_refused(text: str) -> None:
    with pytest.raises(CodecError, match="not JSON"):
        decode_fields(text)
