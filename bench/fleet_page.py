"""Write the tables of a fleet's measurements into ``docs/scale.md``: ``python -m bench.fleet_page``; a test compares them."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from bench.fleet import GROUP_INTERVAL
from bench.fleet import RESULTS as QUERIES
from bench.fleet_writes import RESULTS as WRITES

__all__ = ["PAGE", "render_page"]

PAGE: Final = Path(__file__).parents[1] / "docs" / "scale.md"
_SLOWEST: Final = 10
_BLOCK: Final = re.compile(r"(<!-- measured: ([\w/-]+) -->\n).*?(<!-- end -->)", re.DOTALL)
_OPERATIONS: Final = {
    "get nodes": "reads",
    "patch nodes/status": "condition",
    "patch nodes": "labels",
    "create events": "events",
}


def render_page(text: str) -> str:
    """Return the page with its tables from the recorded results."""
    return _BLOCK.sub(lambda found: f"{found[1]}\n{_TABLES[found[2]]()}\n\n{found[3]}", text)


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _read(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def _writes() -> str:
    def row(phase: Mapping[str, Any]) -> list[str]:
        counts = phase["by_operation"]
        return [
            phase["name"],
            f"{phase['nodes']:,}",
            f"{phase['seconds'] / 60:.0f}",
            f"{phase['total']:,}",
            f"{phase['peak']:,}",
            *(f"{counts.get(operation, 0):,}" for operation in _OPERATIONS),
        ]

    head = ["phase", "nodes concerned", "minutes", "requests of all nodes", "most in a second", *_OPERATIONS.values()]
    return _table(head, map(row, _read(WRITES)["phases"]))


def _setting() -> str:
    run, machine = _read(QUERIES), _read(QUERIES)["machine"]
    of_node = run["series_of_a_node"]
    return (
        f"{run['nodes']:,} nodes with {run['devices']} devices each, {run['hours']:g} hours, a scrape every "
        f"{run['scrape_seconds']:g} s; Prometheus {run['prometheus']}, {machine['cpu']}, {machine['cores']} cores, load average "
        f"before the queries {machine['load']:g}. {run['series']:,} series: for each node {of_node['service']} of the service, "
        f"{of_node['plugin']} of the plugin and {of_node['recorded']} recorded ones. `sum(up)` takes {1000 * run['sum_up_seconds']:.1f} ms of CPU time."
    )


def _groups() -> str:
    groups = _read(QUERIES)["groups"]
    rows = (
        [f"`{name}`", f"{seconds:.2f} s", f"{100 * seconds / GROUP_INTERVAL:.1f} %"] for name, seconds in groups.items()
    )
    return _table(["group of rules", "CPU time of all expressions", "share of the interval of one minute"], rows)


def _cost_rows(costs: Sequence[Mapping[str, Any]]) -> Iterable[list[str]]:
    for cost in sorted(costs, key=lambda each: -each["seconds"])[:_SLOWEST]:
        where = cost["name"] if cost["source"].startswith("scrubber.") else f"{cost['source']} {cost['name']}"
        kind = "range" if cost["over_range"] else "instant"
        yield [where, kind, f"{cost['seconds']:.3f} s", f"{cost['ratio']:,.0f}", f"{cost['samples']:,}"]


def _panels() -> str:
    head = ["slowest queries of the fleet dashboard", "kind", "CPU time", "ratio to `sum(up)`", "samples read"]
    return _table(head, _cost_rows(_read(QUERIES)["panels"]))


def _rules() -> str:
    head = ["slowest rules", "kind", "CPU time", "ratio to `sum(up)`", "samples read"]
    return _table(head, _cost_rows(_read(QUERIES)["rules"]))


_TABLES: Final = {
    "fleet/writes": _writes,
    "fleet/setting": _setting,
    "fleet/groups": _groups,
    "fleet/panels": _panels,
    "fleet/rules": _rules,
}


if __name__ == "__main__":
    PAGE.write_text(render_page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    sys.stdout.write(f"{PAGE}\n")
