"""Start, stop and restart: one instance at a time, other users' files stay, and no caller is left hanging."""

from __future__ import annotations

import asyncio
import grp
import os
import signal
import socket
import stat
import sys
from contextlib import aclosing
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from scrubber.api import scrubber_pb2 as pb
from scrubber.api.client import AdminClient, PluginClient, ReadClient
from scrubber.api.server import GrpcServer, serve
from scrubber.api.sockets import Purpose, Sockets, grpc_target
from scrubber.domain.errors import AlreadyRunning, InvalidConfiguration, ScrubberError, Unavailable
from tests.api.service import FakeNode

DEADLINE = 20.0
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING

SERVICE = """
import asyncio, sys
from pathlib import Path
from scrubber.api.server import serve
from scrubber.api.sockets import Sockets
from tests.api.service import FakeNode

async def main():
    async with serve(FakeNode(devices=3), Sockets(Path(sys.argv[1]))):
        print("serving", flush=True)
        await asyncio.Event().wait()

asyncio.run(main())
"""


# -- one at a time -----------------------------------------------------------------------------------------------------


async def test_second_instance_is_refused_and_the_first_keeps_serving(short_tmp: Path) -> None:
    async with serve(FakeNode(), Sockets(short_tmp / "s"), grace=0), PluginClient(short_tmp / "s") as plugin:
        with pytest.raises(AlreadyRunning, match=rf"PID {os.getpid()}\) serves .*--socket-dir"):
            await GrpcServer(FakeNode(), Sockets(short_tmp / "s")).start()
        assert (await plugin.snapshot(DEADLINE)).version == 1
        assert (await plugin.snapshot(DEADLINE)).version == 1


async def test_sockets_of_a_killed_service_are_replaced(short_tmp: Path) -> None:
    child = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", SERVICE, short_tmp / "s"),
        cwd=Path(__file__).parents[2],
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        async with asyncio.timeout(DEADLINE), PluginClient(short_tmp / "s") as plugin:
            assert child.stdout is not None
            while await child.stdout.readline() != b"serving\n":
                assert child.returncode is None
            assert len((await plugin.snapshot(DEADLINE)).devices) == 3
            child.send_signal(signal.SIGKILL)
            await child.wait()
            with pytest.raises(Unavailable, match="no process listens on"):
                await plugin.snapshot(DEADLINE)
            async with serve(FakeNode(devices=2), Sockets(short_tmp / "s"), grace=0):
                assert len((await _first_answer(plugin)).devices) == 2
    finally:
        if child.returncode is None:
            child.kill()
            await child.wait()


@pytest.mark.parametrize("purpose", list(Purpose))
async def test_regular_file_in_place_of_a_socket_is_not_replaced(purpose: Purpose, short_tmp: Path) -> None:
    path = Sockets(short_tmp).path(purpose)
    path.parent.mkdir()
    path.write_text("precious")
    with pytest.raises(InvalidConfiguration, match="not a socket, so it is not replaced"):
        await GrpcServer(FakeNode(), Sockets(short_tmp)).start()
    assert path.read_text() == "precious"


@pytest.mark.parametrize("purpose", list(Purpose))
async def test_live_server_of_another_program_is_not_replaced(purpose: Purpose, short_tmp: Path) -> None:
    path = Sockets(short_tmp).path(purpose)
    path.parent.mkdir()
    with socket.socket(socket.AF_UNIX) as other_program:
        other_program.bind(str(path))
        other_program.listen()
        with pytest.raises(AlreadyRunning, match="Another program listens"):
            await GrpcServer(FakeNode(), Sockets(short_tmp)).start()
        assert path.is_socket()
    async with serve(FakeNode(), Sockets(short_tmp), grace=0):
        assert path.is_socket()


@pytest.mark.parametrize("purpose", list(Purpose))
async def test_regular_file_in_place_of_a_directory_is_not_replaced(purpose: Purpose, short_tmp: Path) -> None:
    (short_tmp / purpose).write_text("precious")
    with pytest.raises(InvalidConfiguration, match="not a directory"):
        await GrpcServer(FakeNode(), Sockets(short_tmp)).start()
    assert (short_tmp / purpose).read_text() == "precious"


async def test_socket_directory_that_is_a_file_is_refused(short_tmp: Path) -> None:
    (short_tmp / "s").write_text("precious")
    with pytest.raises(InvalidConfiguration, match="not a directory"):
        await GrpcServer(FakeNode(), Sockets(short_tmp / "s")).start()


async def test_world_writable_socket_directory_is_refused(short_tmp: Path) -> None:
    (short_tmp / "s").mkdir()
    (short_tmp / "s").chmod(0o777)
    with pytest.raises(InvalidConfiguration, match="chmod o-w"):
        await GrpcServer(FakeNode(), Sockets(short_tmp / "s")).start()


async def test_socket_directory_that_is_a_symlink_is_refused(short_tmp: Path) -> None:
    (short_tmp / "elsewhere").mkdir()
    (short_tmp / "s").mkdir()
    (short_tmp / "s/plugin").symlink_to(short_tmp / "elsewhere")
    with pytest.raises(InvalidConfiguration, match="not a directory"):
        await GrpcServer(FakeNode(), Sockets(short_tmp / "s")).start()
    assert list((short_tmp / "elsewhere").iterdir()) == []


async def test_unknown_group_is_refused(short_tmp: Path) -> None:
    with pytest.raises(InvalidConfiguration, match="The group 'nobodies-group' does not exist"):
        await GrpcServer(FakeNode(), Sockets(short_tmp / "s", admin_group="nobodies-group")).start()


async def test_socket_directory_that_cannot_be_created_is_refused(short_tmp: Path) -> None:
    (short_tmp / "file").write_text("precious")
    with pytest.raises(InvalidConfiguration, match=r"cannot be created in .*--socket-dir"):
        await GrpcServer(FakeNode(), Sockets(short_tmp / "file/s")).start()


async def test_socket_directory_that_operators_cannot_enter_is_refused_with_the_remedy(short_tmp: Path) -> None:
    group = next(each for each in grp.getgrall() if each.gr_gid != short_tmp.stat().st_gid).gr_name
    with pytest.raises(InvalidConfiguration, match=rf"chgrp {group} {short_tmp} && chmod g\+x"):
        await GrpcServer(FakeNode(), Sockets(short_tmp, admin_group=group)).start()


@pytest.mark.parametrize("what", ["plugin", "plugin/plugin.sock"])
async def test_socket_or_directory_of_another_user_is_not_replaced(what: str, short_tmp: Path) -> None:
    """Only root can create such a file; for any other user it is their own, and is replaced."""
    (short_tmp / "plugin").mkdir()
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(short_tmp / "plugin/plugin.sock"))
    if os.geteuid() != 0:
        async with serve(FakeNode(), Sockets(short_tmp), grace=0), PluginClient(short_tmp) as plugin:
            assert (await plugin.snapshot(DEADLINE)).version == 1
        return
    os.chown(short_tmp / what, 54321, 54321)
    before = (short_tmp / "plugin/plugin.sock").stat()
    with pytest.raises(InvalidConfiguration, match=rf"{what} belongs to uid 54321"):
        await GrpcServer(FakeNode(), Sockets(short_tmp)).start()
    assert (short_tmp / "plugin/plugin.sock").stat() == before


async def test_failed_start_leaves_no_files(short_tmp: Path) -> None:
    path = Sockets(short_tmp).path(Purpose.ADMIN)
    path.parent.mkdir()
    path.write_text("precious")
    with pytest.raises(ScrubberError):
        await GrpcServer(FakeNode(), Sockets(short_tmp)).start()
    path.unlink()
    assert [each for each in short_tmp.rglob("*") if each.is_socket()] == []
    async with serve(FakeNode(), Sockets(short_tmp), grace=0), ReadClient(short_tmp) as read:
        assert len((await read.devices()).devices) == 2


async def test_socket_directory_with_special_characters_in_its_name_is_served(short_tmp: Path) -> None:
    directory = short_tmp / "a b%41?é#"
    async with serve(FakeNode(), Sockets(directory), grace=0), AdminClient(directory) as admin:
        assert (await admin.quarantine("0", "because")).device.id == "GPU-a0"


# -- stopping ----------------------------------------------------------------------------------------------------------


async def test_stop_ends_streams_at_once_and_lets_calls_finish(short_tmp: Path) -> None:
    node = FakeNode()
    server = GrpcServer(node, Sockets(short_tmp / "s"))
    await server.start()
    node.busy.clear()
    async with asyncio.timeout(DEADLINE), PluginClient(short_tmp / "s") as plugin:
        async with aclosing(plugin.watch_snapshots()) as snapshots:
            await anext(snapshots)
            work = asyncio.create_task(plugin.hand_over(["GPU-a0"], wait_seconds=25, timeout=30))
            await node.waiting.wait()
            stopped = asyncio.create_task(server.stop(3600))
            with pytest.raises(Unavailable, match="stopping"):
                await anext(snapshots)
        assert not stopped.done()
        node.busy.set()
        assert len((await work).devices) == 1
        await stopped


async def test_call_that_outlives_the_grace_period_is_cancelled_with_an_error(short_tmp: Path) -> None:
    node = FakeNode()
    server = GrpcServer(node, Sockets(short_tmp / "s"))
    await server.start()
    node.busy.clear()
    async with asyncio.timeout(DEADLINE), PluginClient(short_tmp / "s") as plugin:
        work = asyncio.create_task(plugin.hand_over(["GPU-a0"], wait_seconds=25, timeout=30))
        await node.waiting.wait()
        await server.stop(0)
        with pytest.raises(Unavailable):
            await work
        await node.cancelled.wait()


async def test_stopped_service_leaves_no_socket_and_can_start_again(short_tmp: Path) -> None:
    sockets = Sockets(short_tmp / "s")
    async with serve(FakeNode(), sockets, grace=0):
        pass
    assert [each for each in short_tmp.rglob("*") if each.is_socket()] == []
    async with serve(FakeNode(), sockets, grace=0), ReadClient(short_tmp / "s") as read:
        assert len((await read.devices()).devices) == 2


async def test_stop_does_not_remove_a_socket_of_another_program(short_tmp: Path) -> None:
    path = Sockets(short_tmp / "s").path(Purpose.PLUGIN)
    async with serve(FakeNode(), Sockets(short_tmp / "s"), grace=0):
        path.unlink()
        path.write_text("precious")
    assert path.read_text() == "precious"


async def test_client_reconnects_to_a_restarted_service(short_tmp: Path) -> None:
    async with PluginClient(short_tmp / "s") as plugin:
        with pytest.raises(Unavailable, match=r"does not exist\. Start it with scrubber serve.*--socket-dir"):
            await plugin.snapshot(DEADLINE)
        for devices in (1, 2):
            async with asyncio.timeout(DEADLINE), serve(FakeNode(devices), Sockets(short_tmp / "s"), grace=0):
                assert len((await _first_answer(plugin)).devices) == devices


async def test_client_error_states_that_the_path_is_not_a_socket(short_tmp: Path) -> None:
    path = Sockets(short_tmp).path(Purpose.READ)
    path.parent.mkdir()
    path.write_text("")
    async with ReadClient(short_tmp) as read:
        with pytest.raises(InvalidConfiguration, match=r"is not a socket.*--socket-dir"):
            await read.devices()


# -- health and reflection ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("purpose", list(Purpose))
async def test_grpc_health_follows_the_node_and_its_ledger(purpose: Purpose, short_tmp: Path) -> None:
    node = FakeNode()
    await node.show(ready=False)
    async with serve(node, Sockets(short_tmp / "s"), grace=0), _channel(short_tmp / "s", purpose) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        for name in ("", purpose.service):
            assert await _health(stub, name) == NOT_SERVING
        await node.show(ready=True)
        for name in ("", purpose.service):
            assert await _health(stub, name) == SERVING
        node.ledger = "The disk is full."
        assert await _health(stub, "") == NOT_SERVING


async def test_grpc_health_can_be_watched_until_shutdown(short_tmp: Path) -> None:
    node = FakeNode()
    await node.show(ready=False)
    server = GrpcServer(node, Sockets(short_tmp / "s"))
    await server.start()
    async with asyncio.timeout(DEADLINE), _channel(short_tmp / "s", Purpose.READ) as channel:
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
        statuses = aiter(watch)
        assert (await anext(statuses)).status == NOT_SERVING
        await node.show(ready=True)
        assert (await anext(statuses)).status == SERVING
        stopped = asyncio.create_task(server.stop(3600))
        assert (await anext(statuses)).status == NOT_SERVING
        with pytest.raises(grpc.aio.AioRpcError, match="stopping"):
            await anext(statuses)
        await stopped


async def test_grpc_health_of_all_served_services_can_be_listed(short_tmp: Path) -> None:
    async with serve(FakeNode(), Sockets(short_tmp / "s"), grace=0), _channel(short_tmp / "s", Purpose.READ) as channel:
        listed = await health_pb2_grpc.HealthStub(channel).List(health_pb2.HealthListRequest(), timeout=DEADLINE)
    assert {name: each.status for name, each in listed.statuses.items()} == {"": SERVING, "scrubber.v1.Read": SERVING}


async def test_grpc_health_of_a_service_on_another_socket_is_not_found(short_tmp: Path) -> None:
    async with serve(FakeNode(), Sockets(short_tmp / "s"), grace=0), _channel(short_tmp / "s", Purpose.READ) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await _health(health_pb2_grpc.HealthStub(channel), "scrubber.v1.Admin")
    assert refused.value.code() is grpc.StatusCode.NOT_FOUND


@pytest.mark.parametrize("purpose", list(Purpose))
async def test_reflection_lists_only_the_services_of_its_socket(purpose: Purpose, short_tmp: Path) -> None:
    async with (
        serve(FakeNode(), Sockets(short_tmp / "s"), grace=0, reflection=True),
        _channel(short_tmp / "s", purpose) as channel,
    ):
        answer = await _services(channel)
    assert sorted(answer) == ["grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection", purpose.service]


async def test_reflection_is_disabled_by_default(short_tmp: Path) -> None:
    async with serve(FakeNode(), Sockets(short_tmp / "s"), grace=0), _channel(short_tmp / "s", Purpose.READ) as channel:
        # Nothing is sent: a message that meets the refusal fails with a status of the client's own.
        call = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(timeout=DEADLINE)
        assert await call.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_lock_file_is_private_and_persists(short_tmp: Path) -> None:
    async with serve(FakeNode(), Sockets(short_tmp / "s"), grace=0):
        pass
    assert stat.S_IMODE((short_tmp / "s/lock").stat().st_mode) == 0o600


def _channel(sockets: Path, purpose: Purpose) -> grpc.aio.Channel:
    return grpc.aio.insecure_channel(grpc_target(Sockets(sockets).path(purpose)))


async def _health(stub: health_pb2_grpc.HealthStub, name: str) -> int:
    answer = await stub.Check(health_pb2.HealthCheckRequest(service=name), timeout=DEADLINE)
    status: int = answer.status
    return status


async def _services(channel: grpc.aio.Channel) -> list[str]:
    async def ask() -> object:
        yield reflection_pb2.ServerReflectionRequest(list_services="")

    call = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(ask(), timeout=DEADLINE)
    answer = await anext(aiter(call))
    return [each.name for each in answer.list_services_response.service]


async def _first_answer(plugin: PluginClient) -> pb.Snapshot:
    """Return the snapshot, as soon as the client has reconnected to the service."""
    while True:
        try:
            return await plugin.snapshot(DEADLINE)
        except Unavailable:
            continue
