"""Builds the ``Allocate`` response: what a container receives so that it can use its devices.

Invariants: a pure function of the devices and of the injection settings, independent of the order of the ids. The
kubelet stores the response in its checkpoint and replays it at every start of the container, so it contains nothing
that changes with time: only paths and ids.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from plugin.api import deviceplugin_pb2 as kubelet
from plugin.kubelet.devices import AdvertisedDevice, index_sort_key
from plugin.nvidia.injection import IdStrategy, ListStrategy, NvidiaInjection, cdi_device_name
from scrubber.domain.device import Access, AccessKind

__all__ = ["container_response"]

VISIBLE_DEVICES_VARIABLE = "SCRUBBER_VISIBLE_DEVICES"
NVIDIA_VISIBLE_DEVICES_VARIABLE = "NVIDIA_VISIBLE_DEVICES"
"""Read by NVIDIA's container runtime, which then adds the driver's libraries and device nodes."""

VOLUME_MOUNT_ROOT = "/var/run/nvidia-container-devices"
"""Where NVIDIA's runtime looks for mounts when the variable has this value."""

ANNOTATION_NAME = "nvidia-device-plugin"
"""The author of the annotation, as part of its key: runtimes that filter annotations by name allow it."""


def container_response(
    devices: Iterable[AdvertisedDevice], injection: NvidiaInjection | None = None
) -> kubelet.ContainerAllocateResponse:
    """Return the response for one container that is assigned all of ``devices``.

    It contains what their backends request, unchanged; for NVIDIA GPUs, device nodes and names as ``injection``
    defines. Paths that several devices share, such as a control node, appear once. Everything is read-write.
    """
    injection = injection or NvidiaInjection()
    given = sorted(devices, key=lambda device: device.id)
    accesses = dict.fromkeys(access for device in given for access in device.access)
    ruled = {access for device in given if device.is_nvidia for access in device.access}
    response = kubelet.ContainerAllocateResponse(
        envs={VISIBLE_DEVICES_VARIABLE: ",".join(device.id for device in given), **_environment(accesses)},
        mounts=[
            kubelet.Mount(container_path=access.container_path, host_path=access.host_path, read_only=False)
            for access in accesses
            if access.kind is AccessKind.MOUNT
        ],
        devices=[
            kubelet.DeviceSpec(container_path=access.container_path, host_path=access.host_path, permissions="rw")
            for access in accesses
            if access.kind is AccessKind.DEVICE_NODE and access not in ruled
        ],
        cdi_devices=[kubelet.CDIDevice(name=access.host_path) for access in accesses if access.kind is AccessKind.CDI],
    )
    gpus = [device for device in given if device.is_nvidia]
    if gpus:
        _add_nvidia_runtime_hints(response, gpus, injection)
        if injection.pass_device_specs and not injection.is_cdi_only:
            response.devices.extend(
                kubelet.DeviceSpec(
                    container_path=access.container_path,
                    host_path=injection.host_path(access.container_path, access.host_path),
                    permissions="rw",
                )
                for access in accesses
                if access.kind is AccessKind.DEVICE_NODE and access in ruled
            )
    return response


def _environment(accesses: Iterable[Access]) -> dict[str, str]:
    """Return the variables that backends request; values of several devices for one variable are joined by commas."""
    values: dict[str, list[str]] = {}
    for access in accesses:
        if access.kind is AccessKind.ENVIRONMENT:
            values.setdefault(access.container_path, []).append(access.host_path)
    return {name: ",".join(found) for name, found in values.items()}


def _names(gpus: Iterable[AdvertisedDevice], ids: IdStrategy) -> list[str]:
    if ids is IdStrategy.UUID:
        return [device.id for device in gpus]
    return [device.index for device in sorted(gpus, key=index_sort_key)]


def _add_nvidia_runtime_hints(
    response: kubelet.ContainerAllocateResponse, gpus: Sequence[AdvertisedDevice], injection: NvidiaInjection
) -> None:
    names = _names(gpus, injection.ids)
    # Never by index: the kubelet replays this response at every start, and by then the index may mean another device.
    qualified = [cdi_device_name(gpu.id) for gpu in gpus]
    for feature in sorted(injection.features):
        response.envs[f"NVIDIA_{feature.upper()}"] = "enabled"
    if ListStrategy.ENVVAR in injection.strategies:
        response.envs[NVIDIA_VISIBLE_DEVICES_VARIABLE] = ",".join(names)
    if ListStrategy.VOLUME_MOUNTS in injection.strategies:
        response.envs[NVIDIA_VISIBLE_DEVICES_VARIABLE] = VOLUME_MOUNT_ROOT
        response.mounts.extend(
            kubelet.Mount(container_path=f"{VOLUME_MOUNT_ROOT}/{name}", host_path="/dev/null") for name in names
        )
    if ListStrategy.CDI_ANNOTATIONS in injection.strategies:
        response.annotations[_annotation_key(qualified, injection.annotation_prefix)] = ",".join(qualified)
    if ListStrategy.CDI_CRI in injection.strategies:
        response.cdi_devices.extend(kubelet.CDIDevice(name=name) for name in qualified)


def _annotation_key(qualified: Sequence[str], prefix: str) -> str:
    """Return a key that two responses share only when they name the same devices.

    The part after the slash may have 63 characters; this one has 53.
    """
    import hashlib  # loads OpenSSL, and few nodes name devices this way

    digest = hashlib.sha256("\0".join(qualified).encode()).hexdigest()
    return f"{prefix}{ANNOTATION_NAME}_{digest[:32]}"
