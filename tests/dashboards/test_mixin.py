"""The mixin evaluates to the committed dashboards and rules, with its own configuration."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

import _jsonnet
import yaml

from scripts.gen_rules import Objectives, prometheus_files

DASHBOARDS: Final = Path(__file__).parents[2] / "dashboards"


def evaluated(configuration: str = "{}") -> dict[str, Any]:
    """Return the fields of the mixin with ``configuration`` merged into its own."""
    mixin = f"(import '{DASHBOARDS / 'mixin.libsonnet'}') + {{ _config+:: {configuration} }}"
    text = f"local m = {mixin}; {{ boards: m.grafanaDashboards, rules: m.prometheusRules, alerts: m.prometheusAlerts }}"
    found: dict[str, Any] = json.loads(_jsonnet.evaluate_snippet("test", text))
    return found


def groups(files: tuple[str, ...], **options: Any) -> list[Any]:
    texts = prometheus_files(**options)
    return [group for name in files for group in yaml.safe_load(texts[name])["groups"]]


def test_mixin_has_the_committed_dashboards_and_rules() -> None:
    found = evaluated()
    assert found["boards"] == {
        f"scrubber-{path.name}": json.loads(path.read_text()) for path in DASHBOARDS.glob("*.json")
    }
    assert found["rules"]["groups"] == groups(("recording.yaml", "joins.yaml"))
    assert found["alerts"]["groups"] == groups(("alerts.yaml", "slo.yaml"))


def test_mixin_applies_its_configuration() -> None:
    found = evaluated("{ runbooks: 'https://x.example/pages/', objectives+: { handover: 0.95 } }")
    options = {"runbooks": "https://x.example/pages", "objectives": Objectives(handover=0.95)}
    assert found["rules"]["groups"] == groups(("recording.yaml", "joins.yaml"), **options)
    assert found["alerts"]["groups"] == groups(("alerts.yaml", "slo.yaml"), **options)
    (runbooks,) = (
        each for each in found["boards"]["scrubber-fleet.json"]["templating"]["list"] if each["name"] == "runbooks"
    )
    assert runbooks["query"] == "https://x.example/pages"
