"""Which of the node's devices a daemon offers: the value of ``--devices``. Pure.

The device plugin and the DRA driver can serve different devices of one node, so that both accept the same language.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum
from fnmatch import fnmatchcase
from typing import Self

from plugin.kubelet.devices import AdvertisedDevice
from scrubber.domain.errors import InvalidConfiguration

__all__ = ["ALL_DEVICES", "DeviceSelection"]

_INDEX = re.compile("[0-9]+(:[0-9]+)?")
_RANGE = re.compile("[0-9]+ *(-|[.][.]) *[0-9]+")
_ALL = "all"
_SYNTAX = (
    "Write, separated by commas: indexes (0, or 0:1 of an instance), UUIDs or patterns of them (GPU-4a*), gpu, instance, "
    "model=PATTERN, profile=PATTERN, or all; with ! before an entry to exclude it."
)


class _Kind(StrEnum):
    GPU = "gpu"
    INSTANCE = "instance"
    MODEL = "model"
    PROFILE = "profile"
    INDEX = "index"
    UUID = "uuid"


@dataclass(frozen=True, slots=True)
class _Entry:
    kind: _Kind
    value: str = ""

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read one entry, without an exclamation mark; raises :class:`InvalidConfiguration`."""
        key, equals, pattern = (part.strip() for part in text.partition("="))
        if equals:
            if key not in (_Kind.MODEL, _Kind.PROFILE) or not pattern:
                raise _invalid(text, "is not known")
            return cls(_Kind(key), pattern)
        if text in (_Kind.GPU, _Kind.INSTANCE):
            return cls(_Kind(text))
        if _INDEX.fullmatch(text):
            return cls(_Kind.INDEX, text)
        if _RANGE.fullmatch(text):
            raise _invalid(text, "is a range, which is not supported: list the indexes")
        if not text or text.startswith("!") or any(each.isspace() for each in text):
            raise _invalid(text, "is not known")
        return cls(_Kind.UUID, text)

    def matches(self, device: AdvertisedDevice) -> bool:
        """Return whether it names the device, or the GPU of an instance."""
        match self.kind:
            case _Kind.GPU:
                return not device.parent
            case _Kind.INSTANCE:
                return bool(device.parent)
            case _Kind.MODEL:
                return fnmatchcase(device.model, self.value)
            case _Kind.PROFILE:
                return bool(device.profile) and fnmatchcase(device.profile, self.value)
            case _Kind.INDEX:
                return device.index == self.value or device.index.startswith(f"{self.value}:")
            case _Kind.UUID:
                return fnmatchcase(device.id, self.value) or fnmatchcase(device.parent, self.value)


@dataclass(frozen=True, slots=True)
class DeviceSelection:
    """The devices that an entry of ``wanted`` names, or all where it is empty, without those that ``excluded`` names."""

    wanted: tuple[_Entry, ...] = ()
    excluded: tuple[_Entry, ...] = ()

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read the value of ``--devices``; the empty text means all devices.

        Raises:
            InvalidConfiguration: an entry that is not known.
        """
        words = [word.strip() for word in text.split(",")] if text.strip() else [_ALL]
        excluded = tuple(_Entry.parse(word[1:].strip()) for word in words if word.startswith("!"))
        wanted = [word for word in words if not word.startswith("!")]
        entries = tuple(_Entry.parse(word) for word in wanted if word != _ALL)
        return cls(() if _ALL in wanted else entries, excluded)

    def includes(self, device: AdvertisedDevice) -> bool:
        """Return whether the device is offered."""
        wanted = not self.wanted or any(each.matches(device) for each in self.wanted)
        return wanted and not any(each.matches(device) for each in self.excluded)


ALL_DEVICES = DeviceSelection()


def _invalid(text: str, problem: str) -> InvalidConfiguration:
    return InvalidConfiguration(f"--devices: the entry {text!r} {problem}. {_SYNTAX}")
