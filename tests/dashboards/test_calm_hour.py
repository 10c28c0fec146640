"""An hour of healthy churn, with the unmodified rules in their own time: no alert fires."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

from tests.dashboards.hour import SCRAPE, Recorded, an_hour
from tests.dashboards.prometheus import POSSIBLE, promtool
from tests.pods import only_with
from tests.simulation.timeline import in_virtual_time

RULES: Final = Path(__file__).parents[2] / "dashboards" / "rules"
FIRED: Final = 'count by (alertname) (max_over_time(ALERTS{alertstate="firing"}[61m]))'


def written(recorded: Recorded) -> list[dict[str, str]]:
    """Return the series in promtool's format; the end of a series is marked as stale, as a scraper does it."""
    return [{"series": name, "values": _values(each, recorded.scrapes)} for name, each in recorded.series.items()]


def _values(values: Sequence[float | None], scrapes: int) -> str:
    words = []
    before: float | None = None
    for value in [*values, *[None] * (scrapes - len(values))]:
        words.append(repr(value) if value is not None else "_" if before is None else "stale")
        before = value
    return " ".join(words)


def fired(recorded: Recorded, tmp_path: Path, expected: Sequence[str]) -> str:
    """Return promtool's result for the assertion that exactly the alerts of ``expected`` have fired."""
    rules = [str(RULES / name) for name in ("recording.yaml", "alerts.yaml")]
    samples: list[dict[str, Any]] = [{"labels": f'{{alertname="{alert}"}}', "value": 1} for alert in expected]
    test = {
        "interval": f"{SCRAPE:g}s",
        "input_series": written(recorded),
        "promql_expr_test": [{"expr": FIRED, "eval_time": f"{recorded.scrapes * SCRAPE:g}s", "exp_samples": samples}],
    }
    path = tmp_path / "hour.yaml"
    path.write_text(yaml.safe_dump({"rule_files": rules, "evaluation_interval": f"{SCRAPE:g}s", "tests": [test]}))
    done = promtool("test", "rules", path)
    return "" if done.returncode == 0 else done.stdout


@pytest.fixture(scope="module")
def hour() -> Recorded:
    @in_virtual_time
    async def recorded() -> Recorded:
        return await an_hour(seed=1)

    return recorded()


@only_with(POSSIBLE)
def test_no_alert_fires_in_an_hour_of_pod_churn_and_daemon_restarts(hour: Recorded, tmp_path: Path) -> None:
    assert hour.grants > 60
    assert hour.restarts == 3
    assert fired(hour, tmp_path, []) == ""


@only_with(POSSIBLE)
def test_condemned_device_and_one_that_needs_an_operator_fire_their_alerts_in_a_calm_hour(
    hour: Recorded, tmp_path: Path
) -> None:
    waits = (
        'scrubber_quarantine_start_timestamp_seconds{job="scrubber",instance="node-1",device="gpu-waits",'
        'cause_class="row-remap-failure",recovery_method="operator"}'
    )
    ill = 'scrubber_device_state{job="scrubber",instance="node-1",device="gpu-ill",hygiene="dirty",health="condemned"}'
    with_both = replace(hour, series={**hour.series, waits: [0.0] * hour.scrapes, ill: [1.0] * hour.scrapes})
    assert fired(with_both, tmp_path, ["ScrubberDeviceCondemned", "ScrubberDeviceNeedsOperator"]) == ""
