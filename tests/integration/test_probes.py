"""Probes and watchdog of the two daemons as processes: they succeed only while the event loop runs."""

from __future__ import annotations

import asyncio
import signal
import socket
import urllib.error
import urllib.request
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from pathlib import Path

import pytest

from scrubber.emulator.playground import Daemon, Playground
from tests.integration import log_lines
from tests.integration.acting import QUICK, SOON

PROBE_TIMEOUT = 2.0
"""Seconds that a probe of a hung daemon waits for the answer that never comes."""


def fetch(address: str, path: str, timeout: float = SOON) -> tuple[int, str]:
    """Return status and body."""
    try:
        with urllib.request.urlopen(f"http://{address}{path}", timeout=timeout) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as refusal:
        with refusal:
            return refusal.code, refusal.read().decode()


async def get(address: str, path: str, timeout: float = SOON) -> tuple[int, str]:
    return await asyncio.to_thread(fetch, address, path, timeout)


async def address_of(daemon: Daemon, event: str) -> str:
    """Return the address in the daemon's log line ``event``."""
    async with asyncio.timeout(SOON):
        while True:
            for line in log_lines.lines(daemon):
                if line["event"] == event:
                    return str(line["address"])
            await asyncio.sleep(0.05)


async def until_answer(address: str, path: str, expected: tuple[int, str]) -> None:
    async with asyncio.timeout(SOON):
        while True:
            if await get(address, path) == expected:
                return
            await asyncio.sleep(0.05)


async def until_hung(address: str) -> None:
    """Return when a probe times out: one that is answered before the signal has arrived proves nothing."""
    async with asyncio.timeout(SOON):
        while True:
            try:
                await get(address, "/livez", PROBE_TIMEOUT)
            except TimeoutError:
                return


@asynccontextmanager
async def probed() -> AsyncIterator[Playground]:
    """A stage whose daemons, not started yet, serve probes and metrics, and hang on SIGUSR1."""
    async with Playground(devices=1, memory="2MiB", policy=QUICK) as stage:
        for daemon in (stage.service, stage.plugin):
            arguments = list(daemon.arguments)
            arguments[arguments.index("--metrics-address") + 1] = "127.0.0.1:0"
            # In brackets, as in the manifests, where the address of a pod may be of either family.
            daemon.arguments = [*arguments, "--probe-address", "[127.0.0.1]:0"]
            daemon.program = ("tests.hanging_daemon",)
        yield stage
        log_lines.check(stage)


@asynccontextmanager
async def supervised(daemon: Daemon, directory: Path) -> AsyncIterator[socket.socket]:
    """Give the daemon a notify socket like that of systemd, with a watchdog of 2 s, and yield the socket."""
    with closing(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)) as manager:
        manager.bind(str(directory / "notify"))
        daemon.environment = {"NOTIFY_SOCKET": str(directory / "notify"), "WATCHDOG_USEC": "2000000"}
        yield manager


async def next_state(manager: socket.socket, line: bytes) -> None:
    """Wait for a notification that has the line ``line``."""
    async with asyncio.timeout(SOON):
        while line not in (await asyncio.get_running_loop().sock_recv(manager, 4096)).splitlines():
            pass


def drain(manager: socket.socket) -> list[bytes]:
    """Return all notifications that have arrived."""
    found: list[bytes] = []
    while True:
        try:
            found.append(manager.recv(4096))
        except BlockingIOError:
            return found


@pytest.mark.parametrize("which", ["service", "plugin"])
async def test_hung_event_loop_fails_the_probe_and_the_watchdog_while_metrics_are_still_served(which: str) -> None:
    async with probed() as stage:
        daemon: Daemon = getattr(stage, which)
        async with supervised(daemon, stage.directory) as manager:
            await stage.service.start()
            await stage.plugin.start()
            probes, metrics = await address_of(daemon, "probes.serving"), await address_of(daemon, "metrics.serving")
            await until_answer(probes, "/readyz", (200, "ok"))
            await next_state(manager, b"READY=1")
            await next_state(manager, b"WATCHDOG=1")
            assert await get(probes, "/livez") == (200, "ok")
            assert daemon.process is not None
            daemon.process.send_signal(signal.SIGUSR1)
            await until_hung(probes)
            drain(manager)
            with pytest.raises(TimeoutError):
                await get(probes, "/readyz", PROBE_TIMEOUT)
            assert drain(manager) == []
            assert (await get(metrics, "/metrics"))[0] == 200
            await daemon.kill()


async def test_plugin_is_live_before_the_service_answers_and_ready_only_afterwards() -> None:
    async with probed() as stage, supervised(stage.plugin, stage.directory) as manager:
        await stage.plugin.start()
        address = await address_of(stage.plugin, "probes.serving")
        assert await get(address, "/livez") == (200, "ok")
        status, reason = await get(address, "/readyz")
        assert (status, reason) == (503, "not ready: no scrub service that has checked every device has answered yet\n")
        await next_state(manager, b"STATUS=Waiting: no scrub service that has checked every device has answered yet")
        assert all(b"READY=1" not in state for state in drain(manager))
        await stage.service.start()
        await until_answer(address, "/readyz", (200, "ok"))
        await next_state(manager, b"READY=1")
        assert await stage.plugin.stop(SOON) == 0


async def test_service_is_live_while_it_waits_for_the_driver_and_ready_only_afterwards() -> None:
    async with probed() as stage:
        await stage.run_command("sim", "fault", "--dir", str(stage.sim_dir), "--driver-absent")
        await stage.service.start()
        address = await address_of(stage.service, "probes.serving")
        await until_answer(address, "/readyz", (503, "not ready: waiting for the driver\n"))
        assert await get(address, "/livez") == (200, "ok")
        await stage.run_command("sim", "clear", "--dir", str(stage.sim_dir))
        await until_answer(address, "/readyz", (200, "ok"))
        assert await stage.service.stop(SOON) == 0


@pytest.mark.parametrize("which", ["service", "plugin"])
async def test_probe_port_in_use_ends_a_daemon_before_it_creates_files(which: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        address = f"127.0.0.1:{other.getsockname()[1]}"
        async with Playground(devices=1, memory="2MiB") as stage:
            daemon: Daemon = getattr(stage, which)
            daemon.arguments = [*daemon.arguments, "--probe-address", address]
            await daemon.start()
            assert daemon.process is not None
            async with asyncio.timeout(SOON):
                assert await daemon.process.wait() == 2
            message = daemon.log.read_text().splitlines()[-1]
            assert f"Probes cannot be served on {address}: Address already in use." in message
            assert not (stage.directory / "state").exists()
            assert list(stage.kubelet.device_plugins.glob("scrubber-*")) == []
