"""From what the driver says to findings: one table for codes, one function for snapshots."""

from __future__ import annotations

from collections.abc import Mapping

from scrubber.domain.errors import DeviceFault
from scrubber.domain.evidence import Finding, Severity, Step
from scrubber.domain.health import WayBack
from scrubber.domain.policy import Policy, XidClass
from scrubber.domain.telemetry import Snapshot

__all__ = ["fault_finding", "lifetime_findings", "settings_off", "snapshot_findings", "wanted_settings", "way_back"]

_XID: Mapping[XidClass, tuple[Severity, str]] = {
    XidClass.IGNORE: (Severity.NOTE, "is informational"),
    XidClass.APPLICATION: (Severity.NOTE, "is the application's own fault"),
    XidClass.RESET: (Severity.FAULT, "asks for a reset of the GPU"),
    XidClass.REBOOT: (Severity.FAULT, "asks for a reboot of the node"),
    XidClass.CONTEXT: (Severity.WARNING, "depends on its context"),
    XidClass.SERVICE: (Severity.FAULT, "asks for hardware service"),
    XidClass.UNKNOWN: (Severity.WARNING, "is in no table"),
}

_CONDITIONS: Mapping[str, tuple[Severity, str]] = {
    "reset-required": (Severity.FAULT, "the driver refuses to work with it until it is reset"),
    "row-remap-pending": (Severity.FAULT, "rows of its memory wait for a reset to be remapped"),
    "row-remap-failure": (Severity.FAULT, "rows of its memory are broken and could not be remapped"),
    "page-retirement-pending": (Severity.FAULT, "pages of its memory wait for a reset to be retired"),
    "page-retirement-limit": (Severity.FAULT, "it has retired as many pages of its memory as it can"),
    "fabric-failed": (Severity.FAULT, "it could not join the NVLink fabric"),
    "inforom-corrupt": (Severity.WARNING, "its InfoROM does not check out"),
    "hw-slowdown": (Severity.WARNING, "the hardware has slowed it down"),
    "hw-thermal-slowdown": (Severity.WARNING, "the hardware has slowed it down because it is too hot"),
    "power-brake": (Severity.WARNING, "a power brake slows it down"),
    "pcie-width": (Severity.WARNING, "its PCIe link is narrower than it should be"),
    "pcie-generation": (Severity.WARNING, "its PCIe link is slower than it should be"),
    "nvlink-down": (Severity.WARNING, "NVLinks are down"),
    "ecc-mode-pending": (Severity.WARNING, "a change of its ECC mode waits for a reset"),
    "mig-mode-pending": (Severity.WARNING, "a change of its MIG mode waits for a reset"),
    "events-unheard": (Severity.WARNING, "what its driver reports by itself, XIDs among it, may go unseen"),
    "scrub-on-free-disabled": (Severity.NOTE, "the driver was told not to clear memory that is freed"),
}
"""What lasts until something is done about it, by code of :attr:`~scrubber.domain.telemetry.Snapshot.conditions`."""

_LIFETIME: Mapping[str, tuple[Severity, str]] = {
    "ecc_uncorrected_aggregate": (Severity.FAULT, "uncorrected ECC errors"),
    "remapped_rows_uncorrectable": (Severity.FAULT, "rows remapped after uncorrectable errors"),
    "retired_pages": (Severity.WARNING, "retired pages"),
}
"""Counters that the device itself keeps, over resets and reloads of its driver."""

_WAYS: Mapping[str, WayBack] = {
    "driver-stuck": WayBack.WAIT,
    "unreadable": WayBack.WAIT,
    "lost": WayBack.RESET,
    "ecc-uncorrected": WayBack.RESET,
    "recovery-reset": WayBack.RESET,
    "recovery-reboot": WayBack.REBOOT,
    "recovery-service": WayBack.PERSON,
    "too-hot": WayBack.WAIT,
    "ghost": WayBack.RESET,
    "ungranted-use": WayBack.WAIT,
    "unkillable": WayBack.WAIT,
    "eraser-unkillable": WayBack.WAIT,
    "erase-timeout": WayBack.SCRUB,
    "verification-failed": WayBack.RESET,
    "not-all-cleared": WayBack.SCRUB,
    "settings-stay": WayBack.RESET,
    "reset-failed": WayBack.RESET,
    "reset-unavailable": WayBack.PERSON,
    "scrub-overdue": WayBack.SCRUB,
    "memory-not-back": WayBack.RESET,
    "on-chip-failed": WayBack.RESET,
    "diagnostics-failed": WayBack.RESET,
    "diagnostics-slow": WayBack.RESET,
    "reset-required": WayBack.RESET,
    "row-remap-pending": WayBack.RESET,
    "row-remap-failure": WayBack.PERSON,
    "page-retirement-pending": WayBack.RESET,
    "page-retirement-limit": WayBack.PERSON,
    "fabric-failed": WayBack.RESET,
    "lifetime-ecc-uncorrected-aggregate": WayBack.RESET,
    "lifetime-remapped-rows-uncorrectable": WayBack.RESET,
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
        asked = _asked_for(str(snapshot.recovery))
        found.append(Finding(Step.HEALTH, asked, Severity.FAULT, f"The driver asks for: {snapshot.recovery}."))
    found += [_condition(code, read) for code, read in sorted(snapshot.conditions.items())]
    heat = snapshot.temperature_celsius
    if heat is not None and heat > policy.max_temperature_celsius:
        sentence = f"{heat} °C is above the policy's {policy.max_temperature_celsius} °C."
        found.append(Finding(Step.HEALTH, "too-hot", Severity.WARNING, sentence, {"celsius": heat}))
    return tuple(found)


def _asked_for(recovery: str) -> str:
    """The code for what the driver asks for; what concerns more than this GPU (its fabric, its peers) is a person's."""
    if "reboot" in recovery:
        return "recovery-reboot"
    return "recovery-service" if recovery in ("imex", "drain-p2p") else "recovery-reset"


def _condition(code: str, read: str) -> Finding:
    severity, meaning = _CONDITIONS.get(code, (Severity.WARNING, "this condition is in no table"))
    said = f"{code} ({read})" if read else code
    return Finding(Step.HEALTH, code, severity, f"{said}: {meaning}.", {"read": read})


def lifetime_findings(snapshot: Snapshot, known: Mapping[str, int]) -> tuple[Finding, ...]:
    """Errors since anybody last looked, by the counters that survive resets and reloads of the driver.

    Args:
        known: the counters as of the last look that was recorded. One that is new to the record makes a note, and so
            does one that went down: somebody serviced the device.
    """
    found: list[Finding] = []
    for name, (severity, errors) in _LIFETIME.items():
        now, before = snapshot.counters.get(name), known.get(name)
        if now is None or now == before:
            continue
        grown = before is not None and now > before
        more = f"{now - (before or 0)} more {errors} than were on record ({now})" if grown else f"{now} {errors} so far"
        code = f"lifetime-{name.replace('_', '-')}"
        kind = severity if grown else Severity.NOTE
        found.append(Finding(Step.HEALTH, code, kind, f"{more}.", {"counter": name, "value": now}))
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
