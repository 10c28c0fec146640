"""Shares of a device: their ids, and which one is preferred."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plugin.injection import container_response
from plugin.kubelet.devices import AdvertisedDevice, ServiceVerdict
from plugin.kubelet.preferred_allocation import preferred_devices
from plugin.kubelet.resources import MigStrategy, ResourceLayout
from plugin.kubelet.shares import SharePreference, TimeSlicing, id_mapping, whole_devices
from scrubber.domain.errors import InvalidRequest
from tests.gpus import gpu, instance

GPU = "nvidia.com/gpu"
SHARED = TimeSlicing({GPU: 3})


def shares(*devices: AdvertisedDevice, sharing: TimeSlicing = SHARED) -> dict[str, AdvertisedDevice]:
    return {share.id: share for device in devices for share in sharing.shares_of(GPU, device)}


def lists(
    sharing: TimeSlicing, *offers: AdvertisedDevice, mig: MigStrategy = MigStrategy.NONE
) -> Mapping[str, Sequence[AdvertisedDevice]]:
    return ResourceLayout(mig, sharing=sharing).assign_resources(offers)[1].lists


def test_share_is_its_device_under_an_id_of_its_own() -> None:
    device = replace(gpu(0), certified=True, numa_node=1)
    for number, share in enumerate(SHARED.shares_of(GPU, device)):
        assert (share.id, share.device_id) == (f"{device.id}::{number}", device.id)
        assert replace(share, id=device.id, share_of="") == device
    assert SHARED.shares_of("nvidia.com/mig-1g.10gb", device) == (device,)


def test_withheld_device_is_withheld_with_all_its_shares() -> None:
    out = gpu(0).as_withheld("No: XID 95.")
    assert {(share.healthy, share.refusal) for share in SHARED.shares_of(GPU, out)} == {(False, "No: XID 95.")}


@pytest.mark.parametrize("renamed", [False, True])
def test_only_resources_named_in_the_file_are_shared_and_renamed(renamed: bool) -> None:
    small = "nvidia.com/mig-1g.10gb"
    found = lists(TimeSlicing({small: 2}, renamed), gpu(0), instance(1, 0), mig=MigStrategy.MIXED)
    assert {name: [offer.id for offer in part] for name, part in found.items()} == {
        GPU: [gpu(0).id],
        small + (".shared" if renamed else ""): [f"{instance(1, 0).id}::{number}" for number in range(2)],
    }


def test_shared_resource_that_does_not_exist_is_warned_about() -> None:
    arrangement = ResourceLayout(sharing=TimeSlicing({"nvidia.com/gpus": 2})).assign_resources([gpu(0)])[1]
    assert arrangement.warnings == (
        "The configuration file shares nvidia.com/gpus, but this node has no such resource",
    )
    assert ResourceLayout(sharing=TimeSlicing({GPU: 2})).assign_resources([gpu(0)])[1].warnings == ()


def test_container_with_several_shares_of_a_device_gets_the_device_once() -> None:
    one, other = gpu(0), gpu(1)
    held = list(shares(one, other).values())
    assert whole_devices(held) == (one, other)
    assert container_response(whole_devices(held)) == container_response([one, other])


def test_id_mapping_maps_devices_and_shares_to_devices() -> None:
    assert id_mapping([gpu(0), *SHARED.shares_of(GPU, gpu(1))]) == {gpu(0).id: gpu(0).id} | dict.fromkeys(
        [f"{gpu(1).id}::{number}" for number in range(3)], gpu(1).id
    )


def test_request_for_more_than_one_share_is_refused_only_where_the_file_forbids_it() -> None:
    two = list(shares(gpu(0), gpu(1)).values())[:2]
    strict = replace(SHARED, single_share_only=True)
    with pytest.raises(InvalidRequest, match="requests 2 shares of devices, but the maximum is one"):
        strict.check_request(two)
    strict.check_request(two[:1])
    strict.check_request([gpu(0), gpu(1)])
    SHARED.check_request(two)


# -- preference --------------------------------------------------------------------------------------------------------


def chosen(available: Sequence[str], size: int, offers: Mapping[str, AdvertisedDevice], must: Sequence[str] = (),
           by: SharePreference = SharePreference.DISTRIBUTED) -> list[str]:  # fmt: skip
    return [offers[id_].device_id for id_ in preferred_devices(available, must, size, offers, by)]


def free(offers: Mapping[str, AdvertisedDevice], *taken: str) -> list[str]:
    return [id_ for id_ in offers if id_ not in taken]


A, B, C = gpu(0), gpu(1), gpu(2)


def test_preferred_shares_are_spread_over_the_least_shared_devices() -> None:
    offers = shares(A, B, C)
    assert chosen(free(offers, f"{A.id}::0"), 1, offers) == [B.id]
    assert chosen(free(offers, f"{A.id}::0", f"{B.id}::1"), 1, offers) == [C.id]
    assert chosen(free(offers, f"{A.id}::0"), 4, offers) == [B.id, C.id, A.id, B.id]


def test_packed_shares_are_preferred_on_the_most_shared_devices() -> None:
    offers = shares(A, B, C)
    assert chosen(free(offers, f"{B.id}::0"), 3, offers, by=SharePreference.PACKED) == [B.id, B.id, A.id]


def test_share_that_must_be_included_counts_as_allocated() -> None:
    offers = shares(A, B)
    assert chosen(free(offers), 2, offers, must=[f"{A.id}::0"]) == [A.id, B.id]


def test_container_gets_a_share_of_another_device_first_among_equally_shared_devices() -> None:
    offers = shares(A, B)
    others = f"{B.id}::0"
    assert chosen(free(offers, others), 2, offers, must=[f"{A.id}::0"]) == [A.id, B.id]
    assert chosen(free(offers, others), 2, offers) == [A.id, B.id]
    packed = free(offers, others, f"{A.id}::1")
    assert chosen(packed, 2, offers, must=[f"{A.id}::0"], by=SharePreference.PACKED) == [A.id, A.id]


def test_clean_device_is_preferred_among_equally_shared_devices() -> None:
    offers = shares(A, replace(B, scrubbing=True), replace(C, certified=True))
    assert chosen(free(offers), 3, offers) == [C.id, B.id, A.id]


@pytest.mark.parametrize("out", [ServiceVerdict.WITHHELD, ServiceVerdict.HELD])
def test_share_of_a_withheld_device_is_chosen_last(out: ServiceVerdict) -> None:
    offers = shares(replace(A, verdict=out), B)
    assert chosen(free(offers, f"{B.id}::0", f"{B.id}::1"), 1, offers) == [B.id]


some = st.lists(
    st.sampled_from([*(f"{each.id}::{n}" for each in (A, B, C) for n in range(3)), "unknown", "GPU-x::1", ""]),
    unique=True,
)


@given(available=some, must=some, size=st.integers(-1, 12), by=st.sampled_from(SharePreference), order=st.randoms())
def test_preferred_shares_have_the_requested_number_and_do_not_depend_on_the_order(
    available: list[str], must: list[str], size: int, by: SharePreference, order: object
) -> None:
    offers = shares(A, B.as_withheld("No."), replace(C, certified=True))
    answer = preferred_devices(available, must, size, offers, by)
    assert len(answer) == len(set(answer)) == min(max(size, 0), len({*available, *must}))
    assert set(answer) <= {*available, *must}
    assert preferred_devices(available[::-1], must[::-1], size, offers, by) == answer


@given(taken=st.sets(st.sampled_from(sorted(shares(A, B, C)))), size=st.integers(1, 9))
def test_preferred_shares_are_always_on_the_least_shared_device(taken: set[str], size: int) -> None:
    offers = shares(A, B, C)
    given_ = Counter(offers[id_].device_id for id_ in taken)
    for device in chosen(free(offers, *taken), size, offers):
        assert given_[device] == min(count for each in (A, B, C) if (count := given_[each.id]) < 3)
        given_[device] += 1
    assert all(word is ServiceVerdict.ADVERTISED for word in (offer.verdict for offer in offers.values()))
