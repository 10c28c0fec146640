"""Registration of the DRA driver: its two sockets, and their return."""

from __future__ import annotations

import asyncio
import errno
import io
import itertools
import json
import os
import socket
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any, NoReturn

import grpc
import pytest

from plugin.api import dra_v1_pb2, dra_v1_pb2_grpc
from plugin.api import pluginregistration_pb2 as registration
from plugin.api import pluginregistration_pb2_grpc as registration_rpc
from plugin.dra.paths import DriverSocketPaths
from plugin.dra.registration import DriverRegistration, DriverRegistrationTimes
from plugin.logs import create_logger
from scrubber.domain.errors import InvalidConfiguration
from tests.dra_collaborators import Directory, visit
from tests.plugin_collaborators import DEADLINE, Bell

DRIVER = "gpu.scrubber.dev"
ONE = "11111111-2222-3333-4444-555555555555"
TWO = "99999999-2222-3333-4444-555555555555"
QUICK = DriverRegistrationTimes(poll=0.01, retry=0.01, contact=0.02, drain=DEADLINE)
CALL = dra_v1_pb2.NodePrepareResourcesRequest()


class Journal(io.StringIO):
    """A log that a test can wait for."""

    def __init__(self) -> None:
        super().__init__()
        self.bell = Bell()

    def write(self, text: str) -> int:
        written = super().write(text)
        self.bell.ring()
        return written

    def events(self, name: str) -> list[dict[str, Any]]:
        lines = [json.loads(line) for line in self.getvalue().splitlines()]
        return [each for each in lines if each["event"] == name]

    async def until(self, name: str, count: int = 1) -> dict[str, Any]:
        await self.bell.until(lambda: len(self.events(name)) >= count)
        return self.events(name)[count - 1]


class Calls(dra_v1_pb2_grpc.DRAPluginServicer):
    """Answers a call of the kubelet as soon as the test allows it."""

    def __init__(self) -> None:
        self.bell = Bell()
        self.arrived = 0
        self.open = True

    async def NodePrepareResources(self, request: Any, context: Any) -> dra_v1_pb2.NodePrepareResourcesResponse:
        self.arrived += 1
        self.bell.ring()
        await self.bell.until(lambda: self.open)
        return dra_v1_pb2.NodePrepareResourcesResponse()


@asynccontextmanager
async def registered(
    directory: Directory,
    uid: str = ONE,
    *,
    calls: Calls | None = None,
    journal: Journal | None = None,
    add: Callable[[grpc.aio.Server], None] | None = None,
) -> AsyncIterator[DriverSocketPaths]:
    paths = DriverSocketPaths(DRIVER, directory.plugins, directory.registry, uid)
    servicer, numbers = calls or Calls(), itertools.count(int(uid[:1] or "5") << 8)
    task: asyncio.Task[Any] = asyncio.create_task(
        DriverRegistration(
            paths,
            add_services=add or (lambda server: dra_v1_pb2_grpc.add_DRAPluginServicer_to_server(servicer, server)),
            times=QUICK,
            token=lambda: f"{next(numbers):08x}",
            log=create_logger("json", "info", journal or Journal()),
            clock=time.monotonic,
        ).run()
    )
    try:
        yield paths
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


@pytest.fixture
def directory(short_tmp: Path) -> Directory:
    return Directory(short_tmp)


def dead_socket(path: Path) -> None:
    """Leave a socket behind as a killed process does, a minute ago."""
    with closing(socket.socket(socket.AF_UNIX)) as left:
        left.bind(str(path))
    os.utime(path, (time.time() - 60, time.time() - 60))


async def test_driver_registers_with_both_versions_and_the_socket_for_its_calls(directory: Directory) -> None:
    journal = Journal()
    async with registered(directory, journal=journal) as paths:
        await journal.until("plugin.serving")
        found = await visit(paths.registration_socket)
        assert (found.info.type, found.info.name) == ("DRAPlugin", DRIVER)
        assert list(found.info.supported_versions) == ["v1.DRAPlugin", "v1beta1.DRAPlugin"]
        assert found.info.endpoint == str(directory.plugins / DRIVER / f"dra-{ONE}.sock")
        await found.driver().NodePrepareResources(CALL, timeout=DEADLINE)
        assert (await journal.until("kubelet.registered"))["socket"] == str(paths.registration_socket)
        await found.channel.close()


async def test_driver_outside_of_a_pod_has_sockets_without_a_uid(directory: Directory) -> None:
    journal = Journal()
    async with registered(directory, "", journal=journal):
        await journal.until("plugin.serving")
        assert directory.names() == ["dra.sock", f"{DRIVER}-reg.sock"]


async def test_registration_socket_appears_after_the_socket_for_calls_is_served(directory: Directory) -> None:
    present: list[bool] = []

    def add(server: grpc.aio.Server) -> None:
        present.append((directory.registry / f"{DRIVER}-{ONE}-reg.sock").exists())
        dra_v1_pb2_grpc.add_DRAPluginServicer_to_server(Calls(), server)

    journal = Journal()
    async with registered(directory, journal=journal, add=add) as paths:
        await journal.until("plugin.serving")
        found = await visit(paths.registration_socket)
        await found.driver().NodePrepareResources(CALL, timeout=DEADLINE)
        await found.channel.close()
    assert present == [False]


async def test_no_user_but_that_of_the_driver_and_its_group_may_connect(directory: Directory) -> None:
    journal = Journal()
    before = os.umask(0)
    try:
        async with registered(directory, journal=journal) as paths:
            await journal.until("plugin.serving")
            modes = [path.stat().st_mode & 0o777 for path in (paths.calls_socket, paths.registration_socket)]
    finally:
        os.umask(before)
    assert modes == [0o660, 0o660]


@pytest.mark.parametrize("socket_name", ["calls_socket", "registration_socket"])
async def test_removed_socket_is_created_again(directory: Directory, socket_name: str) -> None:
    journal = Journal()
    async with registered(directory, journal=journal) as paths:
        await journal.until("plugin.serving")
        getattr(paths, socket_name).unlink()
        await journal.until("kubelet.registration-lost")
        await journal.until("plugin.serving", 2)
        found = await visit(paths.registration_socket)
        await found.driver().NodePrepareResources(CALL, timeout=DEADLINE)
        await found.channel.close()


async def test_call_in_progress_survives_the_removal_of_its_socket(directory: Directory) -> None:
    journal, calls = Journal(), Calls()
    async with registered(directory, calls=calls, journal=journal) as paths:
        await journal.until("plugin.serving")
        found = await visit(paths.registration_socket)
        calls.open = False
        call = asyncio.ensure_future(found.driver().NodePrepareResources(CALL, timeout=DEADLINE))
        await calls.bell.until(lambda: calls.arrived == 1)
        paths.calls_socket.unlink()
        await journal.until("plugin.serving", 2)
        calls.open = True
        calls.bell.ring()
        assert await call == dra_v1_pb2.NodePrepareResourcesResponse()
        await found.channel.close()


async def test_directories_that_the_kubelet_has_not_created_are_waited_for(short_tmp: Path) -> None:
    directory, journal = Directory(short_tmp), Journal()
    directory.plugins.rmdir()
    async with registered(directory, journal=journal) as paths:
        assert "does not exist" in (await journal.until("kubelet.unavailable"))["message"]
        assert not paths.registration_socket.exists()
        directory.plugins.mkdir()
        await journal.until("plugin.serving")


async def test_driver_without_descriptors_for_its_directories_tries_again(
    directory: Directory, monkeypatch: pytest.MonkeyPatch
) -> None:
    def exhausted(path: Path) -> NoReturn:
        raise OSError(errno.EMFILE, "Too many open files", str(path))

    directory.plugins.joinpath(DRIVER).mkdir()
    monkeypatch.setattr(Path, "iterdir", exhausted)
    journal = Journal()
    async with registered(directory, journal=journal):
        assert "Too many open files" in (await journal.until("kubelet.unavailable"))["message"]
        monkeypatch.undo()
        await journal.until("plugin.serving")


async def test_sockets_that_killed_instances_left_behind_are_removed(directory: Directory) -> None:
    (directory.plugins / DRIVER).mkdir()
    own = [directory.plugins / DRIVER / f"dra-{TWO}.sock", directory.registry / f"{DRIVER}-{TWO}-reg.sock"]
    others = [directory.registry / f"{DRIVER}-more-reg.sock", directory.registry / f"x{DRIVER}-{TWO}-reg.sock"]
    for path in (*own, *others):
        dead_socket(path)
    journal = Journal()
    async with registered(directory, journal=journal):
        await journal.until("plugin.serving")
        assert not any(path.exists() for path in own)
        assert all(path.exists() for path in others)


async def test_restart_in_the_same_pod_replaces_the_sockets_of_the_killed_process(directory: Directory) -> None:
    (directory.plugins / DRIVER).mkdir()
    dead_socket(directory.plugins / DRIVER / f"dra-{ONE}.sock")
    dead_socket(directory.registry / f"{DRIVER}-{ONE}-reg.sock")
    journal = Journal()
    async with registered(directory, journal=journal) as paths:
        await journal.until("plugin.serving")
        found = await visit(paths.registration_socket)
        await found.driver().NodePrepareResources(CALL, timeout=DEADLINE)
        await found.channel.close()


async def test_two_instances_of_a_rolling_update_are_both_served(directory: Directory) -> None:
    first, second = Journal(), Journal()
    async with registered(directory, ONE, journal=first) as old, registered(directory, TWO, journal=second) as new:
        await first.until("plugin.serving")
        await second.until("plugin.serving")
        for paths in (old, new):
            found = await visit(paths.registration_socket)
            await found.driver().NodePrepareResources(CALL, timeout=DEADLINE)
            await found.channel.close()
    assert directory.names() == []


async def test_second_driver_with_the_same_sockets_waits_and_says_why(directory: Directory) -> None:
    first, second = Journal(), Journal()
    async with registered(directory, "", journal=first) as paths:
        await first.until("plugin.serving")
        async with registered(directory, "", journal=second):
            message = (await second.until("kubelet.unavailable"))["message"]
            assert "Another process listens at" in message
            found = await visit(paths.registration_socket)
            await found.driver().NodePrepareResources(CALL, timeout=DEADLINE)
            await found.channel.close()


async def test_refusal_by_the_kubelet_is_logged_with_its_reason(directory: Directory) -> None:
    journal = Journal()
    async with registered(directory, journal=journal) as paths:
        await journal.until("plugin.serving")
        found = await visit(paths.registration_socket, error="the name is taken")
        assert (await journal.until("kubelet.registration-refused"))["message"] == "the name is taken"
        await found.channel.close()


async def test_kubelet_that_does_not_connect_is_logged(directory: Directory) -> None:
    journal = Journal()
    async with registered(directory, journal=journal):
        assert "has not connected" in (await journal.until("kubelet.unavailable"))["message"]


async def test_registration_answers_a_restarted_kubelet_again(directory: Directory) -> None:
    journal = Journal()
    async with registered(directory, journal=journal) as paths:
        await journal.until("plugin.serving")
        for _ in range(2):
            async with grpc.aio.insecure_channel(f"unix:{paths.registration_socket}") as channel:
                info = await registration_rpc.RegistrationStub(channel).GetInfo(
                    registration.InfoRequest(), timeout=DEADLINE
                )
                assert info.name == DRIVER


@pytest.mark.parametrize("name", ["", "GPU.dev", "gpu_scrubber", ".dev", "a/b", "d" * 64])
def test_driver_name_that_kubernetes_would_refuse_is_refused_first(short_tmp: Path, name: str) -> None:
    with pytest.raises(InvalidConfiguration, match="name of a DRA driver"):
        DriverSocketPaths(name, short_tmp, short_tmp).check()


def test_paths_that_cannot_work_are_refused(short_tmp: Path) -> None:
    (short_tmp / "file").touch()
    with pytest.raises(InvalidConfiguration, match=r"is a file\. Use the kubelet's directory"):
        DriverSocketPaths(DRIVER, short_tmp / "file", short_tmp).check()
    with pytest.raises(InvalidConfiguration, match="limit for a Unix socket is 107"):
        DriverSocketPaths(DRIVER, short_tmp / ("d" * 80), short_tmp).check()
    with pytest.raises(InvalidConfiguration, match="is not the UID of a pod"):
        DriverSocketPaths(DRIVER, short_tmp, short_tmp, "../x").check()
    DriverSocketPaths(DRIVER, short_tmp / "plugins", short_tmp / "registry", ONE).check()
