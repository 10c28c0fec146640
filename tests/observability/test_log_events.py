"""docs/logs.md lists every event of both daemons with its level and fields, and nothing else."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest
from prometheus_client import CollectorRegistry

from scrubber.adapters.nvidia.conditions import NVIDIA_SIGNALS
from scrubber.domain.health.signal_table import ErrorClass
from scrubber.observability.journal import StructlogJournal
from scrubber.observability.logging import LIBRARY_EVENT, make_logger
from scrubber.ports.record import Event
from tests.observability.log_events import HOUSE, PASSED_ON, Told, renamed, told

PAGE: Final = (HOUSE / "docs" / "logs.md").read_text()
ROW: Final = re.compile(r"^\| `([^`]+)` \| ([a-z, ]+) \| (service|plugin|both) \|(.*?)\| (.+) \|$", re.MULTILINE)
NAME: Final = re.compile(r"[a-z]+(-[a-z]+)*(\.[a-z]+(-[a-z]+)*){1,2}")

OF_THE_CALL: Final = frozenset({"method", "resource", "devices"})
"""Fields of every line about a call of the kubelet, in any module (``plugin.logs.about``)."""

SOURCES: Final = tuple(told())


def documented() -> Iterator[tuple[tuple[str, str], str, frozenset[str]]]:
    """Yield (event, daemon), level, and the fields, which are in backticks."""
    for name, level, who, fields, _ in ROW.findall(PAGE):
        for component in ("service", "plugin") if who == "both" else (who,):
            yield (name, component), level.strip(), frozenset(re.findall(r"`(\w+)`", fields))


def written() -> dict[tuple[str, str], list[Told]]:
    found: dict[tuple[str, str], list[Told]] = {}
    for each in SOURCES:
        for name in each.names:
            found.setdefault((name, each.component), []).append(each)
    return found


LEVELS: Final = {event: level for event, level, _ in documented()}
FIELDS: Final = {event: fields for event, _, fields in documented()}
FROM_LIBRARIES: Final = {(LIBRARY_EVENT, "service"), (LIBRARY_EVENT, "plugin")}


def levels_of(name: str) -> str:
    """Return the levels at which the journal logs an event of this name."""
    found = []
    for kind in ("", *ErrorClass):
        stream = io.StringIO()
        logger = make_logger("json", "debug", stream, component="service")
        event = Event(name, 0.0, fields={"class": kind} if kind else {})
        StructlogJournal(registry=CollectorRegistry(), logger=logger, signals=NVIDIA_SIGNALS).record([event])
        found.append(json.loads(stream.getvalue())["level"])
    return ", ".join(sorted(set(found), key=["error", "warning", "info"].index))


def test_every_event_name_can_be_read_from_the_sources() -> None:
    assert [each.where for each in SOURCES if not each.names] == []


def test_no_logging_method_is_aliased() -> None:
    paths = [path for package in ("scrubber", "plugin") for path in (HOUSE / package).rglob("*.py")]
    assert [f"{path}:{line}" for path in paths for line in renamed(path.read_text())] == []
    assert renamed("say = log.error if bad else self._log.info\nlog.info('a.b')") == [1, 1]


def test_every_event_has_a_lower_case_dotted_name() -> None:
    assert [(each.where, name) for each in SOURCES for name in each.names if not NAME.fullmatch(name)] == []


def test_log_page_lists_exactly_the_events_in_the_sources() -> None:
    assert LEVELS.keys() == written().keys() | FROM_LIBRARIES
    rows = [(name, who) for name, _, who, _, _ in ROW.findall(PAGE)]
    assert len(rows) == len(set(rows))
    assert len(re.findall(r"^\| `[a-z-]+\.", PAGE, re.MULTILINE)) == len(rows), "a row that this test does not read"


@pytest.mark.parametrize(("name", "component"), sorted(written()))
def test_event_level_matches_the_log_page(name: str, component: str) -> None:
    levels = {each.level or levels_of(name) for each in written()[name, component]}
    assert levels == {LEVELS[name, component]}


@pytest.mark.parametrize(("name", "component"), sorted(written()))
def test_event_fields_match_the_log_page(name: str, component: str) -> None:
    places = written()[name, component]
    fields, page = frozenset().union(*(each.fields for each in places)), FIELDS[name, component]
    if any(each.where.startswith(("plugin/kubelet/server.py", "plugin/upstream/server.py")) for each in places):
        fields, page = fields - OF_THE_CALL, page - OF_THE_CALL
    assert fields <= page
    assert page == fields or not all(each.whole for each in places)


def test_every_runbook_named_on_the_log_page_exists() -> None:
    named = set(re.findall(r"`(Scrubber\w+)`", PAGE))
    assert len(named) > 5
    assert [each for each in named if not (HOUSE / "docs" / "runbooks" / f"{each}.md").is_file()] == []


def test_every_file_excluded_from_the_event_scan_exists() -> None:
    assert all((HOUSE / path).is_file() for path in PASSED_ON)


SMALL: Final = """
from scrubber.ports.record import Event

_NAMES = {"a": "health.suspect", "b": "health.healthy"}

def tell(log, reminder, event, who):
    log.info("Something happened", pid=1)
    log.warning("one.thing" if event else "other.thing", exc_info=event)
    reminder.log_waiting("kubelet.unavailable", message="")
    fields = {"first": 1}
    Event("a.b", 0, "GPU", "S", fields=fields)
    fields = {"second": 1}
    fields |= {"tenant": 1}
    fields["third"] = 2
    Event(_NAMES[event], 0, fields=fields)
    Event("c.d", 0, fields={"own": 1, **dict(who)})
    log.error(event)
"""


def test_event_scan_reads_names_levels_and_fields_from_source_code(tmp_path: Path) -> None:
    (tmp_path / "scrubber").mkdir()
    (tmp_path / "plugin").mkdir()
    (tmp_path / "scrubber" / "small.py").write_text(SMALL)
    found = [(set(each.names), each.level, set(each.fields), each.whole) for each in told(tmp_path)]
    assert found == [
        ({"Something happened"}, "info", {"pid"}, True),
        ({"one.thing", "other.thing"}, "warning", {"traceback"}, True),
        ({"kubelet.unavailable"}, "warning", {"message", "waited_seconds"}, True),
        ({"a.b"}, "", {"device", "scrub_id", "first"}, True),
        ({"health.suspect", "health.healthy"}, "", {"second", "tenant", "third"}, True),
        ({"c.d"}, "", {"own"}, False),
        (set(), "error", set(), True),
    ]
