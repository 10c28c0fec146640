"""Values of a board's variables for a recording, chosen as Grafana chooses them: all, or the first of a list.

Queries are recorded with their variables replaced; the page gets the names of the values for titles and pickers.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

REFERENCE = re.compile(r"\$(\w+)|\$\{(\w+)(?::\w+)?\}|\[\[(\w+)\]\]")
SPECIAL = re.compile(r"[\\^$*+?.()|{}\[\]]")
LABEL_VALUES = re.compile(r"^\s*label_values\(\s*(?:(?P<metric>.+?)\s*,\s*)?(?P<label>\w+)\s*\)\s*$", re.DOTALL)

# The values of a label among the series of a selector: (selector or None, label) -> sorted values.
LabelValues = Callable[[str | None, str], list[str]]


class UnknownVariable(Exception):
    """A query uses a variable that the board does not define, or defines in a way that the preview does not support."""


@dataclass(frozen=True, slots=True)
class VariableValue:
    """The text of a variable in a picker and its value in a query."""

    text: str
    query: str


def substitute(text: str, values: Mapping[str, VariableValue]) -> str:
    """Return `text` with every variable replaced; raise UnknownVariable for one without a value."""

    def value(match: re.Match[str]) -> str:
        name = next(group for group in match.groups() if group)
        if name not in values:
            raise UnknownVariable(f"{match.group()} in {text!r} is not a variable of the dashboard")
        return values[name].query

    return REFERENCE.sub(value, text)


def choose_values(
    board: Mapping[str, Any], requested: Mapping[str, str], label_values: LabelValues
) -> dict[str, VariableValue]:
    """Return the value of each variable, in the board's order; `requested` sets some by name."""
    chosen: dict[str, VariableValue] = {}
    for variable in board.get("templating", {}).get("list", []):
        name = variable["name"]
        if variable["type"] == "datasource":
            chosen[name] = VariableValue("Prometheus", "prometheus")
        elif variable["type"] == "query":
            chosen[name] = _query_value(variable, requested.get(name), chosen, label_values)
        elif variable["type"] in ("custom", "constant", "textbox", "interval"):
            value = requested.get(name) or str(variable.get("current", {}).get("value") or variable.get("query", ""))
            chosen[name] = VariableValue(value, value)
        else:
            raise UnknownVariable(f"the preview does not support variables of type {variable['type']!r} ({name})")
    unknown = sorted(set(requested) - set(chosen))
    if unknown:
        raise UnknownVariable(f"the dashboard has no variable {', '.join(unknown)}")
    return chosen


def _query_value(
    variable: Mapping[str, Any], requested: str | None, chosen: Mapping[str, VariableValue], label_values: LabelValues
) -> VariableValue:
    query = variable["query"]
    text = query if isinstance(query, str) else query.get("query", "")
    match = LABEL_VALUES.match(text)
    if not match:
        raise UnknownVariable(f"the preview supports only label_values(…), not {text!r} ({variable['name']})")
    metric = match["metric"]
    values = label_values(substitute(metric, chosen) if metric else None, match["label"])
    if kept := variable.get("regex", "").strip("/"):
        values = [value for value in values if re.search(kept, value)]
    if requested is not None:
        return VariableValue(requested, _escaped(requested) if variable.get("multi") else requested)
    if variable.get("includeAll"):
        everything = variable.get("allValue") or "|".join(_escaped(value) for value in values)
        return VariableValue("All", everything)
    if not values:
        raise UnknownVariable(f"no value for {variable['name']}: {text} is empty")
    return VariableValue(values[0], values[0])


def _escaped(value: str) -> str:
    """Return a regular expression's literal for a PromQL string, in which backslashes are escaped again."""
    return SPECIAL.sub(r"\\\\\g<0>", value)
