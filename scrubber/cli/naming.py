"""Which device a person means: what the service does with a name, done here for what was listed already."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from scrubber.api import scrubber_pb2 as pb

__all__ = ["find"]


def find(known: Iterable[pb.Device], wanted: str) -> pb.Device:
    """The one of ``known`` that ``wanted`` names: its UUID, a unique prefix of it, or its index.

    Raises:
        InvalidRequest: no device, or more than one, answers to the name.
    """
    from scrubber.domain.device import Device, find_device

    by_id = {each.id: each for each in known}
    devices = (Device(each.id, each.index, each.model, each.memory_bytes) for each in by_id.values())
    return by_id[find_device(devices, wanted).id]
