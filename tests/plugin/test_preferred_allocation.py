"""Which devices the plugin recommends to the kubelet."""

from __future__ import annotations

import random
from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plugin.kubelet.devices import AdvertisedDevice, ServiceVerdict
from plugin.kubelet.preferred_allocation import MAX_SEEDS, preferred_devices


def offers(*each: AdvertisedDevice) -> dict[str, AdvertisedDevice]:
    return {offer.id: offer for offer in each}


def gpu(
    id_: str,
    *,
    clean: bool = False,
    scrubbing: bool = False,
    verdict: ServiceVerdict = ServiceVerdict.ADVERTISED,
    node: int | None = None,
    peers: str = "",
) -> AdvertisedDevice:
    return AdvertisedDevice(
        id=id_,
        index=id_,
        verdict=verdict,
        certified=clean,
        scrubbing=scrubbing,
        numa_node=node,
        peers=frozenset(peers.split()),
    )


ids = st.sampled_from([f"gpu-{number}" for number in range(8)])
known = st.lists(
    st.builds(
        AdvertisedDevice,
        id=ids,
        index=st.just("0"),
        verdict=st.sampled_from(ServiceVerdict),
        certified=st.booleans(),
        scrubbing=st.booleans(),
        numa_node=st.none() | st.integers(0, 1),
        peers=st.frozensets(ids, max_size=4),
    ),
    unique_by=lambda offer: offer.id,
).map(lambda each: offers(*each))


@given(
    available=st.lists(ids | st.text(max_size=3)),
    must=st.lists(ids | st.text(max_size=3)),
    size=st.integers(-3, 12),
    known=known,
)
def test_preferred_allocation_always_returns_the_requested_number_of_available_devices(
    available: list[str], must: list[str], size: int, known: Mapping[str, AdvertisedDevice]
) -> None:
    chosen = preferred_devices(available, must, size, known)
    assert len(chosen) == len(set(chosen)) == min(max(size, 0), len({*available, *must}))
    assert set(chosen) <= {*available, *must}
    assert set(must) <= set(chosen) or len(set(must)) > size


@given(available=st.sets(ids), must=st.sets(ids), size=st.integers(0, 8), known=known, seed=st.integers())
def test_preferred_allocation_does_not_depend_on_the_order_of_the_ids(
    available: set[str], must: set[str], size: int, known: dict[str, AdvertisedDevice], seed: int
) -> None:
    shuffle = random.Random(seed)
    mixed, mixed_must, mixed_known = list(available), list(must), list(known.items())
    for each in (mixed, mixed_must, mixed_known):
        shuffle.shuffle(each)
    expected = preferred_devices(sorted(available), sorted(must), size, known)
    assert preferred_devices(mixed, mixed_must, size, dict(mixed_known)) == expected


@given(available=st.sets(ids), must=st.sets(ids, max_size=2), size=st.integers(2, 8), known=known)
def test_preferred_allocation_chooses_no_dirty_device_while_a_clean_one_is_available(
    available: set[str], must: set[str], size: int, known: dict[str, AdvertisedDevice]
) -> None:
    clean = {id_ for id_, offer in known.items() if offer.certified and offer.verdict is ServiceVerdict.ADVERTISED}
    out = (ServiceVerdict.WITHHELD, ServiceVerdict.HELD)
    withheld = {id_ for id_, offer in known.items() if offer.verdict in out}
    chosen = set(preferred_devices(available, must, size, known))
    free = available - must
    assert free & clean <= chosen or chosen - must <= clean
    assert free - withheld <= chosen or not (chosen - must) & withheld


def test_devices_that_must_be_included_precede_clean_devices() -> None:
    known = offers(gpu("a", clean=True), gpu("b"), gpu("c", clean=True))
    assert preferred_devices(["a", "b", "c"], ["b"], 2, known) == ("b", "a")


@pytest.mark.parametrize("out", [ServiceVerdict.WITHHELD, ServiceVerdict.HELD])
def test_device_that_is_being_scrubbed_is_preferred_to_a_dirty_one(out: ServiceVerdict) -> None:
    known = offers(gpu("a"), gpu("b", scrubbing=True), gpu("c", verdict=out))
    assert preferred_devices(["a", "b", "c"], [], 1, known) == ("b",)
    assert preferred_devices(["a", "b", "c"], [], 2, known) == ("b", "a")


def test_linked_devices_are_preferred_to_devices_of_one_numa_node() -> None:
    known = offers(gpu("a", node=0), gpu("b", node=0), gpu("c", node=0, peers="d"), gpu("d", node=1))
    assert set(preferred_devices("abcd", [], 2, known)) == {"c", "d"}


def test_devices_of_one_numa_node_are_chosen_together() -> None:
    known = offers(gpu("a", node=0), gpu("b", node=1), gpu("c", node=0), gpu("d", node=1))
    assert set(preferred_devices("bad", [], 2, known)) == {"b", "d"}
    assert set(preferred_devices("abcd", ["d"], 2, known)) == {"b", "d"}


def test_clean_devices_precede_topology_and_topology_decides_among_dirty_devices() -> None:
    known = offers(gpu("a", node=0), gpu("b", node=1), gpu("c", node=0, clean=True), gpu("d", node=1))
    assert preferred_devices("abcd", [], 2, known) == ("c", "a")


def test_single_device_is_chosen_so_that_no_linked_pair_is_split() -> None:
    known = offers(gpu("a", node=0, peers="b"), gpu("b", node=0), gpu("c", node=1))
    assert preferred_devices("abc", [], 1, known) == ("c",)


def test_link_between_two_devices_counts_in_both_directions() -> None:
    known = offers(gpu("a"), gpu("b", peers="c"), gpu("c"))
    assert set(preferred_devices("abc", ["c"], 2, known)) == {"b", "c"}


class Looked(str):
    """An id that counts how often it is looked up anywhere."""

    __slots__ = ()
    times = 0

    def __hash__(self) -> int:
        Looked.times += 1
        return str.__hash__(self)


def test_half_of_a_large_node_is_chosen_in_whole_groups_with_bounded_work() -> None:
    """The kubelet's main loop waits: work grows with devices times picks, not with the square of picks."""
    devices, picks, group = 256, 128, 8
    ids = [Looked(f"gpu-{number:03}") for number in range(devices)]
    known: dict[str, AdvertisedDevice] = {
        id_: AdvertisedDevice(
            id_,
            id_,
            ServiceVerdict.ADVERTISED,
            numa_node=number // (devices // 2),
            peers=frozenset(ids[first : first + group]),
        )
        for number, id_ in enumerate(ids)
        for first in (number // group * group,)
    }
    Looked.times = 0
    chosen = set(preferred_devices(ids, [], picks, known))
    assert len(chosen) == picks
    for first in range(0, devices, group):
        assert len(chosen.intersection(ids[first : first + group])) in (0, group)
    assert Looked.times <= 3 * MAX_SEEDS * devices * picks


def part(id_: str, parent: str, *, clean: bool = False, node: int | None = None) -> AdvertisedDevice:
    return AdvertisedDevice(
        id=id_, index=id_, verdict=ServiceVerdict.ADVERTISED, certified=clean, numa_node=node, parent=parent
    )


def test_mig_instances_of_one_gpu_are_chosen_together() -> None:
    known = offers(part("a", "g0"), part("b", "g1"), part("c", "g0"), part("d", "g1"))
    assert set(preferred_devices("abcd", [], 2, known)) in ({"a", "c"}, {"b", "d"})
    assert set(preferred_devices("abcd", ["d"], 2, known)) == {"b", "d"}


def test_partly_used_gpu_is_filled_before_an_unused_one() -> None:
    known = offers(part("a", "g0"), part("b", "g1"), part("c", "g1"), part("d", "g1"))
    assert preferred_devices("abcd", [], 1, known) == ("a",)


def test_clean_mig_instance_is_preferred_to_one_of_the_same_gpu() -> None:
    known = offers(part("a", "g0"), part("b", "g0"), part("c", "g1", clean=True))
    assert preferred_devices("abc", ["a"], 2, known) == ("a", "c")


def test_mig_instances_of_one_gpu_are_preferred_to_those_of_a_gpu_on_the_same_numa_node() -> None:
    known = offers(part("a", "g0", node=0), part("b", "g1", node=0), part("c", "g0", node=0))
    assert set(preferred_devices("bac", ["c"], 2, known)) == {"a", "c"}
