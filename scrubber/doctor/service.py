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
_SERVICE_DOWN_HINT = f"{_SERVICE_LOGS_HINT}. If that speaks of the ledger: scrubber audit verify --ledger-dir DIR, with its state directory"
_RESTART_HINT = (
    "systemctl restart scrubber.service; as a pod: kubectl -n scrubber-system rollout restart daemonset/scrubber"
)
_MAX_NAMED_DEVICES = 3


def service(node: CheckContext) -> Iterator[CheckResult]:
    """The service answers, and keeps its record."""
    said = node.service
    if said.import_error:
        message = f"The service cannot be asked: gRPC's or our own code does not load here ({said.import_error})."
        yield CheckResult(
            "service", CheckLevel.ERROR, message, "Install this program again, as docs/deploying.md says."
        )
        yield _not_queried_result()
    elif said.error:
        yield CheckResult(
            "service", CheckLevel.ERROR, said.error, AS_ROOT if said.is_permission_denied else _SERVICE_DOWN_HINT
        )
        yield _not_queried_result()
    elif said.ledger_status != "ok":
        why = said.ledger_status or "it does not say how its ledger is."
        yield CheckResult("service", CheckLevel.ERROR, f"The service hands nothing over: {why}", _SERVICE_LOGS_HINT)
    else:
        of = f"Version {said.version} serves the {said.backend} backend under the policy {said.policy}."
        yield CheckResult("service", CheckLevel.OK, of)


def _not_queried_result() -> CheckResult:
    message = (
        "So nothing was seen of what only it knows: its version and capabilities, devices and glasses, breaker, key and "
        "audit, and which policy is in force."
    )
    return CheckResult("service", CheckLevel.WARNING, message, "Once it answers, call scrubber doctor again.")


def version(node: CheckContext) -> Iterator[CheckResult]:
    """The command and the service are of one version: what one says the other understands."""
    said = node.service
    if not said.is_available:
        return
    if said.version != scrubber.__version__:
        message = f"This command is version {scrubber.__version__}, the service {said.version or 'an unknown one'}."
        remedy = f"Call the service's own scrubber command; after an upgrade: {_RESTART_HINT}"
        yield CheckResult("version", CheckLevel.WARNING, message, remedy)
    else:
        yield CheckResult("version", CheckLevel.OK, f"The command and the service are version {said.version}.")


def enforcement(node: CheckContext) -> Iterator[CheckResult]:
    """The service refuses starts that nothing proves safe, for every device."""
    said = node.service
    if not said.is_available:
        return
    if said.enforcement == "observe":
        message = f"It only observes: under the policy {said.policy} no start is refused, and nobody is ended."
        remedy = f"Set enforcement: enforce in {_policy_file(said)} once its verdicts are what you expect."
        yield CheckResult("enforcement", CheckLevel.WARNING, message, remedy)
        return
    if said.enforcement != "enforce":
        message = f'The service does not say whether it refuses anything ("{said.enforcement}").'
        yield CheckResult("enforcement", CheckLevel.WARNING, message, _RESTART_HINT)
        return
    observed = [each for each in said.devices or () if each.enforcement != "enforce"]
    if observed:
        message = f"No start is refused for {_names(observed)}: the policy that is theirs only observes."
        remedy = f"Set enforcement: enforce in the overrides of {_policy_file(said)}, or see scrubber devices."
        yield CheckResult("enforcement", CheckLevel.WARNING, message, remedy)
        return
    yield CheckResult("enforcement", CheckLevel.OK, "What is not proved clean is refused.")


def devices(node: CheckContext) -> Iterator[CheckResult]:
    """Every device is offered to the kubelet."""
    said = node.service
    if not said.is_available:
        return
    if said.devices is None:
        message = f"The service does not list its devices: {said.devices_error}"
        yield CheckResult("devices", CheckLevel.WARNING, message, _SERVICE_LOGS_HINT)
        return
    if not said.devices:
        message = "The service has no device at all."
        remedy = "nvidia-smi -L says what the driver has; on the simulated node scrubber sim create makes some."
        yield CheckResult("devices", CheckLevel.WARNING, message, remedy)
        return
    used = [each for each in said.devices if each.unauthorized_users]
    if used:
        message = f"Processes that nobody granted a device use {_names(used)}."
        remedy = f"scrubber device {used[0].index or used[0].id} names them; docs/runbooks/ScrubberUnauthorizedUse.md says what to do."
        yield CheckResult("devices", CheckLevel.WARNING, message, remedy)
    unseen = [each for each in said.devices if each.uninspected_processes]
    if unseen:
        message = f"Walks over /proc do not get through some processes, by the last scrub of {_names(unseen)}."
        remedy = (
            f"scrubber device {unseen[0].index or unseen[0].id} names them. Ask their owner why they have so much open; "
            f"uninspectedProcesses: kill in {_policy_file(said)} has such processes of pods ended."
        )
        yield CheckResult("devices", CheckLevel.WARNING, message, remedy)
    out = [each for each in said.devices if not each.advertised]
    if out:
        states = ", ".join(sorted({each.state or "unknown" for each in out}))
        message = f"{len(out)} of {len(said.devices)} devices are out of service ({states}): {_names(out)}."
        remedy = f"scrubber devices says why; scrubber device {out[0].index or out[0].id} says what leads back."
        yield CheckResult("devices", CheckLevel.WARNING, message, remedy)
        return
    many = len(said.devices)
    yield CheckResult(
        "devices", CheckLevel.OK, f"The kubelet is offered {f'all {many} devices' if many > 1 else 'the one device'}."
    )


def breaker(node: CheckContext) -> Iterator[CheckResult]:
    """The service still does by itself what leads devices back."""
    said = node.service
    if not said.is_available:
        return
    if said.reset_stop_reason:
        until = "" if said.resets_until is None else f" The next one may be at {format_utc(said.resets_until)}."
        waiting = f" {said.resets_waiting} wait for one now." if said.resets_waiting else ""
        remedy = (
            "Look for what the resets have in common (scrubber history, dmesg); scrubber reset DEVICE --reason TEXT resets "
            f"one by hand, breaker: in {_policy_file(said)} says how many there may be."
        )
        yield CheckResult("breaker", CheckLevel.WARNING, f"{said.reset_stop_reason}{until}{waiting}", remedy)
    if said.quarantine_stop_reason:
        spared = f" {said.quarantines_spared} would go out now." if said.quarantines_spared else ""
        remedy = (
            "Look for a cause that they share: cooling, power, a cable (scrubber devices names the signals); breaker: in "
            f"{_policy_file(said)} says how many may be out."
        )
        yield CheckResult("breaker", CheckLevel.WARNING, f"{said.quarantine_stop_reason}{spared}", remedy)
    if not said.reset_stop_reason and not said.quarantine_stop_reason:
        yield CheckResult(
            "breaker", CheckLevel.OK, "No device waits for a reset that it stops, and none is spared a quarantine."
        )


def break_glass(node: CheckContext) -> Iterator[CheckResult]:
    """No device is handed out whatever is known of it."""
    said = node.service
    if not said.is_available or said.devices is None:
        return
    broken = [each for each in said.devices if each.break_glass_until is not None]
    for each in broken:
        until = format_utc(each.break_glass_until or 0.0)
        message = f"Until {until} nothing is refused for {_name(each)}, whatever is known of it: {each.break_glass}."
        remedy = f"scrubber break-glass {each.index or each.id} --end --reason TEXT ends that now."
        yield CheckResult("break-glass", CheckLevel.WARNING, message, remedy)
    if not broken:
        yield CheckResult("break-glass", CheckLevel.OK, "No glass is broken.")


def audit_head(node: CheckContext) -> Iterator[CheckResult]:
    """The audit's head, to be noted outside the node: with it a cut tail is noticed."""
    said = node.service
    if not said.is_available:
        return
    if not said.audit_head:
        message = "The service tells no head of its audit: a tail that was cut off could not be noticed."
        yield CheckResult(
            "audit-head", CheckLevel.WARNING, message, f"Run this version as the service: {_RESTART_HINT}"
        )
        return
    yield CheckResult(
        "audit-head", CheckLevel.OK, f"{said.audit_head} (scrubber audit verify --head notices a tail cut off since)."
    )


def key(node: CheckContext) -> Iterator[CheckResult]:
    """Certificates are signed, and by which key."""
    said = node.service
    if not said.is_available:
        return
    if not said.key_id:
        message = "The service names no key: its certificates cannot be verified elsewhere."
        yield CheckResult(
            "signing-key-id", CheckLevel.WARNING, message, f"Run this version as the service: {_RESTART_HINT}"
        )
        return
    yield CheckResult("signing-key-id", CheckLevel.OK, f"Certificates are signed by {said.key_id}.")


def _policy_file(service: ServiceReport) -> str:
    return str(service.paths.policy) if service.paths.policy is not None else "the policy's file"


def _name(device: DeviceReport) -> str:
    return f"device {device.index} ({device.id})" if device.index else f"device {device.id}"


def _names(devices: list[DeviceReport]) -> str:
    more = f" and {len(devices) - _MAX_NAMED_DEVICES} more" if len(devices) > _MAX_NAMED_DEVICES else ""
    return f"{', '.join(_name(each) for each in devices[:_MAX_NAMED_DEVICES])}{more}"
