"""What a container is given with its devices."""

from __future__ import annotations

import itertools

from plugin.availability import Offer, Word
from plugin.inject import container_response
from scrubber.domain.device import Access, AccessKind


def offer(id_: str, *access: Access) -> Offer:
    return Offer(id=id_, index="0", word=Word.OFFERED, access=access)


def test_a_simulated_device_is_a_read_write_mount() -> None:
    response = container_response([offer("sim-0", Access(AccessKind.MOUNT, "/sim/0/memory", "/dev/simgpu0"))])
    (mount,) = response.mounts
    assert (mount.host_path, mount.container_path, mount.read_only) == ("/sim/0/memory", "/dev/simgpu0", False)
    assert dict(response.envs) == {"SCRUBBER_VISIBLE_DEVICES": "sim-0"}
    assert not response.devices


def test_nvidia_devices_are_nodes_and_named_to_its_runtime() -> None:
    control = Access(AccessKind.NODE, "/dev/nvidiactl", "/dev/nvidiactl")
    given = [
        offer(id_, Access(AccessKind.NODE, f"/dev/nvidia{number}", f"/dev/nvidia{number}"), control)
        for number, id_ in enumerate(("GPU-a", "GPU-b"))
    ]
    response = container_response(given)
    paths = [(node.host_path, node.container_path, node.permissions) for node in response.devices]
    assert paths == [(path, path, "rw") for path in ("/dev/nvidia0", "/dev/nvidiactl", "/dev/nvidia1")]
    assert dict(response.envs) == {
        "NVIDIA_VISIBLE_DEVICES": "GPU-a,GPU-b",
        "SCRUBBER_VISIBLE_DEVICES": "GPU-a,GPU-b",
    }


def test_the_answer_is_the_same_in_whatever_order_the_kubelet_names_the_devices() -> None:
    given = [offer(id_, Access(AccessKind.MOUNT, f"/sim/{id_}", f"/dev/{id_}")) for id_ in "cab"]
    assert (
        len(
            {container_response(order).SerializeToString(deterministic=True) for order in itertools.permutations(given)}
        )
        == 1
    )
    assert container_response(given).envs["SCRUBBER_VISIBLE_DEVICES"] == "a,b,c"
