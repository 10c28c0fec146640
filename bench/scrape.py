"""What a scrape costs whoever scrapes: a page of the service's metrics, and the reference beside it.

The reference is a bare HTTP server of the standard library in a process of its own, which answers with the same bytes. Run as
``python -m bench.scrape SIZE`` it serves that many bytes, says its port in a line, and ends with its standard input.
"""

from __future__ import annotations

import asyncio
import http.client
import http.server
import sys
import threading
import time

from bench.figures import Quantiles, Timing
from bench.node import Node

__all__ = ["REFERENCE", "scrapes"]

REFERENCE = "bare HTTP answer"
_ACCEPT = {
    "Accept": "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5",
    "Accept-Encoding": "gzip",
}
"""As Prometheus asks."""
_WARM_UP = 3


async def scrapes(node: Node, *, name: str, title: str, samples: int) -> Timing:
    """From the request to the last byte, as Prometheus asks, in turn with the reference."""
    measured: list[float] = []
    reference: list[float] = []
    _, size = await asyncio.to_thread(_scrape, node.metrics)
    beside = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "bench.scrape", str(size)),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    assert beside.stdin is not None
    assert beside.stdout is not None
    try:
        port = int(await beside.stdout.readline())
        for number in range(-_WARM_UP, samples):
            bare, _ = await asyncio.to_thread(_scrape, port)
            seconds, _ = await asyncio.to_thread(_scrape, node.metrics)
            if number >= 0:
                reference.append(bare)
                measured.append(seconds)
    finally:
        beside.stdin.close()
        await beside.wait()
    return Timing(name, title, Quantiles.of(measured), Quantiles.of(reference), REFERENCE)


def _scrape(port: int) -> tuple[float, int]:
    """Seconds, and bytes."""
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
            """Nothing."""

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answer)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    print(server.server_port, flush=True)
    sys.stdin.buffer.read()


if __name__ == "__main__":
    _serve(int(sys.argv[1]))
