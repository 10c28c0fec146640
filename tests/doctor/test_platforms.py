"""``scrubber doctor``: the platform of the node, from its files, pods and labels."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from scrubber.doctor.model import CheckContext, CheckLevel, CheckResult, ClusterReport
from scrubber.doctor.platforms import PLAIN, PLATFORMS, find_platform, platform
from scrubber.doctor.recommendation import recommendation
from tests.doctor.stage import healthy, serving, write

BOTTLEROCKET = (
    'NAME=Bottlerocket\nID=bottlerocket\nVERSION="1.47.0 (aws-k8s-1.34-nvidia)"\nVARIANT_ID=aws-k8s-1.34-nvidia\n'
)
RHCOS = 'NAME="Red Hat Enterprise Linux CoreOS"\nID="rhcos"\nVARIANT_ID=coreos\nOPENSHIFT_VERSION="4.14"\n'
TALOS = 'NAME="Talos"\nID=talos\nVERSION_ID=v1.12.6\n'
COS = 'NAME="Container-Optimized OS"\nID=cos\nVERSION_ID=125\n'
AMAZON = 'NAME="Amazon Linux"\nID="amzn"\nVERSION_ID="2023"\n'
UBUNTU = 'NAME="Ubuntu"\nID=ubuntu\nID_LIKE=debian\nVERSION_ID="24.04"\n'


@pytest.fixture
def node(short_tmp: Path) -> Iterator[CheckContext]:
    with healthy(short_tmp) as node:
        yield node


def result(node: CheckContext) -> CheckResult:
    (one,) = platform(node)
    return one


def name(node: CheckContext) -> str:
    found = find_platform(node)
    assert found is not None
    return found.name


@pytest.mark.parametrize(
    ("release", "directory", "expected"),
    [
        (BOTTLEROCKET, "etc/eks", "Bottlerocket"),
        (TALOS, "var", "Talos Linux"),
        (RHCOS, "etc/eks", "OpenShift"),
        (RHCOS.replace("rhcos", "rhel"), "var", "OpenShift"),
        (COS, "home/kubernetes/bin/nvidia", "Google Kubernetes Engine"),
        (UBUNTU, "home/kubernetes/bin", "Google Kubernetes Engine"),
        (AMAZON, "etc/eks", "Amazon EKS"),
        (UBUNTU, "opt/azure/containers", "Azure Kubernetes Service"),
        (UBUNTU, "etc/rancher/k3s", "K3s or RKE2"),
        (UBUNTU, "var/lib/rancher/rke2/agent", "K3s or RKE2"),
        (UBUNTU, "var", PLAIN.name),
        (COS, "var", PLAIN.name),
        ('ID="talos is not it"\n', "var", PLAIN.name),
    ],
)
def test_platform_is_recognized_by_its_operating_system_or_its_directories(
    node: CheckContext, release: str, directory: str, expected: str
) -> None:
    write(node.root, "etc/os-release", release)
    (node.root / directory).mkdir(parents=True, exist_ok=True)
    assert name(node) == expected


@pytest.mark.parametrize("row", PLATFORMS, ids=lambda row: row.name)
def test_each_kind_of_evidence_of_a_platform_is_enough(row: object, node: CheckContext) -> None:
    (of,) = (each for each in PLATFORMS if each is row)
    assert name(node) == PLAIN.name
    for label in of.labels:
        assert name(replace(node, cluster=ClusterReport(labels={label: "x"}))) == of.name
    for namespace, pod in (*of.agents, *of.pods):
        directory = node.pod_logs / f"{namespace}_{pod}-x_uid-1"
        directory.mkdir(parents=True)
        assert name(node) == of.name
        directory.rmdir()
    for unit in of.agent_units:
        (node.root / "sys/fs/cgroup/system.slice" / unit).mkdir(parents=True)
        assert name(node) == of.name
    assert of.os_release or of.paths


def test_message_says_what_differs_and_names_the_page(node: CheckContext) -> None:
    write(node.root, "etc/os-release", BOTTLEROCKET)
    write(node.root, "sys/fs/selinux/enforce", "1")
    one = result(node)
    assert (one.level, one.remedy) == (CheckLevel.OK, "")
    assert one.message.startswith("Bottlerocket: a device plugin of NVIDIA is part of the operating system")
    assert one.message.endswith("SELinux is enforced. See docs/platforms/bottlerocket.md.")


def test_permissive_selinux_and_an_ostree_image_are_named_on_any_platform(node: CheckContext) -> None:
    write(node.root, "sys/fs/selinux/enforce", "0")
    write(node.root, "run/ostree-booted")
    message = result(node).message
    assert "SELinux is permissive." in message
    assert "only /etc and /var can be written" in message


def test_plain_node_is_named_with_its_page(node: CheckContext) -> None:
    write(node.root, "usr/lib/os-release", UBUNTU)
    one = result(node)
    assert (one.level, one.remedy) == (CheckLevel.OK, "")
    assert one.message.startswith(PLAIN.name)
    assert "docs/platforms/plain-driver.md" in one.message


def test_file_of_the_image_counts_before_a_link_that_leads_out_of_the_nodes_root(
    node: CheckContext, tmp_path: Path
) -> None:
    write(node.root, "usr/lib/os-release", RHCOS)
    (node.root / "etc/os-release").symlink_to(write(tmp_path, "of-the-container", TALOS))
    assert name(node) == "OpenShift"


@pytest.mark.parametrize("text", ["", "=\n", "ID\n", 'ID="bottle\n', "ID=a b\n", "\0\n", "ID=\nID==\n"])
def test_os_release_that_is_not_one_is_a_plain_node(node: CheckContext, text: str) -> None:
    write(node.root, "etc/os-release", text)
    assert name(node) == PLAIN.name


def test_os_release_without_an_end_is_unknown(node: CheckContext) -> None:
    write(node.root, "etc/os-release", "#" * (1 << 17))
    one = result(node)
    assert (one.level, "is unknown" in one.message, bool(one.remedy)) == (CheckLevel.WARNING, True, True)


def test_container_that_does_not_see_the_node_does_not_take_its_own_image_for_the_platform(
    node: CheckContext,
) -> None:
    write(node.root, "etc/os-release", TALOS)
    (node.root / "etc/eks").mkdir()
    inside = replace(node, root_of_init=node.root / "proc")
    one = result(inside)
    assert (one.level, "--node-root /proc/1/root" in one.remedy) == (CheckLevel.WARNING, True)
    (node.pod_logs / "kube-system_nvidia-gpu-device-plugin-x_uid-1").mkdir(parents=True)
    assert name(inside) == "Google Kubernetes Engine"


def test_simulated_node_has_no_platform(node: CheckContext) -> None:
    assert list(platform(serving(node, backend="sim"))) == []


def test_recommendation_refers_to_the_page_of_the_platform(node: CheckContext) -> None:
    (plain,) = recommendation(node)
    assert plain.recommendation is not None
    assert not any("docs/platforms" in each for each in plain.recommendation.notes)
    write(node.root, "etc/os-release", TALOS)
    (one,) = recommendation(node)
    assert one.recommendation is not None
    assert one.recommendation.notes[-1].endswith("see docs/platforms/talos.md.")
