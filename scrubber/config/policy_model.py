"""The shape of a policy file, and the only place where its keys and their limits are written down.

The file's model is not the domain's: keys are spelled for administrators, times may carry units, XIDs come in ranges.
What a file leaves out has the domain's default, so a policy says only what it changes. A value that could not work on
any node is refused here, where file and line are still known.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import StrEnum
from typing import Annotated, Any, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema, model_validator

from scrubber.config.policy_values import Codes, PositiveSeconds, QuestionSeconds, Rate, Seconds, Size, choice, refuse
from scrubber.config.quantities import parse_rate
from scrubber.domain.diagnosis import CHECKS, Level
from scrubber.domain.handover import HandOver
from scrubber.domain.policy import (
    DiagnosticsRule,
    Enforcement,
    Infrastructure,
    Limits,
    MemoryRule,
    Policy,
    Proof,
    RecoveryRule,
    ResetUse,
    Sharing,
    Ungranted,
    XidClass,
)

__all__ = ["UNIT", "PolicyFile", "policy_schema"]

KUBELET_PRESTART_SECONDS = 30.0
"""The kubelet's own deadline on PreStartContainer; an answer after it reaches nobody."""

_POLICY = Policy()
_LIMITS, _MEMORY, _RECOVERY = _POLICY.limits, _POLICY.memory, _POLICY.recovery
_DIAGNOSTICS, _INFRASTRUCTURE = _POLICY.diagnostics, _POLICY.infrastructure


ProofWord = Annotated[Proof, choice(Proof)]


_DNS = r"^[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?$"
UNIT = r"^[A-Za-z0-9:_.@-]+\.service$"


def _hyphens(name: str) -> str:
    return name.replace("_", "-")


class _Section(BaseModel):
    """Strict and closed: what is not known is refused, and nothing is converted behind the administrator's back."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, alias_generator=_hyphens)


class HandOverSection(_Section):
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


class LimitsSection(_Section):
    """How long things may take, and how much may happen at once."""

    hand_over: PositiveSeconds = Field(
        _LIMITS.hand_over, description="A waiting PreStartContainer is refused after this; the kubelet gives it 30 s."
    )
    slow_path: PositiveSeconds = Field(_LIMITS.slow_path, description="A scrub that outlives it is abandoned.")
    memory_floor: PositiveSeconds = Field(
        _LIMITS.memory_floor, description="The least time an eraser gets, whatever the size."
    )
    memory_rate: Rate = Field(
        _LIMITS.memory_bytes_per_second, description="Bytes per second: the slowest clearing that is still waited for."
    )
    question: QuestionSeconds = Field(_LIMITS.question, description="One question to the driver.")
    reset: PositiveSeconds = Field(_LIMITS.reset, description="One device reset.")
    dying_grace: Seconds = Field(
        _LIMITS.dying_grace,
        description="How long processes of a pod that is gone may live on before they are leftovers.",
    )
    settle: Seconds = Field(
        _LIMITS.settle, description="How long nobody must hold the device before a pod of unknown UID counts as over."
    )
    eraser_slots: int = Field(_LIMITS.eraser_slots, ge=1, le=256, description="Erasers at once on the node.")
    temperature_celsius: int = Field(
        _POLICY.max_temperature_celsius, ge=40, le=150, description="A device that is hotter is suspect."
    )

    @model_validator(mode="after")
    def _times_are_possible(self) -> Self:
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


class MemorySection(_Section):
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
LevelWord = Annotated[Level, choice(Level)]


class DiagnosticsSection(_Section):
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


class ServiceAccount(_Section):
    """A pod of the node's own infrastructure, by what no tenant can choose."""

    namespace: str = Field(pattern=_DNS, description="The pod's namespace.")
    service_account: str = Field(pattern=_DNS, description="The pod's service account.")


class InfrastructureSection(_Section):
    """Holders that belong to the node: left alone, noted, and in the way of a reset. Never by process name."""

    units: list[Annotated[str, Field(pattern=UNIT)]] = Field(
        sorted(_INFRASTRUCTURE.units), description="systemd units, such as nvidia-dcgm.service."
    )
    pods: list[ServiceAccount] = Field([], description="Pods by namespace and service account.")


class Envvar(StrEnum):
    """Whether a device may be announced to a container runtime by an environment variable."""

    ALLOW = "allow"
    REFUSE = "refuse"


class InjectionSection(_Section):
    """How a container is given its devices."""

    envvar: Annotated[Envvar, choice(Envvar)] = Field(
        Envvar.REFUSE if _POLICY.envvar_refused else Envvar.ALLOW,
        description="refuse: not by NVIDIA_VISIBLE_DEVICES, because any pod can set that variable.",
    )


class RecoverySection(_Section):
    """The way back of a quarantined device."""

    backoff_initial: PositiveSeconds = Field(
        _RECOVERY.backoff_initial, description="Pause before the first attempt; doubled at each failure."
    )
    backoff_max: PositiveSeconds = Field(_RECOVERY.backoff_max, description="The longest pause between attempts.")
    attempts: int = Field(
        _RECOVERY.attempts, ge=1, le=1000, description="Failed attempts after which the device is condemned."
    )
    probation_scrubs: int = Field(
        _RECOVERY.probation_scrubs, ge=1, le=1000, description="Clean slow paths in a row that end the probation."
    )
    probation_interval: Seconds = Field(
        _RECOVERY.probation_interval, description="Pause between the scrubs of the probation."
    )

    @model_validator(mode="after")
    def _pauses_grow(self) -> Self:
        if self.backoff_max < self.backoff_initial:
            refuse(
                f"the longest pause ({self.backoff_max:g} s) is shorter than the first ({self.backoff_initial:g} s); "
                "write a backoff-max of at least backoff-initial",
                "backoff-max",
            )
        return self


class XidSection(_Section):
    """What an XID means for the device. A code that is not named here has the class of the shipped default."""

    ignore: list[Codes] = Field([], description="Nothing happens.")
    application: list[Codes] = Field([], description="The application's own fault; the device is well.")
    reset: list[Codes] = Field([], description="The device is quarantined until a reset.")
    reboot: list[Codes] = Field([], description="The device is quarantined until a reboot of the node.")
    context: list[Codes] = Field([], description="It depends on what else is seen.")
    service: list[Codes] = Field([], description="The device needs a person.")
    unknown: list[Codes] = Field([], description="Treat like a code that nobody listed.")

    @model_validator(mode="after")
    def _one_class_each(self) -> Self:
        seen: dict[int, XidClass] = {}
        for kind, position, code in self._codes():
            if code in seen:
                places = dict.fromkeys((seen[code].value, kind.value))
                refuse(
                    f"XID {code} is listed twice, under {' and '.join(places)}; keep one of them",
                    kind.value,
                    position,
                )
            seen[code] = kind
        return self

    def _codes(self) -> Iterator[tuple[XidClass, int, int]]:
        for kind in XidClass:
            entries: list[tuple[int, ...]] = getattr(self, kind.value)
            for position, codes in enumerate(entries):
                for code in codes:
                    yield kind, position, code

    def classes(self) -> dict[int, XidClass]:
        return {code: kind for kind, _, code in self._codes()}


def _setting(written: object) -> str:
    if isinstance(written, bool) or not isinstance(written, str | int | float):
        refuse('a setting is a word or a number; quote it if it must read true or false, as in "true"')
    return str(written)


Setting = Annotated[str, BeforeValidator(_setting), WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "number"}]})]


class PolicyFile(_Section):
    """A policy of the scrub service: which proof each hand-over needs, how long things may take, what a fault means."""

    name: str = Field(pattern=r"^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$", description="Appears in every certificate.")
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
    limits: LimitsSection = Field(default_factory=LimitsSection)
    memory: MemorySection = Field(default_factory=MemorySection)
    recovery: RecoverySection = Field(default_factory=RecoverySection)
    diagnostics: DiagnosticsSection = Field(default_factory=DiagnosticsSection)
    infrastructure: InfrastructureSection = Field(default_factory=InfrastructureSection)
    injection: InjectionSection = Field(default_factory=InjectionSection)
    settings: dict[str, Setting] = Field(
        {}, description="Win over the driver's defaults when settings are brought back."
    )
    xids: XidSection = Field(default_factory=XidSection)

    def policy(self) -> Policy:
        """The domain's values; the digest is still empty."""
        limits = self.limits
        return Policy(
            name=self.name,
            proofs=self.hand_over.proofs(),
            reset=self.reset,
            sharing=self.sharing,
            enforcement=self.enforcement,
            ungranted=self.ungranted,
            limits=Limits(
                hand_over=limits.hand_over,
                slow_path=limits.slow_path,
                memory_floor=limits.memory_floor,
                memory_bytes_per_second=limits.memory_rate,
                question=limits.question,
                reset=limits.reset,
                dying_grace=limits.dying_grace,
                settle=limits.settle,
                eraser_slots=limits.eraser_slots,
            ),
            memory=MemoryRule(
                audit=self.memory.audit,
                pattern=self.memory.pattern,
                on_chip=self.memory.on_chip,
                max_uncovered=self.memory.max_uncovered,
            ),
            diagnostics=DiagnosticsRule(
                slow_path=self.diagnostics.slow_path,
                recovery=self.diagnostics.recovery,
                floors=self.diagnostics.floors,
            ),
            infrastructure=Infrastructure(
                units=frozenset(self.infrastructure.units),
                pods=frozenset((pod.namespace, pod.service_account) for pod in self.infrastructure.pods),
            ),
            envvar_refused=self.injection.envvar is Envvar.REFUSE,
            recovery=RecoveryRule(
                backoff_initial=self.recovery.backoff_initial,
                backoff_max=self.recovery.backoff_max,
                attempts=self.recovery.attempts,
                probation_scrubs=self.recovery.probation_scrubs,
                probation_interval=self.recovery.probation_interval,
            ),
            settings=dict(self.settings),
            xids=self.xids.classes(),
            max_temperature_celsius=limits.temperature_celsius,
        )


def policy_schema() -> dict[str, Any]:
    """JSON Schema (2020-12) of a policy file, for editors; ``policies/schema/`` holds it, generated."""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **PolicyFile.model_json_schema(by_alias=True, mode="validation"),
        "title": "Scrub policy",
    }
