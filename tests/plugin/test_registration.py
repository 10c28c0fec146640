"""Registration of the plugin with the kubelet, and its repetition."""

from __future__ import annotations

import asyncio
import dataclasses
import errno
import io
import itertools
import os
import socket
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, closing
from pathlib import Path
from typing import NoReturn

import grpc
import pytest
from watchfiles import awatch

from plugin.api import deviceplugin_pb2 as api
from plugin.api import deviceplugin_pb2_grpc as rpc
from plugin.instance_lock import InstanceLock
from plugin.kubelet.devices import AdvertisedDevice, AdvertisedDevices, ServiceVerdict
from plugin.kubelet.registration import KubeletPaths, Registrar, RegistrationMode, RegistrationTimes
from plugin.kubelet.server import DevicePlugin
from plugin.logs import create_logger
from scrubber.domain.errors import InvalidConfiguration
from scrubber.emulator.ungated_plugin import UngatedPlugin, read_sim_devices
from tests.emulation import SOON, emulated
from tests.plugin_collaborators import DEADLINE, Bell, FakeKubelet, Registered, allocation

RESOURCE = "scrubber.dev/gpu"
QUICK = RegistrationTimes(
    poll=0.01,
    idle_poll=0.01,
    watcher_fallback=0.1,
    watcher_call=0.02,
    stream=DEADLINE,
    retry=0.02,
    stable=60.0,
    back_off=0.01,
)
IMHASTY = dataclasses.replace(QUICK, watcher_fallback=0.0)
PATIENT = dataclasses.replace(QUICK, watcher_fallback=0.05)
HASTY = dataclasses.replace(QUICK, watcher_fallback=0.0)
PATIENT = dataclasses.replace(QUICK, watcher_fallback=3600.0)
OFFER = AdvertisedDevice(id="gpu-0", index="0", verdict=ServiceVerdict.ADVERTISED, healthy=True)


class OpenGate:
    async def reserve(self, device_ids: object, resource: str, span: object) -> None:
        return

    async def hand_over(self, device_ids: object, resource: str, deadline: object, span: object) -> None:
        return


class Journal(io.StringIO):
    """A log that a test can wait for."""

    def __init__(self) -> None:
        super().__init__()
        self._bell = Bell()

    def write(self, text: str) -> int:
        written = super().write(text)
        self._bell.ring()
        return written

    async def until_logged(self, words: str) -> None:
        await self._bell.until(lambda: words in self.getvalue())


@asynccontextmanager
async def registrar(
    kubelet_dir: Path,
    mode: RegistrationMode,
    times: RegistrationTimes = QUICK,
    *,
    name: str = "a",
    journal: Journal | None = None,
) -> AsyncIterator[asyncio.Task[None]]:
    advertised = AdvertisedDevices()
    await advertised.update((OFFER,), "one")
    log = create_logger("json", "info", journal or Journal())
    tokens = itertools.count()
    task: asyncio.Task[None] = asyncio.create_task(
        Registrar(
            KubeletPaths(kubelet_dir, RESOURCE),
            mode,
            plugin=lambda streams: DevicePlugin(RESOURCE, advertised, OpenGate(), streams=streams, log=log),
            advertised=advertised,
            times=times,
            token=lambda: f"{name}{next(tokens)}",
            log=log,
            clock=time.monotonic,
        ).run()
    )
    yield task
    task.cancel()
    await asyncio.wait({task})


async def appears(directory: Path, but: set[Path] | frozenset[Path] = frozenset()) -> Path:
    """Wait for and return our socket in ``directory``, other than those in ``but``."""
    directory.mkdir(parents=True, exist_ok=True)
    async with asyncio.timeout(DEADLINE):
        async for _ in awatch(directory, rust_timeout=50, yield_on_timeout=True, step=10, debounce=20):
            found = set(directory.glob("scrubber-gpu-*.sock")) - but
            if found:
                return found.pop()
    raise AssertionError("the watch ended")


async def test_classic_registration_serves_before_it_registers_under_the_resource_name(short_tmp: Path) -> None:
    async with FakeKubelet(short_tmp) as kubelet, registrar(short_tmp, RegistrationMode.CLASSIC):
        first = await kubelet.new_registration()
        (request,) = kubelet.requests
        assert (request.version, request.resource_name) == ("v1beta1", RESOURCE)
        assert first.socket.parent == kubelet.classic
        assert first.healthy == {"gpu-0"}
        assert first.socket.stat().st_mode & 0o777 == 0o660


async def test_classic_registration_waits_for_the_kubelet_and_its_directory(short_tmp: Path) -> None:
    journal = Journal()
    async with registrar(short_tmp, RegistrationMode.CLASSIC, journal=journal):
        await journal.until_logged("device-plugins does not exist")
        (short_tmp / "device-plugins").mkdir()
        await journal.until_logged("kubelet.sock does not exist")
        async with FakeKubelet(short_tmp) as kubelet:
            await kubelet.new_registration()
            await journal.until_logged("kubelet.available")


async def test_classic_registration_waits_for_a_kubelet_whose_dead_socket_still_exists(short_tmp: Path) -> None:
    kubelet = FakeKubelet(short_tmp)
    await kubelet.start()
    await kubelet.stop()
    (kubelet.classic / "kubelet.sock").unlink(missing_ok=True)
    with closing(socket.socket(socket.AF_UNIX)) as dead:
        dead.bind(str(kubelet.classic / "kubelet.sock"))
    journal = Journal()
    async with registrar(short_tmp, RegistrationMode.CLASSIC, journal=journal):
        await journal.until_logged("failed: UNAVAILABLE")
        (kubelet.classic / "kubelet.sock").unlink()
        await kubelet.start()
        await kubelet.new_registration()
        await kubelet.stop()


async def test_classic_registration_uses_a_new_socket_after_a_kubelet_restart(short_tmp: Path) -> None:
    async with FakeKubelet(short_tmp) as kubelet, registrar(short_tmp, RegistrationMode.CLASSIC):
        first = await kubelet.new_registration()
        await kubelet.stop()
        await kubelet.start()
        second = await kubelet.new_registration(after=1)
        assert second.socket != first.socket
        assert set(kubelet.classic.glob("scrubber-*.sock")) == {second.socket}


async def test_plugin_registers_again_when_only_the_stream_has_ended(short_tmp: Path) -> None:
    async with FakeKubelet(short_tmp) as kubelet, registrar(short_tmp, RegistrationMode.CLASSIC):
        sockets = set()
        for number in range(4):
            registered = await kubelet.new_registration(after=number)
            sockets.add(registered.socket)
            await kubelet.drop(registered)
        await kubelet.new_registration(after=4)
        assert len(sockets) == 4


async def test_plugin_registers_again_when_the_kubelet_accepts_the_registration_but_opens_no_stream(
    short_tmp: Path,
) -> None:
    class Forgetful(FakeKubelet):
        """A kubelet in which the end of an older stream also removes the new client, before it has requested a list."""

        async def connect(self, socket: Path) -> Registered:
            if len(self.requests) > 2:
                return await super().connect(socket)
            async with grpc.aio.insecure_channel(f"unix:{socket}") as channel:
                options = await rpc.DevicePluginStub(channel).GetDevicePluginOptions(api.Empty(), timeout=DEADLINE)
                return Registered(socket, channel, options)

    soon = dataclasses.replace(QUICK, stream=0.3)
    async with Forgetful(short_tmp) as kubelet, registrar(short_tmp, RegistrationMode.CLASSIC, soon):
        registered = await kubelet.new_registration()
        assert len(kubelet.requests) >= 3
        assert registered.healthy == {"gpu-0"}


async def test_plugin_registers_again_when_its_socket_is_removed(short_tmp: Path) -> None:
    async with FakeKubelet(short_tmp) as kubelet, registrar(short_tmp, RegistrationMode.CLASSIC):
        first = await kubelet.new_registration()
        first.socket.unlink()
        second = await kubelet.new_registration(after=1)
        assert second.socket.exists()


async def test_plugin_registers_again_when_the_kubelets_socket_is_recreated_although_the_stream_is_open(
    short_tmp: Path,
) -> None:
    async with FakeKubelet(short_tmp) as old, registrar(short_tmp, RegistrationMode.CLASSIC):
        first = await old.new_registration()
        new = FakeKubelet(short_tmp)
        new.wipes = False
        async with new:
            await new.new_registration()
            assert first.socket != new.registered[0].socket


async def test_plugin_without_descriptors_for_its_directory_tries_again(
    short_tmp: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def exhausted(path: Path, pattern: str) -> NoReturn:
        raise OSError(errno.EMFILE, "Too many open files", str(path))

    journal = Journal()
    async with FakeKubelet(short_tmp) as kubelet:
        monkeypatch.setattr(Path, "glob", exhausted)
        async with registrar(short_tmp, RegistrationMode.CLASSIC, journal=journal):
            await journal.until_logged("Too many open files")
            monkeypatch.undo()
            await kubelet.new_registration()


async def test_refused_registration_is_retried(short_tmp: Path) -> None:
    kubelet = FakeKubelet(short_tmp)
    kubelet.refuse_with = "the kubelet is not ready"
    async with kubelet, registrar(short_tmp, RegistrationMode.CLASSIC):
        await kubelet.until(lambda: len(kubelet.requests) >= 2)
        kubelet.refuse_with = ""
        await kubelet.new_registration()


async def test_plugin_watcher_finds_type_name_and_endpoint_of_the_plugin(short_tmp: Path) -> None:
    async with FakeKubelet(short_tmp) as kubelet, registrar(short_tmp, RegistrationMode.WATCHER):
        found = await appears(kubelet.registry)
        info = await kubelet.visit(found)
        assert (info.type, info.name, list(info.supported_versions)) == ("DevicePlugin", RESOURCE, ["v1beta1"])
        assert Path(info.endpoint).is_absolute()
        registered = await kubelet.new_registration()
        assert registered.healthy == {"gpu-0"}
        assert kubelet.requests == []


async def test_watcher_socket_is_recreated_when_the_stream_ends(short_tmp: Path) -> None:
    async with FakeKubelet(short_tmp) as kubelet, registrar(short_tmp, RegistrationMode.WATCHER):
        first = await appears(kubelet.registry)
        await kubelet.visit(first)
        await kubelet.drop(await kubelet.new_registration())
        second = await appears(kubelet.registry, but={first})
        await kubelet.visit(second)
        await kubelet.new_registration(after=1)
        assert not first.exists()


async def test_auto_registration_uses_the_watcher_without_a_device_plugins_directory(short_tmp: Path) -> None:
    kubelet = FakeKubelet(short_tmp)
    kubelet.registry.mkdir()
    async with registrar(short_tmp, RegistrationMode.AUTO, HASTY):
        await kubelet.visit(await appears(kubelet.registry))
        await kubelet.new_registration()
        await kubelet.stop()


async def test_socket_of_a_killed_plugin_is_removed_by_the_next_one(short_tmp: Path) -> None:
    async with FakeKubelet(short_tmp) as kubelet:
        left = kubelet.classic / "scrubber-gpu-deadbeef.sock"
        with closing(socket.socket(socket.AF_UNIX)) as killed:
            killed.bind(str(left))
        os.utime(left, (0, 0))
        async with registrar(short_tmp, RegistrationMode.CLASSIC):
            registered = await kubelet.new_registration()
            assert set(kubelet.classic.glob("scrubber-*")) == {registered.socket}


async def test_auto_registration_leaves_the_registry_when_the_device_plugins_directory_appears(short_tmp: Path) -> None:
    kubelet = FakeKubelet(short_tmp)
    kubelet.registry.mkdir()
    async with registrar(short_tmp, RegistrationMode.AUTO, HASTY):
        await appears(kubelet.registry)
        async with kubelet:
            registered = await kubelet.new_registration()
            assert registered.socket.parent == kubelet.classic
            assert list(kubelet.registry.glob("*.sock")) == []


async def test_auto_registration_is_classic_without_a_plugins_registry(short_tmp: Path) -> None:
    kubelet = FakeKubelet(short_tmp)
    async with kubelet:
        kubelet.registry.rmdir()
        async with registrar(short_tmp, RegistrationMode.AUTO, PATIENT):
            assert (await kubelet.new_registration()).socket.parent == kubelet.classic


async def test_auto_registration_waits_for_the_kubelets_socket_without_a_socket_in_the_registry(
    short_tmp: Path,
) -> None:
    kubelet, journal = FakeKubelet(short_tmp), Journal()
    for directory in (kubelet.classic, kubelet.registry):
        directory.mkdir()
    async with registrar(short_tmp, RegistrationMode.AUTO, HASTY, journal=journal):
        await journal.until_logged("kubelet.sock does not exist")
        async with kubelet:
            assert (await kubelet.new_registration()).socket.parent == kubelet.classic
    assert str(kubelet.registry) not in journal.getvalue()


async def test_auto_registration_succeeds_before_the_first_node_status_of_a_restarted_kubelet(short_tmp: Path) -> None:
    """An emulated kubelet that never publishes a status never reads ``plugins_registry/`` either."""
    async with (
        emulated(short_tmp, first_node_status=3600.0) as kubelet,
        registrar(short_tmp, RegistrationMode.AUTO, PATIENT),
    ):
        for _ in range(3):
            await kubelet.wait_until(lambda node: node.allocatable(RESOURCE) == 1, SOON)
            await kubelet.restart()
            assert list(kubelet.plugins_registry.glob("*.sock")) == []


async def test_stopping_plugin_ends_its_streams_and_removes_only_its_own_socket(short_tmp: Path) -> None:
    async with FakeKubelet(short_tmp) as kubelet:
        other = kubelet.classic / "other.sock"
        with closing(socket.socket(socket.AF_UNIX)) as another:
            another.bind(str(other))
            async with registrar(short_tmp, RegistrationMode.CLASSIC):
                registered = await kubelet.new_registration()
            await kubelet.until(lambda: registered.ended)
            assert registered.error is None
            assert set(kubelet.classic.glob("*.sock")) == {other, kubelet.classic / "kubelet.sock"}


@pytest.mark.parametrize("mode", [RegistrationMode.CLASSIC, RegistrationMode.AUTO])
async def test_second_instance_registers_only_once_the_first_has_ended_its_stream(
    short_tmp: Path, mode: RegistrationMode
) -> None:
    journal = Journal()
    async with FakeKubelet(short_tmp) as kubelet, AsyncExitStack() as second:
        async with registrar(short_tmp, mode, name="old"):
            old = await kubelet.new_registration()
            await second.enter_async_context(registrar(short_tmp, mode, name="new", journal=journal))
            await journal.until_logged("plugin.standby")
            (waiting,) = set(kubelet.classic.glob("scrubber-*.sock")) - {old.socket}
            async with grpc.aio.insecure_channel(f"unix:{waiting}") as channel:
                await rpc.DevicePluginStub(channel).GetDevicePluginOptions(api.Empty(), timeout=DEADLINE)
            await kubelet.drop(old)
            old = await kubelet.new_registration(after=1)
            assert [each.endpoint for each in kubelet.requests] == ["scrubber-gpu-old0.sock", "scrubber-gpu-old1.sock"]
        new = await kubelet.new_registration(after=2)
        assert new.socket == waiting
        assert old.ended
        assert not new.ended
        assert len(kubelet.requests) == 3


async def test_second_instance_creates_its_registry_socket_only_once_the_first_ones_is_gone(
    short_tmp: Path,
) -> None:
    journal = Journal()
    async with FakeKubelet(short_tmp) as kubelet, AsyncExitStack() as second:
        async with registrar(short_tmp, RegistrationMode.WATCHER, name="old"):
            old = await appears(kubelet.registry)
            await second.enter_async_context(
                registrar(short_tmp, RegistrationMode.WATCHER, name="new", journal=journal)
            )
            await journal.until_logged("plugin.standby")
            assert set(kubelet.registry.glob("*.sock")) == {old}
        await kubelet.visit(await appears(kubelet.registry, but={old}))
        await kubelet.new_registration()
        assert not old.exists()


async def test_standby_instance_serves_on_a_new_socket_after_a_kubelet_restart(short_tmp: Path) -> None:
    journal = Journal()
    async with FakeKubelet(short_tmp) as kubelet, AsyncExitStack() as second:
        async with registrar(short_tmp, RegistrationMode.CLASSIC, name="old"):
            await kubelet.new_registration()
            await second.enter_async_context(
                registrar(short_tmp, RegistrationMode.CLASSIC, name="new", journal=journal)
            )
            await journal.until_logged("plugin.standby")
            await kubelet.stop()
            await kubelet.start()
            await kubelet.new_registration(after=1)
            await journal.until_logged("scrubber-gpu-new1.sock")
        new = await kubelet.new_registration(after=2)
        assert new.socket.name.startswith("scrubber-gpu-new")


async def test_instance_locks_of_different_resources_are_independent(short_tmp: Path) -> None:
    first, second = (InstanceLock(short_tmp, name) for name in ("scrubber.dev/gpu", "nvidia.com/gpu"))
    again = InstanceLock(short_tmp, "scrubber.dev/gpu")
    assert first.try_acquire()
    assert second.try_acquire()
    assert not again.try_acquire()
    first.release()
    assert again.try_acquire()
    again.release()
    second.release()


async def test_only_the_owner_may_open_the_lock_of_an_instance(short_tmp: Path) -> None:
    """A user who could open it, even to read, could lock it, and keep every instance from registering."""
    lock = InstanceLock(short_tmp, RESOURCE)
    before = os.umask(0)
    try:
        assert lock.try_acquire()
    finally:
        os.umask(before)
    assert lock.path.stat().st_mode & 0o777 == 0o600
    lock.release()


async def test_lock_of_a_registered_instance_survives_the_removal_of_its_file(short_tmp: Path) -> None:
    older, newer = InstanceLock(short_tmp, RESOURCE), InstanceLock(short_tmp, RESOURCE)
    assert older.try_acquire()
    older.path.unlink()
    assert older.try_acquire()
    assert not newer.try_acquire()
    older.release()
    assert newer.try_acquire()
    newer.release()


async def test_instance_whose_lock_file_was_removed_waits_for_the_instance_that_locked_the_new_file(
    short_tmp: Path,
) -> None:
    older, newer = InstanceLock(short_tmp, RESOURCE), InstanceLock(short_tmp, RESOURCE)
    assert older.try_acquire()
    older.path.unlink()
    assert newer.try_acquire()
    assert not older.try_acquire()
    newer.release()
    assert older.try_acquire()
    older.release()


async def test_every_instance_registers_where_no_lock_can_be_created(short_tmp: Path) -> None:
    assert InstanceLock(short_tmp / "missing", RESOURCE).try_acquire()


async def test_regular_file_at_the_kubelets_socket_path_ends_the_plugin_with_an_error_message(short_tmp: Path) -> None:
    (short_tmp / "device-plugins").mkdir()
    (short_tmp / "device-plugins" / "kubelet.sock").touch()
    async with registrar(short_tmp, RegistrationMode.CLASSIC) as task, asyncio.timeout(DEADLINE):
        await asyncio.wait({task})
        assert isinstance(task.exception(), InvalidConfiguration)


async def test_ungated_plugin_returns_the_same_mounts_and_needs_no_service(short_tmp: Path) -> None:
    place = short_tmp / "sim" / "devices" / "0"
    place.mkdir(parents=True)
    (place / "device.json").write_text('{"id": "SIM-7"}')
    async with FakeKubelet(short_tmp) as kubelet, UngatedPlugin(short_tmp, read_sim_devices(short_tmp / "sim")):
        registered = await kubelet.new_registration()
        assert not registered.options.pre_start_required
        assert registered.healthy == {"SIM-7"}
        answer = await registered.plugin.Allocate(allocation("SIM-7"))
        (mount,) = answer.container_responses[0].mounts
        assert (mount.host_path, mount.container_path) == (str(place / "memory"), "/dev/simgpu0")
