"""What a scraper is given by both daemons: in good form, with the scrubs' ids, and also while a driver storms."""

from __future__ import annotations

from typing import Final

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from tests.dashboards.prometheus import POSSIBLE, promtool
from tests.dashboards.stage import OPENMETRICS, PLUGIN, SERVICE, TEXT
from tests.dashboards.story import Told
from tests.pods import only_with

NODES: Final = ("calm", "ill")
JOBS: Final = (SERVICE, PLUGIN)


@only_with(POSSIBLE)
@pytest.mark.parametrize("job", JOBS)
@pytest.mark.parametrize("node", NODES)
def test_live_metrics_page_passes_promtool(node: str, job: str, story: Told) -> None:
    checked = promtool("check", "metrics", stdin=story.pages[node, job, TEXT])
    assert (checked.returncode, checked.stdout) == (0, "")


@only_with(POSSIBLE)
@pytest.mark.parametrize("job", JOBS)
def test_metrics_page_supports_openmetrics(job: str, story: Told) -> None:
    families = list(text_string_to_metric_families(story.pages["ill", job, OPENMETRICS]))  # type: ignore[no-untyped-call]
    assert families
    assert story.pages["ill", job, OPENMETRICS].endswith("# EOF\n")


@only_with(POSSIBLE)
@pytest.mark.parametrize("histogram", ["scrubber_scrub_duration_seconds", "scrubber_step_duration_seconds"])
def test_exemplar_names_a_scrub_of_the_audit_log(histogram: str, story: Told) -> None:
    query = f'{histogram}_bucket{{instance="ill"}}'
    found = {each["scrub_id"] for each in story.prometheus.exemplars(query, story.began, story.ended)}
    assert found
    assert found <= story.known


@only_with(POSSIBLE)
def test_no_scrape_fails_during_an_xid_storm_with_device_faults(story: Told) -> None:
    found = story.prometheus.range('up{instance="ill"}', story.began, story.ended)
    assert {series.labels["job"] for series in found} == set(JOBS)
    assert {value for series in found for _, value in series.points} == {1.0}
