"""From what the driver says to findings: one table of what can go wrong, one function for snapshots."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from scrubber.domain.baseline import ACCEPTABLE, Baseline, differences
from scrubber.domain.codes import ErrorCode
from scrubber.domain.device import Device
from scrubber.domain.errors import DeviceFault
from scrubber.domain.evidence import Evidence, Finding, FindingCode, Severity, Step
from scrubber.domain.health import WayBack
from scrubber.domain.policy import Policy, XidClass
from scrubber.domain.telemetry import Snapshot

__all__ = [
    "SIGNALS",
    "SOFT",
    "SPARED",
    "XIDS",
    "Meaning",
    "baseline_findings",
    "fault_finding",
    "lifetime_findings",
    "settings_off",
    "snapshot_findings",
    "wanted_settings",
    "way_back",
    "xid_of",
]


@dataclass(frozen=True, slots=True)
class Meaning:
    """What a code means for its device.

    Attributes:
        severity: ``FAULT`` takes the device out at once; ``WARNING`` makes it suspect, and where it is one of :data:`SOFT`
            takes it out once it has lasted for as long as the policy says.
        way_back: how a device that was taken out for it can return.
        sentence: what it says about the device; empty where whoever finds it writes the sentence.
    """

    severity: Severity
    way_back: WayBack
    sentence: str = ""


_FAULT, _WARNING, _NOTE = Severity.FAULT, Severity.WARNING, Severity.NOTE
_SCRUB, _RESET, _WAIT, _REBOOT, _PERSON = (
    WayBack.SCRUB,
    WayBack.RESET,
    WayBack.WAIT,
    WayBack.REBOOT,
    WayBack.PERSON,
)

SIGNALS: Mapping[str, Meaning] = {
    # What the driver says while it lasts: :attr:`~scrubber.domain.telemetry.Snapshot.conditions`.
    "reset-required": Meaning(_FAULT, _RESET, "the driver refuses to work with it until it is reset"),
    "row-remap-pending": Meaning(_FAULT, _RESET, "rows of its memory wait for a reset to be remapped"),
    "row-remap-failure": Meaning(_FAULT, _PERSON, "rows of its memory are broken and could not be remapped"),
    "page-retirement-pending": Meaning(_FAULT, _RESET, "pages of its memory wait for a reset to be retired"),
    "page-retirement-limit": Meaning(_FAULT, _PERSON, "it has retired as many pages of its memory as it can"),
    "fabric-failed": Meaning(_FAULT, _RESET, "it could not join the NVLink fabric"),
    "hw-slowdown": Meaning(_WARNING, _WAIT, "the hardware has slowed it down"),
    "hw-thermal-slowdown": Meaning(_WARNING, _WAIT, "the hardware has slowed it down because it is too hot"),
    "power-brake": Meaning(_WARNING, _WAIT, "a power brake slows it down"),
    "pcie-width": Meaning(_WARNING, _RESET, "its PCIe link is narrower than it should be"),
    "pcie-generation": Meaning(_WARNING, _RESET, "its PCIe link is slower than it should be"),
    "nvlink-down": Meaning(_WARNING, _RESET, "NVLinks are down"),
    "inforom-corrupt": Meaning(_WARNING, _PERSON, "its InfoROM does not check out"),
    "ecc-mode-pending": Meaning(_WARNING, _RESET, "a change of its ECC mode waits for a reset"),
    "mig-mode-pending": Meaning(_WARNING, _RESET, "a change of its MIG mode waits for a reset"),
    "events-unheard": Meaning(_WARNING, _WAIT, "what its driver reports by itself, XIDs among it, may go unseen"),
    "scrub-on-free-disabled": Meaning(_NOTE, _PERSON, "the driver was told not to clear memory that is freed"),
    # What else a snapshot shows.
    "too-hot": Meaning(_WARNING, _WAIT),
    "baseline-changed": Meaning(_WARNING, _PERSON),
    "ecc-uncorrected": Meaning(_FAULT, _RESET),
    "recovery-reset": Meaning(_FAULT, _RESET),
    "recovery-reboot": Meaning(_FAULT, _REBOOT),
    "recovery-service": Meaning(_FAULT, _PERSON),
    # Counters that the device itself keeps, over resets and reloads of its driver.
    "lifetime-ecc-uncorrected-aggregate": Meaning(_FAULT, _RESET, "uncorrected ECC errors"),
    "lifetime-remapped-rows-uncorrectable": Meaning(_FAULT, _RESET, "rows remapped after uncorrectable errors"),
    "lifetime-retired-pages": Meaning(_WARNING, _RESET, "retired pages"),
    # A device that gives no answer, or the wrong one.
    ErrorCode.DEVICE_FAULT: Meaning(_FAULT, _PERSON),
    ErrorCode.DRIVER_STUCK: Meaning(_FAULT, _WAIT),
    ErrorCode.LOST: Meaning(_FAULT, _RESET),
    ErrorCode.UNREADABLE: Meaning(_FAULT, _WAIT),
    # What a scrub meets.
    FindingCode.DIAGNOSTICS_FAILED: Meaning(_FAULT, _RESET),
    FindingCode.DIAGNOSTICS_SLOW: Meaning(_FAULT, _RESET),
    FindingCode.ERASE_TIMEOUT: Meaning(_FAULT, _SCRUB),
    FindingCode.ERASER_UNKILLABLE: Meaning(_FAULT, _WAIT),
    FindingCode.GHOST: Meaning(_FAULT, _RESET),
    FindingCode.MEMORY_NOT_BACK: Meaning(_FAULT, _RESET),
    FindingCode.NOT_ALL_CLEARED: Meaning(_FAULT, _SCRUB),
    FindingCode.ON_CHIP_FAILED: Meaning(_FAULT, _RESET),
    FindingCode.RESET_FAILED: Meaning(_FAULT, _RESET),
    FindingCode.RESET_UNAVAILABLE: Meaning(_FAULT, _PERSON),
    FindingCode.SCRUB_OVERDUE: Meaning(_FAULT, _SCRUB),
    FindingCode.SETTINGS_STAY: Meaning(_FAULT, _RESET),
    FindingCode.UNKILLABLE: Meaning(_FAULT, _WAIT),
    FindingCode.VERIFICATION_FAILED: Meaning(_FAULT, _RESET),
    # Use without a grant, where the policy takes the device out for it.
    FindingCode.UNGRANTED_USE: Meaning(_FAULT, _WAIT),
}
"""The one table of what is known to go wrong, XIDs apart: their classes are the policy's."""

SOFT: frozenset[str] = frozenset(
    code for code, meaning in SIGNALS.items() if meaning.severity is _WARNING and not code.startswith("lifetime-")
)
"""Conditions that may pass by themselves: a policy says how long each may last."""

SPARED: frozenset[str] = SOFT - {"baseline-changed"}
"""Those for which the breaker keeps most devices in service: many that turn hot share a cause. Firmware that was written does
not pass, and whoever writes more of it must not have more of it left."""

XIDS: Mapping[XidClass, Meaning] = {
    XidClass.IGNORE: Meaning(_NOTE, _PERSON, "is informational"),
    XidClass.APPLICATION: Meaning(_NOTE, _PERSON, "is the application's own fault"),
    XidClass.RESET: Meaning(_FAULT, _RESET, "asks for a reset of the GPU"),
    XidClass.REBOOT: Meaning(_FAULT, _REBOOT, "asks for a reboot of the node"),
    XidClass.CONTEXT: Meaning(_WARNING, _PERSON, "depends on its context"),
    XidClass.SERVICE: Meaning(_FAULT, _PERSON, "asks for hardware service"),
    XidClass.UNKNOWN: Meaning(_WARNING, _PERSON, "is in no table"),
}
"""What an XID means, by its class. One that only warns is an event: it makes the device suspect when it is new."""

_UNHEARD_OF = Meaning(Severity.WARNING, WayBack.PERSON, "this condition is in no table")
_LIFETIME = ("ecc_uncorrected_aggregate", "remapped_rows_uncorrectable", "retired_pages")


def way_back(code: str, policy: Policy) -> WayBack:
    """How a device that was quarantined for ``code`` can return; for a code in no table only a person knows."""
    xid = xid_of(code)
    if xid is not None:
        return XIDS[policy.xid_class(xid)].way_back
    return SIGNALS.get(code, _UNHEARD_OF).way_back


def xid_of(code: str) -> int | None:
    """The number in ``xid-95``; None for any other code."""
    number = code.removeprefix("xid-")
    return int(number) if number != code and number.isdecimal() else None


def snapshot_findings(
    snapshot: Snapshot,
    policy: Policy,
    known: Mapping[str, int] | None = None,
    baseline: Baseline | None = None,
) -> tuple[Finding, ...]:
    """What a snapshot means for its device. An absent value is not applicable and makes no finding.

    Args:
        known: how often each XID (``xid-95``) had been seen when that was last recorded.
        baseline: what the device should be; a condition that a person called normal for it is a note.
    """
    normal = {} if baseline is None else dict(baseline.conditions)
    found = [_xid(code, times, snapshot, policy, known or {}) for code, times in sorted(snapshot.xids.items())]
    if snapshot.ecc_uncorrected:
        sentence = f"{snapshot.ecc_uncorrected} uncorrected ECC errors since the driver was loaded."
        found.append(_found("ecc-uncorrected", sentence, {"errors": snapshot.ecc_uncorrected}))
    if snapshot.recovery not in (None, "none"):
        found.append(_found(_asked_for(str(snapshot.recovery)), f"The driver asks for: {snapshot.recovery}."))
    found += [_condition(code, read, normal.get(code)) for code, read in sorted(snapshot.conditions.items())]
    heat = snapshot.temperature_celsius
    if heat is not None and heat > policy.limits.temperature_celsius:
        sentence = f"{heat} °C is above the policy's {policy.limits.temperature_celsius} °C."
        found.append(_found("too-hot", sentence, {"celsius": heat}))
    return tuple(found)


def _found(code: str, sentence: str, evidence: Evidence | None = None) -> Finding:
    return Finding(Step.HEALTH, code, SIGNALS[code].severity, sentence, evidence or {})


def _xid(code: int, times: int, snapshot: Snapshot, policy: Policy, known: Mapping[str, int]) -> Finding:
    """The driver's own word on what the device needs decides, where there is one; without it the table of XIDs does.

    A driver lists an XID until the device is reset. One that takes nobody out is news once, and then a note.
    """
    name, kind = f"xid-{code}", policy.xid_class(code)
    severity, before = XIDS[kind].severity, known.get(name, 0)
    new = times - before if times >= before else times
    said = f"XID {code} stands: it {XIDS[kind].sentence}"
    if severity is Severity.WARNING and not new:
        severity, said = Severity.NOTE, f"{said}, and was not seen again"
    if snapshot.recovery is not None and (kind is XidClass.CONTEXT or snapshot.recovery != "none"):
        severity, said = Severity.NOTE, f"{said}, and the driver itself asks for: {snapshot.recovery}"
    note = policy.xid_notes.get(code)
    sentence = f"{said} ({note})." if note else f"{said}."
    evidence: Evidence = {"xid": code, "class": kind.value, "count": times, "new": new}
    return Finding(Step.HEALTH, name, severity, sentence, evidence)


def _asked_for(recovery: str) -> str:
    """The code for what the driver asks for; what concerns more than this GPU (its fabric, its peers) is a person's."""
    if "reboot" in recovery:
        return "recovery-reboot"
    return "recovery-service" if recovery in ("imex", "drain-p2p") else "recovery-reset"


def _condition(code: str, read: str, normal: str | None) -> Finding:
    meaning = SIGNALS.get(code, _UNHEARD_OF)
    said = f"{code} ({read})" if read else code
    sentence = f"{said}: {meaning.sentence or _UNHEARD_OF.sentence}."
    if read == normal and code in ACCEPTABLE:
        return Finding(
            Step.HEALTH, code, Severity.NOTE, f"{sentence} A person called that normal here.", {"read": read}
        )
    return Finding(Step.HEALTH, code, meaning.severity, sentence, {"read": read})


def baseline_findings(device: Device, baseline: Baseline | None) -> tuple[Finding, ...]:
    """What of a device as it is described now is not as it should be: one finding, or none."""
    changed = differences(device, baseline)
    if not changed:
        return ()
    said = "; ".join(str(each) for each in changed)
    sentence = f"It is not what it was: {said}. If that is right: scrubber baseline accept DEVICE --reason …"
    return (_found("baseline-changed", sentence, {"changed": " ".join(each.name for each in changed)}),)


def lifetime_findings(snapshot: Snapshot, known: Mapping[str, int]) -> tuple[Finding, ...]:
    """Errors since anybody last looked, by the counters that survive resets and reloads of the driver.

    Args:
        known: the counters as of the last look that was recorded. One that is new to the record makes a note, and so
            does one that went down: somebody serviced the device.
    """
    found: list[Finding] = []
    for name in _LIFETIME:
        now, before = snapshot.counters.get(name), known.get(name)
        if now is None or now == before:
            continue
        code = f"lifetime-{name.replace('_', '-')}"
        errors, grown = SIGNALS[code].sentence, before is not None and now > before
        more = f"{now - (before or 0)} more {errors} than were on record ({now})" if grown else f"{now} {errors} so far"
        kind = SIGNALS[code].severity if grown else Severity.NOTE
        evidence: Evidence = {"counter": name, "value": now}
        if grown:
            evidence = {**evidence, "class": "lifetime", "count": now, "new": now - (before or 0)}
        found.append(Finding(Step.HEALTH, code, kind, f"{more}.", evidence))
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
