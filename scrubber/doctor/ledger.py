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
            message = f"{path} is not there; the service has its ledger elsewhere."
            yield CheckResult("state-dir", CheckLevel.WARNING, message, "Give its directory with --state-dir.")
        else:
            message = f"There is no ledger: {path} is not there."
            yield CheckResult(
                "state-dir", CheckLevel.WARNING, message, "scrubber serve makes it; or give it with --state-dir."
            )
        return
    except OSError as error:
        yield unknown_result("state-dir", "whose the ledger is was not seen", error)
        return
    if not stat.S_ISDIR(about.st_mode):
        message = f"{path} is no directory, so no ledger can be in it."
        yield CheckResult(
            "state-dir", CheckLevel.ERROR, message, "Give the directory with --state-dir, to scrubber serve too."
        )
    elif about.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        message = f"Others may write into {path} (mode {format_mode(about)}): the service does not start with it."
        yield CheckResult("state-dir", CheckLevel.ERROR, message, f"chmod 700 {path}")
    elif about.st_uid not in (0, os.geteuid()):
        message = f"{path} belongs to {user_name(about.st_uid)}, who can change the record."
        yield CheckResult("state-dir", CheckLevel.ERROR, message, f"chown root: {path}")
    elif on.network_type:
        message = f"{path} is on {on.network_type}, where a ledger cannot be kept safe."
        yield CheckResult(
            "state-dir", CheckLevel.ERROR, message, "Name a directory on a local disk: scrubber serve --state-dir DIR"
        )
    elif on.read_only:
        message = f"{path} is on a file system that is read-only: nothing can be recorded, so nothing is handed over."
        yield CheckResult(
            "state-dir", CheckLevel.ERROR, message, "dmesg says why; then mount -o remount,rw its file system."
        )
    elif about.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
        message = f"Others may look into {path} (mode {format_mode(about)}), where tenants are named."
        yield CheckResult("state-dir", CheckLevel.WARNING, message, f"chmod 700 {path}")
    elif on.volatile_type:
        message = f"{path} is on {on.volatile_type}: a reboot forgets the audit trail, and which devices a person quarantined goes with it."
        yield CheckResult(
            "state-dir", CheckLevel.WARNING, message, "Name a directory on a disk: scrubber serve --state-dir DIR"
        )
    else:
        owner = user_name(about.st_uid)
        yield CheckResult(
            "state-dir", CheckLevel.OK, f"{path} is {owner}'s alone (mode {format_mode(about)}), on a local disk."
        )


def ledger_disk(node: CheckContext) -> Iterator[CheckResult]:
    """There is room to record what happens, and pods cannot take it."""
    # Imported here: otherwise every other command would wait for the adapter.
    from scrubber.adapters.ledger.reserve import RESERVE_BYTES

    path = node.state_dir
    try:
        on = node.file_system(path)
    except (FileNotFoundError, NotADirectoryError):
        return  # the check of the state directory reports it
    except OSError as error:
        yield unknown_result("ledger-disk", "how much room the ledger has was not seen", error)
        return
    room = f"{format_size(on.free_bytes >> 20 << 20)} are free for {path}"
    make = f"Make room on its file system: df {path}, du -x; crictl rmi --prune gives images back."
    try:
        reserve: os.stat_result | None = os.lstat(path / "ledger.reserve")
    except (FileNotFoundError, NotADirectoryError):
        reserve = None
    except OSError as error:
        yield unknown_result("ledger-disk", f"{room}, and whether the ledger's reserve is whole was not seen", error)
        return
    held = 0 if reserve is None else min(reserve.st_size, reserve.st_blocks * 512)
    if reserve is not None and not stat.S_ISREG(reserve.st_mode):
        message = f"{path / 'ledger.reserve'} is no file: the ledger has no room of its own."
        yield CheckResult(
            "ledger-disk", CheckLevel.ERROR, message, f"Move it away: mv {path / 'ledger.reserve'} /root/; {make}"
        )
        return
    if reserve is not None and held < RESERVE_BYTES:
        message = f"The ledger's reserve is not whole ({held} of {RESERVE_BYTES} bytes): nothing is granted; {room}."
        yield CheckResult("ledger-disk", CheckLevel.ERROR, message, make)
        return
    if on.free_bytes < _MIN_FREE_BYTES:
        yield CheckResult("ledger-disk", CheckLevel.WARNING, f"Only {room}; a full disk stops every hand-over.", make)
        return
    shared = next((each for each in _pod_writable_directories(node) if _device_of(node, each) == on.device), None)
    if shared is not None:
        message = f"{room}, on the file system of {shared}: pods can fill it, and that stops every hand-over."
        remedy = f"Give {path} a file system of its own, of 1 GiB or more: docs/deploying.md, The ledger's disk."
        yield CheckResult("ledger-disk", CheckLevel.WARNING, message, remedy)
        return
    whole = ", the reserve is whole" if reserve is not None else ""
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
    """The service that answers is the one that has this ledger; no other one has it."""
    lock = node.state_dir / "ledger.lock"
    answered, name = node.service.is_available, "ledger-lock"
    if answered and not node.state_dir_known:
        return  # the path is a guess, and another owner of it is no evidence about a service that works
    try:
        pid = lock_holder(lock, node.path("/proc/locks"))
    except (FileNotFoundError, NotADirectoryError) as error:
        if error.filename is not None and str(error.filename) != str(lock):
            yield unknown_result(name, "who has the ledger open was not seen", error)
        elif answered:
            message = f"{lock} is not there: this is not the ledger of the service that answers, or was removed."
            yield CheckResult(
                name, CheckLevel.WARNING, message, "Give its directory with --state-dir; else restart the service."
            )
        return
    except OSError as error:
        yield unknown_result(name, "who has the ledger open was not seen", error)
        return
    said = node.service.pid
    if answered and pid is None:
        message = (
            f"Nobody seen from here has {lock}: the service that answers has another ledger, or is in another PID "
        )
        message += "namespace."
        yield CheckResult(
            name, CheckLevel.WARNING, message, "Give its directory with --state-dir, and call this on the node itself."
        )
    elif pid is not None and not answered:
        message = f"PID {pid} has the ledger open, and does not answer on {node.socket_dir}."
        remedy = (
            f"ps -fp {pid} says what it is; give the directory of its sockets with --socket-dir, or stop it: kill {pid}"
        )
        yield CheckResult(name, CheckLevel.WARNING, message, remedy)
    elif pid is None:
        yield CheckResult(name, CheckLevel.OK, "No service has the ledger open.")
    elif said and said != pid:
        message = f"PID {pid} has the ledger open, and the service that answers says that it is PID {said}."
        remedy = f"ps -fp {pid},{said}: call this in the service's own PID namespace, or stop the one that is too many."
        yield CheckResult(name, CheckLevel.WARNING, message, remedy)
    else:
        yield CheckResult(name, CheckLevel.OK, f"The service (PID {pid}) has the ledger open.")


def signing_key(node: CheckContext) -> Iterator[CheckResult]:
    """The key that signs certificates is the service's alone."""
    path = node.state_dir / _KEY
    try:
        about = os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        if node.state_dir_known and node.service.key_id:
            message = f"{path} is not there, and the service signs: a new key would sign after its next start."
            yield CheckResult(
                "signing-key", CheckLevel.WARNING, message, "Put the file back from a copy, or note both keys."
            )
        return
    except OSError as error:
        yield unknown_result("signing-key", "whether others can sign in this node's name was not seen", error)
        return
    if not stat.S_ISREG(about.st_mode):
        message = f"{path} is no regular file: whoever made it may know the key."
        yield CheckResult(
            "signing-key", CheckLevel.ERROR, message, f"Move it away, and restart the service: mv {path} /root/"
        )
    elif about.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
        message = f"Others may use {path} (mode {format_mode(about)}), and sign certificates in this node's name."
        remedy = f"chmod 600 {path}; if somebody may have read it, move it away and restart the service."
        yield CheckResult("signing-key", CheckLevel.ERROR, message, remedy)
    elif about.st_size == 0:
        message = f"{path} is empty: the service does not start with it."
        remedy = f"Put the node's own file back; or remove it, and the next start makes a new key: rm {path}"
        yield CheckResult("signing-key", CheckLevel.ERROR, message, remedy)
    elif about.st_uid not in (0, os.geteuid()):
        message = f"{path} belongs to {user_name(about.st_uid)}, who can sign certificates in this node's name."
        yield CheckResult(
            "signing-key", CheckLevel.ERROR, message, f"Move it away, and restart the service: mv {path} /root/"
        )
    else:
        yield CheckResult(
            "signing-key", CheckLevel.OK, f"{path} is {user_name(about.st_uid)}'s alone (mode {format_mode(about)})."
        )
