"""The environment of the demo and of the integration tests: a simulated node, an emulated kubelet, and our two daemons.

The second daemon is the device plugin or the DRA driver; for the latter there is a control plane.

Promise: the daemons are the shipped ones, started by their commands as an operator starts them; everything that was
started is ended when the playground is closed, also after a failure, and nothing but its own directories is touched.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from scrubber.api import scrubber_pb2 as pb
from scrubber.api.client import ReadClient
from scrubber.domain.errors import NotReady, Unavailable
from scrubber.emulator import markers
from scrubber.emulator.cgroups import writable_cgroup_parent
from scrubber.emulator.claim_cluster import NODE_NAME, ClaimCluster
from scrubber.emulator.kubelet import Kubelet
from scrubber.emulator.pods import ContainerSpec, EmulatedPod, PodSpec, RestartPolicy
from scrubber.emulator.timings import KubeletTimings

__all__ = [
    "LONGEST_WAIT",
    "RESOURCE",
    "CompletedCommand",
    "Daemon",
    "Playground",
    "fast_kubelet_timings",
    "gpu_pod_spec",
    "tenant_argv",
]

RESOURCE = "scrubber.dev/gpu"
LONGEST_WAIT = 300.0
"""Seconds; more than any step takes on a slow, busy machine. What hangs ends with a message all the same."""


def fast_kubelet_timings(factor: float = 0.1) -> KubeletTimings:
    """Return timings of a faster kubelet whose deadlines are not shorter than the real ones: slowness is no fault."""
    real = KubeletTimings()
    return replace(
        real.scaled(factor),
        dial_back=real.dial_back,
        watcher_get_info=real.watcher_get_info,
        watcher_notify=real.watcher_notify,
        pre_start_deadline=real.pre_start_deadline,
        dra_call=real.dra_call,
        termination_grace=2.0,
        sandbox_setup=0.05,
    )


def tenant_argv(*options: str) -> tuple[str, ...]:
    """Return the command of a container that runs the simulated tenant: ``scrubber sim tenant OPTIONS``."""
    return (sys.executable, "-m", "scrubber.adapters.sim.tenant", *options)


def gpu_pod_spec(
    name: str,
    namespace: str,
    argv: Sequence[str],
    *,
    gpus: int = 1,
    restart: RestartPolicy = RestartPolicy.NEVER,
    leave_children: bool = False,
) -> PodSpec:
    """Return a pod of one container ``main`` that requests ``gpus`` devices."""
    main = ContainerSpec("main", argv, {RESOURCE: gpus}, restart=restart)
    return PodSpec(name, namespace, [main], leave_children=leave_children)


async def _start_module(module: str, *arguments: str, **options: Any) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(sys.executable, "-m", module, *arguments, **options)


start_module: Callable[..., Awaitable[asyncio.subprocess.Process]] = _start_module
"""Starts ``python -m MODULE ARGUMENTS`` with the options of :func:`asyncio.create_subprocess_exec`; replaceable."""


@dataclass(frozen=True, slots=True)
class CompletedCommand:
    """A finished run of the ``scrubber`` command."""

    returncode: int
    stdout: str
    stderr: str


@dataclass(slots=True)
class Daemon:
    """One daemon process. It logs to a file, so that a failure can be analysed afterwards.

    Attributes:
        program: the module to run, and its own arguments before ``arguments``.
    """

    arguments: Sequence[str]
    log: Path
    environment: Mapping[str, str] = field(default_factory=dict)
    program: Sequence[str] = ("scrubber.cli.main",)
    process: asyncio.subprocess.Process | None = None

    @property
    def pid(self) -> int:
        assert self.process is not None, "the daemon was not started"
        return self.process.pid

    async def start(self) -> None:
        with self.log.open("ab") as log:
            self.process = await start_module(
                *self.program,
                *self.arguments,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, **self.environment},
            )

    async def wait_for_exit(self) -> int:
        """Return the exit status when the process has ended."""
        assert self.process is not None, "the daemon was not started"
        return await self.process.wait()

    async def kill(self) -> None:
        """Send SIGKILL, and wait until the process is gone."""
        if self.process is not None and self.process.returncode is None:
            self.process.kill()
            await self.process.wait()

    async def stop(self, timeout: float = 10.0) -> int:
        """Send SIGTERM and return the exit status; kill the process when that takes longer than ``timeout`` seconds."""
        assert self.process is not None, "the daemon was not started"
        if self.process.returncode is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                async with asyncio.timeout(timeout):
                    await self.process.wait()
            except TimeoutError:
                await self.kill()
        return self.process.returncode or 0


class Playground:
    """A simulated node, an emulated kubelet and the daemons, in one short-lived directory.

    Args:
        directory: where to put it all; a temporary directory when None, removed at the end unless ``keep``.
        memory: bytes of each simulated device, in the format of ``scrubber sim create --memory``.
        policy: name or file.
        watch_interval: watch interval of the service, in seconds.
        dra: have pods request devices by claims: with a control plane, and the DRA driver instead of the device plugin.
        program: a program that manages the simulated devices, for the command backend; None: the ``sim`` backend does.

    Attributes:
        plugin: the device plugin, or the DRA driver.
        cluster: the control plane; None without ``dra``.
    """

    def __init__(
        self,
        *,
        directory: Path | None = None,
        keep: bool = False,
        devices: int = 4,
        memory: str = "64MiB",
        policy: str = "default",
        timings: KubeletTimings | None = None,
        watch_interval: float = 0.2,
        registration: str = "auto",
        dra: bool = False,
        program: Path | None = None,
    ) -> None:
        self._keep = keep or directory is not None
        self.directory = directory or Path(tempfile.mkdtemp(prefix="scrubber-", dir="/tmp"))
        self.directory.mkdir(parents=True, exist_ok=True)
        self._devices, self._memory = devices, memory
        # Memory files belong on tmpfs: on a disk, clearing them would measure the disk.
        shm = Path("/dev/shm")
        self.sim_dir = Path(tempfile.mkdtemp(prefix="simgpu-", dir=shm if os.access(shm, os.W_OK) else self.directory))
        self.socket_dir = self.directory / "run"
        self.cgroup_parent = writable_cgroup_parent()
        self.cluster = ClaimCluster() if dra else None
        self.kubelet = Kubelet(
            self.directory / "k",
            timings=timings or fast_kubelet_timings(),
            cgroup_parent=self.cgroup_parent,
            cluster=self.cluster.api if self.cluster else None,
            node_name=NODE_NAME,
        )
        backend = ("--backend", "sim", "--sim-dir", str(self.sim_dir))
        if program is not None:
            backend = ("--backend", "command", "--config", str(self._write_command_file(program)))
        service = [
            "serve",
            *(*backend, "--state-dir", str(self.directory / "state")),
            *("--socket-dir", str(self.socket_dir), "--policy", policy, "--kubelet-dir", str(self.kubelet.root)),
            *("--pod-resources-socket", str(self.kubelet.pod_resources_socket)),
            *("--pod-logs-dir", str(self.kubelet.pod_logs), "--metrics-address", "off"),
            *("--poll-interval", f"{watch_interval}s", "--list-stabilization-window", "2s", "--log-format", "json"),
        ]
        if self.cgroup_parent is not None:
            service += ["--cgroup-root", str(self.cgroup_parent)]
        elif program is not None:
            service += ["--container-identity", "marker"]
        self.service = Daemon(service, self.directory / "service.log")
        plugin = [
            "plugin",
            *("--kubelet-dir", str(self.kubelet.root), "--resource-name", RESOURCE, "--registration", registration),
        ]
        driver = [
            "dra",
            *("--node-name", NODE_NAME, "--kubeconfig", str(self._kubeconfig)),
            *("--kubelet-plugins-dir", str(self.kubelet.plugins), "--registry-dir", str(self.kubelet.plugins_registry)),
            *("--cdi-dir", str(self.kubelet.cdi_directory)),
        ]
        common = ["--socket-dir", str(self.socket_dir), "--log-format", "json", "--metrics-address", "off"]
        self.plugin = Daemon(
            [*(driver if dra else plugin), *common], self.directory / f"{'dra' if dra else 'plugin'}.log"
        )
        self.read_client = ReadClient(self.socket_dir)

    @property
    def program(self) -> Path:
        """The copy of the command backend's program that the service runs."""
        return self.directory / "program"

    def _write_command_file(self, program: Path) -> Path:
        shutil.copyfile(program, self.program)
        self.program.chmod(0o755)
        config = self.directory / "command.yaml"
        config.write_text(
            f"program: {self.program}\nenvironment: {{SIMULATED_NODE: {self.sim_dir}}}\npollInterval: 2s\n"
        )
        return config

    async def __aenter__(self) -> Self:
        try:
            created = await self.run_command(
                "sim", "create", "--dir", str(self.sim_dir), "--devices", str(self._devices), "--memory", self._memory
            )
            if created.returncode != 0:
                raise RuntimeError(f"the simulated node could not be created: {created.stderr}")
            if self.cluster is not None:
                await self.cluster.start(self._kubeconfig)
            await self.kubelet.start()
            if self.cluster is not None:
                # A slice that is published before would be deleted.
                await self.kubelet.wait_until(
                    lambda node: any(each.name == "SlicesDeleted" for each in node.events), LONGEST_WAIT
                )
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """End the daemons, the kubelet and its containers; remove what is not to be kept."""
        await self.read_client.close()
        for daemon in (self.plugin, self.service):
            if daemon.process is not None:
                await daemon.stop()
        try:
            await self.kubelet.close()
        finally:
            if self.cluster is not None:
                await self.cluster.close()
        shutil.rmtree(self.sim_dir, ignore_errors=True)
        if not self._keep:
            self.remove()

    def remove(self) -> None:
        """Remove logs and ledger too."""
        shutil.rmtree(self.directory, ignore_errors=True)

    @property
    def _kubeconfig(self) -> Path:
        return self.directory / "kubeconfig"

    @staticmethod
    def child_processes(daemon: Daemon) -> dict[int, int]:
        """Return PID → start time (clock ticks since boot) of each child process of ``daemon``."""
        pids: list[int] = []
        for task in Path(f"/proc/{daemon.pid}/task").iterdir():
            with suppress(OSError):  # a thread that has just ended
                pids += [int(each) for each in (task / "children").read_bytes().split(b" ") if each]
        return {pid: started for pid in pids if (started := _start_time(pid)) is not None}

    async def wait_for_eraser(self, daemon: Daemon, timeout: float) -> dict[int, int]:
        """Wait for a child of ``daemon`` that clears a device; return its PID → start time.

        Raises:
            TimeoutError: there was none within ``timeout`` seconds.
        """
        try:
            async with asyncio.timeout(timeout):
                while True:
                    for pid, started in self.child_processes(daemon).items():
                        with suppress(OSError):  # a child that has just ended
                            if b"eraser" in Path(f"/proc/{pid}/cmdline").read_bytes():
                                return {pid: started}
                    await asyncio.sleep(0.01)
        except TimeoutError as error:
            raise TimeoutError(f"not within {timeout:g} s: an eraser of the service clears a device") from error

    @staticmethod
    def running_processes(processes: Mapping[int, int]) -> list[int]:
        """Return those of ``processes`` (PID → start time) that still run."""
        return [pid for pid, started in processes.items() if _start_time(pid) == started]

    def device_files(self) -> list[Path]:
        """Return the description files of the whole simulated devices."""
        return sorted((self.sim_dir / "devices").glob("*/device.json"))

    def pod_processes(self, pod: EmulatedPod) -> list[int]:
        """Return the PIDs of the living processes of a pod's containers, without its sandbox."""
        return [pid for name in pod.records for pid in markers.marked_processes({pod.uid}, name)]

    async def run_command(self, *arguments: str, timeout: float = LONGEST_WAIT) -> CompletedCommand:
        """Run ``scrubber ARGUMENTS``, as an operator would, with the playground's socket directory set.

        In every case its process has ended when this returns: none can still create files that :meth:`close` removes.

        Raises:
            TimeoutError: it took longer than ``timeout`` seconds, and was killed.
        """
        process = await start_module(
            "scrubber.cli.main",
            *arguments,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env={**os.environ, "SCRUBBER_SOCKET_DIR": str(self.socket_dir), "NO_COLOR": "1"},
        )
        try:
            async with asyncio.timeout(timeout):
                out, err = await process.communicate()
        except TimeoutError as error:
            raise TimeoutError(f"not within {timeout:g} s: the end of scrubber {' '.join(arguments)}") from error
        finally:
            if process.returncode is None:
                process.kill()
                # not wait(): that does not return while output that is never read keeps its pipe open
                await process.communicate()
        return CompletedCommand(process.returncode or 0, out.decode(), err.decode())

    async def start_daemons(self, timeout: float = LONGEST_WAIT) -> None:
        """Start both, and wait until pods can get all devices of a service that has checked each of them.

        Raises:
            RuntimeError: a daemon exited instead.
            TimeoutError: the devices did not appear within ``timeout`` seconds.
        """
        await self.service.start()
        await self.plugin.start()
        exits = {asyncio.ensure_future(each.wait_for_exit()): each for each in (self.service, self.plugin)}
        ready = asyncio.ensure_future(self.wait_for_available(self._devices, timeout))
        try:
            ended, _ = await asyncio.wait((ready, *exits), return_when=asyncio.FIRST_COMPLETED)
        finally:
            for each in (ready, *exits):
                each.cancel()
            await asyncio.gather(ready, *exits, return_exceptions=True)
        if ready in ended:
            ready.result()
            return
        daemon = next(exits[each] for each in exits if each in ended)
        raise RuntimeError(f"scrubber {daemon.arguments[0]} exited while it was starting; its log is {daemon.log}")

    async def wait_for_available(self, count: int, timeout: float) -> None:
        """Wait until pods can get exactly ``count`` devices, those that they have included.

        Raises:
            TimeoutError: that was not so within ``timeout`` seconds; the message contains both numbers.
        """
        if self.cluster is None:
            await self.kubelet.wait_for_allocatable(RESOURCE, count, timeout)
        else:
            await self.cluster.wait_for_schedulable(count, timeout)

    def gpu_pod(self, name: str, namespace: str, argv: Sequence[str], *, gpus: int = 1, **more: Any) -> PodSpec:
        """Return :func:`gpu_pod_spec`, or with ``dra`` the same pod with a claim of ``gpus`` devices."""
        spec = gpu_pod_spec(name, namespace, argv, gpus=gpus, **more)
        if self.cluster is None:
            return spec
        claim = self.cluster.pod_claim(namespace, gpus)
        containers = [replace(each, resources={}, claims=[claim.name]) for each in spec.containers]
        return replace(spec, containers=containers, claims=[claim])

    async def run_pod(self, spec: PodSpec) -> EmulatedPod:
        """Create a pod and wait until it was admitted to the node or refused, with ``dra`` until it was scheduled.

        Raises:
            TimeoutError: it was not scheduled within :data:`LONGEST_WAIT`.
        """
        return await (self.kubelet.run(spec) if self.cluster is None else self.kubelet.submit(spec, LONGEST_WAIT))

    def devices_of(self, pod: EmulatedPod) -> tuple[str, ...]:
        """Return the ids of the devices that a pod was assigned, or with ``dra`` allocated."""
        return pod.device_ids if self.cluster is None else self.cluster.device_ids(pod)

    async def wait_for_devices(
        self,
        condition: Callable[[Sequence[pb.Device]], bool],
        timeout: float,
        goal: str = "the devices are in the expected state",
    ) -> Sequence[pb.Device]:
        """Wait until ``condition`` holds for the service's devices; the service may stop and start meanwhile.

        Args:
            goal: what the condition means, for the message.

        Raises:
            TimeoutError: it did not hold within ``timeout`` seconds; the message contains the devices' states.
        """
        states = "the service did not answer"
        try:
            async with asyncio.timeout(timeout):
                while True:
                    try:
                        async for news in self.read_client.watch_devices():
                            states = ", ".join(f"device {each.index} is {each.state}" for each in news.devices)
                            if condition(news.devices):
                                return news.devices
                    except (Unavailable, NotReady):
                        await self.read_client.close()
                        await asyncio.sleep(0.05)
        except TimeoutError as error:
            raise TimeoutError(f"not within {timeout:g} s: {goal} ({states})") from error

    async def wait_until_clean(self, timeout: float = LONGEST_WAIT) -> Sequence[pb.Device]:
        """Wait until every device is healthy and either clean or in use."""
        return await self.wait_for_devices(
            lambda devices: (
                len(devices) == self._devices and all(each.state in ("clean", "in-use") for each in devices)
            ),
            timeout,
            f"all {self._devices} devices are clean or in use",
        )


def _start_time(pid: int) -> int | None:
    """Return the start time of a living process; None for one that is gone or a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b") ")[2].split(b" ")
    except OSError:
        return None
    return None if fields[0] == b"Z" else int(fields[19])
