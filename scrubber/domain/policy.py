"""A policy: which proof a kind of hand-over needs, how long things may take, and what a fault means."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from fnmatch import fnmatchcase

from scrubber.domain.basis import HandOver
from scrubber.domain.diagnosis import Level
from scrubber.domain.evidence import Occasion, Path, Step

__all__ = [
    "BreakerRule",
    "DiagnosticsRule",
    "Enforcement",
    "HealthRule",
    "Infrastructure",
    "Limits",
    "MaintenanceRule",
    "MemoryRule",
    "News",
    "Override",
    "Plan",
    "Policy",
    "Proof",
    "RecoveryRule",
    "ResetUse",
    "Sharing",
    "StuckRule",
    "Ungranted",
    "Uninspectable",
    "XidClass",
]


class Proof(StrEnum):
    """What a hand-over must rest on."""

    CERTIFICATE = "certificate"
    """Issued since the last grant."""
    CHECKS = "checks"
    """The fast path's checks alone: the named exception, for a device whose bytes the next container may see anyway."""


class ResetUse(StrEnum):
    REQUIRED = "required"
    BEST_EFFORT = "best-effort"
    NEVER = "never"


class Sharing(StrEnum):
    SAME_TENANT = "same-tenant"
    NEVER = "never"


class Ungranted(StrEnum):
    """What follows when somebody uses a device that nobody granted to him. It is recorded and told in any case."""

    REFUSE = "refuse"
    """The device is handed to nobody while it lasts."""
    QUARANTINE = "quarantine"
    """The device is out of service at once, until it was scrubbed."""
    END = "end"
    """Once it has lasted for the dying grace, processes of pods that do it are ended; those of the node never are."""


class Uninspectable(StrEnum):
    """What follows when a process cannot be looked through in several walks. It is recorded and reported in any case."""

    REPORT = "report"
    """Nothing more. It keeps a device from being scrubbed only if it may have the device by itself."""
    END = "end"
    """A pod's process is ended; a process of the node, of infrastructure, or of a pod that has the device never is."""


class Enforcement(StrEnum):
    ENFORCE = "enforce"
    OBSERVE = "observe"
    """Judge and record everything; refuse nothing, end nobody."""


class News(StrEnum):
    """When the kubelet hears that a device which a pod uses is out of service."""

    AT_ONCE = "at-once"
    AT_RELEASE = "at-release"
    """Once the pod has given it back. The kubelet counts a device that turns unhealthy in use twice, until then."""


class XidClass(StrEnum):
    """What an XID means for the device."""

    IGNORE = "ignore"
    APPLICATION = "application"
    RESET = "reset"
    REBOOT = "reboot"
    CONTEXT = "context"
    SERVICE = "service"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Limits:
    """Times in seconds, unless a name says otherwise.

    Attributes:
        hand_over: after this a waiting PreStartContainer is refused with what is going on (the kubelet gives it 30).
        slow_path: all steps of a scrub together, its memory apart. A device that needs longer is out of service.
        memory_bytes_per_second: the slowest clearing that is still waited for; with the size of a device it gives
            the eraser's deadline, on top of ``memory_floor``.
        question: one question to the driver.
        reset: one device reset.
        dying_grace: how long the processes of a pod that is gone may live on before they are leftovers.
        settle: for a pod of unknown UID: how long nobody must hold the device before the pod counts as over.
        eraser_slots: erasers at once on the node.
        break_glass: the longest that a person may have a device handed out whatever is known of it.
    """

    hand_over: float = 25.0
    slow_path: float = 120.0
    memory_floor: float = 5.0
    memory_bytes_per_second: int = 64 * 1024 * 1024
    question: float = 1.0
    reset: float = 30.0
    dying_grace: float = 30.0
    settle: float = 5.0
    eraser_slots: int = 2
    break_glass: float = 4 * 3600.0

    def memory_deadline(self, memory_bytes: int) -> float:
        """Seconds an eraser may take for a device of ``memory_bytes``."""
        return self.memory_floor + memory_bytes / self.memory_bytes_per_second


@dataclass(frozen=True, slots=True)
class MemoryRule:
    """How memory is cleared. Clearing and verifying are not optional.

    Attributes:
        audit: read before writing, and count the residue.
        pattern: a pass with an address-derived pattern before the zeros.
        on_chip: clear shared memory and registers of every processor too, where a device has them.
        max_uncovered: bytes that no pass may have reached, the driver's own reserve apart: the eraser's own context and
            rounding. More of them means that somebody else holds memory, and the scrub fails.
    """

    audit: bool = True
    pattern: bool = False
    on_chip: bool = True
    max_uncovered: int = 1024 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class DiagnosticsRule:
    """How thoroughly a device is tried out, and what it must achieve.

    Attributes:
        slow_path: in every slow path.
        recovery: in the slow path that ends a quarantine, if that is more.
        floors: for a pattern of model names, the least rate by check (:func:`~scrubber.domain.diagnosis.diagnostic_findings`).
    """

    slow_path: Level = Level.NONE
    recovery: Level = Level.QUICK
    floors: Mapping[str, Mapping[str, float]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Infrastructure:
    """Holders that belong to the node: left alone, noted, and in the way of a reset.

    Attributes:
        units: systemd units (``nvidia-persistenced.service``).
        pods: (namespace, service account) pairs.
    """

    units: frozenset[str] = frozenset({"nvidia-persistenced.service", "nvidia-fabricmanager.service"})
    pods: frozenset[tuple[str, str]] = frozenset()


_SUSTAINED: tuple[str, ...] = (
    "hw-slowdown",
    "hw-thermal-slowdown",
    "nvlink-down",
    "pcie-width",
    "power-brake",
    "too-hot",
)


@dataclass(frozen=True, slots=True)
class HealthRule:
    """What lasts, and what comes again. Times in seconds.

    Attributes:
        sustained: by code of a soft condition, how long it may last before it takes the device out of service; one that
            is not listed leaves the device suspect for as long as it lasts.
        calm: a condition that was not seen for this long is over.
        news: when the kubelet hears of a device that turns unhealthy in use.
        blame: quarantines within a day that came while one tenant had the device, after which that tenant is told of.
    """

    sustained: Mapping[str, float] = field(default_factory=lambda: dict.fromkeys(_SUSTAINED, 600.0))
    calm: float = 60.0
    news: News = News.AT_ONCE
    blame: int = 3


@dataclass(frozen=True, slots=True)
class BreakerRule:
    """What the service does by itself on one node, at most. It never stops a scrub, and lets no device in.

    Attributes:
        resets: resets for recoveries on the node within ``window`` seconds.
        soft_percent: of the node's devices, how many soft signals may have out of service at the same time; one at least.
    """

    resets: int = 8
    window: float = 3600.0
    soft_percent: int = 25


@dataclass(frozen=True, slots=True)
class MaintenanceRule:
    """When devices that nobody uses are scrubbed anew, so that what is called clean was proved not long ago.

    Attributes:
        every: seconds since the last proof; None: never.
        between: seconds of the day, in UTC, from and until which it may begin; the first may be the later one. None: always.
        diagnostics: how thoroughly devices are tried out then.
    """

    every: float | None = None
    between: tuple[float, float] | None = None
    diagnostics: Level = Level.NONE


@dataclass(frozen=True, slots=True)
class StuckRule:
    """Pods whose starts are refused again and again. Times in seconds since the first refusal.

    Attributes:
        tell_after: an event is written on the pod, by a plugin that has credentials.
        evict_after: the pod is evicted; None: never.
    """

    tell_after: float = 60.0
    evict_after: float | None = None


@dataclass(frozen=True, slots=True)
class RecoveryRule:
    """The way back. Times in seconds.

    Attributes:
        backoff_initial: pause before the first attempt; doubled after each failure, and with each quarantine of the same
            day, up to ``backoff_max``.
        attempts: failed attempts (relapses included) after which the device is condemned.
        attempts_per_day, resets_per_day: what one device gets within 24 hours; then it is condemned, or waits for the
            day's end where all its faults came while the same tenant had it.
        probation_scrubs: clean slow paths in a row that end the probation.
        probation_interval: pause between them.
    """

    backoff_initial: float = 1.0
    backoff_max: float = 3600.0
    attempts: int = 5
    attempts_per_day: int = 24
    resets_per_day: int = 6
    probation_scrubs: int = 2
    probation_interval: float = 5.0

    def backoff(self, failures: int) -> float:
        """Pause before the next attempt after ``failures`` failed ones."""
        return float(min(self.backoff_max, self.backoff_initial * 2 ** min(failures, 32)))


@dataclass(frozen=True, slots=True)
class Plan:
    """The steps of one scrub, in order, and how long all of them but the memory may take together (seconds).

    ``reset`` says whether a reset that is among the steps may be left out where the platform has none.
    """

    path: Path
    occasion: Occasion
    steps: tuple[Step, ...]
    deadline: float
    reset: ResetUse = ResetUse.NEVER
    diagnostics: Level = Level.NONE


_DEFAULT_PROOFS: Mapping[HandOver, Proof] = {
    kind: Proof.CHECKS if kind is HandOver.SAME_CONTAINER else Proof.CERTIFICATE for kind in HandOver
}


@dataclass(frozen=True, slots=True)
class Policy:
    """Everything that an administrator decides. The defaults are those of ``policies/default.yaml``."""

    name: str = "default"
    digest: str = ""
    proofs: Mapping[HandOver, Proof] = field(default_factory=lambda: dict(_DEFAULT_PROOFS))
    reset: ResetUse = ResetUse.BEST_EFFORT
    sharing: Sharing = Sharing.SAME_TENANT
    enforcement: Enforcement = Enforcement.ENFORCE
    ungranted: Ungranted = Ungranted.REFUSE
    uninspectable: Uninspectable = Uninspectable.REPORT
    limits: Limits = field(default_factory=Limits)
    memory: MemoryRule = field(default_factory=MemoryRule)
    health: HealthRule = field(default_factory=HealthRule)
    recovery: RecoveryRule = field(default_factory=RecoveryRule)
    breaker: BreakerRule = field(default_factory=BreakerRule)
    maintenance: MaintenanceRule = field(default_factory=MaintenanceRule)
    stuck: StuckRule = field(default_factory=StuckRule)
    diagnostics: DiagnosticsRule = field(default_factory=DiagnosticsRule)
    infrastructure: Infrastructure = field(default_factory=Infrastructure)
    envvar_refused: bool = False
    """Whether devices may be announced to a container runtime by an environment variable, which any pod can set."""
    settings: Mapping[str, str] = field(default_factory=dict)
    """Values that win over the driver's defaults when settings are brought back."""
    xids: Mapping[int, XidClass] = field(default_factory=dict)
    unlisted_xid: XidClass = XidClass.UNKNOWN
    xid_notes: Mapping[int, str] = field(default_factory=dict)
    """What an XID says, in a few words; for sentences, decides nothing."""
    max_temperature_celsius: int = 95
    overrides: tuple[Override, ...] = ()
    """For some devices another policy, the first that fits."""

    def on(self, node: str) -> Policy:
        """The policy as it is in force on ``node``: without the overrides for other nodes."""
        here = (each for each in self.overrides if not each.nodes or any(fnmatchcase(node, one) for one in each.nodes))
        return replace(self, overrides=tuple(here))

    def of(self, model: str, resources: Collection[str]) -> Policy:
        """The policy of a device of ``model`` that is handed out under ``resources``."""
        return next((each.policy for each in self.overrides if each.fits(model, resources)), self)

    @property
    def proof_digest(self) -> str:
        """What a certificate names: whoever only observes leaves a required reset out, and proves less."""
        short = self.reset is ResetUse.REQUIRED and self.enforcement is Enforcement.OBSERVE
        return f"{self.digest}/observed" if short else self.digest

    def proof_for(self, kind: HandOver) -> Proof:
        """What ``kind`` must rest on; a kind that the policy does not name needs a certificate."""
        return self.proofs.get(kind, Proof.CERTIFICATE)

    def xid_class(self, code: int) -> XidClass:
        """The class of an XID; a code that nobody listed is unknown, unless the administrator turned XIDs off."""
        return self.xids.get(code, self.unlisted_xid)

    def plan(
        self,
        path: Path,
        occasion: Occasion,
        *,
        recovering: bool = False,
        must_reset: bool = False,
        ordered: bool = False,
    ) -> Plan:
        """The steps of ``path``.

        A reset and diagnostics come before the memory, because what they leave behind is audited and cleared like
        everything else: nothing touches the memory once it was verified. A reset is part of a plan when a recovery
        needs it (``must_reset``) or the policy requires it, and never of one that only observes; a person may order one
        (``ordered``) unless the policy says never. ``recovering`` is the scrub that ends a quarantine.
        """
        if path is Path.FAST:
            return Plan(path, occasion, (Step.HOLDERS, Step.SETTINGS, Step.HEALTH), 5 * self.limits.question)
        wanted = self.reset is ResetUse.REQUIRED or (must_reset and self.reset is ResetUse.BEST_EFFORT)
        wanted = wanted and self.enforcement is Enforcement.ENFORCE
        wanted = wanted or (ordered and self.reset is not ResetUse.NEVER)
        levels = [self.diagnostics.slow_path]
        levels += [self.diagnostics.recovery] if recovering else []
        levels += [self.maintenance.diagnostics] if occasion is Occasion.SCHEDULE else []
        level = max(levels, key=lambda each: each.seconds)
        steps = (
            Step.HOLDERS,
            *((Step.RESET,) if wanted else ()),
            *((Step.DIAGNOSTICS,) if level is not Level.NONE else ()),
            Step.MEMORY,
            *((Step.ON_CHIP,) if self.memory.on_chip else ()),
            Step.SETTINGS,
            Step.HEALTH,
        )
        return Plan(
            path, occasion, steps, self.limits.slow_path, self.reset if wanted else ResetUse.NEVER, diagnostics=level
        )


@dataclass(frozen=True, slots=True)
class Override:
    """A policy of its own for some devices: all its values, those included that it shares with the node's.

    Attributes:
        nodes: patterns of names of nodes (``gpu-test-*``); empty: every node.
        models: patterns of model names (``NVIDIA H200*``); empty: every model.
        resources: names of resources of the kubelet's; empty: every one.
    """

    policy: Policy
    models: tuple[str, ...] = ()
    resources: tuple[str, ...] = ()
    nodes: tuple[str, ...] = ()

    def fits(self, model: str, resources: Collection[str]) -> bool:
        right_model = not self.models or any(fnmatchcase(model, each) for each in self.models)
        return right_model and (not self.resources or any(each in resources for each in self.resources))
