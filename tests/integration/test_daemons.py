"""The two daemons as processes: their exits, second instances, and invalid data on their sockets."""

from __future__ import annotations

import asyncio
import os
import socket
from pathlib import Path

import grpc
import pytest

from scrubber.adapters.ledger.offline import verify_ledger
from scrubber.api import scrubber_pb2 as pb
from scrubber.api import scrubber_pb2_grpc
from scrubber.api.sockets import Purpose, Sockets, grpc_target
from scrubber.domain.errors import AlreadyRunning
from scrubber.emulator.playground import RESOURCE, Daemon, Playground
from scrubber.emulator.pods import ContainerState
from tests.integration import log_lines
from tests.integration.acting import QUICK, SOON, Capacity, found_by, reader, running, sockets_below, staged, writer


async def ended(daemon: Daemon) -> tuple[int, str]:
    """Start it and wait until it exits on its own; return exit status and its last line of output."""
    await daemon.start()
    assert daemon.process is not None
    async with asyncio.timeout(SOON):
        status = await daemon.process.wait()
    return status, daemon.log.read_text().splitlines()[-1]


def another(daemon: Daemon, stage: Playground, **changed: str) -> Daemon:
    """Return a second instance of the daemon, with a separate log and some flags changed."""
    arguments = list(daemon.arguments)
    for flag, value in changed.items():
        arguments[arguments.index(f"--{flag.replace('_', '-')}") + 1] = value
    return Daemon(arguments, stage.directory / f"another-{len(list(stage.directory.iterdir()))}.log")


async def test_sigterm_ends_both_daemons_with_0_and_leaves_no_process_and_no_socket() -> None:
    async with staged() as stage:
        await running(stage, writer("a", "team-a"))
        children = stage.child_processes(stage.service)
        assert children
        assert await stage.plugin.stop(SOON) == 0
        await stage.kubelet.wait_until(lambda kubelet: kubelet.allocatable(RESOURCE) == 0, SOON)
        assert await stage.service.stop(SOON) == 0
        assert stage.running_processes(children) == []
        ours = sockets_below(stage.socket_dir, stage.kubelet.plugins_registry, stage.kubelet.device_plugins)
        assert ours == [stage.kubelet.kubelet_socket]
        assert verify_ledger(stage.directory / "state").intact


async def test_service_notifies_systemd_when_ready_and_while_running() -> None:
    async with Playground(devices=1, memory="2MiB", policy=QUICK) as stage:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as supervisor:
            supervisor.bind(str(stage.directory / "notify"))
            stage.service.environment = {"NOTIFY_SOCKET": str(stage.directory / "notify")}
            await stage.service.start()
            loop = asyncio.get_running_loop()
            states: list[bytes] = []
            async with asyncio.timeout(SOON):
                while len(states) < 3:
                    state = await loop.sock_recv(supervisor, 4096)
                    states += [state] * (state != b"WATCHDOG=1")  # sent during a long start, too
        assert states == [
            b"STATUS=Waiting for the driver",
            b"READY=1\nSTATUS=Watching 1 devices",
            b"READY=1\nWATCHDOG=1",
        ]


async def test_sigterm_during_a_scrub_leaves_the_device_dirty_and_the_next_service_scrubs_it() -> None:
    async with staged(devices=1) as stage:
        pod = await running(stage, writer("a", "team-a"))
        await stage.run_command("sim", "fault", "--dir", str(stage.sim_dir), "--device", "0", "--slow-clear", "20")
        await stage.kubelet.delete(pod, grace=0)
        await stage.wait_for_devices(lambda devices: devices[0].state == "scrubbing", SOON)
        children = stage.child_processes(stage.service)
        assert await stage.service.stop(SOON) == 0
        assert stage.running_processes(children) == []
        await stage.run_command("sim", "clear", "--dir", str(stage.sim_dir), "--device", "0")
        await stage.service.start()
        assert await found_by(await stage.kubelet.run(reader("b", "team-b"))) == ""
        _lines_say_whom_they_are_about(stage)


def _lines_say_whom_they_are_about(stage: Playground) -> None:
    """Team-a had the only device, then team-b."""
    service, plugin = log_lines.lines(stage.service), log_lines.lines(stage.plugin)
    (device,) = {line["device"] for line in service if line["event"].startswith(("scrub.", "handover.granted"))}
    granted = [line for line in service if line["event"] == "handover.granted"]
    assert [(line["tenant"], line["pod"], line["device"]) for line in granted] == [
        ("team-a", "a", device),
        ("team-b", "b", device),
    ]
    started = [line for line in service if line["event"] == "scrub.started"]
    assert [line["tenant"] for line in started] == [None, "team-a", "team-a"]
    ended = {line["scrub_id"]: line for line in service if line["event"] == "scrub.finished"}
    assert ended[started[0]["scrub_id"]]["outcome"] == ended[started[2]["scrub_id"]]["outcome"] == "passed"
    granted_lines = [line for line in plugin if line["event"] == "handover.granted"]
    assert [line["certificates"] for line in granted_lines] == [[line["certificate"]] for line in granted]
    assert {(line["method"], line["resource"]) for line in granted_lines} == {("PreStartContainer", RESOURCE)}
    issued = [line for line in service if line["event"] == "certificate.issued"]
    assert [(line["scrub_id"], line.get("tenant")) for line in issued] == [
        (started[0]["scrub_id"], None),
        (started[2]["scrub_id"], "team-a"),
    ]


async def test_node_has_its_capacity_while_the_first_scrub_of_every_device_is_in_progress() -> None:
    """The GPU Operator's validator gives the plugin 150 s to provide it, and a first scrub may take longer."""
    async with Playground(devices=2, memory="2MiB", policy=QUICK) as stage:
        for device in ("0", "1"):
            await stage.run_command(
                "sim", "fault", "--dir", str(stage.sim_dir), "--device", device, "--slow-clear", "600"
            )
        await stage.start_daemons(SOON)
        assert stage.kubelet.capacity(RESOURCE) == 2
        await stage.wait_for_devices(lambda devices: [each.state for each in devices] == ["scrubbing"] * 2, SOON)
        assert "certificate.issued" not in {line["event"] for line in log_lines.lines(stage.service)}


async def test_second_service_is_refused_and_the_first_keeps_running() -> None:
    async with staged(devices=1) as stage:
        status, message = await ended(another(stage.service, stage))
        assert status == 3
        assert "owns the ledger" in message, message
        elsewhere = str(stage.directory / "state2")
        status, message = await ended(another(stage.service, stage, state_dir=elsewhere))
        assert status == 3
        assert str(stage.service.pid) in message, message
        with pytest.raises(AlreadyRunning, match="has the ledger in"):
            verify_ledger(stage.directory / "state")
        await running(stage, writer("a", "team-a"))


@pytest.mark.parametrize("way", ["auto", "classic", "watcher"])
async def test_standby_plugin_takes_over_without_a_change_of_the_nodes_capacity(way: str) -> None:
    async with staged(devices=2, registration=way) as stage:
        pod = await running(stage, writer("a", "team-a"))
        kubelet = stage.kubelet
        seen = Capacity(stage)
        watching = asyncio.create_task(seen.watch())
        next_one = another(stage.plugin, stage)
        before = len(kubelet.events)

        def since() -> list[str]:
            return [each.name for each in kubelet.events[before:]]

        try:
            await next_one.start()
            await _logged(next_one.log, '"plugin.standby"')
            assert "GetDevicePluginOptions" not in since()
            assert await stage.plugin.stop(SOON) == 0
            await kubelet.wait_until(lambda _: "ListAndWatch" in since()[_first("StreamEnded", since()) :], SOON)
            await kubelet.wait_until(lambda _: kubelet.allocatable(RESOURCE) == 2, SOON)
            assert since().count("GetDevicePluginOptions") == since().count("StreamEnded") == 1
            assert set(seen.capacity) == {2}
            await running(stage, writer("b", "team-b"))
            assert pod.status.containers["main"].state is ContainerState.RUNNING
        finally:
            watching.cancel()
            assert await next_one.stop(SOON) == 0


async def _logged(log: Path, words: str) -> None:
    async with asyncio.timeout(SOON):
        while True:
            if words in log.read_text():
                return
            await asyncio.sleep(0.01)


def _first(name: str, names: list[str]) -> int:
    return names.index(name) if name in names else len(names)


@pytest.mark.parametrize("purpose", list(Purpose))
async def test_garbage_on_a_socket_ends_only_that_connection(purpose: Purpose) -> None:
    async with staged(devices=1) as stage:
        path = Sockets(stage.socket_dir).path(purpose)
        for garbage in (b"\0" * 4096, os.urandom(4096), b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\xff" * 4096):
            come, go = await asyncio.open_unix_connection(path)
            go.write(garbage)
            go.write_eof()
            async with asyncio.timeout(SOON):
                while await come.read(65536):
                    pass
            go.close()
        await running(stage, writer("a", "team-a"))


async def test_rpc_on_the_wrong_socket_is_unimplemented() -> None:
    async with staged(devices=1) as stage:
        (device,) = (await stage.read_client.devices()).devices
        request = pb.QuarantineRequest(device=device.id, reason="by the wrong door")
        for purpose in (Purpose.PLUGIN, Purpose.READ):
            async with grpc.aio.insecure_channel(grpc_target(Sockets(stage.socket_dir).path(purpose))) as channel:
                with pytest.raises(grpc.aio.AioRpcError) as refused:
                    await scrubber_pb2_grpc.AdminStub(channel).Quarantine(request, timeout=SOON)
                assert refused.value.code() is grpc.StatusCode.UNIMPLEMENTED
        assert [each.health for each in (await stage.read_client.devices()).devices] == ["healthy"]


async def test_malformed_requests_are_refused_and_change_nothing() -> None:
    async with staged(devices=1) as stage:
        (device,) = (await stage.read_client.devices()).devices
        async with grpc.aio.insecure_channel(grpc_target(Sockets(stage.socket_dir).path(Purpose.PLUGIN))) as channel:
            stub = scrubber_pb2_grpc.PluginStub(channel)
            for devices in ([], [""], ["SIM-GPU-unknown"], [device.id, device.id]):
                for call, request in (
                    (stub.Reserve, pb.ReserveRequest(device_ids=devices)),
                    (stub.HandOver, pb.HandOverRequest(device_ids=devices)),
                ):
                    with pytest.raises(grpc.aio.AioRpcError) as refused:
                        await call(request, timeout=SOON)
                    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert [each.state for each in (await stage.read_client.devices()).devices] == ["clean"]


@pytest.mark.parametrize("which", ["service", "plugin"])
async def test_metrics_port_in_use_ends_a_daemon_before_it_creates_files(which: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        address = f"127.0.0.1:{other.getsockname()[1]}"
        async with Playground(devices=1, memory="2MiB") as stage:
            status, message = await ended(another(getattr(stage, which), stage, metrics_address=address))
            assert status == 2, message
            assert f"Metrics cannot be served on {address}" in message
            assert not (stage.directory / "state").exists()
            assert not stage.socket_dir.exists()
            assert list(stage.kubelet.device_plugins.glob("scrubber-*")) == []


@pytest.mark.parametrize("flag", ["socket_dir", "state_dir"])
async def test_file_in_place_of_a_directory_is_refused_with_an_error_message(tmp_path: Path, flag: str) -> None:
    async with Playground(devices=1, memory="2MiB") as stage:
        file = stage.directory / "file"
        file.write_text("not yours")
        status, message = await ended(another(stage.service, stage, **{flag: str(file)}))
        assert status == 2, message
        assert str(file) in message
        assert file.read_text() == "not yours"


async def test_socket_directory_with_too_long_a_path_is_refused_with_an_error_message() -> None:
    async with Playground(devices=1, memory="2MiB") as stage:
        status, message = await ended(another(stage.service, stage, socket_dir=str(stage.directory / ("long" * 25))))
        assert status == 2
        assert "107" in message or "too long" in message, message
