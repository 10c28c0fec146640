"""What a container receives with its devices, for each injection method that an administrator can configure."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from pathlib import PurePosixPath
from typing import Any

import pytest
from google.protobuf.json_format import MessageToDict
from hypothesis import given
from hypothesis import strategies as st

from plugin.injection import container_response
from plugin.kubelet.devices import AdvertisedDevice, ServiceVerdict
from plugin.nvidia.injection import Feature, IdStrategy, ListStrategy, NvidiaInjection, parse_list_strategies
from scrubber.domain.device import Access, AccessKind
from scrubber.domain.errors import InvalidConfiguration
from tests.gpus import gpu, instance

TWO = (gpu(1), gpu(0))
NAMES = "GPU-00000000,GPU-00000001"


def simulated(name: str) -> AdvertisedDevice:
    return AdvertisedDevice(
        id=name,
        index="0",
        verdict=ServiceVerdict.ADVERTISED,
        access=(Access(AccessKind.MOUNT, f"/sim/{name}", f"/dev/{name}"),),
    )


def answer(offers: Iterable[AdvertisedDevice], injection: NvidiaInjection | None = None) -> dict[str, Any]:
    """Return the response as JSON, without the fields common to all responses."""
    message: dict[str, Any] = MessageToDict(
        container_response(offers, injection),
        preserving_proto_field_name=True,
        always_print_fields_with_no_presence=False,
    )
    del message["envs"]["SCRUBBER_VISIBLE_DEVICES"]
    return {key: value for key, value in message.items() if value}


def test_a_simulated_device_is_a_read_write_mount_whatever_is_chosen_for_gpus() -> None:
    for ways in itertools.combinations(ListStrategy, 2):
        given_ = container_response([simulated("sim-0")], NvidiaInjection(ways, pass_device_specs=True))
        assert MessageToDict(given_, preserving_proto_field_name=True) == {
            "envs": {"SCRUBBER_VISIBLE_DEVICES": "sim-0"},
            "mounts": [{"host_path": "/sim/sim-0", "container_path": "/dev/sim-0"}],
        }


def accelerator(number: int) -> AdvertisedDevice:
    """Return a device of another vendor, whose backend describes what a container needs."""
    access = (
        Access(AccessKind.DEVICE_NODE, "/dev/kfd", "/dev/kfd"),
        Access(AccessKind.DEVICE_NODE, f"/dev/dri/renderD{128 + number}", f"/dev/dri/renderD{128 + number}"),
        Access(AccessKind.MOUNT, "/opt/driver", "/opt/driver"),
        Access(AccessKind.ENVIRONMENT, str(number), "OTHER_VISIBLE_DEVICES"),
        Access(AccessKind.CDI, f"example.com/accelerator={number}", ""),
    )
    return AdvertisedDevice(
        id=f"accelerator-{number}", index=str(number), verdict=ServiceVerdict.ADVERTISED, access=access
    )


WAYS = [NvidiaInjection(ways) for ways in itertools.combinations(ListStrategy, 2)]


@pytest.mark.parametrize(
    "injection", [None, *WAYS, NvidiaInjection((ListStrategy.CDI_CRI,)), NvidiaInjection(pass_device_specs=True)]
)
def test_device_of_another_vendor_is_injected_as_its_backend_defines_whatever_is_chosen_for_nvidia(
    injection: NvidiaInjection | None,
) -> None:
    paths = ["/dev/kfd", "/dev/dri/renderD128", "/dev/dri/renderD129"]
    assert answer([accelerator(1), accelerator(0)], injection) == {
        "envs": {"OTHER_VISIBLE_DEVICES": "0,1"},
        "mounts": [{"container_path": "/opt/driver", "host_path": "/opt/driver"}],
        "devices": [{"container_path": path, "host_path": path, "permissions": "rw"} for path in paths],
        "cdi_devices": [{"name": "example.com/accelerator=0"}, {"name": "example.com/accelerator=1"}],
    }


def test_device_of_another_vendor_is_injected_completely_beside_an_nvidia_gpu() -> None:
    given_ = answer([accelerator(0), gpu(0)])
    assert given_["envs"] == {"OTHER_VISIBLE_DEVICES": "0", "NVIDIA_VISIBLE_DEVICES": "GPU-00000000"}
    assert [each["host_path"] for each in given_["devices"]] == ["/dev/kfd", "/dev/dri/renderD128"]


def test_envvar_strategy_names_the_devices_in_nvidia_visible_devices() -> None:
    assert answer(TWO) == {"envs": {"NVIDIA_VISIBLE_DEVICES": NAMES}}


def test_volume_mounts_strategy_names_the_devices_by_mounts_that_a_pod_cannot_set() -> None:
    root = "/var/run/nvidia-container-devices"
    assert answer(TWO, NvidiaInjection((ListStrategy.VOLUME_MOUNTS,))) == {
        "envs": {"NVIDIA_VISIBLE_DEVICES": root},
        "mounts": [
            {"host_path": "/dev/null", "container_path": f"{root}/GPU-00000000"},
            {"host_path": "/dev/null", "container_path": f"{root}/GPU-00000001"},
        ],
    }


def test_volume_mounts_strategy_overrides_the_envvar_strategy() -> None:
    both = answer(TWO, NvidiaInjection((ListStrategy.ENVVAR, ListStrategy.VOLUME_MOUNTS)))
    assert both == answer(TWO, NvidiaInjection((ListStrategy.VOLUME_MOUNTS,)))


def test_cdi_annotations_strategy_names_devices_of_our_specification() -> None:
    given_ = answer(TWO, NvidiaInjection((ListStrategy.CDI_ANNOTATIONS,)))
    ((key, value),) = given_.pop("annotations").items()
    assert value == "scrubber.dev/gpu=GPU-00000000,scrubber.dev/gpu=GPU-00000001"
    assert key.startswith("cdi.k8s.io/nvidia-device-plugin_")
    assert given_ == {}


def test_cdi_annotation_key_is_valid_for_kubernetes_and_cdi() -> None:
    injection = NvidiaInjection((ListStrategy.CDI_ANNOTATIONS,), annotation_prefix="runtime.example.com/")
    (key,) = answer([gpu(number) for number in range(16)], injection)["annotations"]
    prefix, _, name = key.partition("/")
    assert (prefix, len(name) <= 63) == ("runtime.example.com", True)
    assert name[0].isalnum()
    assert name[-1].isalnum()
    assert name.replace("-", "").replace("_", "").isalnum()


def test_containers_with_other_devices_have_other_annotation_keys() -> None:
    keys = [answer([each], NvidiaInjection((ListStrategy.CDI_ANNOTATIONS,)))["annotations"] for each in TWO]
    assert len({key for each in keys for key in each}) == 2


def test_cdi_cri_strategy_names_the_devices_in_the_cri_field() -> None:
    assert answer(TWO, NvidiaInjection((ListStrategy.CDI_CRI,))) == {
        "cdi_devices": [{"name": "scrubber.dev/gpu=GPU-00000000"}, {"name": "scrubber.dev/gpu=GPU-00000001"}]
    }


def test_device_nodes_are_passed_on_request_once_each_below_the_dev_root() -> None:
    plain = answer(TWO, NvidiaInjection(pass_device_specs=True))["devices"]
    assert [(each["host_path"], each["permissions"]) for each in plain] == [
        (f"/dev/{name}", "rw") for name in ("nvidia0", "nvidiactl", "nvidia-uvm", "nvidia-uvm-tools", "nvidia1")
    ]
    rooted = NvidiaInjection(pass_device_specs=True, dev_root=PurePosixPath("/run/nvidia/driver"))
    (first, *_) = answer(TWO, rooted)["devices"]
    assert first == {
        "host_path": "/run/nvidia/driver/dev/nvidia0",
        "container_path": "/dev/nvidia0",
        "permissions": "rw",
    }


def test_device_nodes_are_not_passed_twice_where_cdi_alone_injects() -> None:
    assert "devices" not in answer(TWO, NvidiaInjection((ListStrategy.CDI_CRI,), pass_device_specs=True))
    assert "devices" in answer(
        TWO, NvidiaInjection((ListStrategy.ENVVAR, ListStrategy.CDI_CRI), pass_device_specs=True)
    )


def test_mig_instance_brings_its_parents_node_and_its_capability_nodes() -> None:
    paths = [each["host_path"] for each in answer([instance(0, 1)], NvidiaInjection(pass_device_specs=True))["devices"]]
    assert paths[:3] == ["/dev/nvidia0", "/dev/nvidia-caps/nvidia-cap11", "/dev/nvidia-caps/nvidia-cap12"]


def test_device_indices_are_sorted_numerically_and_mig_indices_have_two_parts() -> None:
    by_index = NvidiaInjection(ids=IdStrategy.INDEX)
    assert answer([gpu(10), gpu(9)], by_index) == {"envs": {"NVIDIA_VISIBLE_DEVICES": "9,10"}}
    assert answer([instance(0, 3), instance(0, 1)], by_index) == {"envs": {"NVIDIA_VISIBLE_DEVICES": "0:1,0:3"}}


@pytest.mark.parametrize("strategy", [ListStrategy.CDI_CRI, ListStrategy.CDI_ANNOTATIONS])
def test_cdi_name_is_the_uuid_although_the_id_strategy_is_index(strategy: ListStrategy) -> None:
    by_index, by_uuid = (NvidiaInjection((strategy,), ids) for ids in (IdStrategy.INDEX, IdStrategy.UUID))
    assert answer([gpu(1)], by_index) == answer([gpu(1)], by_uuid)
    assert "scrubber.dev/gpu=GPU-00000001" in str(answer([gpu(1)], by_index))


def test_nvidia_runtime_features_are_requested_by_environment_variables() -> None:
    features = frozenset({Feature.GDS, Feature.MOFED})
    assert answer([gpu(0)], NvidiaInjection(features=features))["envs"] == {
        "NVIDIA_VISIBLE_DEVICES": "GPU-00000000",
        "NVIDIA_GDS": "enabled",
        "NVIDIA_MOFED": "enabled",
    }


ways = st.sets(st.sampled_from(ListStrategy), min_size=1).map(
    lambda chosen: tuple(each for each in ListStrategy if each in chosen)
)


@given(
    order=st.permutations([gpu(2), gpu(0), gpu(11), instance(3, 1), instance(3, 0)]),
    strategies=ways,
    ids=st.sampled_from(IdStrategy),
    specs=st.booleans(),
)
def test_response_does_not_depend_on_the_order_of_the_kubelets_device_ids(
    order: list[AdvertisedDevice], strategies: tuple[ListStrategy, ...], ids: IdStrategy, specs: bool
) -> None:
    injection = NvidiaInjection(strategies, ids, specs)
    one = container_response(order, injection).SerializeToString(deterministic=True)
    other = container_response(sorted(order, key=lambda each: each.id), injection)
    assert one == other.SerializeToString(deterministic=True)
    assert other.envs["SCRUBBER_VISIBLE_DEVICES"] == ",".join(sorted(each.id for each in order))


@pytest.mark.parametrize(
    ("written", "read"),
    [
        (["cdi-cri,envvar"], (ListStrategy.ENVVAR, ListStrategy.CDI_CRI)),
        (["cdi-cri", "volume-mounts", "cdi-cri"], (ListStrategy.VOLUME_MOUNTS, ListStrategy.CDI_CRI)),
        ([" envvar , cdi-annotations"], (ListStrategy.ENVVAR, ListStrategy.CDI_ANNOTATIONS)),
        (["volume-mounts,", "cdi-cri"], (ListStrategy.VOLUME_MOUNTS, ListStrategy.CDI_CRI)),
    ],
)
def test_list_strategies_are_separated_by_commas_or_repeated(
    written: list[str], read: tuple[ListStrategy, ...]
) -> None:
    assert parse_list_strategies(written, "--device-list-strategy") == read


@pytest.mark.parametrize("written", [["evnvar"], [""], [","], ["envvar,envvar2"], []])
def test_unknown_list_strategy_is_refused_with_the_valid_ones(written: list[str]) -> None:
    with pytest.raises(InvalidConfiguration, match="envvar, volume-mounts, cdi-annotations, cdi-cri"):
        parse_list_strategies(written, "--device-list-strategy")


LONGEST = ".".join(["a" * 63] * 3 + ["a" * 61]) + "/"


def test_longest_kubernetes_domain_is_a_valid_annotation_prefix() -> None:
    assert NvidiaInjection(annotation_prefix=LONGEST).annotation_prefix == LONGEST


@pytest.mark.parametrize(
    "prefix", ["", "/", "cdi.k8s.io", "a/b/", "a b/", "Cdi.k8s.io/", ".a/", "a./", "a/\n", "ä.de/", f"a{LONGEST}"]
)
def test_invalid_annotation_prefix_is_refused(prefix: str) -> None:
    with pytest.raises(InvalidConfiguration, match="Use a domain and a slash"):
        NvidiaInjection(annotation_prefix=prefix)
