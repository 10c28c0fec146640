"""When the last process of a pod ended, noted by a process that does nothing else.

The benchmark's own event loop is the kubelet, and busy at that moment. Run as ``python -m bench.pod_end``, it reads
lines of PIDs from standard input. It answers each with an empty line once it watches all of them (pidfd_open(2)), and
then with the time at which the last one had ended: wall-clock seconds, as the times in the service's records.
"""

from __future__ import annotations

import asyncio
import os
import select
import sys
import time
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager, suppress

from bench.node import BenchNode
from scrubber.emulator.markers import marked_processes
from scrubber.emulator.pods import EmulatedPod

__all__ = ["PodEnd", "end_evidence"]


class PodEnd:
    """Watches one pod at a time."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self._requests, self._answers = process.stdin, process.stdout

    async def watch(self, pod: EmulatedPod) -> None:
        """Watch all processes that ``pod`` has now, its sandbox included.

        Raises:
            RuntimeError: It has none.
        """
        pids = marked_processes({pod.uid})
        if not pids:
            raise RuntimeError(f"pod {pod.full_name} was to run, and has no process")
        self._requests.write(f"{' '.join(map(str, pids))}\n".encode())
        await self._answers.readline()

    async def ended(self) -> float:
        """Return when the last of them ended, in wall-clock seconds; waits for it."""
        return float(await self._answers.readline())

    @classmethod
    @asynccontextmanager
    async def start(cls) -> AsyncIterator[PodEnd]:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "bench.pod_end", stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
        )
        assert process.stdin is not None
        try:
            yield cls(process)
        finally:
            process.stdin.close()
            await process.wait()


def end_evidence(node: BenchNode) -> str:
    """Return how the service learns of the end of a pod on this node, as a part of a row's title."""
    return "the kubelet's list" if node.stage.cgroup_parent is None else "cgroup v2 events"


def _watch(pids: Iterable[int]) -> float:
    poll, pidfds = select.poll(), set()
    for pid in pids:
        with suppress(ProcessLookupError):
            pidfds.add(os.pidfd_open(pid))
    for pidfd in pidfds:
        poll.register(pidfd, select.POLLIN)
    print(flush=True)
    ended = time.time()
    while pidfds:
        gone = {pidfd for pidfd, _ in poll.poll()}
        ended = time.time()
        for pidfd in gone:
            poll.unregister(pidfd)
            os.close(pidfd)
        pidfds -= gone
    return ended


if __name__ == "__main__":
    for line in sys.stdin:
        print(repr(_watch(int(pid) for pid in line.split())), flush=True)
