"""Which platform this node belongs to: managed Kubernetes or an operating system on which the installation differs.

Each platform is a row of :data:`PLATFORMS`, and has a page in docs/platforms with what differs, how to install there, and
where that was read. None of them was tried. The evidence is for people: it grants nothing.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from scrubber.doctor.container_runtime import NOT_THE_NODE, ON_THE_NODE
from scrubber.doctor.deployment import pod_names
from scrubber.doctor.files import path_exists, read_text
from scrubber.doctor.kubelet import sees_node_root
from scrubber.doctor.model import CheckContext, CheckLevel, CheckResult, unknown_result

__all__ = ["PLAIN", "PLATFORMS", "NodePlatform", "find_platform", "has_agents", "has_pod", "platform"]

_OS_RELEASE = ("/usr/lib/os-release", "/etc/os-release")
"""The second one is usually a link to the first one, and can lead out of a node's root as this process sees it."""
_MAX_BYTES = 1 << 16
_SELINUX = "/sys/fs/selinux/enforce"
_OSTREE = "/run/ostree-booted"
_SYSTEM_SLICE = "/sys/fs/cgroup/system.slice"


@dataclass(frozen=True, slots=True)
class NodePlatform:
    """A platform, and how it is recognized: each of the attributes from ``os_release`` on is enough.

    Attributes:
        page: its page in the documentation.
        differs: what differs there, as the end of a message.
        os_release: variables of os-release and their values; an empty value matches any.
        paths: paths that only its nodes have.
        labels: labels that only its nodes have.
        agents: pods of its GPU agents, as namespace and beginning of the name.
        agent_units: systemd units of its GPU agents.
        pods: other pods that only its nodes have.
    """

    name: str
    page: str
    differs: str
    os_release: tuple[tuple[str, str], ...] = ()
    paths: tuple[str, ...] = ()
    labels: tuple[str, ...] = ()
    agents: tuple[tuple[str, str], ...] = ()
    agent_units: tuple[str, ...] = ()
    pods: tuple[tuple[str, str], ...] = ()


PLATFORMS = (
    NodePlatform(
        "Bottlerocket",
        "docs/platforms/bottlerocket.md",
        "a device plugin of NVIDIA is part of the operating system (nvidia-k8s-device-plugin.service), its settings take the "
        "place of configuration files, and there is no runtime class nvidia",
        os_release=(("ID", "bottlerocket"),),
    ),
    NodePlatform(
        "Talos Linux",
        "docs/platforms/talos.md",
        "the driver's libraries are below /usr/local/glibc, without systemd only the pods can be installed, and no policy can "
        "allow nvidia-persistenced, which keeps the GPUs from pods",
        os_release=(("ID", "talos"),),
    ),
    NodePlatform(
        "OpenShift",
        "docs/platforms/openshift.md",
        "NVIDIA's GPU Operator installs the driver, the plugin's container needs an SELinux type, and the pods need "
        "SecurityContextConstraints",
        os_release=(("OPENSHIFT_VERSION", ""),),
        labels=("node.openshift.io/os_id",),
        pods=(("openshift-machine-config-operator", "machine-config-daemon"),),
    ),
    NodePlatform(
        "Google Kubernetes Engine",
        "docs/platforms/gke.md",
        "the driver is below /home/kubernetes/bin/nvidia, there is no container toolkit, GKE's own device plugin runs unless a "
        "label of the node excludes it, and the priority class needs a ResourceQuota",
        paths=("/home/kubernetes/bin",),
        labels=("cloud.google.com/gke-accelerator", "cloud.google.com/gke-nodepool"),
        agents=(("kube-system", "nvidia-gpu-device-plugin"), ("gke-managed-system", "dcgm-exporter")),
    ),
    NodePlatform(
        "Amazon EKS",
        "docs/platforms/eks.md",
        "NVIDIA's runtime is the default one, there is no runtime class nvidia, and eksctl installs NVIDIA's device plugin "
        "by default",
        paths=("/etc/eks",),
        labels=("eks.amazonaws.com/nodegroup",),
        agents=(("kube-system", "dcgm-server"), ("kube-system", "eks-node-monitoring-agent")),
    ),
    NodePlatform(
        "Azure Kubernetes Service",
        "docs/platforms/aks.md",
        "NVIDIA's runtime is the default one and has another name, so there is no runtime class nvidia, and in managed GPU node "
        "pools NVIDIA's device plugin is a unit of the node",
        paths=("/opt/azure/containers",),
        labels=("kubernetes.azure.com/cluster",),
        agent_units=("nvidia-device-plugin.service",),
    ),
    NodePlatform(
        "K3s or RKE2",
        "docs/platforms/plain-driver.md",
        "containerd is configured below /var/lib/rancher, and NVIDIA's runtime is not the default one",
        paths=("/etc/rancher/k3s", "/var/lib/rancher/k3s/agent", "/var/lib/rancher/rke2/agent"),
    ),
)
"""In the order in which they are tried: an operating system before the cloud that it runs in."""

PLAIN = NodePlatform(
    "No managed Kubernetes and no special operating system",
    "docs/platforms/plain-driver.md",
    "nothing differs from docs/deploying.md as far as is visible",
)


def platform(node: CheckContext) -> Iterator[CheckResult]:
    """The platform of this node, what differs there, and the page that describes it."""
    name = "platform"
    if node.service.simulated:
        return
    try:
        found = find_platform(node)
        facts = list(_facts(node))
    except OSError as error:
        yield unknown_result(name, "the platform of this node is unknown", error)
        return
    if found is None:
        message = f"Nothing shows the platform of this node {NOT_THE_NODE}."
        yield CheckResult(name, CheckLevel.WARNING, message, ON_THE_NODE)
        return
    message = " ".join((f"{found.name}: {found.differs}.", *facts, f"See {found.page}."))
    yield CheckResult(name, CheckLevel.OK, message)


def find_platform(node: CheckContext) -> NodePlatform | None:
    """Return the platform of this node, :data:`PLAIN` for none of the list; None if the node is not visible.

    Raises:
        OSError: something that exists cannot be read.
    """
    visible = sees_node_root(node)
    release = _os_release(node) if visible else {}
    labels = {} if node.cluster is None else node.cluster.labels
    pods = sorted(pod_names(node).values())
    for each in PLATFORMS:
        if (
            any(key in release and value in ("", release[key]) for key, value in each.os_release)
            or any(key in labels for key in each.labels)
            or any(has_pod(pods, namespace, (pod,)) for namespace, pod in each.pods)
            or (visible and any(path_exists(node.path(path)) for path in each.paths))
            or has_agents(node, each, pods)
        ):
            return each
    return PLAIN if visible else None


def has_agents(node: CheckContext, of: NodePlatform, pods: Iterable[tuple[str, str]]) -> bool:
    """Return whether GPU agents of the platform run here. Raises OSError."""
    return any(has_pod(pods, namespace, (pod,)) for namespace, pod in of.agents) or any(
        path_exists(node.path(_SYSTEM_SLICE) / unit) for unit in of.agent_units
    )


def has_pod(pods: Iterable[tuple[str, str]], namespace: str, names: Iterable[str]) -> bool:
    """Return whether a pod of ``namespace`` has one of these names, followed by what its controller appends."""
    beginnings = tuple(f"{each}-" for each in names)
    return any(each == namespace and pod.startswith(beginnings) for each, pod in pods)


def _facts(node: CheckContext) -> Iterator[str]:
    if not sees_node_root(node):
        return
    if path_exists(node.path(_SELINUX)):
        enforced = read_text(node.path(_SELINUX), _MAX_BYTES).strip("\n") == "1"
        yield "SELinux is enforced." if enforced else "SELinux is permissive."
    if path_exists(node.path(_OSTREE)):
        yield "The operating system is an ostree image: only /etc and /var can be written."


def _os_release(node: CheckContext) -> Mapping[str, str]:
    """Return the variables of os-release; none where there is no such file. Raises OSError."""
    for place in _OS_RELEASE:
        try:
            text = read_text(node.path(place), _MAX_BYTES)
        except (FileNotFoundError, NotADirectoryError):
            continue
        return dict(_variables(text))
    return {}


def _variables(text: str) -> Iterator[tuple[str, str]]:
    """Yield the assignments of a file in the format of os-release; other lines are passed over."""
    for line in text.split("\n"):
        key, is_assignment, value = line.partition("=")
        try:
            words = shlex.split(value)
        except ValueError:  # a quotation that does not end
            continue
        if is_assignment and len(words) <= 1:
            yield key.strip(" \t"), "".join(words)
