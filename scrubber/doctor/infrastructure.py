"""Checks of the node's infrastructure: what keeps devices dirty, and which agents the policy allows beside tenants."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from scrubber.doctor.deployment import find_service, pod_names
from scrubber.doctor.files import path_exists
from scrubber.doctor.model import CheckContext, CheckLevel, CheckResult, DeviceReport, ReportedHolder, unknown_result
from scrubber.doctor.policy import active_policy_file
from scrubber.domain.errors import InvalidConfiguration
from scrubber.domain.formatting import format_utc
from scrubber.domain.policy import Policy, ResetMode

__all__ = [
    "holders",
    "infrastructure_accounts",
    "infrastructure_agents",
    "infrastructure_namespaces",
    "reset_blockers",
]

_SYSTEM_SLICE = Path("/sys/fs/cgroup/system.slice")
_RESERVED = "kube-"
"""The beginning of the names of namespaces that Kubernetes reserves for itself: pods of any name are expected there."""
_MAX_NAMED = 3


def holders(node: CheckContext) -> Iterator[CheckResult]:
    """No process keeps a free device dirty; names the process, its pod and what would allow it."""
    devices = node.service.devices
    if not node.service.is_available or devices is None:
        return
    found: dict[tuple[str, str, str, int], tuple[ReportedHolder, list[DeviceReport]]] = {}
    for device in devices:
        for holder in device.holders:
            key = (holder.namespace, holder.pod or holder.pod_uid, holder.unit, holder.pid)
            found.setdefault(key, (holder, []))[1].append(device)
    for holder, held in found.values():
        more = f" and {len(held) - _MAX_NAMED} more" if len(held) > _MAX_NAMED else ""
        which = ", ".join(each.index or each.id for each in held[:_MAX_NAMED]) + more
        message = (
            f"{_who(holder)} has held device{'s' if len(held) > 1 else ''} {which} since {format_utc(holder.since)}: "
            "no pod gets what it holds."
        )
        yield CheckResult("holders", CheckLevel.WARNING, message, _holder_remedy(holder, node))
    if not found:
        yield CheckResult("holders", CheckLevel.OK, "No process keeps a free device dirty.")


def _who(holder: ReportedHolder) -> str:
    owner = _owner(holder)
    who = f"PID {holder.pid} ({holder.command or 'unknown'})" if holder.pid else "Something without a process"
    return f"{who} of {owner}" if owner else f"{who}, outside all pods and units,"


def _owner(holder: ReportedHolder) -> str:
    pod = f"{holder.namespace}/{holder.pod}" if holder.pod else f"pod {holder.pod_uid}" if holder.pod_uid else ""
    return pod or holder.unit


def _holder_remedy(holder: ReportedHolder, node: CheckContext) -> str:
    file = _policy_file(node)
    if holder.kind == "validation":
        return (
            "It is infrastructure that runs a program on the device, and the device is scrubbed once the program has "
            f"ended. If it never ends and may use every GPU, give it the class driver: infrastructure in {file}."
        )
    if holder.pod or holder.pod_uid:
        namespace = holder.namespace or "its-namespace"
        allow, trusted = (
            f"pods: [{{namespace: {namespace}}}]",
            f", where only administrators may create pods in {namespace},",
        )
    elif holder.unit:
        allow, trusted = f"systemdUnits: [{holder.unit}]", ""
    else:
        return "End it, or run it as a systemd unit and list that under infrastructure.systemdUnits in the policy."
    return (
        f"End it. If it is an agent of the node{trusted} allow it: infrastructure: {{{allow}}} in {file}. "
        "See docs/policies.md#infrastructure."
    )


def reset_blockers(node: CheckContext) -> Iterator[CheckResult]:
    """No agent of the node holds a device permanently and so blocks its reset."""
    devices, name = node.service.devices, "reset-blockers"
    if not node.service.is_available or devices is None:
        return
    held = [each for each in devices if each.agents]
    if not held:
        yield CheckResult(
            name, CheckLevel.OK, "No agent of the node is known to hold a device, and so to block its reset."
        )
        return
    who = _listed({_owner(each) or each.command or f"PID {each.pid}" for device in held for each in device.agents})
    policy, first = _policy(node), held[0].index or held[0].id
    message = f"Agents of the node hold {len(held)} of {len(devices)} devices, which blocks resets of them: {who}."
    remedy = f"scrubber reset-plan {first} names them, and shows how a reset is possible: docs/gpu-operator.md."
    if policy is None:
        message += " Whether the policy requires resets is unknown."
        yield CheckResult(name, CheckLevel.WARNING, message, remedy)
    elif any(each.reset is ResetMode.REQUIRED for each in (policy, *(each.policy for each in policy.overrides))):
        message += " The policy requires a reset: without one, a device that was scrubbed stays out of service."
        yield CheckResult(name, CheckLevel.WARNING, message, remedy)
    else:
        message += f" Scrubs go on without a reset. {remedy}"
        yield CheckResult(name, CheckLevel.OK, message)


def infrastructure_accounts(node: CheckContext) -> Iterator[CheckResult]:
    """The service can see the accounts by which the policy narrows the pods that it allows."""
    name = "infrastructure-accounts"
    problem: OSError | None = None
    sees_tokens = False
    try:
        service = find_service(node)
        if service is None or not service.pod_uid:
            return
        sees_tokens = path_exists(service.root / str(node.kubelet_dir).lstrip("/") / "pods")
    except OSError as error:
        problem = error
    policy = _policy(node)
    if policy is None or not any(each.service_account for each in policy.infrastructure.pods):
        return
    if problem is not None:
        yield unknown_result(name, "whether the service sees the accounts of pods is unknown", problem)
        return
    if sees_tokens:
        yield CheckResult(name, CheckLevel.OK, "The service can compare the accounts that the policy lists.")
        return
    message = (
        f"The policy lists service accounts, but {node.kubelet_dir}/pods is not mounted in the service's pod: every pod of "
        "these namespaces counts, and none that is listed with class: driver and an account may have a context."
    )
    remedy = f"Mount {node.kubelet_dir}/pods read-only with mountPropagation: HostToContainer: docs/deploying.md."
    yield CheckResult(name, CheckLevel.WARNING, message, remedy)


def infrastructure_agents(node: CheckContext) -> Iterator[CheckResult]:
    """The policy allows the agents that run on this node, as far as their names show; names prove nothing."""
    name = "infrastructure-agents"
    policy = _policy(node)
    if policy is None:
        return  # the policy check reports it
    allowed = policy.infrastructure
    from scrubber.config.infrastructure_file import load_infrastructure_table

    groups = load_infrastructure_table().values()
    namespaces = {each.namespace for each in allowed.all_pods}
    units = {each.name for each in allowed.all_units}
    try:
        running = sorted(
            {
                each.unit
                for group in groups
                for each in group.agents
                if each.unit and each.unit not in units and path_exists(node.path(_SYSTEM_SLICE / each.unit))
            }
        )
        pods = [pod for pod in _pods(node) if pod[0] not in namespaces]
    except OSError as error:
        yield unknown_result(name, "which agents run here is unknown", error)
        return
    file = _policy_file(node)
    for unit in running:
        message = f"The unit {unit} runs, and the policy does not allow it: while it has GPUs open, no pod gets them."
        remedy = f"infrastructure: {{systemdUnits: [{unit}]}} in {file} allows it."
        yield CheckResult(name, CheckLevel.WARNING, message, remedy)
    missing: dict[tuple[str, str], str] = {}
    for namespace, pod in pods:
        agent = next(
            (
                each.name
                for group in groups
                for each in group.agents
                if not each.unit and (pod == each.name or pod.startswith(f"{each.name}-"))
            ),
            None,
        )
        if agent is not None:
            missing.setdefault((namespace, agent), pod)
    for (namespace, agent), pod in sorted(missing.items()):
        message = (
            f"The pod {namespace}/{pod} is called like the agent {agent}, and the policy does not allow it: while it has "
            "GPUs open, no pod gets them."
        )
        remedy = (
            f"If only administrators may create pods in {namespace}: infrastructure: {{pods: [{{namespace: {namespace}}}]}} "
            f"in {file} allows it."
        )
        yield CheckResult(name, CheckLevel.WARNING, message, remedy)
    if not running and not missing:
        yield CheckResult(name, CheckLevel.OK, "The policy allows every known agent that runs here.")


def infrastructure_namespaces(node: CheckContext) -> Iterator[CheckResult]:
    """Only agents run in the namespaces whose pods the policy allows on every device."""
    name = "infrastructure-namespaces"
    policy = _policy(node)
    if policy is None or not (allowed := policy.infrastructure).all_pods:
        return
    from scrubber.config.infrastructure_file import load_infrastructure_table

    groups = load_infrastructure_table().values()
    own = {each.namespace for each in allowed.pods}
    namespaces = {each.namespace for each in allowed.all_pods if not each.namespace.startswith(_RESERVED)}
    try:
        pods = [pod for pod in _pods(node) if pod[0] in namespaces]
    except OSError as error:
        yield unknown_result(name, "which pods run in the listed namespaces is unknown", error)
        return
    strange: dict[str, list[str]] = {}
    for namespace, pod in pods:
        known = any(namespace in group.namespaces and group.expects(pod) for group in groups) or namespace in own
        if not known or (namespace, pod) in node.kubelet.pods_with_devices:
            strange.setdefault(namespace, []).append(pod)
    for namespace, found in sorted(strange.items()):
        message = (
            f"In the namespace {namespace}, whose pods the policy allows to have every GPU open, run pods that are no "
            f"known agents: {_listed(found)}."
        )
        remedy = (
            f"Find out whether tenants may create pods there: {_can_i(namespace)}. If so, remove the namespace or its "
            f"group from infrastructure in {_policy_file(node)}, or list service accounts."
        )
        yield CheckResult(name, CheckLevel.WARNING, message, remedy)
    if not strange:
        message = (
            f"No pod of this node suggests that tenants create pods in {_listed(sorted(namespaces))}, whose pods may "
            f"have every GPU open. The cluster knows for certain: {_can_i('NAMESPACE')}."
        )
        yield CheckResult(name, CheckLevel.OK, message)


def _policy_file(node: CheckContext) -> str:
    return node.policy or active_policy_file(node) or "the policy"


def _can_i(namespace: str) -> str:
    return f"kubectl auth can-i create pods -n {namespace} --as=any-user --as-group=system:authenticated"


def _listed(names: Iterable[str]) -> str:
    every = sorted(names)
    more = f" and {len(every) - _MAX_NAMED} more" if len(every) > _MAX_NAMED else ""
    return ", ".join(every[:_MAX_NAMED]) + more


def _pods(node: CheckContext) -> list[tuple[str, str]]:
    """Return namespace and name of every pod with a log directory. Raises OSError."""
    return sorted(set(pod_names(node).values()))


def _policy(node: CheckContext) -> Policy | None:
    """Return the policy of the file; None if there is no valid one, which another check reports."""
    if not (file := node.policy or active_policy_file(node)):
        return None
    # Imported here: otherwise every other command would wait for a YAML parser.
    from scrubber.config.policy_file import load_policy

    try:
        return load_policy(file)
    except InvalidConfiguration:
        return None
