"""Mutants of a module: its code with one small change each, such as a programmer could make by mistake."""

from __future__ import annotations

import ast
import copy
from collections.abc import Iterator
from dataclasses import dataclass

__all__ = ["Mutant", "mutants"]

_OPPOSITE: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}


@dataclass(frozen=True)
class Mutant:
    """A changed module.

    Attributes:
        number: its place among all mutants of the module.
        change: the line and what was changed in it.
    """

    number: int
    change: str
    tree: ast.Module


def mutants(source: str) -> Iterator[Mutant]:
    """Yield all mutants of ``source``. Docstrings, annotations and ``__all__`` stay as they are."""
    tree = ast.parse(source)
    number = 0
    places = list(_places(tree))
    for place in range(len(places)):
        for variant in range(_variants(places[place])):
            changed = copy.deepcopy(tree)
            node = list(_places(changed))[place]
            before = ast.unparse(node)
            _change(node, variant)
            after = ast.unparse(node)
            line = getattr(node, "lineno", 0)
            ast.fix_missing_locations(changed)
            yield Mutant(number, f"line {line}: {_short(before)} → {_short(after)}", changed)
            number += 1


def _short(text: str) -> str:
    return " ".join(text.split())[:90]


def _places(tree: ast.Module) -> Iterator[ast.AST]:
    """Yield the nodes that can be changed, always in the same order."""

    def visit(node: ast.AST) -> Iterator[ast.AST]:
        for name, value in ast.iter_fields(node):
            if name in ("annotation", "returns", "decorator_list", "type_params"):
                continue
            for child in value if isinstance(value, list) else (value,):
                if not isinstance(child, ast.AST):
                    continue
                if isinstance(child, ast.Assign) and ast.unparse(child.targets[0]) == "__all__":
                    continue
                if isinstance(child, ast.Expr) and isinstance(child.value, ast.Constant):
                    continue
                if _variants(child):
                    yield child
                yield from visit(child)

    yield from visit(tree)


def _variants(node: ast.AST) -> int:
    match node:
        case ast.Compare(ops=[op]) if type(op) in _OPPOSITE:
            return 1
        case ast.BoolOp() | ast.If() | ast.While() | ast.IfExp():
            return 1
        case ast.UnaryOp(op=ast.Not()):
            return 1
        case ast.Constant(value=bool()):
            return 1
        case ast.Constant(value=int() | float()):
            return 1
        case ast.Expr(value=ast.Call() | ast.Await()):
            return 1
        case ast.BinOp(op=ast.Add() | ast.Sub()):
            return 1
        case ast.Return(value=ast.expr()) if not (isinstance(node.value, ast.Constant) and node.value.value is None):
            return 1
        case ast.Raise() | ast.Continue() | ast.Break():
            return 1
    return 0


def _change(node: ast.AST, variant: int) -> None:
    match node:
        case ast.Compare():
            node.ops = [_OPPOSITE[type(node.ops[0])]()]
        case ast.BoolOp():
            node.op = ast.Or() if isinstance(node.op, ast.And) else ast.And()
        case ast.If() | ast.While() | ast.IfExp():
            node.test = ast.UnaryOp(ast.Not(), node.test)
        case ast.UnaryOp():
            node.op = ast.Not()
            node.operand = ast.UnaryOp(ast.Not(), node.operand)
        case ast.Constant(value=bool()):
            node.value = not node.value
        case ast.Constant(value=int() | float() as value):
            node.value = value + 1
        case ast.Expr():
            node.value = ast.Constant(None)
        case ast.BinOp():
            node.op = ast.Sub() if isinstance(node.op, ast.Add) else ast.Add()
        case ast.Return():
            node.value = ast.Constant(None)
        case ast.Raise() | ast.Continue() | ast.Break():
            # There is no statement to put here in place: a comparison of nothing with nothing does nothing.
            node.__class__ = ast.Pass  # type: ignore[assignment]
