"""Every event that the daemons may write to their logs, extracted from the sources without running them."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

__all__ = ["LoggedEvent", "logged_events", "renamed"]

HOUSE: Final = Path(__file__).parents[2]
LEVELS: Final = frozenset({"debug", "info", "warning", "error", "exception", "critical"})
LOGGERS: Final = frozenset({"log", "_log", "logger", "_logger"})
REMINDERS: Final = {"log_waiting": "warning", "log_ended": "info"}
"""The events of a ``plugin.logs.WaitLogger`` by level; each of its lines contains the duration of the wait."""

PASSED_ON: Final = {
    "plugin/logs.py": "the reminder writes what its callers name",
    "scrubber/adapters/ledger/chain.py": "rows of the audit log are read back, not recorded again",
}
SHARED: Final = frozenset({"scrubber/observability/tracing.py"})
"""Modules of the service that the plugin uses, too."""
NO_DAEMON: Final = "scrubber/emulator/"
"""It replaces the kubelet."""


@dataclass(frozen=True, slots=True)
class LoggedEvent:
    """A place in the code that writes a log line or records an event.

    Attributes:
        names: the possible names; empty when they cannot be read.
        level: empty where the journal decides it.
        whole: whether ``fields`` is complete.
        audited: whether it is a row of the audit log: an event that is not passed to the journal at once.
    """

    names: frozenset[str]
    level: str
    component: str
    fields: frozenset[str]
    whole: bool
    where: str
    audited: bool = False


def logged_events(root: Path = HOUSE) -> Iterator[LoggedEvent]:
    """Yield the places in all modules of both daemons below ``root``."""
    for package in ("scrubber", "plugin"):
        for path in sorted((root / package).rglob("*.py")):
            name = path.relative_to(root).as_posix()
            if name in PASSED_ON or name.startswith(NO_DAEMON) or path.stem.endswith(("_pb2", "_pb2_grpc")):
                continue
            components = ("service", "plugin") if name in SHARED else ("plugin" if package == "plugin" else "service",)
            tree = ast.parse(path.read_text())
            for component in components:
                yield from _Module(tree, component, name).logged_events()


def renamed(source: str) -> list[int]:
    """Return the lines on which a logger's method is used without calling it: its events could not be extracted."""
    if not re.search(rf"\.(?:{'|'.join(LEVELS)})\b(?!\()", source):
        return []  # every use of such a name is a call: most files need not be parsed
    tree = ast.parse(source)
    called = {node.func for node in ast.walk(tree) if isinstance(node, ast.Call)}
    return [
        node.lineno
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and node.attr in LEVELS
        and _last_name(node.value) in LOGGERS
        and node not in called
    ]


class _Module:
    def __init__(self, tree: ast.Module, component: str, name: str) -> None:
        self._tree = tree
        self._component = component
        self._name = name
        self._recorded_at_once = {
            each
            for node in ast.walk(tree)
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "record"
            for argument in node.args
            if isinstance(argument, ast.List)
            for each in argument.elts
        }
        self._logs = any(
            isinstance(node, ast.ImportFrom)
            and (node.module or "").startswith("scrubber.ports")
            and any(each.name == "Event" for each in node.names)
            for node in ast.walk(tree)
        )

    def logged_events(self) -> Iterator[LoggedEvent]:
        yield from self._in(self._tree, [self._tree])

    def _in(self, node: ast.AST, scopes: Sequence[ast.AST]) -> Iterator[LoggedEvent]:
        for child in ast.iter_child_nodes(node):
            inner = (
                [*scopes, child] if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) else scopes
            )
            if isinstance(child, ast.Call):
                found = self._call(child, _Scope(scopes, child.lineno))
                if found is not None:
                    yield replace(found, where=f"{self._name}:{child.lineno}")
            yield from self._in(child, inner)

    def _call(self, call: ast.Call, scope: _Scope) -> LoggedEvent | None:
        if isinstance(call.func, ast.Attribute):
            whose = _last_name(call.func.value)
            if call.func.attr in LEVELS and whose in LOGGERS:
                return self._line(call, call.func.attr, scope)
            if call.func.attr in REMINDERS and whose.endswith("reminder"):
                line = self._line(call, REMINDERS[call.func.attr], scope)
                return replace(line, fields=line.fields | {"waited_seconds"})
        if self._logs and isinstance(call.func, ast.Name) and call.func.id == "Event":
            return self._event(call, scope)
        return None

    def _line(self, call: ast.Call, level: str, scope: _Scope) -> LoggedEvent:
        fields, whole = {each.arg for each in call.keywords if each.arg is not None}, True
        for each in call.keywords:
            if each.arg is None:
                more, all_ = scope.keys(each.value)
                fields, whole = fields | more, whole and all_
        if "exc_info" in fields:
            fields = fields - {"exc_info"} | {"traceback"}
        names = scope.words(call.args[0]) if call.args else frozenset()
        return LoggedEvent(names, level, self._component, frozenset(fields), whole, "")

    def _event(self, call: ast.Call, scope: _Scope) -> LoggedEvent:
        given = dict(zip(("name", "at", "device", "scrub", "actor", "fields"), call.args, strict=False))
        given |= {each.arg: each.value for each in call.keywords if each.arg is not None}
        fields, whole = scope.keys(given["fields"]) if "fields" in given else (set(), True)
        fields = {"tenant" if each == "tenant" else each for each in fields}
        fields |= {name for name, key in (("device", "device"), ("scrub_id", "scrub")) if key in given}
        audited = call not in self._recorded_at_once
        return LoggedEvent(scope.words(given["name"]), "", self._component, frozenset(fields), whole, "", audited)


class _Scope:
    """The meaning of names at a call: in its function, in the enclosing functions, in the module."""

    def __init__(self, scopes: Sequence[ast.AST], line: int) -> None:
        self._scopes = scopes
        self._line = line

    def words(self, node: ast.AST) -> frozenset[str]:
        """Return the strings that ``node`` may be; empty when that cannot be read."""
        match node:
            case ast.Constant(value=str(text)):
                return frozenset({text})
            case ast.IfExp():
                return self._both(self.words(node.body), self.words(node.orelse))
            case ast.Subscript(value=ast.Name(id=name)):
                tables = [value for value, _ in self._values(name) if isinstance(value, ast.Dict)]
                found = [self.words(value) for table in tables for value in table.values]
                return frozenset().union(*found) if all(found) else frozenset()
            case ast.Name(id=name):
                found = [self.words(value) for value, _ in self._values(name)]
                return frozenset().union(*found) if all(found) else frozenset()
            case _:
                return frozenset()

    @staticmethod
    def _both(one: frozenset[str], other: frozenset[str]) -> frozenset[str]:
        return one | other if one and other else frozenset()

    def keys(self, node: ast.AST) -> tuple[set[str], bool]:
        """Return the possible keys of the mapping ``node``, and whether they are complete."""
        match node:
            case ast.Dict():
                return self._all(
                    [
                        self.keys(value) if key is None else self._key(key)
                        for key, value in zip(node.keys, node.values, strict=True)
                    ]
                )
            case ast.IfExp():
                return self._all([self.keys(node.body), self.keys(node.orelse)])
            case ast.BinOp(op=ast.BitOr()):
                return self._all([self.keys(node.left), self.keys(node.right)])
            case ast.Name(id=name):
                made = self._values(name)
                # A name may be used for several mappings in turn: its last assignment before the call counts.
                last = max((value.lineno for value, more in made if not more and value.lineno <= self._line), default=0)
                values = [self.keys(value) for value, _ in made if last <= value.lineno <= self._line]
                put = [self._key(each) for each in self._put(name) if last <= each.lineno <= self._line]
                return self._all([*values, *put]) if values else (set(), False)
            case _:
                return set(), False

    def _key(self, node: ast.AST) -> tuple[set[str], bool]:
        words = self.words(node)
        return set(words), bool(words)

    @staticmethod
    def _all(parts: Sequence[tuple[set[str], bool]]) -> tuple[set[str], bool]:
        return set().union(*(keys for keys, _ in parts)), all(whole for _, whole in parts)

    def _values(self, name: str) -> list[tuple[ast.expr, bool]]:
        """Return the values of ``name`` in the innermost scope that assigns it, and whether each extends another."""
        for scope in reversed(self._scopes):
            found: list[tuple[ast.expr, bool]] = []
            for node in ast.walk(scope) if scope is not self._scopes[0] else ast.iter_child_nodes(scope):
                match node:
                    case ast.Assign(targets=[ast.Name(id=own)], value=value) if own == name:
                        found.append((value, False))
                    case ast.AnnAssign(target=ast.Name(id=own), value=ast.expr() as value) if own == name:
                        found.append((value, False))
                    case ast.AugAssign(target=ast.Name(id=own), value=value) if own == name:
                        found.append((value, True))
            if found:
                return found
        return []

    def _put(self, name: str) -> list[ast.expr]:
        """Return the keys that are added to the mapping ``name``, one by one."""
        return [
            node.targets[0].slice
            for node in ast.walk(self._scopes[-1])
            if isinstance(node, ast.Assign)
            and isinstance(node.targets[0], ast.Subscript)
            and _last_name(node.targets[0].value) == name
        ]


def _last_name(node: ast.AST) -> str:
    match node:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name
        case _:
            return ""
