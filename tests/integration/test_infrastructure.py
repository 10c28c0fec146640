"""Agents of the node beside tenants, with real processes: a permanent monitor, a validator, and impersonators."""

from __future__ import annotations

import asyncio
import base64
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from scrubber.api import scrubber_pb2 as pb
from scrubber.emulator.playground import Playground, tenant_argv
from scrubber.emulator.pods import ContainerSpec, EmulatedPod, PodSpec
from tests.integration.acting import QUICK, SOON, found_by, history, reader, running, staged, writer
from tests.integration.test_probes import address_of, get

KEEP_OPEN = """
import json, os, signal, sys
name, *paths = sys.argv[1:]
with open("/proc/self/comm", "w") as file:
    file.write(name)
kept = [os.open(path, os.O_RDWR) for path in paths]
print(json.dumps({"ready": True, "pid": os.getpid()}), flush=True)
signal.pause()
"""
"""A process of the given name that keeps files open."""


def nodes(stage: Playground, *indexes: int) -> list[str]:
    """Return the files by which a process has devices open without a context; of all devices by default."""
    directories = [file.parent for file in stage.device_files()]
    return [str(directories[index] / "node") for index in indexes or range(len(directories))]


def holding(name: str, namespace: str, paths: Sequence[str], *, comm: str = "dcgm-exporter") -> PodSpec:
    """Return a pod without GPUs whose process ``comm`` keeps ``paths`` open."""
    return PodSpec(name, namespace, [ContainerSpec("main", (sys.executable, "-c", KEEP_OPEN, comm, *paths))])


def first_pid(stage: Playground, pod: EmulatedPod) -> int:
    (pid,) = stage.pod_processes(pod)
    return pid


async def recorded(stage: Playground, name: str) -> None:
    """Wait until the audit log has a row of that name."""
    async with asyncio.timeout(SOON):
        while True:
            if await history(stage, name):
                return
            await asyncio.sleep(0.05)


async def clean_again(stage: Playground, device: str) -> pb.Device:
    """Return the device once it is clean, with the certificate of its scrub."""
    devices = await stage.wait_for_devices(
        lambda found: any(each.id == device and each.state == "clean" for each in found), SOON
    )
    return next(each for each in devices if each.id == device)


async def test_tenants_start_beside_a_monitor_that_holds_every_device_permanently() -> None:
    async with staged(devices=2) as stage:
        monitor = await running(stage, holding("nvidia-dcgm-exporter-2jklm", "gpu-operator", nodes(stage)))
        first = await running(stage, writer("a", "team-a"))
        (device,) = first.device_ids
        await stage.kubelet.delete(first, grace=0)
        clean = await clean_again(stage, device)
        who = f"gpu-operator/nvidia-dcgm-exporter-2jklm (PID {first_pid(stage, monitor)})"
        assert f"holders: {who} has the device open, as the policy allows" in clean.certificate.not_covered
        assert clean.certificate.covered[0].startswith("holders: none but infrastructure that the policy allows (1);")
        assert await found_by(await stage.kubelet.run(reader("b", "team-b"))) == ""
        assert await history(stage, "unauthorized.use.detected") == []
        assert await history(stage, "validation.use.detected") == []
        assert not monitor.status.phase.terminal


@pytest.mark.parametrize("action", ["quarantine", "kill"])
async def test_validator_with_a_context_delays_starts_and_is_neither_killed_nor_a_fault(
    tmp_path: Path, action: str
) -> None:
    policy = tmp_path / "policy.yaml"
    quick = Path(QUICK).read_text()
    policy.write_text(quick.replace("limits:", f"unauthorizedUse: {action}\nlimits:\n  leftoverGracePeriod: 100ms"))
    async with staged(devices=1, policy=str(policy)) as stage:
        memory = str(stage.device_files()[0].with_name("memory"))
        argv = tenant_argv("--device", memory, "--write", "vectorAdd", "--hold", "forever")
        validator = await running(
            stage, PodSpec("nvidia-cuda-validator-x7x9q", "gpu-operator", [ContainerSpec("main", argv)])
        )
        await stage.wait_for_devices(lambda found: found[0].state == "dirty", SOON)
        tenant = await stage.kubelet.run(reader("a", "team-a"))
        await recorded(stage, "validation.use.detected")
        assert not validator.status.phase.terminal
        await stage.kubelet.delete(validator, grace=0)
        assert await found_by(tenant) == ""
        assert len(await history(stage, "validation.use.detected")) == 1
        for event in ("unauthorized.use.detected", "unauthorized.process.killed", "health.quarantined"):
            assert await history(stage, event) == []


async def test_metrics_name_the_pod_of_a_validator_that_does_not_end() -> None:
    async with Playground(devices=1, memory="2MiB", policy=QUICK) as stage:
        arguments = list(stage.service.arguments)
        arguments[arguments.index("--metrics-address") + 1] = "127.0.0.1:0"
        stage.service.arguments = arguments
        await stage.start_daemons(SOON)
        (device,) = await stage.wait_until_clean(SOON)
        name = "nvidia-cuda-validator-x7x9q"
        argv = tenant_argv("--device", str(stage.device_files()[0].with_name("memory")), "--hold", "forever")
        await running(stage, PodSpec(name, "gpu-operator", [ContainerSpec("main", argv)]))
        address = await address_of(stage.service, "metrics.serving")
        labels = f'device="{device.id}",code="validation-holder",holder="gpu-operator/{name}"'
        async with asyncio.timeout(SOON):
            while True:
                _, page = await get(address, "/metrics")
                if f"\nscrubber_device_held_start_timestamp_seconds{{{labels}}} " in page:
                    break
                await asyncio.sleep(0.05)


async def test_tenant_that_impersonates_an_agent_keeps_its_device_dirty_whatever_it_claims() -> None:
    """By pod name, process name, account, and a forged token; a namespace is the one thing that it cannot have."""
    async with staged(devices=2) as stage:
        name = "nvidia-dcgm-exporter-2jklm"
        named = await running(stage, holding(name, "team-a", nodes(stage, 0), comm="nv-hostengine"))
        forged = await running(stage, holding("train-0", "team-a", nodes(stage, 1)))
        for pod, claimed, of in ((named, ("team-a", name), named.uid), (forged, ("gpu-operator", name), forged.uid)):
            volume = stage.kubelet.root / "pods" / pod.uid / "volumes" / "kubernetes.io~projected" / "token"
            volume.mkdir(parents=True)
            namespace, pod_name = claimed
            claims = {
                "namespace": namespace,
                "pod": {"name": pod_name, "uid": of},
                "serviceaccount": {"name": "nvidia-dcgm-exporter"},
            }
            content = base64.urlsafe_b64encode(json.dumps({"kubernetes.io": claims}).encode()).rstrip(b"=")
            (volume / "token").write_bytes(b"e30." + content + b".c2ln")
        devices = await stage.wait_for_devices(
            lambda found: all(each.state == "dirty" and each.unauthorized_users for each in found), SOON
        )
        for device, pod in zip(sorted(devices, key=lambda each: each.index), (named, forged), strict=True):
            assert str(first_pid(stage, pod)) in device.unauthorized_users[0]
            (holder,) = device.holders
            assert (holder.namespace, holder.pod, holder.blocking) == ("team-a", pod.spec.name, True)
        listed = (await stage.run_command("devices", "-o", "wide")).stdout
        assert f"of team-a/{name} since" in listed
        checks = json.loads((await stage.run_command("doctor", "-o", "json")).stdout)["checks"]
        named_by_doctor = [each for each in checks if each["name"] == "holders"]
        assert any(f"of team-a/{name} has held device 0 since" in each["message"] for each in named_by_doctor)
        assert all("infrastructure: {pods: [{namespace: team-a}]}" in each["remedy"] for each in named_by_doctor)
        tenant = await stage.kubelet.run(reader("b", "team-b"))
        await stage.kubelet.delete(named, grace=0)
        await stage.kubelet.delete(forged, grace=0)
        assert await found_by(tenant) == ""
