"""Which device a vendor's id means."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plugin.upstream.names import Directory, Known, claims, pci_address

GPU = "GPU-d0e5a7c1-8a54-11ee-b9d1-0242ac120002"
OTHER = "GPU-e1f6b8d2-8a54-11ee-b9d1-0242ac120002"
MIG = "MIG-0f1e2d3c-8a54-11ee-b9d1-0242ac120002"
SHARED_NODES = frozenset({"nvidiactl", "nvidia-uvm"})

NODE = Directory(
    (
        Known(GPU, "0", pci="00000000:3B:00.0", nodes=SHARED_NODES | {"nvidia0"}),
        Known(OTHER, "1", pci="0000:af:00.0", nodes=SHARED_NODES | {"nvidia1"}),
        Known(MIG, "2:0", parent="GPU-parent", pci="0000:d8:00.0", nodes=SHARED_NODES | {"nvidia2", "nvidia-cap3"}),
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
def test_an_id_is_a_uuid_an_address_an_index_or_a_node_and_may_be_a_replica(id_: str, device: str) -> None:
    meaning = NODE.find(id_)
    assert (meaning.device, meaning.refusal) == (device, "")


@pytest.mark.parametrize(
    "id_",
    [
        *("", "::", "::0", "GPU-d0e5", "2", "nvidiactl", "nvidia-uvm", "nvidia-cap3", "nvidia2", "nvidia0/gi1", "SN-1"),
        *("0000:d8:00.0", "0000:3b:00.1", "0000:3b:00", f"{GPU}::", f"{GPU}::x", f"{GPU}:0", f"{GPU}::0::1", f" {GPU}"),
        f"{GPU}::²",
    ],
)
def test_what_is_the_name_of_no_device_is_refused_with_a_sentence(id_: str) -> None:
    meaning = NODE.find(id_)
    assert meaning.device == ""
    assert "knows no device that is called so" in meaning.refusal


def test_a_gpu_that_is_cut_into_instances_is_refused_as_that() -> None:
    assert "cut into instances" in NODE.find("GPU-parent").refusal


def test_an_id_that_could_be_two_devices_is_refused() -> None:
    meaning = Directory((Known("0", "7"), Known(GPU, "0"))).find("0")
    assert meaning.device == ""
    assert meaning.refusal == f"Device 0 is not handed out: it could be any of 0, {GPU}."


def test_one_device_under_two_names_is_refused_under_both() -> None:
    meanings = claims(NODE, {"v/gpu": [GPU, "0", OTHER]})["v/gpu"]
    assert (meanings[GPU].device, meanings["0"].device, meanings[OTHER].device) == ("", "", OTHER)
    assert meanings["0"].refusal == f"Device 0 is not handed out: it is {GPU}, which is also listed as {GPU}."


def test_one_device_in_two_resources_is_refused_in_both() -> None:
    meanings = claims(NODE, {"v/gpu": [GPU], "w/gpu": [f"{GPU}::0", "1"]})
    assert meanings["v/gpu"][GPU].refusal.endswith(f"which w/gpu lists as {GPU}::….")
    assert meanings["w/gpu"][f"{GPU}::0"].refusal.endswith(f"which v/gpu lists as {GPU}.")
    assert meanings["w/gpu"]["1"].device == OTHER


def test_a_resource_whose_plugin_is_away_gives_way_to_one_that_is_there() -> None:
    meanings = claims(NODE, {"v/gpu": [GPU], "v/gpu.shared": [f"{GPU}::0"]}, lingering={"v/gpu"})
    assert meanings["v/gpu"][GPU].device == ""
    assert meanings["v/gpu.shared"][f"{GPU}::0"].device == GPU


def test_the_replicas_of_one_device_do_not_contradict_each_other() -> None:
    meanings = claims(NODE, {"v/gpu": [f"{GPU}::{number}" for number in range(4)]})["v/gpu"]
    assert {meaning.device for meaning in meanings.values()} == {GPU}


def test_a_device_beside_its_own_replicas_is_refused() -> None:
    meanings = claims(NODE, {"v/gpu": [GPU, f"{GPU}::0"]})["v/gpu"]
    assert {meaning.device for meaning in meanings.values()} == {""}


words = st.sampled_from(["a", "b", "0", "1", "0:1", "3b:00.0", "0000:3b:00.0", "nvidia0", "nvidia1", ""])
devices = st.builds(Known, id=words.filter(bool), index=words, parent=words, pci=words, nodes=st.frozensets(words))
nodes = st.lists(devices, max_size=4, unique_by=lambda each: each.id).map(lambda each: Directory(tuple(each)))
ids = st.builds("{}{}".format, words | st.text(max_size=4), st.sampled_from(["", "::0", "::1", "::x"]))


@given(nodes, ids)
def test_an_id_is_one_known_device_or_a_sentence(node: Directory, id_: str) -> None:
    meaning = node.find(id_)
    assert bool(meaning.device) is not bool(meaning.refusal)
    assert not meaning.device or meaning.device in {each.id for each in node.known}


@given(nodes, st.dictionaries(st.sampled_from(["v/a", "v/b"]), st.lists(ids, unique=True, max_size=5)))
def test_a_device_is_claimed_by_one_name_or_by_its_replicas_in_one_resource(
    node: Directory, lists: dict[str, list[str]]
) -> None:
    meanings = claims(node, lists)
    assert {resource: list(each) for resource, each in meanings.items()} == lists
    granted: dict[str, set[tuple[str, str, bool]]] = {}
    for resource, each in meanings.items():
        for meaning in each.values():
            if meaning.device:
                granted.setdefault(meaning.device, set()).add((resource, meaning.base, meaning.replica))
    assert all(len(claimants) == 1 for claimants in granted.values())


@given(st.integers(0, 0xFFFF), st.integers(0, 255), st.integers(0, 31), st.integers(0, 7))
def test_an_address_is_the_same_however_it_is_spelled(domain: int, bus: int, device: int, function: int) -> None:
    spellings = {
        f"{domain:04x}:{bus:02x}:{device:02x}.{function}",
        f"{domain:08X}:{bus:02X}:{device:02X}.{function}",
    }
    assert {pci_address(each) for each in spellings} == {(domain, bus, device, function)}
