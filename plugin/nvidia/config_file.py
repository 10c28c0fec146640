"""Reads NVIDIA's configuration file value by value; every error names its line.

Invariant: a key that is not known is refused in the section ``sharing``, where ignoring it would change what pods get,
and is reported elsewhere: NVIDIA's plugin ignores unknown keys, and its other programs read the same file.

Of the section ``sharing``, which lists the resources that are advertised as shares, time slicing is supported. MPS is
refused: a separate daemon would have to serve the clients, and a device that it serves is not cleared while they run.
``rename`` and ``devices`` of an entry are refused where they have an effect, because NVIDIA's plugin ignores them: a
node would be shared differently from what is written.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from enum import StrEnum
from pathlib import Path, PurePosixPath
from typing import TypeVar

from plugin.kubelet.registration import resource_name_error
from plugin.kubelet.resources import NVIDIA_RESOURCE
from plugin.kubelet.shares import MAX_SHARES, TimeSlicing
from scrubber.config.yaml_document import Location, Value, YamlDocument, printable
from scrubber.domain.errors import InvalidConfiguration

__all__ = ["ConfigFile", "read_sharing"]

_Choice = TypeVar("_Choice", bound=StrEnum)
_Place = TypeVar("_Place", PurePosixPath, Path, str)

_AT: Location = ("sharing", "timeSlicing")


class ConfigFile:
    """The values of one file. A missing value is None; every method raises :class:`InvalidConfiguration`.

    Args:
        name: name of the file in error messages.

    Attributes:
        ignored: where each unknown key is, as ``LINE: KEY``.
    """

    def __init__(self, name: str, document: YamlDocument) -> None:
        self._name = name
        self._document = document
        self.ignored: list[str] = []

    @property
    def root(self) -> Value:
        return self._document.value

    def section(
        self, at: Location, value: Value, known: Collection[str], *, strict: bool = False
    ) -> Mapping[str, Value]:
        """Return the mapping at ``at``, empty when it is missing.

        Args:
            known: its keys; another one is refused if ``strict``, otherwise added to :attr:`ignored`.
        """
        if value is None:
            return {}
        if not isinstance(value, dict):
            raise self.configuration_error(at, "must be a mapping of keys to values")
        for key in value:
            if key in known:
                continue
            where = (*at, key)
            if strict:
                raise self.configuration_error(where, f"is not a known key; known are {', '.join(sorted(known))}")
            self.ignored.append(f"{self._document.line(where)}: {printable('.'.join(map(str, where)))}")
        return value

    def choice(self, at: Location, section: Mapping[str, Value], key: str, kind: type[_Choice]) -> _Choice | None:
        """Return one of the values of ``kind``."""
        value = section.get(key)
        if value is None:
            return None
        try:
            return kind(str(value))
        except ValueError:
            raise self.configuration_error((*at, key), f'is "{value}"; use one of: {", ".join(kind)}') from None

    def boolean(self, at: Location, section: Mapping[str, Value], key: str) -> bool | None:
        """Return true or false."""
        value = section.get(key)
        if value is None or isinstance(value, bool):
            return value
        raise self.configuration_error((*at, key), f'is "{value}"; use true or false')

    def text(self, at: Location, section: Mapping[str, Value], key: str) -> str | None:
        """Return a string; None for an empty one."""
        value = section.get(key)
        if value is None or isinstance(value, str):
            return value or None
        raise self.configuration_error((*at, key), f'is "{value}"; use a string')

    def path(
        self, at: Location, section: Mapping[str, Value], key: str, kind: Callable[[str], _Place]
    ) -> _Place | None:
        """Return a path that begins with a slash."""
        value = self.text(at, section, key)
        if value is not None and not value.startswith("/"):
            raise self.configuration_error((*at, key), f'is "{value}"; use a path that begins with /')
        return None if value is None else kind(value)

    def origin(self, location: Location) -> str:
        """Return ``FILE:LINE: KEY``, for the error message of another module."""
        return f"{self._name}:{self._document.line(location)}: {printable('.'.join(map(str, location))) or 'the file'}"

    def configuration_error(self, location: Location, what: str) -> InvalidConfiguration:
        """Return the error for the value at ``location``."""
        return InvalidConfiguration(f"{self.origin(location)} {printable(what)}.")


def read_sharing(file: ConfigFile, value: Value) -> TimeSlicing | None:
    """Return what the file shares; None where it does not configure sharing.

    Raises:
        InvalidConfiguration: it requests something unsupported; the message contains the line.
    """
    ways = file.section(("sharing",), value, {"timeSlicing", "mps"}, strict=True)
    keys = {"resources", "renameByDefault", "failRequestsGreaterThanOne"}
    if file.section(("sharing", "mps"), ways.get("mps"), keys, strict=True).get("resources"):
        raise file.configuration_error(
            ("sharing", "mps"),
            "requests MPS, which is not supported: the service does not scrub a device that an MPS server uses. "
            "Use timeSlicing, or remove it",
        )
    slicing = file.section(_AT, ways.get("timeSlicing"), keys, strict=True)
    renamed = bool(file.boolean(_AT, slicing, "renameByDefault"))
    one_each = bool(file.boolean(_AT, slicing, "failRequestsGreaterThanOne"))
    entries = slicing.get("resources")
    if not isinstance(entries, list | None):
        raise file.configuration_error((*_AT, "resources"), "must be a list of entries with name and replicas")
    if not entries:
        return None
    shares: dict[str, int] = {}
    for position, entry in enumerate(entries):
        where = (*_AT, "resources", position)
        known = file.section(where, entry, {"name", "replicas", "rename", "devices"}, strict=True)
        name = _name(file, where, known)
        if name in shares:
            raise file.configuration_error(where, f"lists {name} twice")
        shares[name] = _replicas(file, where, known)
        sharing = TimeSlicing({name: shares[name]}, renamed)
        _refuse_ignored_keys(file, where, known, name, sharing.advertised_name(name))
        if error := resource_name_error(sharing.advertised_name(name)):
            raise file.configuration_error(where, f"cannot be advertised: {error.rstrip('.')}")
    return TimeSlicing(shares, renamed, one_each)


def _name(file: ConfigFile, where: Location, entry: Mapping[str, Value]) -> str:
    name = file.text(where, entry, "name")
    if name is None:
        raise file.configuration_error(where, "has no name; set a resource name, such as nvidia.com/gpu")
    return _qualified(name)


def _qualified(name: str) -> str:
    """Return the name with its domain; NVIDIA's where none is written."""
    return name if "/" in name else f"{NVIDIA_RESOURCE.partition('/')[0]}/{name}"


def _replicas(file: ConfigFile, where: Location, entry: Mapping[str, Value]) -> int:
    count = entry.get("replicas")
    if count is None:
        raise file.configuration_error(where, "has no replicas; set the number of shares of each device")
    if not isinstance(count, int) or isinstance(count, bool) or not 2 <= count <= MAX_SHARES:
        raise file.configuration_error((*where, "replicas"), f'is "{count}"; use a number from 2 to {MAX_SHARES}')
    return count


def _refuse_ignored_keys(
    file: ConfigFile, where: Location, entry: Mapping[str, Value], name: str, advertised_name: str
) -> None:
    rename = file.text(where, entry, "rename")
    if rename is not None and _qualified(rename) != advertised_name:
        raise file.configuration_error(
            (*where, "rename"),
            f"renames {name} to {rename}, which NVIDIA's plugin ignores: the name is {advertised_name}. Remove it; "
            "renameByDefault: true appends .shared to the name",
        )
    if entry.get("devices") not in (None, "all"):
        raise file.configuration_error(
            (*where, "devices"),
            "selects devices, which NVIDIA's plugin ignores: it shares all. Remove it, or use all",
        )
