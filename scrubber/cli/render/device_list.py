"""The device list: which devices are selected, and a row for each.

A row shows if its device is advertised despite its state, used without a grant, or held by a process that keeps it dirty.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from scrubber.cli.render.device_facts import (
    blocking_holders,
    cause_text,
    holder_text,
    is_in_use,
    probation_text,
    tenant_name,
)
from scrubber.cli.render.output import CommandResult, OutputColumn
from scrubber.domain.formatting import format_size, format_utc

if TYPE_CHECKING:
    from scrubber.api import scrubber_pb2 as pb

__all__ = [
    "device_list_result",
    "format_age",
    "select_devices",
    "yield_notes",
]

_UNAUTHORIZED_USE = "unauthorized-use"

_COLUMNS = (
    OutputColumn("INDEX"),
    OutputColumn("DEVICE", holds_ids=True),
    OutputColumn("HYGIENE"),
    OutputColumn("HEALTH", min_width=12),
    OutputColumn("TENANT", min_width=8),
    OutputColumn("CAUSE", min_width=16),
    OutputColumn("CONTAINER", wide=True),
    OutputColumn("CERTIFICATE", wide=True),
    OutputColumn("MEMORY", wide=True),
    OutputColumn("GRANTS", wide=True),
    OutputColumn("POLICY", wide=True),
    OutputColumn("MODEL", wide=True),
    OutputColumn("MESSAGE", min_width=24, wide=True),
)


def select_devices(devices: Sequence[pb.Device], names: Sequence[str]) -> Sequence[pb.Device]:
    """Return the devices that ``names`` selects, each once; all if it is empty.

    Args:
        names: UUIDs, unique prefixes of UUIDs, or indexes.

    Raises:
        InvalidRequest: a name that matches no device, or more than one.
    """
    from scrubber.cli.client_run import resolve_device

    named = {resolve_device(devices, each).id for each in names}
    return [each for each in devices if not names or each.id in named]


def device_list_result(
    devices: Sequence[pb.Device], info: pb.ServiceInfo | None = None, now: float | None = None
) -> CommandResult:
    """Return devices in all output formats; ``data`` is a list.

    Args:
        info: information about the service, if it was requested.
        now: wall-clock seconds for the age of certificates.
    """
    from scrubber.cli.render import json_objects

    moment = time.time() if now is None else now
    return CommandResult(
        data=[json_objects.device(each) for each in devices],
        names=[each.id for each in devices],
        header=_COLUMNS,
        rows=[_device_row(each, moment) for each in devices],
        empty_message="There are no devices on this node.",
        notes=[*_break_glass_notes(devices), *_breaker_notes(devices, info), *yield_notes(info), *_pause_notes(info)],
        kind="Device",
    )


def _device_row(device: pb.Device, now: float) -> Sequence[str]:
    return (
        device.index,
        device.id,
        device.hygiene or "-",
        _health_text(device),
        tenant_name(device) or "-",
        ", ".join(_cause_codes(device)) or "-",
        (device.container if is_in_use(device) else "") or "-",
        _certificate_age(device, now),
        format_size(device.memory_bytes),
        str(device.grant_count),
        device.policy or "-",
        device.model or "-",
        " ".join(_messages(device)) or "-",
    )


def _health_text(device: pb.Device) -> str:
    """Return the health, with the progress of a probation, and with a remark if the device is handed over regardless."""
    out = device.state not in ("dirty", "scrubbing", "clean", "in-use")
    health = device.health or (device.state if out else "") or "-"
    if health == "probation":
        health = f"{health}, {device.probation_scrubs_passed} of {device.probation_scrubs_required}"
    return f"{health}, advertised" if out and device.advertised else health


def _certificate_age(device: pb.Device, now: float) -> str:
    if not device.HasField("certificate"):
        return "-"
    return "consumed" if device.certificate.HasField("next_grant") else format_age(now - device.certificate.issued_at)


def format_age(seconds: float) -> str:
    """Return a duration in its largest whole unit: ``45s``, ``3m``, ``5h``, ``12d``; at least ``0s``."""
    for unit, length in (("d", 86_400), ("h", 3_600), ("m", 60)):
        if seconds >= length:
            return f"{int(seconds // length)}{unit}"
    return f"{int(max(0.0, seconds))}s"


def _cause_codes(device: pb.Device) -> Iterator[str]:
    if device.HasField("cause"):
        yield device.cause.code
    if device.unauthorized_users and device.cause.code != _UNAUTHORIZED_USE:
        yield _UNAUTHORIZED_USE
    codes = {each.code for each in blocking_holders(device)} - {_UNAUTHORIZED_USE}
    yield from sorted(codes - ({"unknown-holder"} if device.unauthorized_users else set()))


def _messages(device: pb.Device) -> Iterator[str]:
    """Yield the device's problems, and the rules that allow what would otherwise be refused."""
    if device.HasField("cause"):
        yield cause_text(device.cause)
    if device.health == "probation":
        yield f"On probation: {probation_text(device)}."
    yield from device.unauthorized_users
    for holder in blocking_holders(device):
        yield f"Held by {holder_text(holder)}."
    if device.enforcement == "observe":
        yield "Its policy only observes: no hand-over is refused."
    if device.HasField("break_glass"):
        yield f"Break-glass override until {format_utc(device.break_glass.expires_at)}."


def _break_glass_notes(found: Sequence[pb.Device]) -> Iterator[str]:
    for device in found:
        if device.HasField("break_glass"):
            yield (
                f"Device {device.index} ({device.id}) is handed over whatever its checks find until "
                f"{format_utc(device.break_glass.expires_at)}: break-glass override by {device.break_glass.actor} "
                f"({device.break_glass.reason}). To end it, run `scrubber break-glass {device.index} --end --reason …`."
            )


def yield_notes(info: pb.ServiceInfo | None) -> Iterator[str]:
    """Yield why the node is yielded, if it is."""
    for each in info.node_yield.requests if info is not None else ():
        who = "the plugin" if each.requester == "plugin" else each.actor
        end = "the label has its earlier value" if each.requester == "plugin" else "you run `scrubber resume`"
        yield f"The node is yielded, so every device is withheld until {end}: {each.reason} ({who}, {format_utc(each.since)})."


def _pause_notes(info: pb.ServiceInfo | None) -> Iterator[str]:
    """Yield that agents of the node are paused for a reset, if they are."""
    if info is None or not info.HasField("agent_pause"):
        return
    pause = info.agent_pause
    from scrubber.domain.agent_pause import PauseWay  # not at the start of each list: pauses are rare

    if pause.way == PauseWay.EXTERNAL_RESET:
        doing = "is over, and its request is being removed" if pause.ending else "is under way"
        named = ", ".join(pause.device_ids)
        yield f"A reset of {named} by another service {doing} ({format_utc(pause.since)}). {pause.message}".rstrip()
        return
    doing = "were paused for a reset and are being restored" if pause.ending else "are paused for a reset"
    changes = ", ".join(f"{each.key}={each.during}" for each in pause.changes)
    detail = f": {changes}" if changes else ""
    yield f"Agents of the node {doing} (by {pause.way}, {format_utc(pause.since)}){detail}. {pause.message}".rstrip()


def _breaker_notes(found: Sequence[pb.Device], info: pb.ServiceInfo | None) -> Iterator[str]:
    """Yield the automatic actions that the service has suspended for any of these devices."""
    shown = {each.id for each in found}
    if (
        info is not None
        and info.breaker.resets_stopped_reason
        and not shown.isdisjoint(info.breaker.awaiting_reset_ids)
    ):
        again = (
            f" The next reset is allowed at {format_utc(info.breaker.resets_stopped_until)}."
            if info.breaker.resets_stopped_until
            else ""
        )
        yield info.breaker.resets_stopped_reason + again
    if (
        info is not None
        and info.breaker.soft_quarantines_stopped_reason
        and not shown.isdisjoint(info.breaker.kept_in_service_ids)
    ):
        yield info.breaker.soft_quarantines_stopped_reason
