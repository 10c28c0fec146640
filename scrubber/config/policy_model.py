"""The shape of a policy file: its sections, its overrides, and the domain's policy that they make.

The file's model is not the domain's: keys are spelled for administrators, times may carry units, XIDs come in ranges.
What a file leaves out has the domain's default, so a policy says only what it changes.
"""

from __future__ import annotations

from typing import Annotated, Any, Self

from pydantic import AfterValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from scrubber.config.health_sections import (
    BreakerSection,
    HealthSection,
    MaintenanceSection,
    RecoverySection,
    StuckSection,
    XidSection,
)
from scrubber.config.overrides import OverrideSection, reachable
from scrubber.config.policy_values import Name, Setting, choice, refuse
from scrubber.config.proof_sections import (
    DiagnosticsSection,
    HandOverSection,
    InfrastructureSection,
    InjectionSection,
    LimitsSection,
    MemorySection,
)
from scrubber.config.section import Section
from scrubber.domain.policy import Enforcement, Injection, Override, Policy, ResetUse, Sharing, Ungranted, Uninspectable

__all__ = ["PolicyFile", "policy_schema"]

_POLICY = Policy()


class PolicyFile(Section):
    """A policy of the scrub service: which proof each hand-over needs, how long things may take, what a fault means."""

    name: Name = Field(description="Appears in every certificate.")
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
        _POLICY.ungranted,
        description="What follows when a device is used without a grant: it is handed to nobody meanwhile, or is out of "
        "service until it was scrubbed, or processes of pods that do it are ended after dying-grace.",
    )
    uninspectable: Annotated[Uninspectable, choice(Uninspectable)] = Field(
        _POLICY.uninspectable,
        description="What follows when a process of a pod cannot be looked through in several walks over /proc: it is "
        "reported, or it is ended. Processes of the node never are.",
    )
    limits: Annotated[LimitsSection, AfterValidator(LimitsSection.checked)] = Field(default_factory=LimitsSection)
    memory: MemorySection = Field(default_factory=MemorySection)
    diagnostics: DiagnosticsSection = Field(default_factory=DiagnosticsSection)
    health: HealthSection = Field(default_factory=HealthSection)
    recovery: Annotated[RecoverySection, AfterValidator(RecoverySection.checked)] = Field(
        default_factory=RecoverySection
    )
    breaker: BreakerSection = Field(default_factory=BreakerSection)
    maintenance: MaintenanceSection = Field(default_factory=MaintenanceSection)
    stuck: StuckSection = Field(default_factory=StuckSection)
    infrastructure: InfrastructureSection = Field(default_factory=InfrastructureSection)
    injection: InjectionSection = Field(default_factory=InjectionSection)
    settings: dict[str, Setting] = Field(
        {}, description="Win over the driver's defaults when settings are brought back."
    )
    xids: XidSection = Field(default_factory=XidSection)
    overrides: Annotated[list[OverrideSection], AfterValidator(reachable)] = Field(
        [], description="For some devices another policy. The first that fits counts."
    )

    @model_validator(mode="after")
    def _overrides_are_possible(self) -> Self:
        """A key of an override may fit all the others of its section, and not those that it leaves to the file."""
        for position, entry in enumerate(self.overrides):
            changed = self.overridden_by(entry)
            for name, section in (("limits", changed.limits), ("recovery", changed.recovery)):
                try:
                    section.checked()
                except PydanticCustomError as error:
                    context = error.context or {}
                    refuse(context["sentence"], "overrides", position, name, *context["at"])
        return self

    def overridden_by(self, entry: OverrideSection) -> PolicyFile:
        """This file as if it had been written for the devices of ``entry`` alone."""
        changes: dict[str, object] = {"name": f"{self.name}/{entry.name}", "overrides": []}
        for name in entry.changed:
            before, after = getattr(self, name), getattr(entry, name)
            if isinstance(before, Section):
                after = before.changed_by(after)
            elif isinstance(before, dict):
                after = {**before, **after}
            changes[name] = after
        return self.model_copy(update=changes)

    def policy(self) -> Policy:
        """The domain's values; the digests are still empty."""
        return Policy(
            name=self.name,
            proofs=self.hand_over.proofs(),
            reset=self.reset,
            sharing=self.sharing,
            enforcement=self.enforcement,
            ungranted=self.ungranted,
            uninspectable=self.uninspectable,
            limits=self.limits.rule(),
            memory=self.memory.rule(),
            health=self.health.rule(),
            recovery=self.recovery.rule(),
            breaker=self.breaker.rule(),
            maintenance=self.maintenance.rule(),
            stuck=self.stuck.rule(),
            diagnostics=self.diagnostics.rule(),
            infrastructure=self.infrastructure.rule(),
            injection=Injection(self.injection.envvar),
            settings=dict(self.settings),
            xids=self.xids.classes(),
            overrides=tuple(
                Override(
                    self.overridden_by(entry).policy(), tuple(entry.nodes), tuple(entry.models), tuple(entry.resources)
                )
                for entry in self.overrides
            ),
        )


def policy_schema() -> dict[str, Any]:
    """JSON Schema (2020-12) of a policy file, for editors; ``policies/schema/`` holds it, generated."""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **PolicyFile.model_json_schema(by_alias=True, mode="validation"),
        "title": "Scrub policy",
    }
