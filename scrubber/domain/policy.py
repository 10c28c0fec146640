"""A policy: which proof a kind of hand-over needs, how long things may take, and what a fault means.

Every setting is declared here, once: see :mod:`scrubber.domain.declaration`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from fnmatch import fnmatchcase

from scrubber.domain.declaration import InvalidSetting, ValueType, camel_case, computed, section, setting
from scrubber.domain.diagnostics import DiagnosticLevel
from scrubber.domain.evidence import PathKind, ScrubTrigger, Step
from scrubber.domain.handover_kind import HandOverKind
from scrubber.domain.health.history import DAY, MAX_ENTRIES
from scrubber.domain.health.signal_table import COMMON_SIGNALS, ErrorClass, SignalTable

__all__ = [
    "MAX_HAND_OVER_SECONDS",
    "BreakerRule",
    "DiagnosticsRule",
    "Enforcement",
    "EnvvarInjection",
    "HealthRule",
    "Infrastructure",
    "InjectionRule",
    "Limits",
    "MaintenanceRule",
    "MemoryRule",
    "Policy",
    "PolicyOverride",
    "QuarantineTiming",
    "RecoveryRule",
    "RequiredProof",
    "ResetMode",
    "ScrubPlan",
    "SharingMode",
    "StuckPodsRule",
    "UnauthorizedUseAction",
    "UninspectedProcessAction",
]

_SECONDS = ValueType.SECONDS


class RequiredProof(StrEnum):
    """What a hand-over must rest on."""

    CERTIFICATE = "certificate"
    """Issued since the last grant."""
    CHECKS = "checks"
    """The fast path's checks alone: the named exception, for a device whose bytes the next container may see anyway."""


class ResetMode(StrEnum):
    REQUIRED = "required"
    BEST_EFFORT = "best-effort"
    NEVER = "never"


class SharingMode(StrEnum):
    SAME_TENANT = "same-tenant"
    NEVER = "never"


class UnauthorizedUseAction(StrEnum):
    """What follows when somebody uses a device that nobody granted to him. It is recorded and told in any case."""

    REFUSE = "refuse"
    """The device is handed to nobody while it lasts."""
    QUARANTINE = "quarantine"
    """The device is out of service at once, until it was scrubbed."""
    KILL = "end"
    """Once it has lasted for the dying grace, processes of pods that do it are ended; those of the node never are."""


class UninspectedProcessAction(StrEnum):
    """What follows when a process cannot be looked through in several walks. It is recorded and reported in any case."""

    REPORT = "report"
    """Nothing more. It keeps a device from being scrubbed only if it may have the device by itself."""
    KILL = "end"
    """A pod's process is ended; a process of the node, of infrastructure, or of a pod that has the device never is."""


class Enforcement(StrEnum):
    ENFORCE = "enforce"
    OBSERVE = "observe"
    """Judge and record everything; refuse nothing, end nobody."""


class QuarantineTiming(StrEnum):
    """When the kubelet hears that a device which a pod uses is out of service."""

    DETECTION = "at-once"
    RELEASE = "at-release"
    """Once the pod has given it back. The kubelet counts a device that turns unhealthy in use twice, until then."""


class EnvvarInjection(StrEnum):
    """Whether a device may be announced to a container runtime by an environment variable."""

    ALLOW = "allow"
    REFUSE = "refuse"


_MIN_SECONDS = 0.01
"""Seconds; below it nothing could be done in time, or the service would do nothing but try again."""
_MIN_DRIVER_CALL = 0.05
"""Seconds; below it a healthy driver on a busy node would count as stuck."""
MAX_HAND_OVER_SECONDS = 25.0
"""Seconds that the plugin waits for a hand-over: the kubelet gives PreStartContainer 30 s, and the plugin answers within them."""


@dataclass(frozen=True, slots=True)
class Limits:
    """How long things may take, and how much may happen at once."""

    hand_over: float = setting(
        MAX_HAND_OVER_SECONDS,
        "A waiting PreStartContainer is refused after this, 25s at most; the kubelet gives it 30 s.",
        _SECONDS,
        minimum=_MIN_SECONDS,
        overridable=False,
    )
    slow_path: float = setting(120.0, "A scrub that outlives it is abandoned.", _SECONDS, minimum=_MIN_SECONDS)
    """All steps of a scrub together, its memory apart. A device that needs longer is out of service."""
    clear_timeout_base: float = setting(
        5.0, "The least time an eraser gets, whatever the size.", _SECONDS, minimum=_MIN_SECONDS
    )
    min_clear_rate: int = setting(
        64 * 1024 * 1024,
        "Bytes per second: the slowest clearing that is still waited for.",
        ValueType.PER_SECOND,
        minimum=1,
    )
    """With the size of a device it gives the eraser's deadline, on top of ``clear_timeout_base``."""
    driver_call: float = setting(
        1.0, "One question to the driver.", _SECONDS, minimum=_MIN_DRIVER_CALL, overridable=False
    )
    reset: float = setting(30.0, "One device reset.", _SECONDS, minimum=_MIN_SECONDS)
    leftover_grace_period: float = setting(
        30.0, "How long processes of a pod that is gone may live on before they are leftovers.", _SECONDS, minimum=0
    )
    unknown_pod_idle_period: float = setting(
        5.0, "How long nobody must hold the device before a pod of unknown UID counts as over.", _SECONDS, minimum=0
    )
    eraser_slots: int = setting(2, "Erasers at once on the node.", minimum=1, maximum=256, overridable=False)
    max_temperature_celsius: int = setting(
        95, "A device that is hotter is suspect.", ValueType.CELSIUS, minimum=40, maximum=150
    )
    break_glass: float = setting(
        4 * 3600.0,
        "The longest that a person may have a device handed out whatever is known of it.",
        _SECONDS,
        minimum=_MIN_SECONDS,
        overridable=False,
        decides_proof=False,
    )

    def check(self) -> None:
        """Raise :class:`InvalidSetting` if these times do not fit each other."""
        if self.hand_over > MAX_HAND_OVER_SECONDS:
            raise InvalidSetting(
                "hand_over",
                f"a hand-over cannot wait {self.hand_over:g} s: the kubelet gives PreStartContainer 30 s, and the plugin "
                f"waits for {MAX_HAND_OVER_SECONDS:g} s of them; write at most {MAX_HAND_OVER_SECONDS:g}s",
            )
        if self.driver_call >= self.hand_over:
            raise InvalidSetting(
                "driver_call",
                f"one question to the driver ({self.driver_call:g} s) cannot take as long as the whole hand-over "
                f"({self.hand_over:g} s); write less",
            )
        if self.reset >= self.slow_path:
            raise InvalidSetting(
                "reset",
                f"a reset ({self.reset:g} s) is one step of the slow path ({self.slow_path:g} s) and cannot take as long "
                "as all of it; write a shorter reset or a longer slowPath",
            )

    def memory_deadline(self, memory_bytes: int) -> float:
        """Seconds an eraser may take for a device of ``memory_bytes``."""
        return self.clear_timeout_base + memory_bytes / self.min_clear_rate


@dataclass(frozen=True, slots=True)
class MemoryRule:
    """How memory is cleared. Clearing and verifying are not optional."""

    count_residue: bool = setting(True, "Read before writing, and count the residue.")
    pattern_pass: bool = setting(False, "A pass with an address-derived pattern before the zeros.")
    on_chip: bool = setting(True, "Clear shared memory and registers of every processor too, where there are any.")
    max_uncovered: int = setting(
        1024 * 1024 * 1024,
        "Bytes that may stay out of reach, the driver's own reserve apart; more means that somebody has them.",
        ValueType.BYTES,
        minimum=1,
    )
    """The eraser's own context and rounding stay out of reach of every pass. More than that, and the scrub fails."""


@dataclass(frozen=True, slots=True)
class DiagnosticsRule:
    """How thoroughly a device is tried out, and what it must achieve: quick 1 s, standard 10 s, extended 60 s."""

    slow_path: DiagnosticLevel = setting(DiagnosticLevel.NONE, "In every slow path.")
    recovery: DiagnosticLevel = setting(DiagnosticLevel.QUICK, "In the scrub that ends a quarantine, if that is more.")
    min_rates: Mapping[str, Mapping[str, float]] = setting(
        {},
        "For a pattern of model names the least rate by check, in operations or bytes per second.",
        ValueType.PER_SECOND_BY_MODEL,
    )
    """The first pattern that fits counts (:func:`~scrubber.domain.diagnostics.diagnostic_findings`)."""


@dataclass(frozen=True, slots=True)
class Infrastructure:
    """Holders that belong to the node: left alone, noted, and in the way of a reset. Never by process name."""

    systemd_units: frozenset[str] = setting(
        frozenset({"nvidia-persistenced.service", "nvidia-fabricmanager.service"}),
        "systemd units, such as nvidia-dcgm.service.",
        ValueType.SYSTEMD_UNITS,
        example="[nvidia-dcgm.service]",
    )
    pods: frozenset[tuple[str, str]] = setting(
        frozenset(),
        "Pods by namespace and service account.",
        ValueType.SERVICE_ACCOUNTS,
        example="[{namespace: gpu-operator, serviceAccount: nvidia-dcgm}]",
    )


@dataclass(frozen=True, slots=True)
class InjectionRule:
    """How a container is given its devices."""

    envvar: EnvvarInjection = setting(
        EnvvarInjection.ALLOW, "refuse: not by NVIDIA_VISIBLE_DEVICES, because any pod can set that variable."
    )


_SUSTAINED = dict.fromkeys(
    ("hw-slowdown", "hw-thermal-slowdown", "nvlink-down", "pcie-width", "power-brake", "too-hot"), 600.0
)


@dataclass(frozen=True, slots=True)
class HealthRule:
    """Soft conditions: they make a device suspect at once, and take it out of service only when they last."""

    quarantine_after: Mapping[str, float] = setting(
        _SUSTAINED,
        "By condition, how long it may last. What is not written: "
        f"{', '.join(f'{code} {seconds / 60:g}m' for code, seconds in _SUSTAINED.items())}, the others never.",
        ValueType.SECONDS_BY_CONDITION,
    )
    """A condition that is not listed leaves the device suspect for as long as it lasts."""
    quiet_period: float = setting(
        60.0, "A condition that was not seen for this long is over.", _SECONDS, minimum=_MIN_SECONDS
    )
    quarantine_at: QuarantineTiming = setting(
        QuarantineTiming.DETECTION,
        "When the kubelet hears of a device that turns unhealthy while a pod has it.",
        decides_proof=False,
    )
    tenant_quarantine_threshold: int = setting(
        3,
        "Quarantines within a day while one tenant had the device, after which that tenant is told of.",
        minimum=1,
        maximum=1000,
        overridable=False,
        decides_proof=False,
    )


@dataclass(frozen=True, slots=True)
class RecoveryRule:
    """The way back of a quarantined device."""

    initial_backoff: float = setting(
        1.0,
        "Pause before the first attempt; doubled at each failure, and with each quarantine of the same day.",
        _SECONDS,
        minimum=_MIN_SECONDS,
    )
    max_backoff: float = setting(3600.0, "The longest pause between attempts.", _SECONDS, minimum=_MIN_SECONDS)
    max_attempts: int = setting(5, "Failed attempts after which the device is condemned.", minimum=1, maximum=1000)
    """Relapses count as failed attempts."""
    max_attempts_per_day: int = setting(24, "What one device gets within 24 hours.", minimum=1, maximum=MAX_ENTRIES)
    """Then it is condemned, or waits for the day's end where all its faults came while the same tenant had it."""
    max_resets_per_day: int = setting(6, "What one device gets within 24 hours.", minimum=1, maximum=MAX_ENTRIES)
    probation_scrubs: int = setting(2, "Clean slow paths in a row that end the probation.", minimum=1, maximum=1000)
    probation_interval: float = setting(5.0, "Pause between the scrubs of the probation.", _SECONDS, minimum=0)

    def check(self) -> None:
        """Raise :class:`InvalidSetting` if the pauses shrink."""
        if self.max_backoff < self.initial_backoff:
            raise InvalidSetting(
                "max_backoff",
                f"the longest pause ({self.max_backoff:g} s) is shorter than the first ({self.initial_backoff:g} s); "
                "write a maxBackoff of at least initialBackoff",
            )

    def backoff(self, failures: int) -> float:
        """Pause before the next attempt after ``failures`` failed ones."""
        return float(min(self.max_backoff, self.initial_backoff * 2 ** min(failures, 32)))


@dataclass(frozen=True, slots=True)
class BreakerRule:
    """What the service does by itself on one node, at most. It never stops a scrub, and lets no device in."""

    max_resets: int = setting(8, "Resets for recoveries on the node within the window.", minimum=0, maximum=10_000)
    window: float = setting(3600.0, "The time within which resets are counted.", _SECONDS, minimum=_MIN_SECONDS)
    max_soft_percent: int = setting(
        25,
        "Of the node's devices, how many soft conditions may have out at the same time; one at least.",
        ValueType.PERCENT,
        minimum=0,
        maximum=100,
    )

    def check(self) -> None:
        """Raise :class:`InvalidSetting` if resets would be counted that nobody remembers."""
        if self.window > DAY:
            raise InvalidSetting("window", "resets are remembered for a day; write a window of at most 24h")


@dataclass(frozen=True, slots=True)
class MaintenanceRule:
    """When devices that nobody uses are scrubbed anew, one at a time."""

    interval: float | None = setting(
        None, "Time since the last proof, or never.", _SECONDS, minimum=_MIN_SECONDS, optional=True, decides_proof=False
    )
    time_of_day: tuple[float, float] | None = setting(
        None,
        "The time of the day, in UTC, at which it may begin: 02:00-05:00, or always.",
        ValueType.TIME_OF_DAY,
        optional=True,
        decides_proof=False,
    )
    """Seconds of the day; the first may be the later one."""
    diagnostics: DiagnosticLevel = setting(
        DiagnosticLevel.NONE, "How thoroughly devices are tried out then, if that is more."
    )


@dataclass(frozen=True, slots=True)
class StuckPodsRule:
    """Pods whose starts are refused again and again.

    Its times begin with the first refusal.
    """

    notify_after: float = setting(
        60.0, "An event is written on the pod, by a plugin that has credentials.", _SECONDS, minimum=0
    )
    evict_after: float | None = setting(None, "The pod is evicted, or never.", _SECONDS, minimum=0, optional=True)

    def check(self) -> None:
        """Raise :class:`InvalidSetting` if a pod would be evicted before its owner is told why."""
        if self.evict_after is not None and self.evict_after < self.notify_after:
            raise InvalidSetting(
                "evict_after",
                f"a pod cannot be evicted ({self.evict_after:g} s) before its owner is told why ({self.notify_after:g} s); "
                "write an evictAfter of at least notifyAfter",
            )


@dataclass(frozen=True, slots=True)
class ScrubPlan:
    """The steps of one scrub, in order, and how long all of them but the memory may take together (seconds).

    ``reset`` says whether a reset that is among the steps may be left out where the platform has none.
    """

    path: PathKind
    trigger: ScrubTrigger
    steps: tuple[Step, ...]
    deadline: float
    reset: ResetMode = ResetMode.NEVER
    diagnostics: DiagnosticLevel = DiagnosticLevel.NONE


def _always_by_certificate(proofs: Mapping[HandOverKind, RequiredProof]) -> None:
    for kind in (HandOverKind.OTHER_TENANT, HandOverKind.UNKNOWN):
        if proofs.get(kind) is RequiredProof.CHECKS:
            key = camel_case(kind)
            raise InvalidSetting(
                key,
                f'"{key}" always needs a certificate, because checks say nothing about what is in the memory; '
                'write "certificate" (to judge without refusing: enforcement: observe)',
            )


@dataclass(frozen=True, slots=True)
class Policy:
    """A policy of the scrub service: which proof each hand-over needs, how long things may take, what a fault means.

    Everything that an administrator decides. The defaults are those of ``policies/default.yaml``, and the order is its.
    """

    name: str = setting(
        "default",
        "Appears in every certificate.",
        ValueType.NAME,
        required=True,
        in_override="The policy of these devices is called by the file's name, a slash, and this.",
        decides_proof=False,
    )
    digest: str = computed("")
    required_proofs: Mapping[HandOverKind, RequiredProof] = setting(
        {
            kind: RequiredProof.CHECKS if kind is HandOverKind.SAME_CONTAINER else RequiredProof.CERTIFICATE
            for kind in HandOverKind
        },
        "What each kind of hand-over must rest on: a certificate issued since the last grant, or the checks alone.",
        ValueType.PROOF_BY_HAND_OVER,
        key="handOver",
        entries={
            HandOverKind.SAME_CONTAINER: "The same container starts again.",
            HandOverKind.SAME_POD: "Another container of the same pod.",
            HandOverKind.SAME_TENANT: "Another pod of the same tenant.",
            HandOverKind.OTHER_TENANT: "A pod of another tenant. Always by certificate.",
            HandOverKind.UNKNOWN: "Nobody knows whose pod it was. Always by certificate.",
        },
        check=_always_by_certificate,
    )
    reset: ResetMode = setting(ResetMode.BEST_EFFORT, "Whether a slow path resets the device.")
    sharing: SharingMode = setting(SharingMode.SAME_TENANT, "Who may have the device at the same time.")
    enforcement: Enforcement = setting(
        Enforcement.ENFORCE,
        "observe: judge and record everything; refuse nothing, end nobody.",
        decides_proof=False,  # what is proved is the same, whether it is acted on or not
    )
    unauthorized_use: UnauthorizedUseAction = setting(
        UnauthorizedUseAction.REFUSE,
        "What follows when a device is used without a grant: it is handed to nobody meanwhile, or is out of "
        "service until it was scrubbed, or processes of pods that do it are ended after leftoverGracePeriod.",
        in_override="What follows when the device is used without a grant.",
    )
    uninspected_processes: UninspectedProcessAction = setting(
        UninspectedProcessAction.REPORT,
        "What follows when a process of a pod cannot be looked through in several walks over /proc: it is "
        "reported, or it is ended. Processes of the node never are.",
        in_override="What follows when a process of a pod cannot be looked through.",
        decides_proof=False,
    )
    limits: Limits = section(Limits, in_override="How long things may take on these devices.")
    memory: MemoryRule = section(MemoryRule)
    diagnostics: DiagnosticsRule = section(DiagnosticsRule)
    infrastructure: Infrastructure = section(Infrastructure, overridable=False)
    injection: InjectionRule = section(InjectionRule, overridable=False)
    health: HealthRule = section(HealthRule)
    recovery: RecoveryRule = section(RecoveryRule, decides_proof=False)
    breaker: BreakerRule = section(BreakerRule, overridable=False, decides_proof=False)
    maintenance: MaintenanceRule = section(MaintenanceRule)
    stuck_pods: StuckPodsRule = section(StuckPodsRule, overridable=False, decides_proof=False)
    settings: Mapping[str, str] = setting(
        {}, "Win over the driver's defaults when settings are brought back.", ValueType.DEVICE_SETTINGS
    )
    error_classes: Mapping[int, ErrorClass] = setting(
        {},
        "What an XID means for the device. A code that is not named here has the class that it has in xid.yaml.",
        ValueType.CODES_BY_CLASS,
        key="xids",
        entries={
            ErrorClass.IGNORE: "Nothing happens.",
            ErrorClass.APPLICATION: "The application's own fault; the device is well.",
            ErrorClass.RESET: "The device is quarantined until a reset.",
            ErrorClass.REBOOT: "The device is quarantined until a reboot of the node.",
            ErrorClass.CONTEXT: "It depends on what else is seen.",
            ErrorClass.REPAIR: "The device needs a person.",
            ErrorClass.UNKNOWN: "Treat like a code that nobody listed.",
        },
    )
    unlisted_error: ErrorClass = ErrorClass.UNKNOWN
    error_notes: Mapping[int, str] = computed({})
    """What an error code says, in a few words; for messages, decides nothing."""
    signals: SignalTable = computed(COMMON_SIGNALS)
    """What can go wrong with the devices, by code; their backend's."""
    overrides: tuple[PolicyOverride, ...] = setting(
        (),
        "For some devices another policy. The first that fits counts.",
        ValueType.OVERRIDES,
        overridable=False,
        decides_proof=False,  # each of them has a digest of its own
        example="- name: inference",
    )

    def for_node(self, node: str) -> Policy:
        """The policy as it is in force on ``node``: without the overrides for other nodes."""
        here = (each for each in self.overrides if not each.nodes or any(fnmatchcase(node, one) for one in each.nodes))
        return replace(self, overrides=tuple(here))

    def for_device(self, model: str, resources: Collection[str]) -> Policy:
        """The policy of a device of ``model`` that is handed out under ``resources``."""
        return next((each.policy for each in self.overrides if each.matches(model, resources)), self)

    @property
    def proof_digest(self) -> str:
        """What a certificate names: whoever only observes leaves a required reset out, and proves less."""
        short = self.reset is ResetMode.REQUIRED and self.enforcement is Enforcement.OBSERVE
        return f"{self.digest}/observed" if short else self.digest

    def required_proof(self, kind: HandOverKind) -> RequiredProof:
        """What ``kind`` must rest on; a kind that the policy does not name needs a certificate."""
        return self.required_proofs.get(kind, RequiredProof.CERTIFICATE)

    def with_signals(self, table: SignalTable) -> Policy:
        """Return the policy for devices of the backend that ``table`` belongs to; its overrides too."""
        overrides = tuple(replace(each, policy=each.policy.with_signals(table)) for each in self.overrides)
        return replace(self, signals=table, overrides=overrides)

    def error_class(self, code: int) -> ErrorClass:
        """Return the class of an error code; one that is not listed is unknown, unless the administrator turned codes off."""
        return self.error_classes.get(code, self.unlisted_error)

    def plan(
        self,
        path: PathKind,
        trigger: ScrubTrigger,
        *,
        recovering: bool = False,
        must_reset: bool = False,
        operator_ordered: bool = False,
    ) -> ScrubPlan:
        """The steps of ``path``.

        A reset and diagnostics come before the memory, because what they leave behind is audited and cleared like
        everything else: nothing touches the memory once it was verified. A reset is part of a plan when a recovery
        needs it (``must_reset``) or the policy requires it, and never of one that only observes; a person may order one
        (``operator_ordered``) unless the policy says never. ``recovering`` is the scrub that ends a quarantine.
        """
        if path is PathKind.FAST:
            return ScrubPlan(path, trigger, (Step.HOLDERS, Step.SETTINGS, Step.HEALTH), 5 * self.limits.driver_call)
        wanted = self.reset is ResetMode.REQUIRED or (must_reset and self.reset is ResetMode.BEST_EFFORT)
        wanted = wanted and self.enforcement is Enforcement.ENFORCE
        wanted = wanted or (operator_ordered and self.reset is not ResetMode.NEVER)
        levels = [self.diagnostics.slow_path]
        levels += [self.diagnostics.recovery] if recovering else []
        levels += [self.maintenance.diagnostics] if trigger is ScrubTrigger.MAINTENANCE else []
        level = max(levels, key=lambda each: each.seconds)
        steps = (
            Step.HOLDERS,
            *((Step.RESET,) if wanted else ()),
            *((Step.DIAGNOSTICS,) if level is not DiagnosticLevel.NONE else ()),
            Step.MEMORY,
            *((Step.ON_CHIP,) if self.memory.on_chip else ()),
            Step.SETTINGS,
            Step.HEALTH,
        )
        return ScrubPlan(
            path, trigger, steps, self.limits.slow_path, self.reset if wanted else ResetMode.NEVER, diagnostics=level
        )


@dataclass(frozen=True, slots=True)
class PolicyOverride:
    """A policy of its own for some devices: all its values, those included that it shares with the node's.

    Where ``nodes``, ``models`` or ``resources`` is empty, all fit.
    """

    policy: Policy
    nodes: tuple[str, ...] = setting((), "Patterns of names of nodes: gpu-test-*.", ValueType.PATTERNS)
    models: tuple[str, ...] = setting(
        (), "Patterns of model names: NVIDIA H200*.", ValueType.PATTERNS, example='["NVIDIA H200*"]'
    )
    resources: tuple[str, ...] = setting(
        (), "Names of the kubelet's resources: nvidia.com/gpu.", ValueType.RESOURCES, example="[nvidia.com/gpu]"
    )

    def matches(self, model: str, resources: Collection[str]) -> bool:
        right_model = not self.models or any(fnmatchcase(model, each) for each in self.models)
        return right_model and (not self.resources or any(each in resources for each in self.resources))
