"""The plugin as a process, started by the command line: how it waits, how it stops, what it refuses."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from urllib.request import urlopen

import pytest

from plugin.main import PluginSettings, run
from scrubber.domain.errors import InvalidConfiguration
from tests import forkserver
from tests.plugin_collaborators import DEADLINE, FakeKubelet, FakeService, device, snapshot, start


class PluginProcess:
    """A running ``scrubber plugin`` and what it has logged so far."""

    def __init__(self, process: Process) -> None:
        self.process = process
        self.events: list[dict[str, object]] = []

    async def next_line(self, event: str) -> dict[str, object]:
        """Return the next log line with this event."""
        assert self.process.stderr is not None
        async with asyncio.timeout(DEADLINE):
            while line := await self.process.stderr.readline():
                self.events.append(json.loads(line))
                if self.events[-1]["event"] == event:
                    return self.events[-1]
        raise AssertionError(f"the plugin ended without logging {event!r}; it logged {self.events}")

    async def ends(self, signal_: signal.Signals | None = None) -> int:
        if signal_ is not None:
            self.process.send_signal(signal_)
        async with asyncio.timeout(DEADLINE):
            return await self.process.wait()


@asynccontextmanager
async def plugin(directory: Path, *flags: str) -> AsyncIterator[PluginProcess]:
    arguments = ["--kubelet-dir", str(directory), "--socket-dir", str(directory / "s"), "--log-format", "json"]
    arguments += ["--metrics-address", "off", *flags]
    process = await forkserver.start("scrubber.cli.main", "plugin", *arguments, stderr=PIPE)
    try:
        yield PluginProcess(process)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def test_plugin_waits_for_the_service_then_for_the_kubelet_and_then_serves(short_tmp: Path) -> None:
    async with plugin(short_tmp, "--registration", "classic") as running:
        await running.next_line("service.unavailable")
        async with FakeService(short_tmp / "s", snapshot(device(0))) as service:
            await running.next_line("service.available")
            await running.next_line("kubelet.unavailable")
            async with FakeKubelet(short_tmp) as kubelet:
                registered = await kubelet.new_registration()
                assert registered.healthy == {"sim-0"}
                await registered.plugin.PreStartContainer(start("sim-0"), timeout=30)
                assert [list(request.device_ids) for request in service.requests] == [["sim-0"]]


async def test_plugin_does_not_register_before_the_first_snapshot(short_tmp: Path) -> None:
    async with FakeKubelet(short_tmp) as kubelet, plugin(short_tmp, "--registration", "classic") as running:
        await running.next_line("service.unavailable")
        assert kubelet.requests == []
        async with FakeService(short_tmp / "s", snapshot(device(0), ready=False)):
            registered = await kubelet.new_registration()
            assert registered.lists == [{"sim-0": "Unhealthy"}]


async def test_devices_that_are_all_out_of_service_are_registered_as_unhealthy_and_count_for_the_capacity(
    short_tmp: Path,
) -> None:
    out = snapshot(device(0, advertised=False), device(1, advertised=False))
    async with FakeKubelet(short_tmp) as kubelet, FakeService(short_tmp / "s", out), plugin(short_tmp):
        assert (await kubelet.new_registration()).lists == [{"sim-0": "Unhealthy", "sim-1": "Unhealthy"}]


NOT_NEEDED = {
    *("lightkube", "opentelemetry", "prometheus_client", "pydantic", "rich.console", "wsgiref", "yaml"),
    *(
        "plugin.nvidia.cdi",
        "plugin.cluster.reporter",
        "plugin.metrics",
        "plugin.upstream.proxy",
        "scrubber.observability.metrics_server",
    ),
    *("scrubber.observability.tracing", "scrubber.domain.policy", "scrubber.ports.record"),
}
"""Modules that are slow to import. A pod that is admitted while the kubelet has no plugin fails permanently."""


async def test_modules_not_needed_for_the_registration_are_not_imported_before_it(short_tmp: Path) -> None:
    words = ["--kubelet-dir", str(short_tmp), "--socket-dir", str(short_tmp / "s"), "--log-format", "json"]
    async with FakeKubelet(short_tmp), FakeService(short_tmp / "s", snapshot(device(0))):
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-X", "importtime", "-m", "scrubber.cli.main", "plugin", *words),
            *("--metrics-address", "127.0.0.1:0"),
            stderr=PIPE,
        )
        assert process.stderr is not None
        loaded: set[str] = set()
        try:
            async with asyncio.timeout(DEADLINE):
                while b'"kubelet.registered"' not in (line := await process.stderr.readline()):
                    assert line, "the plugin ended"
                    loaded.add(line.decode().rpartition("|")[2].strip())
                assert loaded & NOT_NEEDED == set()
                while b'"metrics.serving"' not in await process.stderr.readline():
                    pass
        finally:
            process.kill()
            await process.wait()


async def test_standby_instance_is_ready_and_registers_when_the_old_one_ends(short_tmp: Path) -> None:
    async with (
        FakeKubelet(short_tmp) as kubelet,
        FakeService(short_tmp / "s", snapshot(device(0))),
        plugin(short_tmp) as old,
    ):
        await kubelet.new_registration()
        async with plugin(short_tmp, "--probe-address", "127.0.0.1:0") as second:
            address = (await second.next_line("probes.serving"))["address"]
            await second.next_line("plugin.standby")
            with await asyncio.to_thread(urlopen, f"http://{address}/readyz", timeout=DEADLINE) as answer:
                assert answer.status == 200
            assert len(kubelet.requests) == 1
            assert await old.ends(signal.SIGTERM) == 0
            assert (await kubelet.new_registration(after=1)).healthy == {"sim-0"}


@pytest.mark.parametrize("signal_", [signal.SIGTERM, signal.SIGINT])
async def test_stop_signal_ends_the_stream_without_an_error_and_exits_with_zero(
    short_tmp: Path, signal_: signal.Signals
) -> None:
    async with (
        FakeKubelet(short_tmp) as kubelet,
        FakeService(short_tmp / "s", snapshot(device(0))),
        plugin(short_tmp, "--registration", "classic") as running,
    ):
        registered = await kubelet.new_registration()
        assert await running.ends(signal_) == 0
        await kubelet.until(lambda: registered.ended)
        assert registered.error is None
        assert not registered.socket.exists()


async def test_stop_signal_does_not_wait_for_a_start_in_progress(short_tmp: Path) -> None:
    async def scrub(request: object) -> None:
        await asyncio.Event().wait()

    async with FakeKubelet(short_tmp) as kubelet, FakeService(short_tmp / "s", snapshot(device(0))) as service:
        service.on_hand_over = scrub
        async with plugin(short_tmp, "--registration", "classic") as running:
            registered = await kubelet.new_registration()
            waiting = asyncio.ensure_future(registered.plugin.PreStartContainer(start("sim-0"), timeout=30))
            await service.bell.until(lambda: bool(service.requests))
            assert await running.ends(signal.SIGTERM) == 0
            await service.bell.until(lambda: service.cancelled == 1)
            await asyncio.wait({waiting})
            assert waiting.exception() is not None


async def test_stop_signal_ends_a_plugin_that_waits_for_the_service(short_tmp: Path) -> None:
    async with plugin(short_tmp) as running:
        await running.next_line("service.unavailable")
        assert await running.ends(signal.SIGTERM) == 0


async def test_regular_file_at_the_services_socket_path_ends_the_plugin_with_one_error_message(short_tmp: Path) -> None:
    (short_tmp / "s" / "plugin").mkdir(parents=True)
    (short_tmp / "s" / "plugin" / "plugin.sock").touch()
    async with plugin(short_tmp) as running:
        assert running.process.stderr is not None
        async with asyncio.timeout(DEADLINE):
            output = (await running.process.stderr.read()).decode()
        assert await running.ends() != 0
        assert "plugin.sock is not a socket" in output
        assert "Traceback" not in output


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"resource_name": "gpu"}, "is not a valid resource name"),
        ({"resource_name": "example.com/gpü"}, "is not a valid resource name"),
        ({"registration": "smoke-signal"}, "Use one of: auto, watcher, classic"),
        ({"kubelet_dir": Path("/tmp") / ("d" * 90)}, "the limit for a Unix socket is 107"),
        ({"socket": Path("/tmp") / ("d" * 100)}, "at most 107"),
        ({"kubelet_dir": Path("/dev/null")}, "is a file"),
        ({"log_level": "loud"}, "Unknown log level"),
    ],
)
async def test_invalid_plugin_setting_is_refused_before_anything_starts(
    settings: dict[str, object], message: str
) -> None:
    with pytest.raises(InvalidConfiguration, match=message):
        await run(PluginSettings(**settings))  # type: ignore[arg-type]
