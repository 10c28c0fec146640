"""Translation of the driver's description of GPUs into the devices that are handed out."""

from dataclasses import replace
from pathlib import Path

import pytest

from scrubber.adapters.children.message import Message
from scrubber.adapters.nvidia import description
from scrubber.adapters.nvidia.description import GpuDescription, InstanceDescription, devices_of, peers_of, profile_name
from scrubber.domain.device import AccessKind, Device
from scrubber.domain.errors import Unreadable

ANSWER: Message = {
    "uuid": "GPU-0",
    "name": "NVIDIA H200",
    "minor": 3,
    "total": 150_754_820_096,
    "reserved": 600_000_000,
    "architecture": "hopper",
    "compute_capability": "9.0",
    "virtualization": "none",
    "serial": None,
    "vbios": "96.00",
    "inforom": None,
    "gsp_firmware": None,
    "mig": False,
    "instances": [],
    "links": [],
}
INSTANCE: Message = {
    "index": 0,
    "uuid": "MIG-0",
    "name": "NVIDIA H200 MIG 1g.18gb",
    "gi": 7,
    "ci": 0,
    "total": 16 << 30,
    "reserved": None,
    "slices": 1,
    "compute_slices": 1,
    "mebibytes": 16384,
}


def handed_out(
    gpu: GpuDescription, minors: dict[str, int] | None = None, nodes: Path = Path("/dev")
) -> tuple[Device, ...]:
    return devices_of(gpu, "0000:1b:00.0", 2, numa_node=1, peers=frozenset({"GPU-9"}), minors=minors or {}, nodes=nodes)


def test_whole_gpu_is_a_device_with_its_device_nodes() -> None:
    (device,) = handed_out(description.parse_description(ANSWER), nodes=Path("/run/nvidia/driver/dev"))
    assert (device.id, device.index, device.model, device.memory_bytes) == (
        "GPU-0",
        "2",
        "NVIDIA H200",
        150_754_820_096,
    )
    assert (device.parent, device.profile, device.numa_node, device.peers) == (None, None, 1, frozenset({"GPU-9"}))
    assert {access.kind for access in device.access} == {AccessKind.DEVICE_NODE}
    assert [access.container_path for access in device.access] == [
        "/dev/nvidia3",
        "/dev/nvidiactl",
        "/dev/nvidia-uvm",
        "/dev/nvidia-uvm-tools",
    ]
    assert device.access[0].host_path == "/run/nvidia/driver/dev/nvidia3"
    traits = dict(device.traits)
    assert (traits["pci_address"], traits["minor"], traits["architecture"]) == ("0000:1b:00.0", "3", "hopper")
    assert "serial" not in traits


def test_display_node_is_granted_where_present(tmp_path: Path) -> None:
    (tmp_path / "nvidia-modeset").touch()
    (device,) = handed_out(description.parse_description(ANSWER), nodes=tmp_path)
    assert device.access[-1].container_path == "/dev/nvidia-modeset"


def test_missing_uvm_tools_node_is_not_required(tmp_path: Path) -> None:
    (tmp_path / "nvidia-uvm").touch()
    (device,) = handed_out(description.parse_description(ANSWER), nodes=tmp_path)
    assert "/dev/nvidia-uvm-tools" not in {access.container_path for access in device.access}


def test_mig_instances_are_devices_and_their_parent_gpu_is_none() -> None:
    second = {**INSTANCE, "index": 1, "uuid": "MIG-1", "gi": 8, "ci": 0}
    gpu = description.parse_description({**ANSWER, "mig": True, "instances": [INSTANCE, second]})
    devices = handed_out(gpu, {"gpu3/gi7/access": 66, "gpu3/gi7/ci0/access": 67, "gpu3/gi8/access": 75})
    assert [(device.id, device.index, device.parent) for device in devices] == [
        ("MIG-0", "2:0", "GPU-0"),
        ("MIG-1", "2:1", "GPU-0"),
    ]
    first = devices[0]
    assert (first.profile, first.memory_bytes, first.peers, first.numa_node) == ("1g.18gb", 16 << 30, frozenset(), 1)
    paths = [access.container_path for access in first.access]
    assert paths[-2:] == ["/dev/nvidia-caps/nvidia-cap66", "/dev/nvidia-caps/nvidia-cap67"]
    assert {"/dev/nvidia3", "/dev/nvidiactl"} <= set(paths)
    assert dict(first.traits)["gpu_instance"] == "7"


def test_gpu_in_mig_mode_without_instances_is_no_device() -> None:
    gpu = description.parse_description({**ANSWER, "mig": True})
    assert handed_out(gpu) == ()
    assert "has no instances" in (description.exclusion_reason(gpu, "0000:1b:00.0") or "")


@pytest.mark.parametrize("mode", ["host-vgpu", "host-vsga"])
def test_vgpu_host_is_no_device(mode: str) -> None:
    assert mode in (
        description.exclusion_reason(description.parse_description({**ANSWER, "virtualization": mode}), "0000:1b:00.0")
        or ""
    )


@pytest.mark.parametrize("mode", ["none", "passthrough", "vgpu"])
def test_gpu_inside_a_virtual_machine_is_a_device(mode: str) -> None:
    assert (
        description.exclusion_reason(description.parse_description({**ANSWER, "virtualization": mode}), "0000:1b:00.0")
        is None
    )


@pytest.mark.parametrize("spoilt", [{"uuid": ""}, {"minor": "3"}, {"total": None}, {"links": {}}, {"instances": [1]}])
def test_malformed_gpu_description_is_unreadable(spoilt: Message) -> None:
    with pytest.raises(Unreadable, match="The driver's response is invalid"):
        description.parse_description({**ANSWER, **spoilt})


@pytest.mark.parametrize(
    ("slices", "compute_slices", "mebibytes", "gpu_mebibytes", "name"),
    [
        (1, 1, 4864, 40960, "1g.5gb"),
        (2, 2, 9856, 40960, "2g.10gb"),
        (7, 7, 40192, 40960, "7g.40gb"),
        (1, 1, 9728, 81559, "1g.10gb"),
        (1, 1, 19968, 81559, "1g.20gb"),
        (3, 3, 40448, 81559, "3g.40gb"),
        (2, 1, 19968, 81559, "1c.2g.20gb"),
        (1, 1, 16384, 143771, "1g.18gb"),
        (2, 2, 33280, 143771, "2g.35gb"),
    ],
)
def test_mig_profiles_are_named_as_by_nvidia_smi(
    slices: int, compute_slices: int, mebibytes: int, gpu_mebibytes: int, name: str
) -> None:
    assert profile_name(slices, compute_slices, mebibytes, gpu_mebibytes << 20) == name


@pytest.mark.parametrize(
    ("answer", "profile"),
    [
        ({"name": "NVIDIA A100-SXM4-40GB MIG 1g.5gb"}, "1g.5gb"),
        ({"name": "NVIDIA H100 MIG 1c.2g.20gb"}, "1c.2g.20gb"),
        ({"name": "NVIDIA H100 MIG 1g.10gb+me"}, "1g.10gb+me"),
        ({"name": ""}, "1g.18gb"),
        ({"name": "NVIDIA H200"}, "1g.18gb"),
        ({"name": "", "slices": None}, "unknown"),
    ],
)
def test_profile_name_from_the_driver_takes_precedence(answer: Message, profile: str) -> None:
    gpu = description.parse_description({**ANSWER, "mig": True, "instances": [{**INSTANCE, **answer}]})
    assert gpu.instances[0].profile == profile


# --- peers

PLAIN = GpuDescription(uuid="a", name="x", minor=0, memory_bytes=1, mig=False, traits=())


def test_gpus_joined_by_nvlink_are_peers() -> None:
    gpus = {
        "1": replace(PLAIN, uuid="a", nvlinks=(("2", "gpu"), ("2", "gpu"))),
        "2": replace(PLAIN, uuid="b"),
        "3": replace(PLAIN, uuid="c"),
    }
    assert peers_of(gpus) == {"a": {"b"}, "b": {"a"}, "c": frozenset()}


@pytest.mark.parametrize("kind", ["switch", None])
def test_all_gpus_on_nvswitches_are_peers(kind: str | None) -> None:
    gpus = {
        "1": replace(PLAIN, uuid="a", nvlinks=(("f0", kind),)),
        "2": replace(PLAIN, uuid="b", nvlinks=((None, kind),)),
        "3": replace(PLAIN, uuid="c"),
    }
    assert peers_of(gpus) == {"a": {"b"}, "b": {"a"}, "c": frozenset()}


def test_link_to_another_kind_of_device_makes_no_peers() -> None:
    gpus = {
        "1": replace(PLAIN, uuid="a", nvlinks=(("f0", "npu"),)),
        "2": replace(PLAIN, uuid="b", nvlinks=(("f0", "npu"),)),
    }
    assert peers_of(gpus) == {"a": frozenset(), "b": frozenset()}


def test_gpu_in_mig_mode_is_no_peer() -> None:
    instance = InstanceDescription("m", 0, 1, 0, 1, "1g.5gb")
    gpus = {
        "1": replace(PLAIN, uuid="a", nvlinks=(("2", "gpu"),)),
        "2": replace(PLAIN, uuid="b", nvlinks=(("1", "gpu"),), mig=True, instances=(instance,)),
    }
    assert peers_of(gpus) == {"a": frozenset()}
