"""The contract of every backend, as far as any backend can be checked: in the tests, and on an administrator's node.

Each function checks one claim over the device ports, and raises :class:`ContractViolation` where it does not hold; the
errors that a port may raise pass through. Those above the line change nothing on a device. Those below it destroy what
is on the device; their precondition is that no process and no tenant uses it.
"""

from __future__ import annotations

from scrubber.domain.device import Device, NodeIdentity
from scrubber.domain.diagnostics import DiagnosticCheck, DiagnosticLevel
from scrubber.domain.reset_plan import ResetPlan
from scrubber.domain.telemetry import Snapshot
from scrubber.ports.device import (
    Diagnostics,
    EraseProgress,
    Eraser,
    EraseReport,
    EraseRequest,
    Holders,
    Inventory,
    Resetter,
    Settings,
    Telemetry,
)

__all__ = [
    "ContractViolation",
    "check_diagnosis",
    "check_erasure",
    "check_holders",
    "check_identity",
    "check_inventory",
    "check_reset",
    "check_reset_plan",
    "check_restored_settings",
    "check_snapshot",
    "check_unknown_setting",
]

_NO_SUCH_SETTING = "no_such_setting"


class ContractViolation(Exception):
    """A backend does not do what every backend must; the message is one sentence that says what it did."""


def _require(holds: object, message: str) -> None:
    if not holds:
        raise ContractViolation(message)


async def check_inventory(inventory: Inventory) -> tuple[Device, ...]:
    """Devices have distinct ids, are listed by index, and a second list is equal to the first one."""
    devices = await inventory.devices()
    ids, indexes = [each.id for each in devices], [each.index for each in devices]
    _require(len(set(ids)) == len(ids), f"Several devices have the same id: {', '.join(ids)}.")
    _require(indexes == sorted(indexes, key=_numbers), f"The devices are not in the order of their indexes: {indexes}.")
    _require(all(each.model for each in devices), "A device has no model.")
    known = {*ids, *(each.parent for each in devices)}
    for device in devices:
        unknown = ", ".join(sorted(device.peers - known))
        _require(not unknown, f"Device {device.index} has peers that are not in the inventory: {unknown}.")
    again = await inventory.devices()
    _require(again == devices, "The inventory is another one when it is queried again, although nothing has changed.")
    return devices


def _numbers(index: str) -> tuple[int, ...]:
    return tuple(int(part) for part in index.split(":"))


async def check_identity(inventory: Inventory) -> NodeIdentity:
    """A certificate can name node, boot and driver, and they do not change from one query to the next."""
    identity = await inventory.identity()
    for name, value in {"node": identity.node, "boot": identity.boot, "driver": identity.driver}.items():
        _require(value, f"The name of the {name} is empty.")
    _require(await inventory.identity() == identity, "The driver version is another one when it is queried again.")
    return identity


async def check_snapshot(telemetry: Telemetry, device: Device) -> Snapshot:
    """A snapshot is about its device, and every setting has a default to restore."""
    snapshot = await telemetry.snapshot(device)
    _require(snapshot.device == device.id, f"The snapshot is about {snapshot.device}.")
    missing = ", ".join(sorted(set(snapshot.settings) ^ set(snapshot.defaults)))
    _require(not missing, f"Settings without a value or without a default: {missing}.")
    return snapshot


async def check_holders(holders: Holders, device: Device) -> bool:
    """What uses a device holds it, and what cannot be detected is named; return whether the device is held."""
    gaps = [each for each in holders.not_covered(device) if not each.startswith("holders: ")]
    _require(not gaps, f"What is not covered is not reported under holders: {'; '.join(gaps)}.")
    users = {each.identity for each in await holders.list_users(device)}
    report = await holders.list_holders(device)
    found = {each.identity for each in report.holders}
    _require(users <= found, "A process that uses the device is not among its holders.")
    return bool(found or report.uninspected or report.omitted_count)


async def check_unknown_setting(settings: Settings, device: Device) -> None:
    """A setting that the device does not have is omitted, and nothing is written."""
    restored = await settings.restore(device, {_NO_SUCH_SETTING: "1"})
    _require(not restored, f"Settings were written although the device has no {_NO_SUCH_SETTING}: {dict(restored)}.")


async def check_reset_plan(resetter: Resetter, device: Device) -> ResetPlan:
    """A plan is about its device, and says what a possible reset would do."""
    plan = await resetter.plan(device)
    _require(plan.device == device.id, f"The plan is about {plan.device}.")
    _require(plan.method, "The plan has no method.")
    _require(plan.actions or plan.unavailable, "The plan has no actions, and does not say why no reset is possible.")
    _require(device.id not in plan.also_reset, "The device itself is in the list of other devices that are reset.")
    return plan


# --- only on a device that no process and no tenant uses --------------------------------------------------------------


async def check_erasure(eraser: Eraser, holders: Holders, device: Device, request: EraseRequest) -> EraseReport:
    """Every byte is cleared or named, nothing that was read back differs, and nothing is left running."""
    seen: list[EraseProgress] = []
    report = await eraser.erase(device, request, seen.append)
    total, cleared = report.total_bytes, report.cleared_bytes
    _require(total == device.memory_bytes, f"The eraser reports {total} bytes; the inventory {device.memory_bytes}.")
    _require(
        cleared + report.not_covered_bytes == total,
        f"{cleared} of {total} bytes were cleared and {report.not_covered_bytes} not covered: the sum is wrong.",
    )
    _require(cleared == total or report.not_covered, "Not all bytes were cleared, and the rest is not named.")
    verified = report.verified_bytes
    _require(verified is not None or report.not_covered, "Nothing was read back, which is not named.")
    _require(not report.failed_bytes, f"{report.failed_bytes} bytes did not read back as they were written.")
    _require(verified in (None, cleared), f"Only {verified} of {cleared} cleared bytes were read back.")
    _require(request.audit or report.residue_bytes is None, "Residue is reported, although no audit was requested.")
    _require(not report.fence_broken, "Another process opened the device meanwhile.")
    for each in seen:
        _require(0 <= each.done_bytes <= each.total_bytes, f"The progress of {each.phase} is beyond its end.")
    _require(not await holders.is_held(device), "The device is held after it was erased.")
    _require(await eraser.find_orphan(device) is None, "The eraser still has the device after its report.")
    return report


async def check_restored_settings(telemetry: Telemetry, settings: Settings, device: Device) -> Snapshot:
    """The defaults can be written, and are read back."""
    defaults = (await telemetry.snapshot(device)).defaults
    restored = await settings.restore(device, defaults)
    different = ", ".join(sorted(name for name, value in defaults.items() if restored.get(name) != value))
    _require(not different, f"Settings that do not have their default after it was written: {different}.")
    after = await telemetry.snapshot(device)
    _require(after.settings == defaults, "The telemetry shows other settings than those that were restored.")
    return after


async def check_diagnosis(
    diagnostics: Diagnostics, holders: Holders, device: Device, deadline: float
) -> tuple[DiagnosticCheck, ...]:
    """A diagnosis finds no error on a device in order, and leaves no process."""
    checks = await diagnostics.diagnose(device, DiagnosticLevel.QUICK, deadline)
    failed = ", ".join(each.name for each in checks if each.errors)
    _require(not failed, f"The device failed: {failed}.")
    _require(not await holders.is_held(device), "The device is held after its diagnosis.")
    return checks


async def check_reset(resetter: Resetter, telemetry: Telemetry, device: Device, deadline: float) -> Snapshot:
    """A device answers after its reset, without the errors that it had."""
    await resetter.reset(device, deadline)
    after = await telemetry.snapshot(device)
    remaining = ", ".join(map(str, after.errors))
    _require(not remaining, f"The device still reports errors after its reset: {remaining}.")
    return after
