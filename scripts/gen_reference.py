"""Generates the reference tables of ``docs/logs.md``, ``docs/metrics.md`` and ``docs/codes.md`` from the declarations.

A page names each table by a pair of comments, ``<!-- generated: NAME -->`` and ``<!-- end -->``. The text between them is
replaced, and all other text is kept. A test compares the committed pages with the declarations.
"""

from __future__ import annotations

import ast
import logging
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Final

from scrubber.api.status import GRPC_CODES, GRPC_CODES_OF_UNSERVED_METHODS
from scrubber.domain import errors
from scrubber.domain.codes import ErrorCode
from scrubber.domain.evidence import FindingCode, Severity, Step
from scrubber.domain.health.signal_table import COMMON_SIGNALS
from scrubber.observability.registry.events import (
    EVENTS_BY_SECTION,
    Component,
    EventDeclaration,
    EventField,
    EventSection,
)
from scrubber.observability.registry.metric_declaration import MetricDeclaration, MetricLabel
from scrubber.observability.registry.plugin_metrics import PLUGIN_METRICS
from scrubber.observability.registry.service_metrics import SERVICE_METRICS

_ROOT: Final = Path(__file__).resolve().parent.parent

_BLOCK: Final = re.compile(r"(<!-- generated: ([\w/-]+) -->\n).*?(<!-- end -->)", re.DOTALL)
_NONE: Final = "\u2013"

_ERROR_CLASSES: Final = {
    name: each
    for name, each in vars(errors).items()
    if isinstance(each, type) and issubclass(each, errors.ScrubberError)
}

_ERROR_CODES: Final = {str(code): code for code in ErrorCode}


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(row)} |" for row in lines) + "\n"


# --- events ---------------------------------------------------------------------------------------------------------


def event_table(section: EventSection) -> str:
    """Return the table of the events of ``section``."""
    head = ("event", "level", "daemon", "fields", "meaning and action")
    return _table(head, map(_event_row, EVENTS_BY_SECTION[section]))


def _event_row(event: EventDeclaration) -> tuple[str, ...]:
    levels = ", ".join(logging.getLevelName(level).lower() for level in event.levels) or "any"
    daemon = "both" if len(event.components) == len(Component) else event.components[0].value
    return f"`{event.name}`", levels, daemon, ", ".join(map(_field, event.fields)) or _NONE, event.description


def _field(field: EventField) -> str:
    return f"`{field.name}` ({field.remark})" if field.remark else f"`{field.name}`"


# --- metrics --------------------------------------------------------------------------------------------------------


def metric_table(metrics: Iterable[MetricDeclaration]) -> str:
    """Return the table of ``metrics``."""
    rows = ((f"`{each.name}`", each.type.value, _labels(each.labels) or _NONE, each.help) for each in metrics)
    return _table(("metric", "type", "labels", "meaning"), rows)


def _labels(labels: Sequence[MetricLabel]) -> str:
    explained = any(each.values or each.remark for each in labels)
    return ("; " if explained else ", ").join(map(_label, labels))


def _label(label: MetricLabel) -> str:
    text = ", ".join((*label.values, *((label.remark,) if label.remark else ())))
    return f"`{label.name}`: {text}" if text else f"`{label.name}`"


def bucket_table() -> str:
    """Return the table of the bounds of histograms."""
    histograms: dict[tuple[float, ...], list[str]] = {}
    for each in (*SERVICE_METRICS, *PLUGIN_METRICS):
        if each.buckets:
            histograms.setdefault(each.buckets, []).append(f"`{each.name}`")
    rows = ((", ".join(f"{bound:g}" for bound in bounds), ", ".join(names)) for bounds, names in histograms.items())
    return _table(("bounds in seconds", "histograms"), rows)


# --- codes ----------------------------------------------------------------------------------------------------------


def error_table() -> str:
    """Return the table of the codes of errors."""
    raised = error_classes()
    rows = ((f"`{code}`", *_reaction(code, raised[code]), code.description) for code in sorted(ErrorCode))
    return _table(("code", "gRPC status", "retry", "meaning and action"), rows)


def error_classes() -> Mapping[ErrorCode, frozenset[type[errors.ScrubberError]]]:
    """Return the classes of errors that have each code, by default or where the sources raise them with it."""
    found: dict[ErrorCode, set[type[errors.ScrubberError]]] = {code: set() for code in ErrorCode}
    for each in _ERROR_CLASSES.values():
        found[_ERROR_CODES[each.code]].add(each)
    for package in ("scrubber", "plugin"):
        for path in sorted((_ROOT / package).rglob("*.py")):
            text = path.read_text(encoding="utf-8")
            if path != Path(errors.__file__) and ("code=" in text or "code = " in text):
                for code, each in _raised(ast.parse(text)):
                    found[code].add(each)
    return {code: frozenset(each) for code, each in found.items()}


def _raised(tree: ast.AST) -> Iterator[tuple[ErrorCode, type[errors.ScrubberError]]]:
    """Yield each code in a module that replaces the code of an error's class, with that class."""
    for node in ast.walk(tree):
        match node:
            case ast.ClassDef(bases=[ast.Name(id=base), *_], body=body) if base in _ERROR_CLASSES:
                for statement in body:
                    match statement:
                        case ast.Assign(targets=[ast.Name(id="code")], value=value):
                            yield from ((code, _ERROR_CLASSES[base]) for code in _codes(value, {}))
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                faults = {
                    each.arg: _ERROR_CLASSES[each.annotation.id]
                    for each in node.args.args
                    if isinstance(each.annotation, ast.Name) and each.annotation.id in _ERROR_CLASSES
                }
                yield from _raised_in(node, faults)


def _raised_in(
    function: ast.AST, faults: Mapping[str, type[errors.ScrubberError]]
) -> Iterator[tuple[ErrorCode, type[errors.ScrubberError]]]:
    for node in ast.walk(function):
        match node:
            case ast.Call(func=ast.Name(id=name), keywords=keywords) if name in _ERROR_CLASSES:
                for each in keywords:
                    if each.arg == "code":
                        yield from ((code, _ERROR_CLASSES[name]) for code in _codes(each.value, faults))


def _codes(value: ast.expr, faults: Mapping[str, type[errors.ScrubberError]]) -> Iterator[ErrorCode]:
    """Yield the codes that ``value`` can be: a member of the enum, or the code of one of the ``faults``, by name."""
    match value:
        case ast.Attribute(value=ast.Name(id="ErrorCode"), attr=name):
            yield ErrorCode[name]
        case ast.Attribute(value=ast.Name(id=name), attr="code") if name in faults:
            kinds = (each for each in _ERROR_CLASSES.values() if issubclass(each, faults[name]))
            yield from (_ERROR_CODES[each.code] for each in kinds)


def _reaction(code: ErrorCode, classes: frozenset[type[errors.ScrubberError]]) -> tuple[str, str]:
    """Return the gRPC status of ``code``, and whether a caller should retry."""
    if code is ErrorCode.UPSTREAM_REFUSED:
        return "the vendor's", "no"
    start = errors.NotReady in classes
    others = sorted({_status(code, each) for each in classes - {errors.NotReady}})
    if start and others:
        return f"{_status(code, errors.NotReady)} for a start, else {', '.join(others)}", "for a start"
    retry = all(issubclass(each, errors.RetryableError) for each in classes)
    return ", ".join(others) or _status(code, errors.NotReady), "yes" if retry else "no"


def _status(code: ErrorCode, kind: type[errors.ScrubberError]) -> str:
    return f"`{GRPC_CODES_OF_UNSERVED_METHODS.get(code, GRPC_CODES[kind]).name}`"


def finding_table() -> str:
    """Return the table of the codes of findings."""
    return _table(("code", "step", "severity", "recovery", "meaning"), map(_finding_row, sorted(FindingCode)))


def _finding_row(code: FindingCode) -> tuple[str, ...]:
    steps = dict.fromkeys(step for step, _ in code.allowed_severities)
    severities = dict.fromkeys(severity for _, severity in code.allowed_severities)
    recovery = COMMON_SIGNALS.classifications[code].recovery_method if Severity.FAULT in severities else _NONE
    where = "every step" if len(steps) == len(Step) else ", ".join(steps)
    return f"`{code}`", where, ", ".join(severities), recovery, code.description


# --- pages ----------------------------------------------------------------------------------------------------------

BLOCKS: Final[Mapping[str, Callable[[], str]]] = {
    **{f"events/{section}": partial(event_table, section) for section in EventSection},
    "metrics/service": partial(metric_table, SERVICE_METRICS),
    "metrics/plugin": partial(metric_table, PLUGIN_METRICS),
    "metrics/buckets": bucket_table,
    "codes/errors": error_table,
    "codes/findings": finding_table,
}
"""Every table, by the name that a page gives it."""

PAGES: Final = tuple(_ROOT / "docs" / name for name in ("logs.md", "metrics.md", "codes.md"))


def blocks_of(page: str) -> list[str]:
    """Return the names of the generated tables of ``page``."""
    return [name for _, name, _ in _BLOCK.findall(page)]


def render(page: str) -> str:
    """Return ``page`` with all of its tables generated."""
    return _BLOCK.sub(lambda found: f"{found[1]}\n{BLOCKS[found[2]]()}\n{found[3]}", page)


def main() -> int:
    """Regenerate in place, and print the files written."""
    for path in PAGES:
        path.write_text(render(path.read_text(encoding="utf-8")), encoding="utf-8")
        print(path.relative_to(_ROOT))
    return 0


if __name__ == "__main__":
    sys.exit(main())
