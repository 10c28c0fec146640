"""How the plugin logs."""

from __future__ import annotations

import io
import json

import pytest

from plugin.logs import Reminder, logger
from scrubber.domain.errors import BadConfiguration


def lines(stream: io.StringIO) -> list[dict[str, object]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_one_event_is_one_line_of_json_off_a_terminal() -> None:
    stream = io.StringIO()
    log = logger("auto", "info", stream)
    log.debug("not asked for")
    log.warning("Start refused", code="away", told="two\nlines")
    (line,) = lines(stream)
    assert line["event"] == "Start refused"
    assert line["level"] == "warning"
    assert line["told"] == "two\nlines"
    assert line["component"] == "plugin"
    assert "timestamp" in line


@pytest.mark.parametrize(("format_", "level"), [("xml", "info"), ("json", "loud")])
def test_a_format_or_level_that_does_not_exist_is_refused(format_: str, level: str) -> None:
    with pytest.raises(BadConfiguration, match="write one of"):
        logger(format_, level)


def test_a_wait_is_said_once_then_at_intervals_and_its_end_once() -> None:
    stream = io.StringIO()
    now = 0.0
    reminder = Reminder(logger("json", "info", stream), every=30.0, clock=lambda: now)
    reminder.over("there")
    for second in range(65):
        now = float(second)
        reminder.waiting("waiting", reason="no socket")
    reminder.waiting("waiting", reason="nobody answers")
    reminder.over("there")
    reminder.over("there")
    said = [(line["event"], line.get("reason"), line["waited_seconds"]) for line in lines(stream)]
    assert said == [
        ("waiting", "no socket", 0.0),
        ("waiting", "no socket", 30.0),
        ("waiting", "no socket", 60.0),
        ("waiting", "nobody answers", 64.0),
        ("there", None, 64.0),
    ]
