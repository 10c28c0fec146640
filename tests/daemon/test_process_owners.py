"""Which processes count as infrastructure: real log directories and tokens, and what a tenant can and cannot claim."""

from __future__ import annotations

import base64
import json
from pathlib import Path

import pytest

from scrubber.adapters.kubelet.pod_identity import PodIdentities
from scrubber.config.policy_file import load_policy
from scrubber.domain.assignment import KubeletReading, Trust
from scrubber.domain.errors import Unreadable
from scrubber.domain.infrastructure import InfrastructureProcess, ProcessOwner
from scrubber.domain.telemetry import HolderKind
from scrubber.process_owners import ProcessOwners

AGENT, TENANT, HOST, UNIT, UNREADABLE = 11, 12, 13, 14, 15
AGENT_UID, TENANT_UID = "aaaaaaaa-2222-3333-4444-555555555555", "bbbbbbbb-2222-3333-4444-555555555555"
EXPORTER = ("gpu-operator", "nvidia-dcgm-exporter-2jklm")
TOLERATED, PROGRAM = HolderKind.INFRASTRUCTURE, HolderKind.VALIDATION


class Node:
    """A node with the default policy, an exporter's pod without a token and a tenant's pod."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.logs = root / "logs"
        self.logs.mkdir()
        self.log(*EXPORTER, AGENT_UID)
        self.policy = load_policy("default").infrastructure
        pods = PodIdentities(
            root,
            self.logs,
            may_run=lambda _: True,
            reading=lambda: KubeletReading(Trust.UNREADABLE),
            monotonic=lambda: 0.0,
        )
        self.owners = ProcessOwners(
            unit_of={UNIT: "nvidia-persistenced.service", HOST: "sshd.service"}.get,
            pod_uid_of=self._pod_uid_of,
            pods=pods,
            allowed=lambda: self.policy,
        )

    async def _pod_uid_of(self, pid: int) -> str | None:
        if pid == UNREADABLE:
            raise Unreadable("its cgroup cannot be read")
        return {AGENT: AGENT_UID, TENANT: TENANT_UID}.get(pid)

    def log(self, namespace: str, name: str, uid: str) -> None:
        (self.logs / f"{namespace}_{name}_{uid}").mkdir()

    def token(self, uid: str, *, namespace: str, pod: str, account: str, of: str | None = None) -> None:
        """Write a token into a projected volume of the pod ``uid``."""
        volume = self.root / "pods" / uid / "volumes" / "kubernetes.io~projected" / "token"
        volume.mkdir(parents=True)
        claims = {"namespace": namespace, "pod": {"name": pod, "uid": of or uid}, "serviceaccount": {"name": account}}
        content = base64.urlsafe_b64encode(json.dumps({"kubernetes.io": claims}).encode()).rstrip(b"=")
        (volume / "token").write_bytes(b"e30." + content + b".c2ln")

    async def kind(self, pid: int, *, has_context: bool = False) -> HolderKind | None:
        found = await self.owners.infrastructure(pid, has_context=has_context)
        return None if found is None else found.kind


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


async def test_exporter_without_a_token_is_recognized_by_its_namespace(node: Node) -> None:
    found = await node.owners.infrastructure(AGENT, has_context=False)
    assert found == InfrastructureProcess(TOLERATED, "/".join(EXPORTER), is_monitoring=True)
    assert await node.kind(AGENT, has_context=True) is PROGRAM


async def test_unit_of_the_driver_is_recognized_and_may_have_a_context(node: Node) -> None:
    found = await node.owners.infrastructure(UNIT, has_context=True)
    assert found == InfrastructureProcess(TOLERATED, "nvidia-persistenced.service")
    assert await node.kind(HOST) is None


async def test_pod_of_the_operators_namespace_under_an_account_that_no_agent_has_is_not_recognized(node: Node) -> None:
    node.token(AGENT_UID, namespace=EXPORTER[0], pod=EXPORTER[1], account="default")
    assert await node.kind(AGENT) is None


@pytest.mark.parametrize("account", ["nvidia-driver", "nvidia-gpu-driver-prod-ubuntu24.04", "nvidia-dcgm"])
async def test_program_of_an_operators_pod_is_validation_whatever_the_account_of_the_pod(
    node: Node, account: str
) -> None:
    node.token(AGENT_UID, namespace=EXPORTER[0], pod=EXPORTER[1], account=account)
    assert await node.kind(AGENT) is TOLERATED
    assert await node.kind(AGENT, has_context=True) is PROGRAM


@pytest.mark.parametrize(("account", "with_context"), [("nvidia-driver", TOLERATED), ("nvidia-dcgm", PROGRAM)])
async def test_pod_may_have_a_context_if_the_policy_itself_lists_its_account_as_driver(
    node: Node, tmp_path: Path, account: str, with_context: HolderKind
) -> None:
    file = tmp_path / "mine.yaml"
    entry = f"{{namespace: {EXPORTER[0]}, serviceAccount: nvidia-driver, class: driver}}"
    file.write_text(f"name: mine\ninfrastructure: {{groups: [gpu-operator], pods: [{entry}]}}\n")
    node.policy = load_policy(file).infrastructure
    node.token(AGENT_UID, namespace=EXPORTER[0], pod=EXPORTER[1], account=account)
    assert await node.kind(AGENT, has_context=True) is with_context


async def test_tenant_with_the_name_and_the_service_account_of_an_agent_is_not_recognized(node: Node) -> None:
    node.log("tenant-a", EXPORTER[1], TENANT_UID)
    assert await node.kind(TENANT) is None
    node.token(TENANT_UID, namespace="tenant-a", pod=EXPORTER[1], account="nvidia-dcgm-exporter")
    assert await node.kind(TENANT) is None


@pytest.mark.parametrize("of", [AGENT_UID, TENANT_UID])
async def test_tenant_with_a_forged_token_of_an_agent_is_not_recognized(node: Node, of: str) -> None:
    node.log("tenant-a", "train-0", TENANT_UID)
    node.token(TENANT_UID, namespace=EXPORTER[0], pod=EXPORTER[1], account="nvidia-driver", of=of)
    assert await node.kind(TENANT) is None


async def test_pod_without_log_directory_is_not_recognized(node: Node) -> None:
    node.token(TENANT_UID, namespace=EXPORTER[0], pod=EXPORTER[1], account="nvidia-driver")
    assert await node.kind(TENANT) is None


async def test_privileged_pod_that_adds_log_directories_is_not_recognized(node: Node) -> None:
    """With hostPath to /var/log a pod can add directories: for its own UID, or beside an agent's."""
    node.log("tenant-a", "train-0", TENANT_UID)
    node.log(EXPORTER[0], "nvidia-dcgm-x7x9q", TENANT_UID)
    assert await node.kind(TENANT) is None
    (node.logs / f"tenant-a_train-0_{TENANT_UID}").rmdir()
    (node.logs / f"{EXPORTER[0]}_nvidia-dcgm-x7x9q_{TENANT_UID}").rename(
        node.logs / f"{'_'.join(EXPORTER)}_{TENANT_UID}"
    )
    assert await node.kind(TENANT) is None


async def test_namespace_that_the_policy_does_not_allow_is_not_recognized(node: Node, tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("name: mine\ninfrastructure: {groups: [systemd]}\n")
    node.policy = load_policy(file).infrastructure
    assert await node.kind(AGENT) is None
    assert await node.kind(UNIT) is TOLERATED


async def test_owner_of_any_process_is_named_for_display(node: Node) -> None:
    node.log("monitoring", "dcgm-exporter-x", TENANT_UID)
    assert await node.owners.owner_of(TENANT) == ProcessOwner("monitoring", "dcgm-exporter-x", TENANT_UID)
    assert await node.owners.owner_of(HOST) == ProcessOwner(unit="sshd.service")
    assert await node.owners.owner_of(16) == ProcessOwner()
    assert await node.owners.owner_of(UNREADABLE) == ProcessOwner()
