"""Devices as a list: which of them are meant, a line for each, and what a person must not miss.

That a device is handed out whatever is known of it, or used by somebody to whom nobody gave it, stands in its line.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from scrubber.cli.having import holder
from scrubber.cli.output import Answer, Column
from scrubber.domain.quantities import binary_size, utc

if TYPE_CHECKING:
    from scrubber.api import scrubber_pb2 as pb

__all__ = ["age", "answer", "chosen"]


def chosen(found: Sequence[pb.Device], wanted: Sequence[str]) -> Sequence[pb.Device]:
    """Those of ``found`` that ``wanted`` names, each once; all if it names none.

    Args:
        wanted: UUIDs, unique prefixes of some, or indexes.

    Raises:
        InvalidRequest: a name that no device answers to, or more than one.
    """
    from scrubber.cli.naming import find

    named = {find(found, each).id for each in wanted}
    return [each for each in found if not wanted or each.id in named]


def answer(found: Sequence[pb.Device], info: pb.ServiceInfo | None = None, now: float | None = None) -> Answer:
    """Devices in all forms; ``data`` is a list.

    Args:
        info: what runs there, where that was asked: the node's own policy then need not be named at every device.
        now: wall-clock seconds as of which a certificate has its age.
    """
    from scrubber.cli import shapes

    usual = "" if info is None else info.policy
    moment = time.time() if now is None else now
    return Answer(
        data=[shapes.device(each) for each in found],
        names=[each.id for each in found],
        header=(
            Column("INDEX"),
            Column("DEVICE", ids=True),
            Column("HYGIENE"),
            Column("HEALTH", least=12),
            Column("TENANT", least=14),
            Column("CERTIFICATE"),
            Column("MEMORY", drop=1),
            Column("GRANTS", drop=2),
            Column("POLICY", drop=3),
            Column("MODEL", drop=4),
            Column("CAUSE", least=32, below=True),
        ),
        rows=[_row(each, usual, moment) for each in found],
        empty="There are no devices on this node.",
        notes=[*_broken(found), *_stopped(found, info)],
        kind="Device",
    )


def _row(device: pb.Device, usual: str, now: float) -> Sequence[str]:
    return (
        device.index,
        device.id,
        device.hygiene or "-",
        _health(device),
        holder(device) or "-",
        _certificate(device, now),
        binary_size(device.memory_bytes),
        str(device.grants),
        device.policy if device.policy not in ("", usual) else "-",
        device.model or "-",
        " ".join(_reasons(device)) or "-",
    )


def _health(device: pb.Device) -> str:
    """The health, and where it is not the whole of it: a device that is out of service and handed out all the same."""
    out = device.state not in ("dirty", "scrubbing", "clean", "in-use")
    health = device.health or (device.state if out else "-")
    return f"{health}, offered" if out and device.offered else health


def _certificate(device: pb.Device, now: float) -> str:
    if not device.HasField("certificate"):
        return "-"
    return "used" if device.certificate.HasField("next_grant") else age(now - device.certificate.issued_at)


def age(seconds: float) -> str:
    """A time in its largest whole unit: ``45s``, ``3m``, ``5h``, ``12d``. Nothing is younger than ``0s``."""
    for unit, length in (("d", 86_400), ("h", 3_600), ("m", 60)):
        if seconds >= length:
            return f"{int(seconds // length)}{unit}"
    return f"{int(max(0.0, seconds))}s"


def _reasons(device: pb.Device) -> Iterator[str]:
    """Why it is as it is, and what of its rules lets through what they refuse."""
    if device.HasField("cause"):
        yield f"{device.cause.code}: {device.cause.sentence}"
    yield from device.strangers
    if device.enforcement == "observe":
        yield "Observed only: nothing is refused for it."
    if device.HasField("glass"):
        yield f"Glass broken until {utc(device.glass.until)}."


def _broken(found: Sequence[pb.Device]) -> Iterator[str]:
    for device in found:
        if device.HasField("glass"):
            yield (
                f"Until {utc(device.glass.until)} nothing is refused for device {device.index} ({device.id}), whatever "
                f"is known of it: {device.glass.actor} broke the glass ({device.glass.reason}). "
                f"scrubber break-glass {device.index} --end --reason … ends that now."
            )


def _stopped(found: Sequence[pb.Device], info: pb.ServiceInfo | None) -> Iterator[str]:
    """What the service no longer does by itself to any of these devices."""
    shown = {each.id for each in found}
    if info is not None and info.breaker.resets and not shown.isdisjoint(info.breaker.waiting):
        again = f" The next one may be at {utc(info.breaker.resets_until)}." if info.breaker.resets_until else ""
        yield info.breaker.resets + again
    if info is not None and info.breaker.soft and not shown.isdisjoint(info.breaker.spared):
        yield info.breaker.soft
