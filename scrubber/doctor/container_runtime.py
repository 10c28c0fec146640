"""Checks whether a pod can get a GPU without the kubelet and this service: by an environment variable or a CDI name."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from scrubber.adapters.kernel_text import value_in
from scrubber.doctor.deployment import CDI_STRATEGIES, list_strategies, visible_plugin
from scrubber.doctor.files import list_matching, path_exists, read_bytes, read_text
from scrubber.doctor.kubelet import pid_namespace_problem, sees_node_root
from scrubber.doctor.model import AS_ROOT, CheckContext, CheckLevel, CheckResult, unknown_result

__all__ = [
    "NOT_THE_NODE",
    "ON_THE_NODE",
    "OPERATORS_TOOLKIT_CONFIG",
    "TOOLKIT_BIN_DIRS",
    "TOOLKIT_PROGRAMS",
    "NriPlugin",
    "cdi_annotations",
    "find_nri_plugin",
    "nri_annotations",
    "read_toml",
    "toolkit",
]

ENVVAR = "accept-nvidia-visible-devices-envvar-when-unprivileged"
VOLUME_MOUNTS = "accept-nvidia-visible-devices-as-volume-mounts"
OPERATORS_TOOLKIT_CONFIG = Path("/usr/local/nvidia/toolkit/.config/nvidia-container-runtime/config.toml")
"""As the GPU Operator installs it; it writes the file again whenever its toolkit pod starts."""
TOOLKIT_CONFIGS = (Path("/etc/nvidia-container-runtime/config.toml"), OPERATORS_TOOLKIT_CONFIG)
TOOLKIT_PROGRAMS = ("nvidia-container-runtime", "nvidia-container-runtime-hook", "nvidia-ctk")
TOOLKIT_BIN_DIRS = (Path("/usr/bin"), Path("/usr/local/bin"), Path("/usr/local/nvidia/toolkit"))

_INSTALLERS = ("nvidia-ctk-inst", "nvidia-toolkit")
"""Names of the process that installs the toolkit as a container, as the kernel truncates them."""
_TRUE = (b"1", b"t", b"T", b"true", b"TRUE", b"True")  # as Go parses them
_NRI_SETTINGS = (
    *(b"ENABLE_NRI_PLUGIN=" + each for each in _TRUE),
    b"--enable-nri-plugin",
    *(b"--enable-nri-plugin=" + each for each in _TRUE),
)
_CAP_SYS_ADMIN = 21
_CDI = "cdi.k8s.io"
_RUNTIMES = (
    "/etc/containerd/config.toml",
    "/var/lib/rancher/k3s/agent/etc/containerd/config.toml",
    "/var/lib/rancher/rke2/agent/etc/containerd/config.toml",
    "/etc/crio/crio.conf",
)
_CRIO_DROP_INS = "/etc/crio/crio.conf.d"
_ANNOTATION_OPTIONS = ("pod_annotations", "allowed_annotations")
"""Options that pass on pods' own annotations: containerd's and CRI-O's.

``container_annotations`` is not among them, because the kubelet and its plugins write the annotations that it names.
"""


def toolkit(node: CheckContext) -> Iterator[CheckResult]:
    """No unprivileged pod can select GPUs by an environment variable, and the plugin still can.

    The toolkit's own default is to let every pod do so: a missing line or file means that any pod can.
    """
    given = [node.path(path) for path in node.toolkit_configs]
    try:
        found = given or [path for path in map(node.path, TOOLKIT_CONFIGS) if path_exists(path)]
        places = [place / program for place in map(node.path, TOOLKIT_BIN_DIRS) for program in TOOLKIT_PROGRAMS]
        programs = [path for path in places if path_exists(path)]
    except OSError as error:
        yield unknown_result("toolkit-envvar", "whether any pod can select GPUs is unknown", error)
        return
    uses_cdi = _plugin_uses_cdi(node)
    for path in found:
        yield from _toolkit_config(path, uses_cdi=uses_cdi, operators=path == node.path(OPERATORS_TOOLKIT_CONFIG))
    if not found and programs:
        message = f"{programs[0]} is installed and has no configuration, so {_ANY_POD}."
        yield CheckResult("toolkit-envvar", CheckLevel.ERROR, message, _refuse_envvar(node.path(TOOLKIT_CONFIGS[0])))
    elif not found and not sees_node_root(node):
        message = (
            f"No container toolkit of NVIDIA is visible {NOT_THE_NODE}, so whether any pod can select GPUs is unknown."
        )
        yield CheckResult("toolkit-envvar", CheckLevel.WARNING, message, ON_THE_NODE)
    elif not found:
        yield CheckResult("toolkit-envvar", CheckLevel.OK, "NVIDIA's container toolkit is not installed.")


NOT_THE_NODE = "here, but this may be a container's root directory instead of the node's"
ON_THE_NODE = "Run scrubber doctor as root on the node, or with --node-root /proc/1/root in a pod with hostPID."
_ANY_POD = "any pod gets every GPU by setting NVIDIA_VISIBLE_DEVICES=all, bypassing the kubelet and this service"


def _plugin_uses_cdi(node: CheckContext) -> bool:
    """Return whether our plugin passes devices by CDI only; also False where that is not known."""
    plugin = visible_plugin(node)
    strategies = frozenset() if plugin is None else list_strategies(plugin)
    return bool(strategies) and strategies <= CDI_STRATEGIES


def _refuse_envvar(path: Path, *, operators: bool = False) -> str:
    if operators:
        return (
            "Set ACCEPT_NVIDIA_VISIBLE_DEVICES_ENVVAR_WHEN_UNPRIVILEGED=false in toolkit.env of the ClusterPolicy: the GPU "
            f"Operator overwrites {path}."
        )
    return (
        f"Set {ENVVAR} = false in {path}, and let the plugin select devices by volume-mounts ({VOLUME_MOUNTS} "
        "= true) or by CDI (--device-list-strategy)."
    )


def _toolkit_config(path: Path, *, uses_cdi: bool, operators: bool) -> Iterator[CheckResult]:
    try:
        options = read_toml(path)
    except PermissionError as error:
        yield unknown_result("toolkit-envvar", "whether any pod can select GPUs is unknown", error)
        return
    except (OSError, ValueError, RecursionError) as error:
        message = f"{path} cannot be read: {_error_text(error)}. Whether any pod can select GPUs is unknown."
        yield CheckResult(
            "toolkit-envvar", CheckLevel.ERROR, message, f"Fix {path}, or pass the right file with --toolkit-config."
        )
        return
    envvar, mounts = options.get(ENVVAR, True), options.get(VOLUME_MOUNTS, False)
    if envvar is not False:
        value = str(envvar).lower() if isinstance(envvar, bool) else "something other than false"
        says = f"sets {ENVVAR} = {value}" if ENVVAR in options else f"does not set {ENVVAR} = false"
        message = f"{path} {says}, so {_ANY_POD}."
        yield CheckResult("toolkit-envvar", CheckLevel.ERROR, message, _refuse_envvar(path, operators=operators))
    else:
        yield CheckResult(
            "toolkit-envvar", CheckLevel.OK, f"{path}: unprivileged pods cannot select GPUs by environment variable."
        )
        if mounts is not True and uses_cdi:
            message = f"{path}: devices reach unprivileged containers by CDI only, which the plugin uses."
            yield CheckResult("toolkit-volume-mounts", CheckLevel.OK, message)
            return
        if mounts is not True:
            message = f"{path}: devices reach unprivileged containers by CDI only."
            remedy = (
                f"None, if the plugin uses a cdi strategy; otherwise set {VOLUME_MOUNTS} = true and run the "
                "plugin with --device-list-strategy volume-mounts."
            )
            yield CheckResult("toolkit-volume-mounts", CheckLevel.WARNING, message, remedy)
            return
    if mounts is True:
        message = f"{path}: the plugin can select devices by volume-mounts."
        yield CheckResult("toolkit-volume-mounts", CheckLevel.OK, message)


def cdi_annotations(node: CheckContext) -> Iterator[CheckResult]:
    """No runtime passes on a pod's own annotations that name CDI devices.

    The kubelet copies plugins' annotations into containers, never pods'. containerd and CRI-O pass a pod's
    annotations on only where they are configured to; NVIDIA's runtime, in CDI mode, treats what it receives as a request.
    All of this is from their documentation, and was not tried.
    """
    found = False
    try:
        configs = [path for path in map(node.path, _RUNTIMES) if path_exists(path)]
        # CRI-O reads every file below the directory, whatever its name.
        configs += [each for each in list_matching(node.path(_CRIO_DROP_INS), "*") if not each.is_dir()]
        configs = [each for config in configs for each in (config, *_imported_configs(node, config))]
    except OSError as error:
        yield unknown_result("cdi-annotations", "whether a pod can select a GPU by an annotation is unknown", error)
        return
    for path in configs:
        try:
            patterns = list(_patterns_in(read_toml(path)))
        except (OSError, ValueError, RecursionError) as error:
            found = True
            message = f"{path} cannot be read: {_error_text(error)}. Whether a pod can select a GPU is unknown."
            remedy = AS_ROOT if isinstance(error, PermissionError) else f"Fix {path}."
            yield CheckResult("cdi-annotations", CheckLevel.WARNING, message, remedy)
            continue
        for option, pattern in patterns:
            found = True
            message = (
                f'{path} passes on pods\' own annotations ({option}: "{pattern}"), including {_CDI}/: a '
                "runtime that takes CDI names from annotations, such as NVIDIA's in its cdi mode, gives any "
                "pod the GPU that it names."
            )
            remedy = f"Remove that pattern from {option} and restart the runtime; plugins do not need it."
            yield CheckResult("cdi-annotations", CheckLevel.WARNING, message, remedy)
    if not configs and not sees_node_root(node):
        message = (
            f"No container runtime's configuration is visible {NOT_THE_NODE}, so whether a pod can select a GPU by an "
            "annotation is unknown."
        )
        yield CheckResult("cdi-annotations", CheckLevel.WARNING, message, ON_THE_NODE)
    elif configs and not found:
        message = "The container runtime is not configured to pass on pods' own CDI annotations."
        yield CheckResult("cdi-annotations", CheckLevel.OK, message)


def nri_annotations(node: CheckContext) -> Iterator[CheckResult]:
    """No NRI plugin of NVIDIA's toolkit injects the CDI devices that a pod's own annotation names.

    The plugin is part of the process that installs the toolkit as a container. It injects every kind of device but the
    management kind, for pods of any namespace (read in version 1.20, not tried). Whether an admission policy refuses such
    pods is not visible on the node.
    """
    try:
        found = find_nri_plugin(node)
    except OSError as error:
        yield unknown_result("nri-annotations", "whether a pod can select a GPU by an annotation is unknown", error)
        return
    if found is not None:
        message = (
            f"NVIDIA's container toolkit (PID {found.pid}) runs its NRI plugin, which gives any pod the GPU that the "
            "pod's annotation nvidia.cdi.k8s.io/container.NAME names, bypassing the kubelet and this service."
        )
        remedy = (
            "Apply deploy/kubernetes/admission, which refuses such pods; this check cannot see whether it is applied. Or "
            "set cdi.nriPluginEnabled=false in the GPU Operator."
        )
        yield CheckResult("nri-annotations", CheckLevel.WARNING, message, remedy)
    elif (problem := pid_namespace_problem(node)) is not None:
        message = (
            "No process with the NRI plugin of NVIDIA's container toolkit is visible here, but others may run on the node, "
            f"so whether a pod can select a GPU by an annotation is unknown. {problem.message}"
        )
        yield CheckResult("nri-annotations", CheckLevel.WARNING, message, ON_THE_NODE)
    else:
        message = "No process on this node runs the NRI plugin of NVIDIA's container toolkit."
        yield CheckResult("nri-annotations", CheckLevel.OK, message)


@dataclass(frozen=True, slots=True)
class NriPlugin:
    """The process that runs the NRI plugin of NVIDIA's container toolkit.

    Attributes:
        namespaces: namespaces other than its own whose pods it gives management devices.
    """

    pid: int
    namespaces: frozenset[str]


def find_nri_plugin(node: CheckContext) -> NriPlugin | None:
    """Return the process with the NRI plugin; None if none is visible.

    Raises:
        OSError: the processes, or the settings of the one that installs the toolkit, cannot be read.
    """
    processes = list_matching(node.path("/proc"), "[0-9]*")
    if not processes:
        raise FileNotFoundError(errno.ENOENT, "No process is visible", str(node.path("/proc")))
    for path in processes:
        if not _is_installer(path) or _is_unprivileged(path, node.path("/proc/1")):
            continue
        try:
            words = (read_bytes(path / "environ") + b"\0" + read_bytes(path / "cmdline")).split(b"\0")
        except (FileNotFoundError, ProcessLookupError):
            continue
        if any(each in _NRI_SETTINGS for each in words):
            return NriPlugin(int(path.name), frozenset(_nri_namespaces(words)))
    return None


def _nri_namespaces(words: list[bytes]) -> Iterator[str]:
    flag = b"--nri-management-cdi-device-namespaces"
    for number, word in enumerate(words):
        name, _, value = word.partition(b"=")
        if word == flag and number + 1 < len(words):
            value = words[number + 1]
        if name in (flag, b"NRI_MANAGEMENT_CDI_DEVICE_NAMESPACES"):
            yield from (os.fsdecode(each.strip()) for each in value.split(b",") if each.strip())


def _is_installer(process: Path) -> bool:
    try:
        return value_in(read_bytes(process / "comm")) in _INSTALLERS
    except (FileNotFoundError, ProcessLookupError):  # it has ended
        return False


def _is_unprivileged(process: Path, first: Path) -> bool:
    """Whether ``process`` certainly lacks what installs a toolkit on the node: any pod can give a process that name.

    The toolkit's container is privileged: it has ``CAP_SYS_ADMIN`` in the user namespace of the node's ``first`` process.
    """
    try:
        elsewhere = os.readlink(process / "ns/user") != os.readlink(first / "ns/user")
        status = read_bytes(process / "status")
    except OSError:
        return False
    has = re.search(rb"^CapEff:[ \t]*([0-9a-f]{1,16})$", status, re.MULTILINE)
    return elsewhere or (has is not None and not int(has[1], 16) >> _CAP_SYS_ADMIN & 1)


def _imported_configs(node: CheckContext, config: Path) -> list[Path]:
    """Return the files that containerd imports; an unreadable ``config`` is reported by the caller that reads it next.

    Raises:
        OSError: a directory with such files cannot be listed.
    """
    try:
        patterns = read_toml(config).get("imports", [])
    except (OSError, ValueError, RecursionError):
        return []
    found: list[Path] = []
    for pattern in patterns if isinstance(patterns, list) else []:
        if not isinstance(pattern, str):
            continue
        directory, _, name = pattern.replace("\0", "").rpartition("/")
        place = node.path(directory or "/") if pattern.startswith("/") else config.parent / directory
        found += list_matching(place, name)
    return found


def read_toml(path: Path) -> dict[str, Any]:
    """Parse ``path``. Raises OSError, ValueError and RecursionError if it cannot be read or is not TOML."""
    text = read_text(path)
    import tomllib  # most nodes have no such file

    return tomllib.loads(text)


def _error_text(error: Exception) -> str:
    return str(error.strerror) if isinstance(error, OSError) else f"it is not TOML ({error})"


def _patterns_in(options: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield every pattern for pods' annotations, at any depth, that a CDI annotation may match."""
    for key, value in options.items():
        if isinstance(value, dict):
            yield from _patterns_in(value)
        elif key in _ANNOTATION_OPTIONS and isinstance(value, list):
            texts = (each for each in value if isinstance(each, str))
            yield from ((key, each) for each in texts if fnmatchcase(_CDI, each.partition("/")[0]))
