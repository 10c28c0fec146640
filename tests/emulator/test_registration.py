"""Registration as the kubelet does it: dial-back, refusals, restarts, ends of streams, and the plugin watcher."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import closing
from pathlib import Path

import grpc
import pytest

from plugin.api import deviceplugin_pb2 as api
from scrubber.emulator import Kubelet, KubeletTimings, sockets
from tests.emulation import RESOURCE, SOON, TinyPlugin, emulated, pod, register, registered, serving


@pytest.fixture
async def kubelet(short_tmp: Path) -> AsyncIterator[Kubelet]:
    async with emulated(short_tmp) as running:
        yield running


def calls(kubelet: Kubelet) -> list[str]:
    return [event.name for event in kubelet.events]


async def refusal(kubelet: Kubelet, endpoint: str = "x.sock", **request: str) -> str:
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await register(kubelet, endpoint, **request)
    assert refused.value.code() is grpc.StatusCode.UNKNOWN
    return refused.value.details() or ""


async def test_kubelet_requests_the_plugins_options_before_answering_register(kubelet: Kubelet) -> None:
    async with registered(kubelet, TinyPlugin()):
        assert calls(kubelet)[:2] == ["GetDevicePluginOptions", "Register"]
        assert kubelet.capacity(RESOURCE) == 2


async def test_registration_without_a_listening_plugin_is_refused(short_tmp: Path) -> None:
    async with emulated(short_tmp, dial_back=0.2) as kubelet:
        assert "failed to dial device plugin socket" in await refusal(kubelet, "unserved.sock")
        assert kubelet.capacity(RESOURCE) == 0


@pytest.mark.parametrize("version", ["v1beta2", "v1", ""])
async def test_only_version_v1beta1_is_accepted(kubelet: Kubelet, version: str) -> None:
    assert "is not supported by kubelet" in await refusal(kubelet, version=version)


@pytest.mark.parametrize(
    "name",
    [
        "gpu",
        "kubernetes.io/gpu",
        "node.kubernetes.io/gpu",
        "requests.example.com/gpu",
        "example.com/",
        "Example.com/gpu",
        "example.com/a/b",
        "example.com/-gpu",
        f"{'d' * 245}/gpu",
        f"example.com/{'n' * 64}",
    ],
)
async def test_resource_name_that_is_no_extended_resource_is_refused(kubelet: Kubelet, name: str) -> None:
    assert f'the ResourceName "{name}" is invalid' in await refusal(kubelet, resource=name)


async def test_longest_valid_resource_names_are_accepted(kubelet: Kubelet) -> None:
    longest = f"{'d' * 244}/{'n' * 63}"
    async with serving(TinyPlugin(), kubelet.device_plugins / "long.sock"):
        await register(kubelet, "long.sock", longest)
        await kubelet.wait_until(lambda node: node.capacity(longest) == 2, SOON)


async def test_kubelet_restart_deletes_plugin_sockets_and_recreates_the_kubelets_own(kubelet: Kubelet) -> None:
    async with registered(kubelet, TinyPlugin(), "tiny.sock"):
        other = kubelet.device_plugins / "notes.txt"
        other.write_text("not a socket")
        before = kubelet.root / "before"
        before.hardlink_to(kubelet.kubelet_socket)  # so that no other file gets its inode
        await kubelet.restart()
        assert not (kubelet.device_plugins / "tiny.sock").exists()
        assert other.exists()
        assert not before.samefile(kubelet.kubelet_socket)


async def test_sockets_remain_without_a_listener_while_the_kubelet_is_down(kubelet: Kubelet) -> None:
    async with registered(kubelet, TinyPlugin(), "tiny.sock"):
        await kubelet.stop()
        assert kubelet.kubelet_socket.is_socket()
        assert kubelet.pod_resources_socket.is_socket()
        assert (kubelet.device_plugins / "tiny.sock").is_socket()
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_unix_connection(str(kubelet.kubelet_socket))


async def test_capacity_is_zero_after_a_restart_until_the_plugin_registers_again(kubelet: Kubelet) -> None:
    async with registered(kubelet, TinyPlugin(), "one.sock") as plugin:
        await kubelet.restart()
        assert (kubelet.capacity(RESOURCE), kubelet.allocatable(RESOURCE)) == (0, 0)
        await plugin.stop()
        await plugin.serve(kubelet.device_plugins / "two.sock")
        await register(kubelet, "two.sock")
        await kubelet.wait_until(lambda node: node.allocatable(RESOURCE) == 2, SOON)


async def test_end_of_the_stream_makes_every_device_unhealthy_and_keeps_capacity(kubelet: Kubelet) -> None:
    async with registered(kubelet, TinyPlugin()) as plugin:
        await plugin.stop()
        await kubelet.wait_until(lambda node: node.allocatable(RESOURCE) == 0, SOON)
        assert kubelet.capacity(RESOURCE) == 2


async def test_resource_without_a_stream_is_eventually_removed(short_tmp: Path) -> None:
    async with emulated(short_tmp, resource_removal=0.05) as kubelet, registered(kubelet, TinyPlugin()) as plugin:
        await plugin.stop()
        await kubelet.wait_until(lambda node: node.capacity(RESOURCE) == 0, SOON)


async def test_kubelet_never_reconnects_by_itself(kubelet: Kubelet) -> None:
    async with registered(kubelet, TinyPlugin(), "same.sock") as plugin:
        await plugin.stop()
        await kubelet.wait_until(lambda node: node.allocatable(RESOURCE) == 0, SOON)
        await plugin.serve(kubelet.device_plugins / "same.sock")
        calls_before = calls(kubelet).count("GetDevicePluginOptions")
        await register(kubelet, "same.sock")
        await kubelet.wait_until(lambda node: node.allocatable(RESOURCE) == 2, SOON)
        assert calls(kubelet).count("GetDevicePluginOptions") == calls_before + 1


async def test_end_of_an_old_stream_disconnects_the_resources_new_plugin(kubelet: Kubelet) -> None:
    new = TinyPlugin()
    async with registered(kubelet, TinyPlugin(), "old.sock") as old, registered(kubelet, new, "new.sock"):
        await old.stop()
        await kubelet.wait_until(lambda node: node.allocatable(RESOURCE) == 0, SOON)
        await kubelet.wait_until(lambda node: calls(node).count("StreamEnded") == 2, SOON)
        await register(kubelet, "new.sock")
        await kubelet.wait_until(lambda node: node.allocatable(RESOURCE) == 2, SOON)


async def test_loss_of_the_last_registered_plugin_leaves_an_earlier_one_without_an_endpoint(
    kubelet: Kubelet,
) -> None:
    """The earlier plugin is not notified: this is why only one instance of a plugin may be registered."""
    async with registered(kubelet, TinyPlugin(), "new.sock"), registered(kubelet, TinyPlugin(), "old.sock") as old:
        await old.stop()
        await kubelet.wait_until(lambda node: "StreamEnded" in calls(node), SOON)
        await kubelet.wait_until(lambda node: node.allocatable(RESOURCE) == 0, SOON)
        assert not (await kubelet.run(pod())).admitted
        assert calls(kubelet).count("StreamEnded") == 1


async def test_plugin_found_in_the_registry_is_registered_and_notified(kubelet: Kubelet) -> None:
    async with serving(TinyPlugin(), kubelet.plugins_registry / "tiny-reg.sock") as plugin:
        await kubelet.wait_until(lambda node: node.allocatable(RESOURCE) == 2, SOON)
        await kubelet.wait_until(lambda node: "NotifyRegistrationStatus" in calls(node), SOON)
        assert [status.plugin_registered for status in plugin.statuses] == [True]


async def test_restarted_kubelet_registers_plugins_of_the_registry_again(kubelet: Kubelet) -> None:
    socket = kubelet.plugins_registry / "tiny-reg.sock"
    async with serving(TinyPlugin(), socket):
        await kubelet.wait_until(lambda node: node.allocatable(RESOURCE) == 2, SOON)
        await kubelet.restart()
        assert socket.is_socket()
        await kubelet.wait_until(lambda node: node.allocatable(RESOURCE) == 2, SOON)


async def test_first_node_status_after_a_restart_lacks_devices_of_a_registry_plugin(
    kubelet: Kubelet,
) -> None:
    async with serving(TinyPlugin(), kubelet.plugins_registry / "tiny-reg.sock"):
        await kubelet.wait_until(lambda node: node.allocatable(RESOURCE) == 2, SOON)
        await kubelet.stop()
        before, after = kubelet.node_status.updates, []

        def looked(node: Kubelet) -> bool:
            if node.node_status.updates > before:
                after.append(node.node_status.allocatable[RESOURCE])
            return bool(after) and after[-1] == 2

        await kubelet.start()
        await kubelet.wait_until(looked, SOON)
        assert after[0] == 0


async def test_plugin_registered_before_the_first_node_status_keeps_its_devices_over_a_restart(
    short_tmp: Path,
) -> None:
    async with emulated(short_tmp, first_node_status=SOON) as kubelet, registered(kubelet, TinyPlugin(), "one.sock"):
        await kubelet.restart()
        async with registered(kubelet, TinyPlugin(), "two.sock"):
            assert kubelet.node_status.updates == 0


async def test_socket_removed_from_the_registry_deregisters_its_plugin(kubelet: Kubelet) -> None:
    socket = kubelet.plugins_registry / "tiny-reg.sock"
    async with serving(TinyPlugin(), socket):
        await kubelet.wait_until(lambda node: node.allocatable(RESOURCE) == 2, SOON)
        socket.unlink()
        await kubelet.wait_until(lambda node: node.allocatable(RESOURCE) == 0, SOON)


async def test_recreated_socket_in_the_registry_is_a_new_plugin(kubelet: Kubelet) -> None:
    socket = kubelet.plugins_registry / "tiny-reg.sock"
    async with serving(TinyPlugin(), socket):
        await kubelet.wait_until(lambda node: node.allocatable(RESOURCE) == 2, SOON)
    async with serving(TinyPlugin(["a", "b", "c"]), socket):
        await kubelet.wait_until(lambda node: node.allocatable(RESOURCE) == 3, SOON)


async def test_registry_uses_the_endpoint_named_by_the_plugin(kubelet: Kubelet, short_tmp: Path) -> None:
    door = TinyPlugin(["wrong", "devices"])
    door.info.endpoint = str(short_tmp / "devices.sock")
    async with (
        serving(TinyPlugin(["gpu-7"]), short_tmp / "devices.sock"),
        serving(door, kubelet.plugins_registry / "door.sock"),
    ):
        await kubelet.wait_until(lambda node: node.allocatable(RESOURCE) == 1, SOON)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("type", "DRAPlugin", "no handler registered for plugin type"),
        ("supported_versions", ["v1"], "is not among plugin supported versions"),
        ("name", "gpu", "is invalid"),
    ],
)
async def test_refused_registry_plugin_is_notified_of_the_reason(
    kubelet: Kubelet, field: str, value: object, message: str
) -> None:
    plugin = TinyPlugin()
    plugin.info.ClearField(field)
    plugin.info.MergeFrom(type(plugin.info)(**{field: value}))  # type: ignore[arg-type]
    async with serving(plugin, kubelet.plugins_registry / "tiny-reg.sock"):
        await kubelet.wait_until(lambda node: calls(node).count("NotifyRegistrationStatus") >= 2, SOON)
        assert not any(status.plugin_registered for status in plugin.statuses)
        assert message in plugin.statuses[0].error
        assert kubelet.capacity(RESOURCE) == 0


async def test_plugin_dropped_while_being_dialled_is_notified_and_accepted_on_its_return(
    kubelet: Kubelet, short_tmp: Path
) -> None:
    """Another plugin's stream ends, which drops the plugin that is registered for the resource at that moment."""
    plugin, loop = TinyPlugin(), asyncio.get_running_loop()
    plugin.info.endpoint = str(short_tmp / "mute.sock")
    async with registered(kubelet, TinyPlugin(["a"]), "old.sock") as old:
        with closing(socket.socket(socket.AF_UNIX)) as mute:
            mute.bind(plugin.info.endpoint)
            mute.listen()
            mute.setblocking(False)
            async with serving(plugin, kubelet.plugins_registry / "tiny-reg.sock"):
                connection, _ = await asyncio.wait_for(loop.sock_accept(mute), SOON)
                plugin.info.endpoint = ""
                await old.stop()
                with closing(connection):
                    await kubelet.wait_until(lambda node: "NotifyRegistrationStatus" in calls(node), SOON)
                    assert "the client connection is closing" in plugin.statuses[0].error
                await kubelet.wait_until(lambda node: node.allocatable(RESOURCE) == 2, SOON)


async def test_message_over_four_mebibytes_ends_the_stream(kubelet: Kubelet) -> None:
    async with registered(kubelet, TinyPlugin()) as plugin:
        await plugin.report(*(api.Device(ID=f"{'x' * 4096}-{number}", health="Healthy") for number in range(1100)))
        await kubelet.wait_until(lambda node: "StreamEnded" in calls(node), SOON)
        ended = next(event for event in kubelet.events if event.name == "StreamEnded")
        assert ended.outcome == "ResourceExhausted"


def test_removed_socket_and_regular_file_have_no_socket_identity(short_tmp: Path) -> None:
    path = short_tmp / "plugin.sock"
    assert sockets.incarnation(path) is None
    with closing(socket.socket(socket.AF_UNIX)) as made:
        made.bind(str(path))
        assert sockets.incarnation(path) == (path.stat().st_ino, path.stat().st_ctime_ns)
    path.unlink()
    path.touch()
    assert sockets.incarnation(path) is None


def test_root_directory_too_long_for_sockets_is_refused_before_any_file_is_created(short_tmp: Path) -> None:
    root = short_tmp / ("x" * 90)
    with pytest.raises(ValueError, match="choose a shorter root"):
        Kubelet(root)
    assert not root.exists()


def test_node_status_is_updated_at_the_default_interval_of_a_real_kubelet() -> None:
    assert KubeletTimings().node_status_period == 10.0


def test_real_timings_are_the_default_and_scale_together() -> None:
    fast = KubeletTimings().scaled(0.02)
    assert fast.pre_start_deadline == pytest.approx(0.6)
    assert fast.pod_resources_burst == 10
    with pytest.raises(ValueError, match="positive"):
        fast.scaled(0)
