"""JSON that another program wrote, read strictly: values of the expected shape, or the first place that differs from it.

With the standard library, because a service must not load a validation library for two small documents.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

__all__ = ["JsonValue", "UnexpectedJson", "parse_json"]


class UnexpectedJson(ValueError):
    """The text is not JSON, or a value is not as expected; the message says where and why."""


class JsonValue:
    """A value and its location in the document. Members that are not asked for may have any value."""

    __slots__ = ("_value", "_where")

    def __init__(self, value: object, where: str = "") -> None:
        self._value = value
        self._where = where

    def member(self, name: str) -> JsonValue:
        """Return a member of an object; raises :class:`UnexpectedJson` when it is no object or lacks the member."""
        if not isinstance(self._value, dict):
            raise self._unexpected("must be an object")
        if name not in self._value:
            raise self._unexpected(f'lacks the member "{name}"')
        return self._inner(self._value[name], name)

    def text(self, *, may_be_empty: bool = False) -> str:
        """Return a string that is not empty, unless it may be; raises :class:`UnexpectedJson` for anything else."""
        if not isinstance(self._value, str) or not (self._value or may_be_empty):
            raise self._unexpected("must be a string" if may_be_empty else "must be a string that is not empty")
        try:
            self._value.encode()
        except UnicodeEncodeError:
            raise self._unexpected("contains half a surrogate pair") from None
        return self._value

    def elements(self) -> Iterator[JsonValue]:
        """Yield the elements of an array, none for null; raises :class:`UnexpectedJson` for anything else."""
        if self._value is None:
            return
        if not isinstance(self._value, list):
            raise self._unexpected("must be an array")
        for position, each in enumerate(self._value):
            yield self._inner(each, str(position))

    def members(self) -> Iterator[JsonValue]:
        """Yield the values of an object, none for null; raises :class:`UnexpectedJson` for anything else."""
        if self._value is None:
            return
        if not isinstance(self._value, dict):
            raise self._unexpected("must be an object")
        for name, each in self._value.items():
            yield self._inner(each, name)

    def _inner(self, value: object, name: str) -> JsonValue:
        return JsonValue(value, f"{self._where}.{name}" if self._where else name)

    def _unexpected(self, problem: str) -> UnexpectedJson:
        where = self._where.encode("unicode_escape").decode("ascii")  # its keys are the writer's: no control characters
        return UnexpectedJson(f"{where}: {problem}" if where else problem)


def parse_json(text: bytes) -> JsonValue:
    """Parse UTF-8 text; raises :class:`UnexpectedJson` for anything that is not JSON, and for nesting without end."""
    try:
        return JsonValue(json.loads(text.decode()))
    except RecursionError:
        raise UnexpectedJson("nested too deeply") from None
    except ValueError as error:
        raise UnexpectedJson(f"not JSON: {error}") from None
