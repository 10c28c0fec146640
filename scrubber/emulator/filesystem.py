"""The contents of a container's root directory: the plugin's mounts and device nodes, as links to the node's files.

Promise: a path that a plugin returned exists at every start of the container, and no reply creates a link outside the
container's own directory.
"""

from __future__ import annotations

import os
from pathlib import Path

from scrubber.emulator.devicemanager import ContainerRunOptions


class ContainerCreateFailed(Exception):
    """The container cannot be created from the plugin's reply; the message is the runtime's."""


def create_container_root(root: Path, options: ContainerRunOptions) -> None:
    """Create ``root`` and every mount and device of ``options`` below it; files that an earlier run wrote there stay.

    Raises:
        ContainerCreateFailed: a host path does not exist, or a container path leads outside or is taken by a file.
    """
    root.mkdir(parents=True, exist_ok=True)
    for mount in options.mounts:
        _link(root, mount.container_path, Path(mount.host_path))
    for device in options.devices:
        _link(root, device.container_path, Path(device.host_path))


def _link(root: Path, container_path: str, host_path: Path) -> None:
    if not host_path.exists():
        raise ContainerCreateFailed(f"failed to mount {host_path} at {container_path}: no such file or directory")
    inside = root / os.path.normpath("/" + container_path).lstrip("/")
    if inside == root:
        raise ContainerCreateFailed(f"failed to mount {host_path}: container path {container_path!r} is the root")
    inside.parent.mkdir(parents=True, exist_ok=True)
    if not inside.parent.resolve().is_relative_to(root.resolve()):
        raise ContainerCreateFailed(f"failed to mount {host_path}: {container_path} leads out of the container")
    if inside.is_symlink():
        inside.unlink()
    try:
        inside.symlink_to(host_path)
    except FileExistsError as error:
        raise ContainerCreateFailed(
            f"failed to mount {host_path}: {container_path} is taken in the container"
        ) from error
