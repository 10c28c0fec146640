"""A node for ``scrubber doctor``: a directory laid out like a healthy node's root."""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import scrubber
from scrubber.api.client import ReadClient
from scrubber.config.policy_file import load_policy
from scrubber.doctor.checks import CHECKS, check_node
from scrubber.doctor.files import FileSystem
from scrubber.doctor.model import (
    CheckContext,
    CheckLevel,
    CheckResult,
    ClusterReport,
    DeviceReport,
    KubeletReport,
    ServiceReport,
)

__all__ = [
    "CONTAINERD",
    "ENVVAR",
    "KUBELET",
    "MOUNTS",
    "OPERATORS_TOOLKIT",
    "OUR_UID",
    "SERVED",
    "STATE",
    "TOOLKIT",
    "UNPRIVILEGED_UID",
    "Ended",
    "as_units",
    "beside_operator",
    "every_check_name",
    "found",
    "healthy",
    "levels",
    "pod_of",
    "process",
    "run",
    "run_unprivileged",
    "serving",
    "until_trusted",
    "with_driver",
    "write",
]

KUBELET = "var/lib/kubelet"
STATE = "var/lib/scrubber"
CONTAINERD = "etc/containerd/config.toml"
TOOLKIT = "etc/nvidia-container-runtime/config.toml"
OPERATORS_TOOLKIT = "usr/local/nvidia/toolkit/.config/nvidia-container-runtime/config.toml"
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
    devices=(DeviceReport("GPU-a", "0"), DeviceReport("GPU-b", "1", confidential="on")),
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


OUR_UID = "11111111-2222-3333-4444-555555555555"
_OPERANDS = (
    "nvidia-operator-validator",
    "nvidia-driver-daemonset",
    "nvidia-container-toolkit-daemonset",
    "nvidia-dcgm-exporter",
    "nvidia-mig-manager",
)
_PROGRAM = ("/opt/scrubber/bin/python", "/opt/scrubber/bin/scrubber", "plugin", "--registration=classic")
_VARIABLES = {
    "DEVICE_LIST_STRATEGY": "cdi-annotations,cdi-cri",
    "SCRUBBER_DRIVER_READY_FILE": "/run/nvidia/validations/driver-ready",
    "SCRUBBER_DEPLOY_LABEL": "nvidia.com/gpu.deploy.client",
    "SCRUBBER_YIELD_LABELS": "nvidia.com/gpu.deploy.device-plugin",
    "CONFIG_FILE": "/config/config.yaml",
}


def process(
    root: Path,
    pid: int,
    *,
    comm: str = "python",
    arguments: Sequence[str] = (),
    variables: Mapping[str, str] | None = None,
    cgroup: str = "/",
) -> None:
    """Write what ``/proc`` shows of a process of the node."""
    write(root, f"proc/{pid}/comm", f"{comm}\n")
    write(root, f"proc/{pid}/cmdline", "".join(f"{each}\0" for each in arguments))
    write(root, f"proc/{pid}/environ", "".join(f"{key}={value}\0" for key, value in (variables or {}).items()))
    write(root, f"proc/{pid}/cgroup", f"0::{cgroup}\n")


def pod_of(uid: str) -> str:
    """Return the cgroup of a container of the pod."""
    return f"/kubepods.slice/kubepods-pod{uid.replace('-', '_')}.slice/cri-containerd-{'0' * 8}.scope"


def beside_operator(
    node: CheckContext, *, version: str = "v26.7.0", changed: Mapping[str, str | None] | None = None
) -> CheckContext:
    """Return the node with NVIDIA's GPU Operator, NVSentinel and our pods, all well configured.

    This process is both our service and our plugin, as on every stage.

    Args:
        changed: variables of our pods that have another value; None: that are not set.
    """
    root = node.root
    for number, pod in enumerate(_OPERANDS):
        (node.pod_logs / f"gpu-operator_{pod}-x{number}_uid-{number}").mkdir(parents=True)
    (node.pod_logs / f"scrubber-system_scrubber-x_{OUR_UID}").mkdir()
    (node.pod_logs / "nvsentinel_platform-connectors-x_uid-9").mkdir()
    ready = "IS_HOST_DRIVER=false\nNVIDIA_DRIVER_ROOT=/run/nvidia/driver\nDRIVER_ROOT_CTR_PATH=/driver-root\n"
    write(root, "run/nvidia/validations/driver-ready", f"{ready}NVIDIA_DEV_ROOT=/run/nvidia/driver\n")
    write(root, "run/nvidia/validations/toolkit-ready")
    (root / TOOLKIT).unlink()
    write(root, OPERATORS_TOOLKIT, f"{ENVVAR} = false\n[nvidia-container-runtime]\nmode = 'cdi'\n")
    write(root, "usr/local/nvidia/toolkit/nvidia-cdi-hook")
    write(root, CONTAINERD, "version = 3\nimports = ['/etc/containerd/conf.d/*.toml']\n")
    handler = "plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.nvidia"
    write(root, "etc/containerd/conf.d/99-nvidia.toml", f"[{handler}]\nruntime_type = 'io.containerd.runc.v2'\n")
    bundle = {
        "annotations": {
            "io.kubernetes.cri.image-name": f"nvcr.io/nvidia/gpu-operator:{version}",
            "io.kubernetes.cri.sandbox-namespace": "gpu-operator",
        }
    }
    tasks = "run/containerd/io.containerd.runtime.v2.task/k8s.io"
    write(root, f"{tasks}/{'a' * 64}/config.json", json.dumps(bundle))
    variables = {key: value for key, value in {**_VARIABLES, **(changed or {})}.items() if value is not None}
    process(root, os.getpid(), arguments=_PROGRAM, variables=variables, cgroup=pod_of(OUR_UID))
    write(root, f"proc/{os.getpid()}/root/config/config.yaml", "version: v1\n")
    (root / f"proc/{os.getpid()}/root/var/lib/kubelet/pods").mkdir(parents=True)
    library = "/usr/lib/x86_64-linux-gnu/libnvidia-ml.so.570.133.20"
    write(root, f"proc/{os.getpid()}/mountinfo", f"40 30 0:9 {library} {library} ro,nosuid - overlay overlay ro\n")
    process(
        root,
        4800,
        comm="config-manager",
        variables={"PROCESS_TO_SIGNAL": "/opt/scrubber/bin/python"},
        cgroup=pod_of(OUR_UID),
    )
    policy = write(
        root, "policy.yaml", "name: mine\ninfrastructure: {pods: [{namespace: monitoring, serviceAccount: exporter}]}\n"
    )
    digest = load_policy(str(policy)).digest
    return serving(replace(node, policy=str(policy)), policy="mine", policy_digest=digest)


def as_units(node: CheckContext) -> CheckContext:
    """Return the node with our daemons as systemd units."""
    write(node.root, f"proc/{os.getpid()}/cgroup", "0::/system.slice/scrubber.service\n")
    return node


def with_driver(node: CheckContext) -> CheckContext:
    """Return the node with a DRA driver, beside a device plugin; this process is both, and offers no device as either."""
    (node.root / KUBELET / "plugins_registry/gpu.scrubber.dev-reg.sock").symlink_to(node.root / "listens")
    process(
        node.root, os.getpid(), arguments=("python", "scrubber", "dra", "--devices", "GPU-none", "--binding-conditions")
    )
    cdi = node.root / f"proc/{os.getpid()}/root/var/run/cdi"
    cdi.parent.mkdir(parents=True)
    (node.root / "var/run/cdi").mkdir(parents=True)
    cdi.symlink_to(node.root / "var/run/cdi")
    return replace(node, cluster=ClusterReport(version="v1.36.2", slices=1, devices=2))


def every_check_name(root: Path) -> tuple[str, ...]:
    """Return the names of all results, in the order of the checks: of plain and operator nodes, below ``root``."""
    with ExitStack() as stack:
        nodes = []
        for number in range(4):
            (root / str(number)).mkdir()
            nodes.append(stack.enter_context(healthy(root / str(number))))
        plain, pods, units, claims = nodes
        nodes = [plain, beside_operator(pods), as_units(beside_operator(units)), with_driver(claims)]
        return tuple(dict.fromkeys(result.name for check in CHECKS for node in nodes for result in check(node)))


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
import scrubber.cli.diagnosis, scrubber.api.client, scrubber.adapters.kubelet, scrubber.adapters.cgroups
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
