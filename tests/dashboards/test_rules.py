"""The rules as Prometheus evaluates them, and a usable runbook for each alert.

``promtool test rules`` tests what the rules compute, with the files in ``dashboards/rules/tests``.
"""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from dashboards.queries import NOT_INITIALIZED_AT_ZERO
from scripts.gen_rules import INHIBITION, PROMETHEUS_RULE, RULES, main, prometheus_files, prometheus_rule
from scrubber.adapters.nvidia.conditions import NVIDIA_SIGNALS
from scrubber.cli.command_tree import app
from scrubber.cli.commands.history import parse_time
from scrubber.domain.evidence import PathKind as ScrubPath
from scrubber.domain.policy import Enforcement
from scrubber.domain.states import ADVERTISED, Health, Hygiene, RecoveryMethod
from scrubber.observability.metrics.labels import REFUSAL_CODES, KnownCodes
from scrubber.observability.registry.audit_events import validate_event_names
from scrubber.observability.registry.events import EVENTS
from scrubber.observability.registry.plugin_metrics import PLUGIN_METRICS
from scrubber.observability.registry.service_metrics import SERVICE_METRICS
from tests.dashboards.prometheus import POSSIBLE, promtool
from tests.pods import only_with

ROOT = Path(__file__).parents[2]
RUNBOOKS = ROOT / "docs" / "runbooks"
TRIALS = sorted((RULES / "tests").glob("*.yaml"))
SEVERITIES = {"critical", "warning", "info"}
SECTIONS = (
    "What it means",
    "See it",
    "What to do",
    "What not to do",
    "When to call hardware service",
    "A false alarm",
    "Why this threshold",
)
"""The sections of every runbook, in this order, so that readers find them quickly."""

_METRIC = re.compile(r"(?<![:\w])scrubber_[a-z0-9_]+")
_RECORDED = re.compile(r"\b[a-z_]+:scrubber_[a-z0-9_]+:[a-z0-9_]+")
_ADDRESS = "https://pages.example/runbooks"


def rules_of(name: str) -> list[dict[str, Any]]:
    (group,) = yaml.safe_load((RULES / name).read_text())["groups"]
    return list(group["rules"])


RECORDED: Mapping[str, str] = {
    name: " or ".join(rule["expr"] for rule in rules_of("recording.yaml") if rule["record"] == name)
    for name in [rule["record"] for rule in rules_of("recording.yaml")]
}
"""Recorded series; several rules can record one of them, with different labels."""
ALERTS: Mapping[str, dict[str, Any]] = {
    rule["alert"]: rule for name in ("alerts.yaml", "slo.yaml") for rule in rules_of(name)
}
PAGES: Mapping[str, str] = {path.stem: path.read_text() for path in RUNBOOKS.glob("*.md") if path.stem != "README"}
INDEX = (RUNBOOKS / "README.md").read_text()


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"^ *```{language}\n(.*?)^ *```$", page, re.MULTILINE | re.DOTALL)


def queries(page: str) -> list[str]:
    """Return the queries of a page, which are in blocks, separated by empty lines."""
    return [query.strip() for block in blocks(page, "promql") for query in block.split("\n\n")]


def metrics_in(text: str) -> set[str]:
    """Return names of metrics, as they are on a metrics page; ``_bucket`` and ``_count`` are of their histogram."""
    return {re.sub(r"_(bucket|count|sum)$", "", name) for name in _METRIC.findall(text)}


METRICS = {each.name: each for each in (*SERVICE_METRICS, *PLUGIN_METRICS)}


def labels_of(expression: str) -> set[str]:
    """Return the labels that an expression leaves: its own groupings and those of its recorded series."""
    texts = [expression, *(RECORDED[name] for name in RECORDED if name in expression)]
    groups = [group for text in texts for group in re.findall(r"\bby \(([^)]*)\)", text)]
    return {label.strip() for group in groups for label in group.split(",")} - {"le"}


# -- evaluation by Prometheus ------------------------------------------------------------------------------------------


@only_with(POSSIBLE)
def test_rules_with_and_without_runbook_addresses_pass_promtool(tmp_path: Path) -> None:
    written = []
    for runbooks in (None, _ADDRESS):
        for name, text in prometheus_files(runbooks).items():
            written.append(tmp_path / f"{'with' if runbooks else 'without'}-{name}")
            written[-1].write_text(text)
    done = promtool("check", "rules", "--lint=all", "--lint-fatal", *written)
    assert done.returncode == 0, done.stdout


@only_with(POSSIBLE)
@pytest.mark.parametrize("trial", TRIALS, ids=lambda path: path.stem)
def test_rules_pass_their_promtool_tests(trial: Path) -> None:
    done = promtool("test", "rules", trial)
    assert done.returncode == 0, done.stdout


@only_with(POSSIBLE)
def test_every_query_in_a_runbook_passes_promtool(tmp_path: Path) -> None:
    rules = [
        {"record": f"q:{page}:{number}", "expr": query}
        for page, text in sorted({**PAGES, "README": INDEX}.items())
        for number, query in enumerate(queries(text))
    ]
    assert len(rules) > len(PAGES)
    (tmp_path / "queries.yaml").write_text(yaml.safe_dump({"groups": [{"name": "pages", "rules": rules}]}))
    done = promtool("check", "rules", tmp_path / "queries.yaml")
    assert done.returncode == 0, done.stdout


# -- texts of alerts ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ALERTS)
def test_alert_has_severity_summary_description_and_runbook(name: str) -> None:
    alert = ALERTS[name]
    assert alert.keys() == {"alert", "expr", "for", "labels", "annotations"}
    assert alert["labels"].keys() == {"severity"}
    assert alert["labels"]["severity"] in SEVERITIES
    assert alert["annotations"].keys() == {"summary", "description", "command", "runbook_url"}
    assert len(re.sub(r"{{ (?:with|else|end).*?}}", "", alert["annotations"]["summary"])) < 120
    assert alert["annotations"]["runbook_url"] == f"docs/runbooks/{name}.md"


def test_severity_of_an_alert_is_that_of_its_section() -> None:
    """The sections are the lines of the rule of severities (docs/runbooks/README.md), in its order."""
    parts = re.split(r"^  # -- (\w+)(?:: .+)? -+$", (RULES / "alerts.yaml").read_text(), flags=re.MULTILINE)[1:]
    assert parts[::2] == ["critical", "critical", "warning", "info"]
    by_section = {
        name: severity
        for severity, text in zip(parts[::2], parts[1::2], strict=True)
        for name in re.findall(r"- alert: (\w+)", text)
    }
    assert by_section == {each["alert"]: each["labels"]["severity"] for each in rules_of("alerts.yaml")}


@pytest.mark.parametrize("name", ALERTS)
def test_command_of_an_alert_is_one_of_its_runbook_with_node_and_device_filled_in(name: str) -> None:
    command = ALERTS[name]["annotations"]["command"]
    filled = set(re.findall(r"\$labels\.(\w+)", command))
    assert filled <= {"instance", "device"}  # no label that a tenant could choose: the command is pasted into a shell
    assert "device" in filled or "device" not in labels_of(ALERTS[name]["expr"])
    typed = command.rpartition(") -- ")[2]
    typed = re.sub(r"{{ with .+ }}(.+){{ \. }}{{ end }}", r"\1NODE", typed)
    typed = typed.replace("{{ $labels.instance }}", "NODE").replace("{{ $labels.device }}", "DEVICE")
    assert typed in PAGES[name]
    assert "exec" not in command or "spec.nodeName={{ $labels.instance }}) -- scrubber " in command


@pytest.mark.parametrize("name", ALERTS)
def test_labels_in_the_text_of_an_alert_exist_on_its_series(name: str) -> None:
    alert = ALERTS[name]
    named = set(re.findall(r"\$labels\.(\w+)", json.dumps(alert["annotations"])))
    assert named <= labels_of(alert["expr"])


def test_every_alert_is_tested_as_firing_and_as_silent() -> None:
    tests = [test for path in TRIALS for test in yaml.safe_load(path.read_text())["tests"]]
    for name in ALERTS:
        tried: dict[bool, int] = {True: 0, False: 0}
        for each in tests:
            for case in each.get("promql_expr_test", []):
                covered = name in case["expr"] or any(name in sample["labels"] for sample in case["exp_samples"])
                tried[bool(case["exp_samples"])] += covered
            for case in each.get("alert_rule_test", []):
                tried[bool(case["exp_alerts"])] += case["alertname"] == name
        assert all(tried.values()), (name, tried)


def test_recorded_series_is_named_by_its_level_and_keeps_its_node_label() -> None:
    for name, expression in RECORDED.items():
        level, metric, operations = name.split(":")
        assert metric.startswith("scrubber_"), name
        assert operations, name
        assert "job" in labels_of(expression), name
        assert "cluster" in labels_of(expression), name
        assert level in {"cluster", "tenant"} or "instance" in labels_of(expression), name


def test_rules_and_runbooks_use_existing_metrics_only() -> None:
    expressions = [*RECORDED.values(), *(alert["expr"] for alert in ALERTS.values())]
    pages = [query for page in (*PAGES.values(), INDEX) for query in queries(page)]
    assert metrics_in("\n".join([*expressions, *pages])) <= METRICS.keys()


def test_rules_and_runbooks_use_existing_recorded_series_only() -> None:
    texts = [*(alert["expr"] for alert in ALERTS.values()), *PAGES.values(), INDEX]
    recorded = _RECORDED.findall("\n".join(texts))
    assert recorded
    assert set(recorded) <= RECORDED.keys()


def test_label_values_in_rules_exist_in_the_code() -> None:
    """Renaming a code would otherwise silence its alert."""
    selected: dict[str, set[str]] = {}
    for expression in (*RECORDED.values(), *(alert["expr"] for alert in ALERTS.values())):
        for label, words in re.findall(r'(\w+)(?:=~|!~|=)"([^"]+)"', expression):
            selected.setdefault(label, set()).update(words.split("|"))
    assert selected.pop("job") == {"scrubber", "scrubber-plugin"}
    assert selected.pop("child") == {"driver", "events", "walker", "zygote"}
    assert all(
        list(ROOT.glob(f"scrubber/adapters/**/{module}.py")) for module in ("driver", "events", "walker", "zygote")
    )
    assert selected.pop("cause_class") <= KnownCodes(NVIDIA_SIGNALS).causes
    assert selected.pop("recovery_method") <= {each.value for each in RecoveryMethod}
    assert selected.pop("health") <= {each.value for each in Health}
    assert selected.pop("enforcement") <= {each.value for each in Enforcement}
    assert selected.pop("path") <= {each.value for each in ScrubPath}
    assert selected.pop("outcome") == {"granted", "passed", "failed"}
    assert selected.pop("slo") == {"handover"}
    assert selected.pop("le") == {"10", "10.0"}
    assert selected.pop("state") <= {each.value for each in Health}
    assert not selected


def test_rule_reads_only_values_recorded_before_it_in_its_group() -> None:
    """A value that is recorded later, or in another group, would be one evaluation old."""
    for name in ("recording.yaml", "joins.yaml"):
        rules = rules_of(name)
        for number, rule in enumerate(rules):
            read = set(_RECORDED.findall(rule["expr"]))
            assert read <= {each["record"] for each in rules[:number]}, rule["record"]


def test_alert_about_a_guarantee_reads_no_recorded_value() -> None:
    names = ("ScrubberResidueAfterCertificate", "ScrubberVerificationFailed", "ScrubberUnauthorizedUse")
    assert [name for name in names if _RECORDED.search(ALERTS[name]["expr"])] == []


def test_runbooks_name_every_recorded_value_that_an_alert_reads() -> None:
    """Groups are evaluated at different moments, so the value is up to one evaluation old."""
    read = {name for alert in ALERTS.values() for name in _RECORDED.findall(alert["expr"])}
    section = INDEX.partition("### Delays")[2].partition("\n## ")[0]
    assert read == set(_RECORDED.findall(section))


def test_recorded_device_states_are_complete() -> None:
    shown = set(re.findall(r'"state", "([a-z-]+)", "", ""', RECORDED["instance:scrubber_devices:by_state"]))
    out = {each.value for each in Health if each not in ADVERTISED}
    assert shown == {each.value for each in Hygiene} | out


def test_runbook_on_waiting_hand_overs_names_existing_refusal_codes_only() -> None:
    codes = re.findall(r"^\d\. (`[^:]+):", PAGES["ScrubberHandoverSlow"], re.MULTILINE)
    covered = {code for line in codes for code in re.findall(r"`([a-z-]+)`", line)}
    assert len(covered) > 5
    assert covered <= REFUSAL_CODES | {"granted"}


# -- the PrometheusRule object -----------------------------------------------------------------------------------------


def test_prometheus_rule_object_contains_the_same_rules() -> None:
    assert PROMETHEUS_RULE.read_text() == prometheus_rule()
    groups = yaml.safe_load(prometheus_rule())["spec"]["groups"]
    assert [each["rules"] for each in groups] == [
        rules_of(name) for name in ("recording.yaml", "joins.yaml", "alerts.yaml", "slo.yaml")
    ]


def test_inhibition_rules_can_use_another_cluster_label(tmp_path: Path) -> None:
    assert main(["--cluster-label", "site", "--out", str(tmp_path)]) == 0
    before = yaml.safe_load(INHIBITION.read_text())["inhibit_rules"]
    after = yaml.safe_load((tmp_path / INHIBITION.name).read_text())["inhibit_rules"]
    assert [each["equal"][0] for each in before] == ["cluster"] * len(before)
    assert [each["equal"][0] for each in after] == ["site"] * len(before)


def test_runbook_address_option_writes_rules_with_addresses(tmp_path: Path) -> None:
    assert main(["--runbooks", f"{_ADDRESS}/", "--out", str(tmp_path)]) == 0
    for text in ((tmp_path / "alerts.yaml").read_text(), (tmp_path / PROMETHEUS_RULE.name).read_text()):
        addresses = [f"{_ADDRESS}/{each['alert']}.md" for each in rules_of("alerts.yaml")]
        assert re.findall(r"runbook_url: (\S+)", text)[: len(addresses)] == addresses


def test_objectives_of_the_service_levels_are_configurable(tmp_path: Path) -> None:
    assert main(["--handover-objective", "0.95", "--scrub-objective", "0.9", "--out", str(tmp_path)]) == 0
    for text in ((tmp_path / "recording.yaml").read_text(), (tmp_path / PROMETHEUS_RULE.name).read_text()):
        assert re.findall(r"\(1 - (0\.\d+)\)", text) == ["0.95", "0.9"]


@pytest.mark.parametrize("share", ["1", "0", "99", "many"])
def test_objective_that_is_no_share_is_refused(share: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--scrub-objective", share, "--out", "nowhere"])
    assert "is not a share between 0 and 1" in capsys.readouterr().err


def test_rules_in_the_tree_are_never_written_with_runbook_addresses_or_other_labels_or_objectives() -> None:
    for arguments in (["--runbooks", _ADDRESS], ["--cluster-label", "k8s_cluster"], ["--scrub-objective", "0.9"]):
        done = subprocess.run(
            [sys.executable, ROOT / "scripts" / "gen_rules.py", *arguments], capture_output=True, text=True, check=False
        )
        assert done.returncode == 2
        assert "these options need --out" in done.stderr


# -- the runbooks ------------------------------------------------------------------------------------------------------


def test_every_alert_has_a_runbook_and_every_runbook_an_alert() -> None:
    assert PAGES.keys() == ALERTS.keys()


@pytest.mark.parametrize("name", ALERTS)
def test_runbook_has_every_section_and_matches_its_rule(name: str) -> None:
    alert, lines = ALERTS[name], PAGES[name].splitlines()
    assert lines[0] == f"# {name}"
    assert lines[2].startswith(f"**{alert['labels']['severity']}**, for {alert['for']}")
    parts = re.split(r"^## (.+)$", PAGES[name], flags=re.MULTILINE)[1:]
    assert tuple(parts[::2]) == SECTIONS
    assert all(text.strip() for text in parts[1::2])
    assert queries(PAGES[name])


@pytest.mark.parametrize("name", ALERTS)
def test_runbook_has_the_same_log_query_for_loki_and_for_the_journal(name: str) -> None:
    (loki,) = blocks(PAGES[name], "logql")
    found = re.fullmatch(r'{namespace="scrubber-system",node_name="NODE"} \| json \| event=~"(.+)"\n', loki)
    assert found
    events = found[1].replace("\\\\", "\\")
    written = {event.name for event in EVENTS}
    assert all(any(re.fullmatch(each, event) for event in written) for each in events.split("|"))
    journal = f"""journalctl -u scrubber -u scrubber-plugin -o cat --since -2h | grep -E '"event": "({events})"'"""
    assert journal in PAGES[name]


def test_runbook_index_lists_every_alert_with_severity_in_the_order_of_the_rules() -> None:
    rows = re.findall(r"^\| \[(\w+)\]\((\w+)\.md\) \| (\w+) \| (\w+) \|", INDEX, re.MULTILINE)
    assert rows == [(name, name, alert["labels"]["severity"], alert["for"]) for name, alert in ALERTS.items()]


def commands_in(page: str) -> Iterator[str]:
    """Yield every scrubber command on a page, in its blocks and in its text."""
    yield from re.findall(r"`(scrubber [^`]+)`", page)
    for block in (*blocks(page, "sh"), *blocks(page, "console")):
        for line in block.splitlines():
            typed = line.strip().removeprefix("$ ").partition("  #")[0].strip()
            if typed.startswith("scrubber "):
                yield typed


@pytest.mark.parametrize("name", [*ALERTS, "README"])
def test_every_command_in_a_runbook_exists_with_its_flags(name: str) -> None:
    page = INDEX if name == "README" else PAGES[name]
    typed = list(commands_in(page))
    assert typed
    for line in typed:
        words = shlex.split(re.split(r" [|>]", line)[0])[1:]
        command: Any = typer.main.get_command(app)
        while hasattr(command, "get_command"):
            command = command.get_command(typer.Context(command), words.pop(0))
            assert command is not None, line
        if words or f"`{line}`" not in page:  # a command that is only mentioned lacks required arguments
            with command.make_context("scrubber", words):  # parsing reports every invalid or missing value
                pass
        for since in re.findall(r"--since (\S+)", line):
            parse_time(since, now=0.0)
        validate_event_names(re.findall(r"--event (\S+)", line))


def test_runbook_index_names_an_existing_panel_for_every_alert() -> None:
    named = re.findall(r"^\| \[(\w+)\].* \| (\w+): ([^|]+) \|$", INDEX, re.MULTILINE)
    assert [alert for alert, _, _ in named] == list(ALERTS)
    for alert, board, title in named:
        panels = json.loads((RULES.parent / f"{board.lower()}.json").read_text())["panels"]
        assert title in {panel["title"] for panel in panels}, alert


def test_metrics_named_in_the_text_of_runbooks_exist() -> None:
    assert metrics_in("\n".join((*PAGES.values(), INDEX))) <= METRICS.keys()


@pytest.mark.parametrize("name", [*ALERTS, "README"])
def test_query_in_a_runbook_uses_labels_that_its_metric_has(name: str) -> None:
    for query in queries(INDEX if name == "README" else PAGES[name]):
        metrics = metrics_in(query)
        if not metrics or ":" in query:  # a recorded series has the labels of its rule
            continue
        known = {"cluster", "job", "instance", "le"}.union(*(METRICS[metric].label_names for metric in metrics))
        queried_labels = set(re.findall(r"(\w+)(?:=~|!~|!=|=)\"", query)) | {
            label.strip() for group in re.findall(r"\bby \(([^)]*)\)", query) for label in group.split(",")
        }
        assert queried_labels <= known, query


def test_no_runbook_query_uses_the_rate_of_a_counter_not_initialized_at_zero() -> None:
    for page in (*PAGES.values(), INDEX):
        for query in queries(page):
            if not query.startswith("histogram_quantile"):
                counted = re.findall(r"\b(?:rate|increase)\((\w+)\{", query) + re.findall(
                    r"\b(?:rate|increase)\((\w+)\[", query
                )
                assert not NOT_INITIALIZED_AT_ZERO & {re.sub(r"_(bucket|count|sum)$", "", each) for each in counted}, (
                    query
                )


def test_log_events_checks_and_settings_named_in_a_runbook_exist() -> None:
    logged = {each.name for each in EVENTS}
    checks = "\n".join(path.read_text() for path in (ROOT / "scrubber" / "doctor").glob("*.py"))
    settings = set(dotted(yaml.safe_load((ROOT / "policies" / "default.yaml").read_text())))
    others = {"ledger.reserve", "audit.jsonl", "spec.nodeName"}
    seen: set[str] = set()
    for name, page in {**PAGES, "README": INDEX}.items():
        words = set(
            re.findall(r"(?<![\w./-])([a-z][a-zA-Z]*\.[a-z][a-zA-Z-]+)(?![\w/.(-])", re.sub(r"\]\([^)]*\)", "", page))
        )
        for word in words - others:
            assert word in settings | logged or word.endswith(".md"), (name, word)
        checks_named = re.findall(r"scrubber doctor +# (?:checks? )?([a-z, -]+)(?=:|$)", page, re.MULTILINE)
        checks_named += re.findall(r"checks? `([a-z-]+)`", page)
        for check in {each.strip() for text in checks_named for each in text.split(",")}:
            assert " " in check or f'"{check}"' in checks, (name, check)
        seen |= words
    assert {"audit.broken", "limits.handOver"} <= seen


def dotted(document: Mapping[str, Any], above: str = "") -> Iterator[str]:
    """Yield the settings of a policy, as ``section.key``."""
    for key, value in document.items():
        yield f"{above}{key}"
        if isinstance(value, Mapping):
            yield from dotted(value, f"{above}{key}.")


def test_links_in_runbooks_lead_to_existing_targets() -> None:
    for name, page in {**PAGES, "README": INDEX}.items():
        for target, _, anchor in (link.partition("#") for link in re.findall(r"\]\(([^)]+)\)", page)):
            found = (RUNBOOKS / target) if target else RUNBOOKS / f"{name}.md"
            assert found.exists(), (name, target)
            if anchor:
                heads = re.findall(r"^#+ (.+)$", found.read_text(), re.MULTILINE)
                assert anchor in {re.sub(r"[^\w -]", "", head.lower()).replace(" ", "-") for head in heads}, (
                    name,
                    anchor,
                )


def test_runbook_has_at_most_110_lines() -> None:
    for name, page in PAGES.items():
        assert len(page.splitlines()) <= 110, name


def test_alerting_rules_are_ordered_by_severity() -> None:
    rank = ["critical", "warning", "info"]
    assert all(
        rank.index(a) <= rank.index(b)
        for a, b in pairwise(each["labels"]["severity"] for each in rules_of("alerts.yaml"))
    )
