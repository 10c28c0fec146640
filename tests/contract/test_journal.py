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
from prometheus_client.openmetrics.exposition import generate_latest
from structlog.typing import FilteringBoundLogger

from scrubber.adapters.journal import StructlogJournal, configure_logging
from scrubber.domain.errors import (
    Away,
    Held,
    InvalidRequest,
    LedgerFailure,
    NotReady,
    Quarantined,
    ScrubberError,
    Stuck,
)
from scrubber.domain.evidence import Occasion, Outcome, Path
from scrubber.domain.handover import HandOver
from scrubber.domain.policy import Enforcement, XidClass
from scrubber.ports import Event, Journal

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

    def series(self) -> dict[str, int]:
        """How many series each metric has."""
        return {family.name: len(family.samples) for family in self.registry.collect()}


def exposed(registry: CollectorRegistry) -> str:
    """The page that Prometheus reads."""
    return bytes(generate_latest(registry)).decode()  # type: ignore[no-untyped-call]


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
    def test_granted_and_refused_hand_overs_are_counted(self, told: Told) -> None:
        granted = event("handover.granted", kind=HandOver.SAME_TENANT.value, path=Path.SLOW.value)
        told(granted, granted, event("handover.refused", code=NotReady.code), event("handover.waiting"))
        labels = {"kind": "same-tenant", "path": "slow", "outcome": "granted"}
        assert told.value("scrubber_handovers_total", **labels) == 2
        refused = {"kind": "unknown", "path": "none", "outcome": "not-ready"}
        assert told.value("scrubber_handovers_total", **refused) == 1

    def test_how_long_a_start_waited_is_measured_by_path_and_outcome(self, told: Told) -> None:
        fast = event("handover.granted", kind=HandOver.SAME_POD.value, path=Path.FAST.value, seconds=0.004)
        told(fast, fast, event("handover.refused", code="scrubbing", seconds=25.0), event("handover.refused"))
        assert told.value("scrubber_handover_duration_seconds_count", path="fast", outcome="granted") == 2
        assert told.value("scrubber_handover_duration_seconds_sum", path="none", outcome="scrubbing") == 25.0
        at_most = {"path": "fast", "outcome": "granted"}
        assert told.value("scrubber_handover_duration_seconds_bucket", le="0.0025", **at_most) == 0
        assert told.value("scrubber_handover_duration_seconds_bucket", le="0.005", **at_most) == 2
        assert told.value("scrubber_handover_duration_seconds_count", path="none", outcome="other") == 0

    @pytest.mark.parametrize("error", [Away, Held, InvalidRequest, LedgerFailure, Quarantined, Stuck])
    def test_a_refusal_is_counted_under_the_code_of_its_error(self, told: Told, error: type[ScrubberError]) -> None:
        told(event("handover.refused", code=error.code))
        labels = {"kind": "unknown", "path": "none", "outcome": error.code}
        assert told.value("scrubber_handovers_total", **labels) == 1

    def test_the_ledger_and_the_abandoned_children_are_shown_as_they_were_told_last(self, told: Told) -> None:
        assert told.value("scrubber_ledger_ok") == 0
        told.journal.ledger(True)
        assert told.value("scrubber_ledger_ok") == 1
        told.journal.ledger(False)
        assert told.value("scrubber_ledger_ok") == 0
        for abandoned in (0, 2, 2, 3):
            told.journal.children(abandoned)
        assert told.value("scrubber_children_abandoned_total") == 3

    def test_a_scrub_is_counted_and_measured(self, told: Told) -> None:
        told(
            event(
                "scrub.finished",
                path=Path.SLOW.value,
                occasion=Occasion.RELEASE.value,
                outcome=Outcome.PASSED.value,
                seconds=20.0,
                residue_bytes=4096,
                cleared_bytes=8192,
                leftovers=2,
            )
        )
        labels = {"path": "slow", "occasion": "release", "outcome": "passed"}
        assert told.value("scrubber_scrubs_total", **labels) == 1
        assert told.value("scrubber_scrub_duration_seconds_sum", path="slow") == 20.0
        assert told.value("scrubber_scrub_duration_seconds_bucket", path="slow", le="10.0") == 0
        assert told.value("scrubber_scrub_duration_seconds_bucket", path="slow", le="30.0") == 1
        assert told.value("scrubber_residue_bytes_total") == 4096
        assert '# {scrub_id="S-1"} 20.0' in exposed(told.registry)

    def test_a_leftover_is_counted_when_it_is_ended(self, told: Told) -> None:
        told(event("leftover.ended", pid=17), event("leftover.ended", pid=18))
        assert told.value("scrubber_leftovers_ended_total") == 2

    @pytest.mark.parametrize(
        ("cause", "counted"),
        [
            ("xid-95", "xid"),
            ("xid-4294967295", "xid"),
            ("driver-stuck", "driver-stuck"),
            ("verification-failed", "verification-failed"),
            ("ecc-uncorrected", "ecc-uncorrected"),
            (Quarantined.code, "other"),
            ("never-heard-of", "other"),
            (None, "other"),
        ],
    )
    def test_a_quarantine_is_counted_by_the_class_of_its_cause(
        self, told: Told, cause: str | None, counted: str
    ) -> None:
        told(event("health.quarantined", cause=cause))
        assert told.value("scrubber_quarantines_total", cause_class=counted) == 1

    @pytest.mark.parametrize(
        ("use", "counted"), [("stranger", "stranger"), ("foreign-assignment", "foreign-assignment"), ("odd", "other")]
    )
    def test_use_without_a_grant_is_counted_by_its_kind(self, told: Told, use: str, counted: str) -> None:
        told(event("use.ungranted", use=use, pid=1))
        assert told.value("scrubber_ungranted_uses_total", use=counted) == 1

    def test_a_policy_that_is_refused_shows_until_one_is_accepted(self, told: Told) -> None:
        told(event("policy.rejected", sentence="mine.yaml:2: no"))
        assert told.value("scrubber_policy_rejected") == 1
        told(event("policy.accepted", changed=False))
        assert told.value("scrubber_policy_rejected") == 0

    def test_a_persons_quarantine_is_counted_once(self, told: Told) -> None:
        told(event("operator.quarantined", reason="noise"), event("health.quarantined", cause="operator"))
        assert told.value("scrubber_quarantines_total", cause_class="operator") == 1

    def test_each_device_shows_its_present_state_only(self, told: Told) -> None:
        told.journal.devices([("GPU-a", "clean", "healthy"), ("GPU-b", "dirty", "healthy")])
        told.journal.devices([("GPU-a", "in-use", "healthy")])
        assert told.value("scrubber_device_state", device="GPU-a", hygiene="in-use", health="healthy") == 1
        assert told.series()["scrubber_device_state"] == 1

    @pytest.mark.parametrize(
        ("code", "counted"),
        [
            ("xid-95", "95"),
            ("79", "79"),
            (31, "31"),
            ("xid-1", "1"),
            ("xid-200", "200"),
            ("xid-0", "other"),
            ("xid-201", "other"),
            ("xid-095", "other"),
            (0, "other"),
            (201, "other"),
            (-1, "other"),
            (10**400, "other"),
            ("xid-" + "9" * 5000, "other"),
        ],
    )
    def test_xids_are_counted_by_number_as_often_as_they_are_new(
        self, told: Told, code: str | int, counted: str
    ) -> None:
        signal = Event("health.signal", NOON, "GPU-a", fields={"code": code, "new": 3, "total": 40})
        told.journal.tell([signal, signal])
        assert told.value("scrubber_xids_total", code=counted) == 6
        assert (
            len([each for each in exposed(told.registry).splitlines() if each.startswith("scrubber_xids_total")]) == 1
        )

    @pytest.mark.parametrize(
        "fields",
        [
            {"code": "too-hot", "new": 1},
            {"code": True, "new": 1},
            {"code": None, "new": 1},
            {"code": "xid-95"},
            {"code": "xid-95", "new": 0},
            {"code": "xid-95", "new": -1},
            {"code": "xid-95", "new": float("nan")},
        ],
    )
    def test_what_is_no_xid_or_nothing_new_counts_none(self, told: Told, fields: dict[str, Any]) -> None:
        told(event("health.signal", **fields))
        assert told.series()["scrubber_xids"] == 0

    def test_a_quarantine_is_counted_for_the_tenant_who_had_the_device(self, told: Told) -> None:
        hit = event("health.quarantined", cause="xid-95", tenant_namespace="team-a")
        told(hit, hit, event("health.quarantined", cause="xid-95", tenant_namespace="team-b"))
        told(event("health.condemned", cause="xid-95"), event("health.healthy", tenant_namespace="team-b"))
        assert told.value("scrubber_tenant_quarantines_total", tenant_namespace="team-a") == 2
        assert told.value("scrubber_tenant_quarantines_total", tenant_namespace="team-b") == 1
        assert told.value("scrubber_quarantines_total", cause_class="xid") == 3
        told(event("health.condemned", cause="xid-95", tenant_namespace="team-b"))
        assert told.value("scrubber_tenant_quarantines_total", tenant_namespace="team-b") == 2

    @pytest.mark.parametrize("nobody", [{}, {"tenant_namespace": None}, {"tenant_namespace": ""}])
    def test_a_quarantine_while_nobody_had_the_device_is_nobodys(self, told: Told, nobody: dict[str, Any]) -> None:
        told(event("health.quarantined", cause="xid-95", **nobody))
        assert told.series()["scrubber_tenant_quarantines"] == 0

    def test_a_persons_quarantine_is_no_tenants(self, told: Told) -> None:
        told(
            event("operator.quarantined", reason="noise", tenant_namespace="team-a"),
            event("health.quarantined", cause="operator", tenant_namespace="team-a"),
        )
        assert told.series()["scrubber_tenant_quarantines"] == 0

    def test_the_first_tenants_are_counted_by_name_and_the_rest_together(self, told: Told) -> None:
        def hit(number: int) -> Event:
            return event("health.quarantined", cause="xid-95", tenant_namespace=f"team-{number}")

        told(*(hit(number) for number in range(100)), hit(0), hit(63), hit(64))
        assert told.value("scrubber_tenant_quarantines_total", tenant_namespace="team-0") == 2
        assert told.value("scrubber_tenant_quarantines_total", tenant_namespace="team-63") == 2
        assert told.value("scrubber_tenant_quarantines_total", tenant_namespace="other") == 37
        page = exposed(told.registry).splitlines()
        assert len([line for line in page if line.startswith("scrubber_tenant_quarantines_total")]) == 65

    def test_an_open_breaker_shows_until_it_is_closed(self, told: Told) -> None:
        def shown() -> tuple[float | None, float | None]:
            return (
                told.registry.get_sample_value("scrubber_breaker_open", {"what": "resets"}),
                told.registry.get_sample_value("scrubber_breaker_open", {"what": "soft"}),
            )

        assert shown() == (0, 0)
        told(event("breaker.opened", what="soft", sentence="2 of 8 devices."))
        assert shown() == (0, 1)
        told(event("breaker.opened", what="moon"), event("breaker.opened"))
        assert shown() == (0, 1)
        told(event("breaker.closed", what="soft"), event("breaker.opened", what="resets"))
        assert shown() == (1, 0)

    def test_a_broken_glass_shows_until_it_is_whole(self, told: Told) -> None:
        told.journal.enforcement([("GPU-a", "observe", True), ("GPU-b", "enforce", False)])
        assert told.value("scrubber_break_glass", device="GPU-a") == 1
        assert told.series()["scrubber_break_glass"] == 1
        told.journal.enforcement([("GPU-a", "enforce", False), ("GPU-b", "enforce", False)])
        assert told.series()["scrubber_break_glass"] == 0

    def test_devices_are_counted_by_how_they_are_judged(self, told: Told) -> None:
        def shown() -> dict[Enforcement, float | None]:
            sample = told.registry.get_sample_value
            return {mode: sample("scrubber_enforcement", {"mode": mode.value}) for mode in Enforcement}

        assert shown() == {Enforcement.ENFORCE: 0, Enforcement.OBSERVE: 0}
        told.journal.enforcement((f"GPU-{n}", "observe" if n == 0 else "enforce", False) for n in range(3))
        assert shown() == {Enforcement.ENFORCE: 2, Enforcement.OBSERVE: 1}
        told.journal.enforcement(())
        assert shown() == {Enforcement.ENFORCE: 0, Enforcement.OBSERVE: 0}

    def test_the_audits_head_is_a_number_that_anybody_can_compare_and_no_new_series_with_each_row(
        self, told: Told
    ) -> None:
        before = told.series()
        for sequence, digest in ((7, "00ff" * 16), (8, "3f9a5c0d71e2" + "9" * 52)):
            told.journal.audit_head(sequence, digest)
        assert told.value("scrubber_audit_head_sequence") == 8
        assert told.value("scrubber_audit_head_hash48") == 0x3F9A5C0D71E2
        assert told.series() == before

    def test_no_48_bits_of_a_hash_are_lost_on_the_way_through_a_float(self, told: Told) -> None:
        told.journal.audit_head(1, "f" * 64)
        assert int(told.value("scrubber_audit_head_hash48")) == 0xFFFFFFFFFFFF
        told.journal.audit_head(1, "fffffffffffe" + "f" * 52)
        assert int(told.value("scrubber_audit_head_hash48")) == 0xFFFFFFFFFFFE

    def test_a_trail_that_has_no_row_yet_has_a_head_of_zero(self, told: Told) -> None:
        told.journal.audit_head(5, "f" * 64)
        told.journal.audit_head(0, "")
        assert told.value("scrubber_audit_head_sequence") == 0
        assert told.value("scrubber_audit_head_hash48") == 0

    def test_the_key_that_signs_is_shown_by_its_name_and_it_is_one(self, told: Told) -> None:
        told.journal.key("sha256:00ff")
        assert told.value("scrubber_signing_key_info", key_id="sha256:00ff") == 1
        told.journal.key("sha256:ff00")
        assert told.value("scrubber_signing_key_info", key_id="sha256:ff00") == 1
        assert told.series()["scrubber_signing_key_info"] == 1

    def test_every_metric_is_there_before_anything_happened(self, told: Told) -> None:
        assert set(told.series()) == {
            "scrubber_audit_head_hash48",
            "scrubber_audit_head_sequence",
            "scrubber_break_glass",
            "scrubber_breaker_open",
            "scrubber_children_abandoned",
            "scrubber_device_state",
            "scrubber_enforcement",
            "scrubber_handover_duration_seconds",
            "scrubber_handovers",
            "scrubber_ledger_ok",
            "scrubber_leftovers_ended",
            "scrubber_log_lines_lost",
            "scrubber_policy_rejected",
            "scrubber_quarantines",
            "scrubber_residue_bytes",
            "scrubber_scrub_duration_seconds",
            "scrubber_scrubs",
            "scrubber_signing_key_info",
            "scrubber_tenant_quarantines",
            "scrubber_ungranted_uses",
            "scrubber_xids",
        }

    def test_no_event_can_make_labels_without_bound(self, told: Told) -> None:
        def storm(number: int) -> list[Event]:
            odd = f"word-{number}"
            return [
                event("handover.granted", kind=odd, path=odd),
                event("handover.refused", code=odd, kind=odd, seconds=1.0),
                event("scrub.finished", path=odd, occasion=odd, outcome=odd),
                event("health.quarantined", cause=odd),
                event("health.quarantined", cause=f"xid-{odd}"),
                event("health.signal", code=f"xid-{1000 + number}", new=1),
                event("breaker.opened", what=odd),
            ]

        told(*storm(0))
        once = told.series()
        told(*(each for number in range(1, 200) for each in storm(number)))
        assert told.series() == once


class TestItNeverFails:
    def test_a_closed_stream_is_counted_not_raised(self, told: Told) -> None:
        told.stream.close()
        told.journal.tell([event("leftover.ended"), event("leftover.ended")])
        assert told.value("scrubber_log_lines_lost_total") == 2
        assert told.value("scrubber_leftovers_ended_total") == 2

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
    def test_whatever_it_is_told(self, happened: Event) -> None:
        told = Told()
        (line,) = told(happened)
        assert line["event"] == happened.name
        assert told.value("scrubber_log_lines_lost_total") == 0
        exposed(told.registry)


def test_it_is_a_journal(told: Told) -> None:
    journal: Journal = told.journal
    journal.tell(())
    assert told.stream.getvalue() == ""
