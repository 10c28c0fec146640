"""Which device a vendor's id means."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plugin.upstream.device_ids import DeviceIds, DeviceNames, parse_pci_address, resolve_lists

GPU = "GPU-d0e5a7c1-8a54-11ee-b9d1-0242ac120002"
OTHER = "GPU-e1f6b8d2-8a54-11ee-b9d1-0242ac120002"
MIG = "MIG-0f1e2d3c-8a54-11ee-b9d1-0242ac120002"
SHARED_NODES = frozenset({"nvidiactl", "nvidia-uvm"})

NODE = DeviceIds(
    (
        DeviceNames(GPU, "0", pci="00000000:3B:00.0", nodes=SHARED_NODES | {"nvidia0"}),
        DeviceNames(OTHER, "1", pci="0000:af:00.0", nodes=SHARED_NODES | {"nvidia1"}),
        DeviceNames(
            MIG, "2:0", parent="GPU-parent", pci="0000:d8:00.0", nodes=SHARED_NODES | {"nvidia2", "nvidia-cap3"}
        ),
    )
)


@pytest.mark.parametrize(
    ("id_", "device"),
    [
        (GPU, GPU),
        (f"{GPU}::0", GPU),
        (f"{GPU}::17", GPU),
        (MIG, MIG),
        (f"{MIG}::3", MIG),
        ("0", GPU),
        ("1::2", OTHER),
        ("2:0", MIG),
        ("nvidia0", GPU),
        ("nvidia1", OTHER),
        ("0000:3b:00.0", GPU),
        ("3b:00.0", GPU),
        ("0000:AF:00.0", OTHER),
        ("00000000:af:00.0::1", OTHER),
    ],
)
def test_vendor_id_may_be_a_uuid_a_pci_address_an_index_a_device_node_or_a_replica(id_: str, device: str) -> None:
    meaning = NODE.resolve(id_)
    assert (meaning.device, meaning.refusal) == (device, "")


@pytest.mark.parametrize(
    "id_",
    [
        *("", "::", "::0", "GPU-d0e5", "2", "nvidiactl", "nvidia-uvm", "nvidia-cap3", "nvidia2", "nvidia0/gi1", "SN-1"),
        *("0000:d8:00.0", "0000:3b:00.1", "0000:3b:00", f"{GPU}::", f"{GPU}::x", f"{GPU}:0", f"{GPU}::0::1", f" {GPU}"),
        f"{GPU}::²",
    ],
)
def test_id_of_no_known_device_is_refused_with_a_message(id_: str) -> None:
    meaning = NODE.resolve(id_)
    assert meaning.device == ""
    assert "knows no device with this id" in meaning.refusal


def test_gpu_partitioned_into_mig_instances_is_refused() -> None:
    assert "partitioned into instances" in NODE.resolve("GPU-parent").refusal


def test_ambiguous_vendor_id_is_refused() -> None:
    meaning = DeviceIds((DeviceNames("0", "7"), DeviceNames(GPU, "0"))).resolve("0")
    assert meaning.device == ""
    assert meaning.refusal == f"Device 0 is withheld: its id is ambiguous and may mean 0, {GPU}."


def test_device_listed_under_two_ids_is_refused_under_both() -> None:
    meanings = resolve_lists(NODE, {"v/gpu": [GPU, "0", OTHER]})["v/gpu"]
    assert (meanings[GPU].device, meanings["0"].device, meanings[OTHER].device) == ("", "", OTHER)
    assert meanings["0"].refusal == f"Device 0 is withheld: it is {GPU}, which is also listed as {GPU}."


def test_device_listed_in_two_resources_is_refused_in_both() -> None:
    meanings = resolve_lists(NODE, {"v/gpu": [GPU], "w/gpu": [f"{GPU}::0", "1"]})
    assert meanings["v/gpu"][GPU].refusal.endswith(f"which w/gpu also lists as {GPU}::….")
    assert meanings["w/gpu"][f"{GPU}::0"].refusal.endswith(f"which v/gpu also lists as {GPU}.")
    assert meanings["w/gpu"]["1"].device == OTHER


def test_resource_of_a_vendor_that_is_down_yields_to_one_that_is_present() -> None:
    meanings = resolve_lists(NODE, {"v/gpu": [GPU], "v/gpu.shared": [f"{GPU}::0"]}, away={"v/gpu"})
    assert meanings["v/gpu"][GPU].device == ""
    assert meanings["v/gpu.shared"][f"{GPU}::0"].device == GPU


def test_replicas_of_one_device_do_not_conflict() -> None:
    meanings = resolve_lists(NODE, {"v/gpu": [f"{GPU}::{number}" for number in range(4)]})["v/gpu"]
    assert {meaning.device for meaning in meanings.values()} == {GPU}


def test_device_listed_beside_its_own_replicas_is_refused() -> None:
    meanings = resolve_lists(NODE, {"v/gpu": [GPU, f"{GPU}::0"]})["v/gpu"]
    assert {meaning.device for meaning in meanings.values()} == {""}


words = st.sampled_from(["a", "b", "0", "1", "0:1", "3b:00.0", "0000:3b:00.0", "nvidia0", "nvidia1", ""])
devices = st.builds(
    DeviceNames, id=words.filter(bool), index=words, parent=words, pci=words, nodes=st.frozensets(words)
)
nodes = st.lists(devices, max_size=4, unique_by=lambda each: each.id).map(lambda each: DeviceIds(tuple(each)))
ids = st.builds("{}{}".format, words | st.text(max_size=4), st.sampled_from(["", "::0", "::1", "::x"]))


@given(nodes, ids)
def test_vendor_id_resolves_either_to_one_known_device_or_to_a_refusal(node: DeviceIds, id_: str) -> None:
    meaning = node.resolve(id_)
    assert bool(meaning.device) is not bool(meaning.refusal)
    assert not meaning.device or meaning.device in {each.id for each in node.devices}


@given(nodes, st.dictionaries(st.sampled_from(["v/a", "v/b"]), st.lists(ids, unique=True, max_size=5)))
def test_device_is_handed_out_under_one_id_or_its_replicas_in_one_resource_only(
    node: DeviceIds, lists: dict[str, list[str]]
) -> None:
    meanings = resolve_lists(node, lists)
    assert {resource: list(each) for resource, each in meanings.items()} == lists
    granted: dict[str, set[tuple[str, str, bool]]] = {}
    for resource, each in meanings.items():
        for meaning in each.values():
            if meaning.device:
                granted.setdefault(meaning.device, set()).add((resource, meaning.base, meaning.replica))
    assert all(len(claimants) == 1 for claimants in granted.values())


@given(st.integers(0, 0xFFFF), st.integers(0, 255), st.integers(0, 31), st.integers(0, 7))
def test_pci_address_is_parsed_alike_in_every_spelling(domain: int, bus: int, device: int, function: int) -> None:
    spellings = {
        f"{domain:04x}:{bus:02x}:{device:02x}.{function}",
        f"{domain:08X}:{bus:02X}:{device:02X}.{function}",
    }
    assert {parse_pci_address(each) for each in spellings} == {(domain, bus, device, function)}
