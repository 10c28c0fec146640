"""Every error of the service, split by what the caller does with it.

::

    ScrubberError
    ├── Retry                 ask again; nothing is wrong with the request
    │   ├── NotReady          a scrub is under way, or an earlier pod is not over yet
    │   └── Away              a collaborator (service, kubelet, child) did not answer
    │       └── BeingReset    nobody is asked about the device, because it is being reset
    ├── Refused               asking again changes nothing until somebody acts
    │   ├── InvalidRequest    unknown, duplicate or missing ids; malformed input
    │   ├── Quarantined       the device is out of service
    │   ├── Held              somebody who may not be ended has the device
    │   └── NotPermitted      wrong socket or wrong caller
    ├── DeviceFault           the device is quarantined, its cause is ``code``
    │   ├── Unreadable        no data, or data that makes no sense
    │   ├── Stuck             a call into the driver outlived its deadline
    │   └── Lost              the device fell off the bus
    └── Fatal                 the daemon stops, or refuses every hand-over
        ├── BadConfiguration  a setting, a policy or a path cannot work
        ├── SecondInstance    another instance owns the state or the sockets
        └── LedgerFailure     the durable record is corrupt, full, read-only or newer than this program

The text of an error is for whoever runs the node. ``public`` is what may reach a pod's status: it names device,
state and scrub id, never another tenant, namespace, process or command.
"""

from __future__ import annotations

from scrubber.domain.codes import ErrorCode

__all__ = [
    "Away",
    "BadConfiguration",
    "BeingReset",
    "DeviceFault",
    "Fatal",
    "Held",
    "InvalidRequest",
    "LedgerFailure",
    "Lost",
    "NotPermitted",
    "NotReady",
    "Quarantined",
    "Refused",
    "Retry",
    "ScrubberError",
    "SecondInstance",
    "Stuck",
    "Unreadable",
]


class ScrubberError(Exception):
    """Base of all errors that this project raises on purpose.

    Args:
        message: one sentence for the operator.
        public: one sentence that may be shown to any tenant; ``message`` is never shown in its place.
        code: where there is a more precise one than the class has; text of a service that knows more codes than this one.
    """

    code: ErrorCode | str = ErrorCode.ERROR
    unexplained = "The scrub service refused; its log on the node says why."
    """What may be shown when nobody wrote a sentence for it."""

    def __init__(self, message: str, *, public: str | None = None, code: ErrorCode | str | None = None) -> None:
        super().__init__(message)
        self.public = public or self.unexplained
        if code is not None:
            self.code = code


class Retry(ScrubberError):
    """Nothing is wrong with the request: ask again."""

    code = ErrorCode.RETRY


class NotReady(Retry):
    """A scrub is under way or an earlier pod is not over; it goes on, ask again and join it."""

    code = ErrorCode.NOT_READY


class Away(Retry):
    """A collaborator did not answer in time."""

    code = ErrorCode.AWAY


class BeingReset(Away):
    """Nobody is asked about the device until its reset is over: no silence of anybody's."""

    code = ErrorCode.BEING_RESET


class Refused(ScrubberError):
    """Asking again changes nothing until somebody acts."""

    code = ErrorCode.REFUSED


class InvalidRequest(Refused):
    """The request names unknown, duplicate or no devices, or is malformed. Its text is safe to show to the caller."""

    code = ErrorCode.INVALID_REQUEST

    def __init__(self, message: str, *, public: str | None = None, code: ErrorCode | str | None = None) -> None:
        super().__init__(message, public=public or message, code=code)


class Quarantined(Refused):
    """The device is out of service; the message names the cause and the way back."""

    code = ErrorCode.QUARANTINED


class Held(Refused):
    """Somebody who is not a proved leftover has the device."""

    code = ErrorCode.HELD


class NotPermitted(Refused):
    """The caller asked on the wrong socket or runs under a uid that may not do this."""

    code = ErrorCode.NOT_PERMITTED


class DeviceFault(ScrubberError):
    """The device cannot be trusted now; ``code`` becomes the cause of its quarantine."""

    code = ErrorCode.DEVICE_FAULT
    unexplained = "A device could not be looked at, so it is out of service for now. The start is tried again."


class Unreadable(DeviceFault):
    """The device gave no data, or data that makes no sense."""

    code = ErrorCode.UNREADABLE


class Stuck(DeviceFault):
    """A call into the driver outlived its deadline."""

    code = ErrorCode.DRIVER_STUCK


class Lost(DeviceFault):
    """The device fell off the bus."""

    code = ErrorCode.LOST


class Fatal(ScrubberError):
    """The daemon stops, or refuses every hand-over until somebody acts."""

    code = ErrorCode.FATAL


class BadConfiguration(Fatal):
    """A setting, a policy or a path cannot work; the message says which and what to write instead."""

    code = ErrorCode.BAD_CONFIGURATION


class SecondInstance(Fatal):
    """Another instance owns the state directory or the sockets."""

    code = ErrorCode.SECOND_INSTANCE


class LedgerFailure(Fatal):
    """The ledger is corrupt, full, read-only, or newer than this program. Nothing is handed over meanwhile."""

    code = ErrorCode.LEDGER
    unexplained = (
        "The scrub service cannot keep its record and hands nothing over until it can; its log on the node says why."
    )
