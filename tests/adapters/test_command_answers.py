"""What an administrator reads about an answer that is invalid."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from scrubber.adapters.command.answers import API_VERSION, Answer, Verb, read_answer
from scrubber.adapters.command.inventory import parse_devices
from scrubber.domain.errors import BrokenCommand

DEVICE = {"id": "dev-0", "index": "0", "model": "m", "memoryBytes": 0}


def message_of(read: Callable[[Answer], object], values: dict[str, Any]) -> str:
    with pytest.raises(BrokenCommand) as raised:
        read(Answer("/program verb", values, 0.0))
    return str(raised.value).removeprefix("/program verb is broken: its answer is invalid: ")


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (40.5, "n is 40.5, not a whole number from 0 to 1000."),
        ("40", "n is '40', not a whole number from 0 to 1000."),
        (1001, "n is 1001, not a whole number from 0 to 1000."),
    ],
)
def test_invalid_number_is_reported_with_the_numbers_that_are_valid(value: object, message: str) -> None:
    assert message_of(lambda answer: answer.number("n", maximum=1000), {"n": value}) == message


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({}, "t is missing."),
        ({"t": None}, "t is null, not a line of at most 500 characters."),
        ({"t": 0}, "t is 0, not a string; quote it."),
        ({"t": "a\nb"}, "t is 'a\\nb', not a line of at most 500 characters."),
        ({"t": ""}, "t is empty."),
    ],
)
def test_invalid_text_is_reported_with_what_to_write(values: dict[str, Any], message: str) -> None:
    assert message_of(lambda answer: answer.text("t"), values) == message


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"index": 0}, "devices[0].index is 0, not a string; quote it."),
        ({"memoryBytes": None}, "devices[0].memoryBytes is missing."),
        ({"nodes": [{"path": "/dev/a"}, {}]}, "devices[0].nodes[1].path is missing."),
        ({"nodes": ["/dev/a"]}, "devices[0].nodes[0] is '/dev/a', not an object."),
        ({"peers": ["a", 1]}, "devices[0].peers[1] is 1, not a string; quote it."),
        ({"environment": {"A": 1}}, "devices[0].environment.A is 1, not a string; quote it."),
        ({"environment": {"\x1b[2J\n": 1}}, "devices[0].environment.\\x1b[2J\\n is 1, not a string; quote it."),
    ],
)
def test_mistake_in_an_inventory_is_reported_with_its_place(changes: dict[str, Any], message: str) -> None:
    assert message_of(parse_devices, {"driver": "1", "devices": [{**DEVICE, **changes}]}) == message


@pytest.mark.parametrize(
    ("verb", "status", "values", "message"),
    [
        (Verb.CAPABILITIES, 13, {}, "status 13 (verb not supported), but every program must support capabilities."),
        (Verb.RESET, 13, {}, "status 13 (verb not supported), but its capabilities list the verb."),
        (Verb.RESET, 10, {"message": "m"}, "code is missing; it is one of lost, timeout, failed."),
    ],
)
def test_refusal_against_the_protocol_is_reported_with_the_rule(
    verb: Verb, status: int, values: dict[str, Any], message: str
) -> None:
    answer = {"apiVersion": API_VERSION, "kind": "Response", "id": "1", **values}
    with pytest.raises(BrokenCommand) as raised:
        read_answer("/program", verb, "1", {"status": status, "answer": answer})
    assert str(raised.value).startswith(f"/program {verb} is broken: ")
    assert str(raised.value).endswith(message)
