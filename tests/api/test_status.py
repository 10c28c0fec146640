"""Errors across the sockets: class, code and message arrive at the other end, for every class of the tree."""

from __future__ import annotations

import grpc
import pytest

from scrubber.api.status import GRPC_CODES, UNEXPECTED_ERROR_MESSAGE, error_from_status, status_from_error
from scrubber.domain import errors
from scrubber.domain.codes import ErrorCode
from scrubber.domain.errors import (
    DriverTimeout,
    InvalidRequest,
    NotReady,
    PermissionDenied,
    Quarantined,
    Refused,
    ScrubberError,
    Unavailable,
)

TREE = [getattr(errors, name) for name in errors.__all__]


def test_every_error_class_has_a_grpc_status() -> None:
    assert set(GRPC_CODES) == set(TREE)


@pytest.mark.parametrize("kind", TREE)
def test_error_reaches_an_operator_with_class_code_and_message(kind: type[ScrubberError]) -> None:
    sent = kind("team-a/trainer holds GPU-1.", public_message="GPU-1 is held.", code="xid-95")
    status = status_from_error(sent, public=False)
    got = error_from_status(status.code, status.details, status.metadata, public=False)
    assert (type(got), str(got), got.code) == (kind, "team-a/trainer holds GPU-1.", "xid-95")


@pytest.mark.parametrize("kind", TREE)
def test_error_reaches_a_tenant_with_the_public_message_only(kind: type[ScrubberError]) -> None:
    status = status_from_error(kind("team-a/trainer holds GPU-1.", public_message="GPU-1 is held."), public=True)
    assert "team-a" not in repr(status)
    got = error_from_status(status.code, status.details, status.metadata, public=True)
    assert (type(got), got.public_message, got.code) == (kind, "GPU-1 is held.", kind.code)


@pytest.mark.parametrize(
    ("kind", "code"),
    [
        (NotReady, grpc.StatusCode.UNAVAILABLE),
        (Unavailable, grpc.StatusCode.UNAVAILABLE),
        (InvalidRequest, grpc.StatusCode.INVALID_ARGUMENT),
        (Quarantined, grpc.StatusCode.FAILED_PRECONDITION),
        (PermissionDenied, grpc.StatusCode.PERMISSION_DENIED),
        (ScrubberError, grpc.StatusCode.INTERNAL),
    ],
)
def test_grpc_status_states_whether_to_retry(kind: type[ScrubberError], code: grpc.StatusCode) -> None:
    assert status_from_error(kind("A message."), public=False).code is code


@pytest.mark.parametrize("public", [True, False])
def test_unexpected_exception_reveals_no_details(public: bool) -> None:
    status = status_from_error(KeyError("/var/lib/secret"), public=public)
    assert status.code is grpc.StatusCode.INTERNAL
    assert status.details == UNEXPECTED_ERROR_MESSAGE
    got = error_from_status(status.code, status.details, status.metadata, public=public)
    assert (type(got), got.code) == (ScrubberError, "internal-error")


def test_undeclared_error_subclass_arrives_as_its_nearest_declared_class() -> None:
    class ChildStuck(DriverTimeout):
        code = ErrorCode.CHILD_DIED

    status = status_from_error(ChildStuck("The child for GPU-1 hangs."), public=False)
    got = error_from_status(status.code, status.details, status.metadata, public=False)
    assert (type(got), got.code) == (DriverTimeout, ErrorCode.CHILD_DIED)


@pytest.mark.parametrize("message", ["x" * 100_000, "\N{SNOWMAN}" * 100_000, "🦊" * 100_000])
def test_message_too_long_for_a_header_is_truncated_not_lost(message: str) -> None:
    details = status_from_error(Refused(message), public=False).details
    assert details.startswith(message[:400])
    assert details.endswith("…")
    assert 3 * len(details.encode()) < 8 * 1024


def test_process_name_that_is_not_utf8_does_not_break_a_refusal() -> None:
    name = b"\xff\xfe trainer".decode("utf-8", "surrogateescape")
    assert status_from_error(Refused(f"{name} holds GPU-1."), public=False).details == "?? trainer holds GPU-1."


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (grpc.StatusCode.UNAVAILABLE, Unavailable),
        (grpc.StatusCode.DEADLINE_EXCEEDED, Unavailable),
        (grpc.StatusCode.CANCELLED, Unavailable),
        (grpc.StatusCode.INVALID_ARGUMENT, InvalidRequest),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, InvalidRequest),
        (grpc.StatusCode.PERMISSION_DENIED, PermissionDenied),
        (grpc.StatusCode.UNIMPLEMENTED, Refused),
        (grpc.StatusCode.UNKNOWN, ScrubberError),
        (grpc.StatusCode.DATA_LOSS, ScrubberError),
    ],
)
def test_grpc_library_status_becomes_a_scrubber_error(code: grpc.StatusCode, kind: type[ScrubberError]) -> None:
    assert type(error_from_status(code, "A library's message.", (), public=True)) is kind


def test_grpc_library_status_is_hidden_from_tenants() -> None:
    got = error_from_status(grpc.StatusCode.UNAVAILABLE, "connect to unix:/run/x: refused", (), public=True)
    assert "unix" not in got.public_message


@pytest.mark.parametrize("name", ["Exception", "__all__", "annotations", ""])
def test_error_metadata_can_name_nothing_but_an_error_class(name: str) -> None:
    got = error_from_status(grpc.StatusCode.INTERNAL, "A message.", (("scrubber-error", name),), public=False)
    assert type(got) is ScrubberError


def test_grpc_status_without_a_message_gets_a_message() -> None:
    assert "data loss" in str(error_from_status(grpc.StatusCode.DATA_LOSS, None, (), public=False))
