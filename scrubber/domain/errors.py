"""Every error of the service, grouped by what the caller does with it.

::

    ScrubberError
    ├── RetryableError            retry; nothing is wrong with the request
    │   ├── NotReady              a scrub is in progress, or an earlier pod is not over yet
    │   └── Unavailable           a collaborator (service, kubelet, child process) did not answer
    │       ├── BrokenCommand     a backend's command misbehaves; no device is at fault
    │       └── ResetInProgress   the device is not queried, because it is being reset
    ├── Refused                   retrying changes nothing until someone acts
    │   ├── InvalidRequest        unknown, duplicate or missing IDs; malformed input
    │   ├── Quarantined           the device is out of service
    │   ├── DeviceBusy            a process that may not be killed has the device
    │   └── PermissionDenied      wrong socket or wrong caller
    ├── DeviceFault               the device is quarantined, its cause is ``code``
    │   ├── Unreadable            no data, or invalid data
    │   ├── DriverTimeout         a call into the driver exceeded its deadline
    │   └── DeviceLost            the device fell off the bus
    └── FatalError                the daemon stops, or refuses every hand-over
        ├── InvalidConfiguration  a setting, a policy or a path cannot work
        ├── AlreadyRunning        another instance owns the state or the sockets
        └── LedgerFailure         the durable record is corrupt, full, read-only or of an unsupported version

The text of an error is for the node's operator. ``public_message`` is what may reach a pod's status: it names device,
state and scrub ID, never another tenant, namespace, process or command.
"""

from __future__ import annotations

from scrubber.domain.codes import ErrorCode

__all__ = [
    "AlreadyRunning",
    "BrokenCommand",
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
    """Base class of all errors that this project raises on purpose.

    Args:
        message: for the operator, in one sentence.
        public_message: one sentence that may be shown to any tenant; ``message`` is never shown in its place.
        code: a more precise code than that of the class; a plain string if it comes from a service that knows more
            codes.
    """

    code: ErrorCode | str = ErrorCode.ERROR
    default_public_message = "The scrub service refused the request; see its log on the node."
    """Public message of an error that was raised without one."""

    def __init__(self, message: str, *, public_message: str | None = None, code: ErrorCode | str | None = None) -> None:
        super().__init__(message)
        self.public_message = public_message or self.default_public_message
        if code is not None:
            self.code = code


class RetryableError(ScrubberError):
    """Nothing is wrong with the request: retry."""

    code = ErrorCode.RETRYABLE


class NotReady(RetryableError):
    """A scrub is in progress or an earlier pod is not over. The scrub continues: retry to join it."""

    code = ErrorCode.NOT_READY


class Unavailable(RetryableError):
    """A collaborator did not answer in time."""

    code = ErrorCode.UNAVAILABLE


class BrokenCommand(Unavailable):
    """An administrator's program that a backend runs misbehaves; the message names it and what it did.

    It proves nothing about a device, so that a mistake in a program takes no device out of service.
    """

    code = ErrorCode.COMMAND_BROKEN


class ResetInProgress(Unavailable):
    """The device is not queried until its reset has finished; this does not count as a missing answer.

    A command that works on a device for long counts as a reset here.
    """

    code = ErrorCode.RESET_IN_PROGRESS


class Refused(ScrubberError):
    """Retrying changes nothing until someone acts."""

    code = ErrorCode.REFUSED


class InvalidRequest(Refused):
    """The request names unknown, duplicate or no devices, or is malformed. Its text may be shown to the caller."""

    code = ErrorCode.INVALID_REQUEST

    def __init__(self, message: str, *, public_message: str | None = None, code: ErrorCode | str | None = None) -> None:
        super().__init__(message, public_message=public_message or message, code=code)


class Quarantined(Refused):
    """The device is out of service; the message names the cause and how it can return."""

    code = ErrorCode.QUARANTINED


class DeviceBusy(Refused):
    """A process that is not a proved leftover has the device."""

    code = ErrorCode.DEVICE_BUSY


class PermissionDenied(Refused):
    """The request came over the wrong socket or from a UID without permission."""

    code = ErrorCode.PERMISSION_DENIED


class DeviceFault(ScrubberError):
    """The device cannot be trusted now; ``code`` becomes the cause of its quarantine."""

    code = ErrorCode.DEVICE_FAULT
    default_public_message = "A device could not be inspected and is out of service. The start is retried."


class Unreadable(DeviceFault):
    """The device returned no data, or invalid data."""

    code = ErrorCode.DEVICE_UNREADABLE


class DriverTimeout(DeviceFault):
    """A call into the driver exceeded its deadline."""

    code = ErrorCode.DRIVER_TIMEOUT


class DeviceLost(DeviceFault):
    """The device fell off the bus."""

    code = ErrorCode.DEVICE_LOST


class FatalError(ScrubberError):
    """The daemon stops, or refuses every hand-over until someone acts."""

    code = ErrorCode.FATAL_ERROR


class InvalidConfiguration(FatalError):
    """A setting, a policy or a path cannot work; the message names it and a valid replacement."""

    code = ErrorCode.INVALID_CONFIGURATION


class AlreadyRunning(FatalError):
    """Another instance owns the state directory or the sockets."""

    code = ErrorCode.ALREADY_RUNNING


class LedgerFailure(FatalError):
    """The ledger is corrupt, full, read-only, or of an unsupported version. Nothing is handed over in this state."""

    code = ErrorCode.LEDGER_FAILURE
    default_public_message = (
        "The scrub service cannot write its ledger and grants no device until it can; see its log on the node."
    )
