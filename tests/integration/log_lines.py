"""The logs of real daemons: only declared events, at their levels."""

from __future__ import annotations

import json
from typing import Any

from scrubber.emulator.playground import Daemon, Playground
from tests.observability.declared_events import DECLARED, level_names

__all__ = ["check", "lines"]

REFUSAL = "Error: "
"""Beginning of the message of a daemon that does not start."""


def lines(daemon: Daemon) -> list[dict[str, Any]]:
    """Return the events of its log. Any other line must be a refusal to start."""
    text = daemon.log.read_text() if daemon.log.exists() else ""
    *whole, _ = text.split("\n")
    return [_event(line) for line in whole if not line.startswith(REFUSAL)]


def _event(line: str) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads(line)
    except json.JSONDecodeError:
        raise AssertionError(f"a line of the log is no event: {line!r}") from None
    return found


def check(stage: Playground) -> None:
    """Check the log lines that both daemons have written so far."""
    for daemon in (stage.service, stage.plugin):
        for line in lines(daemon):
            event = (line["event"], line["component"])
            assert event in DECLARED, line
            declared = DECLARED[event]
            assert line["level"] in level_names(declared) or not declared.levels, line
            assert list(line)[:4] == ["timestamp", "level", "event", "component"]
            if event[0].startswith(("scrub.", "handover.")):
                fields = {each.name for each in declared.fields}
                assert fields - line.keys() <= {"device", "public_message"}, line
