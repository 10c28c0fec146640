"""Text in which the kernel describes what a process may do, part of which a tenant chooses."""

from __future__ import annotations

import os
import re
from functools import cache
from pathlib import Path

from scrubber.adapters.cgroups.environment_marker import (
    CONTAINER_MARKER,
    POD_MARKER,
    RUN_MARKER,
    membership_in,
)
from scrubber.adapters.kubelet.pid_namespace import find_problem, read_pid_namespace
from scrubber.adapters.procwalk.confinement import shows_dev_in_memory, shows_device_capabilities
from tests.fuzz.loop import directory, on_close
from tests.fuzz.structure import EDIT_SEEDS, EDITS, text_input
from tests.fuzz.target import target
from tests.fuzz.targets.kernel import escaped

_STATUS = (
    b"Name:\t%s\nUmask:\t0022\nGroups:\t%s\nNSpid:\t7\nCapInh:\t%016x\nCapPrm:\t%016x\nCapEff:\t%016x\nCapBnd:\t%016x\n"
    b"CapAmb:\t%016x\nSeccomp:\t0\n"
)
_DEVICE_BITS = 1 << 16 | 1 << 17 | 1 << 19 | 1 << 21
_CAPABILITY_SETS = re.compile(
    rb"(?:.*\n)*?CapPrm:\t(?P<permitted>[0-9a-f]{16})\n(?:Cap.*\n)*?CapBnd:\t(?P<bounding>[0-9a-f]{16})\n(?:.*\n?)*"
)


@target(
    "process-status",
    parser="`/proc/PID/status`, for the capabilities of a process",
    covers=("scrubber.adapters.procwalk.confinement",),
    oracle="as the name and the groups of a process, the input hides and adds no capability; a text that is cut anywhere shows "
    "no process as confined that is not; as a whole text, its capabilities are unknown, or those that a regular expression finds",
    seeds=(
        *EDIT_SEEDS,
        *(
            EDITS + bytes((number % 3, place, number % 6, 3 * number))
            for number in range(24)
            for place in (27, 31, 35, 39)
        ),
        *(b"x" * length for length in range(0, 48, 5)),
        b"CapPrm:\t0000000000000000\nCapBnd:\t0000000000000000\n",
        b"CapBnd:\t0000000000000000\n",
        b"CapPrm:\t0000000000000000\nCapEff:\t0000000000000000\nx\nCapBnd:\t0000000000000000\n",
    ),
    words=(b"\nCapPrm:\t", b"\nCapBnd:\t", b"0000000000000000", b"0000000000200000", b"_", b"\r"),
)
def process_status(data: bytes) -> bool:
    name = data.replace(b"\\", b"\\\\").replace(b"\n", b"\\n")
    groups = b"".join(b"%d " % each for each in data)
    for permitted, bounding in ((0, 1), (1 << 21, 1 << 21), (0, 1 << 16), (1 << 19, 0), (0, 1 << 17)):
        status = _STATUS % (name, groups, 0, permitted, 0, bounding, 0)
        powers = bool((permitted | bounding) & _DEVICE_BITS)
        assert shows_device_capabilities(status) is powers
        if powers:  # the reader's length is fixed, and the length of the text before is the tenant's
            assert shows_device_capabilities(status[: -1 - (len(data) + sum(data[:2])) % 200]) is not False
    text = text_input(
        data,
        *(
            _STATUS % (b"x", b"", 0, permitted, 0, bounding, 0)
            for permitted, bounding in ((0, 1), (0, 1 << 21), (7, 0))
        ),
    )
    found = shows_device_capabilities(text)
    exact = _CAPABILITY_SETS.fullmatch(text)
    if exact is None:
        assert found is None
        return False
    assert found is bool((int(exact["permitted"], 16) | int(exact["bounding"], 16)) & _DEVICE_BITS)
    return True


_DEV_MOUNTS = (
    (
        b"60 50 0:40 / / rw,relatime - overlay overlay rw,lowerdir=/x\n"
        b"61 60 0:41 / /dev rw,nosuid master:1 - tmpfs tmpfs rw,size=65536k,mode=755\n"
        b"62 61 0:42 / /dev/pts rw - devpts devpts rw\n"
    ),
    b"60 50 0:40 / / rw,relatime - overlay overlay rw\n61 60 0:41 / /dev rw - devtmpfs udev rw\n",
    b"60 50 0:40 / / rw,relatime - overlay overlay rw\n61 60 0:41 / /dev rw - fuse.x y rw\n",
)
_MOUNT_LINE = re.compile(
    rb"([0-9]{1,18}) [0-9]+ [0-9]+:[0-9]+ (/[^ \t]*) (/[^ \t]*) [^ \t]+(?: [a-z_]+(?::[0-9]+)?)* - ([^ \t]+) [^ \t]+ [^ \t]+"
)


@target(
    "dev-mount",
    parser="`/proc/PID/mountinfo`, for the `/dev` of a process",
    covers=("scrubber.adapters.procwalk.confinement",),
    oracle="as the source, root or place of another mount, the input changes nothing; as a whole text in the kernel's format, "
    "it shows an in-memory file system at `/dev` if and only if a regular expression finds exactly this one there, and a root",
    seeds=(
        *EDIT_SEEDS,
        *(EDITS + bytes((number,)) for number in range(len(_DEV_MOUNTS))),
        *(
            EDITS + bytes((number % 2, place, number % 6, 3 * number))
            for number in range(24)
            for place in range(24, 48, 3)
        ),
        b"61 60 0:41 / /dev rw - tmpfs",
        b"60 50 0:40 / / rw - ext4 x rw\n61 60 0:41 / /dev rw -",
        b"60 50 0:40 / / rw - ext4 x rw\n61 60 0:41 /a /dev rw - tmpfs x rw\n",
        b"61 60 0:41 / /dev rw - tmpfs tmpfs rw",
        b"60 50 0:40 / / rw - ext4 x rw\n61 60 0:41 / /dev rw - tmpfs x rw\n61 60 0:41 / /dev rw - tmpfs x rw\n",
    ),
    words=(b" - tmpfs tmpfs rw\n", b"\n61 60 0:41 / /dev rw", b"\\012", b" /dev ", b" / "),
)
def dev_mount(data: bytes) -> bool:
    name = escaped(data.replace(b"\0", b""))
    for mounts, expected in zip(_DEV_MOUNTS, (True, True, False), strict=True):
        for number in (b"7", b"610"):
            line = number + b" 60 8:1 /" + name + b" /dev/" + name + b" rw - fuse." + name + b" " + name + b" rw\n"
            assert shows_dev_in_memory(line + mounts, 61) is expected
            assert shows_dev_in_memory(mounts + line, 61) is expected
        assert shows_dev_in_memory(mounts, 7) is False
    text = text_input(data, *_DEV_MOUNTS)
    rows = [_MOUNT_LINE.fullmatch(line) for line in text.removesuffix(b"\n").split(b"\n")]
    try:
        found = shows_dev_in_memory(text, 61)
    except ValueError:
        assert None in rows, "refused, although the kernel writes this"
        return False
    exact = [row.groups() for row in rows if row is not None]
    ours = [row for row in exact if int(row[0]) == 61]
    in_memory = [row[1:] for row in ours] in ([(b"/", b"/dev", b"tmpfs")], [(b"/", b"/dev", b"devtmpfs")])
    if len(exact) == len(rows):
        assert found is (in_memory and any(row[2] == b"/" for row in exact))
    assert not found or re.search(
        rb"(?:^|\n)[ \t]*0*61[ \t].*[ \t]/[ \t]+/dev[ \t].*[ \t]-[ \t]+(?:dev)?tmpfs(?:[ \t\n]|$)", text
    )
    return found


_ENVIRONMENT = f"PATH=/bin\0{POD_MARKER}=uid-7\0{CONTAINER_MARKER}=main\0{RUN_MARKER}=2\0HOME=/\0".encode()


@target(
    "environment-marker",
    parser="`/proc/PID/environ` on a simulated node",
    covers=("scrubber.adapters.cgroups.environment_marker",),
    oracle="as the name or the value of another variable, the input changes neither pod nor container; as a whole text, it "
    "shows the pod, the container and the run that regular expressions find in whole variables",
    seeds=(
        *EDIT_SEEDS,
        _ENVIRONMENT,
        _ENVIRONMENT.replace(b"SIM_RUN", b"sim_run"),
        _ENVIRONMENT.replace(b"uid-7", b""),
        _ENVIRONMENT.replace(b"uid-7", b"\xff=\xff"),
        f"{POD_MARKER}=a\0{POD_MARKER}\0{POD_MARKER}=b".encode(),
        f"X{POD_MARKER}=a\0 {POD_MARKER}=a\n{POD_MARKER}=b".encode(),
    ),
    words=(b"\0", b"=", *(f"\0{each}=".encode() for each in (POD_MARKER, CONTAINER_MARKER, RUN_MARKER))),
)
def environment_marker(data: bytes) -> bool:
    value = data.replace(b"\0", b"")
    others = (b"X=" + value, value.replace(b"=", b"") + b"x=1", b"=" + value)
    for other in others:
        assert membership_in(other + b"\0" + _ENVIRONMENT + other) == ("uid-7", "main#2")
        assert membership_in(other + b"\0" + other + b"\0") is None
    text = text_input(data, _ENVIRONMENT)
    uid, name, run = (
        re.findall(rb"(?:\A|(?<=\0))%b(?:=([^\0]*))?(?=\0|\Z)" % marker.encode(), text) or [b""]
        for marker in (POD_MARKER, CONTAINER_MARKER, RUN_MARKER)
    )
    found = membership_in(text)
    if not uid[-1]:
        assert found is None
        return False
    container = name[-1] + b"#" + run[-1] if run[-1] else name[-1]
    assert found == (uid[-1].decode(errors="replace"), container.decode(errors="replace"))
    return True


_INITIAL_NAMESPACE = "pid:[4026531836]"
_OWN_STATUS = b"Name:\t%s\nUmask:\t0022\nTgid:\t%d\nNSpid:\t%d\nNSpgid:\t1\n"


@cache
def _proc() -> Path:
    proc = directory()
    on_close(_proc.cache_clear)
    (proc / "self" / "ns").mkdir(parents=True)
    return proc


def _is_initial(status: bytes, namespace: str) -> bool:
    """Whether a proc file system with this text and this link proves the initial PID namespace."""
    proc = _proc() / "self"
    (proc / "status").write_bytes(status)
    (proc / "ns" / "pid").unlink(missing_ok=True)
    (proc / "ns" / "pid").symlink_to(namespace)
    return find_problem(read_pid_namespace(_proc() / "no kubelet", _proc())) is None


@target(
    "pid-namespace",
    parser="`/proc/self/status` and the link of a PID namespace",
    covers=("scrubber.adapters.kubelet.pid_namespace",),
    oracle="as the name of the process, the input changes nothing; as the text or as the link, it proves the node's PID "
    "namespace only with this process's PID alone, and with the fixed number of the initial one",
    seeds=(
        *EDIT_SEEDS,
        *(EDITS + bytes((0, place, number % 6, 3 * number)) for number in range(24) for place in (14, 15)),
        b"NSpid:\tSELF\n",
        b"NSpid:\t7\tSELF\n",
        b"NSpid:\t7\tx\n",
        b"NSpid:\t" + b"7" * 4400,
        _INITIAL_NAMESPACE.encode(),
        b"pid:[4026532178]",
        b"pid:[4026531836]\n",
    ),
    words=(b"NSpid:\t", b"\nNSpid:\t", b"pid:[", b"4026531836", b"SELF"),
    longest=5000,
)
def pid_namespace(data: bytes) -> bool:
    pid = os.getpid()
    name = data.replace(b"\\", b"\\\\").replace(b"\n", b"\\n").replace(b"\0", b"")
    status = _OWN_STATUS % (name, pid, pid)
    assert _is_initial(status, _INITIAL_NAMESPACE)
    assert not _is_initial(_OWN_STATUS % (name, pid, pid + 1), _INITIAL_NAMESPACE)
    link = os.fsdecode(data.replace(b"\0", b"")[:1000]) or "x"
    found = _is_initial(status, link)
    assert found is (re.fullmatch(r"pid:\[0*4026531836\]", link, re.ASCII) is not None)
    text = text_input(data, _OWN_STATUS.replace(b"%d", b"SELF") % b"x").replace(b"SELF", b"%d" % pid)
    proved = _is_initial(text, _INITIAL_NAMESPACE)
    pids = re.search(rb"^NSpid:(.*)$", text, re.MULTILINE)
    assert proved is (pids is not None and re.fullmatch(rb"[ \t]*0*%d[ \t]*" % pid, pids[1]) is not None)
    return found or proved
