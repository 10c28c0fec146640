"""What the service says of itself: that it answers, refuses what it must, and what a person has to know of it now."""

from __future__ import annotations

from collections.abc import Iterator

import scrubber
from scrubber.doctor.finding import AS_ROOT, Check, DeviceSaid, Level, Node, ServiceSaid
from scrubber.domain.quantities import utc

__all__ = ["audit_head", "break_glass", "breaker", "devices", "enforcement", "key", "service", "version"]

_LOOK_AT_THE_SERVICE = (
    "systemctl status scrubber.service, and journalctl -u scrubber.service -n 50; as a pod: "
    "kubectl -n scrubber-system logs daemonset/scrubber"
)
_IT_IS_AWAY = f"{_LOOK_AT_THE_SERVICE}. If that speaks of the ledger: scrubber audit verify --ledger DIR, with its state directory"
_RESTART = "systemctl restart scrubber.service; as a pod: kubectl -n scrubber-system rollout restart daemonset/scrubber"
_NAMED = 3


def service(node: Node) -> Iterator[Check]:
    """The service answers, and keeps its record."""
    said = node.service
    if said.broken:
        sentence = f"The service cannot be asked: gRPC's or our own code does not load here ({said.broken})."
        yield Check("service", Level.ERROR, sentence, "Install this program again, as docs/deploying.md says.")
        yield _unasked()
    elif said.refusal:
        yield Check("service", Level.ERROR, said.refusal, AS_ROOT if said.barred else _IT_IS_AWAY)
        yield _unasked()
    elif said.ledger != "ok":
        why = said.ledger or "it does not say how its ledger is."
        yield Check("service", Level.ERROR, f"The service hands nothing over: {why}", _LOOK_AT_THE_SERVICE)
    else:
        of = f"Version {said.version} serves the {said.backend} backend under the policy {said.policy}."
        yield Check("service", Level.OK, of)


def _unasked() -> Check:
    sentence = (
        "So nothing was seen of what only it knows: its version and capabilities, devices and glasses, breaker, key and "
        "audit, and which policy is in force."
    )
    return Check("service", Level.WARNING, sentence, "Once it answers, call scrubber doctor again.")


def version(node: Node) -> Iterator[Check]:
    """The command and the service are of one version: what one says the other understands."""
    said = node.service
    if not said.answered:
        return
    if said.version != scrubber.__version__:
        sentence = f"This command is version {scrubber.__version__}, the service {said.version or 'an unknown one'}."
        remedy = f"Call the service's own scrubber command; after an upgrade: {_RESTART}"
        yield Check("version", Level.WARNING, sentence, remedy)
    else:
        yield Check("version", Level.OK, f"The command and the service are version {said.version}.")


def enforcement(node: Node) -> Iterator[Check]:
    """The service refuses starts that nothing proves safe, for every device."""
    said = node.service
    if not said.answered:
        return
    if said.enforcement == "observe":
        sentence = f"It only observes: under the policy {said.policy} no start is refused, and nobody is ended."
        remedy = f"Set enforcement: enforce in {_policy_file(said)} once its verdicts are what you expect."
        yield Check("enforcement", Level.WARNING, sentence, remedy)
        return
    if said.enforcement != "enforce":
        sentence = f'The service does not say whether it refuses anything ("{said.enforcement}").'
        yield Check("enforcement", Level.WARNING, sentence, _RESTART)
        return
    observed = [each for each in said.devices or () if each.enforcement != "enforce"]
    if observed:
        sentence = f"No start is refused for {_names(observed)}: the policy that is theirs only observes."
        remedy = f"Set enforcement: enforce in the overrides of {_policy_file(said)}, or see scrubber devices."
        yield Check("enforcement", Level.WARNING, sentence, remedy)
        return
    yield Check("enforcement", Level.OK, "What is not proved clean is refused.")


def devices(node: Node) -> Iterator[Check]:
    """Every device is offered to the kubelet."""
    said = node.service
    if not said.answered:
        return
    if said.devices is None:
        sentence = f"The service does not list its devices: {said.devices_refusal}"
        yield Check("devices", Level.WARNING, sentence, _LOOK_AT_THE_SERVICE)
        return
    if not said.devices:
        sentence = "The service has no device at all."
        remedy = "nvidia-smi -L says what the driver has; on the simulated node scrubber sim create makes some."
        yield Check("devices", Level.WARNING, sentence, remedy)
        return
    used = [each for each in said.devices if each.strangers]
    if used:
        sentence = f"Processes that nobody granted a device use {_names(used)}."
        remedy = f"scrubber device {used[0].index or used[0].id} names them; docs/runbooks/ScrubberUngrantedUse.md says what to do."
        yield Check("devices", Level.WARNING, sentence, remedy)
    unseen = [each for each in said.devices if each.uninspected]
    if unseen:
        sentence = f"Walks over /proc do not get through some processes, by the last scrub of {_names(unseen)}."
        remedy = (
            f"scrubber device {unseen[0].index or unseen[0].id} names them. Ask their owner why they have so much open; "
            f"uninspectable: end in {_policy_file(said)} has such processes of pods ended."
        )
        yield Check("devices", Level.WARNING, sentence, remedy)
    out = [each for each in said.devices if not each.offered]
    if out:
        states = ", ".join(sorted({each.state or "unknown" for each in out}))
        sentence = f"{len(out)} of {len(said.devices)} devices are out of service ({states}): {_names(out)}."
        remedy = f"scrubber devices says why; scrubber device {out[0].index or out[0].id} says what leads back."
        yield Check("devices", Level.WARNING, sentence, remedy)
        return
    many = len(said.devices)
    yield Check(
        "devices", Level.OK, f"The kubelet is offered {f'all {many} devices' if many > 1 else 'the one device'}."
    )


def breaker(node: Node) -> Iterator[Check]:
    """The service still does by itself what leads devices back."""
    said = node.service
    if not said.answered:
        return
    if said.resets:
        until = "" if said.resets_until is None else f" The next one may be at {utc(said.resets_until)}."
        waiting = f" {said.resets_waiting} wait for one now." if said.resets_waiting else ""
        remedy = (
            "Look for what the resets have in common (scrubber history, dmesg); scrubber reset DEVICE --reason TEXT resets "
            f"one by hand, breaker: in {_policy_file(said)} says how many there may be."
        )
        yield Check("breaker", Level.WARNING, f"{said.resets}{until}{waiting}", remedy)
    if said.soft:
        spared = f" {said.soft_spared} would go out now." if said.soft_spared else ""
        remedy = (
            "Look for a cause that they share: cooling, power, a cable (scrubber devices names the signals); breaker: in "
            f"{_policy_file(said)} says how many may be out."
        )
        yield Check("breaker", Level.WARNING, f"{said.soft}{spared}", remedy)
    if not said.resets and not said.soft:
        yield Check("breaker", Level.OK, "No device waits for a reset that it stops, and none is spared a quarantine.")


def break_glass(node: Node) -> Iterator[Check]:
    """No device is handed out whatever is known of it."""
    said = node.service
    if not said.answered or said.devices is None:
        return
    broken = [each for each in said.devices if each.glass_until is not None]
    for each in broken:
        until = utc(each.glass_until or 0.0)
        sentence = f"Until {until} nothing is refused for {_name(each)}, whatever is known of it: {each.glass}."
        remedy = f"scrubber break-glass {each.index or each.id} --end --reason TEXT ends that now."
        yield Check("break-glass", Level.WARNING, sentence, remedy)
    if not broken:
        yield Check("break-glass", Level.OK, "No glass is broken.")


def audit_head(node: Node) -> Iterator[Check]:
    """The audit's head, to be noted outside the node: with it a cut tail is noticed."""
    said = node.service
    if not said.answered:
        return
    if not said.head:
        sentence = "The service tells no head of its audit: a tail that was cut off could not be noticed."
        yield Check("audit-head", Level.WARNING, sentence, f"Run this version as the service: {_RESTART}")
        return
    yield Check("audit-head", Level.OK, f"{said.head} (scrubber audit verify --head notices a tail cut off since).")


def key(node: Node) -> Iterator[Check]:
    """Certificates are signed, and by which key."""
    said = node.service
    if not said.answered:
        return
    if not said.key:
        sentence = "The service names no key: its certificates cannot be verified elsewhere."
        yield Check("key", Level.WARNING, sentence, f"Run this version as the service: {_RESTART}")
        return
    yield Check("key", Level.OK, f"Certificates are signed by {said.key}.")


def _policy_file(said: ServiceSaid) -> str:
    return str(said.places.policy) if said.places.policy is not None else "the policy's file"


def _name(device: DeviceSaid) -> str:
    return f"device {device.index} ({device.id})" if device.index else f"device {device.id}"


def _names(found: list[DeviceSaid]) -> str:
    more = f" and {len(found) - _NAMED} more" if len(found) > _NAMED else ""
    return f"{', '.join(_name(each) for each in found[:_NAMED])}{more}"
