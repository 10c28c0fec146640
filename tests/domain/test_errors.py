"""The error tree: split by what the caller does, and nothing of one tenant in what another can read."""

from __future__ import annotations

import pytest

from scrubber.domain import errors
from scrubber.domain.errors import (
    DeviceFault,
    Fatal,
    InvalidRequest,
    Refused,
    Retry,
    ScrubberError,
)

EVERY = [getattr(errors, name) for name in errors.__all__]
BRANCHES = (Retry, Refused, DeviceFault, Fatal)
SECRET = "Device GPU-1 waits for the end of acme-bank/train-0 (python steal.py, PID 4711)."


@pytest.mark.parametrize("kind", EVERY)
def test_every_error_is_in_exactly_one_branch(kind: type[ScrubberError]) -> None:
    assert issubclass(kind, ScrubberError)
    branches = [branch for branch in BRANCHES if issubclass(kind, branch)]
    assert len(branches) == (0 if kind is ScrubberError else 1)


@pytest.mark.parametrize("kind", [kind for kind in EVERY if kind is not InvalidRequest])
def test_the_operators_text_is_never_shown_to_a_tenant_in_place_of_a_missing_public_one(
    kind: type[ScrubberError],
) -> None:
    error = kind(SECRET)
    assert str(error) == SECRET
    assert error.public
    assert not {"acme", "train-0", "python", "4711"} & set(error.public.replace("/", " ").split())
    assert SECRET not in error.public


def test_a_public_text_is_what_it_was_given() -> None:
    assert ScrubberError(SECRET, public="Device GPU-1 is in-use.").public == "Device GPU-1 is in-use."


def test_an_invalid_request_is_told_to_its_caller_as_it_is() -> None:
    assert InvalidRequest("The request names no device.").public == "The request names no device."


@pytest.mark.parametrize("kind", EVERY)
def test_every_kind_has_a_code_of_its_own_and_can_be_given_another(kind: type[ScrubberError]) -> None:
    assert [other for other in EVERY if other.code == kind.code] == [kind]
    assert kind.code == kind.code.lower().replace(" ", "-")
    assert kind("Something.", code="special").code == "special"
