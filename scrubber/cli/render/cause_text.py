"""Messages about a device that is out of service and about its recovery, in the service's own wording."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from scrubber.api import scrubber_pb2 as pb

__all__ = ["AUTOMATIC_RECOVERIES", "OUT_OF_SERVICE", "cause_text", "out_of_service_text", "recovery_text"]

AUTOMATIC_RECOVERIES = ("scrub", "reset", "wait")
"""Recovery methods that the service attempts automatically; the others need an operator."""

OUT_OF_SERVICE = ("quarantined", "condemned")
"""Health of a device that stays out of service until it recovers or an operator releases it."""


def recovery_text(device: pb.Device) -> str:
    """Return what has to happen before the device, which has a cause, returns to service: a full sentence."""
    from scrubber.domain.states import Cause, RecoveryMethod

    if device.health == "probation" and not device.reset_pending:
        return "It returns once it has been scrubbed clean as often as its policy asks for."
    cause, called = device.cause, device.index
    try:
        told = Cause(
            cause.code, cause.message, RecoveryMethod(cause.recovery_method), cause.since, cause.actor
        ).recovery_message
    except ValueError:  # a newer service has another recovery method
        return str(cause.recovery_method) or "-"
    return told.replace(" DEVICE ", f" {called or 'DEVICE'} ")


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
    if not device.HasField("cause"):
        return f"{what}: its state is {device.state}." if device.state not in ("", device.health) else f"{what}."
    return f"{what}: {cause_text(device.cause)} {recovery_text(device)}"
