"""What each release promised is kept: its API is still understood, and its ledger can be read.

After a change to the API or the ledger of a version that was not released yet, store that version again:
``python -m tests.releases.store``.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from google.protobuf.descriptor_pb2 import DescriptorProto, FieldDescriptorProto, FileDescriptorProto

from scrubber.adapters.ledger.offline import verify_ledger
from scrubber.adapters.ledger.sqlite import SqliteLedger
from scrubber.ports.record import HistoryQuery
from tests.ledger_samples import GPU, OTHER_GPU
from tests.releases.compatibility import breaking_changes
from tests.releases.store import api_of, create_ledger, current_api, sample_change, stored_versions

ROOT = Path(__file__).parents[2]
VERSIONS = stored_versions()


def test_every_released_minor_version_is_stored() -> None:
    headings = re.findall(r"^## v?\[?(\d+\.\d+)\.\d+", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert headings, "the changelog has no heading of a version"
    assert set(VERSIONS) >= set(headings)


@pytest.mark.parametrize("version", VERSIONS)
def test_api_is_compatible_with_every_stored_version(version: str) -> None:
    assert breaking_changes(api_of(version), current_api()) == []


@pytest.mark.parametrize("version", VERSIONS)
async def test_ledger_of_every_stored_version_can_be_read(version: str, tmp_path: Path) -> None:
    home, expected = tmp_path / "state", sample_change()
    create_ledger(version, home / "ledger.db")
    ledger = SqliteLedger(home)
    state = await ledger.load()
    history = await ledger.history(HistoryQuery())
    kept = await ledger.certificate("C-1")
    await ledger.close()
    assert [state.records[device] for device in (GPU, OTHER_GPU)] == list(expected.records)
    assert (state.node, state.agent_pause) == (expected.node, expected.agent_pause)
    assert [each.id for each in state.unfinished_scrubs] == ["S-2"]
    assert [each.event.name for each in history] == ["device.appeared", "device.marked-dirty"]
    assert kept == expected.certificates[0]
    assert verify_ledger(home).intact


def _field(api: FileDescriptorProto, message: str, name: str) -> FieldDescriptorProto:
    return next(each for each in _message(api, message).field if each.name == name)


def _message(api: FileDescriptorProto, name: str) -> DescriptorProto:
    return next(each for each in api.message_type if each.name == name)


def remove_message(api: FileDescriptorProto) -> None:
    api.message_type.remove(_message(api, "ReserveRequest"))


def remove_field(api: FileDescriptorProto) -> None:
    _message(api, "Snapshot").field.remove(_field(api, "Snapshot", "epoch"))


def remove_and_reserve_field(api: FileDescriptorProto) -> None:
    remove_field(api)
    _message(api, "Snapshot").reserved_range.add(start=4, end=5)


def renumber_field(api: FileDescriptorProto) -> None:
    _field(api, "Snapshot", "epoch").number = 99


def rename_field(api: FileDescriptorProto) -> None:
    _field(api, "Snapshot", "epoch").name = "run"


def change_type(api: FileDescriptorProto) -> None:
    _field(api, "Snapshot", "epoch").type = FieldDescriptorProto.TYPE_UINT64


def change_message_type(api: FileDescriptorProto) -> None:
    _field(api, "Snapshot", "devices").type_name = ".scrubber.v1.Device"


def make_single(api: FileDescriptorProto) -> None:
    _field(api, "Snapshot", "devices").label = FieldDescriptorProto.LABEL_OPTIONAL


def make_optional(api: FileDescriptorProto) -> None:
    _field(api, "Snapshot", "epoch").proto3_optional = True


def leave_oneof(api: FileDescriptorProto) -> None:
    _field(api, "ScrubUpdate", "result").ClearField("oneof_index")


def change_map(api: FileDescriptorProto) -> None:
    entry = next(each for each in _message(api, "Device").nested_type if each.name == "AttributesEntry")
    entry.field[1].type = FieldDescriptorProto.TYPE_BYTES


def remove_method(api: FileDescriptorProto) -> None:
    del api.service[0].method[0]


def remove_service(api: FileDescriptorProto) -> None:
    del api.service[0]


def make_unary(api: FileDescriptorProto) -> None:
    next(each for each in api.service[0].method if each.name == "WatchSnapshots").server_streaming = False


def change_answer(api: FileDescriptorProto) -> None:
    next(each for each in api.service[0].method if each.name == "HandOver").output_type = ".scrubber.v1.Snapshot"


def rename_package(api: FileDescriptorProto) -> None:
    api.package = "scrubber.v2"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (remove_message, "message ReserveRequest was removed"),
        (remove_field, r"field Snapshot.epoch \(4\) was removed"),
        (remove_and_reserve_field, r"field Snapshot.epoch \(4\) was removed"),
        (renumber_field, r"field Snapshot.epoch \(4\) was removed"),
        (rename_field, r"the name of field Snapshot.epoch \(4\) is 'run'"),
        (change_type, r"the type of field Snapshot.epoch \(4\) is 'TYPE_UINT64'"),
        (change_message_type, "the message type of field Snapshot.devices"),
        (make_single, "the label of field Snapshot.devices"),
        (make_optional, "the presence of field Snapshot.epoch"),
        (leave_oneof, "the oneof of field ScrubUpdate.result"),
        (change_map, "the type of field Device.AttributesEntry.value"),
        (remove_method, "method Plugin.GetSnapshot was removed"),
        (remove_service, "method Plugin.HandOver was removed"),
        (make_unary, "the server streaming of method Plugin.WatchSnapshots is False"),
        (change_answer, "the output type of method Plugin.HandOver"),
        (rename_package, "the package scrubber.v1 is called scrubber.v2"),
    ],
)
def test_breaking_change_of_the_api_is_found(change: Callable[[FileDescriptorProto], None], words: str) -> None:
    after = current_api()
    change(after)
    found = breaking_changes(current_api(), after)
    assert any(re.match(words, each) for each in found), found


def test_added_messages_fields_and_methods_are_compatible() -> None:
    after = current_api()
    after.message_type.add(name="News").field.add(name="text", number=1, type=FieldDescriptorProto.TYPE_STRING)
    _message(after, "Snapshot").field.add(name="news", number=99, type=FieldDescriptorProto.TYPE_STRING)
    after.service[0].method.add(name="GetNews", input_type=".scrubber.v1.News", output_type=".scrubber.v1.News")
    assert breaking_changes(current_api(), after) == []


def test_deprecated_field_may_be_removed_once_its_number_is_reserved() -> None:
    before, after = current_api(), current_api()
    _field(before, "Snapshot", "epoch").options.deprecated = True
    remove_field(after)
    assert breaking_changes(before, after) == ["field Snapshot.epoch (4) was removed"]
    _message(after, "Snapshot").reserved_range.add(start=4, end=5)
    assert breaking_changes(before, after) == []
