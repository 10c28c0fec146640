"""The sections of a policy file that say what a hand-over must rest on, and how it is proved.

What a file leaves out has the domain's default. A value that could not work on any node is refused here, where file and
line are still known.
"""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import BeforeValidator, Field, model_validator

from scrubber.config.policy_values import (
    DnsName,
    PositiveSeconds,
    QuestionSeconds,
    Rate,
    Seconds,
    Size,
    Unit,
    choice,
    refuse,
)
from scrubber.config.quantities import parse_rate
from scrubber.config.section import Section
from scrubber.domain.basis import HandOver
from scrubber.domain.diagnosis import CHECKS, Level
from scrubber.domain.basis import HandOver
from scrubber.domain.policy import DiagnosticsRule, Envvar, Infrastructure, Limits, MemoryRule, Policy, Proof

__all__ = [
    "DeviceLimitsSection",
    "DiagnosticsSection",
    "HandOverSection",
    "InfrastructureSection",
    "InjectionSection",
    "LevelWord",
    "LimitsSection",
    "MemorySection",
]

KUBELET_PRESTART_SECONDS = 30.0
"""The kubelet's own deadline on PreStartContainer; an answer after it reaches nobody."""

_POLICY = Policy()
_LIMITS, _MEMORY = _POLICY.limits, _POLICY.memory
_DIAGNOSTICS, _INFRASTRUCTURE = _POLICY.diagnostics, _POLICY.infrastructure

ProofWord = Annotated[Proof, choice(Proof)]
LevelWord = Annotated[Level, choice(Level)]


class HandOverSection(Section):
    """What each kind of hand-over must rest on: a certificate issued since the last grant, or the checks alone."""

    same_container: ProofWord = Field(
        _POLICY.proof_for(HandOver.SAME_CONTAINER), description="The same container starts again."
    )
    same_pod: ProofWord = Field(_POLICY.proof_for(HandOver.SAME_POD), description="Another container of the same pod.")
    same_tenant: ProofWord = Field(
        _POLICY.proof_for(HandOver.SAME_TENANT), description="Another pod of the same tenant."
    )
    other_tenant: ProofWord = Field(
        _POLICY.proof_for(HandOver.OTHER_TENANT), description="A pod of another tenant. Always by certificate."
    )
    unknown: ProofWord = Field(
        _POLICY.proof_for(HandOver.UNKNOWN), description="Nobody knows whose pod it was. Always by certificate."
    )

    @model_validator(mode="after")
    def _strangers_need_proof(self) -> Self:
        for kind in (HandOver.OTHER_TENANT, HandOver.UNKNOWN):
            if self.proofs()[kind] is Proof.CHECKS:
                refuse(
                    f'"{kind.value}" always needs a certificate, because checks say nothing about what is in the memory; '
                    'write "certificate" (to judge without refusing: enforcement: observe)',
                    kind.value,
                )
        return self

    def proofs(self) -> dict[HandOver, Proof]:
        return {kind: getattr(self, kind.value.replace("-", "_")) for kind in HandOver}


class DeviceLimitsSection(Section):
    """How long things may take on a device."""

    slow_path: PositiveSeconds = Field(_LIMITS.slow_path, description="A scrub that outlives it is abandoned.")
    memory_floor: PositiveSeconds = Field(
        _LIMITS.memory_floor, description="The least time an eraser gets, whatever the size."
    )
    memory_rate: Rate = Field(
        _LIMITS.memory_bytes_per_second, description="Bytes per second: the slowest clearing that is still waited for."
    )
    reset: PositiveSeconds = Field(_LIMITS.reset, description="One device reset.")
    dying_grace: Seconds = Field(
        _LIMITS.dying_grace,
        description="How long processes of a pod that is gone may live on before they are leftovers.",
    )
    settle: Seconds = Field(
        _LIMITS.settle, description="How long nobody must hold the device before a pod of unknown UID counts as over."
    )
    temperature_celsius: int = Field(
        _LIMITS.temperature_celsius, ge=40, le=150, description="A device that is hotter is suspect."
    )


class LimitsSection(DeviceLimitsSection):
    """How long things may take, and how much may happen at once."""

    hand_over: PositiveSeconds = Field(
        _LIMITS.hand_over, description="A waiting PreStartContainer is refused after this; the kubelet gives it 30 s."
    )
    question: QuestionSeconds = Field(_LIMITS.question, description="One question to the driver.")
    eraser_slots: int = Field(_LIMITS.eraser_slots, ge=1, le=256, description="Erasers at once on the node.")
    break_glass: PositiveSeconds = Field(
        _LIMITS.break_glass,
        description="The longest that a person may have a device handed out whatever is known of it.",
    )

    def checked(self) -> Self:
        """Itself, if its times fit each other; they may come from a file and an override of it."""
        if self.hand_over >= KUBELET_PRESTART_SECONDS:
            refuse(
                f"a hand-over cannot wait {self.hand_over:g} s: the kubelet gives PreStartContainer 30 s, and an answer "
                "after that reaches nobody; write less than 30s, such as 25s",
                "hand-over",
            )
        if self.question >= self.hand_over:
            refuse(
                f"one question to the driver ({self.question:g} s) cannot take as long as the whole hand-over "
                f"({self.hand_over:g} s); write less",
                "question",
            )
        if self.reset >= self.slow_path:
            refuse(
                f"a reset ({self.reset:g} s) is one step of the slow path ({self.slow_path:g} s) and cannot take as long "
                "as all of it; write a shorter reset or a longer slow-path",
                "reset",
            )
        return self

    def rule(self) -> Limits:
        return Limits(
            hand_over=self.hand_over,
            slow_path=self.slow_path,
            memory_floor=self.memory_floor,
            memory_bytes_per_second=self.memory_rate,
            question=self.question,
            reset=self.reset,
            dying_grace=self.dying_grace,
            settle=self.settle,
            eraser_slots=self.eraser_slots,
            break_glass=self.break_glass,
            temperature_celsius=self.temperature_celsius,
        )


class MemorySection(Section):
    """How memory is cleared. Clearing and verifying are not optional."""

    audit: bool = Field(_MEMORY.audit, description="Read before writing, and count the residue.")
    pattern: bool = Field(_MEMORY.pattern, description="A pass with an address-derived pattern before the zeros.")
    on_chip: bool = Field(
        _MEMORY.on_chip, description="Clear shared memory and registers of every processor too, where there are any."
    )
    max_uncovered: Size = Field(
        _MEMORY.max_uncovered,
        description="Bytes that may stay out of reach, the driver's own reserve apart; more means that somebody has them.",
    )

    def rule(self) -> MemoryRule:
        return MemoryRule(
            audit=self.audit, pattern=self.pattern, on_chip=self.on_chip, max_uncovered=self.max_uncovered
        )


def _floors(written: object) -> dict[str, dict[str, float]]:
    """For patterns of model names, the least rate of each check: ``{"NVIDIA H200*": {"host-to-device": "20GB/s"}}``."""
    if not isinstance(written, dict):
        refuse('floors are patterns of model names, each with its checks below it, such as "NVIDIA H200*"')
    floors: dict[str, dict[str, float]] = {}
    for model, rates in written.items():
        if not isinstance(rates, dict):
            refuse(f"write checks below the pattern, each with its rate; known are {', '.join(CHECKS)}", model)
        floors[model] = {}
        for check, rate in rates.items():
            if check not in CHECKS:
                refuse(f"this is not a check; known are {', '.join(CHECKS)}", model, check)
            try:
                floors[model][check] = float(parse_rate(rate))
            except ValueError as error:
                refuse(str(error), model, check)
    return floors


Floors = Annotated[dict[str, dict[str, float]], BeforeValidator(_floors)]


class DiagnosticsSection(Section):
    """How thoroughly a device is tried out, and what it must achieve: quick 1 s, standard 10 s, extended 60 s."""

    slow_path: LevelWord = Field(_DIAGNOSTICS.slow_path, description="In every slow path.")
    recovery: LevelWord = Field(
        _DIAGNOSTICS.recovery, description="In the scrub that ends a quarantine, if that is more."
    )
    floors: Floors = Field(
        {},
        description="For a pattern of model names the least rate by check, in operations or bytes per second.",
        json_schema_extra={"additionalProperties": {"propertyNames": {"enum": list(CHECKS)}}},
    )

    def rule(self) -> DiagnosticsRule:
        return DiagnosticsRule(slow_path=self.slow_path, recovery=self.recovery, floors=self.floors)


class ServiceAccount(Section):
    """A pod of the node's own infrastructure, by what no tenant can choose."""

    namespace: DnsName = Field(description="The pod's namespace.", examples=["gpu-operator"])
    service_account: DnsName = Field(description="The pod's service account.", examples=["nvidia-dcgm-exporter"])


class InfrastructureSection(Section):
    """Holders that belong to the node: left alone, noted, and in the way of a reset. Never by process name."""

    units: list[Unit] = Field(sorted(_INFRASTRUCTURE.units), description="systemd units, such as nvidia-dcgm.service.")
    pods: list[ServiceAccount] = Field([], description="Pods by namespace and service account.")

    def rule(self) -> Infrastructure:
        pods = frozenset((pod.namespace, pod.service_account) for pod in self.pods)
        return Infrastructure(units=frozenset(self.units), pods=pods)


class InjectionSection(Section):
    """How a container is given its devices."""

    envvar: Annotated[Envvar, choice(Envvar)] = Field(
        _POLICY.injection.envvar,
        description="refuse: not by NVIDIA_VISIBLE_DEVICES, because any pod can set that variable.",
    )
