"""The code uses one language: no public class name has two meanings, and no name contains a word of private jargon.

The words that were replaced, and their replacements, are in docs/contributing/language.md.
"""

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("scrubber", "plugin", "dashboards")

REPLACED = {
    *("custody", "vitals", "possession", "handing", "joining", "holdup", "fuse", "felt", "lookout"),
    *("stranger", "strangers", "intruded", "tainted", "tend", "tends", "tending", "narrate", "patience", "standstill"),
    *("frontdoor", "complaint", "complaints", "sighting", "bulletin", "telling", "teller", "unheard", "untold"),
    *("occasion", "sentence", "sentences", "mended", "mends", "standing", "anew", "whoever", "nobody", "somebody"),
    *("believe", "believed"),
}
"""Words that no name of the code contains: the words of the glossary replace them."""


def modules() -> Iterator[Path]:
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            if "_pb2" not in path.name:
                yield path


def names_of(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Yield every name that ``tree`` introduces, with its line."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name, node.lineno
        elif isinstance(node, ast.arg):
            yield node.arg, node.lineno
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id, node.lineno
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr, node.lineno


def words_of(name: str) -> set[str]:
    return {each.lower() for each in re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])", name)}


def test_no_two_public_classes_share_a_name() -> None:
    places = defaultdict(list)
    for path in modules():
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(str(path.relative_to(ROOT)))
    assert {name: where for name, where in places.items() if len(where) > 1} == {}


def test_no_name_of_the_code_is_made_of_a_replaced_word() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line}: {name}"
        for path in modules()
        for name, line in names_of(ast.parse(path.read_text()))
        if words_of(name) & REPLACED
    ]
    assert found == []


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("def tend(device): ...", "tend"),
        ("class GlassKeeper: custody = 1", "custody"),
        ("def f():\n    the_sentence = 1", "the_sentence"),
        ("self.wasMended = True", "wasMended"),
    ],
)
def test_a_replaced_word_is_found_wherever_a_name_is_introduced(source: str, name: str) -> None:
    assert name in [each for each, _ in names_of(ast.parse(source)) if words_of(each) & REPLACED]
