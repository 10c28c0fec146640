"""A driver's calls to the running service, with pods on the simulated node: the test plays the driver through the client."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from scrubber.api import scrubber_pb2 as pb
from scrubber.api.client import PluginClient
from scrubber.domain.errors import NotReady, Refused
from scrubber.emulator import markers
from scrubber.emulator.playground import Playground
from scrubber.emulator.pods import ContainerSpec, EmulatedPod, PodSpec
from tests.integration import log_lines
from tests.integration.acting import QUICK, SOON, history

DRIVER = "gpu.scrubber.dev"
_TENANT = """
import pathlib, sys, time
memory, go = map(pathlib.Path, sys.argv[1:])
while not go.exists():
    time.sleep(0.01)
with memory.open("r+b") as device:
    device.write(b"secret of a tenant")
    device.flush()
    print("ready", flush=True)
    time.sleep(3600)
"""


@asynccontextmanager
async def service_without_plugin(devices: int) -> AsyncIterator[tuple[Playground, PluginClient, list[str]]]:
    """Run the service and the emulated kubelet; return them with a client and the IDs of the clean devices."""
    async with Playground(devices=devices, memory="2MiB", policy=QUICK) as stage:
        await stage.service.start()
        clean = await stage.wait_until_clean(SOON)
        async with PluginClient(stage.socket_dir) as client:
            yield stage, client, [each.id for each in clean]
        log_lines.check(stage)


def memory_of(stage: Playground, number: int = 0) -> Path:
    return stage.sim_dir / "devices" / str(number) / "memory"


class Tenant:
    """A pod that computes on a device as soon as its claim is prepared."""

    def __init__(self, pod: EmulatedPod, go: Path) -> None:
        self.pod = pod
        self._go = go

    @classmethod
    async def admitted(cls, stage: Playground, name: str) -> Tenant:
        go = stage.directory / f"go-{name}"
        argv = (sys.executable, "-c", _TENANT, str(memory_of(stage)), str(go))
        return cls(await stage.kubelet.run(PodSpec(name, "team-a", [ContainerSpec("main", argv)])), go)

    @property
    def message(self) -> pb.ClaimPod:
        return pb.ClaimPod(uid=self.pod.uid, namespace="team-a", name=self.pod.spec.name)

    async def compute(self) -> None:
        self._go.touch()
        await self.pod.wait(lambda _: "ready" in self.pod.read_log("main"), SOON)


async def prepare(
    client: PluginClient, claim: str, device: str, tenant: Tenant, wait: float = 20.0
) -> pb.GrantedDevice:
    answer = await client.prepare_claim(
        pb.Claim(uid=claim, namespace="team-a", name=claim),
        [pb.ClaimDevice(device_id=device)],
        [tenant.message],
        driver=DRIVER,
        deadline_seconds=wait,
        timeout=SOON,
    )
    (granted,) = answer.devices
    return granted


async def test_claim_is_prepared_kept_across_a_restart_and_scrubbed_at_unprepare() -> None:
    async with service_without_plugin(devices=1) as (stage, client, (device,)):
        tenant = await Tenant.admitted(stage, "train-0")
        granted = await prepare(client, "claim-1", device, tenant)
        await tenant.compute()
        early = await client.unprepare_claim("unknown", deadline_seconds=0.0, timeout=SOON)
        assert early.done
        await stage.service.kill()
        await stage.service.start()
        await stage.wait_for_devices(lambda devices: [each.state for each in devices] == ["in-use"], SOON)
        assert await prepare(client, "claim-1", device, tenant) == granted
        (listed,) = (await client.list_claims(SOON)).claims
        assert (listed.claim.uid, listed.releasing, list(listed.pods)) == ("claim-1", False, [tenant.message])
        assert memory_of(stage).read_bytes().startswith(b"secret")

        running = await client.unprepare_claim("claim-1", deadline_seconds=1.0, timeout=SOON)
        assert not running.done
        assert device in running.waits_for
        await stage.kubelet.delete(tenant.pod, grace=0)
        ended = await client.unprepare_claim("claim-1", deadline_seconds=SOON - 5, timeout=SOON)
        assert (ended.done, list(ended.withheld)) == (True, [])
        assert not memory_of(stage).read_bytes().strip(b"\0")
        assert (await client.list_claims(SOON)).claims == []
        assert [row["claim"] for row in await history(stage, "handover.granted")] == ["team-a/claim-1"]
        assert await history(stage, "unauthorized.use.detected") == []


async def test_next_claim_waits_for_unprepare_and_for_the_end_of_the_tenant_of_the_first() -> None:
    async with service_without_plugin(devices=1) as (stage, client, (device,)):
        first = await Tenant.admitted(stage, "train-0")
        await prepare(client, "claim-1", device, first)
        await first.compute()
        await stage.kubelet.delete(first.pod, force=True, linger=3600.0)
        second = await Tenant.admitted(stage, "train-1")
        with pytest.raises(NotReady, match="prepared for another"):
            await prepare(client, "claim-2", device, second, wait=1.0)
        waiting = asyncio.create_task(prepare(client, "claim-2", device, second, wait=25.0))
        released = await client.unprepare_claim("claim-1", deadline_seconds=1.0, timeout=SOON)
        assert not released.done
        assert memory_of(stage).read_bytes().startswith(b"secret")
        for pid in markers.marked_processes({first.pod.uid}):
            os.kill(pid, signal.SIGKILL)
        granted = await waiting
        assert granted.grant == 2
        assert not memory_of(stage).read_bytes().strip(b"\0")


async def test_device_that_the_plugin_advertises_is_not_prepared_for_a_claim() -> None:
    async with service_without_plugin(devices=2) as (stage, client, (device, other)):
        await client.announce("example.com/gpu", {device: device}, SOON)
        tenant = await Tenant.admitted(stage, "train-0")
        with pytest.raises(Refused, match="excluded from one of the two"):
            await prepare(client, "claim-1", device, tenant)
        assert (await prepare(client, "claim-1", other, tenant)).grant == 1
