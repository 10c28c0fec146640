"""Device nodes and files of GPUDirect Storage, GDRCopy and MOFED, for the plugin's CDI specification.

They belong to no GPU: a container that gets a GPU gets all of them, if an administrator requested the feature and the
node has it.

Source: the modes ``gds``, ``gdrcopy`` and ``mofed`` of NVIDIA's generator (container toolkit 1.20), of which NVIDIA's
plugin injects ``all``. Not tried.
"""

from __future__ import annotations

import stat
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from plugin.nvidia.driver_files import HOST_ROOT, DriverRoot
from plugin.nvidia.injection import Feature
from scrubber.domain.errors import InvalidConfiguration

__all__ = ["FeatureDevices", "find_feature_devices"]

NODES: Mapping[Feature, tuple[str, ...]] = {
    Feature.GDRCOPY: ("gdrdrv",),
    Feature.GDS: ("nvidia-fs*",),
    Feature.MOFED: ("infiniband/uverbs*", "infiniband/rdma_cm"),
}
"""Patterns below ``/dev`` of the host."""
STORAGE_FILES = ("run/udev", "etc/cufile.json")
"""What containers get with GPUDirect Storage, from the driver's root: of which file system a block device is part, and
the configuration of its library."""


@dataclass(frozen=True, slots=True)
class FeatureDevices:
    """What a container gets with the requested features.

    Attributes:
        nodes: paths of device nodes, the same on the host and in the container.
        mounts: path in the container → path on the host; read-only.
        missing: features without a device node on this node, each with the pattern of its nodes.
    """

    nodes: tuple[str, ...] = ()
    mounts: tuple[tuple[str, str], ...] = ()
    missing: tuple[str, ...] = ()


def find_feature_devices(
    features: Collection[Feature], *, host: Path, root: DriverRoot, gpu_nodes: Collection[str]
) -> FeatureDevices:
    """Return what this node has of ``features`` now.

    Args:
        host: where this process sees the host's root, or parts of it; ``/``: it runs on the host, as far as it knows.
        gpu_nodes: paths of the GPUs' own device nodes, which show whether ``/dev`` is the host's.

    Raises:
        InvalidConfiguration: the host's device nodes are not visible, so containers could silently lack them.
    """
    if not features:
        return FeatureDevices()
    device_directory = host / "dev"
    if host == Path(HOST_ROOT):
        visible = any(Path(each).exists() for each in gpu_nodes)
    else:
        visible = device_directory.is_dir()
    if not visible:
        raise InvalidConfiguration(
            f"{', '.join(sorted(features))}: the plugin does not see the host's device nodes, so containers could silently "
            f"lack those that you requested. Mount the host's /dev read-only at /host/dev of the plugin's container, or "
            "set PrivateDevices=no in its unit, or remove the flags of these features."
        )
    found = {feature: tuple(_nodes(device_directory, NODES[feature])) for feature in sorted(features)}
    return FeatureDevices(
        nodes=tuple(sorted(node for nodes in found.values() for node in nodes)),
        mounts=tuple(_storage_mounts(root, host)) if found.get(Feature.GDS) else (),
        missing=tuple(
            f"{feature} (/dev/{', /dev/'.join(NODES[feature])})" for feature, nodes in found.items() if not nodes
        ),
    )


def _nodes(directory: Path, patterns: Collection[str]) -> Iterator[str]:
    for pattern in patterns:
        for path in directory.glob(pattern):
            if _is_device_node(path):
                yield f"/dev/{path.relative_to(directory)}"


def _is_device_node(path: Path) -> bool:
    try:
        return stat.S_ISCHR(path.stat().st_mode)
    except OSError:  # it was removed, or is a link to nothing
        return False


def _storage_mounts(root: DriverRoot, host: Path) -> Iterator[tuple[str, str]]:
    places = (root.local_path, host) if root.host == HOST_ROOT else (root.local_path,)
    for path in STORAGE_FILES:
        if any((place / path).exists() for place in places):
            yield f"/{path}", root.host_path(path)
