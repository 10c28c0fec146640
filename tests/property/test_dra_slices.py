"""ResourceSlices for any devices: they are valid, they converge, and taints keep their times."""

from __future__ import annotations

import itertools
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from plugin.cluster.taint import TaintEffect
from plugin.dra.slices import (
    DeviceTaint,
    Readiness,
    SliceDevice,
    SliceFeatures,
    SliceOwner,
    SlicePlan,
    plan_slices,
    slice_contents,
    taint_times,
)
from tests.dra_slices import SliceStore

DRIVER = "gpu.scrubber.dev"
OWNER = SliceOwner(DRIVER, "node-1", "uid-of-node-1")
TOKENS = map(str, itertools.count(1000))

TAINTS = st.lists(
    st.builds(
        DeviceTaint,
        st.sampled_from(["quarantined", "scrub-failed", "xid", "a b", ""]),
        st.sampled_from([TaintEffect.NO_SCHEDULE, TaintEffect.NO_EXECUTE]),
    ),
    max_size=2,
).map(tuple)
DEVICES = st.builds(
    SliceDevice,
    id=st.integers(0, 400).map(lambda number: f"GPU-{number:04d}"),
    index=st.integers(0, 400).map(str),
    readiness=st.sampled_from(Readiness),
    model=st.text(max_size=80),
    memory_bytes=st.sampled_from([0, 1, 1000, 80 << 30, 81559 << 20]),
    driver_version=st.sampled_from(["", "580.95.05", "6.1", "nightly", "1.2.3.4"]),
    pci_address=st.sampled_from(["", "0000:3B:00.0", "nonsense"]),
    numa_node=st.none() | st.integers(0, 7),
    peers=st.frozensets(st.integers(0, 400).map(lambda number: f"GPU-{number:04d}"), max_size=3),
    parent=st.sampled_from(["", "", "GPU-0001", "GPU-9999"]),
    profile=st.sampled_from(["", "1g.10gb"]),
    taints=TAINTS,
)
NODES = st.lists(DEVICES, max_size=140, unique_by=lambda device: device.id)
FEATURES = st.builds(SliceFeatures, st.booleans(), st.booleans())


def plan(
    store: SliceStore, devices: list[SliceDevice], features: SliceFeatures | None = None, last: int = 0
) -> SlicePlan:
    found = list(store.slices.values())
    contents = slice_contents(devices, DRIVER, features)
    return plan_slices(
        contents, found, OWNER, times=taint_times(found), last_generation=last, token=lambda: next(TOKENS)
    )


def pools(store: SliceStore) -> set[tuple[int, int]]:
    spec = [each["spec"]["pool"] for each in store.slices.values()]
    return {(each["generation"], each["resourceSliceCount"]) for each in spec}


@given(st.lists(st.tuples(NODES, FEATURES), min_size=1, max_size=4))
def test_slices_are_valid_and_complete_after_any_changes(
    steps: list[tuple[list[SliceDevice], SliceFeatures]],
) -> None:
    store = SliceStore()
    highest = 0
    for devices, features in steps:
        store.apply(plan(store, devices, features))  # raises what the API server would refuse
        ((generation, count),) = pools(store)
        assert count == len(store.slices)
        assert generation >= highest
        highest = generation
        assert len(store.names()) == len(set(store.names()))
        assert not plan(store, devices, features)


@given(NODES)
def test_scheduler_sees_the_cleanest_devices_first(devices: list[SliceDevice]) -> None:
    store = SliceStore()
    store.apply(plan(store, devices))
    readiness = {f"gpu-{device.id[4:]}": device.readiness for device in devices}
    seen = [readiness[name] for name in store.names()]
    assert seen == sorted(seen)


@given(NODES, st.data())
def test_taint_that_stays_keeps_its_time(devices: list[SliceDevice], data: st.DataObject) -> None:
    store = SliceStore()
    store.apply(plan(store, devices))
    before = taint_times(store.slices.values())
    changed = [replace(device, readiness=data.draw(st.sampled_from(Readiness))) for device in devices]
    store.apply(plan(store, changed))
    assert taint_times(store.slices.values()) == before


@given(NODES)
def test_device_with_a_taint_is_not_published_where_taints_are_not_kept(devices: list[SliceDevice]) -> None:
    store = SliceStore()
    store.apply(plan(store, devices, SliceFeatures(taints=False)))
    parents = {device.parent for device in devices}
    assert len(store.names()) == len([each for each in devices if not each.taints and each.id not in parents])


@given(NODES, st.integers(0, 10))
def test_slices_that_others_deleted_return_with_a_higher_generation(devices: list[SliceDevice], keep: int) -> None:
    store = SliceStore()
    store.apply(plan(store, devices))
    ((generation, _),) = pools(store)
    names = store.names()
    for name in sorted(store.slices)[keep % (len(store.slices)) :]:
        store.delete(name)
    store.apply(plan(store, devices, last=generation))
    assert store.names() == names
    assert {each for each, _ in pools(store)} == {generation + 1}


@given(NODES)
def test_counters_of_a_gpu_suffice_for_all_of_its_instances(devices: list[SliceDevice]) -> None:
    store = SliceStore()
    store.apply(plan(store, devices))
    sets = [each for one in store.slices.values() for each in one["spec"].get("sharedCounters", [])]
    assert len({each["name"] for each in sets}) == len(sets)
    for each in sets:
        parent = next(d.parent for d in devices if d.parent and d.parent.lower() == each["name"])
        assert sum(d.memory_bytes for d in devices if d.parent == parent) <= _bytes(each["counters"]["memory"]["value"])
    consumed = {use["counterSet"] for device in store.devices() for use in device.get("consumesCounters", [])}
    assert consumed == {each["name"] for each in sets}


def _bytes(text: str) -> int:
    digits = text.rstrip("KMGTPEik")
    base = 1024 if text.endswith("i") else 1000
    return int(digits) * int(base ** " KMGTPE".index((text[len(digits) :] or " ")[0].upper()))
