"""A rolling upgrade of a cluster whose pods have their devices by claims, and a rollback: prepared claims and grants stay.

Two nodes of one emulated control plane, each with a service and a DRA driver. The nodes, and the two daemons of a node, are
replaced one after the other, so neighbouring versions run side by side in every combination.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from scrubber import __version__
from scrubber.adapters.ledger.offline import verify_ledger
from scrubber.adapters.ledger.schema import CURRENT
from scrubber.emulator import Kubelet
from scrubber.emulator.claim_cluster import DRIVER_ACCOUNT, ClaimCluster
from scrubber.emulator.cluster import Account
from scrubber.emulator.cluster.resources import NODES
from scrubber.emulator.playground import (
    LONGEST_WAIT,
    Daemon,
    Playground,
    fast_kubelet_timings,
    gpu_pod_spec,
    tenant_argv,
)
from scrubber.emulator.pods import EmulatedPod, PodPhase
from tests.integration.acting import QUICK, SOON, found_by, history
from tests.integration.log_lines import lines
from tests.integration.test_upgrade import become, scrubs_of_last_start, trees
from tests.other_version import NEXT, OtherVersion, build, other_versions

assert trees  # a fixture: the daemons of another tree are programs of their own
NAMES = ("node-a", "node-b")
DEVICES = 2
"""Of each node."""


@dataclass
class Node:
    """A node of the cluster, and the pod that has one of its devices all the time."""

    name: str
    stage: Playground
    cluster: ClaimCluster
    stays: EmulatedPod | None = None
    pods: int = 0

    def next_name(self) -> str:
        """Return a name that no other pod of the node has."""
        self.pods += 1
        return f"pod-{self.pods}"

    async def run(self, name: str, namespace: str, *argv: str) -> EmulatedPod:
        """Return a pod with a claim of one device, once the scheduler has bound it to this node."""
        spec = gpu_pod_spec(f"{name}-{self.name}", namespace, tenant_argv(*argv))
        claim = self.cluster.pod_claim(namespace, 1)
        containers = [replace(each, resources={}, claims=[claim.name]) for each in spec.containers]
        for each in NAMES:
            self.cluster.api.patch(NODES, each, {"spec": {"unschedulable": each != self.name}})
        return await self.stage.kubelet.submit(replace(spec, containers=containers, claims=[claim]), LONGEST_WAIT)

    async def run_writer(self, name: str, namespace: str) -> EmulatedPod:
        pod = await self.run(name, namespace, "--write", f"secret of {name}", "--hold", "forever")
        await pod.wait(lambda _: "ready" in pod.read_log("main"), SOON)
        return pod

    async def claims(self) -> dict[str, tuple[str, Sequence[tuple[int, str]]]]:
        """Return claim and open grants of each device that a claim has."""
        return {
            each.id: (each.claim.uid, [(grant.sequence, grant.claim.uid) for grant in each.open_grants])
            for each in (await self.stage.read_client.devices()).devices
            if each.HasField("claim")
        }

    async def has_versions(self, service: OtherVersion | None, driver: OtherVersion | None) -> None:
        """Wait until the service and its only plugin have these versions."""
        expected = (number(service), [number(driver)])
        async with asyncio.timeout(LONGEST_WAIT):
            while True:
                info = await self.stage.read_client.service_info()
                if (info.version, list(info.plugin_versions)) == expected:
                    return


def number(version: OtherVersion | None) -> str:
    return __version__ if version is None else version.version


@asynccontextmanager
async def nodes(root: Path, version: OtherVersion | None) -> AsyncIterator[tuple[Node, Node]]:
    """Nodes on which everything has this version, with a pod on each that keeps a claim."""
    cluster = ClaimCluster()
    async with AsyncExitStack() as stack:
        await cluster.start(root / "unused")
        stack.push_async_callback(cluster.close)
        made = []
        for name in NAMES:
            stage = Playground(directory=root / name, devices=DEVICES, memory="2MiB", policy=QUICK)
            kubeconfig = stage.directory / "kubeconfig"
            cluster.server.write_kubeconfig(kubeconfig, cluster.server.add_account(Account(DRIVER_ACCOUNT, node=name)))
            stage.kubelet = Kubelet(
                stage.kubelet.root,
                timings=fast_kubelet_timings(),
                cgroup_parent=stage.cgroup_parent,
                cluster=cluster.api,
                node_name=name,
            )
            words = ["dra", "--node-name", name, "--kubeconfig", str(kubeconfig), "--socket-dir", str(stage.socket_dir)]
            words += [
                "--kubelet-plugins-dir",
                str(stage.kubelet.plugins),
                "--cdi-dir",
                str(stage.kubelet.cdi_directory),
            ]
            words += ["--registry-dir", str(stage.kubelet.plugins_registry)]
            words += ["--log-format", "json", "--metrics-address", "off"]
            stage.plugin = Daemon(words, stage.directory / "dra.log")
            become(stage.service, version)
            become(stage.plugin, version)
            await stack.enter_async_context(stage)
            await stage.kubelet.wait_until(
                lambda kubelet: any(each.name == "SlicesDeleted" for each in kubelet.events), LONGEST_WAIT
            )
            await stage.service.start()
            await stage.wait_until_clean(LONGEST_WAIT)
            await stage.plugin.start()
            made.append(Node(name, stage, cluster))
            await cluster.wait_for_schedulable(DEVICES * len(made), LONGEST_WAIT)
        for node in made:
            node.stays = await node.run_writer("stays", "team-a")
        first, second = made
        yield first, second


async def replace_service(node: Node, version: OtherVersion | None, driver: OtherVersion | None) -> None:
    """Replace the service; meanwhile a pod is scheduled, whose claim waits for it, and for a scrub."""
    before = await node.claims()
    assert len(before) == 1
    await node.stage.service.stop()
    become(node.stage.service, version)
    waiting = await node.run(node.next_name(), "team-b", "--read")
    (device,) = node.cluster.device_ids(waiting)
    assert waiting.status.phase is PodPhase.PENDING
    await node.stage.service.start()
    await waiting.wait(PodPhase.SUCCEEDED, LONGEST_WAIT)
    assert await found_by(waiting) == ""
    await node.has_versions(version, driver)
    assert await scrubs_of_last_start(node.stage, device) == 1
    after = await node.claims()
    assert {id_: after[id_] for id_ in before} == before


async def replace_driver(node: Node, version: OtherVersion | None, service: OtherVersion | None) -> None:
    """Replace the driver; meanwhile a pod is deleted, whose claim waits for the next driver to be released."""
    before = await node.claims()
    leaves = await node.run_writer(node.next_name(), "team-a")
    (device,) = node.cluster.device_ids(leaves)
    await node.stage.plugin.stop()
    become(node.stage.plugin, version)
    grants = {each.id: each.grant_count for each in (await node.stage.read_client.devices()).devices}
    deletion = asyncio.create_task(node.stage.kubelet.delete(leaves))
    await node.stage.kubelet.wait_until(
        lambda kubelet: any(each.name == "FailedKillPod" and each.pod_uid == leaves.uid for each in kubelet.events),
        SOON,
    )
    await node.stage.plugin.start()
    await deletion
    await node.has_versions(service, version)
    next_tenant = await node.run(node.next_name(), "team-b", "--read")
    assert await found_by(next_tenant) == ""
    after = await node.claims()
    assert {id_: after[id_] for id_ in before} == before
    now = {each.id: each.grant_count for each in (await node.stage.read_client.devices()).devices}
    assert now[device] == grants[device] + 1


async def still_served(every: Sequence[Node], other: Node) -> None:
    """Check that no pod was disturbed, and that ``other``, which is not being replaced, hands out a clean device."""
    for node in every:
        assert node.stays is not None
        assert node.stays.status.phase is PodPhase.RUNNING
        assert node.stays.status.containers["main"].restarts == 0
    await other.stage.kubelet.delete(await other.run_writer(other.next_name(), "team-a"))
    assert await found_by(await other.run(other.next_name(), "team-b", "--read")) == ""


@pytest.mark.parametrize("which", other_versions())
async def test_rolling_upgrade_and_rollback_of_two_nodes_lose_no_claim_and_no_grant(
    which: str, short_tmp: Path
) -> None:
    other = build(which, short_tmp / "tree")
    old, new = (None, other) if other.is_newer else (other, None)
    async with nodes(short_tmp, old) as every:
        for node, other_node in (every, every[::-1]):
            await replace_service(node, new, old)
            await replace_driver(node, new, new)
            await still_served(every, other_node)
        for node, other_node in (every, every[::-1]):
            await replace_driver(node, old, new)
            await replace_service(node, old, old)
            await still_served(every, other_node)

        for node in every:
            assert node.stays is not None
            await node.stage.kubelet.delete(node.stays)
            await node.stage.wait_for_devices(
                lambda devices: not any(each.HasField("claim") for each in devices), SOON, "no claim is left"
            )
            converted = await history(node.stage, "ledger.converted")
            if which == NEXT:
                schema, newer = CURRENT.number, CURRENT.number + 1
                assert [(row["from_schema"], row["to_schema"], row["omitted"]) for row in converted] == [
                    (schema, newer, 0),
                    (newer, schema, 0),
                ]
            assert [line for line in lines(node.stage.plugin) if line["event"] == "plugin.version-refused"] == []
            assert (await node.stage.plugin.stop(), await node.stage.service.stop()) == (0, 0)
            assert verify_ledger(node.stage.directory / "state").intact
