"""Container starts as in the kubelet: PreStartContainer, its retries, its omission, and a container's environment."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from plugin.api import deviceplugin_pb2 as api
from scrubber.backends import BACKENDS
from scrubber.config.settings import ServiceSettings
from scrubber.emulator import ContainerSpec, ContainerState, Kubelet, PodPhase, RestartPolicy
from tests.emulation import RESOURCE, SOON, Refusal, TinyPlugin, container, emulated, pod, register, registered, serving

UNTIL_DIE_FILE = "while [ ! -e die ]; do sleep 0.01; done; rm die"


@pytest.fixture
async def kubelet(short_tmp: Path) -> AsyncIterator[Kubelet]:
    async with emulated(short_tmp) as running:
        yield running


async def refuse(_devices: list[str]) -> None:
    raise Refusal("gpu-0 is being scrubbed (scrub 17)")


async def test_service_beside_the_emulator_with_markers_uses_no_cgroups_by_default(kubelet: Kubelet) -> None:
    assert not ServiceSettings(backend=BACKENDS["sim"], sim_dir=kubelet.root, kubelet_dir=kubelet.root).uses_cgroups


async def test_pre_start_precedes_every_start_of_init_main_and_restarted_containers(kubelet: Kubelet) -> None:
    async with registered(kubelet, TinyPlugin(["a"])) as plugin:
        flaky = container("main", "test -e once || { touch once; exit 1; }", restart=RestartPolicy.ON_FAILURE)
        done = await kubelet.run(pod("p", flaky, init=[container("init", "true")]))
        await done.wait(PodPhase.SUCCEEDED, SOON)
        assert plugin.pre_starts == [["a"]] * 3
        names = ("PreStartContainer", "ContainerStarted")
        order = [(event.name, event.container) for event in kubelet.events if event.name in names]
        assert order == [(name, each) for each in ("init", "main", "main") for name in names]


async def test_pre_start_is_not_called_for_a_plugin_that_does_not_request_pre_start(kubelet: Kubelet) -> None:
    plugin = TinyPlugin(options=api.DevicePluginOptions(get_preferred_allocation_available=False))
    async with registered(kubelet, plugin):
        await (await kubelet.run(pod("p"))).wait(PodPhase.RUNNING, SOON)
        assert plugin.pre_starts == []


async def test_refused_start_waits_in_create_container_config_error_with_the_message(kubelet: Kubelet) -> None:
    async with registered(kubelet, TinyPlugin(["gpu-0"])) as plugin:
        plugin.on_pre_start = refuse
        waiting = await kubelet.run(pod("p"))
        status = await waiting.wait(lambda now: now.containers["main"].reason == "CreateContainerConfigError", SOON)
        main = status.containers["main"]
        assert (status.phase, main.state) == (PodPhase.PENDING, ContainerState.WAITING)
        assert main.message.endswith("code = FailedPrecondition desc = gpu-0 is being scrubbed (scrub 17)")


async def test_refused_start_is_retried_with_the_same_device_until_granted(kubelet: Kubelet) -> None:
    async with registered(kubelet, TinyPlugin()) as plugin:
        plugin.on_pre_start = refuse
        waiting = await kubelet.run(pod("p"))
        await kubelet.wait_until(lambda _node: len(plugin.pre_starts) >= 3, SOON)

        async def grant(_devices: list[str]) -> None:
            return

        plugin.on_pre_start = grant
        status = await waiting.wait(PodPhase.RUNNING, SOON)
        assert plugin.pre_starts == [list(waiting.device_ids)] * len(plugin.pre_starts)
        assert (len(plugin.allocate_requests), status.containers["main"].restarts) == (1, 0)


async def test_first_start_retry_is_early_and_later_ones_are_delayed(short_tmp: Path) -> None:
    """Retries that never come during the test show which of the two pauses was used."""
    rare = emulated(short_tmp, pre_start_retry=(3600.0, 3600.0))
    async with rare as kubelet, registered(kubelet, TinyPlugin()) as plugin:
        plugin.on_pre_start = refuse
        waiting = await kubelet.run(pod("p"))
        await kubelet.wait_until(lambda _node: len(plugin.pre_starts) == 2, SOON)
        await kubelet.delete(waiting)
        assert len(plugin.pre_starts) == 2


async def test_only_pre_start_has_a_deadline(short_tmp: Path) -> None:
    plugin = TinyPlugin()
    plugin.options.get_preferred_allocation_available = True
    plugin.preferred = []
    async with emulated(short_tmp, pre_start_deadline=30.0) as kubelet, registered(kubelet, plugin):
        await (await kubelet.run(pod("p"))).wait(PodPhase.RUNNING, SOON)
        left = {name: seconds is not None and seconds < 60 for name, seconds in plugin.seconds_left.items()}
        assert left == {"PreStartContainer": True, "Allocate": False, "GetPreferredAllocation": False}


async def test_pre_start_beyond_its_deadline_is_cancelled_at_the_plugin_and_retried(short_tmp: Path) -> None:
    hasty = emulated(short_tmp, pre_start_deadline=0.05, pre_start_retry=(3600.0, 3600.0))
    async with hasty as kubelet, registered(kubelet, TinyPlugin()) as plugin:
        cancelled = hung = 0

        async def hang_three_times(_devices: list[str]) -> None:
            nonlocal cancelled, hung
            if hung == 3:
                return
            hung += 1
            try:
                await asyncio.Event().wait()
            finally:
                cancelled += 1

        plugin.on_pre_start = hang_three_times
        late = await kubelet.run(pod("p"))
        await late.wait(PodPhase.RUNNING, SOON)
        *late_ones, last = [event.outcome for event in kubelet.events if event.name == "PreStartContainer"]
        assert (set(late_ones), last) == ({"DeadlineExceeded"}, "OK")
        assert len(late_ones) >= 3, "one that did not hang was late too where the machine stood still"
        await kubelet.wait_until(lambda _node: cancelled == 3, SOON)


async def test_slow_pre_start_delays_only_its_own_pod(kubelet: Kubelet) -> None:
    async with registered(kubelet, TinyPlugin()) as plugin:
        answer = asyncio.Event()

        async def hold_the_first(devices: list[str]) -> None:
            if devices == list(first.device_ids):
                await answer.wait()

        plugin.on_pre_start = hold_the_first
        first = await kubelet.run(pod("first"))
        second = await kubelet.run(pod("second"))
        await second.wait(PodPhase.RUNNING, SOON)
        assert first.status.phase is PodPhase.PENDING
        answer.set()
        await first.wait(PodPhase.RUNNING, SOON)


async def test_restarting_container_fails_closed_while_its_plugin_is_down(
    kubelet: Kubelet,
) -> None:
    async with registered(kubelet, TinyPlugin(["a"]), "one.sock") as plugin:
        running = await kubelet.run(pod("p", container("main", UNTIL_DIE_FILE, restart=RestartPolicy.ALWAYS)))
        await running.wait(PodPhase.RUNNING, SOON)
        await plugin.stop()
        await kubelet.wait_until(lambda node: node.allocatable(RESOURCE) == 0, SOON)
        (running.container_root("main") / "die").touch()
        status = await running.wait(lambda now: now.containers["main"].reason == "CreateContainerConfigError", SOON)
        assert "has been stopped" in status.containers["main"].message
        await plugin.serve(kubelet.device_plugins / "two.sock")
        await register(kubelet, "two.sock")
        await running.wait(lambda now: now.containers["main"].restarts == 1, SOON)


async def test_pre_start_is_silently_skipped_after_a_kubelet_restart_until_the_plugin_returns(kubelet: Kubelet) -> None:
    async with registered(kubelet, TinyPlugin(["a"])) as plugin:
        running = await kubelet.run(pod("p", container("main", UNTIL_DIE_FILE, restart=RestartPolicy.ALWAYS)))
        before = await running.wait(PodPhase.RUNNING, SOON)
        await kubelet.restart()
        await kubelet.wait_until(lambda _node: running.active, SOON)
        (running.container_root("main") / "die").touch()
        after = await running.wait(lambda now: now.containers["main"].restarts == 1, SOON)
        assert after.containers["main"].pid != before.containers["main"].pid
        assert len(plugin.pre_starts) == 1


async def test_pre_start_is_not_called_for_containers_that_run_through_a_kubelet_restart(kubelet: Kubelet) -> None:
    async with serving(TinyPlugin(["a"]), kubelet.plugins_registry / "tiny-reg.sock") as plugin:
        await kubelet.wait_until(lambda node: node.allocatable(RESOURCE) == 1, SOON)
        running = await kubelet.run(pod("p"))
        before = await running.wait(PodPhase.RUNNING, SOON)
        await kubelet.restart()
        await kubelet.wait_until(lambda node: node.allocatable(RESOURCE) == 1 and running.active, SOON)
        assert running.status.containers["main"].pid == before.containers["main"].pid
        assert len(plugin.pre_starts) == 1


async def test_start_can_still_fail_after_a_granted_pre_start(kubelet: Kubelet) -> None:
    async with registered(kubelet, TinyPlugin(["a"])) as plugin:
        broken = ContainerSpec("main", ["/no/such/program"], {RESOURCE: 1})
        waiting = await kubelet.run(pod("p", broken))
        await waiting.wait(lambda now: now.containers["main"].reason == "CreateContainerError", SOON)
        assert plugin.pre_starts[0] == ["a"]
        assert "ContainerStarted" not in [event.name for event in kubelet.events]


async def test_pod_deleted_during_pre_start_never_starts(kubelet: Kubelet) -> None:
    async with registered(kubelet, TinyPlugin(["a"])) as plugin:
        requested, answer = asyncio.Event(), asyncio.Event()

        async def hold(_devices: list[str]) -> None:
            requested.set()
            await answer.wait()

        plugin.on_pre_start = hold
        waiting = await kubelet.run(pod("p"))
        await asyncio.wait_for(requested.wait(), SOON)
        deletion = asyncio.create_task(kubelet.delete(waiting))
        await waiting.wait(lambda now: now.deleting, SOON)
        answer.set()
        await asyncio.wait_for(deletion, SOON)
        assert "ContainerStarted" not in [event.name for event in kubelet.events]


async def test_container_has_the_plugins_environment_mounts_and_devices(kubelet: Kubelet, short_tmp: Path) -> None:
    memory, library = short_tmp / "memory", short_tmp / "library"
    memory.write_text("bytes of the device")
    library.write_text("a library")
    async with registered(kubelet, TinyPlugin(["a"])) as plugin:
        plugin.answer = api.ContainerAllocateResponse(
            envs={"VISIBLE": "a", "CLASH": "plugin"},
            mounts=[api.Mount(container_path="/usr/lib/library", host_path=str(library), read_only=True)],
            devices=[api.DeviceSpec(container_path="/dev/simgpu0", host_path=str(memory), permissions="rw")],
        )
        look = "cat dev/simgpu0 usr/lib/library; echo; echo $VISIBLE $CLASH $OWN"
        done = await kubelet.run(pod("p", container("main", look, CLASH="pod", OWN="mine")))
        await done.wait(PodPhase.SUCCEEDED, SOON)
        assert done.read_log("main") == "bytes of the devicea library\na pod mine\n"


@pytest.mark.parametrize("path", ["/dev/../../../../escaped", "/"])
async def test_allocate_response_cannot_write_outside_the_containers_directory(
    kubelet: Kubelet, short_tmp: Path, path: str
) -> None:
    memory = short_tmp / "memory"
    memory.touch()
    async with registered(kubelet, TinyPlugin(["a"])) as plugin:
        plugin.answer.devices.add(container_path=path, host_path=str(memory))
        started = await kubelet.run(pod("p"))
        await started.wait(lambda now: now.phase is PodPhase.RUNNING or bool(now.containers["main"].message), SOON)
        assert [str(link) for link in short_tmp.rglob("escaped") if started.uid not in str(link)] == []


async def test_missing_host_path_prevents_container_creation(kubelet: Kubelet, short_tmp: Path) -> None:
    async with registered(kubelet, TinyPlugin(["a"])) as plugin:
        plugin.answer.devices.add(container_path="/dev/simgpu0", host_path=str(short_tmp / "nothing"))
        waiting = await kubelet.run(pod("p"))
        status = await waiting.wait(lambda now: now.containers["main"].reason == "CreateContainerError", SOON)
        assert "no such file or directory" in status.containers["main"].message
        (short_tmp / "nothing").touch()
        await waiting.wait(PodPhase.RUNNING, SOON)


async def test_crashing_container_is_restarted_at_once_and_then_backs_off(short_tmp: Path) -> None:
    async with emulated(short_tmp, crash_back_off=(3600.0, 3600.0)) as kubelet, registered(kubelet, TinyPlugin()):
        crashing = await kubelet.run(pod("p", container("main", "exit 3", restart=RestartPolicy.ALWAYS)))
        status = await crashing.wait(lambda now: now.containers["main"].reason == "CrashLoopBackOff", SOON)
        main = status.containers["main"]
        assert (main.restarts, main.exit_code, status.phase) == (1, 3, PodPhase.RUNNING)


@pytest.mark.parametrize(
    ("command", "restart", "phase"),
    [
        ("true", RestartPolicy.NEVER, PodPhase.SUCCEEDED),
        ("false", RestartPolicy.NEVER, PodPhase.FAILED),
        ("true", RestartPolicy.ON_FAILURE, PodPhase.SUCCEEDED),
    ],
)
async def test_pod_phase_follows_the_exit_of_its_containers(
    kubelet: Kubelet, command: str, restart: RestartPolicy, phase: PodPhase
) -> None:
    done = await kubelet.run(pod("p", container("main", command, gpus=0, restart=restart)))
    await done.wait(phase, SOON)


async def test_failed_init_container_fails_the_pod_and_prevents_later_containers(kubelet: Kubelet) -> None:
    failed = await kubelet.run(pod("p", container(gpus=0), init=[container("init", "exit 1", gpus=0)]))
    await failed.wait(PodPhase.FAILED, SOON)
    assert [event.container for event in kubelet.events if event.name == "ContainerStarted"] == ["init"]
