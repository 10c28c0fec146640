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
_UPDATE_HINT = "Update the kernel and boot: Linux 5.14 or newer, better 6.5."


def kernel(node: CheckContext) -> Iterator[CheckResult]:
    """The kernel names a process by more than a number that another one gets later. It is tried, not read off a version."""
    try:
        release = value_in(read_bytes(node.path("/proc/sys/kernel/osrelease")))
    except OSError:
        release = os.uname().release
    try:
        os.close(os.pidfd_open(os.getpid()))
    except OSError as error:
        if error.errno != errno.ENOSYS:
            yield unknown_result("kernel", f"whether Linux {release} has pidfds was not seen", error)
            return
        message = f"Linux {release} has no pidfds, so no leftover can be signalled without hitting another process."
        yield CheckResult("kernel", CheckLevel.ERROR, message, _UPDATE_HINT)
        return
    if _has_peer_pidfd():
        yield CheckResult("kernel", CheckLevel.OK, f"Linux {release}.")
        return
    message = f"Linux {release} knows the kubelet's process by its number alone, which a later process may get."
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
    """The clock runs: certificates, probations and the audit say when."""
    if node.now < _FIRST_SECOND_OF_2024:
        message = "The clock is before 2024, so certificates and the audit carry times that never were."
        yield CheckResult("clock", CheckLevel.ERROR, message, "timedatectl set-ntp true, or set it: date --set TIME")
        return
    try:
        boot = value_in(read_bytes(node.path("/proc/sys/kernel/random/boot_id")))
    except OSError as error:
        yield unknown_result("clock", "which boot this is was not seen, and what was proved holds for one boot", error)
        return
    yield CheckResult("clock", CheckLevel.OK, f"The clock runs; boot {boot}.")
