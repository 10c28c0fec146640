"""Checks of the service's ledger and key: who owns them, whether they are durable, and which process has them open.

Only names, modes and sizes are read: no file in the directory is opened except the lock file, for the PID in it.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

from scrubber.doctor.files import format_mode, lock_holder, user_name
from scrubber.doctor.model import CheckContext, CheckLevel, CheckResult, unknown_result
from scrubber.domain.formatting import format_size

__all__ = ["ledger_disk", "ledger_lock", "signing_key", "state_dir"]

_MIN_FREE_BYTES = 64 << 20
_POD_WRITABLE_DIRECTORIES = ("/var/lib/kubelet", "/var/log", "/var/lib/containerd", "/var/lib/containers")
"""Directories of the node that pods can fill."""
_KEY = "signing.key"  # importing it from its adapter would load a whole cryptographic library


def state_dir(node: CheckContext) -> Iterator[CheckResult]:
    """The state directory is the service's own, private, and on a local disk."""
    path = node.state_dir
    try:
        about = os.stat(path)
        on = node.file_system(path)
    except (FileNotFoundError, NotADirectoryError):
        if node.service.is_available:
            message = f"{path} does not exist; the service has its ledger elsewhere."
            yield CheckResult("state-dir", CheckLevel.WARNING, message, "Pass its directory with --state-dir.")
        else:
            message = f"There is no ledger: {path} does not exist."
            yield CheckResult(
                "state-dir",
                CheckLevel.WARNING,
                message,
                "scrubber serve creates it; or pass its directory with --state-dir.",
            )
        return
    except OSError as error:
        yield unknown_result("state-dir", "the owner of the ledger is unknown", error)
        return
    if not stat.S_ISDIR(about.st_mode):
        message = f"{path} is not a directory, so it cannot contain a ledger."
        yield CheckResult(
            "state-dir", CheckLevel.ERROR, message, "Pass the directory with --state-dir, also to scrubber serve."
        )
    elif about.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        message = f"{path} is writable by other users (mode {format_mode(about)}): the service does not start with it."
        yield CheckResult("state-dir", CheckLevel.ERROR, message, f"chmod 700 {path}")
    elif about.st_uid not in (0, os.geteuid()):
        message = f"{path} belongs to {user_name(about.st_uid)}, who can change the ledger."
        yield CheckResult("state-dir", CheckLevel.ERROR, message, f"chown root: {path}")
    elif on.network_type:
        message = f"{path} is on {on.network_type}, where a ledger cannot be stored safely."
        yield CheckResult(
            "state-dir", CheckLevel.ERROR, message, "Use a directory on a local disk: scrubber serve --state-dir DIR"
        )
    elif on.read_only:
        message = f"{path} is on a read-only file system: nothing can be recorded, so no device is granted."
        yield CheckResult(
            "state-dir", CheckLevel.ERROR, message, "dmesg shows why; then mount -o remount,rw its file system."
        )
    elif about.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
        message = f"Other users may read {path} (mode {format_mode(about)}), which names tenants."
        yield CheckResult("state-dir", CheckLevel.WARNING, message, f"chmod 700 {path}")
    elif on.volatile_type:
        message = (
            f"{path} is on {on.volatile_type}: a reboot deletes the audit log and forgets which devices an "
            "operator quarantined."
        )
        yield CheckResult(
            "state-dir", CheckLevel.WARNING, message, "Use a directory on a disk: scrubber serve --state-dir DIR"
        )
    else:
        owner = user_name(about.st_uid)
        yield CheckResult(
            "state-dir",
            CheckLevel.OK,
            f"{path} is accessible to {owner} only (mode {format_mode(about)}), on a local disk.",
        )


def ledger_disk(node: CheckContext) -> Iterator[CheckResult]:
    """There is space to record events, and pods cannot use it up."""
    # Imported here: otherwise every other command would wait for the adapter.
    from scrubber.adapters.ledger.reserve import RESERVE_BYTES

    path = node.state_dir
    try:
        on = node.file_system(path)
    except (FileNotFoundError, NotADirectoryError):
        return  # the check of the state directory reports it
    except OSError as error:
        yield unknown_result("ledger-disk", "the free space for the ledger is unknown", error)
        return
    room = f"{format_size(on.free_bytes >> 20 << 20)} are free for {path}"
    make = f"Free space on its file system: df {path}, du -x; crictl rmi --prune removes unused images."
    try:
        reserve: os.stat_result | None = os.lstat(path / "ledger.reserve")
    except (FileNotFoundError, NotADirectoryError):
        reserve = None
    except OSError as error:
        yield unknown_result("ledger-disk", f"{room}, and whether the ledger's reserve is complete is unknown", error)
        return
    held = 0 if reserve is None else min(reserve.st_size, reserve.st_blocks * 512)
    if reserve is not None and not stat.S_ISREG(reserve.st_mode):
        message = f"{path / 'ledger.reserve'} is not a regular file: the ledger has no reserved space."
        yield CheckResult(
            "ledger-disk", CheckLevel.ERROR, message, f"Move it away: mv {path / 'ledger.reserve'} /root/; {make}"
        )
        return
    if reserve is not None and held < RESERVE_BYTES:
        message = f"The ledger's reserve is incomplete ({held} of {RESERVE_BYTES} bytes): nothing is granted; {room}."
        yield CheckResult("ledger-disk", CheckLevel.ERROR, message, make)
        return
    if on.free_bytes < _MIN_FREE_BYTES:
        yield CheckResult("ledger-disk", CheckLevel.WARNING, f"Only {room}; a full disk stops every hand-over.", make)
        return
    shared = next((each for each in _pod_writable_directories(node) if _device_of(node, each) == on.device), None)
    if shared is not None:
        message = f"{room}, on the file system of {shared}: pods can fill it, which stops every hand-over."
        remedy = f"Give {path} a separate file system of 1 GiB or more: docs/deploying.md, The ledger's disk."
        yield CheckResult("ledger-disk", CheckLevel.WARNING, message, remedy)
        return
    whole = ", the reserve is complete" if reserve is not None else ""
    yield CheckResult("ledger-disk", CheckLevel.OK, f"{room}{whole}.")


def _pod_writable_directories(node: CheckContext) -> Iterator[Path]:
    yield node.path(node.kubelet_dir)
    yield from (node.path(each) for each in _POD_WRITABLE_DIRECTORIES)


def _device_of(node: CheckContext, path: Path) -> int | None:
    try:
        return node.file_system(path).device
    except OSError:
        return None


def ledger_lock(node: CheckContext) -> Iterator[CheckResult]:
    """The service that answers is the one that has this ledger open."""
    lock = node.state_dir / "ledger.lock"
    answered, name = node.service.is_available, "ledger-lock"
    if answered and not node.state_dir_known:
        return  # the path is a guess, and another owner of it is no evidence about a service that works
    try:
        pid = lock_holder(lock, node.path("/proc/locks"))
    except (FileNotFoundError, NotADirectoryError) as error:
        if error.filename is not None and str(error.filename) != str(lock):
            yield unknown_result(name, "which process has the ledger open is unknown", error)
        elif answered:
            message = (
                f"{lock} does not exist: this is not the ledger of the service that answers, or the file was removed."
            )
            yield CheckResult(
                name, CheckLevel.WARNING, message, "Pass its directory with --state-dir; otherwise restart the service."
            )
        return
    except OSError as error:
        yield unknown_result(name, "which process has the ledger open is unknown", error)
        return
    service_pid = node.service.pid
    if answered and pid is None:
        message = (
            f"No process visible from here holds {lock}: the service that answers has another ledger, or is "
            "in another PID "
        )
        message += "namespace."
        yield CheckResult(
            name,
            CheckLevel.WARNING,
            message,
            "Pass its directory with --state-dir, and run this command on the node itself.",
        )
    elif pid is not None and not answered:
        message = f"PID {pid} has the ledger open, but does not answer on {node.socket_dir}."
        remedy = (
            f"ps -fp {pid} shows the process; pass the directory of its sockets with --socket-dir, or stop "
            f"it: kill {pid}"
        )
        yield CheckResult(name, CheckLevel.WARNING, message, remedy)
    elif pid is None:
        yield CheckResult(name, CheckLevel.OK, "No service has the ledger open.")
    elif service_pid and service_pid != pid:
        message = f"PID {pid} has the ledger open, but the service that answers reports PID {service_pid}."
        remedy = (
            f"ps -fp {pid},{service_pid}: run this command in the service's own PID namespace, or stop the process "
            "that should not run."
        )
        yield CheckResult(name, CheckLevel.WARNING, message, remedy)
    else:
        yield CheckResult(name, CheckLevel.OK, f"The service (PID {pid}) has the ledger open.")


def signing_key(node: CheckContext) -> Iterator[CheckResult]:
    """Only the service can access the key that signs certificates."""
    path = node.state_dir / _KEY
    try:
        about = os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        if node.state_dir_known and node.service.key_id:
            message = (
                f"{path} does not exist, but the service signs: it would sign with a new key after its next start."
            )
            yield CheckResult(
                "signing-key", CheckLevel.WARNING, message, "Restore the file from a copy, or record both keys."
            )
        return
    except OSError as error:
        yield unknown_result("signing-key", "whether others can sign in this node's name is unknown", error)
        return
    if not stat.S_ISREG(about.st_mode):
        message = f"{path} is not a regular file: its creator may know the key."
        yield CheckResult(
            "signing-key", CheckLevel.ERROR, message, f"Move it away, and restart the service: mv {path} /root/"
        )
    elif about.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
        message = f"Other users may read {path} (mode {format_mode(about)}) and sign certificates in this node's name."
        remedy = f"chmod 600 {path}; if another user may have read it, move it away and restart the service."
        yield CheckResult("signing-key", CheckLevel.ERROR, message, remedy)
    elif about.st_size == 0:
        message = f"{path} is empty: the service does not start with it."
        remedy = f"Restore the node's own file; or remove it, and the next start creates a new key: rm {path}"
        yield CheckResult("signing-key", CheckLevel.ERROR, message, remedy)
    elif about.st_uid not in (0, os.geteuid()):
        message = f"{path} belongs to {user_name(about.st_uid)}, who can sign certificates in this node's name."
        yield CheckResult(
            "signing-key", CheckLevel.ERROR, message, f"Move it away, and restart the service: mv {path} /root/"
        )
    else:
        yield CheckResult(
            "signing-key",
            CheckLevel.OK,
            f"{path} is accessible to {user_name(about.st_uid)} only (mode {format_mode(about)}).",
        )
