"""One event, one line, one movement of the metrics; and telling never fails."""

import contextlib
import io
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from scrubber.adapters.nvidia.conditions import NVIDIA_SIGNALS
from scrubber.domain.signal_table import ErrorClass
from scrubber.observability.journal import StructlogJournal
from scrubber.observability.log_context import Binding
from scrubber.observability.log_sink import Losses
from scrubber.observability.logging import line_logger
from scrubber.ports.record import Event, Journal
from tests.measures import memory, scrub

NOON = 1_767_182_400.25  # 2025-12-31T12:00:00.25Z


class Told:
    """A journal, what it wrote and what it counted."""

    def __init__(self, level: str = "info") -> None:
        self.stream = io.StringIO()
        self.registry = CollectorRegistry()
        losses = Losses()
        logger = line_logger("json", level, self.stream, component="service", now=lambda: NOON, losses=losses)
        self.journal = StructlogJournal(registry=self.registry, logger=logger, signals=NVIDIA_SIGNALS)
        losses.counted_by(self.journal.metrics.service.line_lost)

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
            "component": "service",
            "device": "GPU-a",
            "scrub_id": "S-1",
            "actor": "plugin",
            "grant": 3,
            "exception": None,
        }
        assert list(line)[:3] == ["timestamp", "level", "event"]

    def test_an_event_of_the_node_names_no_device(self, told: Told) -> None:
        (line,) = told(Event("service.started", NOON))
        assert "device" not in line
        assert not {"scrub", "scrub_id", "tenant"} & line.keys()

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

    @pytest.mark.parametrize("kind", list(ErrorClass))
    def test_a_signal_is_loud_unless_it_says_nothing_about_the_device(self, told: Told, kind: ErrorClass) -> None:
        (line,) = told(Event("health.signal", NOON, "GPU-a", fields={"code": "xid-31", "class": kind.value, "new": 1}))
        harmless = kind in (ErrorClass.IGNORE, ErrorClass.APPLICATION)
        assert line["level"] == ("info" if harmless else "warning")
        assert line["class"] == kind.value

    def test_a_signal_that_names_no_class_is_loud(self, told: Told) -> None:
        assert told(event("health.signal", code="too-hot"))[0]["level"] == "warning"

    def test_quiet_events_can_be_left_out(self) -> None:
        told = Told(level="warning")
        assert [line["event"] for line in told(event("scrub.started"), event("health.suspect"))] == ["health.suspect"]

    def test_a_field_never_overwrites_what_the_line_says_itself(self, told: Told) -> None:
        ours = dict.fromkeys(("event", "level", "timestamp", "device", "scrub_id", "tenant", "actor", "component"), "x")
        (line,) = told(event("odd.event", **ours, exc_info=True, traceback="x"))
        assert (line["event"], line["level"], line["device"], line["actor"]) == (
            "odd.event",
            "info",
            "GPU-a",
            "service",
        )
        assert {line[f"field_{name}"] for name in (*ours, "traceback")} == {"x"}
        assert line["field_exc_info"] is True
        assert not {"tenant", "traceback"} & line.keys()

    def test_a_line_break_in_a_name_makes_no_second_line(self, told: Told) -> None:
        (line,) = told(event("leftover.ended", command="sh\n{}\x1b[2J"))
        assert line["command"] == "sh\n{}\x1b[2J"


class TestWhomALineIsAbout:
    """Beside what the event says itself, what the engine was doing (``Binding``) is on the line."""

    def test_an_event_s_tenant_is_called_as_on_every_line(self, told: Told) -> None:
        (line,) = told(event("health.quarantined", tenant_namespace="team-a"))
        assert line["tenant"] == "team-a"
        assert "tenant_namespace" not in line

    def test_what_the_event_does_not_say_is_what_was_being_done(self, told: Told) -> None:
        with Binding().span("scrub", device="GPU-a", scrub_id="S-1", tenant="team-a"):
            (line,) = told(Event("device.touched", NOON, "GPU-a"))
        assert (line["device"], line["scrub_id"], line["tenant"]) == ("GPU-a", "S-1", "team-a")

    def test_what_the_event_says_itself_wins(self, told: Told) -> None:
        with Binding().span("device", device="GPU-a", scrub_id="S-1", tenant="team-b"):
            (line,) = told(Event("scrub.started", NOON, "GPU-a", "S-2", fields={"tenant_namespace": "team-a"}))
        assert (line["scrub_id"], line["tenant"]) == ("S-2", "team-a")

    def test_an_event_that_is_of_nobody_stays_of_nobody(self, told: Told) -> None:
        with Binding().span("device", device="GPU-a", tenant="team-b"):
            (line,) = told(event("scrub.started", tenant_namespace=None))
        assert line["tenant"] is None

    @pytest.mark.parametrize("other", ["GPU-b", None])
    def test_a_line_about_another_device_or_the_node_takes_nothing_of_this_one(
        self, told: Told, other: str | None
    ) -> None:
        with Binding().span("scrub", device="GPU-a", scrub_id="S-1", tenant="team-a"):
            node, own = told(Event("certificate.voided", NOON, other), Event("device.touched", NOON, "GPU-a"))
        assert node.get("device") == other
        assert not {"scrub_id", "tenant"} & node.keys()
        assert own["tenant"] == "team-a"

    @pytest.mark.parametrize("name", ["device.released", "health.quarantined", "certificate.voided", "use.ungranted"])
    def test_who_asks_for_a_device_is_not_named_for_what_is_found_out_about_it(self, told: Told, name: str) -> None:
        with Binding().span("device", device="GPU-a", tenant="team-b"):
            found, refused = told(Event(name, NOON, "GPU-a"), Event("handover.refused", NOON, "GPU-a"))
        assert "tenant" not in found
        assert refused["tenant"] == "team-b"

    def test_a_hand_over_of_several_devices_has_its_tenant_on_the_line_of_each(self, told: Told) -> None:
        with Binding().span("hand-over") as span:
            span.note(tenant="team-b")
            lines = told(Event("handover.refused", NOON), Event("handover.refused", NOON, "GPU-a"))
        assert [line["tenant"] for line in lines] == ["team-b", "team-b"]


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
            losses = Losses()
            logger = line_logger("json", "info", stream, component="service", losses=losses)
            journal = StructlogJournal(registry=registry, logger=logger, signals=NVIDIA_SIGNALS)
            losses.counted_by(journal.metrics.service.line_lost)
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
