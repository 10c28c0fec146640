"""The table of the node's infrastructure: agents that hold devices without being tenants, by group.

It is data with a source for every row. A policy allows groups of it, and adds agents without modifying the table.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from scrubber.config.bundled import bundled_infrastructure_table
from scrubber.config.value_formats import (
    DNS_NAME,
    NAME,
    NON_EMPTY_TEXT,
    SERVICE_ACCOUNT_PATTERN,
    SYSTEMD_UNIT,
    Choice,
    KeyFormat,
    ListOf,
    MappingOf,
    SectionFormat,
    json_schema,
    read_document,
    refuse,
)
from scrubber.config.yaml_document import Location, parse_yaml, read_configuration_file
from scrubber.domain.errors import InvalidConfiguration
from scrubber.domain.infrastructure import InfrastructureClass, InfrastructurePod, InfrastructureUnit
from scrubber.domain.policy import Infrastructure

__all__ = [
    "InfrastructureAgent",
    "InfrastructureGroup",
    "InfrastructureTable",
    "infrastructure_schema",
    "load_infrastructure_table",
    "parse_infrastructure_table",
    "with_groups",
]


@dataclass(frozen=True, slots=True)
class InfrastructureAgent:
    """One agent.

    Attributes:
        name: the unit's name without its suffix, or the beginning of the names of its pods; for people only.
        unit: its systemd unit; empty for pods.
        service_accounts: the accounts of its pods; empty for any.
        processes: the names of its processes; for people only.
        source: name of the source of the row; the file explains its names.
    """

    group: str
    name: str
    agent_class: InfrastructureClass
    source: str
    unit: str = ""
    service_accounts: tuple[str, ...] = ()
    processes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class InfrastructureGroup:
    """Agents that are allowed together.

    Attributes:
        namespaces: the namespaces of its pods.
        other_pods: beginnings of the names of other pods that are expected there; for people only.
    """

    name: str
    note: str
    namespaces: tuple[str, ...]
    agents: tuple[InfrastructureAgent, ...]
    other_pods: tuple[str, ...] = ()

    def expects(self, pod: str) -> bool:
        """Whether a pod of this name is expected in the group's namespaces. A name proves nothing."""
        names = (*(each.name for each in self.agents if not each.unit), *self.other_pods)
        return any(pod == each or pod.startswith(f"{each}-") for each in names)

    @property
    def units(self) -> frozenset[InfrastructureUnit]:
        return frozenset(InfrastructureUnit(each.unit, each.agent_class) for each in self.agents if each.unit)

    @property
    def pods(self) -> frozenset[InfrastructurePod]:
        return frozenset(
            InfrastructurePod(namespace, account, each.agent_class)
            for each in self.agents
            if not each.unit
            for namespace in self.namespaces
            for account in each.service_accounts or ("",)
        )


InfrastructureTable = Mapping[str, InfrastructureGroup]
"""Groups by name."""


_AGENT = SectionFormat(
    "InfrastructureAgent",
    "One agent: a systemd unit, or pods in the namespaces of its group.",
    (
        KeyFormat("group", NAME, "The group that it belongs to: one of groups.", required=True, example="gpu-operator"),
        KeyFormat(
            "name",
            NAME,
            "Its name, or the beginning of the names of its pods. For people only.",
            required=True,
            example="nvidia-dcgm",
        ),
        KeyFormat("unit", SYSTEMD_UNIT, "Its systemd unit; without it, the agent is a pod.", example="gpud.service"),
        KeyFormat(
            "serviceAccounts",
            ListOf(SERVICE_ACCOUNT_PATTERN, "[nvidia-dcgm]"),
            "The service accounts of its pods. Checked where a pod has a token of its account; omitted: any.",
            example="[nvidia-dcgm]",
        ),
        KeyFormat(
            "class", Choice(InfrastructureClass), "What it does with devices.", required=True, example="monitoring"
        ),
        KeyFormat(
            "processes",
            ListOf(NON_EMPTY_TEXT, "[nv-hostengine]"),
            "The names of its processes. For people only.",
            example="[nv-hostengine]",
        ),
        KeyFormat("source", NON_EMPTY_TEXT, "The origin of the row: one of sources.", required=True, example="chart"),
    ),
)
_GROUP = SectionFormat(
    "InfrastructureTableGroup",
    "Agents that a policy allows together.",
    (
        KeyFormat("note", NON_EMPTY_TEXT, "What they are.", required=True, example="agents of a cloud"),
        KeyFormat(
            "namespaces",
            ListOf(DNS_NAME, "[gpu-operator]"),
            "The namespaces of their pods. Users who may create pods there are trusted with every device.",
            example="[gpu-operator]",
        ),
        KeyFormat(
            "otherPods",
            ListOf(NAME, "[gpu-operator]"),
            "Beginnings of the names of other pods that are expected in these namespaces. For people only.",
            example="[gpu-operator]",
        ),
    ),
)


class _InfrastructureFile(SectionFormat):
    """The complete table. Reading returns its groups by name."""

    def read(self, raw: Any, where: Location) -> dict[str, InfrastructureGroup]:
        values = super().read(raw, where)
        groups, sources = values["groups"], values["sources"]
        agents: dict[str, list[InfrastructureAgent]] = {name: [] for name in groups}
        for position, entry in enumerate(values["agents"]):
            at = (*where, "agents", position)
            self._check(entry, at, groups, sources)
            if any(each.name == entry["name"] for each in agents[entry["group"]]):
                refuse((*at, "name"), f'"{entry["name"]}" is already listed in this group; keep one of them')
            agents[entry["group"]].append(
                InfrastructureAgent(
                    entry["group"],
                    entry["name"],
                    entry["class"],
                    entry["source"],
                    entry.get("unit", ""),
                    tuple(entry.get("serviceAccounts", ())),
                    tuple(entry.get("processes", ())),
                )
            )
        for name, members in agents.items():
            if not members:
                refuse((*where, "groups", name), "no agent is in this group; add one to agents, or remove the group")
        return {
            name: InfrastructureGroup(
                name,
                " ".join(group["note"].split()),
                tuple(group.get("namespaces", ())),
                tuple(agents[name]),
                tuple(group.get("otherPods", ())),
            )
            for name, group in groups.items()
        }

    def _check(self, entry: Mapping[str, Any], at: Location, groups: Mapping[str, Any], sources: Iterable[str]) -> None:
        if entry["group"] not in groups:
            message = (
                f'the group "{entry["group"]}" is not explained; write one of {", ".join(groups)}, or add it to groups'
            )
            refuse((*at, "group"), message)
        if entry["source"] not in sources:
            message = f'the source "{entry["source"]}" is not explained; write one of {", ".join(sources)}, or add it to sources'
            refuse((*at, "source"), message)
        if "unit" in entry and "serviceAccounts" in entry:
            refuse((*at, "serviceAccounts"), "a systemd unit has no service account; remove one of the two keys")
        if "unit" not in entry and not groups[entry["group"]].get("namespaces"):
            message = (
                f'the group "{entry["group"]}" has no namespaces, so no pod can be in it; write the unit of the agent'
            )
            refuse((*at, "name"), message)


_FILE = _InfrastructureFile(
    "InfrastructureFile",
    "Agents that hold the devices of a node without being tenants.",
    (
        KeyFormat(
            "sources",
            MappingOf(NON_EMPTY_TEXT),
            "The origins of rows, each with an explanation.",
            required=True,
            example="{chart: the chart's defaults}",
        ),
        KeyFormat(
            "groups",
            MappingOf(_GROUP),
            "The groups that a policy can allow.",
            required=True,
            example="{cloud: {note: agents of a cloud, namespaces: [kube-system]}}",
        ),
        KeyFormat(
            "agents",
            ListOf(_AGENT),
            "One row for each agent.",
            required=True,
            example="[{group: cloud, name: agent, class: monitoring, source: chart}]",
        ),
    ),
)


def load_infrastructure_table(path: Path | None = None) -> InfrastructureTable:
    """Load the table at ``path``, or the bundled one.

    Raises:
        InvalidConfiguration: it cannot be read or is not a valid table.
    """
    return _bundled() if path is None else _load(path, bundled=False)


@cache
def _bundled() -> InfrastructureTable:
    return _load(bundled_infrastructure_table(), bundled=True)


def _load(path: Path, *, bundled: bool) -> InfrastructureTable:
    return parse_infrastructure_table(
        read_configuration_file(path, "table of infrastructure"), str(path), bundled=bundled
    )


def parse_infrastructure_table(content: bytes, name: str, *, bundled: bool = False) -> InfrastructureTable:
    """Parse the table in ``content``.

    ``name`` is the name of the file in messages; ``bundled``: whether it is bundled with the program.

    Raises:
        InvalidConfiguration: one line for each error, in the order of the file: ``FILE:LINE: what is wrong; what
            helps``.
    """
    document = parse_yaml(content, name, bundled=bundled)
    if not isinstance(document.value, dict):
        raise InvalidConfiguration(
            f"{name}:{document.line(())}: a table of infrastructure is a mapping with the keys sources, groups and "
            "agents; begin with a line such as sources:."
        )
    found: InfrastructureTable = read_document(_FILE, document, name)
    return found


def with_groups(infrastructure: Infrastructure, table: InfrastructureTable) -> Infrastructure:
    """Return ``infrastructure`` with the units and pods of its groups, and those that it lists itself."""
    groups = [table[name] for name in infrastructure.groups if name in table]
    units = (InfrastructureUnit(each) for each in infrastructure.systemd_units)
    return replace(
        infrastructure,
        all_units=frozenset(units).union(*(each.units for each in groups)),
        all_pods=infrastructure.pods.union(*(each.pods for each in groups)),
    )


def infrastructure_schema() -> dict[str, Any]:
    """JSON Schema (2020-12) of the table, for editors; generated into ``policies/schema/``."""
    return json_schema(_FILE, "Infrastructure")
