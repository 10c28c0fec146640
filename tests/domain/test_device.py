"""Naming a device on the command line: UUID, a unique beginning of it, or its index."""

from __future__ import annotations

import pytest

from scrubber.domain.device import Device, find_device
from scrubber.domain.errors import InvalidRequest

DEVICES = tuple(
    Device(f"GPU-{name}", index, "model", 1) for name, index in (("aa11", "0"), ("aa22", "1"), ("bb33", "10"))
)


@pytest.mark.parametrize(
    ("wanted", "found"),
    [("GPU-aa11", "GPU-aa11"), ("GPU-b", "GPU-bb33"), ("10", "GPU-bb33"), ("1", "GPU-aa22"), ("0", "GPU-aa11")],
)
def test_a_device_is_found_by_uuid_unique_beginning_or_index(wanted: str, found: str) -> None:
    assert find_device(DEVICES, wanted).id == found


def test_an_index_is_not_a_beginning() -> None:
    with pytest.raises(InvalidRequest, match="No device is called '2'"):
        find_device(DEVICES, "2")


def test_an_ambiguous_beginning_names_what_it_could_mean() -> None:
    with pytest.raises(InvalidRequest, match=r"beginning of 2 device ids \(GPU-aa11, GPU-aa22\)"):
        find_device(DEVICES, "GPU-aa")


@pytest.mark.parametrize("wanted", ["", "GPU-cc", "gpu-aa11"])
def test_an_unknown_device_is_answered_with_those_that_there_are(wanted: str) -> None:
    with pytest.raises(InvalidRequest, match=r"this node has: 0 \(GPU-aa11\)"):
        find_device(DEVICES, wanted)


def test_a_whole_id_wins_over_being_the_beginning_of_another() -> None:
    devices = (*DEVICES, Device("GPU-aa11-long", "3", "model", 1))
    assert find_device(devices, "GPU-aa11").index == "0"


def test_a_node_without_devices_says_so() -> None:
    with pytest.raises(InvalidRequest, match="this node has: none"):
        find_device((), "0")
