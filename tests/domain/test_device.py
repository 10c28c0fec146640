"""Naming a device on the command line: by UUID, a unique prefix of it, or its index."""

from __future__ import annotations

import pytest

from scrubber.domain.device import Device, find_device
from scrubber.domain.errors import InvalidRequest

DEVICES = tuple(
    Device(f"GPU-{name}", index, "model", 1) for name, index in (("aa11", "0"), ("aa22", "1"), ("bb33", "10"))
)


@pytest.mark.parametrize(
    ("requested", "found"),
    [("GPU-aa11", "GPU-aa11"), ("GPU-b", "GPU-bb33"), ("10", "GPU-bb33"), ("1", "GPU-aa22"), ("0", "GPU-aa11")],
)
def test_device_is_found_by_uuid_unique_prefix_or_index(requested: str, found: str) -> None:
    assert find_device(DEVICES, requested).id == found


def test_index_of_a_device_is_not_matched_as_a_prefix() -> None:
    with pytest.raises(InvalidRequest, match="No device matches '2'"):
        find_device(DEVICES, "2")


def test_error_for_an_ambiguous_prefix_lists_the_matching_devices() -> None:
    with pytest.raises(InvalidRequest, match=r"prefix of 2 device ids \(GPU-aa11, GPU-aa22\)"):
        find_device(DEVICES, "GPU-aa")


@pytest.mark.parametrize("requested", ["", "GPU-cc", "gpu-aa11"])
def test_error_for_an_unknown_device_lists_the_devices_of_the_node(requested: str) -> None:
    with pytest.raises(InvalidRequest, match=r"this node has: 0 \(GPU-aa11\)"):
        find_device(DEVICES, requested)


def test_complete_device_id_precedes_a_prefix_match() -> None:
    devices = (*DEVICES, Device("GPU-aa11-long", "3", "model", 1))
    assert find_device(devices, "GPU-aa11").index == "0"


def test_error_for_an_unknown_device_states_that_the_node_has_no_devices() -> None:
    with pytest.raises(InvalidRequest, match="this node has: none"):
        find_device((), "0")
