"""Every alert fires for its fault, on the node where it happened, and no other alert fires.

The scenario holds each fault until its alert fires. The duration of an alert, when it is inhibited and when it resolves
are tested by promtool (``test_rules.py``); here the metrics are the daemons' own.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final

import pytest
import yaml

from tests.dashboards.faster import SECONDS, faster
from tests.dashboards.prometheus import POSSIBLE
from tests.dashboards.running import Prometheus
from tests.dashboards.scenario import RULES, FinishedScenario, alerts_of_outage
from tests.dashboards.stage import FULL_DISKS
from tests.pods import only_with

HAPPENS_ON: Final[Mapping[str, str]] = {
    "ScrubberVerificationFailed": "ill",
    "ScrubberDriverTimeout": "ill",
    "ScrubberDeviceCondemned": "ill",
    "ScrubberDeviceNeedsOperator": "ill",
    "ScrubberQuarantineRatioHigh": "ill",
    "ScrubberTenantCausesQuarantines": "",  # of all nodes
    "ScrubberResidueAfterCertificate": "strict",
    "ScrubberUnauthorizedUse": "strict",
    "ScrubberDeviceHeld": "strict",
    "ScrubberBreakerOpen": "strict",
    "ScrubberBreakGlassActive": "ill",
    "ScrubberChildProcessRestarts": "ill",
    "ScrubberFastPathRatioLow": "strict",
    "ScrubberPolicyRejected": "strict",
    "ScrubberObserveOnly": "strict",
    "ScrubberScrubSlow": "slow",
    "ScrubberHandoverSlow": "slow",
    "ScrubberAuditUnverified": "slow",
    "ScrubberAuditBroken": "slow",
    "ScrubberAuditTruncated": "slow",
    "ScrubberLedgerFailing": "cut",
    "ScrubberNodeYielded": "cut",
    "ScrubberAgentsPaused": "cut",
    "ScrubberServiceDown": "cut",
    "ScrubberPluginDown": "cut",
    "ScrubberPluginNotRegistered": "cut",
    "ScrubberKubeletUntrusted": "cut",
    "ScrubberNodeDown": "cut",
}
"""Alert → the node of the scenario on which its fault happens."""


BESIDES: Final = {
    *(("ScrubberScrubSlow", node) for node in ("calm", "cut", "ill", "strict")),
    ("ScrubberAuditUnverified", "cut"),
}
"""Also true: clearing is made slow on "strict", so that starts have to wait for it, and a busy machine makes it slow on all
nodes; on "cut" the service is away so often that a busy machine may not verify the audit log for some seconds."""

RESOLVED: Final = (
    *("ScrubberBreakGlassActive", "ScrubberDeviceCondemned", "ScrubberDriverTimeout", "ScrubberQuarantineRatioHigh"),
    "ScrubberDeviceNeedsOperator",
    *("ScrubberDeviceHeld", "ScrubberNodeYielded", "ScrubberAgentsPaused"),
    *("ScrubberServiceDown", "ScrubberPluginDown", "ScrubberNodeDown", "ScrubberPluginNotRegistered"),
    *("ScrubberKubeletUntrusted", "ScrubberLedgerFailing", "ScrubberAuditUnverified"),
)
"""What the scenario repairs long before it ends. Other alerts cover an hour or a day, or last."""


def firing(story: FinishedScenario, *, at_the_end: bool = False) -> set[tuple[str, str]]:
    """Return (alert, node) of every alert that fired in the scenario, or that fires at its end."""
    window = f"[{story.ended - story.began:.0f}s]"
    firing = 'ALERTS{alertstate="firing"}'
    query = f"group by (alertname, instance) ({firing if at_the_end else f'count_over_time({firing}{window})'})"
    found = story.prometheus.at(query, story.ended)
    return {(each.labels["alertname"], each.labels.get("instance", "")) for each in found}


def alerts() -> list[str]:
    """Return every alert of the rules, except one that cannot be produced on this machine, which is reported."""
    groups = yaml.safe_load(RULES[-1].read_text())["groups"]
    names = [rule["alert"] for group in groups for rule in group["rules"]]
    return [name for name in names if FULL_DISKS or name != "ScrubberLedgerFailing"]


@only_with(POSSIBLE)
@pytest.mark.parametrize("alert", alerts())
def test_alert_fires_for_the_node_with_the_fault(alert: str, scenario: FinishedScenario) -> None:
    assert (alert, HAPPENS_ON[alert]) in firing(scenario)


@only_with(POSSIBLE)
def test_no_alert_fires_for_a_healthy_node_whose_daemons_are_restarted(scenario: FinishedScenario) -> None:
    assert {each for each in firing(scenario) if each[1] == "calm"} <= BESIDES | scenario.outage_alerts()
    granted = scenario.prometheus.at('sum(scrubber_handovers_total{instance="calm",outcome="granted"})', scenario.ended)
    assert granted[0].points[0][1] > 0


@only_with(POSSIBLE)
def test_no_alert_fires_without_its_fault(scenario: FinishedScenario) -> None:
    assert firing(scenario) <= {*HAPPENS_ON.items()} | BESIDES | scenario.outage_alerts()


@only_with(POSSIBLE)
@pytest.mark.parametrize("alert", RESOLVED)
def test_alert_ends_when_its_fault_is_repaired(alert: str, scenario: FinishedScenario) -> None:
    assert (alert, HAPPENS_ON[alert]) not in firing(scenario, at_the_end=True)


@pytest.mark.parametrize(
    ("seconds", "alerts"),
    [(0.0, set()), (12.0, set()), (12.1, {"ScrubberServiceDown", "ScrubberPluginDown"})],
)
def test_alert_about_a_restarted_daemon_is_right_only_if_the_restart_took_as_long_as_the_rule_waits(
    seconds: float, alerts: set[str]
) -> None:
    """A rule with another duration fails here: the tolerance must follow it."""
    assert alerts_of_outage(seconds) == alerts
    rules = {
        rule["alert"]: rule["for"]
        for group in yaml.safe_load(RULES[-1].read_text())["groups"]
        for rule in group["rules"]
        if rule["alert"] in ("ScrubberServiceDown", "ScrubberPluginDown")
    }
    assert set(rules.values()) == {"2m"}


def test_outage_of_one_node_excuses_no_other_node(tmp_path: Path) -> None:
    story = FinishedScenario(
        Prometheus(tmp_path, {}, []),
        began=0.0,
        ended=1.0,
        device="sim-0",
        pages={},
        known=frozenset(),
        outages={"calm": 30.0, "slow": 5.0},
    )
    assert story.outage_alerts() == {("ScrubberServiceDown", "calm"), ("ScrubberPluginDown", "calm")}


def test_accelerated_rules_differ_from_the_rules_only_in_their_durations(tmp_path: Path) -> None:
    assert sorted(SECONDS.values()) == list(SECONDS.values())
    for rules in RULES:
        quick = yaml.safe_load(faster(rules, tmp_path).read_text())
        for group, was in zip(quick["groups"], yaml.safe_load(rules.read_text())["groups"], strict=True):
            for rule, before in zip(group["rules"], was["rules"], strict=True):
                kept = {key: value for key, value in before.items() if key not in ("expr", "for")}
                assert {key: value for key, value in rule.items() if key not in ("expr", "for")} == kept


def test_duration_without_an_accelerated_counterpart_is_refused(tmp_path: Path) -> None:
    odd = tmp_path / "odd.yaml"
    odd.write_text("groups:\n- name: odd\n  rules:\n  - record: a:b\n    expr: rate(x_total[47m])\n")
    (tmp_path / "into").mkdir()
    with pytest.raises(ValueError, match="47m"):
        faster(odd, tmp_path / "into")
