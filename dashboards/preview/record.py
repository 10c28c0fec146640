"""Records Prometheus' responses to every query of a board in a file, from which the board is drawn later.

The file covers a board's own time range with one step per panel, so a picture can be drawn again without repeating the
scenario. Values are numbers, null where there is none, and "NaN", "+Inf", "-Inf", which JSON cannot represent.
"""

import json
import math
import sys
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from dashboards.preview.variables import VariableValue, choose_values, substitute

FORMAT = 1
POINTS = 360
DIGITS = 5
STEPS = (1, 2, 5, 10, 15, 20, 30, 60, 120, 300, 600, 900, 1800, 3600)

SampleValue = float | str | None


class PrometheusError(Exception):
    """Prometheus refused a query; contains its message."""


class Prometheus:
    """The query API of a server on this machine; `address` like http://127.0.0.1:9090."""

    def __init__(self, address: str, timeout: float = 30.0) -> None:
        if not address.startswith("http://"):
            raise ValueError(f"{address}: only http:// is supported")
        self._address = address.rstrip("/")
        self._timeout = timeout

    def range(self, query: str, start: float, end: float, step: float) -> list[dict[str, Any]]:
        return self._result("query_range", query=query, start=f"{start:.3f}", end=f"{end:.3f}", step=f"{step:g}")

    def instant(self, query: str, at: float) -> list[dict[str, Any]]:
        return self._result("query", query=query, time=f"{at:.3f}")

    def label_values(self, selector: str | None, label: str, start: float, end: float) -> list[str]:
        bounds = {"start": f"{start:.3f}", "end": f"{end:.3f}"}
        matching = {"match[]": selector} if selector else {}
        found: list[str] = self._get(f"label/{label}/values", **bounds, **matching)
        return found

    def _result(self, path: str, **parameters: str) -> list[dict[str, Any]]:
        data = self._get(path, **parameters)
        if data["resultType"] == "scalar":
            return [{"metric": {}, "value": data["result"]}]
        series: list[dict[str, Any]] = data["result"]
        return series

    def _get(self, path: str, **parameters: str) -> Any:
        url = f"{self._address}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
        try:
            with urllib.request.urlopen(url, timeout=self._timeout) as answer:
                body = json.load(answer)
        except urllib.error.HTTPError as error:
            error_body = error.read().decode(errors="replace")
            raise PrometheusError(f"{parameters.get('query', path)}: {error_body}") from error
        return body["data"]


def record(
    prometheus: Prometheus,
    board: Mapping[str, Any],
    start: float,
    end: float,
    *,
    scrape: float = 15.0,
    values: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Return the responses to all queries of `board` between `start` and `end` (seconds since the epoch).

    `scrape` is Prometheus' scrape interval in seconds; `values` sets variables by name. Raises PrometheusError for a
    refused query and UnknownVariable for one with an undefined variable.
    """
    chosen = choose_values(
        board, values or {}, lambda selector, label: prometheus.label_values(selector, label, start, end)
    )
    panels: dict[str, dict[str, Any]] = {}
    for panel in panels_of(board):
        step = _step((end - start) / panel.get("maxDataPoints", POINTS), scrape)
        times = chosen | _times(step, scrape, end - start)
        for target in panel.get("targets", []):
            if not target.get("hide"):
                query = substitute(target["expr"], times)
                answers = panels.setdefault(str(panel["id"]), {})
                answers[target["refId"]] = _answer(prometheus, query, target, _first(start, step), end, step)
    return {
        "format": FORMAT,
        "board": board["uid"],
        "from": _first(start, _step((end - start) / POINTS, scrape)),
        "to": end,
        "variables": {name: {"text": value.text} for name, value in chosen.items()},
        "panels": panels,
    }


def write_recording(recorded: Mapping[str, Any], path: Path) -> None:
    """Write one line of JSON; list queries without series on stderr."""
    path.write_text(json.dumps(recorded, separators=(",", ":"), sort_keys=True) + "\n", encoding="utf-8")
    sys.stderr.write(f"{path.name}: {path.stat().st_size // 1000} kB\n")
    for panel, answers in recorded["panels"].items():
        for ref, answer in answers.items():
            if not answer["series"]:
                sys.stderr.write(f"  no series for panel {panel}, query {ref}: {answer['query']}\n")


def changed_queries(board: Mapping[str, Any], recorded: Mapping[str, Any]) -> list[str]:
    """Return the queries of `board` that differ from those of the recording, as "title, reference"."""
    return [
        f"{panel['title']}, {target['refId']}"
        for panel in panels_of(board)
        for target in panel.get("targets", [])
        if not target.get("hide")
        and recorded["panels"].get(str(panel["id"]), {}).get(target["refId"], {}).get("asked") != target["expr"]
    ]


def panels_of(board: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the board's panels, including those of collapsed rows."""
    for panel in board["panels"]:
        yield from panel.get("panels", [])
        if panel["type"] != "row":
            yield panel


def _step(least: float, scrape: float) -> float:
    return next((step for step in STEPS if step >= max(scrape, least)), STEPS[-1])


def _first(start: float, step: float) -> float:
    """Return the first point: Grafana's points are multiples of the step."""
    return math.ceil(start / step) * step


def _times(step: float, scrape: float, length: float) -> dict[str, VariableValue]:
    def seconds(value: float) -> VariableValue:
        return VariableValue(f"{value:g}s", f"{value:g}s")

    return {
        "__interval": seconds(step),
        "__interval_ms": VariableValue(f"{step * 1000:g}", f"{step * 1000:g}"),
        "__rate_interval": seconds(max(step + scrape, 4 * scrape)),
        "__range": seconds(math.ceil(length)),
        "__range_s": VariableValue(str(math.ceil(length)), str(math.ceil(length))),
    }


def _answer(
    prometheus: Prometheus, query: str, target: Mapping[str, Any], start: float, end: float, step: float
) -> dict[str, Any]:
    if target.get("instant"):
        found = prometheus.instant(query, end)
        series = [{"labels": one["metric"], "values": [_number(one["value"][1])]} for one in found]
        return {"asked": target["expr"], "query": query, "start": end, "step": step, "series": series}
    count = int((end - start) / step) + 1
    series = []
    for one in prometheus.range(query, start, end, step):
        values: list[SampleValue] = [None] * count
        for at, value in one["values"]:
            values[round((at - start) / step)] = _number(value)
        series.append({"labels": one["metric"], "values": values})
    return {"asked": target["expr"], "query": query, "start": start, "step": step, "series": series}


def _number(text: str) -> SampleValue:
    value = float(text)
    if not math.isfinite(value):
        return text
    if value.is_integer():
        return int(value)
    return float(f"{value:.{DIGITS}g}")
