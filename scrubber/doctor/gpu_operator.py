"""Checks of our installation beside NVIDIA's GPU Operator: what would make upgrades, resets or injection fail there.

Each yields nothing on a node without the operator, or where our process that it concerns is not visible.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from scrubber.doctor.container_runtime import find_nri_plugin
from scrubber.doctor.deployment import (
    CDI_STRATEGIES,
    find_plugin,
    find_service,
    list_strategies,
    pod_names,
    visible_plugin,
)
from scrubber.doctor.environment import (
    CLIENT_LABEL,
    FIRST_WITH_CLIENT_LABEL,
    PLUGIN_LABEL,
    GpuOperator,
    find_operator,
    has_nvsentinel,
    operator_version,
)
from scrubber.doctor.files import list_matching, path_exists, read_bytes, read_text
from scrubber.doctor.gpus import driver_version
from scrubber.doctor.kubelet import sees_node_root
from scrubber.doctor.model import CheckContext, CheckLevel, CheckResult, unknown_result

__all__ = [
    "config_manager",
    "deploy_label",
    "driver_mounts",
    "driver_root",
    "mig_manager",
    "nvsentinel_yield",
    "operator_validations",
    "runtime_class",
]

_PAGE = "docs/gpu-operator.md"
_VALIDATIONS = Path("/run/nvidia/validations")
_UNITS = ("scrubber.service", "scrubber-plugin.service")
_LIBRARY = re.compile(r"/lib(?:nvidia-ml|cuda)\.so\.(\d{3,}(?:\.\d+)+)(?: |$)", re.MULTILINE)
_HANDLER = re.compile(r"^\s*\[.*\bruntimes\.[\"']?nvidia[\"']?\]", re.MULTILINE)
_RUNTIME_CONFIGS = (
    ("/etc/containerd", "config.toml"),
    ("/etc/containerd/conf.d", "*.toml"),
    ("/var/lib/rancher/k3s/agent/etc/containerd", "config.toml"),
    ("/var/lib/rancher/rke2/agent/etc/containerd", "config.toml"),
    ("/etc/crio", "crio.conf"),
    ("/etc/crio/crio.conf.d", "*.conf"),
    ("/run/containerd/conf.d", "*.toml"),
)


def deploy_label(node: CheckContext) -> Iterator[CheckResult]:
    """The operator can end our service, or the plugin yields the node, before it replaces the driver."""
    name = "deploy-label"
    try:
        operator = find_operator(node)
        if operator is None or operator.uses_dra:
            return
        service, plugin = find_service(node), find_plugin(node)
    except OSError as error:
        yield unknown_result(name, "whether the operator can replace the driver is unknown", error)
        return
    if service is None:
        return
    version = operator_version(node, operator)
    label = service.environment.get("SCRUBBER_DEPLOY_LABEL", "")
    followed = "" if plugin is None else plugin.setting("--yield-labels", "SCRUBBER_YIELD_LABELS")
    old = version is not None and version < FIRST_WITH_CLIENT_LABEL
    if label == PLUGIN_LABEL and version is not None and not old:
        message = (
            f"Our pods select nodes by {label}, which the operator ({_text(version)}) pauses without waiting for them: a MIG "
            "change or a first attempt to unload the driver may fail."
        )
        remedy = (
            "Use the component gpu-operator-client-label instead of gpu-operator-plugin-label; in the chart "
            "gpuOperator.deployLabel=client."
        )
        yield CheckResult(name, CheckLevel.WARNING, message, remedy)
    elif label == CLIENT_LABEL and old:
        message = (
            f"Our pods select nodes by {label}, which the operator ({_text(version)}) does not know: it never pauses them, so "
            "a driver upgrade does not end."
        )
        remedy = (
            "Use the component gpu-operator-plugin-label instead of gpu-operator-client-label; in the chart "
            "gpuOperator.deployLabel=device-plugin."
        )
        yield CheckResult(name, CheckLevel.WARNING, message, remedy)
    elif label:
        message = f"The operator ends our pods before it replaces the driver: they select nodes by {label}."
        yield CheckResult(name, CheckLevel.OK, message)
    elif old and followed and CLIENT_LABEL in followed.split(","):
        message = f"The plugin yields the node by {followed}, which the operator ({_text(version)}) does not set."
        yield CheckResult(
            name, CheckLevel.WARNING, message, f"Set SCRUBBER_YIELD_LABELS={PLUGIN_LABEL} for the plugin."
        )
    elif followed:
        message = f"The plugin yields the node before the driver is replaced: it follows {followed}."
        yield CheckResult(name, CheckLevel.OK, message)
    elif service.unit:
        message = (
            f"The service is the unit {service.unit}, and the plugin follows no label of its node: a driver upgrade never "
            "ends, because the service has the driver open."
        )
        remedy = (
            f"Set SCRUBBER_YIELD_LABELS={PLUGIN_LABEL if old else CLIENT_LABEL} for the plugin; see "
            "docs/node-setup.md#yielding-the-node."
        )
        yield CheckResult(name, CheckLevel.WARNING, message, remedy)
    else:
        message = (
            "Nothing shows that the operator can end our pods, or that the plugin yields the node, before the driver is "
            "replaced: a driver upgrade may never end, because the service has the driver open."
        )
        remedy = (
            f"Add the component {_label_component(version)}: {_PAGE}#install (gpuOperator.deployLabel in the chart). If your own "
            "nodeSelector has that label, set the service's variable SCRUBBER_DEPLOY_LABEL to it."
        )
        yield CheckResult(name, CheckLevel.WARNING, message, remedy)


def _label_component(version: tuple[int, int] | None) -> str:
    if version is None:
        return "gpu-operator-client-label (operator 26.7 or newer) or gpu-operator-plugin-label (older)"
    return "gpu-operator-plugin-label" if version < FIRST_WITH_CLIENT_LABEL else "gpu-operator-client-label"


def _text(version: tuple[int, int] | None) -> str:
    return "of an unknown version" if version is None else f"{version[0]}.{version[1]}"


def nvsentinel_yield(node: CheckContext) -> Iterator[CheckResult]:
    """The service lets go of the driver when NVSentinel resets a GPU."""
    name = "nvsentinel-yield"
    try:
        if not has_nvsentinel(node):
            return
        service, plugin = find_service(node), find_plugin(node)
    except OSError as error:
        yield unknown_result(name, "whether NVSentinel can reset GPUs is unknown", error)
        return
    if service is None or plugin is None:
        return
    labels = plugin.setting("--yield-labels", "SCRUBBER_YIELD_LABELS").split(",")
    labels.append(service.environment.get("SCRUBBER_DEPLOY_LABEL", ""))
    if PLUGIN_LABEL in labels:
        message = f"NVSentinel can reset GPUs: the service lets go of the driver by {PLUGIN_LABEL}."
        yield CheckResult(name, CheckLevel.OK, message)
        return
    message = (
        f"NVSentinel runs here, and its GPU resets set {PLUGIN_LABEL}, which neither our pods nor the plugin follow: they "
        "fail, because the service has the driver open."
    )
    remedy = (
        f"Add the component yield with SCRUBBER_YIELD_LABELS={PLUGIN_LABEL}, in the chart cluster.yield.enabled and "
        f"cluster.yield.labels: {_PAGE}."
    )
    yield CheckResult(name, CheckLevel.WARNING, message, remedy)


def driver_root(node: CheckContext) -> Iterator[CheckResult]:
    """The plugin looks for the driver where it is."""
    name = "driver-root"
    try:
        operator = find_operator(node)
        if operator is None or operator.uses_dra:
            return
        plugin = find_plugin(node)
    except OSError as error:
        yield unknown_result(name, "whether the plugin finds the driver is unknown", error)
        return
    if plugin is None or not list_strategies(plugin) & CDI_STRATEGIES:
        return
    given = plugin.setting("--nvidia-driver-root", "NVIDIA_DRIVER_ROOT") or plugin.setting("--driver-root", "")
    file = plugin.setting("--driver-ready-file", "SCRUBBER_DRIVER_READY_FILE")
    root = operator.driver_root
    if given and root is not None and str(root) != given:
        message = f"The plugin looks for the driver in {given}, but it is in {root}: containers would get no driver."
        remedy = "Remove NVIDIA_DRIVER_ROOT: the plugin then takes the place from the operator's validator."
        yield CheckResult(name, CheckLevel.ERROR, message, remedy)
    elif file and not given:
        where = f": {root}" if root is not None else ""
        yield CheckResult(name, CheckLevel.OK, f"The plugin takes the driver's place from {file}{where}.")
    elif given or root is None or not operator.driver_in_container:
        where = str(root or given or "/")
        message = f"The plugin looks for the driver in {given or '/'}; it is in {where}, as far as is visible."
        yield CheckResult(name, CheckLevel.OK, message)
    else:
        message = (
            f"The driver is in the container root {root}, but the plugin looks in /: containers would get no driver."
        )
        remedy = (
            "Use the overlay gpu-operator (in the chart gpuOperator.enabled=true), or set SCRUBBER_DRIVER_READY_FILE=/run/nvidia/validations/driver-ready and mount "
            "/run/nvidia with mountPropagation: HostToContainer."
        )
        yield CheckResult(name, CheckLevel.ERROR, message, remedy)


def runtime_class(node: CheckContext) -> Iterator[CheckResult]:
    """The service's pod can get the driver: by the runtime class ``nvidia``, or by the operator's NRI plugin."""
    name = "runtime-class"
    try:
        operator = find_operator(node)
        if operator is None or operator.uses_dra:
            return
        service, nri = find_service(node), find_nri_plugin(node)
        if nri is None and (service is None or not service.pod_uid or not sees_node_root(node)):
            return
        handler = _handler_file(node) if nri is None else None
    except OSError as error:
        yield unknown_result(name, "whether the service's pod can get the driver is unknown", error)
        return
    if nri is not None:
        namespace = service.namespace if service is not None and service.namespace else "scrubber-system"
        yield _nri_result(name, namespace, namespace in {*nri.namespaces, operator.namespace})
    elif handler is not None:
        yield CheckResult(name, CheckLevel.OK, f"{handler} has the handler of the runtime class nvidia.")
    else:
        message = (
            "No configuration of the container runtime has a handler nvidia: a pod with that runtime class, such as the "
            "service's, does not start."
        )
        remedy = "Wait for the operator's toolkit pod, which adds it; kubectl get runtimeclass nvidia shows the class."
        yield CheckResult(name, CheckLevel.WARNING, message, remedy)


def _nri_result(name: str, namespace: str, listed: bool) -> CheckResult:
    if listed:
        message = f"The operator's NRI plugin gives pods of {namespace} the driver; no runtime class is needed."
        return CheckResult(name, CheckLevel.OK, message)
    message = (
        "The operator's NRI plugin runs, so there is no runtime class, and it gives the driver to no pod of the namespace "
        f"{namespace}: the service starts without a driver there."
    )
    remedy = (
        f"Use the component gpu-operator-nri (in the chart cdi.nriPluginEnabled=true), and set NRI_MANAGEMENT_CDI_DEVICE_NAMESPACES={namespace} in toolkit.env of the "
        "ClusterPolicy."
    )
    return CheckResult(name, CheckLevel.WARNING, message, remedy)


def _handler_file(node: CheckContext) -> Path | None:
    """Return a configuration of the container runtime with a handler ``nvidia``. Raises OSError."""
    files = (path for place, pattern in _RUNTIME_CONFIGS for path in list_matching(node.path(place), pattern))
    return next((path for path in files if _HANDLER.search(read_text(path))), None)


def operator_validations(node: CheckContext) -> Iterator[CheckResult]:
    """The operator has validated driver and toolkit: until then, new pods of ours wait in their init containers."""
    name = "operator-validations"
    try:
        operator = find_operator(node)
        if operator is None or operator.uses_dra or not sees_node_root(node):
            return
        files = ("driver-ready", "toolkit-ready")
        missing = [each for each in files if not path_exists(node.path(_VALIDATIONS / each))]
        content = b"" if "driver-ready" in missing else read_bytes(node.path(_VALIDATIONS / "driver-ready"))
    except OSError as error:
        yield unknown_result(name, "whether the operator has validated the driver is unknown", error)
        return
    logs = (
        f"kubectl -n {operator.namespace or 'gpu-operator'} logs daemonset/nvidia-operator-validator --all-containers"
    )
    if missing:
        message = (
            f"{_VALIDATIONS} has no {', no '.join(missing)}: new pods of ours wait, and containers get no new driver. Running "
            "ones go on."
        )
        yield CheckResult(name, CheckLevel.WARNING, message, f"Wait for the operator's validator: {logs}")
        return
    # Imported here: only nodes of the operator have that file.
    from plugin.nvidia.driver_ready import parse_driver_ready
    from scrubber.domain.errors import InvalidConfiguration

    try:
        parse_driver_ready(content, str(_VALIDATIONS / "driver-ready"))
    except InvalidConfiguration as error:
        message = f"{error} The plugin refuses the file."
        yield CheckResult(name, CheckLevel.ERROR, message, f"Delete the validator's pod, which writes it again: {logs}")
        return
    message = f"{', '.join(files)} exist: driver and toolkit are validated."
    yield CheckResult(name, CheckLevel.OK, message)


def driver_mounts(node: CheckContext) -> Iterator[CheckResult]:
    """The service's container has the libraries of the driver that is loaded, not those of the one before."""
    name = "driver-mounts"
    loaded = driver_version(node)
    try:
        service = find_service(node)
        if service is None or not service.pod_uid or loaded is None:
            return
        mounts = read_text(node.path(f"/proc/{service.pid}/mountinfo"), 8 << 20)
    except FileNotFoundError:  # it has ended
        return
    except OSError as error:
        yield unknown_result(name, "whether the service's container has the present driver is unknown", error)
        return
    versions = set(_LIBRARY.findall(mounts))
    if stale := sorted(versions - {loaded}):
        message = (
            f"The service's container has the libraries of the driver {', '.join(stale)}, but {loaded} is loaded: the driver "
            "was replaced while the container ran, and its devices stay unhealthy."
        )
        remedy = (
            "kubectl -n scrubber-system rollout restart daemonset/scrubber. A label component makes the operator end the pod "
            f"first: {_PAGE}#install."
        )
        yield CheckResult(name, CheckLevel.ERROR, message, remedy)
    elif versions:
        yield CheckResult(
            name, CheckLevel.OK, f"The service's container has the libraries of the loaded driver, {loaded}."
        )


def mig_manager(node: CheckContext) -> Iterator[CheckResult]:
    """MIG manager stops our units before it changes MIG modes, where the driver is on the host and we are units."""
    name = "mig-manager"
    try:
        operator = find_operator(node)
        if operator is None or not operator.has_mig_manager:
            return
        service, plugin = find_service(node), find_plugin(node)
        if service is None or not service.unit:
            return
        if plugin is not None and plugin.setting("--yield-labels", "SCRUBBER_YIELD_LABELS"):
            yield CheckResult(name, CheckLevel.OK, "The plugin yields the node before MIG manager changes MIG modes.")
            return
        lists = list(_client_lists(node, operator))
    except OSError as error:
        yield unknown_result(name, "whether MIG manager stops our units is unknown", error)
        return
    if any(all(unit in text for unit in _UNITS) for text in lists):
        yield CheckResult(name, CheckLevel.OK, f"MIG manager's list of clients has {' and '.join(_UNITS)}.")
        return
    known = "does not list them" if lists else "has a list of clients that is not visible here"
    message = (
        f"The service is a unit, and MIG manager {known}: a change of a MIG mode fails, because the service has the driver "
        "open, and is not repeated."
    )
    remedy = (
        f"List {' and '.join(_UNITS)} in the ConfigMap of migManager.gpuClientsConfig, or let the plugin follow a label: "
        f"{_PAGE}#install."
    )
    yield CheckResult(name, CheckLevel.WARNING, message, remedy)


def _client_lists(node: CheckContext, operator: GpuOperator) -> Iterator[str]:
    """Yield the lists of clients that MIG manager's pods mount. Raises OSError."""
    for uid, (namespace, pod) in pod_names(node).items():
        if namespace != operator.namespace or not pod.startswith("nvidia-mig-manager-"):
            continue
        volumes = node.path(node.kubelet_dir) / "pods" / uid / "volumes" / "kubernetes.io~configmap"
        for volume in list_matching(volumes, "*"):
            if path_exists(volume / "clients.yaml"):
                yield read_text(volume / "clients.yaml")


def config_manager(node: CheckContext) -> Iterator[CheckResult]:
    """NVIDIA's config-manager beside our plugin finds the process that it has to signal."""
    name = "config-manager"
    plugin = visible_plugin(node)
    if plugin is None or not plugin.pod_uid:
        return
    try:
        target = _config_managers_target(node, plugin.pod_uid)
    except OSError as error:
        yield unknown_result(name, "whether the plugin's configuration is reloaded is unknown", error)
        return
    if target is None:
        return
    own = plugin.arguments[0] if plugin.arguments else ""
    if target == own:
        yield CheckResult(name, CheckLevel.OK, f"config-manager signals the plugin: its first argument is {own}.")
        return
    message = (
        f"config-manager signals the process whose first argument is {target or '(PROCESS_TO_SIGNAL is not set)'}, but the "
        f"plugin's is {own}: a changed configuration file is not loaded."
    )
    yield CheckResult(
        name, CheckLevel.WARNING, message, f"Set PROCESS_TO_SIGNAL={own}: docs/replacing-nvidias-plugin.md."
    )


def _config_managers_target(node: CheckContext, pod_uid: str) -> str | None:
    """Return what the config-manager of a pod signals; None if the pod has none. Raises OSError."""
    uid = (pod_uid.encode(), pod_uid.replace("-", "_").encode())
    for process in list_matching(node.path("/proc"), "[0-9]*"):
        try:
            if read_bytes(process / "comm").removesuffix(b"\n") != b"config-manager":
                continue
            if not any(each in read_bytes(process / "cgroup") for each in uid):
                continue
            variables = read_text(process / "environ").split("\0")
        except (FileNotFoundError, ProcessLookupError):  # it has ended
            continue
        return next((each.partition("=")[2] for each in variables if each.startswith("PROCESS_TO_SIGNAL=")), "")
    return None
