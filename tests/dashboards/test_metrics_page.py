"""The metrics pages of both daemons: well-formed, with the scrubs' ids, and also during a storm of XIDs."""

from __future__ import annotations

from typing import Final

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from tests.dashboards.prometheus import POSSIBLE, promtool
from tests.dashboards.running import SCRAPE
from tests.dashboards.scenario import FinishedScenario
from tests.dashboards.stage import OPENMETRICS, PLUGIN, SERVICE, TEXT
from tests.pods import only_with

NODES: Final = ("calm", "ill")
JOBS: Final = (SERVICE, PLUGIN)


@only_with(POSSIBLE)
@pytest.mark.parametrize("job", JOBS)
@pytest.mark.parametrize("node", NODES)
def test_live_metrics_page_passes_promtool(node: str, job: str, scenario: FinishedScenario) -> None:
    checked = promtool("check", "metrics", stdin=scenario.pages[node, job, TEXT])
    assert (checked.returncode, checked.stdout) == (0, "")


@only_with(POSSIBLE)
@pytest.mark.parametrize("job", JOBS)
def test_metrics_page_supports_openmetrics(job: str, scenario: FinishedScenario) -> None:
    families = list(text_string_to_metric_families(scenario.pages["ill", job, OPENMETRICS]))  # type: ignore[no-untyped-call]
    assert families
    assert scenario.pages["ill", job, OPENMETRICS].endswith("# EOF\n")


@only_with(POSSIBLE)
@pytest.mark.parametrize("histogram", ["scrubber_scrub_duration_seconds", "scrubber_step_duration_seconds"])
def test_exemplar_names_a_scrub_of_the_audit_log(histogram: str, scenario: FinishedScenario) -> None:
    query = f'{histogram}_bucket{{instance="ill"}}'
    found = {each["scrub_id"] for each in scenario.prometheus.exemplars(query, scenario.began, scenario.ended)}
    assert found
    assert found <= scenario.known


@only_with(POSSIBLE)
def test_no_scrape_fails_during_an_xid_storm_with_device_faults(scenario: FinishedScenario) -> None:
    """A scrape that lasts as long as Prometheus waits is the machine's: other tests compute beside this one."""
    prometheus, began, ended = scenario.prometheus, scenario.began, scenario.ended
    up = prometheus.range('up{instance="ill"}', began, ended)
    assert {series.labels["job"] for series in up} == set(JOBS)
    durations = prometheus.range('scrape_duration_seconds{instance="ill"}', began, ended)
    lasted = {(series.labels["job"], at): seconds for series in durations for at, seconds in series.points}
    failed = [(series.labels["job"], at) for series in up for at, value in series.points if value != 1.0]
    assert [each for each in failed if lasted[each] < SCRAPE] == []
    assert len(failed) < sum(len(series.points) for series in up) / 2
