"""What a person reads of a device that is out of service: what leads back, in the words that the service itself has."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from scrubber.api import scrubber_pb2 as pb

__all__ = ["BY_ITSELF", "out_of_service", "said", "way_back"]

BY_ITSELF = ("scrub", "reset", "wait")
"""Ways back on which the service makes the next attempt; on the others a person does."""


def way_back(cause: pb.Cause, called: str) -> str:
    """What has to happen before the device comes back, as a sentence.

    Args:
        called: what stands for the device in a command to be typed, such as its index.
    """
    from scrubber.domain.health import Cause, WayBack

    try:
        told = Cause(cause.code, cause.sentence, WayBack(cause.way_back), cause.since, cause.actor).return_sentence
    except ValueError:  # a newer service knows another way
        return str(cause.way_back) or "-"
    return told.replace(" DEVICE ", f" {called or 'DEVICE'} ")


def said(cause: pb.Cause) -> str:
    """The cause as a sentence. A person's reason may stand for it, and people write it without a full stop."""
    why = cause.sentence.strip() or cause.code
    return why if why.endswith((".", "!", "?")) else f"{why}."


def out_of_service(device: pb.Device) -> str:
    """Why the device is not handed out; empty where it is."""
    if device.offered:
        return ""
    word = {"probation": "on probation", "healthy": "out of service", "suspect": "out of service"}.get(device.health)
    stays = f"Device {device.index or device.id} stays {word or device.health or device.state or 'out of service'}"
    if not device.HasField("cause"):
        return f"{stays}: it is {device.state}." if device.state else f"{stays}."
    return f"{stays}: {said(device.cause)} {way_back(device.cause, device.index)}"
