"""What all sections of an administrator's file have in common: strict, closed, and changed key by key by an override."""

from __future__ import annotations

from typing import Self

from pydantic import BaseModel, ConfigDict

__all__ = ["Section"]


def _hyphens(name: str) -> str:
    return name.rstrip("_").replace("_", "-")


class Section(BaseModel):
    """What is not known is refused, and nothing is converted behind the administrator's back."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, alias_generator=_hyphens)

    def changed_by(self, other: Section) -> Self:
        """This section with the keys that were written in ``other``, and of a mapping with the entries that were.

        Entries of ``other`` come first: of patterns the first that fits counts.
        """
        changes: dict[str, object] = {}
        for name in other.model_fields_set:
            before, after = getattr(self, name), getattr(other, name)
            if isinstance(after, dict):
                after = {**after, **{key: value for key, value in before.items() if key not in after}}
            changes[name] = after
        return self.model_copy(update=changes)
