"""What real daemons wrote to their logs: events that docs/logs.md has, at its levels, and nothing else."""

from __future__ import annotations

import json
from typing import Any

from scrubber.emulator.playground import Daemon, Playground
from tests.observability.test_log_events import FIELDS, LEVELS

__all__ = ["check", "lines"]

REFUSAL = "Error: "
"""How the sentence of a daemon begins that does not start."""


def lines(daemon: Daemon) -> list[dict[str, Any]]:
    """The events of its log. Anything else in there must be a refusal to start."""
    text = daemon.log.read_text() if daemon.log.exists() else ""
    whole = text[: text.rfind("\n") + 1].splitlines()
    return [json.loads(line) for line in whole if not line.startswith(REFUSAL)]


def check(stage: Playground) -> None:
    """Of both daemons, as far as they have written."""
    for daemon in (stage.service, stage.plugin):
        for line in lines(daemon):
            event = (line["event"], line["component"])
            assert event in LEVELS, line
            assert line["level"] in LEVELS[event] or LEVELS[event] == "any", line
            assert list(line)[:4] == ["timestamp", "level", "event", "component"]
            if event[0].startswith(("scrub.", "handover.")):
                assert FIELDS[event] - line.keys() <= {"device", "told"}, line
