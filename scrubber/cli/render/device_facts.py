"""What all output says of a device in the same way: its tenants, why it is out of service, and how it recovers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from scrubber.domain.formatting import format_utc

if TYPE_CHECKING:
    from scrubber.api import scrubber_pb2 as pb

__all__ = [
    "AUTOMATIC_RECOVERIES",
    "OUT_OF_SERVICE",
    "blocking_holders",
    "cause_text",
    "holder_text",
    "is_in_use",
    "job_name",
    "out_of_service_text",
    "probation_text",
    "recovery_text",
    "tenant_name",
]

AUTOMATIC_RECOVERIES = ("scrub", "reset", "wait")
"""Recovery methods that the service attempts automatically; the others need an operator."""

OUT_OF_SERVICE = ("quarantined", "condemned")
"""Health of a device that stays out of service until it recovers or an operator releases it."""


def is_in_use(device: pb.Device) -> bool:
    """Return whether the device is in use.

    Grants of a returned device stay open until a scrub has shown that their pods ended.
    """
    return device.hygiene == "in-use"


def tenant_name(device: pb.Device) -> str:
    """Return namespace and pod that the device is assigned to, the claim of several pods, or the job; empty if none."""
    if not is_in_use(device):
        return ""
    claim = f"claim {device.claim.name}" if device.HasField("claim") else ""
    if not (device.pod or claim) and device.HasField("job"):
        return job_name(device.job)
    return "/".join(part for part in (device.tenant, device.pod or claim) if part)


def job_name(job: pb.Job) -> str:
    """Return ``job 4711 of alice``."""
    return f"job {job.id} of {job.user}"


def probation_text(device: pb.Device) -> str:
    """Return the progress of a device on probation: ``0 of 2 clean scrubs; next at 2026-11-18T10:02:11Z``."""
    if device.active_scrub_id:
        then = "the next is running"
    elif is_in_use(device):
        then = "next when it is released"
    else:
        then = f"next at {format_utc(device.next_attempt_at)}" if device.next_attempt_at else "the next is due"
    return f"{device.probation_scrubs_passed} of {device.probation_scrubs_required} clean scrubs; {then}"


def recovery_text(device: pb.Device) -> str:
    """Return what has to happen before the device, which has a cause, returns to service: a full sentence."""
    from scrubber.domain.states import Cause, RecoveryMethod

    if device.health == "probation" and not device.reset_pending:
        return f"It returns to service after its probation: {probation_text(device)}."
    cause, called = device.cause, device.index
    try:
        message = Cause(
            cause.code, cause.message, RecoveryMethod(cause.recovery_method), cause.since, cause.actor
        ).recovery_message
    except ValueError:  # a newer service has another recovery method
        return str(cause.recovery_method) or "-"
    return message.replace(" DEVICE ", f" {called or 'DEVICE'} ")


def blocking_holders(device: pb.Device) -> Sequence[pb.DeviceHolder]:
    """Return the holders beside which the device, which is free, cannot be cleared; none while it is in use."""
    return () if is_in_use(device) else [each for each in device.holders if each.blocking]


def holder_text(holder: pb.DeviceHolder) -> str:
    """Return who the holder is: ``PID 4711 (dcgm-exporter) of monitoring/dcgm-exporter-x since 12:03:00Z``."""
    from scrubber.domain.formatting import format_utc

    pod = f"{holder.namespace}/{holder.pod}" if holder.pod else f"pod {holder.pod_uid}" if holder.pod_uid else ""
    owner = pod or holder.unit
    who = f"PID {holder.pid} ({holder.command or 'unknown'})" if holder.pid else "no process that could be found"
    return f"{who}{f' of {owner}' if owner else ', outside all pods,'} since {format_utc(holder.since)}"


def cause_text(cause: pb.Cause) -> str:
    """Return the cause as a full sentence. It may be an operator's reason, which may lack a full stop."""
    why = cause.message.strip() or cause.code
    return why if why.endswith((".", "!", "?")) else f"{why}."


def out_of_service_text(device: pb.Device) -> str:
    """Return why the device is not handed over; empty where it is."""
    if device.advertised:
        return ""
    word = {"probation": "on probation", "healthy": "out of service", "suspect": "out of service"}.get(device.health)
    what = f"Device {device.index or device.id} is {word or device.health or device.state or 'out of service'}"
    if held := blocking_holders(device):
        return f"{what}: held by {holder_text(held[0])}."
    if not device.HasField("cause"):
        return f"{what}: its state is {device.state}." if device.state not in ("", device.health) else f"{what}."
    return f"{what}: {cause_text(device.cause)} {recovery_text(device)}"
