"""Operands of a GPU Operator node beside tenants on NVIDIA GPUs: an exporter, a validator, and an exporter elsewhere."""

from __future__ import annotations

import sys

import pytest

from scrubber.emulator.pods import ContainerSpec, EmulatedPod, PodSpec
from tests.integration.acting import SOON, history, refusal
from tests.integration.nvidia_stage import NvidiaStage, found_by, staged
from tests.nvidia import holder
from tests.nvidia.machine import MIB

OPEN = (
    "import os, signal, sys; kept = [os.open(each, os.O_RDWR | os.O_NOCTTY) for each in sys.argv[1:]];"
    " print('ready', flush=True); signal.pause()"
)
"""Opens the nodes of devices without a context on any: the driver does not list such a process."""


async def operand(stage: NvidiaStage, name: str, namespace: str, *argv: str) -> EmulatedPod:
    """Run a pod without GPUs of its own; return it once its process is ready."""
    pod = await stage.kubelet.run(PodSpec(name, namespace, [ContainerSpec("main", argv)]))
    await pod.wait(lambda _: "ready" in pod.read_log("main"), SOON)
    return pod


async def exporter(stage: NvidiaStage, namespace: str) -> EmulatedPod:
    """Run an exporter that has every GPU open for as long as it lives."""
    nodes = [str(gpu.node) for gpu in stage.machine.gpus]
    return await operand(stage, "nvidia-dcgm-exporter-2jklm", namespace, sys.executable, "-c", OPEN, *nodes)


async def test_tenants_start_beside_an_exporter_that_has_every_gpu_open_permanently() -> None:
    async with staged(gpus=2) as stage:
        monitor = await exporter(stage, "gpu-operator")
        pod = await stage.settled(stage.leaving("global", "a", "team-a"))
        (device,) = pod.device_ids
        await stage.delete(pod)
        await stage.are("clean", "clean")
        (listed,) = [each for each in await stage.command_json("devices") if each["metadata"]["name"] == device]
        (pid,) = stage.pod_processes(monitor)
        line = f"holders: gpu-operator/nvidia-dcgm-exporter-2jklm (PID {pid}) has the device open, as the policy allows"
        assert line in listed["certificate"]["notCovered"]
        assert await found_by(await stage.kubelet.run(stage.looking("global", "b", "team-b"))) == 0
        assert stage.pod_processes(monitor) == [pid]


async def test_start_waits_for_a_cuda_validator_and_follows_when_the_validator_has_ended() -> None:
    async with staged(gpus=1) as stage:
        gpu = stage.machine.gpus[0]
        argv = (sys.executable, str(holder.__file__), str(gpu.directory), str(gpu.node), ".", str(MIB))
        validator = await operand(stage, "nvidia-cuda-validator-x7x9q", "gpu-operator", *argv)
        await stage.are("dirty")
        pod = await stage.kubelet.run(stage.looking("global", "a", "team-a"))
        message = await refusal(pod)
        for secret in ("validator", "gpu-operator"):
            assert secret not in message
        await stage.delete(validator)
        assert await found_by(pod) == 0
        assert await history(stage, "unauthorized.use.detected") == []


@pytest.mark.parametrize("namespace", ["monitoring", "team-b"])
async def test_exporter_in_a_namespace_that_the_policy_does_not_allow_keeps_a_gpu_dirty_and_is_named(
    namespace: str,
) -> None:
    async with staged(gpus=1) as stage:
        monitor = await exporter(stage, namespace)
        (pid,) = stage.pod_processes(monitor)
        assert (await stage.run_command("scrub", "0")).returncode == 3
        await stage.are("dirty")
        (device,) = await stage.command_json("devices")
        (found,) = device["holders"]
        assert (found["pid"], found["namespace"], found["pod"]) == (pid, namespace, "nvidia-dcgm-exporter-2jklm")
        assert (found["code"], found["blocking"]) == ("unknown-holder", True)
        table = (await stage.run_command("devices", "-o", "wide")).stdout
        assert f"of {namespace}/nvidia-dcgm-exporter-2jklm since" in table
        await stage.delete(monitor)
        await stage.are("clean")
