"""Where the service keeps its record and its key: whose it is, whether it lasts, and who has it open.

Only names, modes and sizes are looked at: nothing in the directory is opened but the lock's note of who has it.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

from scrubber.doctor.finding import Check, Level, Node, unseen
from scrubber.doctor.looking import lock_holder, mode_of, user_name
from scrubber.domain.quantities import binary_size

__all__ = ["ledger_disk", "ledger_lock", "signing_key", "state_dir"]

_LITTLE = 64 << 20
_TENANTS = ("/var/lib/kubelet", "/var/log", "/var/lib/containerd", "/var/lib/containers")
"""Places of the node that pods can fill."""
_KEY = "signing.key"  # its adapter would load all of a cryptographic library to say so


def state_dir(node: Node) -> Iterator[Check]:
    """The state directory is the service's own, private, and on a local disk."""
    path = node.state_dir
    try:
        about = os.stat(path)
        on = node.file_system(path)
    except (FileNotFoundError, NotADirectoryError):
        if node.service.answered:
            sentence = f"{path} is not there; the service has its ledger elsewhere."
            yield Check("state-dir", Level.WARNING, sentence, "Give its directory with --state-dir.")
        else:
            sentence = f"There is no ledger: {path} is not there."
            yield Check("state-dir", Level.WARNING, sentence, "scrubber serve makes it; or give it with --state-dir.")
        return
    except OSError as error:
        yield unseen("state-dir", "whose the ledger is was not seen", error)
        return
    if not stat.S_ISDIR(about.st_mode):
        sentence = f"{path} is no directory, so no ledger can be in it."
        yield Check("state-dir", Level.ERROR, sentence, "Give the directory with --state-dir, to scrubber serve too.")
    elif about.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        sentence = f"Others may write into {path} (mode {mode_of(about)}): the service does not start with it."
        yield Check("state-dir", Level.ERROR, sentence, f"chmod 700 {path}")
    elif about.st_uid not in (0, os.geteuid()):
        sentence = f"{path} belongs to {user_name(about.st_uid)}, who can change the record."
        yield Check("state-dir", Level.ERROR, sentence, f"chown root: {path}")
    elif on.network:
        sentence = f"{path} is on {on.network}, where a ledger cannot be kept safe."
        yield Check(
            "state-dir", Level.ERROR, sentence, "Name a directory on a local disk: scrubber serve --state-dir DIR"
        )
    elif on.read_only:
        sentence = f"{path} is on a file system that is read-only: nothing can be recorded, so nothing is handed over."
        yield Check("state-dir", Level.ERROR, sentence, "dmesg says why; then mount -o remount,rw its file system.")
    elif about.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
        sentence = f"Others may look into {path} (mode {mode_of(about)}), where tenants are named."
        yield Check("state-dir", Level.WARNING, sentence, f"chmod 700 {path}")
    elif on.memory:
        sentence = f"{path} is on {on.memory}: a reboot forgets the audit trail, and which devices a person quarantined goes with it."
        yield Check("state-dir", Level.WARNING, sentence, "Name a directory on a disk: scrubber serve --state-dir DIR")
    else:
        owner = user_name(about.st_uid)
        yield Check("state-dir", Level.OK, f"{path} is {owner}'s alone (mode {mode_of(about)}), on a local disk.")


def ledger_disk(node: Node) -> Iterator[Check]:
    """There is room to record what happens, and pods cannot take it."""
    # Imported here: every other command would wait for the adapter.
    from scrubber.adapters.ledger.reserve import RESERVE_BYTES

    path = node.state_dir
    try:
        on = node.file_system(path)
    except (FileNotFoundError, NotADirectoryError):
        return  # as the check of the directory says
    except OSError as error:
        yield unseen("ledger-disk", "how much room the ledger has was not seen", error)
        return
    room = f"{binary_size(on.free >> 20 << 20)} are free for {path}"
    make = f"Make room on its file system: df {path}, du -x; crictl rmi --prune gives images back."
    try:
        reserve: os.stat_result | None = os.lstat(path / "ledger.reserve")
    except (FileNotFoundError, NotADirectoryError):
        reserve = None
    except OSError as error:
        yield unseen("ledger-disk", f"{room}, and whether the ledger's reserve is whole was not seen", error)
        return
    held = 0 if reserve is None else min(reserve.st_size, reserve.st_blocks * 512)
    if reserve is not None and not stat.S_ISREG(reserve.st_mode):
        sentence = f"{path / 'ledger.reserve'} is no file: the ledger has no room of its own."
        yield Check("ledger-disk", Level.ERROR, sentence, f"Move it away: mv {path / 'ledger.reserve'} /root/; {make}")
        return
    if reserve is not None and held < RESERVE_BYTES:
        sentence = f"The ledger's reserve is not whole ({held} of {RESERVE_BYTES} bytes): nothing is granted; {room}."
        yield Check("ledger-disk", Level.ERROR, sentence, make)
        return
    if on.free < _LITTLE:
        yield Check("ledger-disk", Level.WARNING, f"Only {room}; a full disk stops every hand-over.", make)
        return
    shared = next((each for each in _tenants_places(node) if _device_of(node, each) == on.device), None)
    if shared is not None:
        sentence = f"{room}, on the file system of {shared}: pods can fill it, and that stops every hand-over."
        remedy = f"Give {path} a file system of its own, of 1 GiB or more: docs/deploying.md, The ledger's disk."
        yield Check("ledger-disk", Level.WARNING, sentence, remedy)
        return
    whole = ", the reserve is whole" if reserve is not None else ""
    yield Check("ledger-disk", Level.OK, f"{room}{whole}.")


def _tenants_places(node: Node) -> Iterator[Path]:
    yield node.path(node.kubelet_dir)
    yield from (node.path(each) for each in _TENANTS)


def _device_of(node: Node, path: Path) -> int | None:
    try:
        return node.file_system(path).device
    except OSError:
        return None


def ledger_lock(node: Node) -> Iterator[Check]:
    """The service that answers is the one that has this ledger; no other one has it."""
    lock = node.state_dir / "ledger.lock"
    answered, name = node.service.answered, "ledger-lock"
    if answered and not node.state_dir_known:
        return  # it is a guess, and who has something else says nothing of a service that works
    try:
        pid = lock_holder(lock, node.path("/proc/locks"))
    except (FileNotFoundError, NotADirectoryError) as error:
        if error.filename is not None and str(error.filename) != str(lock):
            yield unseen(name, "who has the ledger open was not seen", error)
        elif answered:
            sentence = f"{lock} is not there: this is not the ledger of the service that answers, or was removed."
            yield Check(name, Level.WARNING, sentence, "Give its directory with --state-dir; else restart the service.")
        return
    except OSError as error:
        yield unseen(name, "who has the ledger open was not seen", error)
        return
    said = node.service.pid
    if answered and pid is None:
        sentence = (
            f"Nobody seen from here has {lock}: the service that answers has another ledger, or is in another PID "
        )
        sentence += "namespace."
        yield Check(
            name, Level.WARNING, sentence, "Give its directory with --state-dir, and call this on the node itself."
        )
    elif pid is not None and not answered:
        sentence = f"PID {pid} has the ledger open, and does not answer on {node.sockets}."
        remedy = (
            f"ps -fp {pid} says what it is; give the directory of its sockets with --socket, or stop it: kill {pid}"
        )
        yield Check(name, Level.WARNING, sentence, remedy)
    elif pid is None:
        yield Check(name, Level.OK, "No service has the ledger open.")
    elif said and said != pid:
        sentence = f"PID {pid} has the ledger open, and the service that answers says that it is PID {said}."
        remedy = f"ps -fp {pid},{said}: call this in the service's own PID namespace, or stop the one that is too many."
        yield Check(name, Level.WARNING, sentence, remedy)
    else:
        yield Check(name, Level.OK, f"The service (PID {pid}) has the ledger open.")


def signing_key(node: Node) -> Iterator[Check]:
    """The key that signs certificates is the service's alone."""
    path = node.state_dir / _KEY
    try:
        about = os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        if node.state_dir_known and node.service.key:
            sentence = f"{path} is not there, and the service signs: a new key would sign after its next start."
            yield Check("signing-key", Level.WARNING, sentence, "Put the file back from a copy, or note both keys.")
        return
    except OSError as error:
        yield unseen("signing-key", "whether others can sign in this node's name was not seen", error)
        return
    if not stat.S_ISREG(about.st_mode):
        sentence = f"{path} is no regular file: whoever made it may know the key."
        yield Check("signing-key", Level.ERROR, sentence, f"Move it away, and restart the service: mv {path} /root/")
    elif about.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
        sentence = f"Others may use {path} (mode {mode_of(about)}), and sign certificates in this node's name."
        remedy = f"chmod 600 {path}; if somebody may have read it, move it away and restart the service."
        yield Check("signing-key", Level.ERROR, sentence, remedy)
    elif about.st_size == 0:
        sentence = f"{path} is empty: the service does not start with it."
        remedy = f"Put the node's own file back; or remove it, and the next start makes a new key: rm {path}"
        yield Check("signing-key", Level.ERROR, sentence, remedy)
    elif about.st_uid not in (0, os.geteuid()):
        sentence = f"{path} belongs to {user_name(about.st_uid)}, who can sign certificates in this node's name."
        yield Check("signing-key", Level.ERROR, sentence, f"Move it away, and restart the service: mv {path} /root/")
    else:
        yield Check("signing-key", Level.OK, f"{path} is {user_name(about.st_uid)}'s alone (mode {mode_of(about)}).")
