"""Duration of a scrape of the service's metrics, and its effect on hand-overs.

The reference is a bare HTTP server of the standard library in a separate process, which answers with the same number of
bytes. Run as ``python -m bench.scrape serve SIZE``, it serves that many bytes, prints its port, and exits when its
standard input ends.

For the effect on the gate, ``python -m bench.scrape crowd PORT CLIENTS`` scrapes without a pause from that many
concurrent clients, until its standard input ends; then it prints how many scrapes were answered.
"""

from __future__ import annotations

import asyncio
import http.client
import http.server
import os
import sys
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from bench import hand_over
from bench.echo import Echo
from bench.figures import Amount, Quantiles, Timing
from bench.node import BenchNode
from scrubber.emulator.pods import EmulatedPod

__all__ = ["REFERENCE", "SCRAPERS", "restarts_while_scraped", "scrape_timing"]

SCRAPERS = 30
"""Concurrent scrapers."""

REFERENCE = "bare HTTP answer"
_ACCEPT = {
    "Accept": "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5",
    "Accept-Encoding": "gzip",
}
"""Headers of Prometheus."""
_WARM_UP = 3
_SAMPLES = 1000
_NICE = 15


async def scrape_timing(node: BenchNode, *, name: str, title: str, samples: int) -> Timing:
    """Measure from the request to the last byte, with Prometheus' headers, alternating with the reference."""
    measured: list[float] = []
    reference: list[float] = []
    _, size = await asyncio.to_thread(_scrape, node.metrics_port)
    beside = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "bench.scrape", "serve", str(size)),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    assert beside.stdin is not None
    assert beside.stdout is not None
    try:
        port = int(await beside.stdout.readline())
        for number in range(-_WARM_UP, samples):
            bare, _ = await asyncio.to_thread(_scrape, port)
            seconds, _ = await asyncio.to_thread(_scrape, node.metrics_port)
            if number >= 0:
                reference.append(bare)
                measured.append(seconds)
    finally:
        beside.stdin.close()
        await beside.wait()
    return Timing(name, title, Quantiles.of(measured), Quantiles.of(reference), REFERENCE)


async def restarts_while_scraped(
    node: BenchNode, echo: Echo, pods: list[EmulatedPod], *, seconds: float
) -> tuple[tuple[Timing, Timing], tuple[Amount]]:
    """Measure restarts of containers without and with :data:`SCRAPERS` scrapers of the service that never pause.

    Args:
        seconds: duration of the restarts, each time.
    """

    async def restarts(name: str, title: str) -> Timing:
        return await hand_over.same_container(
            node, echo, pods, name=f"scraped-{name}", title=title, samples=_SAMPLES, budget=seconds
        )

    calm = await restarts("by-none", "hand-over, restart of a container, no scrapes")
    began, answered = time.perf_counter(), [0]
    async with _scrapers(node.metrics_port, answered):
        loaded = await restarts("by-a-crowd", f"hand-over, restart of a container, {SCRAPERS} scrapers at once")
    rate = answered[0] / (time.perf_counter() - began)
    return (calm, loaded), (Amount("scrape.crowd.rate", f"scrapes answered to {SCRAPERS} scrapers", rate, "a second"),)


@asynccontextmanager
async def _scrapers(port: int, answered: list[int]) -> AsyncIterator[None]:
    """Scrape inside the context; afterwards ``answered[0]`` is the number of answered scrapes."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "bench.scrape", "crowd", str(port), str(SCRAPERS)),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        await process.stdout.readline()
        yield
    finally:
        process.stdin.close()
        answered[0] = int(await process.stdout.readline())
        if await process.wait() != 0:
            raise RuntimeError("the scrapers broke off")


def _scrape_without_pause(port: int, clients: int) -> None:
    over = threading.Event()
    counts = [0] * clients

    def go_on(number: int) -> None:
        while not over.is_set():
            with suppress(OSError, http.client.HTTPException):  # connections above the limit are closed
                _scrape(port)
                counts[number] += 1

    os.nice(_NICE)  # the load on the service is to be measured, not the scrapers' own CPU time
    threads = [threading.Thread(target=go_on, args=(number,), daemon=True) for number in range(clients)]
    for thread in threads:
        thread.start()
    print("scraping", flush=True)
    sys.stdin.buffer.read()
    over.set()
    print(sum(counts), flush=True)


def _scrape(port: int) -> tuple[float, int]:
    """Return the seconds and the size in bytes."""
    began = time.perf_counter()
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30.0)
    try:
        connection.request("GET", "/metrics", headers=_ACCEPT)
        answer = connection.getresponse()
        page = answer.read()
    finally:
        connection.close()
    if answer.status != 200:
        raise RuntimeError(f"a scrape was answered with {answer.status}")
    return time.perf_counter() - began, len(page)


def _serve(size: int) -> None:
    page = b"x" * size

    class Answer(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Length", str(len(page)))
            self.end_headers()
            self.wfile.write(page)

        def log_message(self, format: str, *args: object) -> None:
            """Log nothing."""

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answer)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    print(server.server_port, flush=True)
    sys.stdin.buffer.read()


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        _serve(int(sys.argv[2]))
    else:
        _scrape_without_pause(int(sys.argv[2]), int(sys.argv[3]))
