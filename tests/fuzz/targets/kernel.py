"""Text of the kernel, in which a tenant chooses names: of cgroups, mount points, commands and files."""

from __future__ import annotations

import os
import re
from pathlib import Path

from scrubber.adapters.cgroups.hierarchy import hierarchy_of, sibling_hierarchies
from scrubber.adapters.cgroups.job_paths import job_of_path
from scrubber.adapters.cgroups.paths import mentions_pod, pod_uid_of_path
from scrubber.adapters.kernel_text import cgroup_paths, parse_stat
from scrubber.adapters.procwalk.budget_group import BudgetGroup, parse_budget_group, pod_of_path
from scrubber.adapters.procwalk.match import FileTarget, maps_device, parse_fdinfo, read_fdinfo
from scrubber.adapters.procwalk.process import ProcessScan
from scrubber.domain.errors import InvalidConfiguration, Unreadable
from tests.fuzz.structure import EDIT_SEEDS, EDITS, text_input
from tests.fuzz.target import SLOW_GOAL, target

_UID = "0f6e1f7c-6d1a-4b55-9d39-3f4d8a1c2b3e"
_SLICE = f"kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod{_UID.replace('-', '_')}.slice"
_CGROUPFS = f"kubepods/besteffort/pod{_UID}"

_NUMBERS = b" ".join(b"%d" % number for number in range(1, 50))
_STATS = (
    (
        b"42 (bash) S 1 42 42 34816 42 4194304 1 2 3 4 5 6 7 8 20 0 1 0 100 1 1 1 1 1 1 0 0 0 0 0 0 0 0 0 17 0 0 0 0 0 0 "
        b"94 95 96 140 141 142 143 0\n"
    ),
    b"7 (a) b) R " + _NUMBERS + b"\n",
)
_STAT = re.compile(rb"([0-9]+) \((.*)\) ([A-Za-z]) ([0-9-]+(?: [0-9-]+){48,})\n?", re.DOTALL)


@target(
    "process-stat",
    parser="`/proc/PID/stat`",
    covers=("scrubber.adapters.kernel_text",),
    oracle="a line in the kernel's format has the values that a regular expression finds, and as the name of a command the "
    "input changes no other value",
    seeds=(
        *EDIT_SEEDS,
        *_STATS,
        b") S 1 1 1 (x) Z 0",
        *(b"\0\1" + bytes((place, 5, place)) for place in range(4, 100, 9)),
    ),
    words=(b") ", b") S ", b" (", b"4194304", b"2097152"),
)
def process_stat(data: bytes) -> bool:
    command = data.replace(b"\0", b"")
    renamed = parse_stat(b"7 (" + command + b") R " + _NUMBERS + b"\n")
    assert renamed == parse_stat(b"7 (x) R " + _NUMBERS + b"\n"), renamed
    line = text_input(data, *_STATS)
    exact = _STAT.fullmatch(line)
    try:
        found = parse_stat(line)
    except Unreadable as error:
        assert str(error).isprintable()
        used = exact[4].split(b" ") if exact else []
        assert (
            exact is None
            or any(not used[at].isdigit() or len(used[at]) > 4000 for at in (0, 5, 16, 18, 46, 47))
            or len(exact[1]) > 4000
        ), "refused, although the kernel writes this"
        return False
    if exact is not None:
        numbers = exact[4].split(b" ")
        assert (found.pid, found.parent, found.started) == (int(exact[1]), int(numbers[0]), int(numbers[18]))
        assert found.threads == int(numbers[16])
    return True


@target(
    "process-cgroup",
    parser="`/proc/PID/cgroup`",
    covers=("scrubber.adapters.kernel_text",),
    oracle="each accepted line has the kernel's format and appears in the result, and as the name of a cgroup the input adds "
    "no hierarchy",
    seeds=(
        b"0::/kubepods/pod1\n",
        b"12:pids:/a\n11:cpu,cpuacct:/b\n1:name=systemd:/c\n0::/d\n",
        b"0::/../../x (deleted)\n",
        b"0::/a\n0::/b\n",
    ),
    words=(b"\n0::/", b"0::/", b"1:pids:/", b"name=systemd"),
)
def process_cgroup(data: bytes) -> bool:
    name = data.replace(b"\0", b"").replace(b"\n", b"")
    assert cgroup_paths(b"0::/top/" + name + b"\n") == {"": os.fsdecode(b"/top/" + name)}
    try:
        found = cgroup_paths(data)
    except Unreadable:
        return False
    lines = data.removesuffix(b"\n").split(b"\n") if data else []
    expected = {}
    for line in lines:
        number, names, path = line.split(b":", 2)
        assert re.fullmatch(rb"[0-9]+", number), line
        assert path.startswith(b"/"), line
        expected[os.fsdecode(names)] = os.fsdecode(path)
    assert len(found) == len(lines), "two lines of one hierarchy"
    assert found == expected
    return True


_MOUNTS = (
    b"25 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw\n"
    b"31 25 0:26 / /sys/fs/cgroup rw,nosuid shared:9 - cgroup2 cgroup2 rw,nsdelegate\n"
    b"40 25 0:30 / /sys/fs/cgroup/pids rw shared:15 - cgroup cgroup rw,pids\n"
    b"41 25 0:31 / /sys/fs/cgroup/systemd rw shared:15 - cgroup cgroup rw,xattr,name=systemd\n"
)
_ROOT = Path("/sys/fs/cgroup/fuzzing")
_V2 = hierarchy_of(_ROOT, _MOUNTS)


def escaped(name: bytes) -> bytes:
    """Return ``name`` as the kernel writes it in a mount table."""
    return re.sub(rb"[ \t\n\\#]", lambda match: b"\\%03o" % match[0][0], name)


@target(
    "mountinfo",
    parser="`/proc/PID/mountinfo`",
    covers=("scrubber.adapters.cgroups.hierarchy",),
    oracle="as the source of a mount, the input changes nothing; as a whole mount table, it is refused, or gives a "
    "hierarchy of a mounted cgroup file system that contains the directory",
    seeds=(
        _MOUNTS,
        b"31 25 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n",
        b"31 25 0:26 /a\\040b /sys/fs rw - cgroup none rw,freezer\n",
        b"/ /sys/fs/cgroup rw - cgroup2 x rw",
    ),
    words=(b" - cgroup2 cgroup2 rw\n", b" - cgroup x rw,pids\n", b"\\012", b"\\040", b" /sys/fs/cgroup "),
    goal=SLOW_GOAL,
)
def mountinfo(data: bytes) -> bool:
    name = escaped(data.replace(b"\0", b""))
    line = b"50 25 8:1 /var/lib/" + name + b" /pods/" + name + b" rw - ext4 /dev/sda1 rw\n"
    assert hierarchy_of(_ROOT, _MOUNTS + line) == _V2
    try:
        found = hierarchy_of(_ROOT, data)
        siblings = sibling_hierarchies(found, data)
    except InvalidConfiguration:
        return False
    assert found.root == _ROOT
    assert found.version in (1, 2)
    assert b"cgroup" in data
    assert (found.version == 2) <= (not found.controllers)
    keys = [found.controllers, *(each.controllers for each in siblings)]
    assert len(set(keys)) == len(keys)
    return True


def _components(data: bytes) -> str:
    return "/".join(each for each in os.fsdecode(data.replace(b"\0", b"")).split("/") if each not in ("", ".", ".."))


_PATHS = (
    f"/{_SLICE}/cri-containerd-0a1b.scope".encode(),
    f"/{_CGROUPFS}/0a1b/init".encode(),
    b"/system.slice/slurmstepd.scope/job_7/step_0/user",
    b"/slurm/uid_1000/job_7",
    b"/scrubber.slice/scrubber-run7.slice/a",
    b"/../../" + _SLICE.encode() + b"/a",
)


@target(
    "cgroup-path",
    parser="the path of a process's cgroup",
    covers=("scrubber.adapters.cgroups.paths", "scrubber.adapters.cgroups.job_paths"),
    oracle="as the part of a path that a tenant or a user of the node chooses, the input changes neither pod nor job",
    seeds=(
        *EDIT_SEEDS,
        *(EDITS + bytes((number, 1, 5, 1)) for number in range(len(_PATHS))),
        b"cri-containerd-0a1b.scope",
        b"kubepods/pod11111111-2222-3333-4444-555555555555/c",
        b"system.slice/slurmstepd.scope/job_7/step_0",
        b"scrubber.slice/scrubber-run7.slice",
        b"kubepods-burstable-pod11111111_2222_3333_4444_555555555555.slice:cri-containerd:x",
        b"user.slice/x-kubepods-pod1.slice",
    ),
    words=(
        b"kubepods",
        b"/pod",
        b".slice",
        b"slurmstepd.scope",
        b"/job_",
        b"slurm/uid_0/",
        b"scrubber.slice",
        b" (deleted)",
    ),
)
def cgroup_path(data: bytes) -> bool:
    kubepods = ("kubepods.slice", "kubepods", "kubelet.slice/kubelet-kubepods.slice")
    text = text_input(data, *_PATHS)
    chosen = _components(text)
    for pod in (_SLICE, _CGROUPFS):
        path = f"/{pod}/{chosen}"
        assert pod_uid_of_path(path, kubepods) == _UID, path
        assert job_of_path(path) is None, path
        assert pod_of_path(path) == _UID, path
        assert mentions_pod(os.fsencode(f"0::{path}\n"), _UID)
    for of_a_user in ("user.slice/user-1000.slice/user@1000.service", "system.slice/docker-0a1b.scope"):
        path = f"/{of_a_user}/{chosen}"
        assert pod_uid_of_path(path, kubepods) is None, path
        assert job_of_path(path) is None, path
        assert pod_of_path(path) is None, path
    for job, group in (
        ("system.slice/slurmstepd.scope/job_7", "slurm-job-7"),
        ("scrubber.slice/scrubber-run7.slice", "run-job-7"),
    ):
        path = f"/{job}/{chosen}"
        assert job_of_path(path) == group, path
        assert pod_uid_of_path(path, kubepods) is None, path
    raw = os.fsdecode(text)
    return pod_uid_of_path(raw, kubepods) is not None or job_of_path(raw) is not None or pod_of_path(raw) is not None


_HIERARCHIES = (b"12:pids:/", b"11:cpu,cpuacct:/", b"1:name=systemd:/", b"0::/")
_POD_GROUP = BudgetGroup(_UID, _UID)
_IN_POD = b"".join(each + _CGROUPFS.encode() + b"/0a1b\n" for each in _HIERARCHIES)
_CGROUP_LINE = re.compile(rb"(?:0:|[0-9]+:[^:\n]+):(/[^\n]*)")


@target(
    "process-group",
    parser="`/proc/PID/cgroup`, for the part of a walk's time that a process may use",
    covers=("scrubber.adapters.procwalk.budget_group",),
    oracle="as a name that a tenant chooses, with line breaks too, the input makes a process neither the node's nor another "
    "pod's; as a name that a user of the node chooses, it makes a process no pod's; as a whole text, it gives a pod only "
    "if this is the only pod that a line mentions",
    seeds=(
        *EDIT_SEEDS,
        *(EDITS + bytes((0, place, number % 6, 3 * number)) for number in range(24) for place in (7, 20, 33)),
        _IN_POD,
        b"0::/user.slice\n",
        b"",
        b"x\n0::/kubepods/pod11111111-2222-3333-4444-555555555555/c",
        b"x\n7:cpu:/kubepods/pod11111111-2222-3333-4444-555555555555/c",
        b"x\n7:rdma:/user.slice",
        b"kubepods/pod11111111-2222-3333-4444-555555555555",
    ),
    words=(b"\n0::/", b"\n3:freezer:/kubepods/pod1", b":", b"kubepods", b"/pod", b".slice", b"\xff", b"user.slice"),
)
def process_group(data: bytes) -> bool:
    name = data.replace(b"\0", b"")
    for hierarchy in _HIERARCHIES:
        others = [each for each in _HIERARCHIES if each != hierarchy]
        line = hierarchy + _SLICE.encode() + b"/cri-containerd-0a1b.scope/" + name + b"\n"
        for text in (line, b"".join((line, *(each + _CGROUPFS.encode() + b"\n" for each in others)))):
            found = parse_budget_group(text)
            assert found == _POD_GROUP or (found is None and b"\n" in name), found
    in_session = b"0::/user.slice/user-1000.slice/user@1000.service/" + name.replace(b"\n", b"") + b"\n"
    session = parse_budget_group(in_session)
    assert session is not None
    assert session.pod_uid is None
    assert session.key == in_session[3:-1].decode(errors="replace")
    text = text_input(data, _IN_POD)
    group = parse_budget_group(text)
    lines = [_CGROUP_LINE.fullmatch(line) for line in text.removesuffix(b"\n").split(b"\n")] if text else []
    if group is None:
        return False
    pods = {pod_of_path(os.fsdecode(line[1])) for line in lines if line is not None} - {None}
    assert None not in lines, "a line is not the kernel's"
    assert pods == ({group.pod_uid} if group.pod_uid else set())
    assert group.pod_uid in (None, group.key)
    return bool(text)


_DEVICE, _INODE = os.makedev(0xFD, 1), 4711
_MAPPED = b"7f0000000000-7f0000001000 r--p 00000000 %s %d  %%s\n" % (maps_device(_DEVICE), _INODE)
_OTHER = b"7f0000002000-7f0000003000 r--p 00000000 fd:02 12  %s\n"


def _parts(maps: bytes) -> set[int]:
    descriptor = os.memfd_create("maps", os.MFD_CLOEXEC)
    try:
        os.write(descriptor, maps)
        scan = ProcessScan(0, FileTarget(_DEVICE, frozenset({_INODE})), set())
        scan._scan_map(f"/proc/self/fd/{descriptor}")
        return scan.parts
    finally:
        os.close(descriptor)


@target(
    "process-maps",
    parser="`/proc/PID/maps`",
    covers=("scrubber.adapters.procwalk.match",),
    oracle="as the name of a mapped file the input neither hides a mapping of the device nor forges one",
    seeds=(
        b"/usr/lib/libc.so.6",
        b"/dev/nvidia0 (deleted)",
        b"a\\012" + _MAPPED % b"b",
    ),
    words=(_MAPPED % b"", b"fd:01 4711", b"\\012", b"-7f0000001000 r--p 00000000 "),
)
def process_maps(data: bytes) -> bool:
    name = data.replace(b"\0", b"").replace(b"\n", b"\\012")
    assert _parts(_OTHER % name) == set()
    assert _parts(_OTHER % name + _MAPPED % name + _OTHER % name) == {_INODE}
    return bool(name)


_FDINFO_HEADS = (
    (b"pos:\t0\nflags:\t02100002\nmnt_id:\t15\nino:\t4711\n", (0o2100002, 4711)),
    (b"pos:\t0\nflags:\t0100000\nmnt_id:\t15\n", (0o100000, None)),
    (b"pos:\t-1\nflags:\t012000000\n", (0o12000000, None)),
)
_FDINFO_LINE = re.compile(rb"([a-z_]+):\t(.*)")


@target(
    "fdinfo",
    parser="`/proc/PID/fdinfo/N`",
    covers=("scrubber.adapters.procwalk.match",),
    oracle="as the lines that a driver adds, the input changes neither flags nor inode; as a whole text, it has the numbers "
    "that are found line by line in the kernel's order, or the file counts as one that may match",
    seeds=(
        *EDIT_SEEDS,
        *(EDITS + bytes((number,)) for number in range(len(_FDINFO_HEADS))),
        *(EDITS + bytes((number % 3, place, number % 6, 3 * number)) for number in range(24) for place in (3, 7)),
        *(b"name:\tx\n" + head for head, _ in _FDINFO_HEADS),
        b"name:\t\nino:\t12\nflags:\t012000000\n",
        b"ino:\t12\n",
        b"mnt_id:\t1\nino:\t12\n",
        b"lock:\t1: FLOCK  ADVISORY  WRITE 359 00:13:11691 0 EOF\n",
    ),
    words=(b"flags:\t012000000\n", b"\nino:\t12\n", b"mnt_id:\t1\n", b"pos:\t0\n", b"_", b"0o"),
)
def fdinfo(data: bytes) -> bool:
    for head, expected in _FDINFO_HEADS:
        assert parse_fdinfo(head + b"exp_name:\tx\nname:\t" + data) == expected
    text = text_input(data, *(head for head, _ in _FDINFO_HEADS))
    found = parse_fdinfo(text)
    descriptor = os.memfd_create("fdinfo", os.MFD_CLOEXEC)
    try:
        os.write(descriptor, text)
        assert read_fdinfo(f"/proc/self/fd/{descriptor}") == parse_fdinfo(text[:512])
    finally:
        os.close(descriptor)
    lines = [
        match.groups() if (match := _FDINFO_LINE.fullmatch(line)) else (b"", b"") for line in text.split(b"\n")[:-1]
    ]
    names, values = [name for name, _ in lines], [value for _, value in lines]
    exact = names[:2] == [b"pos", b"flags"] and values[0].removeprefix(b"-").isdigit()
    if not exact or not re.fullmatch(b"[0-7]{1,12}", values[1]):
        assert found == (0, None), "another text than the kernel's"
        return False
    inode = names[2:4] == [b"mnt_id", b"ino"] and all(each.isdigit() for each in values[2:4]) and len(values[3]) <= 20
    assert found == (int(values[1], 8), int(values[3]) if inode else None)
    return True
