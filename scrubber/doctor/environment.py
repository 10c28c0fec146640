"""What else manages GPUs on this node, as far as files, pods and processes show it without credentials.

A missing file proves nothing where the node's root directory is not visible: then the answer is None, for "unknown".
The names, paths and versions were read in the source of the GPU Operator 26.7 and its components; not tried.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from scrubber.doctor.container_runtime import (
    OPERATORS_TOOLKIT_CONFIG,
    TOOLKIT_BIN_DIRS,
    TOOLKIT_PROGRAMS,
    find_nri_plugin,
    read_toml,
)
from scrubber.doctor.deployment import pod_names
from scrubber.doctor.files import list_matching, path_exists, read_bytes
from scrubber.doctor.kubelet import sees_node_root
from scrubber.doctor.model import CheckContext
from scrubber.doctor.platforms import PLATFORMS, has_agents, has_pod
from scrubber.domain.errors import InvalidConfiguration

__all__ = [
    "CLIENT_LABEL",
    "FIRST_WITH_CLIENT_LABEL",
    "OPERANDS",
    "OPERATOR_NAMESPACES",
    "PLUGIN_LABEL",
    "GpuOperator",
    "NodeEnvironment",
    "driver_roots",
    "find_environment",
    "find_operator",
    "has_nvsentinel",
    "operator_version",
]

OPERATOR_NAMESPACES = ("gpu-operator", "nvidia-gpu-operator")
"""The usual namespace, and OpenShift's. In another one a pod's name proves nothing."""
CLIENT_LABEL = "nvidia.com/gpu.deploy.client"
PLUGIN_LABEL = "nvidia.com/gpu.deploy.device-plugin"
FIRST_WITH_CLIENT_LABEL = (26, 7)

_VALIDATIONS = Path("/run/nvidia/validations")
_DRIVER = Path("/run/nvidia/driver")
_TOOLKIT = Path("/usr/local/nvidia/toolkit")
_RUNTIME_DROP_IN = Path("/etc/containerd/conf.d/99-nvidia.toml")
OPERANDS = (
    "nvidia-operator-validator",
    "nvidia-driver-daemonset",
    "nvidia-gpu-driver",
    "nvidia-container-toolkit-daemonset",
    "nvidia-device-plugin-daemonset",
    "nvidia-dra-driver-kubelet-plugin",
)
"""Pods that only the operator has."""
_DRA_OPERANDS = ("nvidia-dra-driver-kubelet-plugin", "nvidia-dcgm-dra", "nvidia-dcgm-exporter-dra")
_BUNDLES = (
    ("/run/containerd/io.containerd.runtime.v2.task/k8s.io", "config.json"),
    ("/run/k3s/containerd/io.containerd.runtime.v2.task/k8s.io", "config.json"),
    ("/run/containers/storage/overlay-containers", "userdata/config.json"),
)
"""Where containerd and CRI-O keep the OCI configuration of each container that runs."""
_IMAGES = ("io.kubernetes.cri.image-name", "io.kubernetes.cri-o.ImageName")
_NAMESPACES = ("io.kubernetes.cri.sandbox-namespace", "io.kubernetes.pod.namespace")
_OPERATOR_IMAGE = re.compile(r"/gpu-operator(?:-validator)?:v?(\d{1,3})\.(\d{1,3})\b")
_NVSENTINEL_SOCKET = Path("/var/run/nvsentinel/nvsentinel.sock")
_NVSENTINEL_NAMESPACE = "nvsentinel"


@dataclass(frozen=True, slots=True)
class GpuOperator:
    """NVIDIA's GPU Operator on this node.

    Attributes:
        namespace: namespace of its pods; empty if it is not known.
        driver_root: the driver's root directory on the host: ``/`` for a driver of the host, another one for a driver in
            a container; None if it is not known.
        uses_dra: whether it is in DRA mode (a GPUCluster in place of a ClusterPolicy).
        has_mig_manager: whether its MIG manager runs here.
    """

    namespace: str
    driver_root: PurePosixPath | None = None
    uses_dra: bool = False
    has_mig_manager: bool = False

    @property
    def driver_in_container(self) -> bool | None:
        return None if self.driver_root is None else self.driver_root != PurePosixPath("/")


@dataclass(frozen=True, slots=True)
class NodeEnvironment:
    """What manages the GPUs of this node beside us.

    Attributes:
        operator: NVIDIA's GPU Operator; None if there is none.
        has_cdi: whether the operator's runtime works with CDI; None if that is not known.
        has_nri: whether the operator's NRI plugin runs here; None if that is not known.
        leftovers: files of a GPU Operator without a pod of it.
        toolkit: a program of NVIDIA's container toolkit on the host; None if there is none.
        provider: managed Kubernetes whose GPU agents run here; empty if none was recognized.
        has_nvsentinel: whether NVSentinel runs here.
    """

    operator: GpuOperator | None
    has_cdi: bool | None = None
    has_nri: bool | None = None
    leftovers: tuple[Path, ...] = ()
    toolkit: Path | None = None
    provider: str = ""
    has_nvsentinel: bool = False


def find_environment(node: CheckContext) -> NodeEnvironment | None:
    """Return what else manages GPUs here; None if nothing was found and the node's root directory is not visible.

    Raises:
        OSError: something that exists cannot be read.
    """
    pods = sorted(pod_names(node).values())
    operator = find_operator(node)
    toolkit = next(
        (
            path
            for place in TOOLKIT_BIN_DIRS
            for program in TOOLKIT_PROGRAMS
            if path_exists(path := node.path(place) / program)
        ),
        None,
    )
    leftovers = tuple(path for path in map(node.path, (_TOOLKIT, _RUNTIME_DROP_IN)) if path_exists(path))
    provider = next((each.name for each in PLATFORMS if has_agents(node, each, pods)), "")
    if operator is None and not sees_node_root(node):
        return None
    has_nri = _has_nri(node) if operator else None
    return NodeEnvironment(
        operator,
        True if has_nri else _has_cdi(node),
        has_nri,
        () if operator else leftovers,
        toolkit,
        provider,
        has_nvsentinel(node),
    )


def has_nvsentinel(node: CheckContext) -> bool:
    """Return whether NVSentinel runs here, as far as is visible. Raises OSError."""
    here = any(namespace == _NVSENTINEL_NAMESPACE for namespace, _ in pod_names(node).values())
    return here or path_exists(node.path(_NVSENTINEL_SOCKET))


def find_operator(node: CheckContext) -> GpuOperator | None:
    """Return the GPU Operator on this node; None if there is none, or none is visible.

    Raises:
        OSError: something that exists cannot be read.
    """
    pods = sorted(pod_names(node).values())
    namespace = next((each for each in OPERATOR_NAMESPACES if has_pod(pods, each, OPERANDS)), "")
    validated = bool(list_matching(node.path(_VALIDATIONS), "*-ready"))
    if not namespace and not validated:
        return None
    # The validator's files show that there is an operator: then the namespace of its operands is its own.
    namespace = namespace or next((each for each, _ in pods if has_pod(pods, each, OPERANDS[:1])), "")
    return GpuOperator(
        namespace,
        _driver_root(node, pods, namespace),
        has_pod(pods, namespace, _DRA_OPERANDS),
        has_pod(pods, namespace, ("nvidia-mig-manager",)),
    )


def driver_roots(node: CheckContext) -> tuple[Path, ...]:
    """Return where the driver's files may be, as seen from this process: below the node's root, or a container's.

    Raises:
        OSError: something that exists cannot be read.
    """
    root = _driver_root(node, (), "")
    return (node.root,) if root is None or root == PurePosixPath("/") else (node.root, node.path(str(root)))


def operator_version(node: CheckContext, operator: GpuOperator) -> tuple[int, int] | None:
    """Return year and month of the operator's version, from the image of its validator; None if it is not known.

    DRA mode exists only from 26.7 on. An image that is named by its digest shows no version.
    """
    if operator.uses_dra:
        return FIRST_WITH_CLIENT_LABEL
    if not operator.namespace:
        return None
    for directory, name in _BUNDLES:
        for bundle in _subdirectories(node.path(directory)):
            version = _version_in(bundle / name, operator.namespace)
            if version is not None:
                return version
    return None


def _subdirectories(directory: Path) -> list[Path]:
    try:
        return list_matching(directory, "*")
    except OSError:
        return []


def _version_in(file: Path, namespace: str) -> tuple[int, int] | None:
    try:
        content = read_bytes(file)
    except OSError:
        return None
    if b"/gpu-operator" not in content:
        return None
    import json

    try:
        whole: Any = json.loads(content)
        annotations = whole["annotations"]
        images = [str(annotations[key]) for key in _IMAGES if key in annotations]
        namespaces = [annotations[key] for key in _NAMESPACES if key in annotations]
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    found = next((match for each in images if (match := _OPERATOR_IMAGE.search(each))), None)
    return (int(found[1]), int(found[2])) if found is not None and namespace in namespaces else None


def _driver_root(node: CheckContext, pods: Iterable[tuple[str, str]], namespace: str) -> PurePosixPath | None:
    for root in _roots_by_validator(node):
        return root
    in_container = has_pod(pods, namespace, ("nvidia-driver-daemonset", "nvidia-gpu-driver"))
    if in_container or path_exists(node.path(_DRIVER / "usr")):
        return PurePosixPath(_DRIVER)
    return None


def _roots_by_validator(node: CheckContext) -> Iterator[PurePosixPath]:
    file = node.path(_VALIDATIONS / "driver-ready")
    if not path_exists(file):
        return
    # Imported here: only nodes of the operator have that file.
    from plugin.nvidia.driver_ready import parse_driver_ready

    try:
        yield parse_driver_ready(read_bytes(file), str(file)).driver_root
    except InvalidConfiguration:
        return  # the check operator-validations reports it


def _has_cdi(node: CheckContext) -> bool | None:
    try:
        options = read_toml(node.path(OPERATORS_TOOLKIT_CONFIG)).get("nvidia-container-runtime")
    except (OSError, ValueError, RecursionError):
        return None  # the toolkit check reports it if it exists
    mode = options.get("mode") if isinstance(options, dict) else None
    return {"cdi": True, "legacy": False}.get(mode) if isinstance(mode, str) else None


def _has_nri(node: CheckContext) -> bool | None:
    try:
        if not sees_node_root(node):
            return True if find_nri_plugin(node) is not None else None
        return find_nri_plugin(node) is not None
    except OSError:
        return None
