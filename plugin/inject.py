"""What a container is given so that it can use its devices.

Promises: a pure function of the offers, the same whatever the order of the ids. The kubelet keeps the answer in its
checkpoint and replays it at every start of the container, so nothing in it names the moment: only paths and ids.
"""

from __future__ import annotations

from collections.abc import Iterable

from plugin.api import deviceplugin_pb2 as kubelet
from plugin.availability import Offer
from scrubber.domain.device import Access, AccessKind

__all__ = ["container_response"]

VISIBLE = "SCRUBBER_VISIBLE_DEVICES"
NVIDIA_VISIBLE = "NVIDIA_VISIBLE_DEVICES"
"""Read by NVIDIA's container runtime, which then adds the driver's libraries and device nodes."""

NVIDIA_NODES = "/dev/nvidia"


def container_response(offers: Iterable[Offer]) -> kubelet.ContainerAllocateResponse:
    """Environment, mounts and device nodes for one container that is given all of ``offers``.

    Paths that several devices share, such as a control node, appear once. Everything is read-write.
    """
    given = sorted(offers, key=lambda offer: offer.id)
    accesses = dict.fromkeys(access for offer in given for access in offer.access)
    ids = ",".join(offer.id for offer in given)
    envs = {VISIBLE: ids}
    if any(_is_nvidia(access) for access in accesses):
        envs[NVIDIA_VISIBLE] = ids
    return kubelet.ContainerAllocateResponse(
        envs=envs,
        mounts=[
            kubelet.Mount(container_path=access.container_path, host_path=access.host_path, read_only=False)
            for access in accesses
            if access.kind is AccessKind.MOUNT
        ],
        devices=[
            kubelet.DeviceSpec(container_path=access.container_path, host_path=access.host_path, permissions="rw")
            for access in accesses
            if access.kind is AccessKind.NODE
        ],
    )


def _is_nvidia(access: Access) -> bool:
    return access.kind is AccessKind.NODE and access.host_path.startswith(NVIDIA_NODES)
