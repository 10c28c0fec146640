"""The configuration that fits this node: which kustomizations, components, settings of the GPU Operator, and policy."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from scrubber.doctor.container_runtime import NOT_THE_NODE, ON_THE_NODE, VOLUME_MOUNTS
from scrubber.doctor.deployment import find_service
from scrubber.doctor.environment import (
    CLIENT_LABEL,
    FIRST_WITH_CLIENT_LABEL,
    OPERATOR_NAMESPACES,
    PLUGIN_LABEL,
    GpuOperator,
    NodeEnvironment,
    find_environment,
    operator_version,
)
from scrubber.doctor.injection import check_runtime
from scrubber.doctor.model import CheckContext, CheckLevel, CheckResult, Recommendation, unknown_result
from scrubber.doctor.platforms import PLAIN, find_platform

__all__ = ["recommendation"]

_NAME = "recommendation"
_KUSTOMIZATIONS = "gpu-scrubber/deploy/kubernetes"
_UNITS = "deploy/systemd"
_CHART_VALUES = {
    "base": (),
    "cdi": (("deviceListStrategy", "cdi-cri"),),
    "gpu-operator": (("gpuOperator.enabled", "true"),),
    "gpu-operator-client-label": (("gpuOperator.deployLabel", "client"),),
    "gpu-operator-plugin-label": (("gpuOperator.deployLabel", "device-plugin"),),
    "gpu-operator-nri": (("cdi.nriPluginEnabled", "true"),),
    "admission": (("admission.enabled", "true"),),
    "nvsentinel": (("cluster.nvsentinel.enabled", "true"),),
    "yield": (("cluster.yield.enabled", "true"), ("cluster.yield.labels", f"{{{PLUGIN_LABEL}}}")),
}
"""The chart's values for each kustomization and component that is recommended, as ``helm --set`` reads them."""
_NAMESPACE = "scrubber-system"
_REFUSE_ENVVAR = ("ACCEPT_NVIDIA_VISIBLE_DEVICES_ENVVAR_WHEN_UNPRIVILEGED", "false")
_DRA = (
    "NVIDIA's GPU Operator is in DRA mode here (a GPUCluster): there is no device plugin to replace, and this version does "
    "not take the place of the operator's DRA driver, so it cannot protect the GPUs of this node."
)


def recommendation(node: CheckContext) -> Iterator[CheckResult]:
    """What manages GPUs on this node, and which of our kustomizations, components and settings fit it."""
    if node.service.simulated:
        yield CheckResult(_NAME, CheckLevel.OK, "The simulated node needs none of the manifests.")
        return
    try:
        found = find_environment(node)
        as_unit = _is_unit(node)
        if found is None:
            message = f"No GPU Operator is visible {NOT_THE_NODE}, so the configuration that fits is unknown."
            yield CheckResult(_NAME, CheckLevel.WARNING, message, ON_THE_NODE)
            return
        if found.operator is not None and found.operator.uses_dra:
            remedy = "Use a node whose operator has a ClusterPolicy (gpuCluster.deployCR=false), with the overlay gpu-operator."
            yield CheckResult(_NAME, CheckLevel.WARNING, _DRA, remedy)
            return
        recommended = (
            _without_operator(node, found, as_unit=as_unit)
            if found.operator is None
            else _beside_operator(node, found, found.operator, as_unit=as_unit)
        )
        where = find_platform(node)
    except OSError as error:
        yield unknown_result(_NAME, "the configuration that fits this node is unknown", error)
        return
    if where is not None and where is not PLAIN:
        note = f"On {where.name} the installation needs more than that: see {where.page}."
        recommended = replace(recommended, notes=(*recommended.notes, note))
    yield CheckResult(_NAME, CheckLevel.OK, _text(recommended), recommendation=recommended)


def _is_unit(node: CheckContext) -> bool:
    """Return whether the service is a systemd unit; also False where that is not visible."""
    try:
        service = find_service(node)
    except OSError:
        return False
    return service is not None and bool(service.unit)


def _beside_operator(
    node: CheckContext, found: NodeEnvironment, operator: GpuOperator, *, as_unit: bool
) -> Recommendation:
    version = operator_version(node, operator)
    old = version is not None and version < FIRST_WITH_CLIENT_LABEL
    cluster_policy = {"devicePlugin.enabled": "false"}
    if found.has_cdi is not True:
        cluster_policy["cdi.enabled"] = "true"
    toolkit = [_REFUSE_ENVVAR]
    policy: list[str] = []
    notes: list[str] = []
    if operator.namespace and operator.namespace not in OPERATOR_NAMESPACES:
        policy.append(f"infrastructure: {{pods: [{{namespace: {operator.namespace}}}]}}")
        notes.append(f"Add {operator.namespace} to the namespaceSelector of both admission policies.")
    environment = _operator_text(operator, version, found)
    if as_unit:
        if operator.has_mig_manager and operator.driver_in_container is False:
            cluster_policy["migManager.gpuClientsConfig.name"] = "a ConfigMap that lists our units"
        followed = PLUGIN_LABEL if old or found.has_nvsentinel else CLIENT_LABEL
        return Recommendation(
            environment,
            components=("admission",),
            plugin_environment=(
                ("DEVICE_LIST_STRATEGY", "cdi-annotations,cdi-cri"),
                ("SCRUBBER_DRIVER_READY_FILE", "/run/nvidia/validations/driver-ready"),
                ("SCRUBBER_YIELD_LABELS", followed),
            ),
            cluster_policy=tuple(cluster_policy.items()),
            toolkit_environment=tuple(toolkit),
            policy=tuple(policy),
            notes=tuple(notes),
        )
    labels = ("gpu-operator-client-label", "gpu-operator-plugin-label")
    components = [] if version is None else [labels[old]]
    if version is None:
        notes.append(f"The operator's version is not visible: also use {labels[0]} from 26.7 on, {labels[1]} before.")
    if found.has_nri:
        components.append("gpu-operator-nri")
        toolkit.append(("NRI_MANAGEMENT_CDI_DEVICE_NAMESPACES", _NAMESPACE))
    elif found.has_nri is None:
        notes.append("Whether the NRI plugin runs is not visible: if it does, also use gpu-operator-nri.")
    components.append("admission")
    variables: list[tuple[str, str]] = []
    if found.has_nvsentinel:
        components.append("nvsentinel")
        if not old:
            components.append("yield")
            variables.append(("SCRUBBER_YIELD_LABELS", PLUGIN_LABEL))
    return Recommendation(
        environment,
        (f"{_KUSTOMIZATIONS}/gpu-operator",),
        tuple(components),
        labels if version is None else (),
        _chart_values("gpu-operator", *components),
        tuple(variables),
        tuple(cluster_policy.items()),
        tuple(toolkit),
        tuple(policy),
        tuple(notes),
    )


def _chart_values(*names: str) -> tuple[tuple[str, str], ...]:
    return tuple(value for name in names for value in _CHART_VALUES[name])


def _operator_text(operator: GpuOperator, version: tuple[int, int] | None, found: NodeEnvironment) -> str:
    facts = [
        "of an unknown version" if version is None else f"version {version[0]}.{version[1]}",
        f"in the namespace {operator.namespace}" if operator.namespace else "in an unknown namespace",
        {True: "driver in a container", False: "driver on the host", None: "place of the driver unknown"}[
            operator.driver_in_container
        ],
        {True: "CDI on", False: "CDI off", None: "CDI unknown"}[found.has_cdi],
    ]
    facts += ["NRI plugin"] if found.has_nri else []
    facts += ["MIG manager"] if operator.has_mig_manager else []
    facts += ["NVSentinel"] if found.has_nvsentinel else []
    return f"NVIDIA's GPU Operator ({', '.join(facts)})"


def _without_operator(node: CheckContext, found: NodeEnvironment, *, as_unit: bool) -> Recommendation:
    notes = [f"{each} is left of a GPU Operator that has no pods here." for each in found.leftovers[:1]]
    if found.provider:
        what = f"{found.provider} with GPU agents of its own"
        notes.append(
            "Remove the provider's device plugin from these nodes. The bundled policies allow its agents (infrastructure.groups)."
        )
    elif found.toolkit is not None:
        what = "No GPU Operator; NVIDIA's container toolkit is on the host"
    elif node.has_driver:
        what = "No GPU Operator and no container toolkit; NVIDIA's driver is loaded"
    else:
        return Recommendation("No GPU Operator, no container toolkit and no driver of NVIDIA", notes=tuple(notes))
    components = ["admission", "nvsentinel"] if found.has_nvsentinel else ["admission"]
    if found.toolkit is None and not as_unit:
        notes.append(
            f"The service's pod needs the container toolkit and the runtime class nvidia; the units ({_UNITS}) do not."
        )
    mounts = check_runtime(node, ["volume-mounts"])
    works = not mounts.error and not mounts.unknown
    if works:
        variables = {"DEVICE_LIST_STRATEGY": "volume-mounts"}
        notes.append(f"The container toolkit needs {VOLUME_MOUNTS} = true and no GPUs by environment variable.")
    else:
        variables = {"DEVICE_LIST_STRATEGY": "cdi-cri"}
        cdi = check_runtime(node, ["cdi-cri"])
        if cdi.error or cdi.unknown:
            notes.append("containerd needs enable_cdi = true.")
    overlay = "base" if works else "cdi"
    return Recommendation(
        what,
        () if as_unit else (f"{_KUSTOMIZATIONS}/{overlay}",),
        tuple(components),
        chart_values=() if as_unit else _chart_values(overlay, *components),
        plugin_environment=tuple(variables.items()) if as_unit else (),
        notes=tuple(notes),
    )


def _text(found: Recommendation) -> str:
    """Return the recommendation as text for people."""
    parts = [f"{found.environment}."]
    if found.resources:
        parts.append(f"kustomization.yaml: resources: [{', '.join(found.resources)}]")
        listed = [f"{_KUSTOMIZATIONS}/{each}" for each in found.components]
        parts[-1] += f"; components: [{', '.join(listed)}]." if listed else "."
    elif found.plugin_environment:
        parts.append(f"Units of {_UNITS}; component for the cluster: {', '.join(found.components)}.")
    for title, values in (
        ("Or values of the Helm chart", found.chart_values),
        ("Plugin", found.plugin_environment),
        ("ClusterPolicy", found.cluster_policy),
        ("ClusterPolicy, toolkit.env", found.toolkit_environment),
    ):
        if values:
            parts.append(f"{title}: {', '.join(f'{key}={value}' for key, value in values)}.")
    if found.policy:
        parts.append(f"In the policy: {'; '.join(found.policy)}.")
    if found.cluster_policy:
        parts.append(
            "Policy default fits; strict requires resets, which the operator's agents block unless they are paused."
        )
    return " ".join((*parts, *found.notes))
