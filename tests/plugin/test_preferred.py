"""Which devices the kubelet is advised to take."""

from __future__ import annotations

import random
from collections.abc import Mapping

from hypothesis import given
from hypothesis import strategies as st

from plugin.devices import AdvertisedDevice, ServiceVerdict
from plugin.preferred import MOST_SEEDS, preferred


def offers(*each: AdvertisedDevice) -> dict[str, AdvertisedDevice]:
    return {offer.id: offer for offer in each}


def gpu(
    id_: str,
    *,
    clean: bool = False,
    scrubbing: bool = False,
    verdict: ServiceVerdict = ServiceVerdict.OFFERED,
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
def test_it_answers_whatever_it_is_asked(
    available: list[str], must: list[str], size: int, known: Mapping[str, AdvertisedDevice]
) -> None:
    chosen = preferred(available, must, size, known)
    assert len(chosen) == len(set(chosen)) == min(max(size, 0), len({*available, *must}))
    assert set(chosen) <= {*available, *must}
    assert set(must) <= set(chosen) or len(set(must)) > size


@given(available=st.sets(ids), must=st.sets(ids), size=st.integers(0, 8), known=known, seed=st.integers())
def test_it_does_not_depend_on_the_order_of_the_ids(
    available: set[str], must: set[str], size: int, known: dict[str, AdvertisedDevice], seed: int
) -> None:
    shuffle = random.Random(seed)
    mixed, mixed_must, mixed_known = list(available), list(must), list(known.items())
    for each in (mixed, mixed_must, mixed_known):
        shuffle.shuffle(each)
    expected = preferred(sorted(available), sorted(must), size, known)
    assert preferred(mixed, mixed_must, size, dict(mixed_known)) == expected


@given(available=st.sets(ids), must=st.sets(ids, max_size=2), size=st.integers(2, 8), known=known)
def test_no_dirty_device_is_chosen_while_a_clean_one_is_left(
    available: set[str], must: set[str], size: int, known: dict[str, AdvertisedDevice]
) -> None:
    clean = {id_ for id_, offer in known.items() if offer.certified and offer.verdict is ServiceVerdict.OFFERED}
    withheld = {id_ for id_, offer in known.items() if offer.verdict is ServiceVerdict.WITHHELD}
    chosen = set(preferred(available, must, size, known))
    free = available - must
    assert free & clean <= chosen or chosen - must <= clean
    assert free - withheld <= chosen or not (chosen - must) & withheld


def test_what_must_be_included_comes_before_what_is_clean() -> None:
    known = offers(gpu("a", clean=True), gpu("b"), gpu("c", clean=True))
    assert preferred(["a", "b", "c"], ["b"], 2, known) == ("b", "a")


def test_a_device_that_is_being_scrubbed_is_preferred_to_one_that_is_only_dirty() -> None:
    known = offers(gpu("a"), gpu("b", scrubbing=True), gpu("c", verdict=ServiceVerdict.WITHHELD))
    assert preferred(["a", "b", "c"], [], 1, known) == ("b",)
    assert preferred(["a", "b", "c"], [], 2, known) == ("b", "a")


def test_linked_devices_are_taken_together_before_those_of_one_numa_node() -> None:
    known = offers(gpu("a", node=0), gpu("b", node=0), gpu("c", node=0, peers="d"), gpu("d", node=1))
    assert set(preferred("abcd", [], 2, known)) == {"c", "d"}


def test_devices_of_one_numa_node_are_taken_together() -> None:
    known = offers(gpu("a", node=0), gpu("b", node=1), gpu("c", node=0), gpu("d", node=1))
    assert set(preferred("bad", [], 2, known)) == {"b", "d"}
    assert set(preferred("abcd", ["d"], 2, known)) == {"b", "d"}


def test_cleanness_comes_before_topology_and_topology_chooses_among_the_dirty() -> None:
    known = offers(gpu("a", node=0), gpu("b", node=1), gpu("c", node=0, clean=True), gpu("d", node=1))
    assert preferred("abcd", [], 2, known) == ("c", "a")


def test_a_single_device_is_taken_where_it_breaks_no_pair() -> None:
    known = offers(gpu("a", node=0, peers="b"), gpu("b", node=0), gpu("c", node=1))
    assert preferred("abc", [], 1, known) == ("c",)


def test_links_are_read_from_either_end() -> None:
    known = offers(gpu("a"), gpu("b", peers="c"), gpu("c"))
    assert set(preferred("abc", ["c"], 2, known)) == {"b", "c"}


class Looked(str):
    """An id that counts how often it is looked up anywhere."""

    __slots__ = ()
    times = 0

    def __hash__(self) -> int:
        Looked.times += 1
        return str.__hash__(self)


def test_half_of_a_large_node_is_chosen_whole_group_by_whole_group_and_in_few_looks() -> None:
    """The kubelet's main loop waits: work grows with devices times picks, not with picks once more."""
    devices, picks, group = 256, 128, 8
    ids = [Looked(f"gpu-{number:03}") for number in range(devices)]
    known: dict[str, AdvertisedDevice] = {
        id_: AdvertisedDevice(
            id_,
            id_,
            ServiceVerdict.OFFERED,
            numa_node=number // (devices // 2),
            peers=frozenset(ids[first : first + group]),
        )
        for number, id_ in enumerate(ids)
        for first in (number // group * group,)
    }
    Looked.times = 0
    chosen = set(preferred(ids, [], picks, known))
    assert len(chosen) == picks
    for first in range(0, devices, group):
        assert len(chosen.intersection(ids[first : first + group])) in (0, group)
    assert Looked.times <= 3 * MOST_SEEDS * devices * picks


def part(id_: str, parent: str, *, clean: bool = False, node: int | None = None) -> AdvertisedDevice:
    return AdvertisedDevice(
        id=id_, index=id_, verdict=ServiceVerdict.OFFERED, certified=clean, numa_node=node, parent=parent
    )


def test_instances_of_one_gpu_are_taken_together() -> None:
    known = offers(part("a", "g0"), part("b", "g1"), part("c", "g0"), part("d", "g1"))
    assert set(preferred("abcd", [], 2, known)) in ({"a", "c"}, {"b", "d"})
    assert set(preferred("abcd", ["d"], 2, known)) == {"b", "d"}


def test_a_gpu_of_which_part_is_taken_is_used_up_before_a_whole_one_is_begun() -> None:
    known = offers(part("a", "g0"), part("b", "g1"), part("c", "g1"), part("d", "g1"))
    assert preferred("abcd", [], 1, known) == ("a",)


def test_a_clean_instance_comes_before_a_near_one() -> None:
    known = offers(part("a", "g0"), part("b", "g0"), part("c", "g1", clean=True))
    assert preferred("abc", ["a"], 2, known) == ("a", "c")


def test_instances_of_one_gpu_are_closer_than_those_of_its_neighbour_on_the_numa_node() -> None:
    known = offers(part("a", "g0", node=0), part("b", "g1", node=0), part("c", "g0", node=0))
    assert set(preferred("bac", ["c"], 2, known)) == {"a", "c"}
