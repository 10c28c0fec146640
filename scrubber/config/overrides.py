"""For some devices another policy: what an override may say, and which devices it is for.

An override names nodes, models, resources or several of these, and only what differs: everything else is as in the file that
it stands in. The first that fits counts, so one that an earlier one always hides is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Annotated, Any, Self

from pydantic import ConfigDict, Field, model_validator

from scrubber.config.health_sections import HealthSection, MaintenanceSection, RecoverySection, XidSection
from scrubber.config.policy_values import Name, Resource, Setting, choice, refuse
from scrubber.config.proof_sections import (
    DeviceLimitsSection,
    DiagnosticsSection,
    HandOverSection,
    LimitsSection,
    MemorySection,
)
from scrubber.config.section import Section
from scrubber.domain.policy import Enforcement, Policy, ResetUse, Sharing, Ungranted, Uninspectable

__all__ = ["OverrideSection", "reachable"]

_POLICY = Policy()
_OF_THE_NODE = ("breaker", "infrastructure", "injection", "overrides", "stuck")
_HEALTH_OF_THE_NODE = ("blame",)
_LIMITS_OF_THE_NODE = {str(field.alias) for field in LimitsSection.model_fields.values()} - {
    str(field.alias) for field in DeviceLimitsSection.model_fields.values()
}


def _for_editors(schema: dict[str, Any]) -> None:
    """What an override leaves out is as in its file, and not as in the program; and it is for somebody."""
    for each in schema["properties"].values():
        each.pop("default", None)
    schema["anyOf"] = [{"required": [each]} for each in ("nodes", "models", "resources")]


class OverrideLimitsSection(DeviceLimitsSection):
    """How long things may take on these devices."""

    @model_validator(mode="before")
    @classmethod
    def _none_of_the_node(cls, written: Any) -> Any:
        return _of_the_device(written, _LIMITS_OF_THE_NODE, "limits")


class OverrideSection(Section):
    """What differs for some devices. Keys that are not written are as in the rest of the file."""

    model_config = ConfigDict(json_schema_extra=_for_editors)

    name: Name = Field(description="The policy of these devices is called by the file's name, a slash, and this.")
    nodes: list[Annotated[str, Field(min_length=1)]] = Field([], description="Patterns of names of nodes: gpu-test-*.")
    models: list[Annotated[str, Field(min_length=1)]] = Field([], description="Patterns of model names: NVIDIA H200*.")
    resources: list[Resource] = Field([], description="Names of the kubelet's resources: nvidia.com/gpu.")
    hand_over: HandOverSection = Field(default_factory=HandOverSection)
    reset: Annotated[ResetUse, choice(ResetUse)] = Field(
        _POLICY.reset, description="Whether a slow path resets the device."
    )
    sharing: Annotated[Sharing, choice(Sharing)] = Field(
        _POLICY.sharing, description="Who may have the device at the same time."
    )
    enforcement: Annotated[Enforcement, choice(Enforcement)] = Field(
        _POLICY.enforcement, description="observe: judge and record everything; refuse nothing, end nobody."
    )
    ungranted: Annotated[Ungranted, choice(Ungranted)] = Field(
        _POLICY.ungranted, description="What follows when the device is used without a grant."
    )
    uninspectable: Annotated[Uninspectable, choice(Uninspectable)] = Field(
        _POLICY.uninspectable, description="What follows when a process of a pod cannot be looked through."
    )
    limits: OverrideLimitsSection = Field(default_factory=OverrideLimitsSection)
    memory: MemorySection = Field(default_factory=MemorySection)
    diagnostics: DiagnosticsSection = Field(default_factory=DiagnosticsSection)
    health: HealthSection = Field(default_factory=HealthSection)
    recovery: RecoverySection = Field(default_factory=RecoverySection)
    maintenance: MaintenanceSection = Field(default_factory=MaintenanceSection)
    settings: dict[str, Setting] = Field(
        {}, description="Win over the driver's defaults when settings are brought back."
    )
    xids: XidSection = Field(default_factory=XidSection)

    @model_validator(mode="before")
    @classmethod
    def _none_of_the_node(cls, written: Any) -> Any:
        if isinstance(written, dict):
            _of_the_device(written.get("health"), _HEALTH_OF_THE_NODE, "health", "health")
        return _of_the_device(written, _OF_THE_NODE, "the policy itself")

    @model_validator(mode="after")
    def _is_for_somebody(self) -> Self:
        if not self.nodes and not self.models and not self.resources:
            refuse(
                f'the override "{self.name}" says for no devices; write models: ["NVIDIA H200*"], '
                'resources: [nvidia.com/gpu] or nodes: ["gpu-test-*"], or several of these'
            )
        return self

    @property
    def changed(self) -> frozenset[str]:
        """The fields that were written, apart from those that say for which devices."""
        return frozenset(self.model_fields_set - {"name", "nodes", "models", "resources"})

    def hides(self, later: OverrideSection) -> bool:
        """Whether every device that ``later`` fits is one that this one fits."""
        wider = _all_within(later.models, self.models) and _all_within(later.nodes, self.nodes)
        return wider and (not self.resources or (bool(later.resources) and {*later.resources} <= {*self.resources}))


def reachable(entries: Sequence[OverrideSection]) -> Sequence[OverrideSection]:
    """``entries``, if each has a name of its own and can be the first that fits some device."""
    for position, later in enumerate(entries):
        for earlier in entries[:position]:
            if earlier.name == later.name:
                refuse(f'two overrides are called "{later.name}"; give one of them another name', position, "name")
            if earlier.hides(later):
                refuse(
                    f'"{later.name}" never counts: "{earlier.name}" comes first and fits all of its devices; '
                    f'put it before "{earlier.name}", or remove it',
                    position,
                    "name",
                )
    return entries


def _all_within(patterns: Sequence[str], wider: Sequence[str]) -> bool:
    """Whether what ``patterns`` match, one of the ``wider`` ones is sure to match; no pattern matches everything."""
    if not wider or "*" in wider:
        return True
    return bool(patterns) and all(any(_within(one, each) for each in wider) for one in patterns)


def _within(pattern: str, wider: str) -> bool:
    """Whether what ``pattern`` matches, ``wider`` is sure to match."""
    if pattern == wider:
        return True
    # A star of the pattern is swallowed by a star of the wider one, and by nothing else that stands for one character.
    certain = not any(each in wider for each in "?[") or not any(each in pattern for each in "*?[")
    return certain and fnmatchcase(pattern, wider)


def _of_the_device(written: Any, of_the_node: Sequence[str] | set[str], place: str, *at: str) -> Any:
    if isinstance(written, dict):
        for key in written:
            if key in of_the_node:
                refuse(f'"{key}" counts for the whole node, not for some devices; write it in {place}', *at, key)
    return written
