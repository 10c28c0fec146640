"""The service with a node's NVIDIA GPUs: its start, quarantines of a GPU, and its return to service."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from pathlib import Path

import pytest

from tests.doctor.stage import run, until_trusted
from tests.integration.acting import SOON, history, refusal
from tests.integration.nvidia_stage import POLICY, RESOURCE, NvidiaStage, found_by, staged

APPLICATION, RESET, REBOOT = 31, 95, 79
"""XIDs by their classes in the shipped policy."""


async def ended(stage: NvidiaStage) -> tuple[int, str]:
    """Start the service and wait until it exits on its own; return exit status and output."""
    await stage.service.start()
    assert stage.service.process is not None
    return await stage.service.process.wait(), stage.service.log.read_text()


def with_settings(directory: Path, **settings: str) -> str:
    """Write a policy with these settings; return its path."""
    path = directory / "policy.yaml"
    lines = "".join(f"  {name}: {value}\n" for name, value in settings.items())
    path.write_text(Path(POLICY).read_text().replace("name: quick", "name: mine") + f"settings:\n{lines}")
    return str(path)


# --- the start


async def test_gpus_are_cleared_certified_and_advertised_as_nvidia_com_gpu() -> None:
    async with staged() as stage:
        devices = (await stage.read_client.devices()).devices
        assert [each.id for each in devices] == [gpu.uuid for gpu in stage.machine.gpus]
        assert {each.model for each in devices} == {"NVIDIA H200"}
        for device in devices:
            assert device.HasField("certificate")
            assert not device.certificate.HasField("next_grant"), "it was used up before anybody had the device"
        assert stage.kubelet.allocatable(RESOURCE) == stage.kubelet.capacity(RESOURCE) == 2


async def test_memory_left_before_the_service_started_is_cleared() -> None:
    async with NvidiaStage(gpus=1) as stage:
        stage.machine.gpus[0].fill("left by an earlier tenant")
        await stage.start_daemons()
        pod = await stage.kubelet.run(stage.looking("global", "a", "team-a"))
        assert await found_by(pod) == 0
        (scrub, *_) = await history(stage, "scrub.finished")
        assert scrub["residue_bytes"] > 0


async def test_missing_driver_ends_the_service_with_an_error_message() -> None:
    async with NvidiaStage() as stage:
        stage.machine.remove_driver()
        status, message = await ended(stage)
        assert status == 2
        (message_line,) = message.splitlines()
        assert message_line.startswith("Error: The driver is not loaded: load it (modprobe nvidia)")
        assert "--no-fail-on-init-error" in message_line


async def test_missing_nvml_bindings_end_the_service_even_with_no_fail_on_init_error(
    short_tmp: Path,
) -> None:
    code = "import sys; sys.modules['pynvml'] = None; from scrubber.cli.main import main; main(sys.argv[1:])"
    kubelet = short_tmp / "kubelet.sock"  # which shows that this is the node's PID namespace
    places = (
        "--state-dir",
        str(short_tmp / "state"),
        "--socket-dir",
        str(short_tmp / "run"),
        "--metrics-address",
        "off",
    )
    serve = ("serve", "--backend", "nvidia", "--no-fail-on-init-error", *places, "--pod-resources-socket", str(kubelet))
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(kubelet))
    listener.listen()
    service = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", code, *serve), stderr=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.DEVNULL
    )
    try:
        async with asyncio.timeout(SOON):
            _, message = await service.communicate()
    finally:
        if service.returncode is None:
            service.kill()
            await service.wait()
        listener.close()
    assert service.returncode == 2
    assert message.decode().startswith("Error: nvidia-ml-py is not installed")


async def test_service_without_fail_on_init_error_waits_for_the_driver_and_then_advertises_the_gpus() -> None:
    async with NvidiaStage(serve=("--no-fail-on-init-error",)) as stage:
        stage.machine.remove_driver()
        await stage.service.start()
        await stage.plugin.start()
        away = await stage.logged("driver.unavailable")
        assert "load it (modprobe nvidia)" in away["message"]
        assert stage.kubelet.capacity(RESOURCE) == 0
        stage.machine.bring_driver_back()
        await stage.offers(2)
        await stage.wait_until_clean(SOON)


@pytest.mark.parametrize(("setting", "value"), [("compute_mode", "fast"), ("power_limit_watts", "lots")])
async def test_policy_setting_that_no_gpu_supports_is_refused_at_the_start(
    short_tmp: Path, setting: str, value: str
) -> None:
    async with NvidiaStage(policy=with_settings(short_tmp, **{setting: value})) as stage:
        status, message = await ended(stage)
        assert status == 2
        assert f'settings: {setting} cannot be "{value}"; write' in message


async def test_setting_of_the_policy_overrides_the_drivers_default(short_tmp: Path) -> None:
    async with staged(gpus=1, policy=with_settings(short_tmp, power_limit_watts="300")) as stage:
        assert stage.machine.gpus[0].number("power_limit") == 300_000
        assert "restored" in "".join((await stage.certificate("0"))["covered"])


# --- quarantine and return to service


async def test_gpu_with_an_xid_that_requires_a_reset_is_withdrawn_at_once_and_returns_after_the_reset() -> None:
    async with staged() as stage:
        stage.machine.gpus[0].raise_xid(RESET)
        await stage.offers(1)
        assert stage.kubelet.capacity(RESOURCE) == 2
        await stage.offers(2)
        assert stage.machine.gpus[0].resets() == 1
        assert stage.machine.gpus[1].resets() == 0
        (resets,) = await history(stage, "reset.finished")
        assert (resets["device"], resets["outcome"]) == (stage.machine.gpus[0].uuid, "ok")
        assert len(await history(stage, "health.probation")) == len(await history(stage, "health.healthy")) == 1


async def test_gpu_with_an_xid_that_requires_a_reboot_is_quarantined_with_that_recovery_method() -> None:
    async with staged() as stage:
        stage.machine.gpus[0].raise_xid(REBOOT)
        await stage.offers(1)
        await stage.are("quarantined", "clean")
        sick, well = await stage.command_json("devices")
        assert (sick["state"], well["state"]) == ("quarantined", "clean")
        assert (sick["cause"]["code"], sick["cause"]["recoveryMethod"]) == ("xid-79", "reboot")
        assert stage.machine.gpus[0].resets() == 0


async def test_application_xid_is_noted_and_does_not_quarantine_the_gpu() -> None:
    async with staged(gpus=1) as stage:
        pod = await stage.settled(stage.leaving("global", "a", "team-a"))
        stage.machine.gpus[0].raise_xid(APPLICATION)
        await stage.delete(pod)
        assert await found_by(await stage.kubelet.run(stage.looking("global", "b", "team-b"))) == 0
        scrubs = [
            each.scrub
            for each in (await stage.read_client.history(limit=1000)).entries
            if each.event == "scrub.finished"
        ]
        noted = {each.code for scrub in scrubs for step in scrub.steps for each in step.findings}
        assert f"xid-{APPLICATION}" in noted
        assert await history(stage, "health.quarantined") == []


async def test_gpu_that_fell_off_the_bus_is_withdrawn_and_the_other_gpu_serves() -> None:
    async with staged() as stage:
        lost, other = stage.machine.gpus
        lost.lose()
        await stage.offers(1)
        pod = await stage.kubelet.run(stage.looking("global", "a", "team-a"))
        assert pod.device_ids == (other.uuid,)
        assert await found_by(pod) == 0
        lost.heal()
        await stage.offers(2)


async def test_ecc_errors_take_a_gpu_out_until_a_reset() -> None:
    async with staged(gpus=1) as stage:
        stage.machine.gpus[0].add_ecc_errors(1)
        await stage.offers(0)
        await stage.offers(1)
        assert stage.machine.gpus[0].resets() == 1


async def test_disabled_xids_are_ignored() -> None:
    async with staged(gpus=1, environment={"DP_DISABLE_HEALTHCHECKS": f"{REBOOT}"}) as stage:
        stage.machine.gpus[0].raise_xid(REBOOT)
        stage.machine.gpus[0].raise_xid(RESET)  # reported after the other one
        await stage.offers(0)
        await stage.logged("health.quarantined")
        assert [row["cause"] for row in await history(stage, "health.quarantined")] == [f"xid-{RESET}"]
        assert "policy.xids-disabled" in stage.service.log.read_text()


async def test_refusal_for_a_pod_on_a_faulted_gpu_names_state_and_recovery_method() -> None:
    async with staged(gpus=1) as stage:
        pod = await stage.settled(stage.leaving("global", "a", "team-a", restart=True))
        stage.machine.gpus[0].raise_xid(REBOOT)
        await stage.offers(0)
        (pid,) = stage.pod_processes(pod)
        os.kill(pid, signal.SIGKILL)
        message = await refusal(pod)
        assert "quarantined" in message
        assert "reboot" in message


async def test_gpus_are_withdrawn_and_return_with_the_driver() -> None:
    async with staged() as stage:
        stage.machine.remove_driver()
        await stage.offers(0)
        stage.machine.bring_driver_back()
        await stage.offers(2)


# --- the command line


async def test_service_ends_when_the_driver_version_changes() -> None:
    async with staged(gpus=1) as stage:
        process = stage.service.process
        assert process is not None
        stage.machine.set("driver_version", "590.44.01")
        async with asyncio.timeout(SOON):
            assert await process.wait() == 1
        (message_line,) = [
            line for line in stage.service.log.read_text().splitlines() if "The driver changed from" in line
        ]
        assert "to 590.44.01" in message_line


async def test_cli_commands_work_on_gpus() -> None:
    async with staged() as stage:
        first, second = await stage.command_json("devices")
        assert [first["index"], second["index"]] == ["0", "1"]
        assert first["numaNode"] == 0
        assert first["parent"] is None
        result = await stage.command_json("scrub", "1")
        assert (result["scrub"]["outcome"], result["device"]["state"]) == ("passed", "clean")


async def test_doctor_reads_the_same_node_as_the_service() -> None:
    async with staged() as stage:
        root = stage.machine.root
        (root / "proc/self").mkdir()
        own = ("proc/self/status", "proc/self/ns")
        for name in ("tmp", *own, "proc/locks", "proc/sys", f"proc/{stage.service.pid}", "sys/fs"):
            (root / name).symlink_to(f"/{name}")
        # This test does not depend on how the machine that runs it mounts its cgroups.
        mounts = [
            line + b",nsdelegate" * (b" - cgroup2 " in line)
            for line in Path("/proc/self/mountinfo").read_bytes().split(b"\n")
        ]
        (root / "proc/self/mountinfo").write_bytes(b"\n".join(mounts))
        await until_trusted(stage.read_client)
        ended = await run("--socket-dir", stage.socket_dir, "--node-root", root, "-o", "json")
        assert ended.code == 5, ended.out
        # This machine has no driver library and no persistence daemon, and no test has a separate disk.
        wrong = {name for name, level in ended.levels.items() if level != "ok"}
        assert wrong == {"driver-libraries", "persistenced", "ledger-disk"}, ended.out
        assert ended.check("driver")["message"] == "NVIDIA's driver 580.65.06 is loaded."
        assert f"(PID {stage.service.pid})" in ended.check("capabilities")["message"]


async def test_reset_plan_lists_blockers_and_whether_a_reset_is_possible() -> None:
    async with staged() as stage:
        gpu = stage.machine.gpus[0]
        assert (await stage.command_json("reset-plan", "0"))["possible"] is True
        pod = await stage.settled(stage.leaving("global", "a", "team-a"))
        used = str(stage.gpu_of(pod).index)
        blocked = await stage.command_json("reset-plan", used, status=3)
        (pid,) = stage.pod_processes(pod)
        assert any(f"(PID {pid}) holds device {used}" in each for each in blocked["blockers"])
        stage.machine.nvidia_smi.unlink()
        never = await stage.command_json("reset-plan", "1", status=1)
        assert "nvidia-smi is not installed" in never["unavailableReason"]
        assert gpu.resets() == 0
