"""The plugin's CDI specification: what a runtime adds to a container that gets one of its devices by name.

Invariants: the same devices and the same driver give the same bytes, in any order and after any restart. The file is
replaced atomically: even if this process is killed, a reader sees either the old or the new file. A device is
advertised only once the file contains it.

Source: the Container Device Interface, version 0.5.0, the lowest that has ``hostPath`` of device nodes and names that
begin with a digit.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from plugin.kubelet.devices import AdvertisedDevice
from plugin.logs import Logger
from plugin.nvidia.driver_files import CdiHook, DriverFiles, DriverRoot, find_driver_files, is_unchanged
from plugin.nvidia.feature_devices import FeatureDevices, find_feature_devices
from plugin.nvidia.injection import CDI_KIND, NvidiaInjection
from plugin.nvidia.toolkit_spec import ToolkitSpec
from scrubber.domain.device import AccessKind
from scrubber.domain.errors import InvalidConfiguration
from scrubber.durability import sync_directory, sync_path

__all__ = [
    "CDI_VERSION",
    "SPEC_FILE_NAME",
    "CdiPublisher",
    "ContainerEdits",
    "encode_spec",
    "replace_file",
    "specification",
]

SPEC_FILE_NAME = "scrubber.dev-gpu.json"
CDI_VERSION = "0.5.0"

CONTROL_NODES = frozenset(f"/dev/{name}" for name in ("nvidiactl", "nvidia-modeset", "nvidia-uvm", "nvidia-uvm-tools"))
"""Nodes that belong to the driver and not to one GPU."""

MOUNT_OPTIONS = ("ro", "nosuid", "nodev", "bind")
FEATURE_MOUNT_OPTIONS = ("ro", "nosuid", "nodev", "rbind", "rprivate")
SOCKET_OPTIONS = ("nosuid", "nodev", "noexec", "bind")
"""Not read-only, which would not prevent a connection."""

_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9_.:-]*[A-Za-z0-9])?")

ContainerEdits = dict[str, Any]
"""A ``containerEdits`` object."""


def specification(
    gpus: Iterable[AdvertisedDevice],
    files: DriverFiles,
    root: DriverRoot,
    hook: CdiHook | None,
    injection: NvidiaInjection,
    *,
    disabled_hooks: Collection[str] = (),
    sockets: bool = True,
) -> ContainerEdits:
    """Return the whole file as JSON values.

    Args:
        gpus: at least one; a specification without devices is invalid.
        hook: None: the links beside the libraries become mounts, because no program creates them in the container.
        disabled_hooks: commands of the hook that are not used; ``all``: as without a hook.
        sockets: whether the containers get sockets of the driver's daemons.
    """
    if "all" in disabled_hooks:
        hook = None
    devices: dict[str, ContainerEdits] = {}
    shared: dict[str, ContainerEdits] = {}
    for gpu in gpus:
        nodes = _device_nodes(gpu, injection)
        own = [node for path, node in sorted(nodes.items()) if path not in CONTROL_NODES]
        shared |= {path: node for path, node in nodes.items() if path in CONTROL_NODES}
        devices[gpu.id] = {"deviceNodes": own}
    return {
        "cdiVersion": CDI_VERSION,
        "kind": CDI_KIND,
        "devices": [{"name": name, "containerEdits": edits} for name, edits in sorted(devices.items())],
        "containerEdits": _driver_edits(files, root, hook, disabled_hooks, sockets=sockets)
        | ({"deviceNodes": [node for _, node in sorted(shared.items())]} if shared else {}),
    }


def encode_spec(spec: ContainerEdits) -> bytes:
    """Return the content of a specification's file; the same for equal specifications."""
    return json.dumps(spec, indent=2, sort_keys=True).encode() + b"\n"


def _device_nodes(gpu: AdvertisedDevice, injection: NvidiaInjection) -> dict[str, ContainerEdits]:
    nodes = {}
    for access in gpu.access:
        if access.kind is AccessKind.DEVICE_NODE:
            host = injection.host_path(access.container_path, access.host_path)
            elsewhere = {} if host == access.container_path else {"hostPath": host}
            nodes[access.container_path] = {"path": access.container_path, "permissions": "rw", **elsewhere}
    return nodes


def _driver_edits(
    files: DriverFiles, root: DriverRoot, hook: CdiHook | None, disabled_hooks: Collection[str], *, sockets: bool
) -> ContainerEdits:
    mounted = {path: path for path in (*files.libraries, *files.programs)}
    mounted |= {each.container_path: each.path for each in files.data}
    commands: dict[str, list[str]] = {
        "create-symlinks": [word for link in files.links for word in ("--link", f"{link.target}::{link.path}")],
        "update-ldcache": [word for directory in files.directories for word in ("--folder", directory)],
    }
    used = [] if hook is None else [each for each in commands if commands[each] and each not in disabled_hooks]
    if "create-symlinks" not in used:
        mounted |= {link.path: link.file for link in files.links}
    edits: ContainerEdits = {
        # The image may set "all": if NVIDIA's runtime is the default one, it would add every GPU of the node.
        "env": ["NVIDIA_VISIBLE_DEVICES=void"],
        "mounts": [
            {"hostPath": root.host_path(file), "containerPath": path, "options": list(MOUNT_OPTIONS)}
            for path, file in sorted(mounted.items())
        ],
    }
    edits["mounts"] += [
        {
            "hostPath": root.host_path(each.path),
            "containerPath": each.container_path,
            "options": list(SOCKET_OPTIONS),
        }
        for each in (files.sockets if sockets else ())
    ]
    if hook is not None and used:
        edits["hooks"] = [
            {"hookName": "createContainer", "path": hook.path, "args": hook.arguments(each, *commands[each])}
            for each in used
        ]
    return edits


def replace_file(
    directory: Path, name: str, content: bytes, *, rename: Callable[[Path, Path], None] = os.replace
) -> None:
    """Replace the content of ``name`` in ``directory`` with ``content``, atomically and durably.

    Raises:
        OSError: it could not be written, or another instance of the plugin is writing it.
    """
    temporary = directory / f".{name}.tmp"  # runtimes read *.json and *.yaml only
    handle = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW
        with os.fdopen(os.open(temporary, flags, 0o644), "wb") as out:
            os.fchmod(out.fileno(), 0o644)  # regardless of the umask: the runtime need not be root
            out.write(content)
            out.flush()
            os.fsync(out.fileno())
        rename(temporary, directory / name)
        os.fsync(handle)
    finally:
        os.close(handle)


class CdiPublisher:
    """Keeps the file in step with the devices. It is checked at every snapshot, so that a lost file is restored.

    Args:
        directory: where runtimes look for specifications.
        hook: None: this host has none.
        disabled_hooks, sockets: as in :func:`specification`.
        host: as in :func:`find_feature_devices`.
    """

    def __init__(
        self,
        directory: Path,
        *,
        root: DriverRoot,
        hook: CdiHook | None,
        injection: NvidiaInjection,
        log: Logger,
        disabled_hooks: Collection[str] = (),
        sockets: bool = True,
        host: Path = Path("/"),
    ) -> None:
        self._path = directory / SPEC_FILE_NAME
        self._root = root
        self._hook = hook
        self._injection = injection
        self._disabled_hooks = disabled_hooks
        self._sockets = sockets
        self._host = host
        self._toolkit = ToolkitSpec(directory, root=root, disabled_hooks=disabled_hooks, sockets=sockets, log=log)
        self._log = log
        self._files: tuple[str, DriverFiles] | None = None
        self._last_error = ""
        self._durable = False
        self._missing_features: tuple[str, ...] = ()

    def check(self) -> None:
        """Refuse a directory that is not writable, before any device is advertised.

        Raises:
            InvalidConfiguration: it cannot be created, or nothing can be written in it.
        """
        directory = self._path.parent
        probe = directory / f".{SPEC_FILE_NAME}.probe"
        try:
            directory.mkdir(parents=True, exist_ok=True)
            sync_path(directory)
            os.close(os.open(probe, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW, 0o600))
            probe.unlink(missing_ok=True)  # another instance of the plugin may have removed it
        except OSError as error:
            raise InvalidConfiguration(
                f"Cannot write a CDI specification to {directory}: {error.strerror}. Make it writable for the "
                "plugin, set another directory with --cdi-dir, or use a --device-list-strategy without CDI."
            ) from error
        if self._hook is None and "all" not in self._disabled_hooks:
            self._log.warning(
                "cdi.hook-missing",
                message="Neither nvidia-cdi-hook nor nvidia-ctk was found: containers get the driver's libraries by name, "
                "and their linker cache is not updated.",
                remedy="install NVIDIA's container toolkit, and set --nvidia-cdi-hook-path to the program's path on the "
                "host",
            )

    def publish(self, devices: Sequence[AdvertisedDevice], epoch: str) -> Mapping[str, str]:
        """Write the file if it differs; return id → why no container can be given the device.

        After a failed write, only those devices are refused that the existing file does not already contain correctly.

        Args:
            epoch: run of the service, empty for none; the driver's files are searched again in each run.
        """
        gpus = [device for device in devices if device.is_nvidia and not device.gone]
        unusable = {gpu.id: why for gpu in gpus if (why := _unusable_reason(gpu))}
        usable = [gpu for gpu in gpus if gpu.id not in unusable]
        if not usable:
            return unusable
        try:
            spec, driver, source = self.build(usable, epoch)
        except (OSError, InvalidConfiguration) as error:
            return unusable | self._failures(usable, error)
        try:
            self._write(encode_spec(spec), len(usable), driver, source)
        except OSError as error:
            given = self._devices_in_file(spec)
            return unusable | self._failures([gpu for gpu in usable if gpu.id not in given], error)
        self._last_error = ""
        return unusable

    def build(self, gpus: Sequence[AdvertisedDevice], epoch: str) -> tuple[ContainerEdits, str, str]:
        """Return the specification of ``gpus``, the driver's version, and who determined the driver's files.

        Raises:
            OSError, InvalidConfiguration: the driver's files cannot be found.
        """
        files = self._driver_files(epoch)
        spec = specification(
            gpus,
            files,
            self._root,
            self._hook,
            self._injection,
            disabled_hooks=self._disabled_hooks,
            sockets=self._sockets,
        )
        source = _take_common_edits(spec, self._toolkit.common_edits(files))
        _add_features(spec, self._find_features(gpus))
        return spec, files.version, source

    def _failures(self, gpus: Iterable[AdvertisedDevice], error: OSError | InvalidConfiguration) -> dict[str, str]:
        why = str(error) if isinstance(error, InvalidConfiguration) else f"{self._path}: {error.strerror}."
        if why != self._last_error:
            self._log.error("cdi.failed", message=why)
        self._last_error = why
        return {
            gpu.id: f"Device {gpu.id} cannot be given to a container: its CDI specification cannot be written. "
            "The plugin's log on the node contains the cause."
            for gpu in gpus
        }

    def _driver_files(self, epoch: str) -> DriverFiles:
        known = self._files
        if known is None or (epoch and known[0] != epoch) or not is_unchanged(known[1], self._root):
            known = self._files = (epoch, find_driver_files(self._root))
        return known[1]

    def _find_features(self, gpus: Iterable[AdvertisedDevice]) -> FeatureDevices:
        own = {
            self._injection.host_path(each.container_path, each.host_path)
            for gpu in gpus
            for each in gpu.access
            if each.kind is AccessKind.DEVICE_NODE
        }
        found = find_feature_devices(self._injection.features, host=self._host, root=self._root, gpu_nodes=own)
        if found.missing and found.missing != self._missing_features:
            self._log.warning(
                "cdi.feature-missing",
                message=f"This node has no device nodes for {' and '.join(found.missing)}, so containers get none.",
                remedy="load the feature's kernel module, or do not request the feature for this node",
            )
        self._missing_features = found.missing
        return found

    def _devices_in_file(self, spec: ContainerEdits) -> frozenset[str]:
        """Return the devices that the existing file gives exactly as ``spec`` does."""
        try:
            found = json.loads(self._path.read_bytes())
            if _canonical(found["containerEdits"]) != _canonical(spec["containerEdits"]):
                return frozenset()
            written = set(map(_canonical, found["devices"]))
            return frozenset(each["name"] for each in spec["devices"] if _canonical(each) in written)
        except (OSError, ValueError, LookupError, TypeError, RecursionError):  # missing, or not written by this plugin
            return frozenset()

    def _write(self, content: bytes, devices: int, driver: str, source: str) -> None:
        try:
            if self._path.read_bytes() == content:
                if not self._durable:  # the instance that wrote it may have been killed before it did this
                    sync_directory(self._path.parent)
                    self._durable = True
                return
        except FileNotFoundError:
            pass
        self._durable = False
        replace_file(self._path.parent, self._path.name, content)
        self._durable = True
        self._log.info("cdi.written", path=str(self._path), devices=devices, driver=driver, source=source)


def _canonical(value: object) -> str:
    """Return JSON in which equal values are equal texts; Python counts true, 1 and 1.0 as equal."""
    return json.dumps(value, sort_keys=True)


def _take_common_edits(spec: ContainerEdits, found: tuple[str, ContainerEdits] | None) -> str:
    """Replace what is common to all devices of ``spec`` by NVIDIA's, if there is any; return who made it.

    The device nodes stay.
    """
    if found is None:
        return "plugin"
    version, edits = found
    nodes = spec["containerEdits"].get("deviceNodes", [])
    spec["cdiVersion"] = max(spec["cdiVersion"], version, key=lambda each: tuple(map(int, each.split("."))))
    spec["containerEdits"] = edits | ({"deviceNodes": nodes} if nodes else {})
    return "toolkit"


def _add_features(spec: ContainerEdits, found: FeatureDevices) -> None:
    """Add ``found`` to what every container gets, unless it gets the same path anyway."""
    edits = spec["containerEdits"]
    nodes = {each["path"] for each in edits.get("deviceNodes", [])}
    mounts = {each["containerPath"] for each in edits.get("mounts", [])}
    if added := [{"path": path, "permissions": "rw"} for path in found.nodes if path not in nodes]:
        edits["deviceNodes"] = edits.get("deviceNodes", []) + added
    if mounted := [
        {"hostPath": host, "containerPath": path, "options": list(FEATURE_MOUNT_OPTIONS)}
        for path, host in found.mounts
        if path not in mounts
    ]:
        edits["mounts"] = edits.get("mounts", []) + mounted


def _unusable_reason(gpu: AdvertisedDevice) -> str:
    """Return why a device cannot be part of a specification; empty when it can."""
    if not _NAME.fullmatch(gpu.id):
        return f"Device {gpu.id} cannot be named in a CDI specification: use a --device-list-strategy without CDI."
    own = {access.container_path for access in gpu.access if access.kind is AccessKind.DEVICE_NODE} - CONTROL_NODES
    return "" if own else f"Device {gpu.id} has no device node of its own."
