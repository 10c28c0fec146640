"""The table of infrastructure: every agent has a group, a class and a source, and a policy allows groups of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from scrubber.config.bundled import bundled_infrastructure_table, bundled_policies
from scrubber.config.infrastructure_file import (
    InfrastructureAgent,
    InfrastructureGroup,
    load_infrastructure_table,
    parse_infrastructure_table,
)
from scrubber.config.policy_file import load_policy
from scrubber.domain.errors import InvalidConfiguration
from scrubber.domain.infrastructure import InfrastructureClass, InfrastructurePod, InfrastructureUnit

SHIPPED = load_infrastructure_table()
OPERATOR = ("gpu-operator", "nvidia-gpu-operator")
MONITORING, DRIVER, VALIDATION = InfrastructureClass


def test_operands_of_the_gpu_operator_have_their_accounts_in_both_of_its_namespaces() -> None:
    pods = SHIPPED["gpu-operator"].pods
    assert {each.namespace for each in pods} == set(OPERATOR)
    for namespace in OPERATOR:
        assert InfrastructurePod(namespace, "nvidia-gpu-driver-*", MONITORING) in pods
        assert InfrastructurePod(namespace, "nvidia-dcgm-exporter", MONITORING) in pods
        assert InfrastructurePod(namespace, "nvidia-operator-validator", VALIDATION) in pods


def test_no_group_lets_pods_have_contexts_as_a_part_of_the_driver() -> None:
    assert [pod for group in SHIPPED.values() for pod in group.pods if pod.agent_class is DRIVER] == []


@pytest.mark.parametrize("name", sorted(bundled_policies()))
def test_bundled_policy_allows_agents_of_the_operator_and_of_clouds_and_no_namespace_that_an_installer_chooses(
    name: str,
) -> None:
    allowed = load_policy(name).infrastructure
    assert {each.namespace for each in allowed.all_pods} == {*OPERATOR, "kube-system", "gke-managed-system"}
    assert InfrastructureUnit("nvidia-persistenced.service", DRIVER) in allowed.all_units
    assert InfrastructureUnit("gpud.service", MONITORING) in allowed.all_units


def test_policy_without_groups_allows_only_what_it_lists(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(
        "name: mine\ninfrastructure:\n  groups: []\n  systemdUnits: [a.service]\n  pods: [{namespace: monitoring}]\n"
    )
    allowed = load_policy(file).infrastructure
    assert allowed.all_units == {InfrastructureUnit("a.service", DRIVER)}
    assert allowed.all_pods == {InfrastructurePod("monitoring")}


GOOD = """sources: {us: Seen.}
groups:
  ops: {note: agents, namespaces: [ops, more]}
  node: {note: units}
agents:
  - {group: ops, name: agent, serviceAccounts: [a, b-*], class: monitoring, processes: [p], source: us}
  - {group: node, name: daemon, unit: daemon.service, class: driver, source: us}
"""


def test_agents_apply_in_every_namespace_of_their_group_under_each_of_their_accounts() -> None:
    found = parse_infrastructure_table(GOOD.encode(), "infrastructure.yaml")
    agent = InfrastructureAgent("ops", "agent", MONITORING, "us", "", ("a", "b-*"), ("p",))
    assert found["ops"] == InfrastructureGroup("ops", "agents", ("ops", "more"), (agent,))
    assert found["ops"].pods == {
        InfrastructurePod(namespace, account) for namespace in ("ops", "more") for account in ("a", "b-*")
    }
    assert found["ops"].units == frozenset()
    assert found["node"].units == {InfrastructureUnit("daemon.service", DRIVER)}
    assert found["node"].pods == frozenset()


@pytest.mark.parametrize(
    ("added", "message"),
    [
        pytest.param(
            "{group: opps, name: x, class: driver, source: us}",
            'agents.group: the group "opps" is not explained; write one of ops, node, or add it to groups',
            id="unknown group",
        ),
        pytest.param(
            "{group: ops, name: x, class: driver, source: them}",
            'agents.source: the source "them" is not explained; write one of us, or add it to sources',
            id="unknown source",
        ),
        pytest.param(
            "{group: ops, name: agent, class: driver, source: us}",
            'agents.name: "agent" is already listed in this group; keep one of them',
            id="listed twice",
        ),
        pytest.param(
            "{group: node, name: x, class: driver, source: us}",
            'agents.name: the group "node" has no namespaces, so no pod can be in it; write the unit of the agent',
            id="pod in a group without namespaces",
        ),
        pytest.param(
            "{group: node, name: x, unit: x.service, serviceAccounts: [y], class: driver, source: us}",
            "agents.serviceAccounts: a systemd unit has no service account; remove one of the two keys",
            id="unit with an account",
        ),
        pytest.param(
            "{group: ops, name: x, class: driver, source: us, serviceAccounts: ['*']}",
            'agents.serviceAccounts: "*" is not a service account; use lowercase letters, digits and hyphens, and * at '
            "the end only, such as nvidia-gpu-driver-*",
            id="every account by a pattern",
        ),
        pytest.param(
            "{group: ops, name: x, source: us}",
            'the key "class" is missing; add a line such as class: monitoring',
            id="no class",
        ),
    ],
)
def test_invalid_row_is_refused_with_its_line(added: str, message: str) -> None:
    with pytest.raises(InvalidConfiguration) as refusal:
        parse_infrastructure_table(f"{GOOD}  - {added}\n".encode(), "infrastructure.yaml")
    assert str(refusal.value) == f"infrastructure.yaml:8: {message}."


def test_group_without_agents_is_refused() -> None:
    text = GOOD.replace("groups:\n", "groups:\n  empty: {note: nothing}\n")
    with pytest.raises(InvalidConfiguration, match=r"infrastructure.yaml:3: groups.empty: no agent is in this group"):
        parse_infrastructure_table(text.encode(), "infrastructure.yaml")


def test_file_that_is_no_mapping_or_cannot_be_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidConfiguration, match="begin with a line such as sources:"):
        parse_infrastructure_table(b"- 1\n", "infrastructure.yaml")
    with pytest.raises(InvalidConfiguration, match="the table of infrastructure cannot be read"):
        load_infrastructure_table(tmp_path / "none.yaml")


def test_bundled_table_is_no_policy() -> None:
    assert bundled_infrastructure_table().is_file()
    assert "infrastructure" not in bundled_policies()
