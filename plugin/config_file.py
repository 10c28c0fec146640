"""Reading NVIDIA's configuration file: one value after the other, each complaint with its line.

Promise: what is not understood is refused, never passed over.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from enum import StrEnum
from pathlib import Path, PurePosixPath
from typing import TypeVar

from scrubber.config.yaml_lines import Located, Location, Value
from scrubber.domain.errors import BadConfiguration

__all__ = ["ConfigFile"]

_Choice = TypeVar("_Choice", bound=StrEnum)
_Place = TypeVar("_Place", PurePosixPath, Path, str)


class ConfigFile:
    """The parts of one file. Where nothing is written the answer is None; everything raises :class:`BadConfiguration`.

    Args:
        name: what the file is called in complaints.
    """

    def __init__(self, name: str, document: Located) -> None:
        self._name = name
        self._document = document

    @property
    def whole(self) -> Value:
        return self._document.value

    def section(self, at: Location, value: Value, known: Collection[str]) -> Mapping[str, Value]:
        """The keys and values at ``at``, all of which are among ``known``; none where nothing is written."""
        if value is None:
            return {}
        if not isinstance(value, dict):
            raise self.complaint(at, "must be a section of keys and values")
        for key in value:
            if key not in known:
                raise self.complaint((*at, key), f"is not known; there is {', '.join(sorted(known))}")
        return value

    def choice(self, at: Location, section: Mapping[str, Value], key: str, kind: type[_Choice]) -> _Choice | None:
        """One of the words of ``kind``."""
        value = section.get(key)
        if value is None:
            return None
        try:
            return kind(str(value))
        except ValueError:
            raise self.complaint((*at, key), f'is "{value}"; write one of {", ".join(kind)}') from None

    def truth(self, at: Location, section: Mapping[str, Value], key: str) -> bool | None:
        """True or false."""
        value = section.get(key)
        if value is None or isinstance(value, bool):
            return value
        raise self.complaint((*at, key), f'is "{value}"; write true or false')

    def text(self, at: Location, section: Mapping[str, Value], key: str) -> str | None:
        """A text; None for an empty one."""
        value = section.get(key)
        if value is None or isinstance(value, str):
            return value or None
        raise self.complaint((*at, key), f'is "{value}"; write a text')

    def path(
        self, at: Location, section: Mapping[str, Value], key: str, kind: Callable[[str], _Place]
    ) -> _Place | None:
        """A path that begins with a slash."""
        value = self.text(at, section, key)
        if value is not None and not value.startswith("/"):
            raise self.complaint((*at, key), f'is "{value}"; write a path that begins with /')
        return None if value is None else kind(value)

    def origin(self, where: Location) -> str:
        """``FILE:LINE: KEY``, for a complaint of somebody else's."""
        return f"{self._name}:{self._document.line(where)}: {'.'.join(str(part) for part in where) or 'the file'}"

    def complaint(self, where: Location, what: str) -> BadConfiguration:
        """The error for what is at ``where``."""
        return BadConfiguration(f"{self.origin(where)} {what}.")
