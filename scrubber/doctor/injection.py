"""Checks whether containers get the devices that the plugin passes to their runtime.

They use the settings of the plugin's own process, and the plugin's own code; without a plugin they yield nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING

from scrubber.doctor.container_runtime import ON_THE_NODE
from scrubber.doctor.deployment import CDI_STRATEGIES, OurProcess, find_plugin, list_strategies, visible_plugin
from scrubber.doctor.files import path_exists, read_bytes
from scrubber.doctor.kubelet import sees_node_root
from scrubber.doctor.model import CheckContext, CheckLevel, CheckResult, unknown_result
from scrubber.domain.errors import InvalidConfiguration

if TYPE_CHECKING:
    from plugin.nvidia.container_runtime import InjectionCheck

__all__ = ["cdi_hook", "check_runtime", "injection", "plugin_config_file"]

_KNOWN = (
    "Use --device-list-strategy cdi-cri or cdi-annotations, as the kustomizations cdi and gpu-operator do, and the chart with "
    "deviceListStrategy=cdi-cri or gpuOperator.enabled=true."
)


def injection(node: CheckContext) -> Iterator[CheckResult]:
    """The container runtime gives containers the devices that the plugin names; otherwise they start without a GPU."""
    name = "injection"
    if node.service.simulated:
        return
    try:
        plugin = find_plugin(node)
    except OSError as error:
        yield unknown_result(name, "whether containers get their GPUs is unknown", error)
        return
    if plugin is None or plugin.setting("--upstream-dir", "SCRUBBER_UPSTREAM_DIR"):
        return  # a vendor's plugin injects the devices
    strategies = list_strategies(plugin)
    if not strategies:
        message = "The plugin's configuration file is not valid, so whether containers get their GPUs is unknown."
        yield CheckResult(name, CheckLevel.WARNING, message, "See the check plugin-config-file.")
        return
    which = ", ".join(sorted(strategies))
    try:
        found = check_runtime(node, strategies)
    except OSError as error:
        yield unknown_result(name, "whether containers get their GPUs is unknown", error)
        return
    if found.error:
        warned_only = plugin.setting("--runtime-check", "SCRUBBER_RUNTIME_CHECK") == "warn"
        level = CheckLevel.WARNING if warned_only else CheckLevel.ERROR
        yield CheckResult(name, level, f"The plugin uses {which}. {found.error}", _KNOWN)
    elif found.unknown:
        remedy = ON_THE_NODE if not sees_node_root(node) else "Check the default runtime, or enable_cdi, on the node."
        yield CheckResult(name, CheckLevel.WARNING, found.unknown, remedy)
    else:
        message = f"The container runtime gives containers their GPUs: the plugin uses {which}."
        yield CheckResult(name, CheckLevel.OK, message)


def check_runtime(node: CheckContext, strategies: Collection[str]) -> InjectionCheck:
    """Return whether the runtime injects devices for one of ``strategies``, as the plugin checks it.

    Raises:
        OSError: a configuration cannot be read, or is not a regular file, for which the plugin's own check would wait.
    """
    # Imported here: otherwise every run of this command would wait for the plugin's modules.
    from plugin.nvidia.container_runtime import CONTAINERD_FILES, CRIO_FILE, check_injection
    from plugin.nvidia.injection import ListStrategy

    for path in (node.root / each for each in (*CONTAINERD_FILES, CRIO_FILE)):
        if path_exists(path):
            read_bytes(path)
    return check_injection([each for each in ListStrategy if each.value in strategies], node.root)


def cdi_hook(node: CheckContext) -> Iterator[CheckResult]:
    """NVIDIA's hook program, which the CDI specification names, exists on the host."""
    name = "cdi-hook"
    plugin = visible_plugin(node)
    if plugin is None or not list_strategies(plugin) & CDI_STRATEGIES or not sees_node_root(node):
        return
    try:
        given = plugin.setting("--nvidia-cdi-hook-path", "NVIDIA_CDI_HOOK_PATH")
        given = given or plugin.setting("--nvidia-ctk-path", "NVIDIA_CTK_PATH")
        if given:
            found = given if path_exists(node.path(given)) else ""
        else:
            # Imported here: only a plugin that writes CDI specifications needs the hook.
            from plugin.nvidia.driver_files import find_cdi_hook

            hook = find_cdi_hook((node.root,))
            found = "" if hook is None else hook.path
    except (OSError, ValueError) as error:
        reason = error if isinstance(error, OSError) else OSError(str(error))
        yield unknown_result(name, "whether the runtime finds NVIDIA's hook is unknown", reason)
        return
    if found:
        yield CheckResult(name, CheckLevel.OK, f"NVIDIA's hook program is {found}.")
        return
    message = (
        f"NVIDIA's hook program {'is not at ' + given if given else 'was not found'}: containers would lack links to the "
        "driver's libraries, or fail to start."
    )
    remedy = (
        "Install the container toolkit, or wait for the operator's toolkit pod; for another place: "
        "NVIDIA_CDI_HOOK_PATH, a path on the host."
    )
    yield CheckResult(name, CheckLevel.WARNING, message, remedy)


def plugin_config_file(node: CheckContext) -> Iterator[CheckResult]:
    """NVIDIA's configuration file, if the plugin has one, is valid, and has no keys without effect."""
    name = "plugin-config-file"
    plugin = visible_plugin(node)
    file = "" if plugin is None else plugin.setting("--config-file", "CONFIG_FILE")
    if plugin is None or not file.startswith("/"):
        return
    # Imported here: otherwise every run of this command would wait for the plugin's modules.
    from plugin.nvidia.settings import read_config_file

    try:
        ignored = read_config_file(plugin.root / file.lstrip("/")).ignored
    except InvalidConfiguration as error:
        yield _invalid_file(name, plugin, str(error))
        return
    if ignored:
        yield CheckResult(name, CheckLevel.WARNING, ignored, "Remove these keys, or set what they mean for our plugin.")
    else:
        yield CheckResult(name, CheckLevel.OK, f"The plugin's configuration file {file} is valid.")


def _invalid_file(name: str, plugin: OurProcess, error: str) -> CheckResult:
    message = f"{error} The plugin (PID {plugin.pid}) would not start with it."
    return CheckResult(name, CheckLevel.ERROR, message, "Fix the file: docs/replacing-nvidias-plugin.md.")
