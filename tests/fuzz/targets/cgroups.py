"""Directories of cgroups whose names a tenant chooses, and which disappear while they are read or watched."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
from functools import cache
from pathlib import Path

from scrubber.adapters.cgroups.hierarchy import Hierarchy
from scrubber.adapters.cgroups.procfs import ProcFs
from scrubber.adapters.cgroups.tree import CgroupTree, child_cgroups, is_populated, read_cgroup_procs, walk_cgroups
from scrubber.adapters.cgroups.watcher import CgroupWatcher
from scrubber.domain.errors import Unreadable
from tests.fuzz.connections import DEADLINE
from tests.fuzz.loop import complete, directory, on_close
from tests.fuzz.target import SLOW_GOAL, target

_UID, _OTHER = "0f6e1f7c-6d1a-4b55-9d39-3f4d8a1c2b3e", "11111111-2222-3333-4444-555555555555"
_POD = f"kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod{_UID.replace('-', '_')}.slice"
_CONTAINER = f"{_POD}/cri-containerd-0a1b.scope"
_SESSION = "user.slice/user-1000.slice/user@1000.service"
_NAMES = (
    b"kubepods/pod" + _OTHER.encode(),
    b"a\nb/0::\x0c\r/\xff\xfe/x",
    f"kubepods.slice/kubepods-pod{_OTHER.replace('-', '_')}.slice".encode(),
    f"kubepods-pod{_UID.replace('-', '_')}.slice:cri-containerd:x".encode(),
    b"slurmstepd.scope/job_7/step_0",
    b"\xe2\x80\xa8/\xc2\x85/ (deleted)",
    b"a/a/a/a/a/a",
)


@cache
def _root() -> Path:
    root = directory()
    on_close(_root.cache_clear)
    for name in (_CONTAINER, _SESSION):
        (root / name).mkdir(parents=True)
    return root


def _components(data: bytes) -> list[str]:
    parts = data.replace(b"\0", b"").split(b"/")
    return [os.fsdecode(each[:200]) for each in parts if each not in (b"", b".", b"..")][:8]


@target(
    "cgroup-tree",
    parser="the tree of cgroups, and the text of `cgroup.procs` and `cgroup.events`",
    covers=("scrubber.adapters.cgroups.tree", "scrubber.adapters.cgroups.paths"),
    oracle="as the names of cgroups in a container or in a user's session, the input neither adds a pod nor hides a cgroup; "
    "cgroups that disappear during a walk end no walk; as the content of a file, it is refused, or has the values that a "
    "regular expression finds",
    seeds=(*_NAMES, b"12\n345\n", b"populated 1\nfrozen 0\n", b"populated 0\n", b"0\n"),
    words=(b"/kubepods", b"/pod", b".slice", b"\n", b"\x0c", b"\xff", b"populated 1\n", b"slurmstepd.scope"),
    longest=512,
    share=100,
    goal=SLOW_GOAL,
)
def cgroup_tree(data: bytes) -> bool:
    root, names = _root(), _components(data)
    tree = CgroupTree(Hierarchy(root, 2, frozenset(), "/"), ProcFs())
    pod = root / _POD
    nested = [Path(root, _CONTAINER, *names[:depth]) for depth in range(1, len(names) + 1)]
    made = [*nested, *(root / _CONTAINER / each for each in sorted({*names[1:]} - {*names[:1]}))]
    in_session = [Path(root, _SESSION, *names[:depth]) for depth in range(1, len(names) + 1)]
    try:
        for each in (*made, *in_session):
            each.mkdir()
        assert tree.kubepods() == (root / "kubepods.slice",)
        assert tree.pod_cgroups(_UID) == (pod,)
        assert tree.pod_cgroups(_OTHER) == ()
        assert tree.stray_containers(_UID) == tree.stray_containers(_OTHER) == ()
        assert tree.slurm_cgroups() == ()
        everything = {pod, root / _CONTAINER, *made}
        assert sorted(walk_cgroups(pod)) == sorted(everything)
        walk = walk_cgroups(pod)
        for _ in range(min(3, len(everything))):
            everything.remove(next(walk))
    finally:
        for each in (*reversed(made), *reversed(in_session)):
            each.rmdir()
    assert everything.issuperset(walk), "a cgroup twice, or one that never existed"
    assert child_cgroups(root / _CONTAINER) == []
    return _reads_files(root / _CONTAINER, data) or bool(names)


def _reads_files(cgroup: Path, data: bytes) -> bool:
    """Check the two files with ``data`` as their content; return whether one of them is valid."""
    for name in ("cgroup.procs", "cgroup.events"):
        (cgroup / name).write_bytes(data)
    states = [line for line in data.removesuffix(b"\n").split(b"\n") if line in (b"populated 0", b"populated 1")]
    try:
        assert is_populated(cgroup) == (states[0].endswith(b"1") if states else None)
        try:
            pids = read_cgroup_procs(cgroup)
        except (Unreadable, ValueError):
            valid = re.fullmatch(rb"(?:[0-9]{1,4000}\n)*[0-9]{1,4000}\n?", data)
            assert valid is None or re.search(rb"(?:^|\n)0+(?:\n|$)", data), "refused, although the kernel writes this"
            return bool(states)
        assert pids == [int(line) for line in data.removesuffix(b"\n").split(b"\n") if data]
        assert 0 not in pids
        return bool(pids)
    finally:
        for name in ("cgroup.procs", "cgroup.events"):
            (cgroup / name).unlink()


@cache
def _watcher() -> CgroupWatcher:
    watcher = CgroupWatcher()
    on_close(_watcher.cache_clear)
    on_close(watcher.close)
    return watcher


async def _first_and_end(pod: Path, names: list[str]) -> str:
    """Create ``names`` in ``pod`` after one that exists already; return which one is reported as the first, and wait for an end."""
    watcher = _watcher()
    first, end = watcher.watch_first([pod]), watcher.watch_end([pod])
    assert not first.done()
    assert not end.done()
    for name in names:
        (pod / name).mkdir(exist_ok=True)
    found = await asyncio.wait_for(first, DEADLINE)
    await asyncio.wait_for(end, DEADLINE)
    gone = watcher.watch_end([pod])
    shutil.rmtree(pod)
    await asyncio.wait_for(gone, DEADLINE)
    try:
        watcher.watch_first([pod])
    except FileNotFoundError:
        await asyncio.sleep(0)
        assert not watcher._waits, "a wait is left"
        assert not watcher._uses, "a watch is left"
        return found
    raise AssertionError("a pod without a cgroup is watched")


@target(
    "cgroup-watcher",
    parser="the kernel's reports about cgroups that appear and disappear",
    covers=("scrubber.adapters.cgroups.watcher", "scrubber.adapters.inotify"),
    oracle="whatever its name, the first new container is the one that is reported, the end of a pod is reported, a pod that is "
    "gone is refused, and no watch is left",
    seeds=(b"main", *_NAMES, b"known/main", b"\n/\n\n", b"\xff" * 200),
    words=(b"known", b"/", b"\n", b"\x0c", b"\xff", b"cgroup.events"),
    longest=512,
    share=60,
    goal=SLOW_GOAL,
)
def cgroup_watcher(data: bytes) -> bool:
    names = _components(data)
    pod = _root() / "watched"
    (pod / "known").mkdir(parents=True)
    try:
        new = [each for each in names if each != "known"]
        assert complete(_first_and_end(pod, [*names, "sentinel"])) == (new or ["sentinel"])[0]
    finally:
        shutil.rmtree(pod, ignore_errors=True)
    return bool(new)
