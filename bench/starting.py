"""Start times: the service until it reports ready, the plugin until it is registered, and the command line.

Also how long a stopped service keeps the driver open, and the gap without a registered plugin when one instance
replaces another.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import sys
import time
from collections.abc import Mapping, Sequence

from bench.figures import Quantiles, Timing
from bench.node import MEMORY
from bench.targets import LOADED_GRPC
from scrubber.adapters.children.process import wait_for_exit
from scrubber.cli.exit_codes import ExitCode
from scrubber.config.bundled import find_policy
from scrubber.doctor.checks import CHECKS
from scrubber.emulator.kubelet import Kubelet
from scrubber.emulator.playground import RESOURCE, Daemon, Playground

__all__ = ["command_line", "plugin_startup", "service_startup"]

_BARE_INTERPRETER = "bare interpreter"
_TIMEOUT = 60.0


async def service_startup(*, devices: int, starts: int) -> list[Timing]:
    """Measure from exec to ``READY=1``: every device has been checked, and hand-overs are accepted.

    And from SIGTERM until no child process is left, each of which could have the driver open.
    """
    measured: list[float] = []
    closed: list[float] = []
    bare: list[float] = []
    grpc: list[float] = []
    async with Playground(devices=devices, memory=MEMORY) as stage:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as supervisor:
            path = stage.directory / "notify"
            supervisor.bind(str(path))
            supervisor.setblocking(False)
            stage.service.environment = {"NOTIFY_SOCKET": str(path)}
            for _ in range(starts):
                bare.append(await _run("-c", "pass"))
                grpc.append(await _run("-c", LOADED_GRPC))
                began = time.perf_counter()
                await stage.service.start()
                await _ready(supervisor, stage)
                measured.append(time.perf_counter() - began)
                await stage.wait_until_clean(_TIMEOUT)
                closed.append(await _close_driver(stage))
                await stage.read_client.close()
                _drain(supervisor)
    title = f"start of the service until it is ready, {devices} devices"
    return [
        Timing("start.service", title, Quantiles.of(measured), Quantiles.of(grpc), LOADED_GRPC),
        Timing(
            "stop.driver-closed",
            f"SIGTERM → no child of the service has the driver open, {devices} devices",
            Quantiles.of(closed),
            Quantiles.of(bare),
            _BARE_INTERPRETER,
        ),
    ]


async def _close_driver(stage: Playground) -> float:
    """Stop the service; return the seconds from SIGTERM until the last of its children has exited."""
    pidfds = [os.pidfd_open(pid) for pid in stage.child_processes(stage.service)]
    if not pidfds:
        raise RuntimeError("the service has no child process, so nothing has the driver open")
    stopping = asyncio.create_task(stage.service.stop(_TIMEOUT))
    try:
        await asyncio.sleep(0)  # the signal is sent when the task starts
        began = time.perf_counter()
        await asyncio.gather(*map(wait_for_exit, pidfds))
        return time.perf_counter() - began
    finally:
        for pidfd in pidfds:
            os.close(pidfd)
        await stopping


async def plugin_startup(*, devices: int, starts: int) -> list[Timing]:
    """Measure from exec until the kubelet has the plugin's list, and the gap of a rolling update.

    The gap, by the kubelet's clock, is from the end of the old instance's stream to the new one's list. An admission in
    between fails.
    """
    measured: list[float] = []
    reference: list[float] = []
    gaps: list[float] = []
    async with Playground(devices=devices, memory=MEMORY) as stage:
        await stage.start_daemons(_TIMEOUT)
        await stage.wait_until_clean(_TIMEOUT)
        for _ in range(starts):
            await stage.plugin.stop()
            await stage.kubelet.wait_until(lambda kubelet: kubelet.allocatable(RESOURCE) == 0, _TIMEOUT)
            reference.append(await _run("-c", LOADED_GRPC))
            began = time.perf_counter()
            await stage.plugin.start()
            await stage.kubelet.wait_until(lambda kubelet: kubelet.allocatable(RESOURCE) == devices, _TIMEOUT)
            measured.append(time.perf_counter() - began)
        for number in range(starts):
            old, stage.plugin = stage.plugin, Daemon(stage.plugin.arguments, stage.directory / f"plugin-{number}.log")
            await stage.plugin.start()
            await _wait_for_standby(stage.plugin)
            before = len(stage.kubelet.events)
            await old.stop()
            await stage.kubelet.wait_until(lambda kubelet, since=before: _gap(kubelet, since) is not None, _TIMEOUT)  # type: ignore[misc]
            gaps.append(_gap(stage.kubelet, before) or 0.0)
    title = f"start of the plugin until the kubelet has its list, {devices} devices"
    return [
        Timing("start.plugin", title, Quantiles.of(measured), Quantiles.of(reference), LOADED_GRPC),
        Timing("rolling-update", "gap of a rolling update of the plugin, by the kubelet", Quantiles.of(gaps)),
    ]


def _gap(kubelet: Kubelet, since: int) -> float | None:
    """Return the seconds without a plugin; None if there was no gap."""
    ended: float | None = None
    for event in kubelet.events[since:]:
        if event.name == "StreamEnded":
            ended = event.at
        elif event.name == "ListAndWatch" and ended is not None:
            return event.at - ended
    return None


async def _wait_for_standby(daemon: Daemon) -> None:
    async with asyncio.timeout(_TIMEOUT):
        while True:
            if '"plugin.standby"' in daemon.log.read_text():
                return
            await asyncio.sleep(0.01)


async def command_line(stage: Playground, *, runs: int) -> list[Timing]:
    """Measure commands from exec to exit, alternating with an interpreter that only loads gRPC.

    The latter is a lower bound for commands that send a request.
    """
    socket_flag = ("--socket-dir", str(stage.socket_dir))
    doctor = ("doctor", *socket_flag, "-o", "json")
    verdict = await _verdict(stage, *doctor)
    rows: tuple[tuple[str, str, tuple[str, ...], Mapping[str, str]], ...] = (
        ("help", "scrubber --help", ("--help",), {}),
        ("version", "scrubber version", ("version",), {}),
        ("devices", "scrubber devices", ("devices", *socket_flag), {}),
        ("device", "scrubber device 0", ("device", "0", *socket_flag), {}),
        ("history", "scrubber history", ("history", *socket_flag), {}),
        (
            "completion",
            "Tab where a device is expected",
            ("device", *socket_flag, ""),
            {"_SCRUBBER_COMPLETE": "complete_zsh"},
        ),
        ("policy-check", "scrubber policy check FILE", ("policy", "check", str(find_policy("default"))), {}),
        ("doctor", f"scrubber doctor, {len(CHECKS)} checks", doctor, {}),
    )
    timings = []
    for name, title, words, environment in rows:
        measured: list[float] = []
        reference: list[float] = []
        for _ in range(runs):
            reference.append(await _run("-c", LOADED_GRPC))
            expected_status = verdict if words is doctor else ExitCode.OK
            measured.append(
                await _run("-m", "scrubber.cli.main", *words, environment=environment, expected_status=expected_status)
            )
        timings.append(Timing(f"command.{name}", title, Quantiles.of(measured), Quantiles.of(reference), LOADED_GRPC))
    return timings


async def _verdict(stage: Playground, *words: str) -> int:
    """Return the exit status of ``scrubber doctor`` on this machine; raise if it did not produce a report."""
    ended = await stage.run_command(*words)
    try:
        if json.loads(ended.stdout)["kind"] == "DoctorReport":
            return ended.returncode
    except ValueError:
        pass
    raise RuntimeError(f"scrubber doctor gave no report: {ended.stderr}")


async def _run(
    *arguments: str, environment: Mapping[str, str] | None = None, expected_status: int = ExitCode.OK
) -> float:
    """Return the seconds from exec to exit. Raises ``RuntimeError`` when the exit status is not ``wanted``."""
    began = time.perf_counter()
    process = await asyncio.create_subprocess_exec(
        sys.executable, *arguments, stdout=asyncio.subprocess.DEVNULL, env={**os.environ, **(environment or {})}
    )
    status = await process.wait()
    seconds = time.perf_counter() - began
    if status != expected_status:
        raise RuntimeError(f"{' '.join(_shown(arguments))} ended with {status}")
    return seconds


def _shown(arguments: Sequence[str]) -> list[str]:
    return ["python", *arguments]


async def _ready(supervisor: socket.socket, stage: Playground) -> None:
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(_TIMEOUT):
            while b"READY=1" not in await loop.sock_recv(supervisor, 4096):
                pass
    except TimeoutError:
        raise RuntimeError(f"the service did not become ready: {stage.service.log.read_text()[-2000:]}") from None


def _drain(supervisor: socket.socket) -> None:
    while True:
        try:
            supervisor.recv(4096)
        except BlockingIOError:
            return
