"""Checks of what the service and the plugin need: the kubelet's directories and pod list, the node's PID namespace."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from scrubber.doctor.files import has_listener, list_matching, path_exists
from scrubber.doctor.model import AS_ROOT, CheckContext, CheckLevel, CheckResult, unknown_result

__all__ = ["kubelet", "pid_namespace", "plugins", "pod_resources", "pod_resources_socket"]

_START_HINT = "systemctl status kubelet; or give its directory (its --root-dir) with --kubelet-dir."
_OUR_SOCKET_PREFIX = "scrubber-"
_VENDOR_SOCKET_PREFIXES = ("nvidia-", "nvidia.")
"""Prefixes of the socket names of NVIDIA's own plugin."""


def pod_resources_socket(node: CheckContext) -> Path:
    """Return the path of the kubelet's PodResources socket, on which it reports which pod has which device."""
    said = node.service.paths.pod_resources
    return node.path(said) if said is not None else node.path(node.kubelet_dir) / "pod-resources" / "kubelet.sock"


def _failure_level(node: CheckContext) -> CheckLevel:
    """Return the level of a failure: an error with real GPUs.

    A service with simulated ones, or none, breaks no promise.
    """
    return CheckLevel.ERROR if node.service.has_hardware else CheckLevel.WARNING


def kubelet(node: CheckContext) -> Iterator[CheckResult]:
    """The kubelet's directories that the service and the plugin use are there, and it listens in them."""
    directory = node.path(node.kubelet_dir)
    try:
        there = path_exists(directory)
    except OSError as error:
        yield unknown_result("kubelet", "whether a kubelet is here was not seen", error)
        return
    if not there:
        message = f"There is no kubelet here: {directory} does not exist."
        yield CheckResult("kubelet", CheckLevel.WARNING, message, "Start it, or give its directory with --kubelet-dir.")
        return
    # For the plugin's registration, and for the list of pods with devices. The kubelet creates all of these.
    registration = directory / "device-plugins" / "kubelet.sock"
    wanted = {
        "device-plugins/kubelet.sock": registration,
        "pod-resources/kubelet.sock": pod_resources_socket(node),
    }
    missing = []
    try:
        if not path_exists(registration.parent):
            # Without it the plugin does not register there, and the service's pod does not mount it.
            wanted["plugins_registry"] = directory / "plugins_registry"
        for name, path in wanted.items():
            if not path_exists(path):
                missing.append(name)
        if missing:
            message = f"{directory} has no {', no '.join(missing)}."
            yield CheckResult("kubelet", CheckLevel.WARNING, message, f"Start the kubelet: {_START_HINT}")
            return
        dead = [path for path in (registration, wanted["pod-resources/kubelet.sock"]) if not _has_listener(path)]
    except OSError as error:
        yield unknown_result("kubelet", "whether the kubelet's sockets are there was not seen", error)
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
    """Our plugin has its socket where the kubelet looks for it, and no other one hands out the same GPUs."""
    directory = node.path(node.kubelet_dir)
    found: list[Path] = []
    try:
        if not path_exists(directory):
            return  # the kubelet check reports it
        for name in ("device-plugins", "plugins_registry"):
            found += list_matching(directory / name, "*.sock")
        rivals = [each for each in found if each.name.startswith(_VENDOR_SOCKET_PREFIXES) and _has_listener(each)]
        ours = [each for each in found if each.name.startswith(_OUR_SOCKET_PREFIX) and _has_listener(each)]
    except OSError as error:
        yield unknown_result("device-plugins", "which plugins serve the kubelet was not seen", error)
        return
    if rivals and not node.service.simulated:
        message = f"Another plugin may hand out the same GPUs, past this service: {rivals[0]}."
        remedy = (
            "kubectl delete its DaemonSet (nvidia-device-plugin, or the GPU Operator's devicePlugin.enabled: false), as "
            "docs/replacing-nvidias-plugin.md says; or put it behind ours: docs/behind-a-vendors-plugin.md."
        )
        yield CheckResult("device-plugins", _failure_level(node), message, remedy)
    if ours:
        yield CheckResult("device-plugins", CheckLevel.OK, f"The device plugin listens on {ours[0]}.")
    else:
        # A warning before the plugin is installed. An error once containers have devices: a kubelet that starts while
        # no plugin is registered does not call PreStartContainer for them.
        many = node.kubelet.containers_with_devices
        has = f", and {many} container{'s have' if many > 1 else ' has'} devices of ours" if many else ""
        message = (
            f"No device plugin of ours listens in {directory}{has}: the kubelet has no GPU to give to a pod, and pods that run "
            "keep theirs. If the kubelet is restarted, it starts their containers without asking the service. On a node that "
            "is in use this is critical (alert ScrubberPluginDown)."
        )
        remedy = "systemctl enable --now scrubber-plugin.service; as a pod: kubectl apply -k deploy/kubernetes/base"
        yield CheckResult("device-plugins", _failure_level(node) if many else CheckLevel.WARNING, message, remedy)


def pod_resources(node: CheckContext) -> Iterator[CheckResult]:
    """The kubelet answers who has which device, as root and from no pod, and its other witnesses agree."""
    said, socket = node.kubelet, pod_resources_socket(node)
    heard = node.service.kubelet_status if node.service.is_available else ""
    trusted = said.is_trusted or (said.is_recently_started and heard == "ok")
    if said.is_recently_started and not trusted:
        remedy = f"Call scrubber doctor again in a minute; if it says the same then: {_START_HINT}"
        yield CheckResult("pod-resources", CheckLevel.WARNING, heard or said.message, remedy)
        return
    level = _failure_level(node)
    if heard and heard != "ok":
        remedy = f"Until then every start waits for a certificate. {_START_HINT}"
        yield CheckResult("pod-resources", level, f"The service does not believe the kubelet: {heard}", remedy)
    if not said.was_queried:
        return  # there is no socket, which the kubelet check reports
    if said.is_permission_denied:
        message = f"You may not ask {socket}; whether the kubelet answers was not seen."
        yield CheckResult("pod-resources", CheckLevel.WARNING, message, AS_ROOT)
        return
    if not trusted:
        remedy = (
            f"Until its list is believed every start waits for a certificate, and no pod counts as gone. {_START_HINT}"
        )
        yield CheckResult("pod-resources", level, said.message or f"{socket} gave no list.", remedy)
        return
    if said.remarks:
        remedy = (
            "Give the kubelet's directory with --kubelet-dir and where it keeps its pods' logs with --pod-logs-dir, to this "
            f"command and to scrubber serve. {AS_ROOT}"
        )
        yield CheckResult("pod-resources", CheckLevel.WARNING, " ".join(said.remarks), remedy)
        return
    has = f"{said.containers_with_devices} container{'s have' if said.containers_with_devices != 1 else ' has'} devices of ours"
    yield CheckResult("pod-resources", CheckLevel.OK, f"The kubelet answers, and is believed; by its list {has}.")


def pid_namespace(node: CheckContext) -> Iterator[CheckResult]:
    """The node's processes are seen from here. The service refuses to start where they are not, unless it simulates."""
    if node.service.simulated:
        yield CheckResult("pid-namespace", CheckLevel.OK, "The simulated node needs no PID namespace of the machine's.")
        return
    # Imported here: otherwise every other command would wait for what the kubelet's adapter loads.
    from scrubber.adapters.kubelet.pid_namespace import find_problem, read_pid_namespace

    doubt = find_problem(read_pid_namespace(pod_resources_socket(node), node.path("/proc")))
    if doubt is None:
        yield CheckResult("pid-namespace", CheckLevel.OK, "The node's processes are seen from here.")
        return
    level = _failure_level(node)
    yield CheckResult("pid-namespace", level, f"Where this command runs: {doubt.message}", doubt.remedy)
