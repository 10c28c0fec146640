"""What a person reads of a device that is out of service: what leads back, in the words that the service itself has."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from scrubber.api import scrubber_pb2 as pb

__all__ = ["AUTOMATIC_RECOVERIES", "OUT_OF_SERVICE", "cause_text", "out_of_service_text", "recovery_text"]

AUTOMATIC_RECOVERIES = ("scrub", "reset", "wait")
"""Ways back on which the service makes the next attempt; on the others a person does."""

OUT_OF_SERVICE = ("quarantined", "condemned")
"""Health of a device that stays out of service until something leads it back: a recovery, or an operator's release."""


def recovery_text(device: pb.Device) -> str:
    """What has to happen before the device, which has a cause, comes back: a sentence."""
    from scrubber.domain.states import Cause, RecoveryMethod

    if device.health == "probation" and not device.must_reset:
        return "It returns once it has been scrubbed clean as often as its policy asks for."
    cause, called = device.cause, device.index
    try:
        told = Cause(
            cause.code, cause.sentence, RecoveryMethod(cause.way_back), cause.since, cause.actor
        ).recovery_message
    except ValueError:  # a newer service knows another way
        return str(cause.way_back) or "-"
    return told.replace(" DEVICE ", f" {called or 'DEVICE'} ")


def cause_text(cause: pb.Cause) -> str:
    """The cause as a sentence. A person's reason may stand for it, and people write it without a full stop."""
    why = cause.sentence.strip() or cause.code
    return why if why.endswith((".", "!", "?")) else f"{why}."


def out_of_service_text(device: pb.Device) -> str:
    """Why the device is not handed out; empty where it is."""
    if device.offered:
        return ""
    word = {"probation": "on probation", "healthy": "out of service", "suspect": "out of service"}.get(device.health)
    what = f"Device {device.index or device.id} is {word or device.health or device.state or 'out of service'}"
    if not device.HasField("cause"):
        return f"{what}: its state is {device.state}." if device.state not in ("", device.health) else f"{what}."
    return f"{what}: {cause_text(device.cause)} {recovery_text(device)}"
