"""Devices as a list: which of them are meant, a line for each, and what a person must not miss.

That a device is handed out whatever is known of it, or used by somebody to whom nobody gave it, stands in its line.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from scrubber.cli.render.output import CommandResult, OutputColumn
from scrubber.cli.tenancy import tenant_name
from scrubber.domain.formatting import format_size, format_utc

if TYPE_CHECKING:
    from scrubber.api import scrubber_pb2 as pb

__all__ = ["device_list_result", "format_age", "select_devices"]


def select_devices(devices: Sequence[pb.Device], names: Sequence[str]) -> Sequence[pb.Device]:
    """Those of ``devices`` that ``names`` names, each once; all if it names none.

    Args:
        names: UUIDs, unique prefixes of some, or indexes.

    Raises:
        InvalidRequest: a name that no device answers to, or more than one.
    """
    from scrubber.cli.client_run import resolve_device

    named = {resolve_device(devices, each).id for each in names}
    return [each for each in devices if not names or each.id in named]


def device_list_result(
    devices: Sequence[pb.Device], info: pb.ServiceInfo | None = None, now: float | None = None
) -> CommandResult:
    """Devices in all forms; ``data`` is a list.

    Args:
        info: what runs there, where that was asked: the node's own policy then need not be named at every device.
        now: wall-clock seconds as of which a certificate has its age.
    """
    from scrubber.cli.render import json_objects

    usual = "" if info is None else info.policy
    moment = time.time() if now is None else now
    return CommandResult(
        data=[json_objects.device(each) for each in devices],
        names=[each.id for each in devices],
        header=(
            OutputColumn("INDEX"),
            OutputColumn("DEVICE", holds_ids=True),
            OutputColumn("HYGIENE"),
            OutputColumn("HEALTH", min_width=12),
            OutputColumn("TENANT", min_width=14),
            OutputColumn("CERTIFICATE"),
            OutputColumn("MEMORY", drop_priority=1),
            OutputColumn("GRANTS", drop_priority=2),
            OutputColumn("POLICY", drop_priority=3),
            OutputColumn("MODEL", drop_priority=4),
            OutputColumn("CAUSE", min_width=32, can_move_below=True),
        ),
        rows=[_device_row(each, usual, moment) for each in devices],
        empty_message="There are no devices on this node.",
        notes=[*_break_glass_notes(devices), *_breaker_notes(devices, info)],
        kind="Device",
    )


def _device_row(device: pb.Device, usual: str, now: float) -> Sequence[str]:
    return (
        device.index,
        device.id,
        device.hygiene or "-",
        _health_text(device),
        tenant_name(device) or "-",
        _certificate_age(device, now),
        format_size(device.memory_bytes),
        str(device.grants),
        device.policy if device.policy not in ("", usual) else "-",
        device.model or "-",
        " ".join(_cause_texts(device)) or "-",
    )


def _health_text(device: pb.Device) -> str:
    """The health, and where it is not the whole of it: a device that is out of service and handed out all the same."""
    out = device.state not in ("dirty", "scrubbing", "clean", "in-use")
    health = device.health or (device.state if out else "-")
    return f"{health}, offered" if out and device.offered else health


def _certificate_age(device: pb.Device, now: float) -> str:
    if not device.HasField("certificate"):
        return "-"
    return "used" if device.certificate.HasField("next_grant") else format_age(now - device.certificate.issued_at)


def format_age(seconds: float) -> str:
    """A time in its largest whole unit: ``45s``, ``3m``, ``5h``, ``12d``. Nothing is younger than ``0s``."""
    for unit, length in (("d", 86_400), ("h", 3_600), ("m", 60)):
        if seconds >= length:
            return f"{int(seconds // length)}{unit}"
    return f"{int(max(0.0, seconds))}s"


def _cause_texts(device: pb.Device) -> Iterator[str]:
    """Why it is as it is, and what of its rules lets through what they refuse."""
    if device.HasField("cause"):
        yield f"{device.cause.code}: {device.cause.sentence}"
    yield from device.strangers
    if device.enforcement == "observe":
        yield "Observed only: nothing is refused for it."
    if device.HasField("glass"):
        yield f"Glass broken until {format_utc(device.glass.until)}."


def _break_glass_notes(found: Sequence[pb.Device]) -> Iterator[str]:
    for device in found:
        if device.HasField("glass"):
            yield (
                f"Until {format_utc(device.glass.until)} nothing is refused for device {device.index} ({device.id}), whatever "
                f"is known of it: {device.glass.actor} broke the glass ({device.glass.reason}). "
                f"scrubber break-glass {device.index} --end --reason … ends that now."
            )


def _breaker_notes(found: Sequence[pb.Device], info: pb.ServiceInfo | None) -> Iterator[str]:
    """What the service no longer does by itself to any of these devices."""
    shown = {each.id for each in found}
    if info is not None and info.breaker.resets and not shown.isdisjoint(info.breaker.waiting):
        again = f" The next one may be at {format_utc(info.breaker.resets_until)}." if info.breaker.resets_until else ""
        yield info.breaker.resets + again
    if info is not None and info.breaker.soft and not shown.isdisjoint(info.breaker.spared):
        yield info.breaker.soft
