"""``scrubber doctor``: what keeps devices dirty, and which agents of the node the policy allows."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from scrubber.doctor.infrastructure import (
    holders,
    infrastructure_accounts,
    infrastructure_agents,
    infrastructure_namespaces,
    reset_blockers,
)
from scrubber.doctor.model import CheckContext, CheckLevel, DeviceReport, ReportedHolder
from tests.doctor.stage import OUR_UID, healthy, pod_of, process, serving, write

EXPORTER = ReportedHolder(
    4711, "dcgm-exporter", code="unknown-holder", namespace="monitoring", pod="dcgm-exporter-x", pod_uid="u", since=60.0
)


@pytest.fixture
def node(short_tmp: Path) -> Iterator[CheckContext]:
    with healthy(short_tmp) as node:
        yield node


def with_pods(node: CheckContext, *pods: str) -> CheckContext:
    for number, pod in enumerate(pods):
        (node.pod_logs / f"{pod.replace('/', '_')}_uid-{number}").mkdir(parents=True)
    return node


def with_policy(node: CheckContext, infrastructure: str) -> CheckContext:
    file = write(node.root, "policy.yaml", f"name: mine\ninfrastructure: {infrastructure}\n")
    return replace(node, policy=str(file))


def holding(*found: ReportedHolder, devices: int = 1) -> tuple[DeviceReport, ...]:
    return tuple(DeviceReport(f"GPU-{each}", str(each), "dirty", holders=found) for each in range(devices))


# --- what keeps devices dirty


def test_holder_of_several_devices_is_named_once_with_its_pod_and_the_policy_line_that_allows_it(
    node: CheckContext,
) -> None:
    (check,) = holders(serving(node, devices=holding(EXPORTER, devices=5)))
    assert check.level is CheckLevel.WARNING
    assert check.message == (
        "PID 4711 (dcgm-exporter) of monitoring/dcgm-exporter-x has held devices 0, 1, 2 and 2 more since "
        "1970-01-01T00:01:00Z: no pod gets what it holds."
    )
    assert "infrastructure: {pods: [{namespace: monitoring}]} in default" in check.remedy


@pytest.mark.parametrize(
    ("holder", "who", "remedy"),
    [
        (ReportedHolder(7, "x", unit="my.service"), "PID 7 (x) of my.service has", "{systemdUnits: [my.service]}"),
        (ReportedHolder(7), "PID 7 (unknown), outside all pods and units, has", "run it as a systemd unit"),
        (ReportedHolder(7, "x", pod_uid="u-1"), "PID 7 (x) of pod u-1 has", "pods: [{namespace: its-namespace}]"),
        (
            replace(EXPORTER, kind="validation"),
            "PID 4711 (dcgm-exporter) of monitoring/dcgm-exporter-x has",
            "give it the class driver",
        ),
        (ReportedHolder(0), "Something without a process, outside all pods and units, has", "End it"),
    ],
)
def test_holder_outside_a_named_pod_gets_a_remedy_that_fits(
    node: CheckContext, holder: ReportedHolder, who: str, remedy: str
) -> None:
    (check,) = holders(serving(node, devices=holding(holder)))
    assert check.message.startswith(f"{who} held device 0 since")
    assert remedy in check.remedy


def test_devices_without_holders_pass_and_nothing_is_reported_without_the_service(node: CheckContext) -> None:
    (check,) = holders(node)
    assert check.level is CheckLevel.OK
    assert list(holders(serving(node, error="no answer"))) == []
    assert list(holders(serving(node, devices=None))) == []


# --- agents that the policy does not allow


def test_known_agents_that_the_policy_does_not_allow_are_named_with_the_line_that_allows_each(
    node: CheckContext,
) -> None:
    write(node.root, "sys/fs/cgroup/system.slice/gpud.service/cgroup.procs")
    with_pods(node, "monitoring/dcgm-exporter-a", "monitoring/dcgm-exporter-b", "gpu-operator/nvidia-dcgm-x", "a/web-1")
    unit, operand, exporter = infrastructure_agents(with_policy(node, "{groups: []}"))
    assert {each.level for each in (unit, operand, exporter)} == {CheckLevel.WARNING}
    assert unit.message.startswith("The unit gpud.service runs, and the policy does not allow it")
    assert "infrastructure: {systemdUnits: [gpud.service]}" in unit.remedy
    assert operand.message.startswith("The pod gpu-operator/nvidia-dcgm-x is called like the agent nvidia-dcgm")
    assert exporter.message.startswith("The pod monitoring/dcgm-exporter-a is called like the agent dcgm-exporter")
    assert "infrastructure: {pods: [{namespace: monitoring}]}" in exporter.remedy


def test_agents_that_the_policy_allows_pass(node: CheckContext) -> None:
    write(node.root, "sys/fs/cgroup/system.slice/gpud.service/cgroup.procs")
    (check,) = infrastructure_agents(with_pods(node, "gpu-operator/nvidia-dcgm-exporter-x", "a/web-1"))
    assert check.level is CheckLevel.OK
    allowed = with_policy(with_pods(node, "monitoring/dcgm-exporter-a"), "{pods: [{namespace: monitoring}]}")
    (check,) = infrastructure_agents(allowed)
    assert check.level is CheckLevel.OK


def test_unreadable_log_directory_is_unknown_and_an_invalid_policy_is_left_to_its_own_check(node: CheckContext) -> None:
    write(node.root, "var/log/pods", "a file")
    for check in (infrastructure_agents, infrastructure_namespaces):
        (result,) = check(node)
        assert (result.level, "is unknown" in result.message) == (CheckLevel.WARNING, True)
        assert list(check(with_policy(node, "{groups: [none]}"))) == []


# --- namespaces whose pods are allowed


def test_strange_pods_of_a_listed_namespace_are_named_with_the_command_that_settles_who_may_create_them(
    node: CheckContext,
) -> None:
    known = ("gpu-operator-7c9", "gpu-operator-node-feature-discovery-worker-x", "nvidia-dcgm-exporter-x")
    with_pods(node, *(f"gpu-operator/{each}" for each in known), "kube-system/coredns-x", "gpu-operator/miner-1")
    (check,) = infrastructure_namespaces(node)
    assert check.level is CheckLevel.WARNING
    assert check.message.endswith("run pods that are no known agents: miner-1.")
    assert (
        "kubectl auth can-i create pods -n gpu-operator --as=any-user --as-group=system:authenticated" in check.remedy
    )


def test_pod_with_a_gpu_of_its_own_in_a_listed_namespace_is_strange_whatever_its_name(node: CheckContext) -> None:
    with_pods(node, "gpu-operator/nvidia-dcgm-exporter-x")
    kubelet = replace(node.kubelet, pods_with_devices=frozenset({("gpu-operator", "nvidia-dcgm-exporter-x")}))
    (check,) = infrastructure_namespaces(replace(node, kubelet=kubelet))
    assert (check.level, "nvidia-dcgm-exporter-x" in check.message) == (CheckLevel.WARNING, True)


def test_listed_namespaces_with_known_agents_only_pass_and_a_namespace_of_the_policy_expects_any_name(
    node: CheckContext,
) -> None:
    with_pods(node, "gpu-operator/nvidia-dcgm-exporter-x", "monitoring/anything")
    (check,) = infrastructure_namespaces(with_policy(node, "{pods: [{namespace: monitoring}]}"))
    assert check.level is CheckLevel.OK
    assert "gpu-operator" in check.message
    assert "kubectl auth can-i create pods -n NAMESPACE" in check.message
    assert list(infrastructure_namespaces(with_policy(node, "{groups: [systemd]}"))) == []


# --- what blocks a reset


@pytest.mark.parametrize(
    ("policy", "level", "text"),
    [
        ("default", CheckLevel.OK, "Scrubs go on without a reset."),
        ("strict", CheckLevel.WARNING, "The policy requires a reset"),
        ("nowhere", CheckLevel.WARNING, "is unknown"),
    ],
)
def test_agent_that_holds_devices_is_named_as_a_blocker_of_resets_and_is_a_problem_where_they_are_required(
    node: CheckContext, policy: str, level: CheckLevel, text: str
) -> None:
    agent = replace(EXPORTER, kind="infrastructure", code="")
    devices = (DeviceReport("GPU-a", "0"), *(DeviceReport(f"GPU-{each}", each, agents=(agent,)) for each in "bc"))
    (check,) = reset_blockers(replace(serving(node, devices=devices), policy=policy))
    assert (check.level, text in check.message) == (level, True)
    assert "2 of 3 devices, which blocks resets of them: monitoring/dcgm-exporter-x." in check.message
    assert "scrubber reset-plan b" in check.message + check.remedy


def test_override_that_requires_resets_counts_like_the_policy(node: CheckContext) -> None:
    file = write(
        node.root, "policy.yaml", "name: mine\noverrides:\n- {name: a, models: [NVIDIA A100], reset: required}\n"
    )
    devices = (DeviceReport("GPU-a", "0", agents=(replace(EXPORTER, kind="infrastructure"),)),)
    (check,) = reset_blockers(replace(serving(node, devices=devices), policy=str(file)))
    assert "The policy requires a reset" in check.message


def test_devices_without_agents_have_nothing_that_blocks_a_reset(node: CheckContext) -> None:
    (check,) = reset_blockers(node)
    assert check.level is CheckLevel.OK
    assert list(reset_blockers(serving(node, devices=None))) == []


# --- accounts


@pytest.mark.parametrize(
    ("pods", "mounted", "levels"),
    [
        ("[{namespace: monitoring, serviceAccount: exporter}]", True, [CheckLevel.OK]),
        ("[{namespace: monitoring, serviceAccount: exporter}]", False, [CheckLevel.WARNING]),
        ("[{namespace: monitoring}]", False, []),
    ],
)
def test_policy_with_accounts_needs_the_mount_with_the_tokens_of_pods(
    node: CheckContext, pods: str, mounted: bool, levels: list[CheckLevel]
) -> None:
    process(node.root, os.getpid(), cgroup=pod_of(OUR_UID))
    if mounted:
        (node.root / f"proc/{os.getpid()}/root/var/lib/kubelet/pods").mkdir(parents=True)
    found = list(infrastructure_accounts(with_policy(node, f"{{pods: {pods}}}")))
    assert [each.level for each in found] == levels
    assert all("HostToContainer" in each.remedy for each in found if each.remedy)


def test_unit_sees_the_tokens_of_pods_without_a_mount(node: CheckContext) -> None:
    process(node.root, os.getpid(), cgroup="/system.slice/scrubber.service")
    assert list(infrastructure_accounts(with_policy(node, "{pods: [{namespace: m, serviceAccount: a}]}"))) == []
