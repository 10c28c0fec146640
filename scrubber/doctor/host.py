"""Checks of the machine itself: a kernel that can identify processes safely, and a clock that runs."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Iterator

from scrubber.adapters.kernel_text import value_in
from scrubber.doctor.files import read_bytes
from scrubber.doctor.model import CheckContext, CheckLevel, CheckResult, unknown_result

__all__ = ["clock", "kernel"]

_FIRST_SECOND_OF_2024 = 1704067200
_SO_PEERPIDFD = 77  # include/uapi/asm-generic/socket.h, Linux 6.5
_UPDATE_HINT = "Update the kernel and reboot: Linux 5.14 or newer, preferably 6.5."


def kernel(node: CheckContext) -> Iterator[CheckResult]:
    """The kernel identifies a process by more than its PID, which is reused. This is tried, not derived from a version."""
    try:
        release = value_in(read_bytes(node.path("/proc/sys/kernel/osrelease")))
    except OSError:
        release = os.uname().release
    try:
        os.close(os.pidfd_open(os.getpid()))
    except OSError as error:
        if error.errno != errno.ENOSYS:
            yield unknown_result("kernel", f"whether Linux {release} has pidfds is unknown", error)
            return
        message = f"Linux {release} has no pidfds, so a signal to a leftover process could hit another process."
        yield CheckResult("kernel", CheckLevel.ERROR, message, _UPDATE_HINT)
        return
    if _has_peer_pidfd():
        yield CheckResult("kernel", CheckLevel.OK, f"Linux {release}.")
        return
    message = f"Linux {release} identifies the kubelet's process by its PID alone, which a later process may get."
    yield CheckResult("kernel", CheckLevel.WARNING, message, _UPDATE_HINT)


def _has_peer_pidfd() -> bool:
    left, right = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    with left, right:
        try:
            os.close(int.from_bytes(left.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD, 4), "little"))
        except OSError:
            return False
    return True


def clock(node: CheckContext) -> Iterator[CheckResult]:
    """The clock is set: certificates, probations and the audit log contain times."""
    if node.now < _FIRST_SECOND_OF_2024:
        message = "The clock is before 2024, so certificates and the audit log have wrong times."
        yield CheckResult("clock", CheckLevel.ERROR, message, "timedatectl set-ntp true, or set it: date --set TIME")
        return
    try:
        boot = value_in(read_bytes(node.path("/proc/sys/kernel/random/boot_id")))
    except OSError as error:
        yield unknown_result("clock", "the boot id is unknown, and what was proved is valid for one boot only", error)
        return
    yield CheckResult("clock", CheckLevel.OK, f"The clock runs; boot {boot}.")
