"""Pods made of real processes, for tests: separated by real cgroups where those can be written, or by markers.

``WAYS`` lists what this machine supports. What it does not support is reported when tests are collected.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import uuid
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, TypeVar, cast

from scrubber.adapters.cgroups import CgroupContainers, MarkerContainers
from scrubber.adapters.cgroups.environment_marker import CONTAINER_MARKER, POD_MARKER
from scrubber.domain.assignment import Pod

_Test = TypeVar("_Test", bound=Callable[..., object])

DEADLINE = 20.0

IDLE = "print('ready', flush=True); signal.pause()"
"""Program of a process that does nothing."""


CHILD_ON_REQUEST = """
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
print("ready", flush=True)
signal.sigwait([signal.SIGUSR1])
child = os.fork()
if child:
    print(child, flush=True)
signal.pause()
"""
"""Program that forks on SIGUSR1 and prints the child's PID."""


class CgroupsWithoutKill(CgroupContainers):
    """Cgroups as on a kernel before 5.14, which has no ``cgroup.kill``."""

    def _kill_file(self, cgroup: Path) -> Path | None:
        return None


@dataclass(slots=True)
class Started:
    """A process of a test; ``line`` returns the next line that its program printed."""

    child: asyncio.subprocess.Process
    output: asyncio.StreamReader
    pipe: asyncio.BaseTransport

    @property
    def pid(self) -> int:
        return self.child.pid

    async def line(self) -> str:
        return (await asyncio.wait_for(self.output.readline(), DEADLINE)).decode().strip()

    async def ended(self) -> int:
        return await asyncio.wait_for(self.child.wait(), DEADLINE)

    @property
    def runs(self) -> bool:
        return self.child.returncode is None


async def lives(process: Started) -> bool:
    """Return whether a process of CHILD_ON_REQUEST still responds: a process that has just been killed does not."""
    os.kill(process.pid, signal.SIGUSR1)
    return (await process.line()).isdecimal()


class Ground(Protocol):
    """Where containers are created."""

    def containers(self) -> CgroupContainers | MarkerContainers: ...
    def place(self, pod: Pod, container: str) -> tuple[list[str], dict[str, str]]: ...
    def clear(self) -> None: ...


@dataclass(slots=True)
class MarkerGround:
    """Containers are two environment variables."""

    uids: set[str] = field(default_factory=set)

    def containers(self) -> MarkerContainers:
        return MarkerContainers()

    def place(self, pod: Pod, container: str) -> tuple[list[str], dict[str, str]]:
        assert pod.uid is not None
        self.uids.add(pod.uid)
        return [], {POD_MARKER: pod.uid, CONTAINER_MARKER: container}

    def clear(self) -> None:
        marked = True
        while marked:
            marked = False
            for directory in Path("/proc").iterdir():
                if directory.name.isdecimal():
                    with contextlib.suppress(OSError):
                        environment = (directory / "environ").read_bytes().decode(errors="replace")
                        if any(f"{POD_MARKER}={uid}" in environment for uid in self.uids):
                            marked = True
                            os.kill(int(directory.name), signal.SIGKILL)


@dataclass(slots=True)
class CgroupGround:
    """Containers are cgroups in a directory of this test, in every hierarchy of ``mounts``."""

    mounts: tuple[Path, ...]
    kind: type[CgroupContainers] = CgroupContainers
    kubepods: str = "kubepods"
    pod_directory: str = "pod{uid}"
    name: str = field(default_factory=lambda: f"gs-{uuid.uuid4().hex[:8]}")

    def __post_init__(self) -> None:
        for root in self.roots:
            (root / self.kubepods).mkdir(parents=True)

    @property
    def roots(self) -> tuple[Path, ...]:
        return tuple(mount / self.name for mount in self.mounts)

    @property
    def root(self) -> Path:
        return self.roots[0]

    def containers(self) -> CgroupContainers:
        return self.kind(self.root)

    def cgroups(self, pod: Pod, container: str = "") -> list[Path]:
        assert pod.uid is not None
        directory = self.pod_directory.format(uid=pod.uid, escaped=pod.uid.replace("-", "_"))
        return [root / self.kubepods / directory / container for root in self.roots]

    def place(self, pod: Pod, container: str) -> tuple[list[str], dict[str, str]]:
        cgroups = self.cgroups(pod, container)
        for cgroup in cgroups:
            cgroup.mkdir(parents=True, exist_ok=True)
        enter = "; ".join(f"echo $$ > {cgroup}/cgroup.procs" for cgroup in cgroups)
        return ["/bin/sh", "-ec", f'{enter}; exec "$@"', "enter"], {}

    def clear(self) -> None:
        for root in self.roots:  # all of them first: a process frozen in one hierarchy cannot die in any
            for state in root.glob("*/**/freezer.state"):
                with contextlib.suppress(OSError):
                    state.write_text("THAWED")
        for root in self.roots:
            # The kernel releases an emptied cgroup shortly after the last exit; v1 offers no notification to wait for.
            while True:
                below = [root, *(path for path in root.rglob("*") if path.is_dir())]
                for cgroup in below:
                    with contextlib.suppress(OSError, ProcessLookupError):
                        for pid in (cgroup / "cgroup.procs").read_text().split():
                            os.kill(int(pid), signal.SIGKILL)
                with contextlib.suppress(OSError):
                    for cgroup in reversed(below):
                        cgroup.rmdir()
                    break


def new_pod(name: str = "train", namespace: str = "team-a") -> Pod:
    return Pod(namespace, name, str(uuid.uuid4()))


@dataclass(slots=True)
class Node:
    """Starts the processes of containers, and kills those that a test left."""

    ground: Ground
    started: list[Started] = field(default_factory=list)

    async def start(self, pod: Pod, container: str, program: str = IDLE, *arguments: str) -> Started:
        """Run the Python ``program`` in a container; returns once it has printed ``ready``."""
        prefix, environment = self.ground.place(pod, container)
        source = f"import ctypes, os, platform, signal, sys, threading, time\n{program}"
        loop, output = asyncio.get_running_loop(), asyncio.StreamReader()
        ours, theirs = os.pipe()
        pipe, _ = await loop.connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(output), os.fdopen(ours, "rb", buffering=0)
        )
        # Not asyncio's own pipe: asyncio reports a process with such a pipe as ended only when its children's ends are
        # closed, too.
        child = await asyncio.create_subprocess_exec(
            *prefix, sys.executable, "-S", "-c", source, *arguments,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=theirs,
            env={**os.environ, **environment},
            start_new_session=True,
        )  # fmt: skip
        os.close(theirs)
        started = Started(child, output, pipe)
        self.started.append(started)
        assert await started.line() == "ready"
        return started

    async def close(self) -> None:
        for each in self.started:
            if each.runs:
                each.child.kill()
        self.ground.clear()
        for each in self.started:
            await each.ended()
            each.pipe.close()
        await asyncio.sleep(0)


def _writable(mount: Path) -> bool:
    return (mount / "cgroup.procs").exists() and os.access(mount, os.W_OK) and os.geteuid() == 0


def _first(*mounts: str) -> Path | None:
    paths = (Path(mount) for mount in mounts)
    return next((path for path in paths if _writable(path) and (path / "cgroup.controllers").exists()), None)


CGROUP2 = _first("/sys/fs/cgroup", "/sys/fs/cgroup/unified")
_CGROUP1 = (Path("/sys/fs/cgroup/pids"), Path("/sys/fs/cgroup/freezer"))
CGROUP1 = _CGROUP1 if all(_writable(mount) for mount in _CGROUP1) else None

WAYS = ["marker"]
if CGROUP2 is not None:
    WAYS += ["cgroup2", "cgroup2-without-kill"]
if CGROUP1 is not None:
    WAYS += ["cgroup1"]
CGROUP_WAYS = [way for way in WAYS if way != "marker"]
if CGROUP2 is None:
    print("NOT TESTED HERE: containers by cgroup v2 (writing to a cgroup2 mount is not permitted)", file=sys.__stderr__)
if CGROUP1 is None:
    print("NOT TESTED HERE: containers by cgroup v1 (no writable pids and freezer hierarchy)", file=sys.__stderr__)


def only_with(what: object) -> Callable[[_Test], _Test]:
    """Drop a test that needs what this machine may lack. The test then does not exist, instead of seeming to pass."""

    def keep_or_drop(test: _Test) -> _Test:
        return test if what else cast("_Test", None)

    return keep_or_drop


def ground_of(way: str) -> Ground:
    if way == "marker":
        return MarkerGround()
    if way == "cgroup1":
        assert CGROUP1 is not None
        return CgroupGround(CGROUP1)
    assert CGROUP2 is not None
    return CgroupGround((CGROUP2,), CgroupsWithoutKill if way.endswith("without-kill") else CgroupContainers)


@contextlib.asynccontextmanager
async def node_of(ground: Ground) -> AsyncIterator[Node]:
    node = Node(ground)
    try:
        yield node
    finally:
        await node.close()
