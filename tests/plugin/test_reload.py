"""Changes of the NVIDIA settings while the plugin runs, as a process: SIGHUP, and a driver that appears or moves."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import urllib.request
from asyncio.subprocess import Process
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from plugin.api import deviceplugin_pb2 as api
from plugin.api import deviceplugin_pb2_grpc as rpc
from tests.emulation import TinyPlugin
from tests.gpus import gpu, install_driver, seen
from tests.plugin.test_injection import allocated, next_line, node, plugin
from tests.plugin_collaborators import DEADLINE, FakeKubelet, FakeService, device, snapshot, start

TWO = node(seen(gpu(0)), seen(gpu(1)))
SHARED = "version: v1\nsharing: {timeSlicing: {resources: [{name: nvidia.com/gpu, replicas: 2}]}}\n"


@pytest.fixture
def config(short_tmp: Path) -> Path:
    file = short_tmp / "config.yaml"
    file.write_text("version: v1\n")
    return file


async def test_sighup_registers_again_with_the_changed_configuration_file(short_tmp: Path, config: Path) -> None:
    async with (
        FakeKubelet(short_tmp) as kubelet,
        FakeService(short_tmp / "s", TWO),
        plugin(short_tmp, "--config-file", str(config)) as process,
    ):
        first = await kubelet.new_registration()
        assert first.healthy == {gpu(0).id, gpu(1).id}
        config.write_text(SHARED)
        process.send_signal(signal.SIGHUP)
        second = await kubelet.new_registration(after=1)
        assert second.healthy == {f"{gpu(number).id}::{share}" for number in (0, 1) for share in (0, 1)}
        await kubelet.until(lambda: first.ended)
        assert first.error is None
        assert [each.resource_name for each in kubelet.requests] == ["nvidia.com/gpu"] * 2
        await second.plugin.PreStartContainer(start(f"{gpu(0).id}::1"), timeout=30)
        process.send_signal(signal.SIGTERM)
        assert await process.wait() == 0
        assert not second.socket.exists()


async def test_configuration_file_that_cannot_work_is_logged_with_its_line_and_changes_nothing(
    short_tmp: Path, config: Path
) -> None:
    async with (
        FakeKubelet(short_tmp) as kubelet,
        FakeService(short_tmp / "s", TWO),
        plugin(short_tmp, "--config-file", str(config)) as process,
    ):
        registered = await kubelet.new_registration()
        for text, line in (("version: v1\nflags: {migStrategy: half}\n", 2), ("sharing: [\n", 2)):
            config.write_text(text)
            process.send_signal(signal.SIGHUP)
            rejected = await next_line(process, "settings.rejected")
            assert rejected["message"].startswith(f"{config}:{line}: ")
        config.write_text("version: v1\n")
        process.send_signal(signal.SIGHUP)
        await next_line(process, "settings.unchanged")
        await registered.plugin.PreStartContainer(start(gpu(0).id), timeout=30)
        assert (len(kubelet.requests), registered.ended) == (1, False)


async def test_settings_with_which_the_plugin_would_exit_on_this_node_change_nothing(
    short_tmp: Path, config: Path
) -> None:
    containerd = short_tmp / "host/etc/containerd/config.toml"
    containerd.parent.mkdir(parents=True)
    runtime = "[plugins.'io.containerd.cri.v1.runtime']"
    containerd.write_text(f"version = 3\n{runtime}\ncdi_spec_dirs = ['{short_tmp}/cdi']\n")
    install_driver(short_tmp / "driver")
    config.write_text("flags: {plugin: {deviceListStrategy: cdi-cri}}")
    flags = ("--config-file", str(config), "--cdi-dir", str(short_tmp / "cdi"), "--mig-strategy", "mixed")
    places = ("--host-root-ctr-path", str(short_tmp / "host"), "--driver-root-ctr-path", str(short_tmp / "driver"))
    async with (
        FakeKubelet(short_tmp) as kubelet,
        FakeService(short_tmp / "s", TWO),
        plugin(short_tmp, *flags, *places) as process,
    ):
        registered = await kubelet.new_registration()
        config.write_text("flags: {plugin: {deviceListStrategy: envvar}}")
        process.send_signal(signal.SIGHUP)
        rejected = await next_line(process, "settings.rejected")
        assert rejected["message"].startswith("Containers would start without a GPU: with envvar")
        await registered.plugin.PreStartContainer(start(gpu(0).id), timeout=30)
        assert (len(kubelet.requests), registered.ended) == (1, False)


async def test_reload_that_contradicts_a_flag_changes_nothing(short_tmp: Path, config: Path) -> None:
    upstream = short_tmp / "up"
    upstream.mkdir()
    async with plugin(short_tmp, "--config-file", str(config), "--upstream-dir", str(upstream)) as process:
        await next_line(process, "upstream-registry.serving")
        config.write_text(SHARED)
        process.send_signal(signal.SIGHUP)
        assert "--upstream-dir" in (await next_line(process, "settings.rejected"))["message"]


def scrape(address: str) -> str:
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=DEADLINE) as page:
        text: str = page.read().decode()
    return text


async def test_metrics_forget_a_resource_that_a_reload_dropped(short_tmp: Path, config: Path) -> None:
    async with (
        FakeKubelet(short_tmp) as kubelet,
        FakeService(short_tmp / "s", TWO),
        plugin(short_tmp, "--config-file", str(config), "--metrics-address", "127.0.0.1:0") as process,
    ):
        await kubelet.new_registration()
        address = (await next_line(process, "metrics.serving"))["address"]
        config.write_text(SHARED.replace("resources", "renameByDefault: true, resources"))
        process.send_signal(signal.SIGHUP)
        await kubelet.new_registration(after=1)
        await next_line(process, "kubelet.registered")
        text = await asyncio.to_thread(scrape, address)
        assert 'scrubber_plugin_registered{resource="nvidia.com/gpu.shared"} 1.0' in text
        assert 'scrubber_plugin_registered{resource="nvidia.com/gpu"}' not in text


# -- NVIDIA's config-manager -------------------------------------------------------------------------------------------


def named(program: str) -> Iterator[int]:
    """Return the processes that NVIDIA's config-manager would signal: those whose first argument equals ``program``."""
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            arguments = (entry / "cmdline").read_bytes().split(b"\0")
        except OSError:  # it has ended
            continue
        if arguments[0] == program.encode():
            yield int(entry.name)


async def test_process_is_found_by_the_documented_name_and_reloads_what_config_manager_linked(short_tmp: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "replacing-nvidias-plugin.md").read_text()
    assert "command: [/opt/scrubber/bin/python, /opt/scrubber/bin/scrubber] " in page
    assert "{name: PROCESS_TO_SIGNAL, value: /opt/scrubber/bin/python}" in page

    configs, link = short_tmp / "available", short_tmp / "config.yaml"
    configs.mkdir()
    (configs / "whole").write_text("version: v1\n")
    (configs / "shared").write_text(SHARED)
    link.symlink_to(configs / "whole")
    program = short_tmp / "python"  # a name of its own: the tests are Python processes as well
    program.symlink_to(os.path.realpath(sys.executable))
    flags = ("--config-file", str(link))
    path = os.pathsep.join(sys.path)
    async with (
        FakeKubelet(short_tmp) as kubelet,
        FakeService(short_tmp / "s", TWO),
        plugin(short_tmp, *flags, program=str(program), PYTHONPATH=path) as process,
    ):
        await kubelet.new_registration()
        link.unlink()
        link.symlink_to(configs / "shared")
        (pid,) = named(str(program))
        assert pid == process.pid
        os.kill(pid, signal.SIGHUP)
        assert len((await kubelet.new_registration(after=1)).healthy) == 4


# -- the GPU Operator's validator --------------------------------------------------------------------------------------


class OperatorNode:
    """An operator's node: a driver in a container, and the file of the validator."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.file = root / "validations" / "driver-ready"
        self.spec = root / "cdi" / "scrubber.dev-gpu.json"
        self.file.parent.mkdir()

    @property
    def flags(self) -> tuple[str, ...]:
        strategies = ("--device-list-strategy", "cdi-annotations,cdi-cri", "--cdi-dir", str(self.spec.parent))
        return (*strategies, "--driver-ready-file", str(self.file), "--nvidia-cdi-hook-path", "/opt/nvidia-cdi-hook")

    def announce(self, driver: Path) -> None:
        lines = (f"NVIDIA_DRIVER_ROOT={driver}", f"DRIVER_ROOT_CTR_PATH={self.root}/missing", "NVIDIA_DEV_ROOT=/")
        new = self.file.with_suffix(".new")
        new.write_text("\n".join(("IS_HOST_DRIVER=false", *lines, "DEV_ROOT_CTR_PATH=/host", "")))
        new.rename(self.file)

    def mounts(self) -> set[str]:
        spec: dict[str, Any] = json.loads(self.spec.read_bytes())
        return {each["hostPath"] for each in spec["containerEdits"]["mounts"]}


async def until_stopped(process: Process) -> None:
    process.send_signal(signal.SIGTERM)
    assert await process.wait() == 0


async def test_plugin_waits_for_the_validators_file_and_can_be_stopped_meanwhile(short_tmp: Path) -> None:
    here = OperatorNode(short_tmp)
    async with FakeKubelet(short_tmp) as kubelet, FakeService(short_tmp / "s", TWO):
        async with plugin(short_tmp, *here.flags) as process:
            waiting = await next_line(process, "driver.location-unknown")
            assert waiting["message"].startswith(f"{here.file} does not exist")
            await until_stopped(process)
        assert kubelet.requests == []
        async with plugin(short_tmp, *here.flags) as process:
            await next_line(process, "driver.location-unknown")
            install_driver(short_tmp / "driver")
            here.announce(short_tmp / "driver")
            registered = await kubelet.new_registration()
            assert registered.healthy == {gpu(0).id, gpu(1).id}
            container = await allocated(registered, gpu(0).id)
            assert [each.name for each in container.cdi_devices] == [f"scrubber.dev/gpu={gpu(0).id}"]
            assert list(container.annotations.values()) == [f"scrubber.dev/gpu={gpu(0).id}"]
            await until_stopped(process)


async def test_devices_are_withheld_while_the_driver_is_replaced_and_return_with_it(short_tmp: Path) -> None:
    here, driver = OperatorNode(short_tmp), short_tmp / "driver"
    install_driver(driver)
    here.announce(driver)
    async with (
        FakeKubelet(short_tmp) as kubelet,
        FakeService(short_tmp / "s", TWO) as service,
        plugin(short_tmp, *here.flags),
    ):
        registered = await kubelet.new_registration()
        assert registered.healthy == {gpu(0).id, gpu(1).id}
        here.file.unlink()
        driver.rename(short_tmp / "of-the-old-container")
        service.show(node(seen(gpu(0)), seen(gpu(1)), version=2))
        await kubelet.until(lambda: not registered.healthy)
        install_driver(driver, "570.1.2")
        service.show(node(seen(gpu(0)), seen(gpu(1)), version=3))
        await kubelet.until(lambda: registered.healthy == {gpu(0).id, gpu(1).id})
        assert any("libcuda.so.570.1.2" in path for path in here.mounts())
        assert len(kubelet.requests) == 1


async def test_bad_configuration_file_does_not_end_a_plugin_that_waits_for_the_driver(
    short_tmp: Path, config: Path
) -> None:
    here = OperatorNode(short_tmp)
    async with (
        FakeKubelet(short_tmp) as kubelet,
        FakeService(short_tmp / "s", TWO),
        plugin(short_tmp, *here.flags, "--config-file", str(config)) as process,
    ):
        await next_line(process, "driver.location-unknown")
        for text in ("sharing: [", SHARED):
            config.write_text(text)
            process.send_signal(signal.SIGHUP)
            if text != SHARED:
                await next_line(process, "settings.rejected")
        install_driver(short_tmp / "driver")
        here.announce(short_tmp / "driver")
        assert len((await kubelet.new_registration()).healthy) == 4


async def test_plugin_follows_a_driver_that_moves_and_ignores_a_validator_that_restarts(short_tmp: Path) -> None:
    here = OperatorNode(short_tmp)
    for name in ("one", "two"):
        install_driver(short_tmp / name)
    here.announce(short_tmp / "one")
    async with (
        FakeKubelet(short_tmp) as kubelet,
        FakeService(short_tmp / "s", TWO),
        plugin(short_tmp, *here.flags) as process,
    ):
        await kubelet.new_registration()
        assert all(path.startswith(f"{short_tmp}/one/") for path in here.mounts())
        here.file.unlink()
        process.send_signal(signal.SIGHUP)
        await next_line(process, "settings.unchanged")
        here.announce(short_tmp / "two")
        assert (await next_line(process, "settings.reloaded"))["root"] == f"{short_tmp}/two"
        assert (await kubelet.new_registration(after=1)).healthy == {gpu(0).id, gpu(1).id}
        assert all(path.startswith(f"{short_tmp}/two/") for path in here.mounts())


# -- in front of a vendor's plugin -------------------------------------------------------------------------------------


async def register(vendor: TinyPlugin, directory: Path) -> None:
    """Serve the vendor's plugin and register it, as after each new ``kubelet.sock``."""
    await vendor.serve(directory / "vendor.sock")
    request = api.RegisterRequest(version="v1beta1", endpoint="vendor.sock", resource_name="vendor.example/gpu")
    options = [("grpc.use_local_subchannel_pool", 1)]
    async with grpc.aio.insecure_channel(f"unix:{directory}/kubelet.sock", options=options) as channel:
        await rpc.RegistrationStub(channel).Register(request, timeout=DEADLINE, wait_for_ready=True)


async def test_vendors_plugin_sees_a_new_kubelet_socket_after_a_reload_and_serves_again(
    short_tmp: Path, config: Path
) -> None:
    upstream = short_tmp / "u"
    upstream.mkdir()
    flags = ("--config-file", str(config), "--upstream-dir", str(upstream))
    vendor = TinyPlugin(["sim-0"])
    async with (
        FakeKubelet(short_tmp) as kubelet,
        FakeService(short_tmp / "s", snapshot(device(0))),
        plugin(short_tmp, *flags) as process,
    ):
        await next_line(process, "upstream-registry.serving")
        before = (upstream / "kubelet.sock").stat().st_mtime_ns
        await register(vendor, upstream)
        assert (await kubelet.new_registration()).healthy == {"sim-0"}
        config.write_text("flags: {plugin: {passDeviceSpecs: true}}")
        process.send_signal(signal.SIGHUP)
        await next_line(process, "upstream-registry.serving")
        assert (upstream / "kubelet.sock").stat().st_mtime_ns != before
        await vendor.stop()
        await register(vendor, upstream)
        again = await kubelet.new_registration(after=1)
        assert again.healthy == {"sim-0"}
        await again.plugin.PreStartContainer(start("sim-0"), timeout=30)
        await vendor.stop()
