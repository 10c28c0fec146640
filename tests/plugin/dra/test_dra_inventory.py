"""Which devices are published, and with which taints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from plugin.dra.inventory import pcie_root, slice_devices
from plugin.dra.slices import Readiness
from plugin.kubelet.devices import AdvertisedDevice, ServiceVerdict
from scrubber.domain.states import BindingState, TaintReason


def device(**facts: Any) -> AdvertisedDevice:
    facts.setdefault("verdict", ServiceVerdict.ADVERTISED)
    facts.setdefault("healthy", facts["verdict"] is ServiceVerdict.ADVERTISED)
    return AdvertisedDevice(id="GPU-a0", index="0", **facts)


@pytest.mark.parametrize(
    ("facts", "readiness", "reasons"),
    [
        ({"certified": True}, Readiness.CLEAN, []),
        ({"scrubbing": True}, Readiness.SCRUBBING, []),
        ({}, Readiness.DIRTY, []),
        ({"taints": (TaintReason("dirty"),)}, Readiness.DIRTY, ["dirty"]),
        ({"verdict": ServiceVerdict.WITHHELD, "taints": (TaintReason("xid"),)}, Readiness.WITHHELD, ["xid"]),
        ({"verdict": ServiceVerdict.WITHHELD}, Readiness.WITHHELD, ["out-of-service"]),
        ({"verdict": ServiceVerdict.HELD}, Readiness.WITHHELD, ["held"]),
        (
            {"verdict": ServiceVerdict.HELD, "taints": (TaintReason("xid"), TaintReason("yielded"))},
            Readiness.WITHHELD,
            ["xid", "yielded"],
        ),
        ({"verdict": ServiceVerdict.UNKNOWN}, Readiness.WITHHELD, ["service-away"]),
        ({"healthy": False, "certified": True}, Readiness.WITHHELD, ["service-away"]),
    ],
)
def test_device_that_may_not_be_handed_over_has_a_taint_with_the_reason(
    facts: dict[str, Any], readiness: Readiness, reasons: list[str]
) -> None:
    (found,) = slice_devices([device(**facts)])
    assert (found.readiness, [each.reason for each in found.taints]) == (readiness, reasons)


def test_taint_evicts_pods_only_where_the_service_says_so() -> None:
    taints = TaintReason("xid", evicts=True), TaintReason("held")
    (found,) = slice_devices([device(verdict=ServiceVerdict.WITHHELD, taints=taints)])
    assert [each.effect.value for each in found.taints] == ["NoExecute", "NoSchedule"]


@pytest.mark.parametrize("state", [None, *BindingState])
def test_scheduler_can_wait_only_for_a_device_that_is_being_cleaned(state: BindingState | None) -> None:
    (found,) = slice_devices([device(binding=state)])
    assert found.being_cleaned is (state is BindingState.BEING_CLEANED)


def test_device_that_is_gone_is_not_published() -> None:
    assert slice_devices([device(gone=True, verdict=ServiceVerdict.WITHHELD)]) == ()


def test_device_is_described_as_the_service_does(tmp_path: Path) -> None:
    address = "0000:3b:00.0"
    (tmp_path / "devices/pci0000:3a/0000:3a:01.0" / address).mkdir(parents=True)
    (tmp_path / "bus/pci/devices").mkdir(parents=True)
    (tmp_path / "bus/pci/devices" / address).symlink_to(tmp_path / "devices/pci0000:3a/0000:3a:01.0" / address)
    facts = {
        "model": "H200",
        "memory_bytes": 141 << 30,
        "driver_version": "6.1",
        "pci_address": address.upper(),
        "numa_node": 1,
        "peers": frozenset({"GPU-a1"}),
        "parent": "GPU-p",
        "profile": "1g.10gb",
    }
    (found,) = slice_devices([device(**facts)], sysfs=tmp_path)
    assert {name: getattr(found, name) for name in facts} == facts
    assert found.pcie_root == "pci0000:3a"


@pytest.mark.parametrize("address", ["", "../../etc", "0000:99:00.0"])
def test_pcie_root_of_an_unknown_address_is_unknown(tmp_path: Path, address: str) -> None:
    assert pcie_root(address, tmp_path) == ""
