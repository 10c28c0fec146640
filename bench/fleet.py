"""Measures what the queries of the dashboards and rules cost for a fleet, in a real Prometheus.

    python -m bench.fleet                            # 1,000 nodes with 8 devices each, a range of two hours; takes minutes
    python -m bench.fleet --nodes 50                 # a trial; writes nothing
    python -m bench.fleet --scrape 15                # four times as many samples: the recorded run, with about 12 GiB of memory

The series are those of real services: hours of a node in virtual time (:mod:`tests.dashboards.hour`), with the pages of the
service's and the plugin's own registries at each scrape. The results of the recording rules are
computed by Prometheus from these series. Both are then stored once for each node of the fleet, with its name.

Metrics that no query reads exist at the end of the range only. Queries are those that Grafana sends for the fleet
dashboard with everything selected, and the expressions of all rules. The reference is ``sum(up)``. Times are CPU time of
Prometheus, the mean of several runs, with the transfer of the result: other work on the machine does not change them much.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

import promql_parser as promql
import yaml
from prometheus_client import CollectorRegistry

from bench.machine import describe_machine
from bench.remote_write import STALE, RemoteWriter, encode_series
from plugin.metrics import PluginMetrics
from scrubber.adapters.nvidia.conditions import NVIDIA_SIGNALS
from scrubber.observability.metrics.recorder import MetricsRecorder
from tests.dashboards.hour import SCRAPE, an_hour
from tests.dashboards.prometheus import binaries
from tests.dashboards.running import Prometheus
from tests.simulation.timeline import in_virtual_time

__all__ = ["GROUP_INTERVAL", "RESULTS", "Query", "fleet_queries", "node_templates", "rule_queries"]

ROOT: Final = Path(__file__).parents[1]
RESULTS: Final = ROOT / "bench" / "results" / "fleet.json"
RULES: Final = tuple(ROOT / "dashboards" / "rules" / f"{name}.yaml" for name in ("recording", "joins", "alerts", "slo"))

GROUP_INTERVAL: Final = 60.0
"""Seconds between two evaluations of a group of rules: Prometheus' default."""

_TEMPLATES: Final = 1
_FIRST_TEMPLATE: Final = 9000
_SLICE: Final = 1800
"""Seconds of data in one message. Prometheus accepts no sample that is an hour older than the newest one."""
_PRESENT: Final = 300.0
"""Seconds at the end of the range in which every series exists."""
_RUNS: Final = 10
_ENOUGH: Final = 0.3
"""Seconds of CPU time after which a query is not repeated; else it is run :data:`_RUNS` times."""
_DEADLINE: Final = 600.0

Labels = tuple[tuple[str, str], ...]
Points = list[tuple[float, float]]
Template = dict[Labels, Points]
"""Series of one node; times are seconds since the epoch."""

_SERIES: Final = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


@dataclass(frozen=True, slots=True)
class Query:
    """A query of the fleet dashboard, or the expression of a rule.

    Attributes:
        source: its panel, or its group of rules.
        name: of the query in the panel (``A``), or of the rule.
        over_range: evaluated at each point of the range, as for a graph.
    """

    source: str
    name: str
    text: str
    over_range: bool = False


@dataclass(frozen=True, slots=True)
class Cost:
    """What a query cost: CPU seconds, their ratio to ``sum(up)``, the samples that it read, the series of its result."""

    source: str
    name: str
    over_range: bool
    seconds: float
    ratio: float
    samples: int
    series: int


@dataclass(slots=True)
class Result:
    """The results of one run."""

    nodes: int
    devices: int
    hours: float
    scrape_seconds: float
    series: int
    series_of_a_node: Mapping[str, int]
    sum_up_seconds: float
    panels: list[Cost] = field(default_factory=list)
    rules: list[Cost] = field(default_factory=list)
    groups: dict[str, float] = field(default_factory=dict)
    prometheus: str = ""
    machine: Mapping[str, object] = field(default_factory=dict)


def name_of(number: int) -> str:
    """Return the name of a node; all have the same length."""
    return f"node-{number:04}"


# -- queries -----------------------------------------------------------------------------------------------------------


def fleet_queries(*, hours: float, scrape: float) -> Iterator[Query]:
    """Yield the queries that the fleet dashboard sends with everything selected, annotations included."""
    board = json.loads((ROOT / "dashboards" / "fleet.json").read_text())
    values = {
        "cluster": ".*",
        "job": ".+",
        "instance": ".+",
        "__range": f"{hours * 3600:.0f}s",
        "__rate_interval": f"{4 * scrape:.0f}s",
        "__interval": f"{scrape:.0f}s",
        "__interval_ms": f"{scrape * 1000:.0f}",
    }

    def sent(text: str) -> str:
        return re.sub(r"\$\{?(\w+)(?::\w+)?\}?", lambda found: values[found[1]], text)

    for panel in board["panels"]:
        for target in panel.get("targets", ()):
            yield Query(panel["title"], target["refId"], sent(target["expr"]), over_range=not target.get("instant"))
    for each in board["annotations"]["list"]:
        if "expr" in each:
            yield Query("Annotations", each["name"], sent(each["expr"]), over_range=True)


def rule_queries() -> Iterator[Query]:
    """Yield the expressions of all rules, in the order of their evaluation."""
    for path in RULES:
        for group in yaml.safe_load(path.read_text())["groups"]:
            for rule in group["rules"]:
                yield Query(group["name"], rule.get("record") or rule["alert"], rule["expr"])


def selected_metrics(queries: Sequence[Query]) -> frozenset[str]:
    """Return the names of the metrics that the queries read."""
    found: set[str] = set()

    def keep(node: promql.Expr) -> bool:
        if isinstance(node, promql.VectorSelector) and node.name:
            found.add(node.name)
        return True

    for each in queries:
        promql.walk(promql.parse(each.text), keep)
    return frozenset(found)


# -- series ------------------------------------------------------------------------------------------------------------


def constant_series(instance: str, now: float) -> dict[Labels, float]:
    """Return the series of a service that the simulated node does not have, among others, and those of a plugin."""
    service = CollectorRegistry()
    recorder = MetricsRecorder(service, NVIDIA_SIGNALS)
    recorder.service.set_audit_result(intact=True, at=now)
    recorder.service.set_signing_key("0123456789abcdef")
    for method in ("Prepare", "Watch", "ListDevices", "GetStatus"):
        recorder.rpc.on_call_finished(f"/scrubber.v1.Plugin/{method}", "OK", 0.01)
    registry = CollectorRegistry()
    metrics = PluginMetrics(registry, dict)
    metrics.on_service_status(up=True)
    metrics.on_registration_attempt("nvidia.com/gpu", "push", "ok")
    metrics.on_registration_status("nvidia.com/gpu", registered=True)
    for method in ("Allocate", "PreStartContainer", "GetPreferredAllocation"):
        metrics.on_call_finished(method, "OK", 0.01)
    return {
        _key(sample.name, sample.labels | {"job": job, "instance": instance}): sample.value
        for job, each in (("scrubber", service), ("scrubber-plugin", registry))
        for family in each.collect()
        for sample in family.samples
    }


def node_templates(*, devices: int, hours: float, scrape: float, end: float) -> list[Template]:
    """Return the series of different nodes, each with hours of pods, faults and restarts."""
    began, every = end - hours * 3600, round(scrape / SCRAPE)
    return [_template(number, devices, hours, began, every) for number in range(_TEMPLATES)]


def _template(number: int, devices: int, hours: float, began: float, every: int) -> Template:
    instance = name_of(_FIRST_TEMPLATE + number)
    recorded = in_virtual_time(an_hour)(seed=number + 1, devices=devices, hours=hours)
    found: Template = {}
    for series, values in recorded.series.items():
        name, _, rest = series.partition("{")
        labels = dict(_SERIES.findall(rest)) | {"instance": instance}
        if "device" in labels:
            labels["device"] = f"GPU-{instance}-{labels['device']}"
        origin = began if name.endswith("_timestamp_seconds") else 0.0
        points: Points = []
        for at, value in list(enumerate(values))[::every]:
            if value is not None:
                points.append((began + at * SCRAPE, value + origin))
            elif points and not math.isnan(points[-1][1]):
                points.append((began + at * SCRAPE, STALE))
        found[_key(name, labels)] = points
    times = [began + at * SCRAPE for at in range(0, recorded.scrapes, every)]
    for key, value in constant_series(instance, times[-1]).items():
        found.setdefault(key, [(at, value) for at in times])
    return found


def _key(name: str, labels: Mapping[str, str]) -> Labels:
    return tuple(sorted({**labels, "__name__": name}.items()))


def _message(template: Template, start: float, end: float) -> bytes:
    """Return the samples of ``start`` < time ≤ ``end``."""
    return b"".join(
        encode_series(dict(labels), ((round(at * 1000), value) for at, value in inside))
        for labels, points in template.items()
        if (inside := [(at, value) for at, value in points if start < at <= end])
    )


def _slices(start: float, end: float) -> Iterator[tuple[float, float]]:
    at = start - 1
    while at < end:
        yield at, min(at + _SLICE, end)
        at += _SLICE


# -- Prometheus --------------------------------------------------------------------------------------------------------


class _Server(Prometheus):
    """A Prometheus that only stores what is written to it, also what is hours older than its newest sample."""

    def __init__(self, directory: Path) -> None:
        options = ("--web.enable-remote-write-receiver", f"--query.timeout={_DEADLINE:.0f}s", "--log.level=warn")
        super().__init__(directory, {}, [], options=options, deadline=_DEADLINE)

    def _configuration(self) -> dict[str, Any]:
        return super()._configuration() | {"storage": {"tsdb": {"out_of_order_time_window": "2d"}}}

    def evaluate(self, query: Query, start: float, end: float, step: float) -> tuple[float, int, int]:
        """Return seconds of CPU time, the samples that it read, and the number of series of its result."""
        spent, runs, samples, series = 0.0, 0, 0, 0
        while runs < _RUNS and spent < _ENOUGH:
            before = self._cpu_seconds()
            samples, series = self._evaluate_once(query, start, end, step)
            spent += self._cpu_seconds() - before
            runs += 1
        return spent / runs, samples, series

    def _evaluate_once(self, query: Query, start: float, end: float, step: float) -> tuple[int, int]:
        if query.over_range:
            data = self._query("query_range", query=query.text, start=start, end=end, step=step, stats="all")
        else:
            data = self._query("query", query=query.text, time=end, stats="all")
        return data["stats"]["samples"]["totalQueryableSamples"], len(data["result"])

    def _cpu_seconds(self) -> float:
        threads = Path(f"/proc/{self.pid}/task").glob("*/schedstat")
        return sum(int(each.read_text().split()[0]) for each in threads) / 1e9


def _add_recorded(templates: Sequence[Template], start: float, end: float, directory: Path) -> Template:
    """Add the results of the rules for each template; return those without a node."""
    common: Template = {}
    with _Server(directory) as server:
        writer = RemoteWriter(server.port, deadline=_DEADLINE)
        for a, b in _slices(start, end):
            for template in templates:
                writer.send(_message(template, a, b))
        by_instance = {name_of(_FIRST_TEMPLATE + number): each for number, each in enumerate(templates)}
        for path in RULES:
            for group in yaml.safe_load(path.read_text())["groups"]:
                for rule in group["rules"]:
                    new: Template = {}
                    for labels, points in _rule_results(server, rule, start, end):
                        new[labels] = points
                        by_instance.get(dict(labels).get("instance", ""), common)[labels] = points
                    for a, b in _slices(start, end):
                        if message := _message(new, a, b):
                            writer.send(message)
        writer.close()
    return common


def _rule_results(
    server: _Server, rule: Mapping[str, Any], start: float, end: float
) -> Iterator[tuple[Labels, Points]]:
    for series in server.range(rule["expr"], start, end, GROUP_INTERVAL):
        labels = dict(series.labels) | rule.get("labels", {})
        labels.pop("__name__", None)
        if "record" in rule:
            yield _key(rule["record"], labels), list(series.points)
        else:
            labels["alertname"] = rule["alert"]
            begun = series.points[0][0]
            yield _key("ALERTS_FOR_STATE", labels), [(at, begun) for at, _ in series.points]
            yield _key("ALERTS", labels | {"alertstate": "firing"}), [(at, 1.0) for at, _ in series.points]


def _fill(
    server: _Server,
    templates: Sequence[Template],
    common: Template,
    read: frozenset[str],
    *,
    nodes: int,
    start: float,
    end: float,
) -> None:
    writer = RemoteWriter(server.port, deadline=_DEADLINE)
    shortened = [_shortened(each, read, end) for each in templates]
    for a, b in _slices(start, end):
        if message := _message(common, a, b):
            writer.send(message)
        messages = [_message(each, a, b) for each in shortened]
        for number in range(nodes):
            template = number % len(messages)
            old, new = name_of(_FIRST_TEMPLATE + template), name_of(number)
            writer.send(messages[template].replace(old.encode(), new.encode()))
        sys.stderr.write(f"  {(b - start) / 3600:.1f} h of {nodes} nodes stored\n")
    writer.close()


def _shortened(template: Template, read: frozenset[str], end: float) -> Template:
    return {
        labels: points if dict(labels)["__name__"] in read else [each for each in points if each[0] > end - _PRESENT]
        for labels, points in template.items()
    }


# -- measuring ---------------------------------------------------------------------------------------------------------


def _measure(
    server: _Server, queries: Sequence[Query], reference: float, span: tuple[float, float, float]
) -> list[Cost]:
    costs = []
    for query in queries:
        seconds, samples, series = server.evaluate(query, *span)
        cost = Cost(
            query.source,
            query.name,
            query.over_range,
            round(seconds, 4),
            round(seconds / reference, 1),
            samples,
            series,
        )
        sys.stderr.write(f"  {cost.seconds:8.3f} s {cost.samples:12,} samples  {cost.source}: {cost.name}\n")
        costs.append(cost)
    return costs


def _counts(template: Template) -> dict[str, int]:
    kinds = {"service": 0, "plugin": 0, "recorded": 0, "alerts": 0}
    for labels in map(dict, template):
        name = labels["__name__"]
        if name.startswith("ALERTS"):
            kinds["alerts"] += 1
        elif ":" in name:
            kinds["recorded"] += 1
        else:
            kinds["plugin" if labels["job"] == "scrubber-plugin" else "service"] += 1
    return kinds


def measure_fleet(*, nodes: int, devices: int, hours: float, scrape: float, directory: Path) -> Result:
    """Store the series of the fleet, run every query, and return the results."""
    end = math.floor(time.time() / GROUP_INTERVAL) * GROUP_INTERVAL
    start = end - hours * 3600
    panels, rules = list(fleet_queries(hours=hours, scrape=scrape)), list(rule_queries())
    templates = node_templates(devices=devices, hours=hours, scrape=scrape, end=end)
    sys.stderr.write("rules of single nodes\n")
    common = _add_recorded(templates, start, end, directory / "nodes")
    with _Server(directory / "fleet") as server:
        read = selected_metrics([*panels, *rules])
        _fill(server, templates, common, read, nodes=nodes, start=start, end=end)
        span = (start, end, scrape)
        up, _, _ = server.evaluate(Query("", "", "sum(up)"), *span)
        (count,) = server.at('count({__name__=~".+"})', end)
        result = Result(
            nodes=nodes,
            devices=devices,
            hours=hours,
            scrape_seconds=scrape,
            series=round(count.points[0][1]),
            series_of_a_node=_counts(templates[0]),
            sum_up_seconds=round(up, 5),
            machine=asdict(describe_machine()),
            prometheus=_version(),
        )
        result.panels = _measure(server, panels, up, span)
        result.rules = _measure(server, rules, up, span)
    for cost in result.rules:
        result.groups[cost.source] = round(result.groups.get(cost.source, 0.0) + cost.seconds, 3)
    return result


def _version() -> str:
    done = subprocess.run([binaries().prometheus, "--version"], capture_output=True, text=True, check=True)
    return (done.stdout + done.stderr).split("version ")[1].split()[0].strip(",")


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print the groups, and write the results of a complete run."""
    parser = argparse.ArgumentParser(prog="python -m bench.fleet", description="Measure the queries of a fleet.")
    parser.add_argument("--nodes", type=int, default=1000)
    parser.add_argument("--devices", type=int, default=8)
    parser.add_argument("--hours", type=float, default=2.0, help="length of the range (2)")
    parser.add_argument("--scrape", type=float, default=60.0, help="seconds between two scrapes, a multiple of 15 (60)")
    parser.add_argument("--out", type=Path, help="write the results to this file")
    options = parser.parse_args(arguments)
    complete = (options.nodes, options.devices) == (1000, 8)
    with tempfile.TemporaryDirectory(prefix="fleet-") as directory:
        try:
            result = measure_fleet(
                nodes=options.nodes,
                devices=options.devices,
                hours=options.hours,
                scrape=options.scrape,
                directory=Path(directory),
            )
        except ConnectionError as error:
            sys.exit(
                f"Prometheus has ended ({error}). Six hours of 1,000 nodes at 15 s need more than 24 GiB of memory."
            )
    target = options.out or (RESULTS if complete else None)
    if target is not None:
        target.write_text(json.dumps(asdict(result), indent=1) + "\n")
    for group, seconds in result.groups.items():
        sys.stdout.write(f"{group}: {seconds:.2f} s\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
