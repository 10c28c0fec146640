"""Declares policy settings: each once, as a field of the rule that uses it, with all its metadata.

Reader, writer, JSON schema, overrides and the reference page are derived from these declarations (``scrubber.config``).
A new setting is one field: its key in a file, its valid values and whether an override may set it are declared with its
default.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import Field, dataclass, field, fields, replace
from enum import Enum, StrEnum
from functools import cache
from typing import Any, TypeVar

__all__ = [
    "Declaration",
    "InvalidSetting",
    "ValueType",
    "camel_case",
    "computed",
    "decides_proof",
    "declarations",
    "section",
    "setting",
    "summary",
]

_T = TypeVar("_T")


class ValueType(Enum):
    """The type of a setting's value, and its unit."""

    SECTION = "settings of its own"
    BOOLEAN = "true or false"
    ENUM = "one of the words"
    NAME = "a name"
    INTEGER = "a whole number"
    CELSIUS = "degrees Celsius"
    PERCENT = "percent"
    SECONDS = "seconds"
    BYTES = "bytes"
    PER_SECOND = "per second"
    TIME_OF_DAY = "from and until, UTC"
    PATTERNS = "patterns"
    RESOURCES = "names of the kubelet's resources"
    SYSTEMD_UNITS = "names of systemd units"
    INFRASTRUCTURE_GROUPS = "names of groups"
    INFRASTRUCTURE_PODS = "namespaces and service accounts"
    SECONDS_BY_CONDITION = "seconds by condition"
    PER_SECOND_BY_MODEL = "per second, by model and check"
    PROOF_BY_HAND_OVER = "proofs by kind of hand-over"
    DEVICE_SETTINGS = "values by device setting"
    CODES_BY_CLASS = "codes and ranges of codes"
    OVERRIDES = "policies for some devices"


class InvalidSetting(ValueError):
    """Values that exclude each other, or a value that no node could work with.

    Attributes:
        field: the field of the rule, or the entry of the setting, to change.
    """

    def __init__(self, field: str, message: str) -> None:
        super().__init__(message)
        self.field = field


@dataclass(frozen=True, slots=True, kw_only=True)
class Declaration:
    """One setting, or one section of settings.

    Attributes:
        key: its key in a file.
        default: the value where a file does not set it.
        minimum, maximum: the inclusive range, in the unit of ``type``.
        optional: None is a valid value, which a file writes as a word: ``never``, ``always``, ``auto``.
        required: a file must set it.
        overridable: an override may set it for some devices; otherwise it applies to the whole node.
        in_override: what it is in an override, where different words apply. A section with such words accepts only
            overridable settings there.
        entries: the description of each entry, for a mapping with fixed keys.
        example: an example value, as a file writes it.
        check: raises :class:`InvalidSetting` for an invalid value. The method ``check`` of a rule checks settings that
            exclude each other.
    """

    type: ValueType
    description: str
    default: Any
    key: str = ""
    minimum: float | None = None
    maximum: float | None = None
    optional: bool = False
    required: bool = False
    overridable: bool = True
    in_override: str = ""
    entries: Mapping[StrEnum, str] = field(default_factory=dict)
    example: str = ""
    check: Callable[[Any], None] | None = None


def setting(
    default: _T, description: str, type: ValueType | None = None, *, decides_proof: bool = True, **known: Any
) -> _T:
    """Declare a field as a setting; ``known`` contains the other arguments of its :class:`Declaration`.

    Args:
        type: may be omitted for booleans, enums and plain numbers.
        decides_proof: whether the meaning of a certificate depends on it; when it changes, devices are scrubbed again.
    """
    declaration = Declaration(type=type or _type_of(default), description=description, default=default, **known)
    declared: _T = _field(default, _known(declaration, decides_proof))
    return declared


def section(rule: type[_T], *, overridable: bool = True, in_override: str = "", decides_proof: bool = True) -> _T:
    """Declare a field as a section: the settings that ``rule`` declares, described by its :func:`summary`."""
    declaration = Declaration(
        type=ValueType.SECTION,
        description=summary(rule),
        default=rule(),
        overridable=overridable,
        in_override=in_override,
    )
    declared: _T = field(default_factory=rule, metadata=_known(declaration, decides_proof))
    return declared


def computed(default: _T) -> _T:
    """Declare a field that no file sets and that does not affect what a certificate proves."""
    declared: _T = _field(default, {_DECIDES_PROOF: False})
    return declared


def camel_case(name: str) -> str:
    """Return ``name``, words joined by ``_`` or ``-``, as a Kubernetes key: ``hand_over`` is ``handOver``."""
    first, *rest = name.replace("-", "_").split("_")
    return first + "".join(each.capitalize() for each in rest)


@cache
def declarations(rule: type) -> Mapping[str, Declaration]:
    """Return the declarations of ``rule`` by field name, in the order of the fields; each with its key in camelCase."""
    found = {each.name: each.metadata.get(_DECLARATION) for each in fields(rule)}
    return {name: replace(each, key=each.key or camel_case(name)) for name, each in found.items() if each is not None}


def summary(rule: type) -> str:
    """Return the first paragraph of the docstring of ``rule``, which is also its description for administrators."""
    return " ".join((rule.__doc__ or "").split("\n\n")[0].split())


def decides_proof(field: Field[Any]) -> bool:
    """Return whether what a certificate proves depends on ``field``. True for a field without that metadata."""
    return bool(field.metadata.get(_DECIDES_PROOF, True))


_DECLARATION, _DECIDES_PROOF = "declaration", "decides proof"


def _known(declaration: Declaration, decides_proof: bool) -> dict[str, Any]:
    return {_DECLARATION: declaration, _DECIDES_PROOF: decides_proof}


def _field(default: Any, metadata: Mapping[str, Any]) -> Any:
    if type(default).__hash__ is None:  # every instance gets a separate copy
        return field(default_factory=lambda: copy(default), metadata=metadata)
    return field(default=default, metadata=metadata)


def _type_of(default: object) -> ValueType:
    if isinstance(default, bool):
        return ValueType.BOOLEAN
    if isinstance(default, StrEnum):
        return ValueType.ENUM
    if isinstance(default, int):
        return ValueType.INTEGER
    raise TypeError(f"the type cannot be derived from {default!r}; name it")
