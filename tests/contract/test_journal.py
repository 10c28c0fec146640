"""One event, one line, one movement of the metrics; and telling never fails."""

import contextlib
import io
import json
import logging
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import structlog
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry
from structlog.typing import FilteringBoundLogger

from scrubber.adapters.journal import StructlogJournal, configure_logging
from scrubber.domain.policy import XidClass
from scrubber.ports import Event, Journal
from tests.measures import memory, scrub

NOON = 1_767_182_400.25  # 2025-12-31T12:00:00.25Z


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def logging_as_it_was() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    structlog.reset_defaults()


class Told:
    """A journal, what it wrote and what it counted."""

    def __init__(self, level: str = "info") -> None:
        self.stream = io.StringIO()
        self.registry = CollectorRegistry()
        logger = configure_logging("json", level, self.stream, now=lambda: NOON)
        self.journal = StructlogJournal(registry=self.registry, logger=logger)

    def __call__(self, *events: Event) -> list[dict[str, Any]]:
        """Tell ``events``; answers the lines that this wrote."""
        start = self.stream.tell()
        self.journal.tell(events)
        self.stream.seek(start)
        return [json.loads(line) for line in self.stream]

    def value(self, name: str, **labels: str) -> float:
        return self.registry.get_sample_value(name, labels) or 0.0


@pytest.fixture
def told() -> Told:
    return Told()


def event(name: str, **fields: str | int | float | bool | None) -> Event:
    return Event(name, NOON, "GPU-a", "S-1", fields=fields)


class TestLines:
    def test_an_event_is_one_line_with_its_name_time_and_fields(self, told: Told) -> None:
        (line,) = told(Event("handover.granted", NOON, "GPU-a", "S-1", "plugin", {"grant": 3, "exception": None}))
        assert line == {
            "timestamp": "2025-12-31T12:00:00.250Z",
            "level": "info",
            "event": "handover.granted",
            "device": "GPU-a",
            "scrub": "S-1",
            "actor": "plugin",
            "grant": 3,
            "exception": None,
        }
        assert list(line)[:3] == ["timestamp", "level", "event"]

    def test_an_event_of_the_node_names_no_device(self, told: Told) -> None:
        (line,) = told(Event("service.started", NOON))
        assert "device" not in line
        assert "scrub" not in line

    def test_events_stay_in_order(self, told: Told) -> None:
        names = ["scrub.started", "scrub.finished", "certificate.issued"]
        assert [line["event"] for line in told(*(event(name) for name in names))] == names

    def test_an_unknown_name_is_told_too(self, told: Told) -> None:
        (line,) = told(event("moon.rose", phase="full"))
        assert (line["event"], line["phase"], line["level"]) == ("moon.rose", "full", "info")

    @pytest.mark.parametrize(
        ("name", "level"),
        [
            ("health.quarantined", "error"),
            ("health.condemned", "error"),
            ("handover.refused", "warning"),
            ("handover.granted", "info"),
            ("reserve.noted", "info"),
            ("breaker.opened", "error"),
            ("breaker.closed", "info"),
            ("glass.broken", "error"),
            ("glass.mended", "warning"),
            ("tenant.blamed", "error"),
            ("operator.reset", "warning"),
            ("baseline.accepted", "warning"),
            ("key.created", "warning"),
            ("residue.unexplained", "error"),
            ("audit.broken", "error"),
            ("audit.unread", "warning"),
            ("baseline.taken", "info"),
        ],
    )
    def test_what_a_person_must_see_is_loud(self, told: Told, name: str, level: str) -> None:
        assert told(event(name))[0]["level"] == level

    @pytest.mark.parametrize("kind", list(XidClass))
    def test_a_signal_is_loud_unless_it_says_nothing_about_the_device(self, told: Told, kind: XidClass) -> None:
        (line,) = told(Event("health.signal", NOON, "GPU-a", fields={"code": "xid-31", "class": kind.value, "new": 1}))
        harmless = kind in (XidClass.IGNORE, XidClass.APPLICATION)
        assert line["level"] == ("info" if harmless else "warning")
        assert line["class"] == kind.value

    def test_a_signal_that_names_no_class_is_loud(self, told: Told) -> None:
        assert told(event("health.signal", code="too-hot"))[0]["level"] == "warning"

    def test_quiet_events_can_be_left_out(self) -> None:
        told = Told(level="warning")
        assert [line["event"] for line in told(event("scrub.started"), event("health.suspect"))] == ["health.suspect"]

    def test_a_field_never_overwrites_what_the_line_says_itself(self, told: Told) -> None:
        (line,) = told(event("odd.event", event="x", level="x", timestamp="x", device="x", actor="x", exc_info=True))
        assert (line["event"], line["level"], line["device"], line["actor"]) == (
            "odd.event",
            "info",
            "GPU-a",
            "service",
        )
        assert (line["field_event"], line["field_device"], line["field_exc_info"]) == ("x", "x", True)

    def test_a_line_break_in_a_name_makes_no_second_line(self, told: Told) -> None:
        (line,) = told(event("leftover.ended", command="sh\n{}\x1b[2J"))
        assert line["command"] == "sh\n{}\x1b[2J"

    def test_what_libraries_log_looks_the_same(self) -> None:
        stream = io.StringIO()
        configure_logging("json", "info", stream, now=lambda: NOON)
        logging.getLogger("grpc").warning("the %s is full", "queue")
        logging.getLogger("grpc").debug("unheard")
        line = json.loads(stream.getvalue())
        assert (line["event"], line["level"]) == ("the queue is full", "warning")
        assert line["timestamp"] == "2025-12-31T12:00:00.250Z"

    def test_a_traceback_shows_no_variables(self) -> None:
        for form in ("json", "console"):
            stream = io.StringIO()
            logger = configure_logging(form, "info", stream)
            fail(logger)
            assert "ZeroDivisionError" in stream.getvalue()
            assert "residue-of-a-tenant" not in stream.getvalue()


def fail(logger: FilteringBoundLogger) -> None:
    secret = "-".join(("residue", "of", "a", "tenant"))
    try:
        _ = len(secret) / 0
    except ZeroDivisionError:
        logger.exception("it failed")


class TestForms:
    def line(self, stream: io.StringIO, form: Any, environ: Mapping[str, str] | None = None) -> str:
        logger = configure_logging(form, "info", stream, now=lambda: NOON, environ=environ or {})
        logger.info("scrub.started", device="GPU-a")
        return stream.getvalue()

    def test_auto_is_json_where_no_person_reads(self) -> None:
        assert json.loads(self.line(io.StringIO(), "auto"))["device"] == "GPU-a"

    def test_auto_is_columns_on_a_terminal(self) -> None:
        line = self.line(Terminal(), "auto")
        assert "scrub.started" in line
        assert "\x1b[" in line

    def test_no_color_is_respected(self) -> None:
        line = self.line(Terminal(), "console", {"NO_COLOR": "1"})
        assert "GPU-a" in line
        assert "\x1b[" not in line

    def test_a_terminal_is_not_driven_by_names_that_tenants_write(self) -> None:
        stream = io.StringIO()
        logger = configure_logging("console", "info", stream)
        logger.info("leftover.ended", command="\x1b[2Jrm")
        assert "\x1b[2J" not in stream.getvalue()
        assert "\\x1b[2Jrm" in stream.getvalue()

    def test_an_unknown_form_or_level_is_refused(self) -> None:
        with pytest.raises(ValueError, match="no log format 'xml'"):
            configure_logging("xml", "info", io.StringIO())  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="no log level 'loud'"):
            configure_logging("json", "loud", io.StringIO())


class TestMetrics:
    """How each is counted is in test_metrics_events.py and its neighbours."""

    def test_an_event_is_a_line_and_moves_what_it_moves(self, told: Told) -> None:
        told(event("policy.rejected", sentence="mine.yaml:2: no"))
        assert told.value("scrubber_policy_rejected") == 1

    def test_the_record_of_a_scrub_moves_metrics_and_is_no_line(self, told: Told) -> None:
        told.journal.scrubbed(scrub(memory(cleared_bytes=8192)))
        assert told.value("scrubber_cleared_bytes_total") == 8192
        assert told.stream.getvalue() == ""


@pytest.fixture(scope="module")
def long_lived() -> Told:
    return Told()


class TestItNeverFails:
    def test_a_closed_stream_is_counted_not_raised(self, told: Told) -> None:
        told.stream.close()
        told.journal.tell([event("leftover.ended"), event("leftover.ended")])
        assert told.value("scrubber_log_lines_lost_total") == 2
        assert told.value("scrubber_leftovers_ended_total", act="process") == 2

    def test_a_full_disk_under_the_log_is_counted_not_raised(self) -> None:
        registry = CollectorRegistry()
        # Closing it fails as well.
        with contextlib.suppress(OSError), open("/dev/full", "w") as stream:
            journal = StructlogJournal(registry=registry, logger=configure_logging("json", "info", stream))
            journal.tell([event("service.started")])
        lost = registry.get_sample_value("scrubber_log_lines_lost_total")
        assert lost == 1

    names = st.sampled_from(
        [
            *("handover.granted", "handover.refused", "scrub.finished", "health.quarantined"),
            *("health.signal", "breaker.opened", "breaker.closed"),
        ]
    )
    values = st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.just("slow") | st.just(10**400)
    keys = (
        st.sampled_from(["seconds", "residue_bytes", "path", "kind", "outcome", "code", "cause"])
        | st.sampled_from(["class", "new", "tenant_namespace", "what"])
        | st.text()
    )

    @given(
        st.builds(
            Event,
            name=names | st.text(),
            at=st.floats(),
            device=st.none() | st.text(),
            scrub=st.none() | st.text(max_size=200),
            actor=st.text(),
            fields=st.dictionaries(keys, values),
        )
    )
    def test_whatever_it_is_told(self, long_lived: Told, happened: Event) -> None:
        (line,) = long_lived(happened)
        assert line["event"] == happened.name
        assert long_lived.value("scrubber_log_lines_lost_total") == 0
        assert long_lived.journal.metrics.page.written()[1]


def test_it_is_a_journal(told: Told) -> None:
    journal: Journal = told.journal
    journal.tell(())
    journal.scrubbed(scrub())
    assert told.stream.getvalue() == ""
