"""From what the driver says to findings: one table for codes, one function for snapshots."""

from __future__ import annotations

from collections.abc import Mapping

from scrubber.domain.errors import DeviceFault
from scrubber.domain.evidence import Finding, Severity, Step
from scrubber.domain.health import WayBack
from scrubber.domain.policy import Policy, XidClass
from scrubber.domain.telemetry import Snapshot

__all__ = ["fault_finding", "settings_off", "snapshot_findings", "wanted_settings", "way_back"]

_XID: Mapping[XidClass, tuple[Severity, str]] = {
    XidClass.IGNORE: (Severity.NOTE, "is informational"),
    XidClass.APPLICATION: (Severity.NOTE, "is the application's own fault"),
    XidClass.RESET: (Severity.FAULT, "asks for a reset of the GPU"),
    XidClass.REBOOT: (Severity.FAULT, "asks for a reboot of the node"),
    XidClass.CONTEXT: (Severity.WARNING, "depends on its context"),
    XidClass.SERVICE: (Severity.FAULT, "asks for hardware service"),
    XidClass.UNKNOWN: (Severity.WARNING, "is in no table"),
}

_WAYS: Mapping[str, WayBack] = {
    "driver-stuck": WayBack.WAIT,
    "unreadable": WayBack.WAIT,
    "lost": WayBack.RESET,
    "ecc-uncorrected": WayBack.RESET,
    "recovery-reset": WayBack.RESET,
    "recovery-reboot": WayBack.REBOOT,
    "too-hot": WayBack.WAIT,
    "ghost": WayBack.RESET,
    "unkillable": WayBack.WAIT,
    "eraser-unkillable": WayBack.WAIT,
    "erase-timeout": WayBack.SCRUB,
    "verification-failed": WayBack.RESET,
    "not-all-cleared": WayBack.SCRUB,
    "settings-stay": WayBack.RESET,
    "reset-failed": WayBack.RESET,
    "reset-unavailable": WayBack.PERSON,
    "scrub-overdue": WayBack.SCRUB,
}

_XID_WAYS: Mapping[XidClass, WayBack] = {
    XidClass.RESET: WayBack.RESET,
    XidClass.REBOOT: WayBack.REBOOT,
    XidClass.SERVICE: WayBack.PERSON,
}


def way_back(code: str, policy: Policy) -> WayBack:
    """How a device that was quarantined for ``code`` can return; for a code in no table only a person knows."""
    if code.startswith("xid-"):
        return _XID_WAYS.get(policy.xid_class(int(code.removeprefix("xid-"))), WayBack.PERSON)
    return _WAYS.get(code, WayBack.PERSON)


def snapshot_findings(snapshot: Snapshot, policy: Policy) -> tuple[Finding, ...]:
    """What a snapshot means for its device. An absent value is not applicable and makes no finding."""
    found: list[Finding] = []
    for code, times in sorted(snapshot.xids.items()):
        severity, meaning = _XID[policy.xid_class(code)]
        sentence = f"XID {code} stands: it {meaning}."
        found.append(Finding(Step.HEALTH, f"xid-{code}", severity, sentence, {"xid": code, "count": times}))
    if snapshot.ecc_uncorrected:
        sentence = f"{snapshot.ecc_uncorrected} uncorrected ECC errors since the driver was loaded."
        evidence = {"errors": snapshot.ecc_uncorrected}
        found.append(Finding(Step.HEALTH, "ecc-uncorrected", Severity.FAULT, sentence, evidence))
    if snapshot.recovery not in (None, "none"):
        asked = "recovery-reboot" if "reboot" in str(snapshot.recovery) else "recovery-reset"
        found.append(Finding(Step.HEALTH, asked, Severity.FAULT, f"The driver asks for: {snapshot.recovery}."))
    heat = snapshot.temperature_celsius
    if heat is not None and heat > policy.max_temperature_celsius:
        sentence = f"{heat} °C is above the policy's {policy.max_temperature_celsius} °C."
        found.append(Finding(Step.HEALTH, "too-hot", Severity.WARNING, sentence, {"celsius": heat}))
    return tuple(found)


def fault_finding(step: Step, fault: DeviceFault) -> Finding:
    """A device fault that a port raised, as a finding of the step that met it."""
    return Finding(step, fault.code, Severity.FAULT, str(fault))


def wanted_settings(snapshot: Snapshot, policy: Policy) -> dict[str, str]:
    """The policy's values over the driver's defaults, for the settings that the device has.

    Never what was found at first start: that would launder a tenant's change.
    """
    wanted = dict(snapshot.defaults)
    wanted.update({name: value for name, value in policy.settings.items() if name in snapshot.settings})
    return wanted


def settings_off(snapshot: Snapshot, policy: Policy) -> dict[str, tuple[str | None, str]]:
    """The settings that are not as wanted: name → (found, wanted)."""
    wanted = wanted_settings(snapshot, policy)
    found = snapshot.settings
    return {name: (found.get(name), value) for name, value in wanted.items() if found.get(name) != value}
