"""The table of XIDs: what each code means for a device, where that comes from, and what it says in a few words.

It is data with a source for every row, because public tools disagree on some codes, and because new ones appear with new
GPUs. A policy changes the class of a code without touching the table.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import Field, model_validator

from scrubber.config.complaints import validated
from scrubber.config.policy_values import Codes, choice, refuse
from scrubber.config.section import Section
from scrubber.config.shipped import shipped_xids
from scrubber.config.yaml_lines import file_content, read_yaml
from scrubber.domain.errors import BadConfiguration
from scrubber.domain.policy import XidClass

__all__ = ["XidRow", "load_xids", "parse_xids", "xid_schema"]


@dataclass(frozen=True, slots=True)
class XidRow:
    """One code.

    Attributes:
        source: the name of where the class comes from; the file explains its names.
        note: what the code says, in a few words; no sentence.
    """

    code: int
    kind: XidClass
    source: str
    note: str


class XidEntry(Section):
    """A code, or a range of codes that mean the same."""

    code: Codes = Field(description="A number such as 79, or a range such as 39-41.", examples=["79"])
    class_: Annotated[XidClass, choice(XidClass)] = Field(
        description="What it means for the device.", examples=["unknown"]
    )
    source: str = Field(min_length=1, description="Where the class comes from: one of sources.", examples=["action"])
    note: str = Field(min_length=1, description="What the code says, in a few words.", examples=["what the code says"])


class XidFile(Section):
    """What the XIDs of NVIDIA's driver mean."""

    sources: dict[str, Annotated[str, Field(min_length=1)]] = Field(
        description="Names for where classes come from, each explained.",
        examples=["{action: what the vendor asks for}"],
    )
    xids: list[XidEntry] = Field(
        description="One row for each code or range.",
        examples=["[{code: 79, class: reboot, source: action, note: off the bus}]"],
    )

    @model_validator(mode="after")
    def _rows_can_be_told_apart(self) -> Self:
        first: dict[int, int] = {}
        for position, entry in enumerate(self.xids):
            if entry.source not in self.sources:
                refuse(
                    f'the source "{entry.source}" is not explained; write one of {", ".join(self.sources)}, or explain it '
                    "under sources",
                    *("xids", position, "source"),
                )
            for code in entry.code:
                if code in first:
                    refuse(
                        f"XID {code} has a row already ({_written(self.xids[first[code]].code)}); keep one of them",
                        *("xids", position, "code"),
                    )
                first[code] = position
        return self

    def rows(self) -> dict[int, XidRow]:
        return {
            code: XidRow(code, entry.class_, entry.source, " ".join(entry.note.split()))
            for entry in self.xids
            for code in entry.code
        }


def load_xids(path: Path | None = None) -> Mapping[int, XidRow]:
    """The table at ``path``, or the one that ships: code → row, in the order of the codes.

    Raises:
        BadConfiguration: it cannot be read, or is no such table.
    """
    ours = path is None
    path = shipped_xids() if path is None else path
    try:
        content = file_content(path, "a table of XIDs")
    except (OSError, ValueError) as error:  # ValueError: a path that no file can have
        why = getattr(error, "strerror", None) or error
        raise BadConfiguration(f"{path}: the table of XIDs cannot be read: {why}.") from error
    return parse_xids(content, str(path), ours=ours)


def parse_xids(content: bytes, name: str, *, ours: bool = False) -> Mapping[int, XidRow]:
    """The table in ``content``; ``name`` is how the file is called in complaints, ``ours``: it ships with the program.

    Raises:
        BadConfiguration: one line for each complaint, in the order of the file: ``FILE:LINE: what is wrong; what helps``.
    """
    document = read_yaml(content, name, ours=ours)
    if not isinstance(document.value, dict):
        raise BadConfiguration(
            f"{name}:{document.line(())}: a table of XIDs is a mapping with the keys sources and xids; "
            "begin with a line such as sources:."
        )
    return dict(sorted(validated(XidFile, document, name).rows().items()))


def xid_schema() -> dict[str, Any]:
    """JSON Schema (2020-12) of the table, for editors; ``policies/schema/`` holds it, generated."""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **XidFile.model_json_schema(by_alias=True, mode="validation"),
        "title": "XIDs",
    }


def _written(codes: tuple[int, ...]) -> str:
    return str(codes[0]) if len(codes) == 1 else f"{codes[0]}-{codes[-1]}"
