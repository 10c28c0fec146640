"""``python -m bench.peers``: our plugin beside NVIDIA's and ``nvidia-smi``, over the stand-in for NVIDIA's driver, as one table.

Everything but the program under test is the same: eight GPUs of the stand-in, the emulated kubelet, this process as the
client. NVIDIA's plugin is a binary that the caller provides; without one, its rows are missing and the table says so. The
contestants run one after the other, so that none is measured beside the others, and each figure is measured alternately
with its reference.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import shutil
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import grpc

from bench import machine
from bench.echo import REFERENCE, Echo
from bench.fault import quick_recovery
from bench.figures import Quantiles
from bench.footprint import pss, thread_seconds
from bench.node import BenchNode, hand_over_message
from bench.report import COMPARISON, table
from plugin.api import deviceplugin_pb2 as api
from plugin.api import deviceplugin_pb2_grpc as rpc
from scrubber import __version__
from scrubber.emulator.kubelet import Kubelet
from scrubber.emulator.playground import fast_kubelet_timings
from tests.integration.nvidia_stage import RESOURCE, NvidiaStage
from tests.nvidia.gpu import Gpu
from tests.nvidia.machine import Machine

__all__ = ["Extent", "PeerRow", "main", "render"]

OURS, NVIDIA, SMI = "scrubber", "NVIDIA's plugin", "nvidia-smi"
_GPUS = 8
_PREFERRED = 4
_XID = 95
_TIMEOUT = 120.0
_HUNG_LIMIT = 10.0
"""Seconds after which a call, or a change of the list, is given up: the kubelet itself has no deadline for it."""
_BARE_INTERPRETER = "bare interpreter"
_BARE_SERVER = "bare gRPC server, 1 echo a second"
_IN_A_NAMESPACE = (
    *("unshare", "--mount", "--propagation", "private", "/bin/sh", "-c"),
    'mount -t tmpfs none /var/lib && mkdir -p "$1" && mount --bind "$0" "$1" && shift && exec "$@"',
)
"""NVIDIA's plugin knows one directory only. It gets the emulated kubelet's there, and this machine's stays as it is."""
_KUBELET_PLUGINS = "/var/lib/kubelet/device-plugins"


@dataclass(frozen=True, slots=True)
class Extent:
    """Extent of a run: numbers of samples, unless stated otherwise."""

    calls: int
    faults: int
    hung: int
    restarts: int
    commands: int
    windows: int
    """Readings of memory and processor time at rest."""
    window_seconds: float


FULL = Extent(calls=1000, faults=104, hung=20, restarts=20, commands=100, windows=20, window_seconds=5.0)
QUICK = Extent(calls=60, faults=8, hung=2, restarts=2, commands=5, windows=2, window_seconds=1.0)


@dataclass(frozen=True, slots=True)
class PeerRow:
    """One figure of one contestant, with its reference.

    Attributes:
        unit: ``ms`` (values in seconds), ``MB`` or ``% of a core``.
        unanswered: samples without a result within their limit; they are not part of ``measured``.
        limit: that limit in seconds.
        measured: None if no sample has a result.
    """

    figure: str
    contestant: str
    measured: Quantiles | None
    reference: Quantiles
    reference_name: str
    unit: str = "ms"
    unanswered: int = 0
    limit: float = _TIMEOUT


class Contestant(Protocol):
    """A device plugin that serves the GPUs of a machine to an emulated kubelet."""

    name: str
    kubelet: Kubelet
    gpus: tuple[Gpu, ...]
    plugin: rpc.DevicePluginStub

    def daemons(self) -> Sequence[int]:
        """Return the PIDs of the processes that were started, without their children."""

    async def recover(self) -> None:
        """Return when every GPU is listed as healthy again after faults."""


class _Ours:
    """The shipped service and plugin, under a policy with which a GPU recovers within seconds."""

    name = OURS

    def __init__(self, stage: NvidiaStage, node: BenchNode) -> None:
        self.kubelet, self.gpus, self.plugin = stage.kubelet, stage.machine.gpus, node.plugin
        self._stage = stage

    @classmethod
    @asynccontextmanager
    async def start(cls, scratch: Path) -> AsyncIterator[_Ours]:
        stage = NvidiaStage(gpus=_GPUS, policy=str(quick_recovery(scratch)), serve=("--poll-interval", "1s"))
        async with BenchNode.on(stage) as node:
            yield cls(stage, node)

    def daemons(self) -> Sequence[int]:
        return self._stage.service.pid, self._stage.plugin.pid

    async def recover(self) -> None:
        await self.kubelet.wait_for_allocatable(RESOURCE, _GPUS, _TIMEOUT)


class _Nvidias:
    """NVIDIA's plugin. A GPU that it reported as unhealthy stays so until the plugin is started again."""

    name = NVIDIA

    def __init__(self, binary: Path, directory: Path, driver: Machine, kubelet: Kubelet) -> None:
        self.kubelet, self.gpus = kubelet, driver.gpus
        self._binary, self._log, self._driver = binary, directory / "plugin.log", driver
        channel = grpc.aio.insecure_channel(
            f"unix:{kubelet.device_plugins / 'nvidia-gpu.sock'}",
            options=(("grpc.initial_reconnect_backoff_ms", 50), ("grpc.max_reconnect_backoff_ms", 200)),
        )
        self._channel, self.plugin = channel, rpc.DevicePluginStub(channel)
        self._process: asyncio.subprocess.Process | None = None
        self._logged = 0

    @classmethod
    @asynccontextmanager
    async def start(cls, binary: Path, directory: Path) -> AsyncIterator[_Nvidias]:
        kubelet = Kubelet(directory / "k", timings=fast_kubelet_timings())
        with closing(Machine.create(directory / "w", gpus=_GPUS)) as driver:
            async with kubelet:
                contestant = cls(binary, directory, driver, kubelet)
                try:
                    await contestant._start()
                    yield contestant
                finally:
                    await contestant._channel.close()
                    await contestant._stop()

    def daemons(self) -> Sequence[int]:
        assert self._process is not None
        return (self._process.pid,)

    async def recover(self) -> None:
        await self._stop()
        await self.kubelet.wait_for_allocatable(RESOURCE, 0, _TIMEOUT)
        await self._start()

    async def _start(self) -> None:
        options = ("--driver-root", str(self._driver.root), "--device-discovery-strategy", "nvml")
        with self._log.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                *(*_IN_A_NAMESPACE, str(self.kubelet.device_plugins), _KUBELET_PLUGINS, str(self._binary), *options),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, **self._driver.environment},
            )
        listed = asyncio.ensure_future(self.kubelet.wait_for_allocatable(RESOURCE, _GPUS, _TIMEOUT))
        ended = asyncio.ensure_future(self._process.wait())
        await asyncio.wait((listed, ended), return_when=asyncio.FIRST_COMPLETED)
        if not listed.done() or listed.exception() is not None:
            listed.cancel()
            await asyncio.gather(listed, return_exceptions=True)
            raise RuntimeError(f"NVIDIA's plugin did not register its {_GPUS} GPUs: {self._log.read_text()[-2000:]}")
        # NVML's events count from the registration for them on, which follows that with the kubelet.
        await self._watches_events()

    async def _watches_events(self) -> None:
        """Wait until the plugin has registered for the events of its GPUs, which it logs just before."""
        async with asyncio.timeout(_TIMEOUT):
            while True:
                if b"Ignoring the following XIDs" in self._log.read_bytes()[self._logged :]:
                    break
                await asyncio.sleep(0.01)
        self._logged = self._log.stat().st_size

    async def _stop(self) -> None:
        if self._process is not None and self._process.returncode is None:
            self._process.kill()  # not SIGTERM: a plugin with a call that hangs in the driver does not end by it
            await self._process.wait()


async def contest(contestant: Contestant, echo: Echo, extent: Extent) -> list[PeerRow]:
    """Return every figure of ``contestant``. The kubelet's restarts come last: a plugin may serve on another socket afterwards."""
    ids = [gpu.uuid for gpu in contestant.gpus]
    allocate = api.AllocateRequest(container_requests=[api.ContainerAllocateRequest(devices_ids=ids[:1])])
    rows = [
        await _calls("Allocate", contestant, echo, lambda: contestant.plugin.Allocate(allocate), extent.calls),
        await _calls(
            f"GetPreferredAllocation, {_PREFERRED} of {_GPUS}",
            contestant,
            echo,
            lambda: contestant.plugin.GetPreferredAllocation(_preference(ids)),
            extent.calls,
        ),
    ]
    rows += await _at_rest(contestant, echo, extent)
    rows.append(await _faults(contestant, echo, extent.faults))
    rows += await _hung_call(contestant, echo, extent.hung)
    rows.append(await _kubelet_restarts(contestant, echo, extent.restarts))
    return rows


def _preference(ids: Sequence[str]) -> api.PreferredAllocationRequest:
    request = api.ContainerPreferredAllocationRequest(available_deviceIDs=ids, allocation_size=_PREFERRED)
    return api.PreferredAllocationRequest(container_requests=[request])


async def _calls(
    figure: str, contestant: Contestant, echo: Echo, call: Callable[[], Awaitable[object]], samples: int
) -> PeerRow:
    measured: list[float] = []
    reference: list[float] = []
    message = hand_over_message(contestant.gpus[0].uuid)
    for number in range(-20, samples):  # the first ones open connections
        beside = await echo(message)
        began = time.perf_counter()
        await call()
        seconds = time.perf_counter() - began
        if number >= 0:
            measured.append(seconds)
            reference.append(beside)
    return PeerRow(figure, contestant.name, Quantiles.of(measured), Quantiles.of(reference), REFERENCE)


async def _faults(contestant: Contestant, echo: Echo, samples: int) -> PeerRow:
    measured: list[float] = []
    reference: list[float] = []
    while len(measured) < samples:
        for gpu in contestant.gpus[: samples - len(measured)]:
            reference.append(await echo(hand_over_message(gpu.uuid)))
            began = time.perf_counter()
            gpu.raise_xid(_XID)
            await _unlisted(contestant, gpu, _TIMEOUT)
            measured.append(time.perf_counter() - began)
        await contestant.recover()
    figure = "XID → the kubelet has the GPU as Unhealthy"
    return PeerRow(figure, contestant.name, Quantiles.of(measured), Quantiles.of(reference), REFERENCE)


async def _unlisted(contestant: Contestant, gpu: Gpu, timeout: float) -> None:
    await contestant.kubelet.wait_until(lambda kubelet: gpu.uuid not in kubelet.healthy_devices(RESOURCE), timeout)


async def _kubelet_restarts(contestant: Contestant, echo: Echo, samples: int) -> PeerRow:
    measured: list[float] = []
    reference: list[float] = []
    for _ in range(samples):
        reference.append(await echo(hand_over_message(contestant.gpus[0].uuid)))
        await contestant.kubelet.stop()
        began = time.perf_counter()
        await contestant.kubelet.start()
        await contestant.kubelet.wait_for_allocatable(RESOURCE, _GPUS, _TIMEOUT)
        measured.append(time.perf_counter() - began)
    figure = "start of the kubelet's process → it has all GPUs again"
    return PeerRow(figure, contestant.name, Quantiles.of(measured), Quantiles.of(reference), REFERENCE)


async def _hung_call(contestant: Contestant, echo: Echo, samples: int) -> list[PeerRow]:
    """One GPU hangs in every call of NVML: is it withdrawn, and does the kubelet still get answers about the others?"""
    broken, *_ = contestant.gpus
    message = hand_over_message(broken.uuid)
    reference = [await echo(message)]
    broken.hang()
    began = time.perf_counter()
    withdrawn: list[float] = []
    try:
        await _unlisted(contestant, broken, _HUNG_LIMIT)
        withdrawn.append(time.perf_counter() - began)
    except TimeoutError:
        pass
    rows = [_limited("hung NVML call → the kubelet has the GPU as Unhealthy", contestant, withdrawn, reference, 1)]

    measured: list[float] = []
    reference = []
    asked = 0
    for _ in range(samples):
        request = _preference(sorted(contestant.kubelet.healthy_devices(RESOURCE)))
        reference.append(await echo(message))
        asked += 1
        began = time.perf_counter()
        try:
            await contestant.plugin.GetPreferredAllocation(request, timeout=_HUNG_LIMIT)
            measured.append(time.perf_counter() - began)
        except grpc.aio.AioRpcError as error:
            if error.code() is not grpc.StatusCode.DEADLINE_EXCEEDED:
                raise
            break  # the calls behind it wait for the same lock of the driver
    broken.heal()
    await contestant.recover()
    figure = f"GetPreferredAllocation, {_PREFERRED} of the listed GPUs, while one hangs in NVML"
    return [*rows, _limited(figure, contestant, measured, reference, asked)]


def _limited(
    figure: str, contestant: Contestant, measured: Sequence[float], reference: Sequence[float], asked: int
) -> PeerRow:
    quantiles = Quantiles.of(measured) if measured else None
    missing = asked - len(measured)
    return PeerRow(
        figure, contestant.name, quantiles, Quantiles.of(reference), REFERENCE, unanswered=missing, limit=_HUNG_LIMIT
    )


async def _at_rest(contestant: Contestant, echo: Echo, extent: Extent) -> list[PeerRow]:
    """Compare memory and processor time of all processes with those of the echo's server, called once a second."""
    memory, cpu, memory_beside, cpu_beside = [list[float]() for _ in range(4)]
    message = hand_over_message(contestant.gpus[0].uuid)
    count = 0
    for _ in range(extent.windows):
        began, before, beside = time.monotonic(), thread_seconds(_processes(contestant)), thread_seconds([echo.pid])
        while (rest := began + extent.window_seconds - time.monotonic()) > 0:
            await echo(message)
            await asyncio.sleep(min(1.0, rest))
        passed = time.monotonic() - began
        pids = _processes(contestant)
        cpu.append(_share(before, thread_seconds(pids), passed))
        cpu_beside.append(_share(beside, thread_seconds([echo.pid]), passed))
        memory.append(pss(pids))
        memory_beside.append(pss([echo.pid]))
        count = max(count, len(pids))
    return [
        PeerRow(
            f"memory at rest (PSS), {count} process{'es' * (count > 1)}",
            contestant.name,
            Quantiles.of(memory),
            Quantiles.of(memory_beside),
            _BARE_SERVER,
            unit="MB",
        ),
        PeerRow(
            "processor time at rest",
            contestant.name,
            Quantiles.of(cpu),
            Quantiles.of(cpu_beside),
            _BARE_SERVER,
            unit="% of a core",
        ),
    ]


def _share(before: Mapping[int, float], after: Mapping[int, float], seconds: float) -> float:
    """Return the percentage of a core. What ended in between is not counted."""
    return 100 * sum(used - before.get(thread, 0.0) for thread, used in after.items()) / seconds


def _processes(contestant: Contestant) -> list[int]:
    """Return the contestant's processes, children included."""
    found = list(contestant.daemons())
    for each in found:
        with suppress(OSError):  # a process that has just ended
            for task in Path(f"/proc/{each}/task").iterdir():
                found += [int(child) for child in (task / "children").read_text().split()]
    return found


async def prolog_commands(directory: Path, samples: int) -> list[PeerRow]:
    """Measure what prologs run without us: they read the GPU's used memory, and reset it."""
    rows = []
    with closing(Machine.create(directory / "prolog", gpus=_GPUS)) as driver:
        gpu = driver.gpus[0].uuid
        for figure, words in (
            ("prolog: used memory of a GPU", ("--query-gpu=memory.used", "--format=csv,noheader", "-i", gpu)),
            ("prolog: reset of a GPU", ("--gpu-reset", "-i", gpu)),
        ):
            measured: list[float] = []
            reference: list[float] = []
            for _ in range(samples):
                reference.append(await _command(sys.executable, "-IS", "-c", "pass"))
                measured.append(await _command(str(driver.nvidia_smi), *words))
            rows.append(PeerRow(figure, SMI, Quantiles.of(measured), Quantiles.of(reference), _BARE_INTERPRETER))
    return rows


async def _command(*words: str) -> float:
    began = time.perf_counter()
    process = await asyncio.create_subprocess_exec(*words, stdout=asyncio.subprocess.DEVNULL)
    if await process.wait() != 0:
        raise RuntimeError(f"{' '.join(words)} ended with {process.returncode}")
    return time.perf_counter() - began


async def run_peers(binary: Path | None, extent: Extent, scratch: Path) -> list[PeerRow]:
    """Measure every contestant, one after the other."""
    rows: list[PeerRow] = []
    async with Echo.start(scratch / "echo.sock") as echo:
        _log_progress(OURS)
        async with _Ours.start(scratch) as ours:
            rows += await contest(ours, echo, extent)
        if binary is not None:
            _log_progress(NVIDIA)
            directory = scratch / "n"
            directory.mkdir()
            async with _Nvidias.start(binary, directory) as nvidias:
                rows += await contest(nvidias, echo, extent)
        _log_progress(SMI)
        rows += await prolog_commands(scratch, extent.commands)
    return rows


def render(rows: Sequence[PeerRow], binary: bool) -> str:
    """Return the table, the rows of one figure below each other."""
    return "\n".join(_lines(rows, binary))


def _lines(rows: Sequence[PeerRow], binary: bool) -> Iterator[str]:
    yield "# Peers"
    yield ""
    yield f"Written by `python -m bench.peers`: scrubber {__version__}, {_GPUS} GPUs of the stand-in for NVIDIA's driver."
    where = machine.describe_machine()
    yield f"{where.cpu}, {where.cores} cores, {where.kernel}, {where.python}, grpcio {where.grpc}, load {where.load:g}."
    if not binary:
        yield ""
        yield "NVIDIA's plugin is not in this table: no binary was given (`--nvidia-plugin PATH`)."
    yield ""
    order = {figure: number for number, figure in enumerate(dict.fromkeys(_kind(row) for row in rows))}
    yield from table(
        (
            "figure",
            "of",
            *COMPARISON,
        ),
        [_cells(row) for row in sorted(rows, key=lambda row: order[_kind(row)])],
    )
    yield ""
    yield "With fewer than 100 samples, p99 is the worst one."


def _kind(row: PeerRow) -> str:
    return row.figure.partition(",")[0] if row.unit == "MB" else row.figure


def _cells(row: PeerRow) -> tuple[str, ...]:
    reference = row.reference
    if row.measured is None:
        nothing = f"none within {row.limit:g} s"
        return (row.figure, row.contestant, nothing, nothing, row.reference_name, *_pair(row, reference), "", "", "0")
    ratios = (row.measured.p50 / reference.p50, row.measured.p99 / reference.p99)
    samples = f"{row.measured.samples}{f', and {row.unanswered} without an answer' if row.unanswered else ''}"
    return (
        *(row.figure, row.contestant, *_pair(row, row.measured), row.reference_name, *_pair(row, reference)),
        *(f"{ratio:.3g}" for ratio in ratios),
        samples,
    )


def _pair(row: PeerRow, quantiles: Quantiles) -> tuple[str, str]:
    factor = 1000 if row.unit == "ms" else 1
    values = (factor * quantiles.p50, factor * quantiles.p99)
    first, second = (f"{value:,.0f}" if value >= 1000 else f"{value:.3g}" for value in values)
    return f"{first} {row.unit}", f"{second} {row.unit}"


def _log_progress(what: str) -> None:
    print(f"bench.peers: {what}", file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench.peers",
        description="Measure other programs for GPUs beside ours; print a table in Markdown.",
    )
    parser.add_argument("--nvidia-plugin", metavar="PATH", type=Path, help="the binary of NVIDIA's device plugin")
    parser.add_argument("--quick", action="store_true", help="a short run, with too few samples for a verdict")
    given = parser.parse_args()
    binary: Path | None = given.nvidia_plugin
    if shutil.which("gcc") is None:
        parser.error("gcc was not found, which compiles the stand-in for NVIDIA's driver; install it")
    if binary is None:
        _log_progress("NVIDIA's plugin is skipped: give its binary with --nvidia-plugin PATH")
    elif not os.access(binary, os.X_OK) or binary.is_dir():
        parser.error(f"--nvidia-plugin {binary}: this is no executable file")
    elif os.geteuid() != 0:
        parser.error("NVIDIA's plugin gets a mount namespace of its own, which needs root; run this as root")
    with tempfile.TemporaryDirectory(prefix="scrubber-peers-", dir="/tmp") as scratch:
        rows = asyncio.run(run_peers(binary and binary.absolute(), QUICK if given.quick else FULL, Path(scratch)))
    print(render(rows, binary is not None))


if __name__ == "__main__":
    main()
