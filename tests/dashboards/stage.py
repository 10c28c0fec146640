"""Nodes scraped by a real Prometheus: the shipped daemons on simulated devices, their metrics on loopback.

The daemons are those that an operator starts, except for one thing of the service: the hourly verification of the audit
log runs every two seconds, and can be delayed (:mod:`tests.dashboards.service`).
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, Final
from urllib.request import Request, urlopen

from scrubber.adapters.sim import control
from scrubber.api import scrubber_pb2 as pb
from scrubber.emulator.playground import CompletedCommand, Daemon, Playground
from tests.chaos.staging import TIMINGS
from tests.ports import free_port

__all__ = [
    "CLEARING",
    "FULL_DISKS",
    "OPENMETRICS",
    "PLUGIN",
    "SERVICE",
    "SOON",
    "TEXT",
    "Node",
    "little_disk",
    "nodes",
]

SERVICE: Final = "scrubber"
PLUGIN: Final = "scrubber-plugin"
"""The jobs."""

SOON: Final = 120.0
"""Seconds within which an expected event happens, on a busy machine too. It is a timeout; no test measures it."""

TEXT: Final = "text/plain"
OPENMETRICS: Final = "application/openmetrics-text; version=1.0.0"

CLEARING: Final = 0.3
"""Minimum seconds for clearing any device, so that its rate is the device's and not that of a busy machine."""


class Node(Playground):
    """One node of the fleet.

    Args:
        name: its name, also for the scraper.
        policy: text of its policy file, which :meth:`follow` replaces.
        records: directory for the policy and the logs.
        environment: of the plugin.

    Attributes:
        longest_outage: the longest time in seconds that :meth:`restart` left the node without one of its daemons.
    """

    def __init__(
        self, name: str, policy: str, records: Path, *, environment: Mapping[str, str] | None = None, **options: Any
    ) -> None:
        self.name = name
        self.policy = records / f"{name}.yaml"
        self.policy.write_text(policy)
        self.ports = {SERVICE: free_port(), PLUGIN: free_port()}
        self.longest_outage = 0.0
        super().__init__(policy=str(self.policy), timings=TIMINGS, watch_interval=1.0, **options)
        self.service.program = ("tests.dashboards.service",)
        self.plugin.environment = environment or {}
        for daemon, job in ((self.service, SERVICE), (self.plugin, PLUGIN)):
            daemon.log = records / f"{name}-{job}.log"
            daemon.arguments = [
                *daemon.arguments,
                *("--metrics-address", f"127.0.0.1:{self.ports[job]}", "--node-name", name),
            ]

    @property
    def state(self) -> Path:
        """The directory of the ledger."""
        return self.directory / "state"

    def memory(self, index: int) -> Path:
        """The file that is a device's memory."""
        return self.sim_dir / "devices" / str(index) / "memory"

    def follow(self, policy: str) -> None:
        """Replace the policy file atomically, and make the service read it."""
        draft = self.policy.with_suffix(".new")
        draft.write_text(policy)
        draft.replace(self.policy)
        os.kill(self.service.pid, signal.SIGHUP)

    def rewrite_history(self) -> None:
        """Change rows of the locked ledger, as a faulty disk or an attacker with write access can do."""
        for name in ("ledger.db", "ledger.db-wal"):
            with (self.state / name).open("r+b") as file:
                for row in re.finditer(rb"certificate\.issued", file.read()):
                    file.seek(row.start())
                    file.write(b"certificate.ISSUED")

    async def order(self, *arguments: str) -> CompletedCommand:
        """Run ``scrubber ARGUMENTS``, which has to succeed."""
        done = await self.run_command(*arguments)
        assert done.returncode == 0, f"{self.name}: scrubber {' '.join(arguments)}: {done.stderr}"
        return done

    async def becomes(self, device: str, *healths: str) -> pb.Device:
        """Return the device (index or UUID) once its health is one of ``healths``."""

        def it(devices: Sequence[pb.Device]) -> pb.Device | None:
            return next((each for each in devices if device in (each.index, each.id) and each.health in healths), None)

        found = it(await self.wait_for_devices(lambda devices: it(devices) is not None, SOON))
        assert found is not None
        return found

    async def at_rest(self) -> None:
        """Wait until every device is clean, in use, or out of service."""

        def it(devices: Sequence[pb.Device]) -> bool:
            return all(each.state in ("clean", "in-use", "quarantined", "condemned") for each in devices)

        await self.wait_for_devices(it, SOON)

    async def restart(self, end: Callable[[], Awaitable[object]], daemon: Daemon) -> None:
        """Run ``end``, which ends the daemon, and start it; return when both daemons answer, and know each other."""
        began = time.monotonic()
        await end()
        await daemon.start()
        async with asyncio.timeout(SOON):
            while True:
                if await asyncio.to_thread(self._is_up):
                    break
                await asyncio.sleep(0.2)
        self.longest_outage = max(self.longest_outage, time.monotonic() - began)

    def _is_up(self) -> bool:
        try:
            self.page(SERVICE)
            return "\nscrubber_plugin_service_up 1" in self.page(PLUGIN)
        except OSError:
            return False

    def page(self, job: str, form: str = TEXT) -> str:
        """Return what a scraper gets that requests ``form``.

        Raises:
            OSError: it gets nothing.
        """
        request = Request(f"http://127.0.0.1:{self.ports[job]}/metrics", headers={"Accept": form})
        with urlopen(request, timeout=SOON) as answer:
            return str(answer.read().decode())


@asynccontextmanager
async def nodes(*planned: Node) -> AsyncIterator[None]:
    """Run all nodes; yields with their daemons running and every device clean."""
    async with AsyncExitStack() as stack:
        async with asyncio.TaskGroup() as group:
            for node in planned:
                group.create_task(_up(node, stack))
        yield


async def _up(node: Node, stack: AsyncExitStack) -> None:
    await stack.enter_async_context(node)
    for index in range(len(node.device_files())):
        control.add_faults(node.sim_dir, str(index), slow_clear=CLEARING)
    await node.start_daemons(SOON)
    await node.wait_until_clean(SOON)


def _mounted(directory: Path) -> bool:
    """Create ``directory`` and mount a file system of a few MiB in memory there; return whether that succeeded."""
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    command = ["mount", "-t", "tmpfs", "-o", "size=8m,mode=0700", "tmpfs", str(directory)]
    return os.geteuid() == 0 and subprocess.run(command, capture_output=True, check=False).returncode == 0


@contextmanager
def little_disk(directory: Path) -> Iterator[bool]:
    """Provide ``directory`` as a small disk; without the right to mount, as an ordinary directory, and yield False."""
    mounted = _mounted(directory)
    try:
        yield mounted
    finally:
        if mounted:
            subprocess.run(["umount", str(directory)], check=True)


def _can_mount() -> bool:
    with tempfile.TemporaryDirectory(prefix="gs-mount-") as probe, little_disk(Path(probe)) as mounted:
        return mounted


FULL_DISKS: Final = _can_mount()
"""Whether a full disk can be produced here."""
if not FULL_DISKS:
    print(
        "NOT TESTED HERE: the alert of a ledger on a full disk (mounting a tmpfs is not permitted)", file=sys.__stderr__
    )
