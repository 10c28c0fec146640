"""Checks of the service's own report: that it replies, that it refuses what it must, and its present problems."""

from __future__ import annotations

from collections.abc import Iterator

import scrubber
from scrubber.doctor.model import AS_ROOT, CheckContext, CheckLevel, CheckResult, DeviceReport, ServiceReport
from scrubber.domain.formatting import format_utc

__all__ = ["audit_head", "break_glass", "breaker", "devices", "enforcement", "key", "service", "version"]

_SERVICE_LOGS_HINT = (
    "systemctl status scrubber.service, and journalctl -u scrubber.service -n 50; as a pod: "
    "kubectl -n scrubber-system logs daemonset/scrubber"
)
_SERVICE_DOWN_HINT = (
    f"{_SERVICE_LOGS_HINT}. If that mentions the ledger: scrubber audit verify --ledger-dir DIR, with its "
    "state directory"
)
_RESTART_HINT = (
    "systemctl restart scrubber.service; as a pod: kubectl -n scrubber-system rollout restart daemonset/scrubber"
)
_MAX_NAMED_DEVICES = 3


def service(node: CheckContext) -> Iterator[CheckResult]:
    """The service answers, and can write its ledger."""
    status = node.service
    if status.import_error:
        message = f"The service cannot be queried: gRPC or this program's own code cannot be imported ({status.import_error})."
        yield CheckResult(
            "service", CheckLevel.ERROR, message, "Reinstall this program as described in docs/deploying.md."
        )
        yield _not_queried_result()
    elif status.error:
        yield CheckResult(
            "service", CheckLevel.ERROR, status.error, AS_ROOT if status.is_permission_denied else _SERVICE_DOWN_HINT
        )
        yield _not_queried_result()
    elif status.ledger_status != "ok":
        why = status.ledger_status or "it does not report the state of its ledger."
        yield CheckResult("service", CheckLevel.ERROR, f"The service grants no device: {why}", _SERVICE_LOGS_HINT)
    else:
        of = f"Version {status.version} serves the {status.backend} backend under the policy {status.policy}."
        yield CheckResult("service", CheckLevel.OK, of)


def _not_queried_result() -> CheckResult:
    message = (
        "Everything that only the service knows is unknown: its version and capabilities, devices and "
        "break-glass overrides, breaker, key and audit, and the policy in force."
    )
    return CheckResult("service", CheckLevel.WARNING, message, "Run scrubber doctor again once it answers.")


def version(node: CheckContext) -> Iterator[CheckResult]:
    """The command, the service and the plugins have the same version, so that each understands the others."""
    status = node.service
    if not status.is_available:
        return
    if status.version != scrubber.__version__:
        message = f"This command is version {scrubber.__version__}, the service {status.version or 'unknown'}."
        remedy = f"Run the service's own scrubber command; after an upgrade: {_RESTART_HINT}"
        yield CheckResult("version", CheckLevel.WARNING, message, remedy)
    else:
        yield CheckResult("version", CheckLevel.OK, f"The command and the service have version {status.version}.")
    other = [each for each in status.plugin_versions if each != status.version]
    if other:
        message = (
            f"A plugin or DRA driver of this node has version {', '.join(other)}, the service {status.version}. They work "
            "together if they are one minor version apart, for the time of an upgrade."
        )
        remedy = "Complete the upgrade, or roll it back: docs/upgrading.md."
        yield CheckResult("version", CheckLevel.WARNING, message, remedy)


def enforcement(node: CheckContext) -> Iterator[CheckResult]:
    """The service refuses starts that are not proved safe, for every device."""
    status = node.service
    if not status.is_available:
        return
    if status.enforcement == "observe":
        message = f"The policy {status.policy} is in observe mode: no start is refused, and no process is killed."
        remedy = f"Set enforcement: enforce in {_policy_file(status)} once its decisions are as expected."
        yield CheckResult("enforcement", CheckLevel.WARNING, message, remedy)
        return
    if status.enforcement != "enforce":
        message = f'The service does not report whether it refuses anything ("{status.enforcement}").'
        yield CheckResult("enforcement", CheckLevel.WARNING, message, _RESTART_HINT)
        return
    observed = [each for each in status.devices or () if each.enforcement != "enforce"]
    if observed:
        message = f"No start is refused for {_names(observed)}: their policy is in observe mode."
        remedy = f"Set enforcement: enforce in the overrides of {_policy_file(status)}, or see scrubber devices."
        yield CheckResult("enforcement", CheckLevel.WARNING, message, remedy)
        return
    yield CheckResult("enforcement", CheckLevel.OK, "Devices that are not proved clean are refused.")


def devices(node: CheckContext) -> Iterator[CheckResult]:
    """Every device is offered to the kubelet."""
    status = node.service
    if not status.is_available:
        return
    if status.devices is None:
        message = f"The service does not list its devices: {status.devices_error}"
        yield CheckResult("devices", CheckLevel.WARNING, message, _SERVICE_LOGS_HINT)
        return
    if not status.devices:
        message = "The service has no device at all."
        remedy = "nvidia-smi -L lists the driver's devices; on the simulated node, scrubber sim create creates some."
        yield CheckResult("devices", CheckLevel.WARNING, message, remedy)
        return
    used = [each for each in status.devices if each.unauthorized_users]
    if used:
        message = f"Processes use {_names(used)} without a grant."
        remedy = (
            f"scrubber device {used[0].index or used[0].id} names them; "
            "docs/runbooks/ScrubberUnauthorizedUse.md explains what to do."
        )
        yield CheckResult("devices", CheckLevel.WARNING, message, remedy)
    unseen = [each for each in status.devices if each.uninspected_processes]
    if unseen:
        message = (
            f"Walks over /proc could not fully inspect some processes, according to the last scrub of {_names(unseen)}."
        )
        remedy = (
            f"scrubber device {unseen[0].index or unseen[0].id} names them. Ask their owner why they have so "
            f"much open; uninspectedProcesses: kill in {_policy_file(status)} kills such processes of pods."
        )
        yield CheckResult("devices", CheckLevel.WARNING, message, remedy)
    out = [each for each in status.devices if not each.advertised]
    if out:
        states = ", ".join(sorted({each.state or "unknown" for each in out}))
        message = f"{len(out)} of {len(status.devices)} devices are out of service ({states}): {_names(out)}."
        if len(out) == len(status.devices):
            message += " The node has no allocatable GPU: an autoscaler may count it as not ready (docs/cluster.md)."
        remedy = (
            f"scrubber devices shows why; scrubber device {out[0].index or out[0].id} shows how the device returns."
        )
        yield CheckResult("devices", CheckLevel.WARNING, message, remedy)
        return
    many = len(status.devices)
    yield CheckResult(
        "devices",
        CheckLevel.OK,
        f"{f'All {many} devices are' if many > 1 else 'The only device is'} offered to the kubelet.",
    )


def breaker(node: CheckContext) -> Iterator[CheckResult]:
    """The service recovers devices automatically."""
    status = node.service
    if not status.is_available:
        return
    if status.reset_stop_reason:
        until = (
            "" if status.resets_until is None else f" The next one is possible at {format_utc(status.resets_until)}."
        )
        waiting = f" {status.resets_waiting} are waiting for one now." if status.resets_waiting else ""
        remedy = (
            "Look for a common cause of the resets (scrubber history, dmesg); scrubber reset DEVICE --reason "
            f"TEXT resets one manually, breaker: in {_policy_file(status)} sets the limit."
        )
        yield CheckResult("breaker", CheckLevel.WARNING, f"{status.reset_stop_reason}{until}{waiting}", remedy)
    if status.quarantine_stop_reason:
        spared = f" {status.quarantines_spared} would be quarantined now." if status.quarantines_spared else ""
        remedy = (
            "Look for a common cause: cooling, power, a cable (scrubber devices names the signals); breaker: "
            f"in {_policy_file(status)} sets the limit."
        )
        yield CheckResult("breaker", CheckLevel.WARNING, f"{status.quarantine_stop_reason}{spared}", remedy)
    if not status.reset_stop_reason and not status.quarantine_stop_reason:
        yield CheckResult("breaker", CheckLevel.OK, "The breaker stops no reset and no quarantine.")


def break_glass(node: CheckContext) -> Iterator[CheckResult]:
    """No device is handed over regardless of what its checks find."""
    status = node.service
    if not status.is_available or status.devices is None:
        return
    broken = [each for each in status.devices if each.break_glass_until is not None]
    for each in broken:
        until = format_utc(each.break_glass_until or 0.0)
        message = f"Until {until} no start on {_name(each)} is refused, whatever its checks find: {each.break_glass}."
        remedy = f"scrubber break-glass {each.index or each.id} --end --reason TEXT ends the override now."
        yield CheckResult("break-glass", CheckLevel.WARNING, message, remedy)
    if not broken:
        yield CheckResult("break-glass", CheckLevel.OK, "No break-glass override is active.")


def yielded(node: CheckContext) -> Iterator[CheckResult]:
    """The service uses the driver: the node is not yielded to work that needs the driver for itself."""
    status = node.service
    if not status.is_available:
        return
    if not status.yield_reasons:
        yield CheckResult("yield", CheckLevel.OK, "The node is not yielded.")
        return
    message = f"The node is yielded, so every device is withheld. Requested by {', '.join(status.yield_reasons)}."
    if status.yield_remaining:
        pids = ", ".join(map(str, status.yield_remaining))
        message += f" The driver is still in use by processes of the service that cannot be killed: PID {pids}."
    remedy = "scrubber resume --reason TEXT ends the operators' request; a plugin's ends with the label of the node."
    yield CheckResult("yield", CheckLevel.WARNING, message, remedy)


def agents_paused(node: CheckContext) -> Iterator[CheckResult]:
    """Agents of the node that were paused for a reset have been restored."""
    status = node.service
    if not status.is_available:
        return
    if not status.agent_pause:
        yield CheckResult("agent-pause", CheckLevel.OK, "No agents are paused for a reset.")
        return
    if not status.is_agent_pause_ending:
        yield CheckResult("agent-pause", CheckLevel.OK, f"Agents are paused for a reset {status.agent_pause}.")
        return
    message = f"Agents that were paused for a reset are not restored yet: {status.agent_pause}."
    remedy = (
        "It takes seconds. If it lasts, see docs/runbooks/ScrubberAgentsPaused.md: look at the plugin's log, or undo the "
        "changes yourself."
    )
    yield CheckResult("agent-pause", CheckLevel.WARNING, message, remedy)


def audit_head(node: CheckContext) -> Iterator[CheckResult]:
    """The head of the audit log, to be stored outside the node: with it a truncated end is detected."""
    status = node.service
    if not status.is_available:
        return
    if not status.audit_head:
        message = "The service reports no head of its audit log: a truncated end could not be detected."
        yield CheckResult(
            "audit-head", CheckLevel.WARNING, message, f"Run this version as the service: {_RESTART_HINT}"
        )
        return
    yield CheckResult(
        "audit-head",
        CheckLevel.OK,
        f"{status.audit_head} (scrubber audit verify --head detects if the end is truncated later).",
    )


def key(node: CheckContext) -> Iterator[CheckResult]:
    """Certificates are signed; names the key."""
    status = node.service
    if not status.is_available:
        return
    if not status.key_id:
        message = "The service reports no key: its certificates cannot be verified elsewhere."
        yield CheckResult(
            "signing-key-id", CheckLevel.WARNING, message, f"Run this version as the service: {_RESTART_HINT}"
        )
        return
    yield CheckResult("signing-key-id", CheckLevel.OK, f"Certificates are signed by {status.key_id}.")


def _policy_file(service: ServiceReport) -> str:
    return str(service.paths.policy) if service.paths.policy is not None else "the policy file"


def _name(device: DeviceReport) -> str:
    return f"device {device.index} ({device.id})" if device.index else f"device {device.id}"


def _names(devices: list[DeviceReport]) -> str:
    more = f" and {len(devices) - _MAX_NAMED_DEVICES} more" if len(devices) > _MAX_NAMED_DEVICES else ""
    return f"{', '.join(_name(each) for each in devices[:_MAX_NAMED_DEVICES])}{more}"
