"""One device as several: what a share is, and which one is preferred."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plugin.devices import AdvertisedDevice, ServiceVerdict
from plugin.inject import container_response
from plugin.preferred import preferred
from plugin.resources import Layout, MigStrategy
from plugin.shares import Preference, Sharing, devices_of, meanings
from scrubber.domain.errors import InvalidRequest
from tests.gpus import gpu, instance

GPU = "nvidia.com/gpu"
SHARED = Sharing({GPU: 3})


def shares(*devices: AdvertisedDevice, sharing: Sharing = SHARED) -> dict[str, AdvertisedDevice]:
    return {share.id: share for device in devices for share in sharing.split(GPU, device)}


def lists(
    sharing: Sharing, *offers: AdvertisedDevice, mig: MigStrategy = MigStrategy.NONE
) -> Mapping[str, Sequence[AdvertisedDevice]]:
    return Layout(mig, sharing=sharing).arrange(offers)[1].lists


def test_a_share_is_the_device_under_an_id_of_its_own() -> None:
    device = replace(gpu(0), certified=True, numa_node=1)
    for number, share in enumerate(SHARED.split(GPU, device)):
        assert (share.id, share.device_id) == (f"{device.id}::{number}", device.id)
        assert replace(share, id=device.id, share_of="") == device
    assert SHARED.split("nvidia.com/mig-1g.10gb", device) == (device,)


def test_what_is_withheld_is_withheld_with_all_its_shares() -> None:
    out = gpu(0).withheld("No: XID 95.")
    assert {(share.healthy, share.refusal) for share in SHARED.split(GPU, out)} == {(False, "No: XID 95.")}


@pytest.mark.parametrize("renamed", [False, True])
def test_only_what_the_file_names_is_shared_and_renamed(renamed: bool) -> None:
    small = "nvidia.com/mig-1g.10gb"
    found = lists(Sharing({small: 2}, renamed), gpu(0), instance(1, 0), mig=MigStrategy.MIXED)
    assert {name: [offer.id for offer in part] for name, part in found.items()} == {
        GPU: [gpu(0).id],
        small + (".shared" if renamed else ""): [f"{instance(1, 0).id}::{number}" for number in range(2)],
    }


def test_a_resource_that_is_shared_and_not_there_is_named() -> None:
    arrangement = Layout(sharing=Sharing({"nvidia.com/gpus": 2})).arrange([gpu(0)])[1]
    assert arrangement.notes == ("The configuration file shares nvidia.com/gpus, and this node has none",)
    assert Layout(sharing=Sharing({GPU: 2})).arrange([gpu(0)])[1].notes == ()


def test_a_container_with_several_shares_of_a_device_is_given_it_once() -> None:
    one, other = gpu(0), gpu(1)
    held = list(shares(one, other).values())
    assert devices_of(held) == (one, other)
    assert container_response(devices_of(held)) == container_response([one, other])


def test_what_an_id_means_is_its_device() -> None:
    assert meanings([gpu(0), *SHARED.split(GPU, gpu(1))]) == {gpu(0).id: gpu(0).id} | dict.fromkeys(
        [f"{gpu(1).id}::{number}" for number in range(3)], gpu(1).id
    )


def test_more_than_one_share_is_refused_only_where_that_is_asked_for() -> None:
    two = list(shares(gpu(0), gpu(1)).values())[:2]
    strict = replace(SHARED, one_each=True)
    with pytest.raises(InvalidRequest, match="asks for 2 shares of devices, and one is the most"):
        strict.check(two)
    strict.check(two[:1])
    strict.check([gpu(0), gpu(1)])
    SHARED.check(two)


# -- preference --------------------------------------------------------------------------------------------------------


def chosen(available: Sequence[str], size: int, offers: Mapping[str, AdvertisedDevice], must: Sequence[str] = (),
           by: Preference = Preference.DISTRIBUTED) -> list[str]:  # fmt: skip
    return [offers[id_].device_id for id_ in preferred(available, must, size, offers, by)]


def free(offers: Mapping[str, AdvertisedDevice], *taken: str) -> list[str]:
    return [id_ for id_ in offers if id_ not in taken]


A, B, C = gpu(0), gpu(1), gpu(2)


def test_shares_are_spread_over_the_devices_that_are_shared_least() -> None:
    offers = shares(A, B, C)
    assert chosen(free(offers, f"{A.id}::0"), 1, offers) == [B.id]
    assert chosen(free(offers, f"{A.id}::0", f"{B.id}::1"), 1, offers) == [C.id]
    assert chosen(free(offers, f"{A.id}::0"), 4, offers) == [B.id, C.id, A.id, B.id]


def test_or_packed_on_those_that_are_shared_most() -> None:
    offers = shares(A, B, C)
    assert chosen(free(offers, f"{B.id}::0"), 3, offers, by=Preference.PACKED) == [B.id, B.id, A.id]


def test_what_must_be_included_counts_as_given() -> None:
    offers = shares(A, B)
    assert chosen(free(offers), 2, offers, must=[f"{A.id}::0"]) == [A.id, B.id]


def test_among_devices_that_are_shared_alike_a_container_is_given_another_one_first() -> None:
    offers = shares(A, B)
    others = f"{B.id}::0"
    assert chosen(free(offers, others), 2, offers, must=[f"{A.id}::0"]) == [A.id, B.id]
    assert chosen(free(offers, others), 2, offers) == [A.id, B.id]
    packed = free(offers, others, f"{A.id}::1")
    assert chosen(packed, 2, offers, must=[f"{A.id}::0"], by=Preference.PACKED) == [A.id, A.id]


def test_among_devices_that_are_shared_alike_the_readiest_is_first() -> None:
    offers = shares(A, replace(B, scrubbing=True), replace(C, certified=True))
    assert chosen(free(offers), 3, offers) == [C.id, B.id, A.id]


def test_what_is_out_of_service_is_last_however_little_it_is_shared() -> None:
    offers = shares(A.withheld("No."), B)
    assert chosen(free(offers, f"{B.id}::0", f"{B.id}::1"), 1, offers) == [B.id]


some = st.lists(
    st.sampled_from([*(f"{each.id}::{n}" for each in (A, B, C) for n in range(3)), "unheard-of", "GPU-x::1", ""]),
    unique=True,
)


@given(available=some, must=some, size=st.integers(-1, 12), by=st.sampled_from(Preference), order=st.randoms())
def test_it_answers_whatever_it_is_asked_and_in_whatever_order(
    available: list[str], must: list[str], size: int, by: Preference, order: object
) -> None:
    offers = shares(A, B.withheld("No."), replace(C, certified=True))
    answer = preferred(available, must, size, offers, by)
    assert len(answer) == len(set(answer)) == min(max(size, 0), len({*available, *must}))
    assert set(answer) <= {*available, *must}
    assert preferred(available[::-1], must[::-1], size, offers, by) == answer


@given(taken=st.sets(st.sampled_from(sorted(shares(A, B, C)))), size=st.integers(1, 9))
def test_no_device_gets_a_second_share_more_than_another_could_have_had(taken: set[str], size: int) -> None:
    offers = shares(A, B, C)
    given_ = Counter(offers[id_].device_id for id_ in taken)
    for device in chosen(free(offers, *taken), size, offers):
        assert given_[device] == min(count for each in (A, B, C) if (count := given_[each.id]) < 3)
        given_[device] += 1
    assert all(word is ServiceVerdict.OFFERED for word in (offer.verdict for offer in offers.values()))
