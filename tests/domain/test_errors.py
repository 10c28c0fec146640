"""The error tree: organized by the caller's reaction, and without data of one tenant in what another can read."""

from __future__ import annotations

import pytest

from scrubber.domain import errors
from scrubber.domain.errors import (
    DeviceFault,
    FatalError,
    InvalidRequest,
    Refused,
    RetryableError,
    ScrubberError,
)

EVERY = [getattr(errors, name) for name in errors.__all__]
BRANCHES = (RetryableError, Refused, DeviceFault, FatalError)
SECRET = "Device GPU-1 waits for acme-bank/train-0 to end (python steal.py, PID 4711)."


@pytest.mark.parametrize("kind", EVERY)
def test_every_error_belongs_to_exactly_one_branch(kind: type[ScrubberError]) -> None:
    assert issubclass(kind, ScrubberError)
    branches = [branch for branch in BRANCHES if issubclass(kind, branch)]
    assert len(branches) == (0 if kind is ScrubberError else 1)


@pytest.mark.parametrize("kind", [kind for kind in EVERY if kind is not InvalidRequest])
def test_default_public_message_contains_nothing_of_the_operators_message(
    kind: type[ScrubberError],
) -> None:
    error = kind(SECRET)
    assert str(error) == SECRET
    assert error.public_message
    assert not {"acme", "train-0", "python", "4711"} & set(error.public_message.replace("/", " ").split())
    assert SECRET not in error.public_message


def test_public_message_is_kept_as_given() -> None:
    assert ScrubberError(SECRET, public_message="Device GPU-1 is in-use.").public_message == "Device GPU-1 is in-use."


def test_invalid_request_has_the_same_message_for_caller_and_operator() -> None:
    assert InvalidRequest("The request names no device.").public_message == "The request names no device."


@pytest.mark.parametrize("kind", EVERY)
def test_every_error_class_has_a_unique_default_code_that_can_be_overridden(kind: type[ScrubberError]) -> None:
    assert [other for other in EVERY if other.code == kind.code] == [kind]
    assert kind.code == kind.code.lower().replace(" ", "-")
    assert kind("Something.", code="special").code == "special"
