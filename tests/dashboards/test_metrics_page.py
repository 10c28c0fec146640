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
def test_promtool_finds_nothing_to_say_of_a_live_page(node: str, job: str, story: Told) -> None:
    checked = promtool("check", "metrics", stdin=story.pages[node, job, TEXT])
    assert (checked.returncode, checked.stdout) == (0, "")


@only_with(POSSIBLE)
@pytest.mark.parametrize("job", JOBS)
def test_a_scraper_that_asks_for_openmetrics_is_given_it(job: str, story: Told) -> None:
    families = list(text_string_to_metric_families(story.pages["ill", job, OPENMETRICS]))  # type: ignore[no-untyped-call]
    assert families
    assert story.pages["ill", job, OPENMETRICS].endswith("# EOF\n")


@only_with(POSSIBLE)
@pytest.mark.parametrize("histogram", ["scrubber_scrub_duration_seconds", "scrubber_step_duration_seconds"])
def test_an_exemplar_leads_to_the_scrub_in_the_audit(histogram: str, story: Told) -> None:
    query = f'{histogram}_bucket{{instance="ill"}}'
    found = {each["scrub_id"] for each in story.prometheus.exemplars(query, story.began, story.ended)}
    assert found
    assert found <= story.known


@only_with(POSSIBLE)
def test_no_scrape_fails_while_a_driver_storms_and_devices_fall_ill(story: Told) -> None:
    found = story.prometheus.range('up{instance="ill"}', story.began, story.ended)
    assert {series.labels["job"] for series in found} == set(JOBS)
    assert {value for series in found for _, value in series.points} == {1.0}
