"""Cost of the service's reading of the kubelet, separate from the rest of a hand-over.

Run as ``python -m bench.list_timer KUBELET_DIR POD_RESOURCES_SOCKET POD_LOGS_DIR``, it takes the place of the service:
the first line on standard input contains the devices, and each further line requests a reading. It uses the service's
own adapter in a separate process, like the service. The response is two numbers: the seconds of ``List`` alone and of a
whole reading (``List``, checkpoint, log directories, corroboration).
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from pathlib import Path

from scrubber.adapters.clock import SystemClock
from scrubber.adapters.kubelet.assignments import KubeletAssignments
from scrubber.adapters.kubelet.pod_resources import PodResourcesClient
from scrubber.adapters.kubelet.rate_limiter import RateLimiter
from scrubber.domain.assignment import Trust
from scrubber.emulator.kubelet import Kubelet

__all__ = ["ListTimer"]


class ListTimer:
    """Requests readings from that process."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self._requests, self._answers = process.stdin, process.stdout

    async def __call__(self) -> tuple[float, float]:
        """Return the seconds of ``List`` alone, and of a whole reading after it."""
        self._requests.write(b"\n")
        answer = (await self._answers.readline()).split()
        if len(answer) != 2:
            raise RuntimeError("the process that reads the kubelet's list broke off")
        return float(answer[0]), float(answer[1])

    @classmethod
    @asynccontextmanager
    async def start(cls, kubelet: Kubelet, devices: Iterable[str]) -> AsyncIterator[ListTimer]:
        """Start a process that reads ``kubelet`` and knows ``devices``."""
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            *("-m", "bench.list_timer", str(kubelet.root), str(kubelet.pod_resources_socket), str(kubelet.pod_logs)),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
        assert process.stdin is not None
        try:
            process.stdin.write(f"{' '.join(devices)}\n".encode())
            yield cls(process)
        finally:
            process.stdin.close()
            await process.wait()


async def _answer(kubelet_dir: Path, socket: Path, logs: Path) -> None:
    clock = SystemClock()
    ours = frozenset((await asyncio.to_thread(sys.stdin.readline)).split())
    # Unlimited: the cost of a single request is measured, without waiting for the rate limiter.
    unlimited = RateLimiter(rate=1e6, burst=1e6)
    listing = PodResourcesClient(socket, clock=clock, deadline=5.0, rate_limiter=unlimited)
    reading = KubeletAssignments(
        pod_resources_socket=socket,
        kubelet_dir=kubelet_dir,
        pod_logs_dir=logs,
        device_ids=lambda: ours,
        clock=clock,
        restart_grace=0.0,
        deadline=5.0,
        rate=1e6,
        burst=1e6,
    )
    try:
        while await asyncio.to_thread(sys.stdin.readline):
            began = time.perf_counter()
            await listing.list_pods(listing.socket_identity())
            listed = time.perf_counter()
            read = await reading.read()
            done = time.perf_counter()
            if read.trust is Trust.UNREADABLE:
                raise RuntimeError(f"the kubelet's list could not be read: {read.untrusted_reason}")
            print(listed - began, done - listed, flush=True)
    finally:
        await reading.close()
        await listing.close()


if __name__ == "__main__":
    asyncio.run(_answer(Path(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3])))
