"""Shortcuts of the integration tests: run a pod, read its output, wait for a result."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from scrubber.emulator.playground import RESOURCE, Playground, gpu_pod_spec, tenant_argv
from scrubber.emulator.pods import EmulatedPod, PodPhase, PodSpec
from tests.integration import log_lines

__all__ = [
    "QUICK",
    "SOON",
    "Capacity",
    "end_first_process",
    "found_by",
    "history",
    "reader",
    "refusal",
    "restarted",
    "running",
    "seen_to_run",
    "sockets_below",
    "staged",
    "writer",
]

SOON = 30.0
"""Seconds within which what must happen happens, on a busy machine too; nothing is measured by it."""

FOREVER = ("--hold", "forever")
QUICK = str(Path(__file__).with_name("quick.yaml"))


@asynccontextmanager
async def staged(**options: Any) -> AsyncIterator[Playground]:
    """A stage with both daemons running, on devices of 2 MiB that are all clean, and with ``quick.yaml``.

    In the end their logs have only declared events.
    """
    async with Playground(**{"memory": "2MiB", "policy": QUICK, **options}) as stage:
        await stage.start_daemons(SOON)
        await stage.wait_until_clean(SOON)
        yield stage
        log_lines.check(stage)


def writer(name: str, namespace: str, *options: str, gpus: int = 1) -> PodSpec:
    """A pod that writes ``namespace/name`` all over its device and stays."""
    return gpu_pod_spec(name, namespace, tenant_argv("--write", f"{namespace}/{name}", *FOREVER, *options), gpus=gpus)


def reader(name: str, namespace: str) -> PodSpec:
    """A pod that reports what it finds on its device, and ends."""
    return gpu_pod_spec(name, namespace, tenant_argv("--read"))


async def running(stage: Playground, spec: PodSpec) -> EmulatedPod:
    """Run a pod; return it once its tenant has completed its first task and is running."""
    pod = await stage.kubelet.run(spec)
    assert pod.admitted, pod.describe()
    await pod.wait(lambda _: "ready" in pod.read_log("main"), SOON)
    return pod


async def seen_to_run(stage: Playground) -> None:
    """Wait until the service has completed two usage checks of what runs now.

    Only what it has seen counts: a container that ended before it was seen starts again after a scrub, and one
    whose first process was not known leaves nothing that could be proved a leftover. No other client may query the
    kubelet meanwhile.
    """
    # A check begins with a request, and the next request comes when it is over.
    before = stage.kubelet.pod_resources_requests
    async with asyncio.timeout(SOON):
        while True:
            if stage.kubelet.pod_resources_requests >= before + 3:
                return
            await asyncio.sleep(0.01)


def end_first_process(pod: EmulatedPod) -> None:
    """End the tenant with SIGTERM; the processes that it left behind keep running."""
    messages = [json.loads(line) for line in pod.read_log("main").splitlines()]
    (pid,) = [line["pid"] for line in messages if "ready" in line]
    os.kill(pid, signal.SIGTERM)


async def restarted(pod: EmulatedPod) -> None:
    """Have the pod's container end; returns when it has started again and completed its first task."""
    times = pod.status.containers["main"].restarts
    end_first_process(pod)
    await pod.wait(lambda status: status.containers["main"].restarts > times and "ready" in pod.read_log("main"), SOON)


async def refusal(pod: EmulatedPod, container: str = "main") -> str:
    """Return the reason in the pod's status, once the start of its container was refused."""
    status = await pod.wait(lambda each: each.containers[container].reason == "CreateContainerConfigError", SOON)
    return status.containers[container].message


async def found_by(pod: EmulatedPod) -> str:
    """What a reader found, once it has ended well; the empty text for nothing but zeros."""
    await pod.wait(PodPhase.SUCCEEDED, SOON)
    messages = [json.loads(line) for line in pod.read_log("main").splitlines()]
    (read,) = [line for line in messages if "residue_bytes" in line]
    return str(read["found"]) if read["residue_bytes"] else ""


async def history(stage: Playground, name: str) -> list[dict[str, Any]]:
    """The fields of every audit row of that name, oldest first, each with its ``device`` and its ``sequence``."""
    entries = [each for each in (await stage.read_client.history(limit=1000)).entries if each.event == name]
    rows = [{**json.loads(each.fields_json), "device": each.device_id, "sequence": each.sequence} for each in entries]
    return rows[::-1]


class Capacity:
    """Every count of devices that the kubelet had since the watch began, each once in a row."""

    def __init__(self, stage: Playground) -> None:
        self._stage = stage
        self.allocatable: list[int] = []
        self.capacity: list[int] = []

    async def watch(self) -> None:
        """Until cancelled."""

        def look(kubelet: Any) -> bool:
            for seen, now in (
                (self.allocatable, kubelet.allocatable(RESOURCE)),
                (self.capacity, kubelet.capacity(RESOURCE)),
            ):
                if not seen or seen[-1] != now:
                    seen.append(now)
            return False

        await self._stage.kubelet.wait_until(look, 3600)


def sockets_below(*directories: Path) -> Sequence[Path]:
    """Every socket file left below the directories."""
    return sorted(path for each in directories for path in each.rglob("*") if path.is_socket())
