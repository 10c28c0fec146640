"""Reads YAML with the line of every value, so that every error message has a line number; also writes YAML.

It reads only what a policy needs: one document, plain mappings, lists and scalars. Anchors, aliases and tags are
refused (an alias can make a small file arbitrarily large, a tag requests code), and so are duplicate keys, of which
other readers silently use the last. Scalars follow YAML 1.2: ``no`` is a string, not ``false``, and ``1:30`` is not
ninety.
"""

from __future__ import annotations

import math
import os
import re
import stat
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from yaml.composer import Composer

from scrubber.domain.errors import InvalidConfiguration

__all__ = [
    "MAX_BYTES",
    "Location",
    "Scalar",
    "Value",
    "YamlDocument",
    "dump_yaml",
    "parse_yaml",
    "printable",
    "read_configuration_file",
    "read_regular_file",
]

Scalar = str | int | float | bool | None
Value = Scalar | list["Value"] | dict[str, "Value"]
Location = tuple[str | int, ...]
"""The path from the document's root to a value: keys and list positions."""

MAX_BYTES = 1024 * 1024
_MAX_DEPTH = 64
"""Levels of mappings and lists. PyYAML's time is quadratic in them: a megabyte of brackets would take it hours."""
_PLAIN = (
    (re.compile(r"(?:null|Null|NULL|~|)\Z"), "null"),
    (re.compile(r"(?:true|True|TRUE|false|False|FALSE)\Z"), "bool"),
    (re.compile(r"[-+]?[0-9]+\Z"), "int"),
    (re.compile(r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?\Z"), "float"),
    (re.compile(r"(?:[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))\Z"), "float"),
)


@dataclass(frozen=True, slots=True)
class YamlDocument:
    """A document and the lines of its parts. Lines count from 1."""

    value: Value
    key_lines: Mapping[Location, int]
    value_lines: Mapping[Location, int]

    def line(self, where: Location) -> int:
        """Return the line of ``where``: that of its key if there is one, else that of the nearest enclosing part."""
        for length in range(len(where), 0, -1):
            part = where[:length]
            found = self.key_lines.get(part) or self.value_lines.get(part)
            if found is not None:
                return found
        return self.value_lines.get((), 1)


def read_configuration_file(path: Path, what: str, *, remedy: str = "") -> bytes:
    """Read a whole file, as :func:`read_regular_file` does.

    Args:
        what: what the file should be, for error messages: "policy".
        remedy: what to do when it cannot be read.

    Raises:
        InvalidConfiguration: it cannot be read, is not a regular file, or too large.
    """
    try:
        return read_regular_file(path, f"a {what}")
    except (OSError, ValueError) as error:  # ValueError: an invalid path
        why = getattr(error, "strerror", None) or error
        helps = f"; {remedy}" if remedy else ""
        raise InvalidConfiguration(f"{path}: the {what} cannot be read: {why}{helps}.") from error


def read_regular_file(path: Path, what: str) -> bytes:
    """Read a whole regular file; a pipe could block its reader forever, and so could a huge file.

    Args:
        what: what the file should be, for error messages: "a policy".

    Raises:
        InvalidConfiguration: it is not a regular file, or too large.
        OSError: it cannot be read.
        ValueError: no file can have this path.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise InvalidConfiguration(f"{path}: {what} must be a regular file; save it to one.")
        with open(descriptor, "rb", closefd=False) as file:
            content = file.read(MAX_BYTES + 1)
    finally:
        os.close(descriptor)
    if len(content) > MAX_BYTES:
        raise InvalidConfiguration(f"{path}: {what} may have at most {MAX_BYTES} bytes; this file is longer.")
    return content


def parse_yaml(content: bytes, name: str, *, bundled: bool = False) -> YamlDocument:
    """Parse ``content``; ``name`` is the name of the file in error messages.

    Args:
        bundled: whether it is bundled with the program. Then libyaml reads it, if installed, which takes a tenth of the
            time and accepts some things that are refused in other files, such as tabs.

    Raises:
        InvalidConfiguration: not UTF-8, empty, too large, not YAML, or YAML that is not supported here.
    """
    if len(content) > MAX_BYTES:
        raise InvalidConfiguration(f"{name}: the file has {len(content)} bytes; the limit is {MAX_BYTES}.")
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise InvalidConfiguration(
            f"{name}:{line}: the byte 0x{content[error.start]:02x} is not UTF-8; save the file as UTF-8."
        ) from error
    node = _compose(text, name, bundled)
    if node is None:
        raise InvalidConfiguration(f"{name}:1: the file is empty.")
    reading = _NodeReader(name)
    value = reading.value(node, ())
    return YamlDocument(value, reading.key_lines, reading.value_lines)


class _Composer(Composer):
    """Composes nodes from events that were already read; resolves no tags, because tags are not supported."""

    def __init__(self, events: Iterable[yaml.Event]) -> None:
        super().__init__()
        self._events: list[Any] = [*events][::-1]

    def check_event(self, *choices: type[yaml.Event]) -> bool:
        return not choices or isinstance(self._events[-1], choices)

    def peek_event(self) -> Any:
        return self._events[-1]

    def get_event(self) -> Any:
        return self._events.pop()

    def descend_resolver(self, *_: object) -> None: ...

    def ascend_resolver(self) -> None: ...

    def resolve(self, *_: object) -> str:
        return ""


def _compose(text: str, name: str, bundled: bool) -> yaml.Node | None:
    try:
        node: yaml.Node | None = _Composer(
            _libyaml_events(text, name) if bundled else _events(text, name)
        ).get_single_node()
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise InvalidConfiguration(
            f"{name}:{line}: the character U+{error.character:04X} is not allowed in a YAML file."
        ) from error
    except (ValueError, OverflowError) as error:  # from an escape such as \U00110000
        raise InvalidConfiguration(
            f"{name}:1: this is not YAML: it contains an escape that is not a character."
        ) from error
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = 1 if mark is None else mark.line + 1
        problem = printable(str(error.problem))
        raise InvalidConfiguration(f"{name}:{line}: this is not YAML: {problem}{_yaml_hint(error)}.") from error
    return node


def _events(text: str, name: str, loader: Any = yaml.SafeLoader) -> Iterator[yaml.Event]:
    depth = 0
    for event in yaml.parse(text, Loader=loader):
        tag = getattr(event, "tag", None)
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None) is not None:
            refusal = "anchors and aliases (& and *) are not supported; write the value out"
        elif tag is not None:
            refusal = f"the tag {printable(tag)} is not supported; remove it"
        elif depth > _MAX_DEPTH:
            refusal = f"the file is nested too deeply; at most {_MAX_DEPTH} levels are read"
        else:
            yield event
            continue
        line = 1 if event.start_mark is None else event.start_mark.line + 1
        raise InvalidConfiguration(f"{name}:{line}: {refusal}.")


def _libyaml_events(text: str, name: str) -> list[yaml.Event]:
    """Like :func:`_events`; what libyaml cannot read is read again, for the messages of the other parser."""
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    try:
        return list(_events(text, name, loader))
    except (yaml.YAMLError, ValueError):
        return list(_events(text, name))


def _yaml_hint(error: yaml.MarkedYAMLError) -> str:
    if "'\\t'" in (error.problem or ""):
        return "; indent with spaces, not tabs"
    if "mapping values are not allowed" in (error.problem or ""):
        return "; check the indentation, and quote text that contains a colon"
    if "another document" in (error.problem or ""):
        return "; a file contains one document (a line --- begins another)"
    return ""


class _NodeReader:
    """One pass over a node tree."""

    def __init__(self, name: str) -> None:
        self._name = name
        self.key_lines: dict[Location, int] = {}
        self.value_lines: dict[Location, int] = {}

    def value(self, node: yaml.Node, where: Location) -> Value:
        self.value_lines[where] = node.start_mark.line + 1
        if isinstance(node, yaml.MappingNode):
            return self._mapping(node, where)
        if isinstance(node, yaml.SequenceNode):
            return [self.value(item, (*where, position)) for position, item in enumerate(node.value)]
        return self._scalar(node)

    def _scalar(self, node: yaml.Node) -> Scalar:
        text = str(node.value)
        try:
            text.encode()
            return _scalar(node)
        except UnicodeEncodeError:
            wrong = "an escape produces half a surrogate pair; write the character itself"
        except ValueError:  # an integer with more digits than Python reads
            wrong = f"the number {text[:20]}… has {len(text)} digits, which is out of range"
        raise InvalidConfiguration(f"{self._name}:{node.start_mark.line + 1}: {wrong}.")

    def _mapping(self, node: yaml.MappingNode, where: Location) -> dict[str, Value]:
        found: dict[str, Value] = {}
        for key_node, value_node in node.value:
            line = key_node.start_mark.line + 1
            if not isinstance(key_node, yaml.ScalarNode):
                raise InvalidConfiguration(f"{self._name}:{line}: a key must be a scalar.")
            key = str(key_node.value)
            self._scalar(key_node)
            inner = (*where, key)
            if key in found:
                first = self.key_lines[inner]
                raise InvalidConfiguration(
                    f'{self._name}:{line}: the key "{printable(key)}" is a duplicate (first on line {first}); keep one of them.'
                )
            self.key_lines[inner] = line
            found[key] = self.value(value_node, inner)
        return found


def _is_plain_string(text: str) -> bool:
    """Whether ``text`` is read as a string without quotes, i.e. not as a number, boolean or null."""
    return not any(pattern.match(text) for pattern, _ in _PLAIN)


def _scalar(node: yaml.Node) -> Scalar:
    text = str(node.value)
    if getattr(node, "style", None):  # empty when the scalar is plain; libyaml uses the empty string
        return text
    for pattern, kind in _PLAIN:
        if pattern.match(text):
            return _plain(text, kind)
    return text


def _plain(text: str, kind: str) -> Scalar:
    if kind == "null":
        return None
    if kind == "bool":
        return text.lower() == "true"
    if kind == "int":
        return int(text)
    if "inf" in text.lower():
        return -math.inf if text.startswith("-") else math.inf
    return float(text.replace(".nan", "nan").replace(".NaN", "nan").replace(".NAN", "nan"))


class _Writer(yaml.SafeDumper):
    """Writes what :func:`parse_yaml` reads: no anchors, and no unquoted string that YAML 1.2 reads as a number."""

    def ignore_aliases(self, data: object) -> bool:
        return True

    def represent_word(self, text: str) -> yaml.Node:
        return self.represent_scalar("tag:yaml.org,2002:str", text, style=None if _is_plain_string(text) else "'")

    def represent_sequence_style(self, entries: list[object]) -> yaml.Node:
        on_one_line = not any(isinstance(each, dict) for each in entries)
        return self.represent_sequence("tag:yaml.org,2002:seq", entries, flow_style=on_one_line)


_Writer.add_representer(str, _Writer.represent_word)
_Writer.add_representer(list, _Writer.represent_sequence_style)


def printable(text: str) -> str:
    """Return ``text``, part of a file, for a message of one line: line ends and control characters are escaped."""
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode("ascii") for each in text)


def dump_yaml(values: Mapping[str, Any]) -> str:
    """Return ``values`` as the text of a file; ASCII."""
    return yaml.dump(dict(values), Dumper=_Writer, sort_keys=False, width=120)
