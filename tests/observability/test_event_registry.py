"""The registry of events has every event of both daemons, with its levels and fields, and nothing else."""

from __future__ import annotations

import io
import json
import re
from collections import Counter
from pathlib import Path
from typing import Final

import pytest
from prometheus_client import CollectorRegistry

from scrubber.adapters.nvidia.conditions import NVIDIA_SIGNALS
from scrubber.domain.health.signal_table import ErrorClass
from scrubber.observability.journal import StructlogJournal
from scrubber.observability.logging import LIBRARY_EVENT, make_logger
from scrubber.observability.registry.events import EVENTS, EventDeclaration
from scrubber.ports.record import Event
from tests.observability.declared_events import DECLARED, level_names
from tests.observability.log_events import HOUSE, PASSED_ON, LoggedEvent, logged_events, renamed

REGISTRY: Final = "scrubber/observability/registry/events.py"
NAME: Final = re.compile(r"[a-z]+(-[a-z]+)*(\.[a-z]+(-[a-z]+)*){1,2}")

OF_THE_CALL: Final = frozenset({"method", "resource", "devices"})
"""Fields of every line about a call of the kubelet, in any module (``plugin.kubelet.server.call_fields``)."""

SOURCES: Final = tuple(logged_events())
FROM_LIBRARIES: Final = {(LIBRARY_EVENT, "service"), (LIBRARY_EVENT, "plugin")}


def written() -> dict[tuple[str, str], list[LoggedEvent]]:
    """Return the places that write each event, by its name and daemon."""
    found: dict[tuple[str, str], list[LoggedEvent]] = {}
    for each in SOURCES:
        for name in each.names:
            found.setdefault((name, each.component), []).append(each)
    return found


WRITTEN: Final = written()
BOTH: Final = sorted(DECLARED.keys() & WRITTEN.keys())


def levels_of(name: str) -> set[str]:
    """Return the levels at which the journal logs an event of this name."""
    stream = io.StringIO()
    logger = make_logger("json", "debug", stream, component="service")
    journal = StructlogJournal(registry=CollectorRegistry(), logger=logger, signals=NVIDIA_SIGNALS)
    journal.record([Event(name, 0.0), *(Event(name, 0.0, fields={"class": kind}) for kind in ErrorClass)])
    return {json.loads(line)["level"] for line in stream.getvalue().splitlines()}


def test_every_event_name_can_be_read_from_the_sources() -> None:
    assert [each.where for each in SOURCES if not each.names] == []


def test_no_logging_method_is_aliased() -> None:
    paths = [path for package in ("scrubber", "plugin") for path in (HOUSE / package).rglob("*.py")]
    assert [f"{path}:{line}" for path in paths for line in renamed(path.read_text())] == []
    assert renamed("say = log.error if bad else self._log.info\nlog.info('a.b')") == [1, 1]


def test_every_event_has_a_lower_case_dotted_name() -> None:
    assert [(each.where, name) for each in SOURCES for name in each.names if not NAME.fullmatch(name)] == []


def test_every_event_in_the_sources_is_declared() -> None:
    missing = {event: [each.where for each in places] for event, places in WRITTEN.items() if event not in DECLARED}
    assert missing == {}, f"declare these events in {REGISTRY}, and run python scripts/gen_reference.py"


def test_every_declared_event_is_in_the_sources() -> None:
    unused = DECLARED.keys() - WRITTEN.keys() - FROM_LIBRARIES
    assert unused == set(), f"no source writes these events: remove them from {REGISTRY}"


def test_every_event_is_declared_once_for_each_daemon() -> None:
    counted = Counter((each.name, component) for each in EVENTS for component in each.components)
    assert [event for event, count in counted.items() if count > 1] == []


@pytest.mark.parametrize(("name", "component"), BOTH)
def test_event_is_written_at_its_declared_levels(name: str, component: str) -> None:
    found = [{each.level} if each.level else levels_of(name) for each in WRITTEN[name, component]]
    assert set().union(*found) == level_names(DECLARED[name, component]), f"correct its declaration in {REGISTRY}"


@pytest.mark.parametrize(("name", "component"), BOTH)
def test_event_is_written_with_its_declared_fields(name: str, component: str) -> None:
    places = WRITTEN[name, component]
    fields = frozenset().union(*(each.fields for each in places))
    declared = frozenset(each.name for each in DECLARED[name, component].fields)
    if any(each.where.startswith(("plugin/kubelet/server.py", "plugin/upstream/server.py")) for each in places):
        fields, declared = fields - OF_THE_CALL, declared - OF_THE_CALL
    assert fields <= declared, f"correct its declaration in {REGISTRY}"
    assert declared == fields or not all(each.whole for each in places), f"correct its declaration in {REGISTRY}"


@pytest.mark.parametrize(("name", "component"), BOTH)
def test_event_is_in_the_audit_log_if_its_declaration_says_so(name: str, component: str) -> None:
    audited = {each.audited for each in WRITTEN[name, component]}
    assert audited == {DECLARED[name, component].audited}, f"correct its declaration in {REGISTRY}"


@pytest.mark.parametrize("event", EVENTS, ids=lambda event: f"{event.components[0]}-{event.name}")
def test_description_of_an_event_fits_a_table_cell(event: EventDeclaration) -> None:
    texts = [event.description, *(each.remark for each in event.fields)]
    assert event.description.endswith(".")
    assert not [text for text in texts if "|" in text or "\n" in text or "  " in text]


def test_every_runbook_named_by_an_event_exists() -> None:
    named = {name for event in EVENTS for name in re.findall(r"`(Scrubber\w+)`", event.description)}
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
    who.record([Event("e.f", 0)])
    log.error(event)
"""


def test_event_scan_reads_names_levels_and_fields_from_source_code(tmp_path: Path) -> None:
    (tmp_path / "scrubber").mkdir()
    (tmp_path / "plugin").mkdir()
    (tmp_path / "scrubber" / "small.py").write_text(SMALL)
    found = [
        (set(each.names), each.level, set(each.fields), each.whole, each.audited) for each in logged_events(tmp_path)
    ]
    assert found == [
        ({"Something happened"}, "info", {"pid"}, True, False),
        ({"one.thing", "other.thing"}, "warning", {"traceback"}, True, False),
        ({"kubelet.unavailable"}, "warning", {"message", "waited_seconds"}, True, False),
        ({"a.b"}, "", {"device", "scrub_id", "first"}, True, True),
        ({"health.suspect", "health.healthy"}, "", {"second", "tenant", "third"}, True, True),
        ({"c.d"}, "", {"own"}, False, True),
        ({"e.f"}, "", set(), True, False),
        (set(), "error", set(), True, False),
    ]
