"""The resource under which a device is advertised, for each MIG strategy."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plugin.amd import AmdNaming
from plugin.kubelet.devices import AdvertisedDevice, ServiceVerdict
from plugin.kubelet.resources import AdvertisedLists, AdvertisedResources, MigStrategy, ResourceLayout
from plugin.logs import create_logger
from scrubber.domain.device import Access, AccessKind
from tests.gpus import gpu, instance, nodes

SIM = AdvertisedDevice(
    "sim-0", "0", ServiceVerdict.ADVERTISED, True, access=(Access(AccessKind.MOUNT, "/sim/0", "/dev/simgpu0"),)
)


def arranged(mig: str, *offers: AdvertisedDevice, resource: str = "") -> AdvertisedLists:
    return ResourceLayout(MigStrategy(mig), resource).assign_resources(offers)[1]


def ids(arrangement: AdvertisedLists) -> dict[str, list[str]]:
    return {resource: [offer.id for offer in part] for resource, part in arrangement.lists.items()}


def gone(offer: AdvertisedDevice) -> AdvertisedDevice:
    return replace(offer, verdict=ServiceVerdict.WITHHELD, healthy=False, gone=True, refusal="gone")


def test_device_is_advertised_under_its_vendors_resource_name_unless_one_is_given() -> None:
    assert ids(arranged("none", gpu(0), SIM)) == {"nvidia.com/gpu": [gpu(0).id], "scrubber.dev/gpu": ["sim-0"]}
    assert ids(arranged("none", gpu(0), SIM, resource="a.b/c")) == {"a.b/c": [gpu(0).id, "sim-0"]}


def test_strategy_none_advertises_whole_gpus_only_and_warns_about_mig_instances() -> None:
    arrangement = arranged("none", gpu(0), instance(1, 0), instance(1, 1))
    assert ids(arrangement) == {"nvidia.com/gpu": [gpu(0).id]}
    assert arrangement.warnings == (
        "MIG instances are not advertised: --mig-strategy is none; use single or mixed (instances: 2)",
    )
    assert arrangement.error == ""


def test_strategy_single_advertises_devices_of_one_kind_as_gpus() -> None:
    parts = [instance(number, part) for number in (0, 1) for part in (0, 1)]
    assert ids(arranged("single", *parts)) == {"nvidia.com/gpu": [each.id for each in parts]}
    assert ids(arranged("single", gpu(0), gpu(1))) == {"nvidia.com/gpu": [gpu(0).id, gpu(1).id]}


@pytest.mark.parametrize(
    ("offers", "why"),
    [
        ((gpu(0), instance(1, 0)), "some GPUs of this node are partitioned into MIG instances and some are not"),
        ((instance(0, 0), instance(1, 0, "3g.40gb")), "different profiles (1g.10gb, 3g.40gb)"),
        ((instance(0, 0, "unknown"), instance(1, 0, "unknown")), "the driver does not report the profile"),
    ],
)
def test_strategy_single_refuses_a_node_with_several_kinds_of_devices(
    offers: tuple[AdvertisedDevice, ...], why: str
) -> None:
    arrangement = arranged("single", *offers)
    assert arrangement.lists == {}
    assert why in arrangement.error
    assert "Use mixed, or partition all GPUs alike." in arrangement.error


def test_strategy_single_ignores_gone_devices_and_devices_without_a_verdict() -> None:
    parts = [instance(0, 0), instance(0, 1)]
    assert arranged("single", *parts, gone(gpu(7))).error == ""
    unspoken = gpu(1, verdict=ServiceVerdict.UNKNOWN)
    assert ids(arranged("single", *parts, unspoken)) == {"nvidia.com/gpu": [each.id for each in parts]}


def test_strategy_single_withholds_listed_devices_when_the_node_is_repartitioned() -> None:
    layout, _ = ResourceLayout(MigStrategy.SINGLE).assign_resources([instance(0, 0)])
    layout, later = layout.assign_resources([instance(0, 0), instance(1, 0, "3g.40gb")])
    (listed,) = later.lists["nvidia.com/gpu"]
    assert (listed.id, listed.healthy, listed.refusal) == (instance(0, 0).id, False, later.error)
    _, again = layout.assign_resources([instance(0, 0), gone(instance(1, 0, "3g.40gb"))])
    assert again.lists["nvidia.com/gpu"][0].healthy
    assert again.error == ""


def test_strategy_mixed_advertises_one_resource_per_profile() -> None:
    offers = (gpu(0), instance(1, 0), instance(1, 1, "1g.10gb+me"), instance(1, 2, "1c.3g.40gb"))
    assert ids(arranged("mixed", *offers)) == {
        "nvidia.com/gpu": [offers[0].id],
        "nvidia.com/mig-1g.10gb": [offers[1].id],
        "nvidia.com/mig-1g.10gb.me": [offers[2].id],
        "nvidia.com/mig-1c.3g.40gb": [offers[3].id],
    }
    renamed = arranged("mixed", instance(1, 0), resource="example.com/accelerator")
    assert ids(renamed) == {"example.com/mig-1g.10gb": [offers[1].id]}


@pytest.mark.parametrize("profile", ["", "unknown", "1g/10gb", "no name"])
def test_mig_instance_without_a_usable_profile_is_left_out_with_a_warning(profile: str) -> None:
    arrangement = arranged("mixed", instance(0, 0, profile), gpu(1))
    assert ids(arrangement) == {"nvidia.com/gpu": [gpu(1).id]}
    assert f'profile "{profile}" is not advertised' in arrangement.warnings[0]


def test_mig_strategy_does_not_affect_simulated_devices() -> None:
    part = replace(SIM, id="sim-0:1", index="0:1", parent="sim-0")
    for mig in MigStrategy:
        assert ids(arranged(mig, SIM, part)) == {"scrubber.dev/gpu": ["sim-0", "sim-0:1"]}


def test_mig_instance_that_returns_with_another_profile_is_withheld_under_its_old_resource() -> None:
    layout, _ = ResourceLayout(MigStrategy.MIXED).assign_resources([instance(0, 0)])
    _, later = layout.assign_resources([instance(0, 0, "1g.10gb+me")])
    (old,), (new,) = later.lists["nvidia.com/mig-1g.10gb"], later.lists["nvidia.com/mig-1g.10gb.me"]
    assert (old.id, old.healthy, new.id, new.healthy) == (instance(0, 0).id, False, instance(0, 0).id, True)
    assert old.refusal == f"Device {old.id} is no longer advertised as nvidia.com/mig-1g.10gb."


offers_ = st.lists(
    st.builds(gpu, st.integers(0, 3))
    | st.builds(instance, st.integers(4, 6), st.integers(0, 2), st.sampled_from(["1g.10gb", "2g.20gb"])),
    unique_by=lambda offer: offer.id,
)


@given(mig=st.sampled_from(MigStrategy), rounds=st.lists(offers_, min_size=1, max_size=4))
def test_device_once_listed_stays_listed_in_the_same_resource(
    mig: MigStrategy, rounds: list[list[AdvertisedDevice]]
) -> None:
    layout = ResourceLayout(mig)
    known: dict[str, AdvertisedDevice] = {}
    homes: set[tuple[str, str]] = set()
    for present in rounds:
        now = {offer.id: offer for offer in present}
        known = {id_: gone(offer) for id_, offer in known.items()} | now
        layout, arrangement = layout.assign_resources(known.values())
        dealt = {(id_, resource) for resource, part in ids(arrangement).items() for id_ in part}
        assert homes <= dealt
        homes = dealt
        for resource, part in arrangement.lists.items():
            assert len({offer.profile for offer in part if offer.healthy}) <= 1, resource


# -- the lists --------------------------------------------------------------------------------------------------------


def events(lines: io.StringIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in lines.getvalue().splitlines()]


async def test_each_resource_has_its_own_list_and_the_node_has_all_devices() -> None:
    resources = AdvertisedResources(ResourceLayout(MigStrategy.MIXED), log=create_logger("json", "error"))
    await resources.update((gpu(0), instance(1, 0)), "epoch")
    assert {name: [offer.id for offer in advertised.devices] for name, advertised in resources.lists.items()} == {
        "nvidia.com/gpu": [gpu(0).id],
        "nvidia.com/mig-1g.10gb": [instance(1, 0).id],
    }
    assert [offer.id for offer in resources.devices] == [gpu(0).id, instance(1, 0).id]
    assert {advertised.epoch for advertised in resources.lists.values()} == {"epoch"}
    assert {advertised.version for advertised in resources.lists.values()} == {1}


async def test_change_of_one_resource_does_not_change_the_lists_of_others() -> None:
    resources = AdvertisedResources(ResourceLayout(MigStrategy.MIXED), log=create_logger("json", "error"))
    await resources.update((gpu(0), instance(1, 0)), "epoch")
    await resources.update((gpu(0, verdict=ServiceVerdict.WITHHELD), instance(1, 0)), "epoch")
    assert {name: advertised.version for name, advertised in resources.lists.items()} == {
        "nvidia.com/gpu": 2,
        "nvidia.com/mig-1g.10gb": 1,
    }


async def test_device_that_cannot_be_published_is_withheld_in_every_list() -> None:
    published: list[tuple[list[str], str]] = []

    def publish(offers: Sequence[AdvertisedDevice], epoch: str) -> Mapping[str, str]:
        published.append(([offer.id for offer in offers], epoch))
        return {gpu(1).id: "No specification."}

    resources = AdvertisedResources(ResourceLayout(), log=create_logger("json", "error"), publish=publish)
    await resources.update((gpu(0), gpu(1)), "epoch")
    assert published == [([gpu(0).id, gpu(1).id], "epoch")]
    for advertised in (resources, resources.lists["nvidia.com/gpu"]):
        assert {offer.id: offer.healthy for offer in advertised.devices} == {gpu(0).id: True, gpu(1).id: False}
        found = advertised.find(gpu(1).id)
        assert found is not None
        assert (found.verdict, found.refusal) == (ServiceVerdict.WITHHELD, "No specification.")


async def test_layout_problem_is_logged_once_and_so_is_its_end() -> None:
    lines = io.StringIO()
    resources = AdvertisedResources(ResourceLayout(MigStrategy.SINGLE), log=create_logger("json", "info", lines))
    for offers in ((gpu(0), instance(1, 0)), (gpu(0), instance(1, 0)), (gpu(0),)):
        await resources.update(offers, "epoch")
    assert [each["event"] for each in events(lines)] == ["node.not-advertised", "node.advertised"]


async def test_devices_left_out_are_logged_once() -> None:
    lines = io.StringIO()
    resources = AdvertisedResources(ResourceLayout(), log=create_logger("json", "info", lines))
    for _ in range(3):
        await resources.update((gpu(0), instance(1, 0)), "epoch")
    assert [each["event"] for each in events(lines)] == ["node.partially-advertised"]


# --- AMD GPUs ---------------------------------------------------------------------------------------------------------


def amd(number: int, part: int | None = None, profile: str | None = None, **facts: Any) -> AdvertisedDevice:
    """Return an AMD GPU, or partition ``part`` of it; ``profile`` is empty for a GPU that cannot be partitioned."""
    index = str(number) if part is None else f"{number}:{part}"
    facts.setdefault("verdict", ServiceVerdict.ADVERTISED)
    return AdvertisedDevice(
        f"0000:{number:02x}:00.0" if not part else f"amdgpu_xcp_{number}{part}",
        index,
        healthy=facts["verdict"] is ServiceVerdict.ADVERTISED,
        parent="" if part is None else f"GPU-{number}",
        profile=profile if profile is not None else "spx_nps1" if part is None else "cpx_nps1",
        access=nodes("kfd", f"dri/renderD{128 + number}"),
        **facts,
    )


def amd_arranged(naming: AmdNaming, *offers: AdvertisedDevice, resource: str = "") -> AdvertisedLists:
    return ResourceLayout(resource=resource, amd=naming).assign_resources(offers)[1]


def test_amd_gpus_are_advertised_as_amds_plugin_advertises_them() -> None:
    parts = [amd(0, 0), amd(0, 1)]
    assert ids(amd_arranged(AmdNaming.SINGLE, amd(0), amd(1))) == {"amd.com/gpu": [amd(0).id, amd(1).id]}
    assert ids(amd_arranged(AmdNaming.SINGLE, *parts)) == {"amd.com/gpu": [each.id for each in parts]}
    assert ids(amd_arranged(AmdNaming.MIXED, *parts, amd(1))) == {
        "amd.com/cpx_nps1": [each.id for each in parts],
        "amd.com/spx_nps1": [amd(1).id],
    }
    assert ids(amd_arranged(AmdNaming.MIXED, amd(0, profile=""))) == {"amd.com/gpu": [amd(0).id]}
    assert ids(amd_arranged(AmdNaming.MIXED, *parts, resource="a.b/c")) == {"a.b/cpx_nps1": [each.id for each in parts]}


def test_amd_gpus_that_differ_are_not_one_resource_and_leave_other_devices_alone() -> None:
    arrangement = amd_arranged(AmdNaming.SINGLE, amd(0), amd(1, 0), SIM)
    assert ids(arrangement) == {"scrubber.dev/gpu": ["sim-0"]}
    assert "the GPUs of this node differ (cpx_nps1, spx_nps1). Use mixed" in arrangement.error
    assert {each.verdict for each in arrangement.devices if each.is_amd} == {ServiceVerdict.WITHHELD}


def test_amd_devices_of_a_service_that_is_not_ready_wait_for_it_with_one_resource() -> None:
    assert ids(amd_arranged(AmdNaming.SINGLE, amd(0, verdict=ServiceVerdict.UNKNOWN))) == {}
