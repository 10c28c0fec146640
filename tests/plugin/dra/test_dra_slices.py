"""What a ResourceSlice contains, and when its generation grows."""

from __future__ import annotations

import copy
import itertools
from dataclasses import replace
from typing import Any

import pytest

from plugin.cluster.taint import TaintEffect
from plugin.dra.slices import (
    DeviceTaint,
    Readiness,
    SliceDevice,
    SliceFeatures,
    SliceOwner,
    SlicePlan,
    dropped_features,
    plan_slices,
    quantity,
    semantic_version,
    slice_contents,
    taint_times,
)
from tests.dra_slices import SliceStore

DRIVER = "gpu.scrubber.dev"
OWNER = SliceOwner(DRIVER, "node-1", "uid-of-node-1")
WITH_BINDING = SliceFeatures(binding_conditions=True)
TOKENS = map(str, itertools.count(1000))


def device(number: int, **facts: Any) -> SliceDevice:
    facts.setdefault("readiness", Readiness.CLEAN)
    return SliceDevice(id=f"GPU-{number:04d}", index=str(number), **facts)


def plan(store: SliceStore, *devices: SliceDevice, owner: SliceOwner = OWNER, **facts: Any) -> SlicePlan:
    found = list(store.slices.values())
    facts.setdefault("times", taint_times(found))
    facts.setdefault("last_generation", 0)
    contents = slice_contents(devices, DRIVER, facts.pop("features", None))
    return plan_slices(contents, found, owner, token=lambda: next(TOKENS), **facts)


def test_device_is_published_with_its_attributes_and_capacity() -> None:
    (content,) = slice_contents(
        [
            device(
                1,
                model="NVIDIA H200",
                memory_bytes=141 << 30,
                driver_version="580.95.05",
                pci_address="0000:3B:00.0",
                pcie_root="pci0000:3a",
                numa_node=1,
                peers=frozenset({"GPU-0002"}),
            ),
            device(2),
        ],
        DRIVER,
    )
    assert content["devices"][0] == {
        "name": "gpu-0001",
        "attributes": {
            "uuid": {"string": "GPU-0001"},
            "type": {"string": "gpu"},
            "productName": {"string": "NVIDIA H200"},
            "peerGroup": {"string": "gpu-0001"},
            "driverVersion": {"version": "580.95.5"},
            "numaNode": {"int": 1},
            "resource.kubernetes.io/pcieRoot": {"string": "pci0000:3a"},
            "resource.kubernetes.io/pciBusID": {"string": "0000:3b:00.0"},
        },
        "capacity": {"memory": {"value": "141Gi"}},
    }
    assert content["devices"][1]["attributes"]["peerGroup"] == {"string": "gpu-0001"}


def test_instances_share_the_memory_of_their_gpu_which_is_not_published() -> None:
    gpu = device(1, memory_bytes=80 << 30)
    parts = [device(number, memory_bytes=10 << 30, parent=gpu.id, profile="1g.10gb") for number in (11, 12)]
    devices, counters = slice_contents([gpu, *parts], DRIVER)
    assert counters == {"sharedCounters": [{"name": "gpu-0001", "counters": {"memory": {"value": "80Gi"}}}]}
    assert [each["name"] for each in devices["devices"]] == ["gpu-0011", "gpu-0012"]
    first = devices["devices"][0]
    assert first["consumesCounters"] == [{"counterSet": "gpu-0001", "counters": {"memory": {"value": "10Gi"}}}]
    assert first["attributes"]["profile"] == {"string": "1g.10gb"}
    assert first["attributes"]["type"] == {"string": "instance"}


def test_taints_have_one_key_for_each_reason_with_its_strongest_effect() -> None:
    reasons = (
        DeviceTaint("xid", TaintEffect.NO_EXECUTE),
        DeviceTaint("xid"),
        DeviceTaint("scrub-failed"),
        DeviceTaint("not a label!"),
    )
    (content,) = slice_contents([device(1, taints=reasons)], DRIVER)
    assert content["devices"][0]["taints"] == [
        {"key": f"{DRIVER}/out-of-service", "effect": "NoSchedule"},
        {"key": f"{DRIVER}/scrub-failed", "effect": "NoSchedule"},
        {"key": f"{DRIVER}/xid", "effect": "NoExecute"},
    ]


def test_only_devices_that_are_being_cleaned_have_binding_conditions_and_only_where_they_are_requested() -> None:
    devices = device(1), device(2, readiness=Readiness.DIRTY, being_cleaned=True)
    (content,) = slice_contents(devices, DRIVER, WITH_BINDING)
    clean, dirty = content["devices"]
    assert not clean.keys() & {"bindingConditions", "bindingFailureConditions"}
    assert dirty["bindingConditions"] == [f"{DRIVER}/clean"]
    assert dirty["bindingFailureConditions"] == [f"{DRIVER}/not-clean"]
    (content,) = slice_contents(devices, DRIVER)
    assert not any("bindingConditions" in each for each in content["devices"])


def test_node_without_devices_has_one_empty_slice() -> None:
    store = SliceStore()
    store.apply(plan(store))
    ((name, found),) = store.slices.items()
    assert name.startswith(f"00-{DRIVER}-node-1-")
    assert found["spec"] == {
        "driver": DRIVER,
        "nodeName": "node-1",
        "pool": {"name": "node-1", "generation": 1, "resourceSliceCount": 1},
        "devices": [],
    }
    assert found["metadata"]["ownerReferences"] == [
        {"apiVersion": "v1", "kind": "Node", "name": "node-1", "uid": "uid-of-node-1", "controller": True}
    ]


def test_generation_stays_when_one_slice_changes_and_grows_when_two_do() -> None:
    store = SliceStore()
    devices = [device(number) for number in range(130)]
    store.apply(plan(store, *devices))
    assert len(store.slices) == 3
    devices[5] = device(5, model="other")
    one = plan(store, *devices)
    assert (len(one.create), len(one.replace), one.generation) == (0, 1, 1)
    store.apply(one)
    devices[6], devices[100] = device(6, model="other"), device(100, model="other")
    two = plan(store, *devices)
    assert (len(two.create), len(two.replace), two.generation) == (0, 3, 2)


def test_slice_that_another_client_changed_is_replaced() -> None:
    store = SliceStore()
    store.apply(plan(store, device(1)))
    (name,) = store.slices
    changed = copy.deepcopy(store.slices[name])
    changed["spec"]["devices"] = []
    store.write(changed)
    found = plan(store, device(1))
    assert [each["metadata"]["resourceVersion"] for each in found.replace] == ["2"]
    store.apply(found)
    assert store.names() == ["gpu-0001"]


def test_slices_of_another_pool_or_without_a_position_are_deleted() -> None:
    store = SliceStore()
    store.apply(plan(store, device(1)))
    foreign = copy.deepcopy(next(iter(store.slices.values())))
    for name, pool in (("00-other-pool", "pool-x"), ("strange", "node-1"), ("07-far", "node-1")):
        foreign["metadata"]["name"], foreign["spec"]["pool"]["name"] = name, pool
        store.write(foreign)
    deleted = [each["metadata"]["name"] for each in plan(store, device(1)).delete]
    assert sorted(deleted) == ["00-other-pool", "07-far", "strange"]


def test_slice_of_a_node_that_was_created_again_gets_its_new_owner() -> None:
    store = SliceStore()
    store.apply(plan(store, device(1)))
    found = plan(store, device(1), owner=SliceOwner(DRIVER, "node-1", "another-uid"))
    assert [each["metadata"]["ownerReferences"][0]["uid"] for each in found.replace] == ["another-uid"]


def test_taint_of_a_slice_that_was_deleted_keeps_its_time_from_memory() -> None:
    store = SliceStore()
    sick = device(1, taints=(DeviceTaint("xid"),))
    store.apply(plan(store, sick))
    times = taint_times(store.slices.values())
    store.delete(next(iter(store.slices)))
    store.apply(plan(store, sick, times=times, last_generation=1))
    assert taint_times(store.slices.values()) == times


@pytest.mark.parametrize(
    ("dropped", "kept"),
    [
        ([], WITH_BINDING),
        (["taints"], replace(WITH_BINDING, taints=False)),
        (["consumesCounters"], replace(WITH_BINDING, counters=False)),
        (["taints", "consumesCounters"], replace(WITH_BINDING, taints=False, counters=False)),
        (["bindingConditions", "bindingFailureConditions"], replace(WITH_BINDING, binding_conditions=False)),
    ],
)
def test_fields_that_the_api_server_dropped_are_recognized(dropped: list[str], kept: SliceFeatures) -> None:
    store = SliceStore(dropped=frozenset(dropped))
    facts: dict[str, Any] = {"taints": (DeviceTaint("xid"),), "being_cleaned": True}
    part = device(2, parent="GPU-0001", memory_bytes=1 << 30, **facts)
    (sent, _) = plan(store, part, features=WITH_BINDING).create
    assert dropped_features(sent, store.write(sent)) == kept


def test_shared_counters_that_the_api_server_dropped_are_recognized() -> None:
    store = SliceStore(dropped=frozenset({"sharedCounters"}))
    (_, sent) = plan(store, device(2, parent="GPU-0001", memory_bytes=1 << 30)).create
    assert dropped_features(sent, store.write(sent)) == replace(WITH_BINDING, counters=False)


@pytest.mark.parametrize(
    ("version", "semantic"),
    [("580.95.05", "580.95.5"), ("6.1", "6.1.0"), ("", ""), ("1.2.3.4", ""), ("v1", ""), ("1..2", "")],
)
def test_driver_version_is_published_as_a_semantic_version(version: str, semantic: str) -> None:
    assert semantic_version(version) == semantic


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (1, "1"), (1024, "1Ki"), (80 << 30, "80Gi"), (81559 << 20, "81559Mi"), (2000, "2k"), (1536, "1536")],
)
def test_quantity_has_the_api_servers_canonical_form(value: int, text: str) -> None:
    assert quantity(value) == text
