"""Each attack on one simulated node, with an honest tenant beside it: no device is handed over with what it left.

The attacking pod is deleted by force while all its processes live on. Then one pod requests every device that is not the
honest tenant's, and must find zeros. At the end the honest tenant's data are unchanged and the audit log is intact.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest
import pytest_asyncio

from scrubber.emulator import playground
from scrubber.emulator.cluster.resources import NAMESPACES
from scrubber.emulator.playground import RESOURCE, Playground, gpu_pod_spec, tenant_argv
from scrubber.emulator.pods import ContainerSpec, EmulatedPod, PodPhase, PodSpec
from tests import forkserver
from tests.attacks.programs import Program, names, program
from tests.integration import log_lines
from tests.integration.acting import found_by, history, running

pytestmark = pytest.mark.asyncio(loop_scope="module")

HERE = Path(__file__).parent
SOON = 120.0
"""Seconds within which what must happen happens; nothing is measured by it."""
FREE = 2
"""Devices that are not the honest tenant's."""
TENANT = "honest"


@dataclass(frozen=True, slots=True)
class Node:
    """A simulated node with an honest tenant."""

    stage: Playground
    tenant: EmulatedPod
    service_pid: int

    async def run(self, attack: Program, part: str, ends: AsyncExitStack) -> EmulatedPod:
        """Start a part of the attack in a pod, and return the pod once that part runs. ``ends`` deletes it."""
        if part == "accomplice":
            shutil.rmtree(self.shared, ignore_errors=True)
            self.shared.mkdir()
        argv = [sys.executable, "-m", "tests.attacks", attack.name, "--shared", str(self.shared)]
        argv += ["--accomplice"] if part == "accomplice" else []
        for target in targets(self.stage, attack):
            argv += ["--target", str(target)]
        devices = attack.devices if part == "attack" else 0
        resources = {RESOURCE: devices} if devices else {}
        name = f"{attack.name.replace('_', '-')}-{part}"
        pod = await self.stage.kubelet.run(PodSpec(name, "team-a", [ContainerSpec("main", argv, resources)]))
        ends.push_async_callback(self.stage.kubelet.delete, pod, grace=0)
        await pod.wait(lambda _: "ready" in pod.read_log("main"), SOON)
        return pod

    async def read_free_devices(self, name: str, ends: AsyncExitStack) -> EmulatedPod:
        """Start a pod of another tenant that requests all free devices and reads them."""
        argv = (sys.executable, "-S", "-E", str(HERE / "reader.py"))
        pod = await self.stage.kubelet.run(gpu_pod_spec(name.replace("_", "-"), "team-b", argv, gpus=FREE))
        ends.push_async_callback(self.stage.kubelet.delete, pod, grace=0)
        return pod

    @property
    def shared(self) -> Path:
        return self.stage.directory / "shared"


def targets(stage: Playground, attack: Program) -> list[Path]:
    """Return what an attack is aimed at besides the device: sockets, and addresses in the form of a path."""
    match attack.targets:
        case "logs":
            return [stage.kubelet.pod_logs]
        case "sockets":
            of_daemons = [path for path in stage.socket_dir.rglob("*") if path.is_socket()]
            directories = ("device-plugins", "plugins", "plugins_registry")
            for_kubelet = [path for each in directories for path in (stage.kubelet.root / each).rglob("*.sock")]
            addresses = [
                Path(line["address"])
                for daemon in (stage.service, stage.plugin)
                for line in log_lines.lines(daemon)
                if line["event"] in ("metrics.serving", "probes.serving")
            ]
            return sorted([*of_daemons, *(path for path in for_kubelet if path.name != "kubelet.sock"), *addresses])
        case _:
            return []


def serve_addresses(stage: Playground) -> None:
    """Have both daemons serve metrics and probes."""
    for daemon in (stage.service, stage.plugin):
        arguments = list(daemon.arguments)
        arguments[arguments.index("--metrics-address") + 1] = "127.0.0.1:0"
        daemon.arguments = [*arguments, "--probe-address", "127.0.0.1:0"]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def node() -> AsyncIterator[Node]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(playground, "start_module", forkserver.start)
        async with Playground(devices=FREE + 1, memory="2MiB", policy=str(HERE / "policy.yaml")) as stage:
            serve_addresses(stage)
            await stage.start_daemons(SOON)
            await stage.wait_until_clean(SOON)
            options = ("--write", TENANT, "--expect", TENANT, "--hold", "forever")
            tenant = await running(stage, gpu_pod_spec(TENANT, "team-b", tenant_argv(*options)))
            yield Node(stage, tenant, stage.service.pid)
            await stage.kubelet.delete(tenant)
            reported = [json.loads(line) for line in tenant.read_log("main").splitlines()]
            assert {"expected": True, "wrong_bytes": 0} in reported, reported
            verified = await stage.run_command("audit", "verify")
            assert verified.returncode == 0, verified.stdout
            log_lines.check(stage)


def report_what_was_impossible(name: str, *pods: EmulatedPod | None) -> None:
    """Report a part of an attack that the kernel or its settings did not permit."""
    lines = [line for pod in pods if pod is not None for line in pod.read_log("main").splitlines()]
    for line in lines:
        if False in json.loads(line).values():
            print(f"NOT TESTED HERE: {name}: {line}", file=sys.__stderr__)


def remove_new_directories(directory: Path, known: set[Path]) -> None:
    """Remove the empty directories that an attack created."""
    for made in set(directory.iterdir()) - known:
        with suppress(OSError):
            made.rmdir()


@pytest.mark.parametrize("name", [name for name in names() if program(name).targets != "mounts"])
async def test_attack_leaves_nothing_and_affects_no_other_tenant(node: Node, name: str) -> None:
    attack, stage = program(name), node.stage
    async with AsyncExitStack() as ends:
        ends.callback(remove_new_directories, stage.kubelet.pod_logs, set(stage.kubelet.pod_logs.iterdir()))
        accomplice = await node.run(attack, "accomplice", ends) if attack.has_accomplice else None
        attacker = await node.run(attack, "attack", ends)
        report_what_was_impossible(name, attacker, accomplice)
        if not attack.devices:
            during = await node.read_free_devices(f"during-{name}", ends)
            await during.wait(PodPhase.SUCCEEDED, SOON)
            assert await found_by(during) == ""
            await stage.kubelet.delete(during)
            await stage.kubelet.delete(attacker, grace=0)
        await stage.kubelet.delete(attacker, force=True, linger=3600.0)
        after = await node.read_free_devices(f"after-{name}", ends)
        if attack.accomplice_keeps_device:
            assert accomplice is not None
            refused = await after.wait(
                lambda status: status.containers["main"].reason == "CreateContainerConfigError", SOON
            )
            message = refused.containers["main"].message
            assert "team-a" not in message
            assert accomplice.spec.name not in message
            assert "residue_bytes" not in after.read_log("main")
            await stage.kubelet.delete(accomplice, grace=0)
        await after.wait(PodPhase.SUCCEEDED, SOON)
        assert await found_by(after) == ""
    await stage.wait_for_devices(
        lambda devices: sorted(each.state for each in devices) == ["clean"] * FREE + ["in-use"], SOON
    )
    assert stage.pod_processes(attacker) == []
    assert node.tenant.status.phase is PodPhase.RUNNING
    assert stage.service.pid == node.service_pid
    assert [each for each in await history(stage, "leftover.pod.killed") if each["pod_uid"] == node.tenant.uid] == []


async def test_half_open_connections_to_each_socket_keep_no_claim_from_being_prepared_and_released() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(playground, "start_module", forkserver.start)
        async with Playground(devices=1, memory="2MiB", policy=str(HERE / "policy.yaml"), dra=True) as stage:
            serve_addresses(stage)
            await stage.start_daemons(SOON)
            await stage.wait_until_clean(SOON)
            attacked = targets(stage, attack := program("half_open_connections"))
            kinds = {path.parent.name if path.is_socket() else "address" for path in attacked}
            assert {"gpu.scrubber.dev", "plugins_registry", "address"} <= kinds
            argv = [sys.executable, "-m", "tests.attacks", attack.name, "--shared", str(stage.directory)]
            argv += [word for path in attacked for word in ("--target", str(path))]
            assert stage.cluster is not None
            stage.cluster.api.create(NAMESPACES, {"metadata": {"name": "team-a"}})
            pod = await stage.kubelet.run(PodSpec("attack", "team-a", [ContainerSpec("main", argv)]))
            await pod.wait(lambda _: "ready" in pod.read_log("main"), SOON)
            for name in ("first", "second"):
                tenant = await stage.run_pod(stage.gpu_pod(name, "team-b", tenant_argv("--read", "--write", name)))
                assert await found_by(tenant) == ""
                await stage.kubelet.delete(tenant)
            assert pod.status.phase is PodPhase.RUNNING
            log_lines.check(stage)
