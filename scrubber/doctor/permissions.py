"""Checks of access: who may read and administer, what the caller lacks for either, and the service's capabilities."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from scrubber.api.sockets import Purpose
from scrubber.doctor.files import format_mode, group_name, lock_holder, read_bytes, user_name
from scrubber.doctor.model import AS_ROOT, CheckContext, CheckLevel, CheckResult, unknown_result

__all__ = ["capabilities", "permissions", "service_process", "sockets"]

_NEEDED = {
    1: "CAP_DAC_OVERRIDE",  # the ledger, the kubelet's files
    5: "CAP_KILL",  # leftovers of any user
    19: "CAP_SYS_PTRACE",  # whose descriptors are open
    21: "CAP_SYS_ADMIN",  # resets, compute modes, MIG
}
_PRIVILEGED = (
    "As a pod: privileged: true, as in deploy/kubernetes/base; as a systemd unit: no CapabilityBoundingSet "
    "and User=root, as in deploy/systemd/scrubber.service."
)
_ACTION_NAMES = {Purpose.READ: "read", Purpose.ADMIN: "act", Purpose.PLUGIN: "request hand-overs"}
_SERVICE_PROCESS_UNKNOWN = "The service's process is not visible from here, so its capabilities are unknown."


@dataclass(frozen=True, slots=True)
class _SocketPath:
    """The path to a socket: its directories and itself, as far as they are visible.

    Attributes:
        seen: path and its ``stat`` result, from the top down.
        missing: the part that does not exist; None when all exist.
        hidden: the part that this user may not access; None when all were seen.
    """

    seen: tuple[tuple[Path, os.stat_result], ...]
    missing: Path | None = None
    hidden: Path | None = None


def _inspect_socket_path(node: CheckContext, purpose: Purpose) -> _SocketPath:
    steps = (node.socket_dir, node.socket_dir / purpose.value, node.socket_dir / purpose.socket)
    seen: list[tuple[Path, os.stat_result]] = []
    for path in steps:
        try:
            seen.append((path, os.stat(path)))
        except PermissionError:
            return _SocketPath(tuple(seen), hidden=path)
        except OSError:
            return _SocketPath(tuple(seen), missing=path)
    return _SocketPath(tuple(seen))


def permissions(node: CheckContext) -> Iterator[CheckResult]:
    """The caller may read and act."""
    who = user_name(os.geteuid())
    barred: dict[Purpose, Path] = {}
    for purpose in (Purpose.READ, Purpose.ADMIN):
        way = _inspect_socket_path(node, purpose)
        if way.missing is not None:
            return  # there is no service, which other checks report
        barrier = _first_denied_path(way)
        if barrier is not None:
            barred[purpose] = barrier
    if not barred:
        yield CheckResult("permissions", CheckLevel.OK, f"You are {who}, and may read and act.")
        return
    may = "read, but not act" if Purpose.READ not in barred else "neither read nor act"
    may = "act, but not read" if Purpose.ADMIN not in barred else may
    purpose, barrier = next(reversed(barred.items()))
    message = f"You are {who}, and may {may}: {_ownership_text(barrier)}."
    yield CheckResult("permissions", CheckLevel.WARNING, message, _access_hint(node, purpose))


def _first_denied_path(way: _SocketPath) -> Path | None:
    """Return the first part of the path that denies this user access."""
    for path, about in way.seen:
        access = os.X_OK if stat.S_ISDIR(about.st_mode) else os.W_OK
        if not os.access(path, access, effective_ids=True):
            return path
    return way.hidden


def _ownership_text(path: Path) -> str:
    try:
        about = os.stat(path)
    except OSError:
        return f"{path} is not accessible"
    owner = user_name(about.st_uid)
    return f"{path} belongs to {owner} and the group {group_name(about.st_gid)}, mode {format_mode(about)}"


def _access_hint(node: CheckContext, purpose: Purpose) -> str:
    group = node.service.admin_group if purpose is Purpose.ADMIN else node.service.read_group
    if not group and not node.service.is_available:
        seen = _inspect_socket_path(node, purpose).seen
        gids = {about.st_gid for _, about in seen if about.st_mode & stat.S_IXGRP} - {0}
        group = group_name(gids.pop()) if len(gids) == 1 else ""
    if group:
        return f"usermod -aG {group} USER, then log in again; or run the command as root (sudo scrubber …)."
    flag = "--admin-group" if purpose is Purpose.ADMIN else "--read-group"
    return f"Run the command as root (sudo scrubber …), or start the service with {flag} GROUP and join that group."


def sockets(node: CheckContext) -> Iterator[CheckResult]:
    """Only the service's user, root, and the configured groups can access its sockets."""
    ways = {purpose: _inspect_socket_path(node, purpose) for purpose in Purpose}
    if any(way.missing is not None for way in ways.values()):
        return  # there is no service, which other checks report
    if any(len(way.seen) < 2 for way in ways.values()):
        message = f"{node.socket_dir} is not accessible; who may read and act is unknown."
        yield CheckResult("sockets", CheckLevel.WARNING, message, AS_ROOT)
        return
    fine = True
    for purpose, way in ways.items():
        if _is_world_accessible(way):
            fine = False
            message = (
                f"Every local user may {_ACTION_NAMES[purpose]}: the modes of {way.seen[-1][0]} and its "
                "directories do not prevent it."
            )
            yield CheckResult("sockets", CheckLevel.ERROR, message, f"chmod o-rwx {node.socket_dir / purpose.value}")
    top = next(iter(ways.values())).seen[0][1].st_mode
    if top & stat.S_IWOTH and not top & stat.S_ISVTX:
        fine = False
        message = f"{node.socket_dir} is world-writable, so any user could place other sockets there."
        yield CheckResult("sockets", CheckLevel.ERROR, message, f"chmod o-w {node.socket_dir}")
    admitted = {purpose: gid for purpose, way in ways.items() if (gid := _admitted_group(way)) is not None}
    if (gid := admitted.get(Purpose.PLUGIN)) is not None:
        fine = False
        message = f"Members of the group {group_name(gid)} may {_ACTION_NAMES[Purpose.PLUGIN]}, like the plugin."
        yield CheckResult("sockets", CheckLevel.ERROR, message, f"chmod 0700 {node.socket_dir / Purpose.PLUGIN.value}")
    if fine:
        who = [
            f"the group {group_name(admitted[purpose])} may {_ACTION_NAMES[purpose]}"
            if purpose in admitted
            else f"no group may {_ACTION_NAMES[purpose]}"
            for purpose in (Purpose.READ, Purpose.ADMIN)
        ]
        yield CheckResult(
            "sockets", CheckLevel.OK, f"Apart from root and the service's own user, {who[0]}, and {who[1]}."
        )


def _is_world_accessible(way: _SocketPath) -> bool:
    return all(about.st_mode & (stat.S_IXOTH if stat.S_ISDIR(about.st_mode) else stat.S_IWOTH) for _, about in way.seen)


def _admitted_group(way: _SocketPath) -> int | None:
    """Return the group, other than root's, whose members have access; parts that are hidden from us do not deny it."""
    (_, top), (_, directory), *last = way.seen
    gid = directory.st_gid
    enters = top.st_mode & stat.S_IXOTH or (top.st_gid == gid and top.st_mode & stat.S_IXGRP)
    uses = all(about.st_gid == gid and about.st_mode & stat.S_IWGRP for _, about in last)
    return gid if gid != 0 and enters and directory.st_mode & stat.S_IXGRP and uses else None


def service_process(node: CheckContext) -> int | None:
    """Return the PID of the service that serves the sockets, in the PID namespace of the node's /proc.

    None if there is none.

    Raises:
        OSError: this cannot be determined.
    """
    try:
        return lock_holder(node.socket_dir / "lock", node.path("/proc/locks"))
    except FileNotFoundError as error:
        if error.filename == str(node.path("/proc/locks")):
            raise
        return None


def capabilities(node: CheckContext) -> Iterator[CheckResult]:
    """The service has the capabilities to see every process, to kill leftover processes and to reset devices."""
    if node.service.simulated:
        yield CheckResult("capabilities", CheckLevel.OK, "The simulated node needs no capabilities.")
        return
    name, remedy = "capabilities", f"{AS_ROOT}, on the node or in the service's pod."
    try:
        pid = service_process(node)
        if pid is None:
            if node.service.is_available:
                yield CheckResult(name, CheckLevel.WARNING, _SERVICE_PROCESS_UNKNOWN, remedy)
            return
        status = read_bytes(node.path(f"/proc/{pid}/status"))
    except OSError as error:
        yield unknown_result(name, "whether the service has its capabilities is unknown", error, remedy)
        return
    has = re.search(rb"^CapEff:[ \t]*([0-9a-f]{1,16})$", status, re.MULTILINE)
    uid = re.search(rb"^Uid:[ \t]*[0-9]+[ \t]+([0-9]+)", status, re.MULTILINE)
    if has is None or uid is None:
        message = f"/proc/{pid}/status does not contain the service's capabilities."
        yield CheckResult(name, CheckLevel.WARNING, message, remedy)
        return
    lacking = [each for bit, each in _NEEDED.items() if not int(has[1], 16) >> bit & 1]
    who = f"The service (PID {pid}) runs as {user_name(int(uid[1]))}"
    if lacking:
        level = CheckLevel.ERROR if node.service.has_hardware else CheckLevel.WARNING
        yield CheckResult(
            name, level, f"{who} and lacks {', '.join(lacking)}: it would not detect all users of GPUs.", _PRIVILEGED
        )
        return
    yield CheckResult(name, CheckLevel.OK, f"{who} with all capabilities that it needs.")
