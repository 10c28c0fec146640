"""``--devices``: which devices a daemon offers."""

from __future__ import annotations

import pytest

from plugin.device_selection import ALL_DEVICES, DeviceSelection
from plugin.kubelet.devices import AdvertisedDevice, ServiceVerdict
from scrubber.domain.errors import InvalidConfiguration


def device(id_: str, index: str, **facts: str) -> AdvertisedDevice:
    return AdvertisedDevice(id_, index, ServiceVerdict.ADVERTISED, **facts)  # type: ignore[arg-type]


H200, L4 = "NVIDIA H200", "NVIDIA L4"
NODE = (
    device("GPU-4a00", "0", model=H200),
    device("GPU-4a01", "1", model=L4),
    device("MIG-5b00", "2:0", parent="GPU-4a02", profile="1g.18gb", model=H200),
    device("MIG-5b01", "2:1", parent="GPU-4a02", profile="3g.71gb", model=H200),
    device("GPU-4a10", "10", model=H200),
)


@pytest.mark.parametrize(
    ("text", "indexes"),
    [
        ("", ["0", "1", "2:0", "2:1", "10"]),
        ("all", ["0", "1", "2:0", "2:1", "10"]),
        ("0", ["0"]),
        ("1", ["1"]),
        ("1,10", ["1", "10"]),
        (" 1 , 10 ", ["1", "10"]),
        ("2", ["2:0", "2:1"]),
        ("2:1", ["2:1"]),
        ("GPU-4a01", ["1"]),
        ("GPU-4a0*", ["0", "1", "2:0", "2:1"]),
        ("GPU-4a02", ["2:0", "2:1"]),
        ("MIG-*", ["2:0", "2:1"]),
        ("gpu", ["0", "1", "10"]),
        ("instance", ["2:0", "2:1"]),
        ("model=NVIDIA L4", ["1"]),
        ("model=*H200*", ["0", "2:0", "2:1", "10"]),
        ("profile=1g.*", ["2:0"]),
        ("profile=*", ["2:0", "2:1"]),
        ("!0", ["1", "2:0", "2:1", "10"]),
        ("!2:1", ["0", "1", "2:0", "10"]),
        ("instance,!profile=1g.*", ["2:1"]),
        ("all,!gpu", ["2:0", "2:1"]),
        ("!instance,!GPU-4a10", ["0", "1"]),
        ("0,all", ["0", "1", "2:0", "2:1", "10"]),
        ("GPU-ffff", []),
        ("gpu-4a00", []),
    ],
)
def test_selection_includes_what_its_entries_name(text: str, indexes: list[str]) -> None:
    selection = DeviceSelection.parse(text)
    assert [each.index for each in NODE if selection.includes(each)] == indexes


@pytest.mark.parametrize("text", ["", " ", "all"])
def test_selection_of_everything_is_equal_to_none(text: str) -> None:
    assert DeviceSelection.parse(text) == ALL_DEVICES


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("0-3", "'0-3' is a range, which is not supported: list the indexes"),
        ("0..3", "is a range"),
        ("0,,1", "the entry '' is not known"),
        ("0,", "the entry '' is not known"),
        ("!", "the entry '' is not known"),
        ("!!0", "'!0' is not known"),
        ("uuid=GPU-0", "'uuid=GPU-0' is not known"),
        ("model=", "'model=' is not known"),
        ("NVIDIA H200", "'NVIDIA H200' is not known"),
    ],
)
def test_entry_that_is_not_known_is_refused_with_the_syntax(text: str, problem: str) -> None:
    with pytest.raises(InvalidConfiguration, match="--devices: ") as refused:
        DeviceSelection.parse(text)
    assert problem in str(refused.value)
    assert "UUIDs or patterns of them (GPU-4a*)" in str(refused.value)
