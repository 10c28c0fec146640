"""Checks of what the service and the plugin need: the kubelet's directories and pod list, the node's PID namespace."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from scrubber.doctor.files import has_listener, is_same_directory, list_matching, path_exists
from scrubber.doctor.model import AS_ROOT, CheckContext, CheckLevel, CheckResult, unknown_result

if TYPE_CHECKING:
    from scrubber.adapters.kubelet.pid_namespace import PidNamespaceProblem

__all__ = [
    "OUR_SOCKET_PREFIX",
    "kubelet",
    "pid_namespace",
    "pid_namespace_problem",
    "plugins",
    "pod_resources",
    "pod_resources_socket",
    "sees_node_root",
]

_START_HINT = "systemctl status kubelet; or pass its directory (its --root-dir) with --kubelet-dir."
OUR_SOCKET_PREFIX = "scrubber-"
_DRIVER_SOCKET_PREFIX = "gpu.scrubber.dev"
"""Prefix of the sockets of our DRA driver, unless it has another name."""
_VENDOR_SOCKET_PREFIXES = ("nvidia-", "nvidia.", "nvidiaGPU")
"""Prefixes of the socket names of NVIDIA's own plugin, and of GKE's."""


def pod_resources_socket(node: CheckContext) -> Path:
    """Return the path of the kubelet's PodResources socket, on which it reports which pod has which device."""
    path = node.service.paths.pod_resources
    return node.path(path) if path is not None else node.path(node.kubelet_dir) / "pod-resources" / "kubelet.sock"


def _failure_level(node: CheckContext) -> CheckLevel:
    """Return the level of a failure: an error with real GPUs.

    A service with simulated ones, or none, breaks no promise.
    """
    return CheckLevel.ERROR if node.service.has_hardware else CheckLevel.WARNING


def kubelet(node: CheckContext) -> Iterator[CheckResult]:
    """The kubelet's directories that the service and the plugin use exist, and it listens in them."""
    if node.service.has_no_kubelet:
        message = "The service runs without a kubelet (--no-kubelet): jobs get its devices, pods do not."
        yield CheckResult("kubelet", CheckLevel.OK, message)
        return
    directory = node.path(node.kubelet_dir)
    try:
        exists = path_exists(directory)
    except OSError as error:
        yield unknown_result("kubelet", "whether a kubelet runs here is unknown", error)
        return
    if not exists:
        message = f"There is no kubelet: {directory} does not exist."
        yield CheckResult("kubelet", CheckLevel.WARNING, message, "Start it, or pass its directory with --kubelet-dir.")
        return
    # For the plugin's registration, and for the list of pods with devices. The kubelet creates all of these.
    registration = directory / "device-plugins" / "kubelet.sock"
    required = {
        "device-plugins/kubelet.sock": registration,
        "pod-resources/kubelet.sock": pod_resources_socket(node),
    }
    missing = []
    try:
        if not path_exists(registration.parent):
            # Without it the plugin does not register there, and the service's pod does not mount it.
            required["plugins_registry"] = directory / "plugins_registry"
        for name, path in required.items():
            if not path_exists(path):
                missing.append(name)
        if missing:
            message = f"{directory} has no {', no '.join(missing)}."
            yield CheckResult("kubelet", CheckLevel.WARNING, message, f"Start the kubelet: {_START_HINT}")
            return
        dead = [path for path in (registration, required["pod-resources/kubelet.sock"]) if not _has_listener(path)]
    except OSError as error:
        yield unknown_result("kubelet", "whether the kubelet's sockets exist is unknown", error)
        return
    if dead:
        message = f"No kubelet listens on {' or '.join(map(str, dead))}."
        yield CheckResult("kubelet", CheckLevel.WARNING, message, f"Start the kubelet: {_START_HINT}")
        return
    yield CheckResult("kubelet", CheckLevel.OK, f"The kubelet listens in {directory}.")


def _has_listener(path: Path) -> bool:
    try:
        return has_listener(path)
    except PermissionError as error:
        raise PermissionError(error.errno, error.strerror, str(path)) from error


def plugins(node: CheckContext) -> Iterator[CheckResult]:
    """Our plugin has its socket where the kubelet searches for it, and no other plugin advertises the same GPUs."""
    if node.service.has_no_kubelet:
        return
    directory = node.path(node.kubelet_dir)
    found: list[Path] = []
    try:
        if not path_exists(directory):
            return  # the kubelet check reports it
        for name in ("device-plugins", "plugins_registry"):
            found += list_matching(directory / name, "*.sock")
        rivals = [each for each in found if each.name.startswith(_VENDOR_SOCKET_PREFIXES) and _has_listener(each)]
        ours = [each for each in found if each.name.startswith(OUR_SOCKET_PREFIX) and _has_listener(each)]
        driver = [each for each in found if each.name.startswith(_DRIVER_SOCKET_PREFIX) and _has_listener(each)]
    except OSError as error:
        yield unknown_result("device-plugins", "which plugins serve the kubelet is unknown", error)
        return
    if rivals and not node.service.simulated:
        message = f"Another plugin may advertise the same GPUs, bypassing this service: {rivals[0]}."
        remedy = (
            "Delete its DaemonSet with kubectl (nvidia-device-plugin, or the GPU Operator's "
            "devicePlugin.enabled: false), see docs/replacing-nvidias-plugin.md; where the platform runs it, turn it off "
            "there: docs/platforms/README.md; or put it behind our plugin: docs/behind-a-vendors-plugin.md."
        )
        yield CheckResult("device-plugins", _failure_level(node), message, remedy)
    if ours:
        yield CheckResult("device-plugins", CheckLevel.OK, f"The device plugin listens on {ours[0]}.")
    elif driver and node.kubelet.containers_with_devices == node.kubelet.containers_with_claims:
        message = "No device plugin of ours is registered: pods request devices from our DRA driver."
        yield CheckResult("device-plugins", CheckLevel.OK, message)
    else:
        # A warning before the plugin is installed. An error once containers have devices: a kubelet that starts while
        # no plugin is registered does not call PreStartContainer for them.
        many = node.kubelet.containers_with_devices - node.kubelet.containers_with_claims
        has = f", and {many} container{'s use' if many > 1 else ' uses'} our devices" if many else ""
        message = (
            f"Our device plugin does not listen in {directory}{has}: the kubelet has no GPUs to assign, and "
            "running pods keep theirs. If the kubelet is restarted, it starts their containers without "
            "calling the plugin. On a node in use this is critical (alert ScrubberPluginDown)."
        )
        remedy = (
            "systemctl enable --now scrubber-plugin.service; as a pod: helm install scrubber deploy/chart, or kubectl apply -k "
            "deploy/kubernetes/base (docs/deploying.md)"
        )
        yield CheckResult("device-plugins", _failure_level(node) if many else CheckLevel.WARNING, message, remedy)


def pod_resources(node: CheckContext) -> Iterator[CheckResult]:
    """The kubelet reports which pod has which device, as root and from no pod, and its other sources agree."""
    if node.service.has_no_kubelet:
        return
    answer, socket = node.kubelet, pod_resources_socket(node)
    status = node.service.kubelet_status if node.service.is_available else ""
    trusted = answer.is_trusted or (answer.is_recently_started and status == "ok")
    if answer.is_recently_started and not trusted:
        remedy = f"Run scrubber doctor again in a minute; if the result is the same: {_START_HINT}"
        yield CheckResult("pod-resources", CheckLevel.WARNING, status or answer.message, remedy)
        return
    level = _failure_level(node)
    if status and status != "ok":
        remedy = f"Until then every start waits for a certificate. {_START_HINT}"
        yield CheckResult("pod-resources", level, f"The service does not trust the kubelet: {status}", remedy)
    if not answer.was_queried:
        return  # there is no socket, which the kubelet check reports
    if answer.is_permission_denied:
        message = f"You may not query {socket}; whether the kubelet answers is unknown."
        yield CheckResult("pod-resources", CheckLevel.WARNING, message, AS_ROOT)
        return
    if not trusted:
        remedy = (
            f"Until its list is trusted, every start waits for a certificate, and no pod counts as gone. {_START_HINT}"
        )
        yield CheckResult("pod-resources", level, answer.message or f"{socket} returned no list.", remedy)
        return
    if answer.remarks:
        remedy = (
            "Pass the kubelet's directory with --kubelet-dir and the directory of its pods' logs with "
            f"--pod-logs-dir, to this command and to scrubber serve. {AS_ROOT}"
        )
        yield CheckResult("pod-resources", CheckLevel.WARNING, " ".join(answer.remarks), remedy)
        return
    has = f"{answer.containers_with_devices} container{'s use' if answer.containers_with_devices != 1 else ' uses'} our devices"
    yield CheckResult(
        "pod-resources", CheckLevel.OK, f"The kubelet answers and is trusted; according to its list, {has}."
    )


def sees_node_root(node: CheckContext) -> bool:
    """Return whether a file that is missing here is certainly missing on the node.

    The user said where the node's root directory is; or this process sees the processes of the node, and PID 1 has the
    same root directory. Without root's rights that directory is not readable, so the answer is no.
    """
    if node.root_of_init is None:
        return True
    return pid_namespace_problem(node) is None and is_same_directory(node.root, node.root_of_init)


def pid_namespace_problem(node: CheckContext) -> PidNamespaceProblem | None:
    """Return why this process may not see the node's processes; None if it certainly does."""
    # Imported here: otherwise every other command would wait for what the kubelet's adapter loads.
    from scrubber.adapters.kubelet.pid_namespace import find_problem, read_pid_namespace

    return find_problem(read_pid_namespace(pod_resources_socket(node), node.path("/proc")))


def pid_namespace(node: CheckContext) -> Iterator[CheckResult]:
    """The node's processes are visible from here. Otherwise the service does not start, unless the node is simulated."""
    if node.service.simulated:
        yield CheckResult("pid-namespace", CheckLevel.OK, "The simulated node does not need the node's PID namespace.")
        return
    doubt = pid_namespace_problem(node)
    if doubt is None:
        yield CheckResult("pid-namespace", CheckLevel.OK, "The node's processes are visible from here.")
        return
    level = _failure_level(node)
    yield CheckResult("pid-namespace", level, f"For this command: {doubt.message}", doubt.remedy)
