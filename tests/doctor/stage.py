"""A node for ``scrubber doctor``: a directory laid out like a healthy node's root."""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import socket
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import scrubber
from scrubber.api.client import ReadClient
from scrubber.config.policy_file import load_policy
from scrubber.doctor.checks import CHECKS, check_node
from scrubber.doctor.files import FileSystem
from scrubber.doctor.model import CheckContext, CheckLevel, CheckResult, DeviceReport, KubeletReport, ServiceReport

__all__ = [
    "CONTAINERD",
    "ENVVAR",
    "KUBELET",
    "MOUNTS",
    "SERVED",
    "STATE",
    "TOOLKIT",
    "UNPRIVILEGED_UID",
    "Ended",
    "found",
    "healthy",
    "levels",
    "run",
    "run_unprivileged",
    "serving",
    "until_trusted",
    "write",
]

KUBELET = "var/lib/kubelet"
STATE = "var/lib/scrubber"
CONTAINERD = "etc/containerd/config.toml"
TOOLKIT = "etc/nvidia-container-runtime/config.toml"
ENVVAR = "accept-nvidia-visible-devices-envvar-when-unprivileged"
MOUNTS = "accept-nvidia-visible-devices-as-volume-mounts"
UNPRIVILEGED_UID = 54321
"""An unused uid."""

SERVED = ServiceReport(
    version=scrubber.__version__,
    backend="nvidia",
    node="n1",
    policy="default",
    policy_digest=load_policy("default").digest,
    enforcement="enforce",
    ledger_status="ok",
    key_id="sha256:" + "ab" * 32,
    audit_head="7:" + "cd" * 32,
    devices=(DeviceReport("GPU-a", "0"), DeviceReport("GPU-b", "1")),
    kubelet_status="ok",
    pid=os.getpid(),
)
_ALL = "000001ffffffffff"
_GIGABYTES = 20 << 30


def write(root: Path, name: str, text: str = "") -> Path:
    """Write a file of the node, replacing an existing one; return its path."""
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.is_symlink():
        path.unlink()
    path.write_text(text, encoding="utf-8")
    return path


def _disks(path: Path) -> FileSystem:
    """Report a separate disk for the state directory; raises like the kernel."""
    path.stat()
    return FileSystem(2 if path.name == "scrubber" else 1, "", _GIGABYTES, False)


def _held(path: Path, stack: ExitStack) -> None:
    lock = stack.enter_context(path.open("w"))
    fcntl.flock(lock, fcntl.LOCK_EX)
    lock.write(f"{os.getpid()}\n")
    lock.flush()


@contextmanager
def healthy(root: Path) -> Iterator[CheckContext]:
    """Provide a node below ``root`` (a short path). This process is its kubelet, plugin and service, with the locks."""
    with ExitStack() as stack:
        listener = stack.enter_context(socket.socket(socket.AF_UNIX))
        listener.bind(str(root / "listens"))
        listener.listen(64)
        _lay_out_kubelet(root)
        _lay_out_machine(root)
        _lay_out_driver(root)
        sockets, state = root / "run/scrubber", root / STATE
        for purpose, mode in {"plugin": 0o700, "admin": 0o750, "read": 0o750}.items():
            (sockets / purpose).mkdir(parents=True)
            (sockets / purpose).chmod(mode)
            served = stack.enter_context(socket.socket(socket.AF_UNIX))
            served.bind(str(sockets / purpose / f"{purpose}.sock"))
            (sockets / purpose / f"{purpose}.sock").chmod(0o660)
        state.mkdir(mode=0o700)
        reserve = write(state, "ledger.reserve")
        with reserve.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, 4 << 20)
        write(state, "signing.key", "PEM").chmod(0o600)
        for lock in (sockets / "lock", state / "ledger.lock"):
            _held(lock, stack)
        yield CheckContext(
            service=SERVED,
            kubelet=KubeletReport(was_queried=True, is_trusted=True, containers_with_devices=1),
            root=root,
            pod_logs=root / "var/log/pods",
            socket_dir=sockets,
            state_dir=state,
            state_dir_known=True,
            policy="default",
            file_system=_disks,
        )


def _lay_out_kubelet(root: Path) -> None:
    for name in ("device-plugins/kubelet.sock", "pod-resources/kubelet.sock", "plugins_registry/scrubber-gpu-1.sock"):
        path = root / KUBELET / name
        path.parent.mkdir(parents=True)
        path.symlink_to(root / "listens")


def _lay_out_machine(root: Path) -> None:
    write(root, "proc/self/mountinfo", f"30 20 0:9 / {root}/sys/fs/cgroup rw - cgroup2 cgroup2 rw,nsdelegate\n")
    for name in ("status", "ns"):
        (root / "proc/self" / name).symlink_to(f"/proc/self/{name}")
    (root / "proc/locks").symlink_to("/proc/locks")
    write(root, "proc/sys/kernel/osrelease", "6.18.0-test\n")
    write(root, "proc/sys/kernel/random/boot_id", "b00t\n")
    write(root, f"proc/{os.getpid()}/status", f"Name:\tscrubber\nUid:\t0\t0\t0\t0\nCapEff:\t{_ALL}\n")
    write(root, "sys/fs/cgroup/cgroup.controllers", "pids\n")
    write(root, "sys/fs/cgroup/kubepods.slice/cgroup.kill")
    write(root, CONTAINERD, "version = 3\n[plugins.'io.containerd.cri.v1.runtime']\nenable_cdi = true\n")
    write(root, TOOLKIT, f"{ENVVAR} = false\n{MOUNTS} = true\n[nvidia-container-runtime]\nmode = 'auto'\n")


def _lay_out_driver(root: Path) -> None:
    version = (
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.133.20  Release Build\nGCC version: gcc 12\n"
    )
    write(root, "proc/driver/nvidia/version", version)
    write(root, "proc/driver/nvidia/params", 'EnableMSI: 1\nRegistryDwords: ""\n')
    write(root, "run/nvidia-persistenced/nvidia-persistenced.pid", "712\n")
    (root / "proc/712").mkdir()
    write(root, "dev/nvidia0").chmod(0o660)
    for name in ("libcuda.so.1", "libnvidia-ml.so.1"):
        write(root, f"usr/lib/x86_64-linux-gnu/{name}")


def found(node: CheckContext, name: str) -> CheckResult:
    """Return the only finding of that name; later checks than the one that returns it do not run."""
    for each in CHECKS:
        named = [check for check in each(node) if check.name == name]
        if named:
            (one,) = named
            return one
    raise AssertionError(f"nothing is called {name}")


def levels(node: CheckContext) -> dict[str, CheckLevel]:
    """Return the levels of the findings by name; of several with one name the last."""
    return {check.name: check.level for check in check_node(node)}


def serving(node: CheckContext, **changed: Any) -> CheckContext:
    """Return the node with a service that reports changed values."""
    return replace(node, service=replace(node.service, **changed))


@dataclass(frozen=True)
class Ended:
    """A finished ``scrubber doctor``."""

    code: int
    out: str
    err: str

    @property
    def report(self) -> Any:
        return json.loads(self.out)

    @property
    def levels(self) -> dict[str, str]:
        return {each["name"]: each["level"] for each in self.report["checks"]}

    def check(self, name: str) -> Any:
        (one,) = (each for each in self.report["checks"] if each["name"] == name)
        return one


async def until_trusted(service: ReadClient, seconds: float = 30.0) -> None:
    """Wait until the service trusts its kubelet: with one that lists no pod that takes a while."""
    async with asyncio.timeout(seconds):
        while True:
            if (await service.service_info()).kubelet_status == "ok":
                return
            await asyncio.sleep(0.05)


async def run(*words: str | Path, program: Sequence[str] = ("-m", "scrubber.cli.main")) -> Ended:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("SCRUBBER_")}
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, *program, "doctor", *map(str, words)),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        cwd=Path(__file__).parents[2],
        env=environment,
    )
    out, err = await process.communicate()
    assert process.returncode is not None
    assert b"Traceback" not in err, err.decode()
    return Ended(process.returncode, out.decode(), err.decode())


_UNPRIVILEGED = """
import os, sys
import scrubber.cli.commands.doctor, scrubber.api.client, scrubber.adapters.kubelet, scrubber.adapters.cgroups
import scrubber.adapters.clock, scrubber.adapters.ledger.state_directory, scrubber.config.policy_file
from scrubber.cli.main import main
from importlib import metadata

metadata.requires("gpu-scrubber")  # loads what it needs of the library, which others may not be able to read
if os.geteuid() == 0:
    os.setgroups([int(each) for each in sys.argv[1].split(",") if each])
    os.setgid(int(sys.argv[2]))
    os.setuid(int(sys.argv[2]))
main(sys.argv[3:])
"""


async def run_unprivileged(*words: str | Path, gids: Sequence[int] = ()) -> Ended:
    """Run ``scrubber doctor`` as an unprivileged user in the groups ``gids``; without root, as the current user.

    It starts as the current user, because another one may be unable to read this tree.
    """
    groups = ",".join(map(str, gids))
    return await run(*words, program=("-c", _UNPRIVILEGED, groups, str(UNPRIVILEGED_UID)))
