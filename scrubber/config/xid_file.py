"""The XID table: the class of each code, its source, and a short description.

It is data with a source for every row, because public tools disagree on some codes, and because new ones appear with
new GPUs. A policy changes the class of a code without modifying the table.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

from scrubber.config.bundled import bundled_xid_table
from scrubber.config.value_formats import (
    CODES,
    NON_EMPTY_TEXT,
    Choice,
    KeyFormat,
    ListOf,
    MappingOf,
    SectionFormat,
    json_schema,
    read_document,
    refuse,
)
from scrubber.config.yaml_document import Location, parse_yaml, read_configuration_file
from scrubber.domain.errors import InvalidConfiguration
from scrubber.domain.health.signal_table import ErrorClass

__all__ = ["XidRow", "load_xid_table", "parse_xid_table", "xid_schema"]


@dataclass(frozen=True, slots=True)
class XidRow:
    """One code.

    Attributes:
        source: name of the source of the class; the file explains its names.
        note: a short description of the code; not a full sentence.
    """

    code: int
    error_class: ErrorClass
    source: str
    note: str


_ENTRY = SectionFormat(
    "XidEntry",
    "One code, or a range of codes with the same meaning.",
    (
        KeyFormat("code", CODES, "A number such as 79, or a range such as 39-41.", required=True, example="79"),
        KeyFormat(
            "class",
            Choice(ErrorClass, "XidClass", "What an XID means for the device."),
            "What it means for the device.",
            required=True,
            example="unknown",
        ),
        KeyFormat(
            "source", NON_EMPTY_TEXT, "The origin of the class: one of sources.", required=True, example="action"
        ),
        KeyFormat(
            "note", NON_EMPTY_TEXT, "A short description of the code.", required=True, example="what the code means"
        ),
    ),
)


class _XidFile(SectionFormat):
    """The complete table. Reading returns its rows by code."""

    def read(self, raw: Any, where: Location) -> dict[int, XidRow]:
        values = super().read(raw, where)
        rows: dict[int, XidRow] = {}
        first: dict[int, tuple[int, ...]] = {}
        for position, entry in enumerate(values["xids"]):
            at = (*where, "xids", position)
            if entry["source"] not in values["sources"]:
                known = ", ".join(values["sources"])
                message = (
                    f'the source "{entry["source"]}" is not explained; write one of {known}, or explain it '
                    "under sources"
                )
                refuse((*at, "source"), message)
            note = " ".join(entry["note"].split())
            for code in entry["code"]:
                if code in rows:
                    message = f"XID {code} is already listed ({_format_code_range(first[code])}); keep one of them"
                    refuse((*at, "code"), message)
                first[code] = entry["code"]
                rows[code] = XidRow(code, entry["class"], entry["source"], note)
        return rows


_FILE = _XidFile(
    "XidFile",
    "The meaning of the XIDs of NVIDIA's driver.",
    (
        KeyFormat(
            "sources",
            MappingOf(NON_EMPTY_TEXT),
            "The origins of classes, each with an explanation.",
            required=True,
            example="{action: what the vendor asks for}",
        ),
        KeyFormat(
            "xids",
            ListOf(_ENTRY),
            "One row for each code or range of codes.",
            required=True,
            example="[{code: 79, class: reboot, source: action, note: off the bus}]",
        ),
    ),
)


def load_xid_table(path: Path | None = None) -> Mapping[int, XidRow]:
    """Load the table at ``path``, or the bundled one: code → row, ordered by code.

    Raises:
        InvalidConfiguration: it cannot be read or is not a valid table.
    """
    return _bundled() if path is None else _load(path, bundled=False)


@cache
def _bundled() -> Mapping[int, XidRow]:
    return MappingProxyType(_load(bundled_xid_table(), bundled=True))


def _load(path: Path, *, bundled: bool) -> Mapping[int, XidRow]:
    return parse_xid_table(read_configuration_file(path, "table of XIDs"), str(path), bundled=bundled)


def parse_xid_table(content: bytes, name: str, *, bundled: bool = False) -> Mapping[int, XidRow]:
    """Parse the table in ``content``.

    ``name`` is the name of the file in messages; ``bundled``: whether it is bundled with the program.

    Raises:
        InvalidConfiguration: one line for each error, in the order of the file: ``FILE:LINE: what is wrong; what
            helps``.
    """
    document = parse_yaml(content, name, bundled=bundled)
    if not isinstance(document.value, dict):
        raise InvalidConfiguration(
            f"{name}:{document.line(())}: a table of XIDs is a mapping with the keys sources and xids; "
            "begin with a line such as sources:."
        )
    return dict(sorted(read_document(_FILE, document, name).items()))


def xid_schema() -> dict[str, Any]:
    """JSON Schema (2020-12) of the table, for editors; generated into ``policies/schema/``."""
    return json_schema(_FILE, "XIDs")


def _format_code_range(codes: tuple[int, ...]) -> str:
    return str(codes[0]) if len(codes) == 1 else f"{codes[0]}-{codes[-1]}"
