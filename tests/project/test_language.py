"""One language in code and text: class names have one meaning, and no name, text or document uses a replaced word.

The words that were replaced, and their replacements, are in docs/contributing/language.md.
"""

import ast
import io
import re
import tokenize
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("scrubber", "plugin", "dashboards")
TREES = (*PACKAGES, "tests", "bench", "scripts")

REPLACED: Final = frozenset(
    {
        *("custody", "vitals", "possession", "handing", "joining", "holdup", "fuse", "felt", "lookout"),
        *(
            "stranger",
            "strangers",
            "intruded",
            "tainted",
            "tend",
            "tends",
            "tending",
            "narrate",
            "patience",
            "standstill",
        ),
        *("frontdoor", "complaint", "complaints", "sighting", "bulletin", "telling", "teller", "unheard", "untold"),
        *("occasion", "sentence", "sentences", "mended", "mends", "standing", "anew", "whoever", "nobody", "somebody"),
        *("believe", "believed"),
    }
)
"""Words that no name of the code contains: the words of the glossary replace them."""
REPLACED_IN_TESTS: Final = REPLACED | {"told", "asked", "wanted", "said", "heard", "mend", "vault", "persons"}
"""Words that no name of the tests contains."""

INSTEAD: Final[Mapping[str, str]] = {
    "nobody": "no process, no pod or no operator",
    "somebody": "a process, a pod or an operator",
    "whoever": "the process, pod or operator that",
    "anew": "again",
    "told": "notified, reported, logged or sent",
    "mend": "repair, fix or restore",
    "mends": "repairs, fixes or restores",
    "mended": "repaired, fixed or restored",
    "unheard": "lost (an event stream) or unknown",
    "untold": "not reported",
}
"""Words that no text contains, each with what to write instead."""
BANNED: Final = re.compile(rf"(?<![\w-])({'|'.join(INSTEAD)})(?![\w-])", re.IGNORECASE)

QUOTES_OLD_WORDS: Final = frozenset(
    {"CHANGELOG.md", "docs/contributing/language.md", str(Path(__file__).relative_to(ROOT))}
)
"""Files that list the old words."""
ALLOWED: Final[frozenset[tuple[str, str]]] = frozenset()
"""(file, word): legitimate uses, such as the Unix user ``nobody``."""

UNCLEAR_START: Final = frozenset(
    {
        "it",
        "they",
        "this",
        "that",
        "these",
        "those",
        "such",
        "so",
        "also",
        "neither",
        "nor",
        "and",
        "but",
        "then",
        "otherwise",
    }
)
"""First words of a test's name that refer to another test."""


def sources(trees: Iterable[str]) -> Iterator[Path]:
    for tree in trees:
        for path in sorted((ROOT / tree).rglob("*.py")):
            if "_pb2" not in path.name:
                yield path


def documents() -> Iterator[Path]:
    for path in sorted(ROOT.rglob("*.md")):
        parts = path.relative_to(ROOT).parts
        if not any(part.startswith(".") or part in ("node_modules", "build", "dist") for part in parts):
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


@dataclass(frozen=True)
class SourceNames:
    """The names in one file, each with its line: all that it introduces, its functions, and its public classes."""

    introduced: tuple[tuple[str, int], ...]
    functions: tuple[tuple[str, int], ...]
    public_classes: tuple[str, ...]


@cache
def names_in(path: Path) -> SourceNames:
    tree = ast.parse(path.read_text())
    functions = (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))
    classes = (node.name for node in tree.body if isinstance(node, ast.ClassDef))
    return SourceNames(
        tuple(names_of(tree)),
        tuple((each.name, each.lineno) for each in functions),
        tuple(name for name in classes if not name.startswith("_")),
    )


def words_of(name: str) -> set[str]:
    return {each.lower() for each in re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])", name)}


def texts_of(source: str) -> Iterator[tuple[str, int]]:
    """Yield the comments, docstrings and string literals of ``source``, line by line, with their line numbers.

    Of an f-string, only its literal parts. The lines of a string are counted from its first one. Nothing is yielded for
    a source without a banned word anywhere.
    """
    if BANNED.search(source) is None:
        return
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.string, token.start[0]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str | bytes):
            text = node.value if isinstance(node.value, str) else node.value.decode("latin-1")
            for offset, line in enumerate(text.split("\n")):
                yield line, node.lineno + (offset if node.end_lineno != node.lineno else 0)


def prose_of(page: str) -> Iterator[tuple[str, int]]:
    """Yield the lines of a Markdown page outside code, with their numbers."""
    in_code = False
    for number, line in enumerate(page.split("\n"), start=1):
        if re.match(r"\s*(```|~~~)", line):
            in_code = not in_code
        elif not in_code:
            yield re.sub(r"`[^`]*`", "", line), number


def banned(texts: Iterable[tuple[str, int]], file: str) -> Iterator[str]:
    """Yield a message for each banned word in ``texts``."""
    for text, line in texts:
        for found in BANNED.findall(text):
            word = found.lower()
            if (file, word) not in ALLOWED:
                yield f'{file}:{line}: "{found}": write {INSTEAD[word]} instead'


def unclear(name: str) -> str:
    """Return why the name of a test is no full claim; empty if it may be one."""
    words = name.removeprefix("test_").split("_")
    if len(words) < 3:
        return "fewer than three words"
    if words[0] in UNCLEAR_START:
        return f'starts with "{words[0]}"'
    if "also" in words or words[-1] == "too":
        return "refers to another test"
    return ""


def test_no_two_public_classes_share_a_name() -> None:
    places = defaultdict(list)
    for path in sources(PACKAGES):
        for name in names_in(path).public_classes:
            places[name].append(str(path.relative_to(ROOT)))
    assert {name: where for name, where in places.items() if len(where) > 1} == {}


@pytest.mark.parametrize(
    ("trees", "replaced"), [(PACKAGES, REPLACED), (("tests",), REPLACED_IN_TESTS)], ids=["product", "tests"]
)
def test_no_name_of_the_code_is_made_of_a_replaced_word(trees: tuple[str, ...], replaced: frozenset[str]) -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line}: {name}"
        for path in sources(trees)
        for name, line in names_in(path).introduced
        if words_of(name) & replaced
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


@pytest.mark.parametrize("tree", TREES)
def test_no_comment_docstring_or_string_contains_a_banned_word(tree: str) -> None:
    found = [
        message
        for path in sources([tree])
        if (file := str(path.relative_to(ROOT))) not in QUOTES_OLD_WORDS
        for message in banned(texts_of(path.read_text()), file)
    ]
    assert found == [], "\n" + "\n".join(found)


def test_no_prose_of_a_document_contains_a_banned_word() -> None:
    found = [
        message
        for path in documents()
        if (file := str(path.relative_to(ROOT))) not in QUOTES_OLD_WORDS
        for message in banned(prose_of(path.read_text()), file)
    ]
    assert found == [], "\n" + "\n".join(found)


def test_every_allowed_use_of_a_banned_word_exists() -> None:
    for file, word in ALLOWED:
        assert word in (ROOT / file).read_text().lower(), f"{file} does not contain {word} any more"


@pytest.mark.parametrize(
    ("source", "messages"),
    [
        ("x = 1  # told twice", ['f.py:1: "told": write notified, reported, logged or sent instead']),
        ('"""One.\n\nTwo: anew.\n"""', ['f.py:3: "anew": write again instead']),
        ('f"Nobody has {device}."', ['f.py:1: "Nobody": write no process, no pod or no operator instead']),
        ('b"whoever"', ['f.py:1: "whoever": write the process, pod or operator that instead']),
        ("told = f'{nobody}'", []),
        ("'a told-apart device, mending'", []),
    ],
)
def test_banned_word_in_a_text_is_reported_with_its_line_and_replacement(source: str, messages: list[str]) -> None:
    assert list(banned(texts_of(source), "f.py")) == messages


def test_banned_word_in_a_code_block_of_a_document_is_ignored() -> None:
    page = "Plain.\n```\nnobody\n```\nThe user `nobody`.\nIt starts anew."
    assert list(banned(prose_of(page), "p.md")) == ['p.md:6: "anew": write again instead']


def test_every_test_name_is_a_claim_that_can_be_understood_alone() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line}: {name}: {reason}"
        for path in sources(["tests"])
        for name, line in names_in(path).functions
        if name.startswith("test_") and (reason := unclear(name))
    ]
    assert found == [], "\n" + "\n".join(found)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("test_quarantined_device_is_not_advertised", ""),
        ("test_too_few_devices_fail_the_admission", ""),
        ("test_it_is_not_advertised", 'starts with "it"'),
        ("test_neither_is_the_other_device", 'starts with "neither"'),
        ("test_reset_works", "fewer than three words"),
        ("test_a_reset_is_also_logged", "refers to another test"),
        ("test_restart_is_scrubbed_too", "refers to another test"),
    ],
)
def test_unclear_test_name_is_detected_with_the_reason(name: str, reason: str) -> None:
    assert unclear(name) == reason
