"""Counts the requests of a fleet's plugins to the API server, in virtual time.

    python -m bench.fleet_writes               # 1,000 nodes: about five minutes
    python -m bench.fleet_writes --nodes 50    # a trial; writes nothing

Reporter, writers and client are the plugin's, with their real intervals; the API server is the emulated one, which
patches and stores every object. There is no network: a request takes 20 ms. All nodes do everything at the same
instant: start, lose power, return. A real fleet spreads these over seconds or minutes.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import json
import sys
import tempfile
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from typing import Any, Final, TypeVar

from httpx2 import AsyncBaseTransport, Request, Response
from lightkube import AsyncClient

from bench.machine import describe_machine
from plugin.cluster.client import ApiServerClient, _connected
from plugin.cluster.credentials import Credentials
from plugin.cluster.reporter import ClusterReporter, ClusterReporterTimes
from plugin.instance_lock import WriterLock
from scrubber.api import scrubber_pb2 as pb
from scrubber.emulator.cluster import HttpResponse
from scrubber.emulator.cluster.faults import ApiFault
from scrubber.emulator.cluster.http import HttpRequest
from tests.cluster.plugin_server import PluginApiServer, kubeconfig
from tests.simulation.timeline import EPOCH, VirtualLoop

__all__ = ["RESULTS", "Phase", "measure_phases", "run_fleet"]

RESULTS: Final = Path(__file__).parent / "results" / "fleet-writes.json"
RACK: Final = 40
"""Nodes that share a power supply."""
DEVICES: Final = 8

_LATENCY: Final = 0.02
_NO_LOCK: Final = Path("/dev/null/locks")
"""No lock can be created there, so no instance waits for another."""
_MINUTE: Final = 60.0
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Phase:
    """Requests within a time.

    Attributes:
        nodes: that the phase is about. The requests of all nodes are counted.
        seconds: its length.
        by_operation: ``patch nodes/status`` and others → how many.
        peak: the most requests that began within one second.
        peak_writes: the same without reads.
    """

    name: str
    nodes: int
    seconds: float
    total: int
    by_operation: Mapping[str, int]
    peak: int
    peak_writes: int


class _InlineLoop(VirtualLoop):
    """What would run in a thread runs at once, in no time: time would jump over a thread."""

    def run_in_executor(self, executor: Any, func: Callable[..., _T], *args: Any) -> asyncio.Future[_T]:  # type: ignore[override]
        done: asyncio.Future[_T] = self.create_future()
        done.set_result(func(*args))
        return done


class _InProcess(AsyncBaseTransport):
    """Passes requests to the emulated API server without a connection."""

    def __init__(self, server: PluginApiServer) -> None:
        self._server = server

    async def handle_async_request(self, request: Request) -> Response:
        headers = {name.lower(): value for name, value in request.headers.items()}
        body = await request.aread()
        await asyncio.sleep(_LATENCY / 2)
        answer = await self._server.handle(
            HttpRequest(request.method, request.url.path, dict(request.url.params), headers, body)
        )
        await asyncio.sleep(_LATENCY / 2)
        return Response(
            answer.code, headers=[("Content-Type", answer.content_type), *answer.headers], content=answer.body
        )


class _NodeClient(ApiServerClient):
    """The plugin's client of one node; ``powered`` is cleared when the node loses power."""

    def __init__(self, credentials: Credentials, node: str, connection: AsyncClient) -> None:
        super().__init__(credentials, node, deadline=10.0)
        self._client = connection
        self.powered = True

    async def close(self) -> None:
        """Keep the connection, which belongs to all nodes."""

    async def _request(self, request: Callable[[AsyncClient], Awaitable[_T]]) -> _T:
        if not self.powered:
            await asyncio.Event().wait()
        return await super()._request(request)


class _Silent:
    def debug(self, event: str, **facts: Any) -> None: ...

    info = warning = error = debug


class _FleetNode:
    """A node whose pods come and go, and whose plugin reports its devices."""

    def __init__(self, name: str, connect: Callable[[str], _NodeClient], random: Random) -> None:
        self.name, self._connect, self._random = name, connect, random
        self._client: _NodeClient | None = None
        self._reporter: ClusterReporter | None = None
        self._life: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Start the plugin, and a service that has to scrub every device first."""
        loop = asyncio.get_running_loop()
        self._client = client = self._connect(self.name)
        self._reporter = ClusterReporter(
            lambda: client,
            self.name,
            times=ClusterReporterTimes(),
            lock=WriterLock(_NO_LOCK),
            log=_Silent(),
            clock=loop.time,
            wall_clock=lambda: EPOCH + loop.time(),
            jitter=self._random.random,
        )
        self._reporter.start()
        self._life = asyncio.create_task(self._live(self._reporter))

    async def lose_power(self) -> None:
        """End everything; no request arrives any more."""
        assert self._client is not None
        assert self._reporter is not None
        assert self._life is not None
        self._client.powered = False
        self._life.cancel()
        await asyncio.gather(self._life, self._reporter.stop(), return_exceptions=True)

    async def _live(self, reporter: ClusterReporter) -> None:
        """Scrub all devices, one of which fails on every tenth node; then run pods on the others."""
        states = ["scrubbing"] * DEVICES
        broken = self._random.randrange(DEVICES) if self._random.random() < 0.1 else None
        await asyncio.sleep(3.0)
        self._show(reporter, states)

        async def use(device: int) -> None:
            await asyncio.sleep(self._random.uniform(5.0, 40.0))
            if device == broken:
                states[device] = "quarantined"
                self._show(reporter, states)
                return
            while True:
                for state, shortest, longest in (("clean", 0, 120), ("in-use", 30, 1200), ("scrubbing", 3, 20)):
                    states[device] = state
                    self._show(reporter, states)
                    await asyncio.sleep(self._random.uniform(shortest, longest))

        async with asyncio.TaskGroup() as tasks:
            for device in range(DEVICES):
                tasks.create_task(use(device))

    def _show(self, reporter: ClusterReporter, states: Iterable[str]) -> None:
        devices = [
            pb.SnapshotDevice(
                id=f"GPU-{self.name}-{number}",
                index=str(number),
                state=state,
                advertised=state != "quarantined",
                certified=state == "clean",
                refusal=f"Device {number} is quarantined (verification-failed)." if state == "quarantined" else "",
            )
            for number, state in enumerate(states)
        ]
        reporter.on_snapshot(pb.Snapshot(version=1, ready=True, epoch="one", devices=devices))


async def run_fleet(nodes: int, rack: int, directory: Path) -> list[Phase]:
    """Run the phases one after the other, and return what the API server was asked in each."""
    server = PluginApiServer()
    credentials = kubeconfig(directory, "http://api-server")
    connection = _connected(credentials, 10.0)
    connection._client._client._transport = _InProcess(server)
    connect = functools.partial(_client, credentials, connection)
    fleet = [_FleetNode(f"node-{number:04}", connect, Random(number)) for number in range(nodes)]
    for node in fleet:
        server.add_node(node.name)
    loop, phases = asyncio.get_running_loop(), []

    async def phase(name: str, concerned: Sequence[_FleetNode], minutes: float) -> None:
        began, before = loop.time(), len(server.log.requests)
        await asyncio.sleep(minutes * _MINUTE)
        found = [(each.operation, each.at) for each in server.log.requests[before:]]
        phases.append(_summary(name, len(concerned), loop.time() - began, found))

    async def cut(concerned: Sequence[_FleetNode]) -> None:
        await asyncio.gather(*(node.lose_power() for node in concerned))
        await asyncio.sleep(3 * _MINUTE)
        for node in concerned:
            node.start()

    for node in fleet:
        node.start()
    await phase("first start of all plugins", fleet, 5)
    await phase("pods come and go", fleet, 10)
    await cut(fleet[:rack])
    await phase("a rack returns after a power cut", fleet[:rack], 5)
    await cut(fleet)
    await phase("all nodes return after a power cut", fleet, 5)
    fault = server.inject(ApiFault(HttpResponse(503, b"{}")))
    await phase("the API server refuses every request", fleet, 5)
    server.faults.remove(fault)
    await phase("the API server works again", fleet, 5)
    await asyncio.gather(*(node.lose_power() for node in fleet))
    return phases


def _client(credentials: Credentials, connection: AsyncClient, name: str) -> _NodeClient:
    return _NodeClient(credentials, name, connection)


def _summary(name: str, nodes: int, seconds: float, found: Sequence[tuple[str, float]]) -> Phase:
    def peak(times: Iterable[float]) -> int:
        return max(Counter(map(int, times)).values(), default=0)

    operations = Counter(operation for operation, _ in found)
    return Phase(
        name,
        nodes,
        round(seconds),
        len(found),
        dict(sorted(operations.items())),
        peak(at for _, at in found),
        peak(at for operation, at in found if not operation.startswith("get")),
    )


def measure_phases(nodes: int, rack: int) -> list[Phase]:
    """Run a fleet on a loop of its own."""
    with tempfile.TemporaryDirectory(prefix="writes-") as directory, asyncio.Runner(loop_factory=_InlineLoop) as runner:
        return runner.run(run_fleet(nodes, rack, Path(directory)))


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print the phases, and write the results of a complete run."""
    parser = argparse.ArgumentParser(prog="python -m bench.fleet_writes", description="Count a fleet's API requests.")
    parser.add_argument("--nodes", type=int, default=1000)
    nodes = parser.parse_args(arguments).nodes
    phases = measure_phases(nodes, RACK)
    if nodes == 1000:
        result = {
            "nodes": nodes,
            "devices": DEVICES,
            "machine": asdict(describe_machine()),
            "phases": [asdict(each) for each in phases],
        }
        RESULTS.write_text(json.dumps(result, indent=1) + "\n")
    for each in phases:
        sys.stdout.write(
            f"{each.name}: {each.total} in {each.seconds:.0f} s, at most {each.peak}/s {each.by_operation}\n"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
