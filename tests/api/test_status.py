"""Errors travel: the class, the code and the right sentence arrive at the other end, for every class of the tree."""

from __future__ import annotations

import grpc
import pytest

from scrubber.api.status import CODES, UNEXPECTED, error_of, status_of
from scrubber.domain import errors
from scrubber.domain.codes import ErrorCode
from scrubber.domain.errors import (
    Away,
    InvalidRequest,
    NotPermitted,
    NotReady,
    Quarantined,
    Refused,
    ScrubberError,
    Stuck,
)

TREE = [getattr(errors, name) for name in errors.__all__]


def test_every_error_has_a_status() -> None:
    assert set(CODES) == set(TREE)


@pytest.mark.parametrize("kind", TREE)
def test_an_error_arrives_as_itself_at_an_operator(kind: type[ScrubberError]) -> None:
    sent = kind("team-a/trainer holds GPU-1.", public="GPU-1 is held.", code="xid-95")
    status = status_of(sent, public=False)
    got = error_of(status.code, status.details, status.metadata, public=False)
    assert (type(got), str(got), got.code) == (kind, "team-a/trainer holds GPU-1.", "xid-95")


@pytest.mark.parametrize("kind", TREE)
def test_a_tenant_reads_the_public_sentence_only(kind: type[ScrubberError]) -> None:
    status = status_of(kind("team-a/trainer holds GPU-1.", public="GPU-1 is held."), public=True)
    assert "team-a" not in repr(status)
    got = error_of(status.code, status.details, status.metadata, public=True)
    assert (type(got), got.public, got.code) == (kind, "GPU-1 is held.", kind.code)


@pytest.mark.parametrize(
    ("kind", "code"),
    [
        (NotReady, grpc.StatusCode.UNAVAILABLE),
        (Away, grpc.StatusCode.UNAVAILABLE),
        (InvalidRequest, grpc.StatusCode.INVALID_ARGUMENT),
        (Quarantined, grpc.StatusCode.FAILED_PRECONDITION),
        (NotPermitted, grpc.StatusCode.PERMISSION_DENIED),
        (ScrubberError, grpc.StatusCode.INTERNAL),
    ],
)
def test_a_status_says_whether_to_ask_again(kind: type[ScrubberError], code: grpc.StatusCode) -> None:
    assert status_of(kind("A sentence."), public=False).code is code


@pytest.mark.parametrize("public", [True, False])
def test_nothing_of_an_unforeseen_exception_is_told(public: bool) -> None:
    status = status_of(KeyError("/var/lib/secret"), public=public)
    assert status.code is grpc.StatusCode.INTERNAL
    assert status.details == UNEXPECTED
    got = error_of(status.code, status.details, status.metadata, public=public)
    assert (type(got), got.code) == (ScrubberError, "unexpected")


def test_an_error_of_a_part_of_its_own_arrives_as_the_nearest_of_the_tree() -> None:
    class ChildStuck(Stuck):
        code = ErrorCode.CHILD_DIED

    status = status_of(ChildStuck("The child for GPU-1 hangs."), public=False)
    got = error_of(status.code, status.details, status.metadata, public=False)
    assert (type(got), got.code) == (Stuck, ErrorCode.CHILD_DIED)


@pytest.mark.parametrize("sentence", ["x" * 100_000, "\N{SNOWMAN}" * 100_000, "🦊" * 100_000])
def test_a_sentence_too_long_for_a_header_is_cut_not_lost(sentence: str) -> None:
    details = status_of(Refused(sentence), public=False).details
    assert details.startswith(sentence[:400])
    assert details.endswith("…")
    assert 3 * len(details.encode()) < 8 * 1024


def test_a_process_name_that_is_no_text_does_not_break_a_refusal() -> None:
    name = b"\xff\xfe trainer".decode("utf-8", "surrogateescape")
    assert status_of(Refused(f"{name} holds GPU-1."), public=False).details == "?? trainer holds GPU-1."


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (grpc.StatusCode.UNAVAILABLE, Away),
        (grpc.StatusCode.DEADLINE_EXCEEDED, Away),
        (grpc.StatusCode.CANCELLED, Away),
        (grpc.StatusCode.INVALID_ARGUMENT, InvalidRequest),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, InvalidRequest),
        (grpc.StatusCode.PERMISSION_DENIED, NotPermitted),
        (grpc.StatusCode.UNIMPLEMENTED, Refused),
        (grpc.StatusCode.UNKNOWN, ScrubberError),
        (grpc.StatusCode.DATA_LOSS, ScrubberError),
    ],
)
def test_a_status_of_the_library_becomes_an_error_of_ours(code: grpc.StatusCode, kind: type[ScrubberError]) -> None:
    assert type(error_of(code, "Said the library.", (), public=True)) is kind


def test_a_status_of_the_library_is_not_shown_to_tenants() -> None:
    got = error_of(grpc.StatusCode.UNAVAILABLE, "connect to unix:/run/x: refused", (), public=True)
    assert "unix" not in got.public


@pytest.mark.parametrize("name", ["Exception", "__all__", "annotations", ""])
def test_metadata_cannot_name_anything_but_an_error(name: str) -> None:
    got = error_of(grpc.StatusCode.INTERNAL, "A sentence.", (("scrubber-error", name),), public=False)
    assert type(got) is ScrubberError


def test_a_status_without_a_sentence_still_says_something() -> None:
    assert "data loss" in str(error_of(grpc.StatusCode.DATA_LOSS, None, (), public=False))
