"""Every error of the service, split by what the caller does with it.

::

    ScrubberError
    ├── RetryableError            ask again; nothing is wrong with the request
    │   ├── NotReady              a scrub is under way, or an earlier pod is not over yet
    │   └── Unavailable           a collaborator (service, kubelet, child) did not answer
    │       └── ResetInProgress   nobody is asked about the device, because it is being reset
    ├── Refused                   asking again changes nothing until somebody acts
    │   ├── InvalidRequest        unknown, duplicate or missing ids; malformed input
    │   ├── Quarantined           the device is out of service
    │   ├── DeviceBusy            somebody who may not be ended has the device
    │   └── PermissionDenied      wrong socket or wrong caller
    ├── DeviceFault               the device is quarantined, its cause is ``code``
    │   ├── Unreadable            no data, or data that makes no sense
    │   ├── DriverTimeout         a call into the driver outlived its deadline
    │   └── DeviceLost            the device fell off the bus
    └── FatalError                the daemon stops, or refuses every hand-over
        ├── InvalidConfiguration  a setting, a policy or a path cannot work
        ├── AlreadyRunning        another instance owns the state or the sockets
        └── LedgerFailure         the durable record is corrupt, full, read-only or newer than this program

The text of an error is for whoever runs the node. ``public_message`` is what may reach a pod's status: it names device,
state and scrub id, never another tenant, namespace, process or command.
"""

from __future__ import annotations

from scrubber.domain.codes import ErrorCode

__all__ = [
    "AlreadyRunning",
    "DeviceBusy",
    "DeviceFault",
    "DeviceLost",
    "DriverTimeout",
    "FatalError",
    "InvalidConfiguration",
    "InvalidRequest",
    "LedgerFailure",
    "NotReady",
    "PermissionDenied",
    "Quarantined",
    "Refused",
    "ResetInProgress",
    "RetryableError",
    "ScrubberError",
    "Unavailable",
    "Unreadable",
]


class ScrubberError(Exception):
    """Base of all errors that this project raises on purpose.

    Args:
        message: one sentence for the operator.
        public_message: one sentence that may be shown to any tenant; ``message`` is never shown in its place.
        code: where there is a more precise one than the class has; text of a service that knows more codes than this one.
    """

    code: ErrorCode | str = ErrorCode.ERROR
    default_public_message = "The scrub service refused; its log on the node says why."
    """What may be shown when nobody wrote a sentence for it."""

    def __init__(self, message: str, *, public_message: str | None = None, code: ErrorCode | str | None = None) -> None:
        super().__init__(message)
        self.public_message = public_message or self.default_public_message
        if code is not None:
            self.code = code


class RetryableError(ScrubberError):
    """Nothing is wrong with the request: ask again."""

    code = ErrorCode.RETRYABLE


class NotReady(RetryableError):
    """A scrub is under way or an earlier pod is not over; it goes on, ask again and join it."""

    code = ErrorCode.NOT_READY


class Unavailable(RetryableError):
    """A collaborator did not answer in time."""

    code = ErrorCode.UNAVAILABLE


class ResetInProgress(Unavailable):
    """Nobody is asked about the device until its reset is over: no silence of anybody's."""

    code = ErrorCode.RESET_IN_PROGRESS


class Refused(ScrubberError):
    """Asking again changes nothing until somebody acts."""

    code = ErrorCode.REFUSED


class InvalidRequest(Refused):
    """The request names unknown, duplicate or no devices, or is malformed. Its text is safe to show to the caller."""

    code = ErrorCode.INVALID_REQUEST

    def __init__(self, message: str, *, public_message: str | None = None, code: ErrorCode | str | None = None) -> None:
        super().__init__(message, public_message=public_message or message, code=code)


class Quarantined(Refused):
    """The device is out of service; the message names the cause and the way back."""

    code = ErrorCode.QUARANTINED


class DeviceBusy(Refused):
    """Somebody who is not a proved leftover has the device."""

    code = ErrorCode.DEVICE_BUSY


class PermissionDenied(Refused):
    """The caller asked on the wrong socket or runs under a uid that may not do this."""

    code = ErrorCode.PERMISSION_DENIED


class DeviceFault(ScrubberError):
    """The device cannot be trusted now; ``code`` becomes the cause of its quarantine."""

    code = ErrorCode.DEVICE_FAULT
    default_public_message = (
        "A device could not be looked at, so it is out of service for now. The start is tried again."
    )


class Unreadable(DeviceFault):
    """The device gave no data, or data that makes no sense."""

    code = ErrorCode.DEVICE_UNREADABLE


class DriverTimeout(DeviceFault):
    """A call into the driver outlived its deadline."""

    code = ErrorCode.DRIVER_TIMEOUT


class DeviceLost(DeviceFault):
    """The device fell off the bus."""

    code = ErrorCode.DEVICE_LOST


class FatalError(ScrubberError):
    """The daemon stops, or refuses every hand-over until somebody acts."""

    code = ErrorCode.FATAL_ERROR


class InvalidConfiguration(FatalError):
    """A setting, a policy or a path cannot work; the message says which and what to write instead."""

    code = ErrorCode.INVALID_CONFIGURATION


class AlreadyRunning(FatalError):
    """Another instance owns the state directory or the sockets."""

    code = ErrorCode.ALREADY_RUNNING


class LedgerFailure(FatalError):
    """The ledger is corrupt, full, read-only, or newer than this program. Nothing is handed over meanwhile."""

    code = ErrorCode.LEDGER_FAILURE
    default_public_message = (
        "The scrub service cannot keep its record and hands nothing over until it can; its log on the node says why."
    )
