"""One event, one log line, one change of the metrics; and recording never fails."""

import contextlib
import io
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from scrubber.adapters.nvidia.conditions import NVIDIA_SIGNALS
from scrubber.domain.health.signal_table import ErrorClass
from scrubber.observability.journal import StructlogJournal
from scrubber.observability.log_context import LogContextTracer
from scrubber.observability.log_sink import LostLineCounter
from scrubber.observability.logging import make_logger
from scrubber.ports.record import Event, Journal
from tests.measures import memory, scrub

NOON = 1_767_182_400.25  # 2025-12-31T12:00:00.25Z


class JournalOutput:
    """A journal, with the lines that it wrote and its metrics."""

    def __init__(self, level: str = "info") -> None:
        self.stream = io.StringIO()
        self.registry = CollectorRegistry()
        losses = LostLineCounter()
        logger = make_logger("json", level, self.stream, component="service", now=lambda: NOON, lost_lines=losses)
        self.journal = StructlogJournal(registry=self.registry, logger=logger, signals=NVIDIA_SIGNALS)
        losses.set_callback(self.journal.metrics.service.count_lost_line)

    def __call__(self, *events: Event) -> list[dict[str, Any]]:
        """Record ``events``; return the lines that this wrote."""
        start = self.stream.tell()
        self.journal.record(events)
        self.stream.seek(start)
        return [json.loads(line) for line in self.stream]

    def value(self, name: str, **labels: str) -> float:
        return self.registry.get_sample_value(name, labels) or 0.0


@pytest.fixture
def journal_output() -> JournalOutput:
    return JournalOutput()


def event(name: str, **fields: str | int | float | bool | None) -> Event:
    return Event(name, NOON, "GPU-a", "S-1", fields=fields)


class TestLogLines:
    def test_event_is_one_line_with_its_name_time_and_fields(self, journal_output: JournalOutput) -> None:
        (line,) = journal_output(
            Event("handover.granted", NOON, "GPU-a", "S-1", "plugin", {"grant": 3, "exception": None})
        )
        assert line == {
            "timestamp": "2025-12-31T12:00:00.250Z",
            "level": "info",
            "event": "handover.granted",
            "component": "service",
            "device": "GPU-a",
            "scrub_id": "S-1",
            "actor": "plugin",
            "grant": 3,
            "exception": None,
        }
        assert list(line)[:3] == ["timestamp", "level", "event"]

    def test_node_event_names_no_device(self, journal_output: JournalOutput) -> None:
        (line,) = journal_output(Event("service.started", NOON))
        assert "device" not in line
        assert not {"scrub", "scrub_id", "tenant"} & line.keys()

    def test_events_are_logged_in_order(self, journal_output: JournalOutput) -> None:
        names = ["scrub.started", "scrub.finished", "certificate.issued"]
        assert [line["event"] for line in journal_output(*(event(name) for name in names))] == names

    def test_unknown_event_name_is_logged(self, journal_output: JournalOutput) -> None:
        (line,) = journal_output(event("moon.rose", phase="full"))
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
            ("break-glass.started", "error"),
            ("break-glass.ended", "warning"),
            ("tenant.flagged", "error"),
            ("operator.reset", "warning"),
            ("baseline.accepted", "warning"),
            ("key.created", "warning"),
            ("residue.unexplained", "error"),
            ("audit.broken", "error"),
            ("audit.unverified", "warning"),
            ("baseline.recorded", "info"),
        ],
    )
    def test_each_event_is_logged_at_its_own_level(self, journal_output: JournalOutput, name: str, level: str) -> None:
        assert journal_output(event(name))[0]["level"] == level

    @pytest.mark.parametrize("kind", list(ErrorClass))
    def test_signal_is_logged_as_a_warning_unless_unrelated_to_device_health(
        self, journal_output: JournalOutput, kind: ErrorClass
    ) -> None:
        (line,) = journal_output(
            Event("health.errors-reported", NOON, "GPU-a", fields={"code": "xid-31", "class": kind.value, "new": 1})
        )
        harmless = kind in (ErrorClass.IGNORE, ErrorClass.APPLICATION)
        assert line["level"] == ("info" if harmless else "warning")
        assert line["class"] == kind.value

    def test_signal_without_a_class_is_logged_as_a_warning(self, journal_output: JournalOutput) -> None:
        assert journal_output(event("health.errors-reported", code="too-hot"))[0]["level"] == "warning"

    def test_debug_events_can_be_omitted(self) -> None:
        journal_output = JournalOutput(level="warning")
        assert [line["event"] for line in journal_output(event("scrub.started"), event("health.suspect"))] == [
            "health.suspect"
        ]

    def test_event_field_never_overwrites_a_standard_log_field(self, journal_output: JournalOutput) -> None:
        ours = dict.fromkeys(("event", "level", "timestamp", "device", "scrub_id", "actor", "component"), "x")
        (line,) = journal_output(event("odd.event", **ours, exc_info=True, traceback="x"))
        assert (line["event"], line["level"], line["device"], line["actor"]) == (
            "odd.event",
            "info",
            "GPU-a",
            "service",
        )
        assert {line[f"field_{name}"] for name in (*ours, "traceback")} == {"x"}
        assert line["field_exc_info"] is True
        assert "traceback" not in line

    def test_line_break_in_a_name_does_not_create_a_second_log_line(self, journal_output: JournalOutput) -> None:
        (line,) = journal_output(event("leftover.process.killed", command="sh\n{}\x1b[2J"))
        assert line["command"] == "sh\n{}\x1b[2J"


class TestLogLineContext:
    """A line contains the event's own fields and the engine's current operation (``LogContextTracer``)."""

    def test_missing_event_fields_are_taken_from_the_current_operation(self, journal_output: JournalOutput) -> None:
        with LogContextTracer().span("scrub", device="GPU-a", scrub_id="S-1", tenant="team-a"):
            (line,) = journal_output(Event("device.marked-dirty", NOON, "GPU-a"))
        assert (line["device"], line["scrub_id"], line["tenant"]) == ("GPU-a", "S-1", "team-a")

    def test_event_fields_take_precedence_over_the_current_operation(self, journal_output: JournalOutput) -> None:
        with LogContextTracer().span("device", device="GPU-a", scrub_id="S-1", tenant="team-b"):
            (line,) = journal_output(Event("scrub.started", NOON, "GPU-a", "S-2", fields={"tenant": "team-a"}))
        assert (line["scrub_id"], line["tenant"]) == ("S-2", "team-a")

    def test_event_explicitly_without_a_tenant_has_no_tenant(self, journal_output: JournalOutput) -> None:
        with LogContextTracer().span("device", device="GPU-a", tenant="team-b"):
            (line,) = journal_output(event("scrub.started", tenant=None))
        assert line["tenant"] is None

    @pytest.mark.parametrize("other", ["GPU-b", None])
    def test_event_of_another_device_or_the_node_takes_no_context_from_the_current_device(
        self, journal_output: JournalOutput, other: str | None
    ) -> None:
        with LogContextTracer().span("scrub", device="GPU-a", scrub_id="S-1", tenant="team-a"):
            node, own = journal_output(
                Event("certificate.voided", NOON, other), Event("device.marked-dirty", NOON, "GPU-a")
            )
        assert node.get("device") == other
        assert not {"scrub_id", "tenant"} & node.keys()
        assert own["tenant"] == "team-a"

    @pytest.mark.parametrize(
        "name", ["device.released", "health.quarantined", "certificate.voided", "unauthorized.use.detected"]
    )
    def test_requesting_tenant_is_not_named_in_findings_about_a_device(
        self, journal_output: JournalOutput, name: str
    ) -> None:
        with LogContextTracer().span("device", device="GPU-a", tenant="team-b"):
            found, refused = journal_output(Event(name, NOON, "GPU-a"), Event("handover.refused", NOON, "GPU-a"))
        assert "tenant" not in found
        assert refused["tenant"] == "team-b"

    def test_hand_over_of_several_devices_names_its_tenant_on_every_line(self, journal_output: JournalOutput) -> None:
        with LogContextTracer().span("hand-over") as span:
            span.set_attributes(tenant="team-b")
            lines = journal_output(Event("handover.refused", NOON), Event("handover.refused", NOON, "GPU-a"))
        assert [line["tenant"] for line in lines] == ["team-b", "team-b"]


class TestJournalMetrics:
    """The metric of each event is tested in test_metrics_events.py and related modules."""

    def test_event_is_logged_and_updates_its_metric(self, journal_output: JournalOutput) -> None:
        journal_output(event("policy.rejected", message="mine.yaml:2: no"))
        assert journal_output.value("scrubber_policy_rejected") == 1

    def test_scrub_record_updates_metrics_and_is_not_logged(self, journal_output: JournalOutput) -> None:
        journal_output.journal.record_scrub(scrub(memory(cleared_bytes=8192)))
        assert journal_output.value("scrubber_cleared_bytes_total") == 8192
        assert journal_output.stream.getvalue() == ""


@pytest.fixture(scope="module")
def long_lived() -> JournalOutput:
    return JournalOutput()


class TestJournalNeverFails:
    def test_closed_log_stream_is_counted_not_raised(self, journal_output: JournalOutput) -> None:
        journal_output.stream.close()
        journal_output.journal.record([event("leftover.process.killed"), event("leftover.process.killed")])
        assert journal_output.value("scrubber_log_lines_lost_total") == 2
        assert journal_output.value("scrubber_kills_total", target="leftover-process") == 2

    def test_full_disk_under_the_log_is_counted_not_raised(self) -> None:
        registry = CollectorRegistry()
        # Closing it fails as well.
        with contextlib.suppress(OSError), open("/dev/full", "w") as stream:
            losses = LostLineCounter()
            logger = make_logger("json", "info", stream, component="service", lost_lines=losses)
            journal = StructlogJournal(registry=registry, logger=logger, signals=NVIDIA_SIGNALS)
            losses.set_callback(journal.metrics.service.count_lost_line)
            journal.record([event("service.started")])
        lost = registry.get_sample_value("scrubber_log_lines_lost_total")
        assert lost == 1

    names = st.sampled_from(
        [
            *("handover.granted", "handover.refused", "scrub.finished", "health.quarantined"),
            *("health.errors-reported", "breaker.opened", "breaker.closed"),
        ]
    )
    values = st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.just("slow") | st.just(10**400)
    keys = (
        st.sampled_from(["seconds", "residue_bytes", "path", "kind", "outcome", "code", "cause"])
        | st.sampled_from(["class", "new", "tenant", "what"])
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
    def test_arbitrary_event_is_logged_without_loss(self, long_lived: JournalOutput, happened: Event) -> None:
        (line,) = long_lived(happened)
        assert line["event"] == happened.name
        assert long_lived.value("scrubber_log_lines_lost_total") == 0
        assert long_lived.journal.metrics.page.render()[1]


def test_journal_implements_the_journal_port(journal_output: JournalOutput) -> None:
    journal: Journal = journal_output.journal
    journal.record(())
    journal.record_scrub(scrub())
    assert journal_output.stream.getvalue() == ""
