"""The declared events by name and daemon, and their levels: also for tests that read the log lines of daemons."""

from __future__ import annotations

import logging
from typing import Final

from scrubber.observability.registry.events import EVENTS, EventDeclaration

__all__ = ["DECLARED", "level_names"]

DECLARED: Final = {(each.name, str(component)): each for each in EVENTS for component in each.components}


def level_names(event: EventDeclaration) -> set[str]:
    return {logging.getLevelName(level).lower() for level in event.levels}
