"""Checks of our DRA driver; nothing where none runs. What they need from the API server is in the node's context."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

from scrubber.doctor.deployment import DraDriver, find_drivers, is_driver_socket, visible_plugin
from scrubber.doctor.files import has_listener, is_same_directory, list_matching, path_exists
from scrubber.doctor.model import AS_ROOT, CheckContext, CheckLevel, CheckResult, DeviceReport, unknown_result
from scrubber.domain.errors import InvalidConfiguration

__all__ = ["dra_binding", "dra_cdi", "dra_cluster", "dra_devices", "dra_driver", "dra_restarts"]

CDI_DIRECTORIES = ("/var/run/cdi", "/etc/cdi")
"""Where container runtimes look, unless they are configured otherwise."""
MIN_VERSION = (1, 34)
BINDING_VERSION = (1, 36)
"""Where DRADeviceBindingConditions is on by default."""
_BEING_CLEANED = frozenset({"dirty", "scrubbing", "recovering", "probation"})
_TRUE = frozenset({"1", "t", "true", "y", "yes", "on"})
_RIVAL_SOCKETS = "gpu.nvidia.com*-reg.sock"
"""Of NVIDIA's own DRA driver for GPUs."""
_VERSION = re.compile(r"v?(\d+)\.(\d+)")


def dra_driver(node: CheckContext) -> Iterator[CheckResult]:
    """Our DRA driver has its socket where the kubelet searches for it, and no other driver publishes the same GPUs."""
    name = "dra-driver"
    registry = node.path(node.kubelet_dir) / "plugins_registry"
    try:
        drivers = find_drivers(node)
        hidden = not drivers and any(
            is_driver_socket(each) and has_listener(each) for each in list_matching(registry, "*-reg.sock")
        )
        rivals = [each for each in list_matching(registry, _RIVAL_SOCKETS) if drivers and has_listener(each)]
    except OSError as error:
        yield unknown_result(name, "whether our DRA driver runs here is unknown", error)
        return
    if hidden:
        message = "A DRA driver of ours listens, but its process is not visible from here."
        yield CheckResult(name, CheckLevel.WARNING, message, AS_ROOT)
    if rivals and not node.service.simulated:
        message = f"Another DRA driver publishes the same GPUs, bypassing this service: {rivals[0]}."
        remedy = "Disable its GPU part (NVIDIA's DRA driver: resources.gpus.enabled=false), or remove ours."
        yield CheckResult(name, CheckLevel.ERROR, message, remedy)
    for driver, others in _by_name(drivers).items():
        if others:
            pids = ", ".join(str(each.process.pid) for each in drivers if each.name == driver)
            message = f"Several processes (PIDs {pids}) are the DRA driver {driver}."
            remedy = (
                "That is so for a moment in a rolling update. If it lasts, give one of them another --driver-name and "
                "--devices: they undo each other's ResourceSlices."
            )
            yield CheckResult(name, CheckLevel.WARNING, message, remedy)
        else:
            (found,) = (each for each in drivers if each.name == driver)
            message = f"The DRA driver {driver} (PID {found.process.pid}) listens on {found.socket}."
            yield CheckResult(name, CheckLevel.OK, message)


def _by_name(drivers: tuple[DraDriver, ...]) -> dict[str, bool]:
    """Return the name of each driver, and whether several processes have it."""
    names = [each.name for each in drivers]
    return {each: names.count(each) > 1 for each in names}


def _visible_drivers(node: CheckContext) -> tuple[DraDriver, ...]:
    """Return our drivers; none also where they cannot be read, which ``dra-driver`` reports."""
    try:
        return find_drivers(node)
    except OSError:
        return ()


def dra_cdi(node: CheckContext) -> Iterator[CheckResult]:
    """The driver can write its CDI directory, and container runtimes look there."""
    name = "dra-cdi"
    # In the service's pod, the node's root directory is that of PID 1.
    roots = [each for each in (node.root, node.root_of_init) if each is not None]
    for driver in _visible_drivers(node):
        configured = driver.process.setting("--cdi-dir", "SCRUBBER_CDI_DIR") or CDI_DIRECTORIES[0]
        try:
            directory = _inside(driver.process.root, configured)
            exists = path_exists(directory)
            writable = exists and os.access(directory, os.W_OK, effective_ids=True)
            seen = exists and any(
                path_exists(each) and is_same_directory(directory, each)
                for each in (_inside(root, path) for root in roots for path in CDI_DIRECTORIES)
            )
        except OSError as error:
            yield unknown_result(name, "whether the driver can write CDI specifications is unknown", error)
            continue
        if not exists or not writable:
            problem = "does not exist" if not exists else "is read-only"
            message = f"The driver's CDI directory {configured} {problem} for it: no claim can be prepared."
            remedy = f"Mount the node's {CDI_DIRECTORIES[0]} writable in the driver's pod, at --cdi-dir."
            yield CheckResult(name, CheckLevel.ERROR, message, remedy)
        elif not seen:
            message = (
                f"The driver's CDI directory {configured} is neither {' nor '.join(CDI_DIRECTORIES)} of the node: a "
                "runtime finds its specifications only if it is configured to look there (cdi_spec_dirs)."
            )
            remedy = f"Mount the node's {CDI_DIRECTORIES[0]} in the driver's pod, at --cdi-dir."
            yield CheckResult(name, CheckLevel.WARNING, message, remedy)
        else:
            message = f"The driver writes CDI specifications to {configured}, where container runtimes look by default."
            yield CheckResult(name, CheckLevel.OK, message)


def _inside(root: Path, path: str) -> Path:
    """Return a path below another root directory: ``/var/run`` is a link there, which would lead out of it."""
    if path.startswith("/var/run/") and (root / "var/run").is_symlink():
        return root / path.removeprefix("/var/")
    return root / path.lstrip("/")


def dra_devices(node: CheckContext) -> Iterator[CheckResult]:
    """The device plugin and the driver offer different devices."""
    name = "dra-devices"
    drivers, plugin = _visible_drivers(node), visible_plugin(node)
    if not drivers or plugin is None or node.service.devices is None:
        return
    # Imported here: otherwise every run of this command would wait for the plugin's modules.
    from plugin.device_selection import DeviceSelection
    from plugin.kubelet.devices import AdvertisedDevice, ServiceVerdict

    def described(device: DeviceReport) -> AdvertisedDevice:
        return AdvertisedDevice(
            device.id,
            device.index,
            ServiceVerdict.ADVERTISED,
            parent=device.parent,
            profile=device.profile,
            model=device.model,
        )

    try:
        of_plugin = DeviceSelection.parse(plugin.setting("--devices", "SCRUBBER_PLUGIN_DEVICES"))
        of_drivers = [
            DeviceSelection.parse(each.process.setting("--devices", "SCRUBBER_DRA_DEVICES")) for each in drivers
        ]
    except InvalidConfiguration as error:
        yield CheckResult(name, CheckLevel.ERROR, str(error), "Correct the setting.")
        return
    twice = [
        device.id
        for device in node.service.devices
        if of_plugin.includes(described(device)) and any(each.includes(described(device)) for each in of_drivers)
    ]
    if twice:
        more = f" and {len(twice) - 1} more" if len(twice) > 1 else ""
        message = (
            f"The device plugin and the DRA driver both offer {twice[0]}{more}: the service refuses claims for it."
        )
        remedy = "Start them with --devices for different devices, such as 0,1 and !0,!1 (docs/dra.md)."
        yield CheckResult(name, CheckLevel.ERROR, message, remedy)
    else:
        yield CheckResult(name, CheckLevel.OK, "The device plugin and the DRA driver offer different devices.")


def dra_cluster(node: CheckContext) -> Iterator[CheckResult]:
    """The API server supports DRA, has the driver's devices, and lets the driver do what it needs."""
    name = "dra-cluster"
    cluster = node.cluster
    if cluster is None:
        return
    if cluster.error:
        message = f"The API server could not be queried with the driver's credentials: {cluster.error}"
        yield CheckResult(name, CheckLevel.WARNING, message, "See the driver's log for the requests that it makes.")
        return
    version = _VERSION.match(cluster.version)
    if version is not None and (int(version[1]), int(version[2])) < MIN_VERSION:
        message = f"Kubernetes is {cluster.version}, which does not serve resource.k8s.io/v1."
        yield CheckResult(name, CheckLevel.ERROR, message, "Use Kubernetes 1.34 or newer.")
        return
    if cluster.denied:
        message = f"The driver's role does not allow it to {', '.join(cluster.denied)}."
        remedy = (
            "kubectl apply -k with the component deploy/kubernetes/dra, or helm upgrade with dra.enabled=true: both have a role "
            "with all of them."
        )
        yield CheckResult(name, CheckLevel.ERROR, message, remedy)
    if cluster.slices_error or not cluster.slices:
        message = (
            cluster.slices_error or "The driver has published no ResourceSlice, so that the scheduler sees no device."
        )
        remedy = "See slices.write-failed in the driver's log, and driver.location-unknown."
        yield CheckResult(name, CheckLevel.ERROR, message, remedy)
        return
    sick = [each for each in node.service.devices or () if not each.advertised]
    if sick and not cluster.devices_with_taints:
        message = (
            f"{sick[0].id} is out of service, and no published device has a taint: the API server may not keep taints "
            "(feature gate DRADeviceTaints). The driver then does not publish such devices."
        )
        remedy = "See slices.feature-off in the driver's log. Enable the feature gate for evictions by taints."
        yield CheckResult(name, CheckLevel.WARNING, message, remedy)
    if not cluster.denied:
        message = (
            f"Kubernetes {cluster.version} has {cluster.devices} of the node's devices in {cluster.slices} "
            f"ResourceSlice{'s' if cluster.slices > 1 else ''}, {cluster.devices_with_taints} of them with a taint."
        )
        yield CheckResult(name, CheckLevel.OK, message)


def dra_binding(node: CheckContext) -> Iterator[CheckResult]:
    """The API server keeps the binding conditions that the driver publishes; nothing where they are off."""
    name, cluster = "dra-binding", node.cluster
    wanted = [each for each in _visible_drivers(node) if _has_binding_conditions(each)]
    if not wanted or cluster is None or cluster.error or cluster.slices_error:
        return
    remedy = (
        "Enable the feature gate DRADeviceBindingConditions of the API server and the scheduler, or start the driver "
        "without --binding-conditions (docs/dra.md)."
    )
    version = _VERSION.match(cluster.version)
    cleaned = [each.id for each in node.service.devices or () if each.state in _BEING_CLEANED]
    if cluster.devices_with_conditions:
        number = cluster.devices_with_conditions
        message = f"The API server keeps binding conditions: {number} of the published devices have them."
        yield CheckResult(name, CheckLevel.OK, message)
    elif version is not None and (int(version[1]), int(version[2])) < BINDING_VERSION:
        message = (
            f"The driver runs with --binding-conditions, which Kubernetes {cluster.version} does not support unless a "
            "feature gate is enabled: pods are bound to devices that are not clean yet, and wait on the node."
        )
        yield CheckResult(name, CheckLevel.WARNING, message, remedy)
    elif cleaned:
        message = (
            f"{cleaned[0]} is being cleaned, and no published device has a binding condition: the API server may not keep "
            "them (feature gate DRADeviceBindingConditions). Pods are then bound to such devices, and wait on the node."
        )
        yield CheckResult(name, CheckLevel.WARNING, message, remedy)
    else:
        message = "The driver runs with --binding-conditions; no device is being cleaned, so that none has them now."
        yield CheckResult(name, CheckLevel.OK, message)


def _has_binding_conditions(driver: DraDriver) -> bool:
    arguments, environment = driver.process.arguments, driver.process.environment
    variable = environment.get("SCRUBBER_DRA_BINDING_CONDITIONS", "")
    return "--binding-conditions" in arguments or variable.strip().lower() in _TRUE


def dra_restarts(node: CheckContext) -> Iterator[CheckResult]:
    """Say what DRA does not cover."""
    if _visible_drivers(node):
        message = (
            "The kubelet calls the driver once for each claim: a container that restarts within a claim, or a pod that joins "
            "it, can find what the claim's own pods left. Certificates say so."
        )
        yield CheckResult("dra-restarts", CheckLevel.OK, message)
