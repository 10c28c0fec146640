"""Who may look, who may act, what whoever calls this lacks for either, and whether the service itself may do its work."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from scrubber.api.sockets import Purpose
from scrubber.doctor.finding import AS_ROOT, Check, Level, Node, unseen
from scrubber.doctor.looking import group_name, lock_holder, mode_of, read_bytes, user_name

__all__ = ["capabilities", "permissions", "service_process", "sockets"]

_NEEDED = {
    1: "CAP_DAC_OVERRIDE",  # the ledger, the kubelet's files
    5: "CAP_KILL",  # leftovers of any user
    19: "CAP_SYS_PTRACE",  # whose descriptors are open
    21: "CAP_SYS_ADMIN",  # resets, compute modes, MIG
}
_PRIVILEGED = (
    "As a pod: privileged: true, as in deploy/kubernetes/base; as a unit: no CapabilityBoundingSet and User=root, as in "
    "deploy/systemd/scrubber.service."
)
_DEEDS = {Purpose.READ: "look", Purpose.ADMIN: "act", Purpose.PLUGIN: "ask for hand-overs"}
_UNSEEN_SERVICE = "The process of the service is not seen from here, nor whether it may do its work."


@dataclass(frozen=True, slots=True)
class _Way:
    """The way to a socket: its directories and itself, as far as they can be seen.

    Attributes:
        seen: path and what stands there, from the top on.
        missing: what is not there; None when all is.
        hidden: what this user may not look behind; None when all was seen.
    """

    seen: tuple[tuple[Path, os.stat_result], ...]
    missing: Path | None = None
    hidden: Path | None = None


def _way_to(node: Node, purpose: Purpose) -> _Way:
    steps = (node.sockets, node.sockets / purpose.value, node.sockets / purpose.socket)
    seen: list[tuple[Path, os.stat_result]] = []
    for path in steps:
        try:
            seen.append((path, os.stat(path)))
        except PermissionError:
            return _Way(tuple(seen), hidden=path)
        except OSError:
            return _Way(tuple(seen), missing=path)
    return _Way(tuple(seen))


def permissions(node: Node) -> Iterator[Check]:
    """Whoever calls this may look, and may act."""
    who = user_name(os.geteuid())
    barred: dict[Purpose, Path] = {}
    for purpose in (Purpose.READ, Purpose.ADMIN):
        way = _way_to(node, purpose)
        if way.missing is not None:
            return  # there is no service, as others say
        barrier = _barrier(way)
        if barrier is not None:
            barred[purpose] = barrier
    if not barred:
        yield Check("permissions", Level.OK, f"You are {who}, and may look and act.")
        return
    may = "look, and not act" if Purpose.READ not in barred else "neither look nor act"
    may = "act, and not look" if Purpose.ADMIN not in barred else may
    purpose, barrier = next(reversed(barred.items()))
    sentence = f"You are {who}, and may {may}: {_belongs(barrier)}."
    yield Check("permissions", Level.WARNING, sentence, _what_lets_in(node, purpose))


def _barrier(way: _Way) -> Path | None:
    """The first thing on the way that keeps this user out."""
    for path, about in way.seen:
        wanted = os.X_OK if stat.S_ISDIR(about.st_mode) else os.W_OK
        if not os.access(path, wanted, effective_ids=True):
            return path
    return way.hidden


def _belongs(path: Path) -> str:
    try:
        about = os.stat(path)
    except OSError:
        return f"{path} cannot be seen"
    owner = user_name(about.st_uid)
    return f"{path} is {owner}'s and the group {group_name(about.st_gid)}'s, mode {mode_of(about)}"


def _what_lets_in(node: Node, purpose: Purpose) -> str:
    group = node.service.admin_group if purpose is Purpose.ADMIN else node.service.read_group
    if not group and not node.service.answered:
        seen = _way_to(node, purpose).seen
        gids = {about.st_gid for _, about in seen if about.st_mode & stat.S_IXGRP} - {0}
        group = group_name(gids.pop()) if len(gids) == 1 else ""
    if group:
        return f"usermod -aG {group} USER, and log in anew; or call it as root (sudo scrubber …)."
    flag = "--admin-group" if purpose is Purpose.ADMIN else "--read-group"
    return f"Call it as root (sudo scrubber …), or start the service with {flag} GROUP and become a member of it."


def sockets(node: Node) -> Iterator[Check]:
    """Nobody but the service's user, root, and the groups that it names gets to its sockets."""
    ways = {purpose: _way_to(node, purpose) for purpose in Purpose}
    if any(way.missing is not None for way in ways.values()):
        return  # there is no service, as others say
    if any(len(way.seen) < 2 for way in ways.values()):
        sentence = f"{node.sockets} cannot be looked into; who may look and act was not seen."
        yield Check("sockets", Level.WARNING, sentence, AS_ROOT)
        return
    fine = True
    for purpose, way in ways.items():
        if _admits_everybody(way):
            fine = False
            sentence = f"Every local user may {_DEEDS[purpose]}: no mode keeps anybody from {way.seen[-1][0]}."
            yield Check("sockets", Level.ERROR, sentence, f"chmod o-rwx {node.sockets / purpose.value}")
    top = next(iter(ways.values())).seen[0][1].st_mode
    if top & stat.S_IWOTH and not top & stat.S_ISVTX:
        fine = False
        sentence = f"Everybody may write {node.sockets}, and so put other sockets there."
        yield Check("sockets", Level.ERROR, sentence, f"chmod o-w {node.sockets}")
    admitted = {purpose: gid for purpose, way in ways.items() if (gid := _admitted_group(way)) is not None}
    if (gid := admitted.get(Purpose.PLUGIN)) is not None:
        fine = False
        sentence = f"Members of the group {group_name(gid)} may {_DEEDS[Purpose.PLUGIN]}, in the plugin's place."
        yield Check("sockets", Level.ERROR, sentence, f"chmod 0700 {node.sockets / Purpose.PLUGIN.value}")
    if fine:
        who = [
            f"the group {group_name(admitted[purpose])} may {_DEEDS[purpose]}"
            if purpose in admitted
            else f"nobody may {_DEEDS[purpose]}"
            for purpose in (Purpose.READ, Purpose.ADMIN)
        ]
        yield Check("sockets", Level.OK, f"Beside root and the service's own user {who[0]}, and {who[1]}.")


def _admits_everybody(way: _Way) -> bool:
    return all(about.st_mode & (stat.S_IXOTH if stat.S_ISDIR(about.st_mode) else stat.S_IWOTH) for _, about in way.seen)


def _admitted_group(way: _Way) -> int | None:
    """The group, not root's, whose members get through; what is hidden from us does not stop them."""
    (_, top), (_, directory), *last = way.seen
    gid = directory.st_gid
    enters = top.st_mode & stat.S_IXOTH or (top.st_gid == gid and top.st_mode & stat.S_IXGRP)
    uses = all(about.st_gid == gid and about.st_mode & stat.S_IWGRP for _, about in last)
    return gid if gid != 0 and enters and directory.st_mode & stat.S_IXGRP and uses else None


def service_process(node: Node) -> int | None:
    """PID of the service that serves the sockets, in the PID namespace of the node's /proc; None: there is none.

    Raises:
        OSError: that cannot be seen.
    """
    try:
        return lock_holder(node.sockets / "lock", node.path("/proc/locks"))
    except FileNotFoundError as error:
        if error.filename == str(node.path("/proc/locks")):
            raise
        return None


def capabilities(node: Node) -> Iterator[Check]:
    """The service has what it takes to see every process, to end leftovers and to reset devices."""
    if node.service.simulated:
        yield Check("capabilities", Level.OK, "The simulated node needs none.")
        return
    name, remedy = "capabilities", f"{AS_ROOT}, on the node or in the service's pod."
    try:
        pid = service_process(node)
        if pid is None:
            if node.service.answered:
                yield Check(name, Level.WARNING, _UNSEEN_SERVICE, remedy)
            return
        status = read_bytes(node.path(f"/proc/{pid}/status"))
    except OSError as error:
        yield unseen(name, "whether the service may do its work was not seen", error, remedy)
        return
    has = re.search(rb"^CapEff:[ \t]*([0-9a-f]{1,16})$", status, re.MULTILINE)
    uid = re.search(rb"^Uid:[ \t]*[0-9]+[ \t]+([0-9]+)", status, re.MULTILINE)
    if has is None or uid is None:
        sentence = f"/proc/{pid}/status does not say what the service may do."
        yield Check(name, Level.WARNING, sentence, remedy)
        return
    lacking = [each for bit, each in _NEEDED.items() if not int(has[1], 16) >> bit & 1]
    who = f"The service (PID {pid}) runs as {user_name(int(uid[1]))}"
    if lacking:
        level = Level.ERROR if node.service.has_hardware else Level.WARNING
        yield Check(name, level, f"{who} and lacks {', '.join(lacking)}: it would miss users of GPUs.", _PRIVILEGED)
        return
    yield Check(name, Level.OK, f"{who} with all that it needs.")
