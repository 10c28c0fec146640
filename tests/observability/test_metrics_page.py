"""The metrics page: identical from both implementations, in both formats, and bounded for any input."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path as File

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client.core import Metric
from prometheus_client.exposition import generate_latest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parsed_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parsed_text

from scrubber.adapters.nvidia.conditions import NVIDIA_SIGNALS
from scrubber.domain.evidence import Outcome, PathKind, ScrubRecord, ScrubTrigger, Severity, Step, StepResult, Verdict
from scrubber.domain.record import ActiveWarning, BreakGlass, DeviceRecord
from scrubber.domain.states import Cause, Health, RecoveryMethod
from scrubber.observability.metrics.labels import REFUSAL_CODES, KnownCodes
from scrubber.ports.record import AuditHead, Event
from tests.measures import NOON, Measures, event, finding, memory, scrub, shown

OPENMETRICS = "application/openmetrics-text; version=1.0.0"
PAGE = File(__file__).parents[2] / "docs" / "metrics.md"
HOSTILE = 'a"b\\c\nd{e="f"} 1\n# EOF\n\x1b[2J\x00ü…'


def busy() -> Measures:
    """Return one of every metric, with hostile label values."""
    measures = Measures()
    record = DeviceRecord(
        HOSTILE,
        health=Health.QUARANTINED,
        cause=Cause(HOSTILE, HOSTILE, RecoveryMethod.RESET, 1.0),
        warnings=(ActiveWarning(HOSTILE, 1.0),),
        break_glass=BreakGlass(float("inf"), HOSTILE, HOSTILE),
    )
    measures.show(shown(HOSTILE, record), audit_head=AuditHead(1, "f" * 64), policy=(HOSTILE, HOSTILE))
    measures.metrics.record_scrub(scrub(memory(total_bytes=1, verified_bytes=1), device=HOSTILE))
    measures(
        Event("health.errors-reported", NOON, HOSTILE, fields={"code": "xid-95", "new": 1}),
        event("health.quarantined", cause=HOSTILE, tenant=HOSTILE),
        event("scrub.finished", path=HOSTILE, seconds=1.0),
    )
    return measures


def values(families: Iterable[Metric]) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    samples = (sample for family in families for sample in family.samples)
    return {(sample.name, frozenset(sample.labels.items())): sample.value for sample in samples}


def test_rendered_page_equals_the_client_library_output() -> None:
    measures = busy()
    library = generate_latest(measures.registry).decode()
    assert values(parsed_text(measures.page())) == values(parsed_text(library))
    heads = [sorted(line for line in page.splitlines() if line.startswith("#")) for page in (measures.page(), library)]
    assert heads[0] == heads[1]


def test_openmetrics_page_has_the_same_values_and_its_own_end_marker() -> None:
    measures = busy()
    page = measures.page(OPENMETRICS)
    assert page.endswith("# EOF\n")
    assert page.count("\n# EOF\n") == 1
    read = parsed_openmetrics(page)  # type: ignore[no-untyped-call]
    assert values(read) == values(parsed_text(measures.page()))


def test_label_value_cannot_create_a_new_line() -> None:
    lines = busy().page().splitlines()
    assert not any(line.startswith(("d{", "e=")) for line in lines)


def test_label_value_that_is_not_utf8_is_written_with_a_replacement() -> None:
    measures = Measures()
    measures.show(shown("GPU-\udc80"))
    measures(event("health.quarantined", cause="xid-95", tenant="team-\udc80"))
    assert 'device="GPU-?"' in measures.page()


@pytest.mark.parametrize("name", ["created"])
def test_page_contains_no_created_series(name: str) -> None:
    assert f"_{name}" not in re.sub(r"# .*", "", busy().page())


def bound(devices: int) -> int:
    """Return the documented maximum number of series for a node of so many devices."""
    found = re.search(r"at most ([\d,]+) series and (\d+) more for each device", PAGE.read_text())
    assert found is not None
    return int(found[1].replace(",", "")) + int(found[2]) * devices


def flood(measures: Measures, devices: int, tenants: int) -> None:
    """Use every label value in every place, and as many undefined ones."""
    words = ["odd-1", "odd-2", HOSTILE]
    ids = [f"GPU-{number}" for number in range(devices)]
    measures.show(
        *(
            shown(
                each,
                DeviceRecord(
                    each,
                    health=Health.QUARANTINED,
                    cause=Cause("xid-95", "", RecoveryMethod.RESET, 1.0),
                    warnings=tuple(ActiveWarning(code, 1.0) for code in sorted(NVIDIA_SIGNALS.classifications)[:32]),
                    break_glass=BreakGlass(1.0, "", ""),
                ),
            )
            for each in ids
        ),
        audit_head=AuditHead(1, "f" * 64),
        policy=("default", "digest"),
        child_starts=dict.fromkeys(words, 1),
    )
    for path in (*PathKind, *words):
        for outcome in (*Outcome, *words):
            for trigger in (*ScrubTrigger, *words):
                fields = {"path": str(path), "outcome": str(outcome), "trigger": str(trigger)}
                measures(event("scrub.finished", seconds=1.0, **fields))
            measures(event("handover.granted", path=str(path), kind=str(outcome), seconds=1.0))
    known = {code for _, _, code in KnownCodes(NVIDIA_SIGNALS).findings}
    for code in (*known, *REFUSAL_CODES, *NVIDIA_SIGNALS.classifications, *words):
        measures(event("handover.refused", code=code, seconds=1.0), event("health.quarantined", cause=code))
        for step in Step:
            for severity in Severity:
                for verdict in Verdict:
                    result = StepResult(step, verdict, 1.0, (finding(step, code, severity),), {"method": code})
                    measures.metrics.record_scrub(scrub(result, path=PathKind.FAST))
    for number in range(2 * tenants):
        measures(event("health.quarantined", cause="xid-95", tenant=f"team-{number}"))
    for device in (*ids, *(f"gone-{number}" for number in range(2 * devices))):
        steps = tuple(StepResult(step, Verdict.PASSED, 1.0) for step in Step if step is not Step.MEMORY)
        whole = memory(total_bytes=1, verified_bytes=1, cleared_bytes=1, clear_seconds=1.0)
        measures.metrics.record_scrub(scrub(whole, *steps, device=device))
        for xid in range(1, 40):
            measures(Event("health.errors-reported", NOON, device, fields={"code": xid, "new": 1}))
    for number in range(200):
        for status in ("OK", "UNAVAILABLE", "odd"):
            measures.metrics.rpc.on_call_finished(f"/a.Service/Method{number}", status, 1.0)
        measures.metrics.rpc.on_open_streams_changed(f"/a.Service/Watch{number}", 1)


def test_number_of_series_stays_within_the_documented_bound() -> None:
    measures = Measures()
    flood(measures, devices=256, tenants=64)
    once = measures.series()
    assert once <= bound(256)
    flood(measures, devices=256, tenants=64)
    assert measures.series() == once


def test_series_of_removed_devices_are_bounded() -> None:
    measures = Measures()
    for number in range(3000):
        measures.metrics.record_scrub(scrub(memory(), device=f"GPU-{number}"))
    measures.show(*(shown(f"GPU-{number}") for number in range(3000)))
    assert len(measures.labels("scrubber_last_scrub_step_duration_seconds")) == 1024


ANYTHING = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20) | st.just(10**400)
NEVER = Measures()


@settings(max_examples=60)
@given(
    st.sampled_from(list(Step)),
    st.sampled_from(list(Verdict)),
    st.floats(),
    st.dictionaries(
        st.sampled_from(["total_bytes", "verified_bytes", "cleared_bytes", "clear_seconds", "method"]), ANYTHING
    ),
    st.lists(st.text(max_size=20), max_size=3),
    st.text(max_size=200),
)
def test_arbitrary_scrub_record_is_counted_and_rendered(
    step: Step,
    verdict: Verdict,
    seconds: float,
    measured: dict[str, str | int | float | bool | None],
    codes: list[str],
    id: str,
) -> None:
    result = StepResult(step, verdict, seconds, tuple(finding(step, code) for code in codes), measured)
    NEVER.show(shown("GPU-a"))
    NEVER.metrics.record_scrub(
        ScrubRecord(id, "GPU-a", PathKind.SLOW, ScrubTrigger.CERTIFICATE_VOIDED, NOON, steps=(result,))
    )
    assert NEVER.page(OPENMETRICS).endswith("# EOF\n")


def test_metrics_page_is_a_wsgi_application() -> None:
    responses: list[str] = []
    measures = Measures()

    def start(status: str, headers: object) -> None:
        responses.append(status)

    environ = {"REQUEST_METHOD": "GET", "PATH_INFO": "/metrics", "HTTP_ACCEPT": OPENMETRICS}
    assert b"".join(measures.metrics.page(environ, start)).endswith(b"# EOF\n")
    assert b"".join(measures.metrics.page({**environ, "REQUEST_METHOD": "HEAD"}, start)) == b""
    assert b"".join(measures.metrics.page({**environ, "REQUEST_METHOD": "POST"}, start)) == b""
    assert responses == ["200 OK", "200 OK", "405 Method Not Allowed"]
