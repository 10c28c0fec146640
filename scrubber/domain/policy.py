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
from scrubber.domain.infrastructure import InfrastructurePod, InfrastructureUnit

__all__ = [
    "MAX_HAND_OVER_SECONDS",
    "BreakerRule",
    "DeviceTaintRule",
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
    """The proof that a hand-over requires."""

    CERTIFICATE = "certificate"
    """A certificate issued since the last grant."""
    CHECKS = "checks"
    """The fast path's checks alone: the named exception, for a device whose data the next container may see anyway."""


class ResetMode(StrEnum):
    REQUIRED = "required"
    BEST_EFFORT = "best-effort"
    NEVER = "never"


class SharingMode(StrEnum):
    SAME_TENANT = "same-tenant"
    NEVER = "never"


class UnauthorizedUseAction(StrEnum):
    """Reaction to use of a device without a grant. It is recorded and logged in any case."""

    REFUSE = "refuse"
    """The device is not handed over while the use lasts."""
    QUARANTINE = "quarantine"
    """The device is out of service immediately, until it was scrubbed."""
    KILL = "kill"
    """Once the use has lasted for the leftover grace period, processes of pods are killed; those of the node never are.
    """


class UninspectedProcessAction(StrEnum):
    """Reaction to a process that several walks cannot inspect. It is recorded and logged in any case."""

    REPORT = "report"
    """Nothing more. The process blocks the scrub of a device only if it may have the device without a grant."""
    KILL = "kill"
    """A pod's process is killed; a process of the node, of infrastructure, or of a pod that has the device never is."""


class Enforcement(StrEnum):
    ENFORCE = "enforce"
    OBSERVE = "observe"
    """Evaluate and record everything; refuse nothing, kill nothing."""


class QuarantineTiming(StrEnum):
    """When the kubelet is notified that a device in use is out of service."""

    DETECTION = "detection"
    RELEASE = "release"
    """When the pod has released it. Until then the kubelet would count a device that becomes unhealthy in use twice."""


class EnvvarInjection(StrEnum):
    """Whether a device may be passed to a container by an environment variable."""

    ALLOW = "allow"
    REFUSE = "refuse"


_MIN_SECONDS = 0.01
"""Seconds; below it nothing could finish in time, or the service would do nothing but retry."""
_MIN_DRIVER_CALL = 0.05
"""Seconds; below it a healthy driver on a busy node would count as stuck."""
MAX_HAND_OVER_SECONDS = 25.0
"""Seconds that the plugin waits for a hand-over; the kubelet allows 30 s for PreStartContainer, including the answer.
"""


@dataclass(frozen=True, slots=True)
class Limits:
    """Timeouts, and limits of concurrency."""

    hand_over: float = setting(
        MAX_HAND_OVER_SECONDS,
        "How long a PreStartContainer call may wait before it is refused; 25s at most, because the kubelet allows 30 s.",
        _SECONDS,
        minimum=_MIN_SECONDS,
        overridable=False,
    )
    slow_path: float = setting(
        120.0, "Timeout of a scrub, without its memory and diagnostics steps.", _SECONDS, minimum=_MIN_SECONDS
    )
    """All steps of a scrub together, except the memory and diagnostics. A device that needs longer is quarantined."""
    clear_timeout_base: float = setting(
        5.0, "Minimum timeout of clearing, regardless of the size of the device.", _SECONDS, minimum=_MIN_SECONDS
    )
    min_clear_rate: int = setting(
        64 * 1024 * 1024,
        "Bytes per second: the slowest clearing rate that is not a timeout.",
        ValueType.PER_SECOND,
        minimum=1,
    )
    """Together with the size of a device and ``clear_timeout_base``, determines the eraser's deadline."""
    driver_call: float = setting(
        1.0, "Timeout of one call to the driver.", _SECONDS, minimum=_MIN_DRIVER_CALL, overridable=False
    )
    reset: float = setting(30.0, "Timeout of a device reset.", _SECONDS, minimum=_MIN_SECONDS)
    agent_pause: float = setting(
        300.0,
        "How long a reset waits until paused agents have released the device; not part of slowPath.",
        _SECONDS,
        minimum=_MIN_SECONDS,
        decides_proof=False,
    )
    leftover_grace_period: float = setting(
        30.0, "How long processes may outlive their pod before they are leftovers.", _SECONDS, minimum=0
    )
    unknown_pod_idle_period: float = setting(
        5.0,
        "How long a device must have no holder before a pod of unknown UID counts as finished.",
        _SECONDS,
        minimum=0,
    )
    eraser_slots: int | None = setting(
        None,
        "Limit of devices of the node that are cleared or diagnosed at the same time; auto: every device with memory "
        "of its own, and two simulated ones for each CPU of the service.",
        ValueType.INTEGER,
        minimum=1,
        maximum=256,
        optional=True,
        overridable=False,
        decides_proof=False,
    )
    max_temperature_celsius: int = setting(
        95, "Above this temperature a device is suspect.", ValueType.CELSIUS, minimum=40, maximum=150
    )
    break_glass: float = setting(
        4 * 3600.0,
        "Longest duration of a break-glass override.",
        _SECONDS,
        minimum=_MIN_SECONDS,
        overridable=False,
        decides_proof=False,
    )

    def check(self) -> None:
        """Raise :class:`InvalidSetting` if these times contradict each other."""
        if self.hand_over > MAX_HAND_OVER_SECONDS:
            raise InvalidSetting(
                "hand_over",
                f"a hand-over cannot wait {self.hand_over:g} s: the kubelet allows 30 s for "
                f"PreStartContainer, and the plugin waits for at most {MAX_HAND_OVER_SECONDS:g} s; write "
                f"at most {MAX_HAND_OVER_SECONDS:g}s",
            )
        if self.driver_call >= self.hand_over:
            raise InvalidSetting(
                "driver_call",
                f"a driver call ({self.driver_call:g} s) must be shorter than the whole hand-over "
                f"({self.hand_over:g} s); write a shorter driverCall",
            )
        if self.reset >= self.slow_path:
            raise InvalidSetting(
                "reset",
                f"a reset ({self.reset:g} s) is one step of the slow path ({self.slow_path:g} s) and must "
                "take less time; write a shorter reset or a longer slowPath",
            )

    def memory_deadline(self, memory_bytes: int) -> float:
        """Seconds that an eraser may take for a device of ``memory_bytes``."""
        return self.clear_timeout_base + memory_bytes / self.min_clear_rate


@dataclass(frozen=True, slots=True)
class MemoryRule:
    """How memory is cleared. Clearing and verifying are not optional."""

    count_residue: bool = setting(True, "Read the memory before clearing it, and count residue.")
    pattern_pass: bool = setting(False, "Write and verify an address-derived pattern before the zeros.")
    on_chip: bool = setting(
        True, "Clear shared memory and registers of every multiprocessor, where the device has them."
    )
    max_uncovered: int = setting(
        1024 * 1024 * 1024,
        "Bytes that may stay unreachable, besides the driver's reserve; more means that another process holds them.",
        ValueType.BYTES,
        minimum=1,
    )
    """No pass can reach the eraser's own context and rounding. If more than this is uncovered, the scrub fails."""
    accept_claims: bool = setting(
        False,
        "Accept the claim of a command backend that it cleared a device. The service cannot measure that, and every "
        "certificate says so.",
    )


@dataclass(frozen=True, slots=True)
class DiagnosticsRule:
    """Levels of diagnostics (quick 1 s, standard 10 s, extended 60 s) and minimum rates."""

    slow_path: DiagnosticLevel = setting(DiagnosticLevel.NONE, "Level in every slow path.")
    recovery: DiagnosticLevel = setting(
        DiagnosticLevel.QUICK, "Level in the scrub that ends a quarantine, if it is higher."
    )
    min_rates: Mapping[str, Mapping[str, float]] = setting(
        {},
        "Minimum rates by model pattern and check, in operations or bytes per second.",
        ValueType.PER_SECOND_BY_MODEL,
    )
    """The first matching pattern applies (:func:`~scrubber.domain.diagnostics.diagnostic_findings`)."""


@dataclass(frozen=True, slots=True)
class Infrastructure:
    """Holders that belong to the node: recorded and never killed, but they block a reset. Identified by systemd unit, or by the namespace of a pod as the kubelet records it; never by a name that a pod's author can choose."""

    groups: frozenset[str] = setting(
        frozenset({"aks", "eks", "gke", "gpu-operator", "gpud", "systemd"}),
        "Groups of agents from infrastructure.yaml.",
        ValueType.INFRASTRUCTURE_GROUPS,
        example="[systemd, gpu-operator]",
    )
    systemd_units: frozenset[str] = setting(
        frozenset(),
        "Further systemd units, such as my-monitor.service.",
        ValueType.SYSTEMD_UNITS,
        example="[my-monitor.service]",
    )
    pods: frozenset[InfrastructurePod] = setting(
        frozenset(),
        "Further pods by namespace, and by service account where it is given and the pod has a token of its account.",
        ValueType.INFRASTRUCTURE_PODS,
        example="[{namespace: monitoring, serviceAccount: dcgm-exporter}]",
    )
    all_units: frozenset[InfrastructureUnit] = frozenset()
    """The units of the groups, and those listed here."""
    all_pods: frozenset[InfrastructurePod] = frozenset()
    """The pods of the groups, and those listed here."""


@dataclass(frozen=True, slots=True)
class InjectionRule:
    """How containers get their devices."""

    envvar: EnvvarInjection = setting(
        EnvvarInjection.ALLOW, "refuse: not by NVIDIA_VISIBLE_DEVICES, because any pod can set that variable."
    )


_SUSTAINED = dict.fromkeys(
    ("hw-slowdown", "hw-thermal-slowdown", "nvlink-down", "pcie-width", "power-brake", "too-hot"), 600.0
)


@dataclass(frozen=True, slots=True)
class HealthRule:
    """Soft conditions: a device is suspect immediately, and out of service only if the condition persists."""

    quarantine_after: Mapping[str, float] = setting(
        _SUSTAINED,
        "How long each condition may last. Defaults: "
        f"{', '.join(f'{code} {seconds / 60:g}m' for code, seconds in _SUSTAINED.items())}; all other "
        "conditions may last indefinitely.",
        ValueType.SECONDS_BY_CONDITION,
    )
    """A condition that is not listed leaves the device suspect for as long as it lasts."""
    quiet_period: float = setting(
        60.0, "A condition that was not reported for this long has ended.", _SECONDS, minimum=_MIN_SECONDS
    )
    quarantine_at: QuarantineTiming = setting(
        QuarantineTiming.DETECTION,
        "When the kubelet is notified that a device became unhealthy while a pod uses it: at detection, or at release.",
        decides_proof=False,
    )
    tenant_quarantine_threshold: int = setting(
        3,
        "Quarantines within a day, all while one tenant had the device, after which the tenant is flagged.",
        minimum=1,
        maximum=1000,
        overridable=False,
        decides_proof=False,
    )


@dataclass(frozen=True, slots=True)
class RecoveryRule:
    """Recovery of quarantined devices."""

    initial_backoff: float = setting(
        1.0,
        "Pause before the first attempt; doubles with each failure and with each quarantine of the same day.",
        _SECONDS,
        minimum=_MIN_SECONDS,
    )
    max_backoff: float = setting(3600.0, "Longest pause between attempts.", _SECONDS, minimum=_MIN_SECONDS)
    max_attempts: int = setting(5, "Failed attempts after which the device is condemned.", minimum=1, maximum=1000)
    """Relapses count as failed attempts."""
    max_attempts_per_day: int = setting(24, "Limit for one device within 24 hours.", minimum=1, maximum=MAX_ENTRIES)
    """Beyond it the device is condemned, or waits until a day has passed if all its faults occurred under one tenant.
    """
    max_resets_per_day: int = setting(6, "Limit for one device within 24 hours.", minimum=1, maximum=MAX_ENTRIES)
    probation_scrubs: int = setting(2, "Consecutive clean slow paths that end the probation.", minimum=1, maximum=1000)
    probation_interval: float = setting(5.0, "Pause between the scrubs of the probation.", _SECONDS, minimum=0)

    def check(self) -> None:
        """Raise :class:`InvalidSetting` if the maximum backoff is shorter than the first."""
        if self.max_backoff < self.initial_backoff:
            raise InvalidSetting(
                "max_backoff",
                f"the longest pause ({self.max_backoff:g} s) is shorter than the first ({self.initial_backoff:g} s); "
                "write a maxBackoff of at least initialBackoff",
            )

    def backoff(self, failures: int) -> float:
        """Seconds before the next attempt after ``failures`` failed ones."""
        return float(min(self.max_backoff, self.initial_backoff * 2 ** min(failures, 32)))


@dataclass(frozen=True, slots=True)
class BreakerRule:
    """Limits of automatic actions on one node. They never stop a scrub and never return a device to service."""

    max_resets: int = setting(8, "Recovery resets on the node within the window.", minimum=0, maximum=10_000)
    window: float = setting(3600.0, "Window in which resets are counted.", _SECONDS, minimum=_MIN_SECONDS)
    max_soft_percent: int = setting(
        25,
        "Share of the node's devices that may be out of service for soft conditions at the same time; at least one device.",
        ValueType.PERCENT,
        minimum=0,
        maximum=100,
    )

    def check(self) -> None:
        """Raise :class:`InvalidSetting` if the window is longer than resets are remembered."""
        if self.window > DAY:
            raise InvalidSetting("window", "resets are remembered for a day; write a window of at most 24h")


@dataclass(frozen=True, slots=True)
class MaintenanceRule:
    """When idle devices are scrubbed again, one at a time."""

    interval: float | None = setting(
        None,
        "Time since the last certificate after which an idle device is scrubbed again, or never.",
        _SECONDS,
        minimum=_MIN_SECONDS,
        optional=True,
        decides_proof=False,
    )
    time_of_day: tuple[float, float] | None = setting(
        None,
        "Time of day, in UTC, at which it may start: 02:00-05:00, or always.",
        ValueType.TIME_OF_DAY,
        optional=True,
        decides_proof=False,
    )
    """Seconds of the day; the first may be later than the second (past midnight)."""
    diagnostics: DiagnosticLevel = setting(
        DiagnosticLevel.NONE, "Level of diagnostics in maintenance scrubs, if it is higher."
    )


@dataclass(frozen=True, slots=True)
class StuckPodsRule:
    """Pods whose starts are refused again and again.

    The times count from the first refusal.
    """

    notify_after: float = setting(
        60.0, "When an event is written on the pod, by a plugin with credentials.", _SECONDS, minimum=0
    )
    evict_after: float | None = setting(None, "When the pod is evicted, or never.", _SECONDS, minimum=0, optional=True)

    def check(self) -> None:
        """Raise :class:`InvalidSetting` if a pod would be evicted before its owner is notified."""
        if self.evict_after is not None and self.evict_after < self.notify_after:
            raise InvalidSetting(
                "evict_after",
                f"a pod cannot be evicted ({self.evict_after:g} s) before its owner is notified "
                f"({self.notify_after:g} s); write an evictAfter of at least notifyAfter",
            )


@dataclass(frozen=True, slots=True)
class DeviceTaintRule:
    """Taints of devices that a DRA driver publishes. Besides these, every device out of service has one (NoSchedule)."""

    dirty_after: float | None = setting(
        600.0,
        "How long a free device may be dirty before it has a taint (NoSchedule), or never.",
        _SECONDS,
        minimum=_MIN_SECONDS,
        optional=True,
    )
    evict_from_condemned: bool = setting(
        False, "Whether the taint of a condemned device also evicts the pods that use it (NoExecute)."
    )


@dataclass(frozen=True, slots=True)
class ScrubPlan:
    """The steps of one scrub, in order.

    Attributes:
        deadline: seconds for all steps except the memory and the diagnostics, together.
        reset: whether a reset among the steps may be omitted where the platform has none.
        may_leave_reset: whether another service may be asked to reset the device instead. Its word never replaces a
            reset that the policy requires at a hand-over.
        restores: whether the scrub ends what a quarantine demands, a reset included.
    """

    path: PathKind
    trigger: ScrubTrigger
    steps: tuple[Step, ...]
    deadline: float
    reset: ResetMode = ResetMode.NEVER
    diagnostics: DiagnosticLevel = DiagnosticLevel.NONE
    may_leave_reset: bool = False
    restores: bool = False


def _always_by_certificate(proofs: Mapping[HandOverKind, RequiredProof]) -> None:
    for kind in (HandOverKind.OTHER_TENANT, HandOverKind.UNKNOWN):
        if proofs.get(kind) is RequiredProof.CHECKS:
            key = camel_case(kind)
            raise InvalidSetting(
                key,
                f'"{key}" always needs a certificate, because checks cannot prove that the memory is '
                'clean; write "certificate" (to evaluate without refusing: enforcement: observe)',
            )


_ERROR_CLASSES: Mapping[StrEnum, str] = {
    ErrorClass.IGNORE: "Ignored.",
    ErrorClass.APPLICATION: "The application's own fault; the device is healthy.",
    ErrorClass.RESET: "The device is quarantined until a reset.",
    ErrorClass.REBOOT: "The device is quarantined until a reboot of the node.",
    ErrorClass.CONTEXT: "Depends on what else the driver reports.",
    ErrorClass.REPAIR: "The device needs an operator.",
    ErrorClass.UNKNOWN: "Treat like an unlisted code.",
}


@dataclass(frozen=True, slots=True)
class Policy:
    """A policy of the scrub service: required proof of hand-overs, limits, and reactions to faults.

    Contains everything that an administrator decides. The defaults and their order are those of
    ``policies/default.yaml``.
    """

    name: str = setting(
        "default",
        "Name of the policy; appears in every certificate.",
        ValueType.NAME,
        required=True,
        in_override="Name of the override; the policy of these devices is named FILE/OVERRIDE.",
        decides_proof=False,
    )
    digest: str = computed("")
    required_proofs: Mapping[HandOverKind, RequiredProof] = setting(
        {
            kind: RequiredProof.CHECKS if kind is HandOverKind.SAME_CONTAINER else RequiredProof.CERTIFICATE
            for kind in HandOverKind
        },
        "Required proof for each kind of hand-over: a certificate issued since the last grant, or the checks of the fast path.",
        ValueType.PROOF_BY_HAND_OVER,
        key="handOver",
        entries={
            HandOverKind.SAME_CONTAINER: "The same container starts again.",
            HandOverKind.SAME_POD: "Another container of the same pod.",
            HandOverKind.SAME_TENANT: "Another pod of the same tenant.",
            HandOverKind.OTHER_TENANT: "A pod of another tenant. Always by certificate.",
            HandOverKind.UNKNOWN: "The previous pod is unknown. Always by certificate.",
        },
        check=_always_by_certificate,
    )
    reset: ResetMode = setting(ResetMode.BEST_EFFORT, "Whether a slow path resets the device.")
    sharing: SharingMode = setting(SharingMode.SAME_TENANT, "Which pods may share the device at the same time.")
    enforcement: Enforcement = setting(
        Enforcement.ENFORCE,
        "observe: evaluate and record everything; refuse nothing, kill nothing.",
        decides_proof=False,  # the proof is the same, whether the result is enforced or not
    )
    unauthorized_use: UnauthorizedUseAction = setting(
        UnauthorizedUseAction.REFUSE,
        "Reaction to use of a device without a grant: refuse to hand it over while the use lasts, quarantine it until it "
        "was scrubbed, or kill pods' processes that do it after leftoverGracePeriod.",
        in_override="Reaction to use of the device without a grant.",
    )
    uninspected_processes: UninspectedProcessAction = setting(
        UninspectedProcessAction.REPORT,
        "Reaction to a pod's process that several walks over /proc cannot inspect: report it, or kill it. "
        "Processes of the node are never killed.",
        in_override="Reaction to a pod's process that cannot be inspected.",
        decides_proof=False,
    )
    limits: Limits = section(Limits, in_override="Time limits for these devices.")
    memory: MemoryRule = section(MemoryRule)
    diagnostics: DiagnosticsRule = section(DiagnosticsRule)
    infrastructure: Infrastructure = section(Infrastructure, overridable=False)
    injection: InjectionRule = section(InjectionRule, overridable=False)
    health: HealthRule = section(HealthRule)
    recovery: RecoveryRule = section(RecoveryRule, decides_proof=False)
    breaker: BreakerRule = section(BreakerRule, overridable=False, decides_proof=False)
    maintenance: MaintenanceRule = section(MaintenanceRule)
    stuck_pods: StuckPodsRule = section(StuckPodsRule, overridable=False, decides_proof=False)
    device_taints: DeviceTaintRule = section(DeviceTaintRule, decides_proof=False)
    settings: Mapping[str, str] = setting(
        {}, "Settings to restore instead of the driver's defaults.", ValueType.DEVICE_SETTINGS
    )
    error_classes: Mapping[int, ErrorClass] = setting(
        {},
        "What an XID means for the device. Codes that are not listed here keep their class from xid.yaml.",
        ValueType.CODES_BY_CLASS,
        key="xids",
        entries=_ERROR_CLASSES,
    )
    own_error_classes: Mapping[int, ErrorClass] = setting(
        {},
        "What an error code means for a device of a command backend, whose program reports it. Codes that are not listed are unknown.",
        ValueType.CODES_BY_CLASS,
        key="errors",
        entries=_ERROR_CLASSES,
    )
    unlisted_error: ErrorClass = ErrorClass.UNKNOWN
    error_notes: Mapping[int, str] = computed({})
    """A short description of each error code, for messages only."""
    signals: SignalTable = computed(COMMON_SIGNALS)
    """The meaning of each condition of the devices, by code; from their backend."""
    by_backend: Mapping[str, Policy] = computed({})
    """On a node with several backends, the same policy with the signal table of each, by the name of the backend."""
    overrides: tuple[PolicyOverride, ...] = setting(
        (),
        "Different settings for some devices. The first match applies.",
        ValueType.OVERRIDES,
        overridable=False,
        decides_proof=False,  # each override has a separate digest
        example="- name: inference",
    )

    def for_node(self, node: str) -> Policy:
        """Return the policy in force on ``node``: without the overrides for other nodes."""
        here = (each for each in self.overrides if not each.nodes or any(fnmatchcase(node, one) for one in each.nodes))
        return replace(self, overrides=tuple(here))

    def for_device(self, model: str, resources: Collection[str], backend: str = "") -> Policy:
        """Return the policy of a device of ``model`` that is advertised under ``resources``.

        Args:
            backend: the device's backend on a node with several; empty on others.
        """
        policy = self.by_backend.get(backend, self)
        return next((each.policy for each in policy.overrides if each.matches(model, resources)), policy)

    @property
    def proof_digest(self) -> str:
        """The digest for certificates; marked where observe mode omits a required reset, because that proves less."""
        short = self.reset is ResetMode.REQUIRED and self.enforcement is Enforcement.OBSERVE
        return f"{self.digest}/observed" if short else self.digest

    def required_proof(self, kind: HandOverKind) -> RequiredProof:
        """Return the proof that ``kind`` needs; a kind that the policy does not name needs a certificate."""
        return self.required_proofs.get(kind, RequiredProof.CERTIFICATE)

    def with_signals(self, table: SignalTable, members: Mapping[str, SignalTable] | None = None) -> Policy:
        """Return the policy and its overrides with the signal table of the devices' backend.

        Args:
            members: the tables of several backends by their names, where ``table`` is that of the node.
        """
        overrides = tuple(replace(each, policy=each.policy.with_signals(table)) for each in self.overrides)
        has_notes = table.error_classes is None and not table.errors.only_by_policy
        return replace(
            self,
            signals=table,
            error_notes=self.error_notes if has_notes else {},
            overrides=overrides,
            by_backend={name: self.with_signals(each) for name, each in (members or {}).items()},
        )

    def error_class(self, code: int) -> ErrorClass:
        """Return the class of an error code; an unlisted code is unknown, unless all codes were disabled.

        The numbers in a policy are not those of a backend that has its own.
        """
        if self.signals.errors.only_by_policy:
            return self.own_error_classes.get(code, ErrorClass.UNKNOWN)
        if self.signals.error_classes is not None:
            return self.signals.error_classes.get(code, ErrorClass.UNKNOWN)
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
        """Return the plan of ``path``.

        A reset and diagnostics come before the memory, because what they leave behind is audited and cleared with
        everything else: nothing touches the memory after it was verified. A plan contains a reset when a recovery needs
        it (``must_reset``) or the policy requires it, and never in observe mode; an operator may order one
        (``operator_ordered``) unless the policy forbids resets. ``recovering`` marks the scrub that ends a quarantine.
        """
        if path is PathKind.FAST:
            return ScrubPlan(path, trigger, (Step.HOLDERS, Step.SETTINGS, Step.HEALTH), 5 * self.limits.driver_call)
        resets = self.reset is ResetMode.REQUIRED or (must_reset and self.reset is ResetMode.BEST_EFFORT)
        resets = resets and self.enforcement is Enforcement.ENFORCE
        resets = resets or (operator_ordered and self.reset is not ResetMode.NEVER)
        levels = [self.diagnostics.slow_path]
        levels += [self.diagnostics.recovery] if recovering else []
        levels += [self.maintenance.diagnostics] if trigger is ScrubTrigger.MAINTENANCE else []
        level = max(levels, key=lambda each: each.seconds)
        steps = (
            Step.HOLDERS,
            *((Step.RESET,) if resets else ()),
            *((Step.DIAGNOSTICS,) if level is not DiagnosticLevel.NONE else ()),
            Step.MEMORY,
            *((Step.ON_CHIP,) if self.memory.on_chip else ()),
            Step.SETTINGS,
            Step.HEALTH,
        )
        return ScrubPlan(
            path,
            trigger,
            steps,
            self.limits.slow_path,
            self.reset if resets else ResetMode.NEVER,
            diagnostics=level,
            may_leave_reset=resets and (operator_ordered or self.reset is not ResetMode.REQUIRED),
            restores=recovering,
        )


@dataclass(frozen=True, slots=True)
class PolicyOverride:
    """A separate policy for some devices, with all of its values, including those equal to the node's policy.

    An empty ``nodes``, ``models`` or ``resources`` matches everything.
    """

    policy: Policy
    nodes: tuple[str, ...] = setting((), "Patterns of node names: gpu-test-*.", ValueType.PATTERNS)
    models: tuple[str, ...] = setting(
        (), "Patterns of model names: NVIDIA H200*.", ValueType.PATTERNS, example='["NVIDIA H200*"]'
    )
    resources: tuple[str, ...] = setting(
        (), "Resource names: nvidia.com/gpu.", ValueType.RESOURCES, example="[nvidia.com/gpu]"
    )

    def matches(self, model: str, resources: Collection[str]) -> bool:
        right_model = not self.models or any(fnmatchcase(model, each) for each in self.models)
        return right_model and (not self.resources or any(each in resources for each in self.resources))
