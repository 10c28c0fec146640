"""An eraser that stops reporting progress is given up long before its deadline, which depends on the device's size."""

from __future__ import annotations

import pytest

from scrubber.adapters.children.eraser_report import (
    parse_byte_count,
    parse_residue_map,
    parse_seconds_by_phase,
    wait_for_report,
)
from scrubber.adapters.children.process import Children
from scrubber.domain.errors import DriverTimeout, Unreadable
from scrubber.ports.device import EraseProgress


async def test_eraser_without_progress_is_reported_as_hung_with_its_pid() -> None:
    children = Children()
    child = await children.start("tests.adapters.wayward_child")
    received: list[EraseProgress] = []
    try:
        await child.send({"do": "hang"})
        with pytest.raises(DriverTimeout, match=rf"Process {child.pid} has not reported its progress for 0\.05 s"):
            await wait_for_report(child, received.append, silence_timeout=0.05)
    finally:
        await child.kill()
    assert received == []


@pytest.mark.parametrize(
    "seconds", [10**400, float("inf"), float("nan"), -1, True, "1", None], ids=lambda each: f"{each!s:.9}"
)
def test_invalid_seconds_make_an_erasers_report_unreadable(seconds: object) -> None:
    with pytest.raises(Unreadable, match="seconds by phase are malformed"):
        parse_seconds_by_phase({"seconds_by_phase": [["write", 1.5], ["verify", seconds]]})


@pytest.mark.parametrize("row", [[], ["write"], [7, 1.0], "w1", None, ["write", 1, 2]], ids=str)
def test_invalid_phase_makes_an_erasers_report_unreadable(row: object) -> None:
    with pytest.raises(Unreadable, match="seconds by phase are malformed"):
        parse_seconds_by_phase({"seconds_by_phase": [row]})


def test_byte_count_that_no_message_can_carry_is_unreadable() -> None:
    assert parse_byte_count({"residue": 2**63 - 1}, "residue") == 2**63 - 1
    with pytest.raises(Unreadable, match="'residue' is 9223372036854775808"):
        parse_byte_count({"residue": 2**63}, "residue")


def test_residue_map_of_booleans_is_unreadable() -> None:
    with pytest.raises(Unreadable, match="residue map"):
        parse_residue_map({"residue_map": [True, False]}, 1)
