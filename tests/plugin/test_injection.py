"""The plugin as a replacement of NVIDIA's, as a process: its flags, variables and file, and what the kubelet sees."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from plugin.api import deviceplugin_pb2 as api
from scrubber.api import scrubber_pb2 as pb
from tests import forkserver
from tests.gpus import gpu, install_driver, instance, seen
from tests.plugin_collaborators import DEADLINE, FakeKubelet, FakeService, Registered, allocation, device, snapshot

ENVVAR_REFUSED = (
    "Device {id} is withheld: the policy forbids passing devices in an environment variable, because any pod can set it. "
    "Start the plugin with another --device-list-strategy."
)


@asynccontextmanager
async def plugin(directory: Path, *flags: str, program: str | None = None, **variables: str) -> AsyncIterator[Process]:
    arguments = ["--kubelet-dir", str(directory), "--socket-dir", str(directory / "s"), "--registration", "classic"]
    words = ("scrubber.cli.main", "plugin", *arguments, "--log-format", "json", "--metrics-address", "off", *flags)
    options: dict[str, Any] = {"stderr": PIPE, "env": os.environ | variables}
    if program is None:
        process = await forkserver.start(*words, **options)
    else:
        process = await asyncio.create_subprocess_exec(program, "-m", *words, **options)
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def next_line(process: Process, event: str) -> dict[str, str]:
    """Return the next log line with this event."""
    assert process.stderr is not None
    async with asyncio.timeout(DEADLINE):
        while line := await process.stderr.readline():
            found: dict[str, str] = json.loads(line)
            if found["event"] == event:
                return found
    raise AssertionError(f"the plugin ended without saying {event!r}")


async def ends(process: Process) -> tuple[int, str]:
    """Return its exit status, and its last line of output."""
    assert process.stderr is not None
    async with asyncio.timeout(DEADLINE):
        output = (await process.stderr.read()).decode()
        return await process.wait(), output.strip().splitlines()[-1]


async def allocated(registered: Registered, *ids: str) -> api.ContainerAllocateResponse:
    answer: api.AllocateResponse = await registered.plugin.Allocate(allocation(*ids))
    (container,) = answer.container_responses
    return container


def node(*devices: pb.SnapshotDevice, **facts: object) -> pb.Snapshot:
    made = snapshot(*devices)
    for name, value in facts.items():
        setattr(made, name, value)
    return made


TWO = node(seen(gpu(0)), seen(gpu(1)))


async def test_gpus_are_advertised_as_nvidia_com_gpu_and_named_in_nvidia_visible_devices_by_default(
    short_tmp: Path,
) -> None:
    async with FakeKubelet(short_tmp) as kubelet, FakeService(short_tmp / "s", TWO), plugin(short_tmp):
        registered = await kubelet.new_registration()
        assert kubelet.requests[0].resource_name == "nvidia.com/gpu"
        assert registered.healthy == {gpu(0).id, gpu(1).id}
        container = await allocated(registered, gpu(1).id, gpu(0).id)
        assert container == api.ContainerAllocateResponse(
            envs={
                "NVIDIA_VISIBLE_DEVICES": f"{gpu(0).id},{gpu(1).id}",
                "SCRUBBER_VISIBLE_DEVICES": f"{gpu(0).id},{gpu(1).id}",
            }
        )


async def test_simulated_devices_keep_their_resource_name(short_tmp: Path) -> None:
    async with FakeKubelet(short_tmp) as kubelet, FakeService(short_tmp / "s", snapshot(device(0))), plugin(short_tmp):
        registered = await kubelet.new_registration()
        assert kubelet.requests[0].resource_name == "scrubber.dev/gpu"
        assert len((await allocated(registered, "sim-0")).mounts) == 1


async def test_command_line_overrides_the_environment_and_the_environment_overrides_the_file(short_tmp: Path) -> None:
    (short_tmp / "config.yaml").write_text(
        "version: v1\nflags: {plugin: {passDeviceSpecs: true, deviceListStrategy: cdi-cri, deviceIDStrategy: uuid}}\n"
    )
    flags = ("--device-list-strategy", "envvar", "--pass-device-specs=true")
    variables = {
        "CONFIG_FILE": str(short_tmp / "config.yaml"),
        "DEVICE_LIST_STRATEGY": "volume-mounts",
        "DEVICE_ID_STRATEGY": "index",
        "PASS_DEVICE_SPECS": "false",
        "NVIDIA_DEV_ROOT": "/run/nvidia/driver",
    }
    async with (
        FakeKubelet(short_tmp) as kubelet,
        FakeService(short_tmp / "s", TWO),
        plugin(short_tmp, *flags, **variables),
    ):
        container = await allocated(await kubelet.new_registration(), gpu(1).id)
        assert container.envs["NVIDIA_VISIBLE_DEVICES"] == "1"
        assert container.devices[0].host_path == "/run/nvidia/driver/dev/nvidia1"


@pytest.mark.parametrize("strategy", ["cdi-cri", "cdi-annotations"])
async def test_cdi_specification_lists_a_device_before_the_device_is_advertised(short_tmp: Path, strategy: str) -> None:
    install_driver(short_tmp / "driver", hook="nvidia-ctk")
    flags = ("--device-list-strategy", strategy, "--cdi-dir", str(short_tmp / "cdi"))
    places = ("--driver-root-ctr-path", str(short_tmp / "driver"))
    async with (
        FakeKubelet(short_tmp) as kubelet,
        FakeService(short_tmp / "s", TWO) as service,
        plugin(short_tmp, *flags, *places),
    ):
        registered = await kubelet.new_registration()
        spec = short_tmp / "cdi" / "scrubber.dev-gpu.json"
        container = await allocated(registered, gpu(1).id, gpu(0).id)
        named = [each.name for each in container.cdi_devices] or next(iter(container.annotations.values())).split(",")
        known = {f"scrubber.dev/gpu={each['name']}" for each in json.loads(spec.read_bytes())["devices"]}
        assert set(named) == known
        assert "NVIDIA_VISIBLE_DEVICES" not in container.envs
        service.show(node(seen(gpu(0)), seen(gpu(1)), seen(gpu(2)), version=2))
        await kubelet.until(lambda: gpu(2).id in registered.healthy)
        assert gpu(2).id in spec.read_text()


async def test_devices_are_listed_as_unhealthy_if_the_cdi_strategy_finds_no_driver(short_tmp: Path) -> None:
    flags = ("--device-list-strategy", "cdi-cri", "--cdi-dir", str(short_tmp / "cdi"))
    places = ("--driver-root-ctr-path", str(short_tmp / "driver"))
    async with FakeKubelet(short_tmp) as kubelet, FakeService(short_tmp / "s", TWO), plugin(short_tmp, *flags, *places):
        registered = await kubelet.new_registration()
        assert registered.lists == [{gpu(0).id: "Unhealthy", gpu(1).id: "Unhealthy"}]
        with pytest.raises(grpc.aio.AioRpcError, match="its CDI specification cannot be written"):
            await allocated(registered, gpu(0).id)


async def test_unwritable_cdi_directory_ends_the_plugin_with_one_error_message(short_tmp: Path) -> None:
    (short_tmp / "cdi").touch()
    async with plugin(short_tmp, "--device-list-strategy=cdi-cri", "--cdi-dir", str(short_tmp / "cdi")) as process:
        status, output = await ends(process)
        assert status == 2
        assert output.startswith(f"Error: Cannot write a CDI specification to {short_tmp / 'cdi'}")


async def test_mixed_strategy_registers_each_profile_when_its_first_instance_appears(short_tmp: Path) -> None:
    async with (
        FakeKubelet(short_tmp) as kubelet,
        FakeService(short_tmp / "s", node(seen(gpu(0)))) as service,
        plugin(short_tmp, MIG_STRATEGY="mixed") as process,
    ):
        await kubelet.new_registration()
        service.show(node(seen(gpu(0)), seen(instance(1, 0)), seen(instance(1, 1, "3g.40gb+me")), version=2))
        await kubelet.until(lambda: len(kubelet.listed) == 3)
        resources = {request.endpoint: request.resource_name for request in kubelet.requests}
        by_resource = {resources[each.socket.name]: each for each in kubelet.listed}
        assert {resource: each.healthy for resource, each in by_resource.items()} == {
            "nvidia.com/gpu": {gpu(0).id},
            "nvidia.com/mig-1g.10gb": {instance(1, 0).id},
            "nvidia.com/mig-3g.40gb.me": {instance(1, 1).id},
        }
        with pytest.raises(grpc.aio.AioRpcError, match="is not in the list of this plugin"):
            await allocated(by_resource["nvidia.com/gpu"], instance(1, 0).id)
        process.send_signal(signal.SIGTERM)
        await kubelet.until(lambda: all(each.ended for each in kubelet.listed))
        assert all(each.error is None for each in kubelet.listed)
        assert await process.wait() == 0
        assert not any(each.socket.exists() for each in kubelet.listed)


async def test_single_strategy_on_a_node_with_two_kinds_of_devices_ends_the_plugin_with_an_error_message(
    short_tmp: Path,
) -> None:
    cut = node(seen(instance(0, 0)), seen(instance(1, 0, "3g.40gb")))
    async with (
        FakeKubelet(short_tmp) as kubelet,
        FakeService(short_tmp / "s", cut),
        plugin(short_tmp, "--mig-strategy", "single") as process,
    ):
        status, output = await ends(process)
        assert status == 2
        assert output.startswith("Error: With --mig-strategy single, no GPU can be advertised: ")
        assert kubelet.requests == []


async def test_single_strategy_with_fail_on_init_error_off_waits_for_a_node_with_one_kind_of_devices(
    short_tmp: Path,
) -> None:
    cut = node(seen(instance(0, 0)), seen(instance(1, 0, "3g.40gb")))
    async with (
        FakeKubelet(short_tmp) as kubelet,
        FakeService(short_tmp / "s", cut) as service,
        plugin(short_tmp, "--mig-strategy", "single", "--fail-on-init-error=false") as process,
    ):
        await next_line(process, "node.not-advertised")
        assert kubelet.requests == []
        service.show(node(seen(instance(0, 0)), seen(instance(0, 1)), version=2))
        registered = await kubelet.new_registration()
        assert kubelet.requests[0].resource_name == "nvidia.com/gpu"
        assert registered.healthy == {instance(0, 0).id, instance(0, 1).id}


async def test_policy_that_forbids_envvar_withholds_gpus_until_another_strategy_is_chosen(short_tmp: Path) -> None:
    strict = node(seen(gpu(0)), device(0), envvar_refused=True)
    async with FakeKubelet(short_tmp) as kubelet, FakeService(short_tmp / "s", strict):
        async with plugin(
            short_tmp, "--resource-name", "a.b/c", "--device-list-strategy=volume-mounts,envvar"
        ) as process:
            output = await next_line(process, "policy.envvar-refused")
            assert output["remedy"].startswith("start the plugin with --device-list-strategy volume-mounts")
            registered = await kubelet.new_registration()
            assert registered.lists == [{"sim-0": "Healthy", gpu(0).id: "Unhealthy"}]
            with pytest.raises(grpc.aio.AioRpcError, match=re.escape(ENVVAR_REFUSED.format(id=gpu(0).id))):
                await allocated(registered, gpu(0).id)
        async with plugin(short_tmp, "--resource-name", "a.b/c", "--device-list-strategy", "volume-mounts"):
            registered = await kubelet.new_registration(after=1)
            assert registered.healthy == {"sim-0", gpu(0).id}


COMMAND_LINE = (
    *(
        "--mig-strategy=none",
        "--fail-on-init-error=true",
        "--driver-root=/",
        "--dev-root=/",
        "--pass-device-specs=true",
    ),
    *("--device-list-strategy=envvar", "--device-id-strategy=uuid", "--gdrcopy-enabled=false", "--gds-enabled=false"),
    *(
        "--mofed-enabled=false",
        "--cdi-annotation-prefix=cdi.k8s.io/",
        "--nvidia-cdi-hook-path=/usr/bin/nvidia-cdi-hook",
    ),
    *("--driver-root-ctr-path=/driver-root", "--mps-root=/run/nvidia/mps", "--device-discovery-strategy=auto"),
    *("--shared-devices-allocation-policy=distributed", "--imex-channel-ids=", "--imex-required=true"),
    *("--cdi-feature-flags=disable-ipc-discoverer", "--cdi-disable-hooks=all"),
)
"""Every flag of version 0.20 except the two that name files."""
OPERATOR_ENVIRONMENT = {
    "PASS_DEVICE_SPECS": "true",
    "FAIL_ON_INIT_ERROR": "true",
    "DEVICE_LIST_STRATEGY": "envvar",
    "DEVICE_ID_STRATEGY": "uuid",
    "MPS_ROOT": "/run/nvidia/mps",
    "MIG_STRATEGY": "single",
    "IS_HOST_DRIVER": "true",
    "NVIDIA_DRIVER_ROOT": "/",
    "DRIVER_ROOT_CTR_PATH": "/host",
    "NVIDIA_DEV_ROOT": "/",
    "IMEX_CHANNEL_IDS": "",
    "IMEX_REQUIRED": "false",
    "DEVICE_DISCOVERY_STRATEGY": "nvml",
    "CDI_FEATURE_FLAGS": "",
    "CDI_DISABLE_HOOKS": "",
    "SHARED_DEVICES_ALLOCATION_POLICY": "packed",
    "GDRCOPY_ENABLED": "true",
}
"""Variables that the GPU Operator and NVIDIA's chart set."""
CHART_FILE = """\
version: v1
flags:
  migStrategy: none
  mpsRoot: /mps
  useNodeFeatureAPI: true
  gfd: {oneshot: false, noTimestamp: false, sleepInterval: 60s, outputFile: /x, machineTypeFile: /y}
  plugin: {passDeviceSpecs: true, deviceListStrategy: [envvar], deviceIDStrategy: uuid}
sharing:
  timeSlicing: {resources: [{name: nvidia.com/gpu, replicas: 10}]}
"""


async def test_command_line_and_file_of_nvidias_plugin_start_ours(short_tmp: Path) -> None:
    (short_tmp / "config.yaml").write_text(CHART_FILE)
    files = (f"--kubelet-socket={short_tmp}/device-plugins/kubelet.sock", f"--config-file={short_tmp}/config.yaml")
    async with (
        FakeKubelet(short_tmp) as kubelet,
        FakeService(short_tmp / "s", TWO),
        plugin(short_tmp, *COMMAND_LINE, *files) as process,
    ):
        assert len((await kubelet.new_registration()).healthy) == 20
        process.send_signal(signal.SIGTERM)
        assert await process.wait() == 0


async def test_environment_of_nvidias_manifests_starts_ours(short_tmp: Path) -> None:
    variables = OPERATOR_ENVIRONMENT | {"KUBELET_SOCKET": f"{short_tmp}/device-plugins/kubelet.sock"}
    async with FakeKubelet(short_tmp) as kubelet, FakeService(short_tmp / "s", TWO), plugin(short_tmp, **variables):
        registered = await kubelet.new_registration()
        assert registered.healthy == {gpu(0).id, gpu(1).id}
        assert (await allocated(registered, gpu(0).id)).envs["NVIDIA_GDRCOPY"] == "enabled"


async def test_settings_without_effect_are_logged_once_each(short_tmp: Path) -> None:
    (short_tmp / "config.yaml").write_text("version: v1\nflags: {newKey: 1}\n")
    flags = ("--config-file", str(short_tmp / "config.yaml"), "--cdi-feature-flags", "new-flag")
    async with plugin(short_tmp, *flags) as process:
        assert "new-flag" in (await next_line(process, "settings.ignored"))["message"]
        assert "2: flags.newKey" in (await next_line(process, "settings.ignored"))["message"]


async def test_disabled_health_checks_are_logged_with_the_place_of_the_new_setting(short_tmp: Path) -> None:
    async with plugin(short_tmp, DP_DISABLE_HEALTHCHECKS="48") as process:
        assert (
            "xids: ignore in the policy" in (await next_line(process, "plugin.disable-healthchecks-ignored"))["message"]
        )


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--mig-strategy", "half"), 'Error: --mig-strategy: "half" is not one of: none, single, mixed.'),
        (("--device-id-strategy", "name"), 'Error: --device-id-strategy: "name" is not one of: uuid, index.'),
        (("--device-discovery-strategy", "tegra"), "Error: --device-discovery-strategy: tegra is not supported"),
        (("--imex-channel-ids", "0"), "Error: --imex-channel-ids: IMEX channels (0) are not supported"),
        (("--kubelet-socket", "/run/kubelet.sock"), 'Error: --kubelet-socket: "/run/kubelet.sock" is not supported.'),
        (("--shared-devices-allocation-policy", "x"), 'Error: --shared-devices-allocation-policy: "x" is not one of'),
        (("--device-list-strategy", "env"), 'Error: --device-list-strategy: "env" is not a way to pass devices.'),
        (("--nvidia-driver-root", "driver"), 'Error: --nvidia-driver-root: "driver" is not an absolute path.'),
        (("--config-file", "/nowhere.yaml"), "Error: --config-file /nowhere.yaml cannot be read: "),
        (("--cdi-annotation-prefix", "cdi"), 'Error: "cdi" is not a valid prefix of CDI annotations.'),
    ],
)
async def test_invalid_option_ends_the_plugin_with_one_error_message(
    short_tmp: Path, flags: tuple[str, ...], message: str
) -> None:
    async with plugin(short_tmp, *flags) as process:
        status, output = await ends(process)
        assert status == 2
        assert output.startswith(message)
