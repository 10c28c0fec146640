"""Generated policy files as operators write them: every key, every way of writing a value."""

from __future__ import annotations

import math
from typing import Any

from hypothesis import strategies as st

from scrubber.adapters.nvidia.conditions import NVIDIA_SIGNALS
from scrubber.domain.declaration import camel_case
from scrubber.domain.diagnostics import CHECK_NAMES, DiagnosticLevel
from scrubber.domain.health.signal_table import ErrorClass
from scrubber.domain.policy import (
    Enforcement,
    QuarantineTiming,
    ResetMode,
    SharingMode,
    UnauthorizedUseAction,
    UninspectedProcessAction,
)

__all__ = ["FILES", "FLOORS", "OVERRIDES"]


def times(least: float, most: float) -> st.SearchStrategy[Any]:
    """Durations between so many seconds, as numbers and with every unit."""
    units = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}
    ranges = {unit: (math.ceil(least / size), int(most / size)) for unit, size in units.items()}
    whole = [
        st.builds("{}{}".format, st.integers(first, last), st.just(unit))
        for unit, (first, last) in ranges.items()
        if first <= last
    ]
    parts = st.integers(math.ceil(least * 1e6), int(most * 1e6)).map(lambda number: f"{number / 1e6:.6f}s")
    return st.one_of(*whole, parts, st.floats(least, most), st.integers(*ranges["s"]))


def one_of(kind: Any) -> st.SearchStrategy[str]:
    return st.sampled_from([each.value for each in kind])


def some(**keys: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    """Any subset of the keys, in camelCase as in policy files."""
    return st.fixed_dictionaries({}, optional={camel_case(name): each for name, each in keys.items()})


PROOFS = st.sampled_from(["certificate", "checks"])
COUNTS = st.integers(1, 60)
SIZES = st.integers(1, 10**12) | st.builds(
    "{}{}".format, st.integers(1, 999), st.sampled_from(["", "B", "KiB", "MiB", "GB", "TiB", "TB", "kB"])
)
RATES = SIZES | SIZES.map(lambda size: f"{size}/s")
NEVER = st.just("never")
DAY_MINUTES = st.lists(st.integers(0, 1439), min_size=2, max_size=2, unique=True)
WINDOWS = DAY_MINUTES.map(lambda two: "-".join(f"{each // 60:02}:{each % 60:02}" for each in two))
PATTERNS = st.sampled_from(["*", "NVIDIA *", "NVIDIA L4*", "NVIDIA H200"])
FLOOR = st.dictionaries(st.sampled_from(list(CHECK_NAMES)), RATES, max_size=2) | st.just({"host-to-device": "20GB/s"})
FLOORS = st.dictionaries(PATTERNS, FLOOR, max_size=3)
WORDS = st.text(max_size=8) | st.sampled_from(["1e5", "08", "no", "~", ".inf", "0x1F", "1_000", "2026-11-20", " a\nb "])
SETTINGS = st.dictionaries(st.sampled_from(["power_limit_watts", "1e5", "compute_mode", "=", "<<"]), WORDS, max_size=3)
CODES = st.dictionaries(st.integers(1, 160) | st.integers(1, 9999), one_of(ErrorClass), max_size=12)
XIDS = CODES.map(
    lambda codes: {
        kind.value: sorted(code for code, each in codes.items() if each == kind.value) for kind in ErrorClass
    }
)
NAMES = st.from_regex(r"[a-z0-9]([a-z0-9-]{0,6}[a-z0-9])?", fullmatch=True) | st.sampled_from(["1e5", "08", "null"])

OF_DEVICES: dict[str, st.SearchStrategy[Any]] = {
    "hand_over": some(same_container=PROOFS, same_pod=PROOFS, same_tenant=PROOFS),
    "reset": one_of(ResetMode),
    "sharing": one_of(SharingMode),
    "enforcement": one_of(Enforcement),
    "unauthorized_use": one_of(UnauthorizedUseAction),
    "uninspected_processes": one_of(UninspectedProcessAction),
    "memory": some(count_residue=st.booleans(), pattern_pass=st.booleans(), on_chip=st.booleans(), max_uncovered=SIZES),
    "diagnostics": some(slow_path=one_of(DiagnosticLevel), recovery=one_of(DiagnosticLevel), min_rates=FLOORS),
    "recovery": some(
        initial_backoff=times(0.01, 60),
        max_backoff=times(60, 1e6),
        max_attempts=COUNTS,
        max_attempts_per_day=COUNTS,
        max_resets_per_day=COUNTS,
        probation_scrubs=COUNTS,
        probation_interval=times(0, 1e5),
    ),
    "maintenance": some(
        interval=times(0.01, 1e6) | NEVER, time_of_day=WINDOWS | st.just("always"), diagnostics=one_of(DiagnosticLevel)
    ),
    "device_taints": some(dirty_after=times(0.01, 1e6) | NEVER, evict_from_condemned=st.booleans()),
    "settings": SETTINGS,
    "xids": XIDS,
}
LIMITS: dict[str, st.SearchStrategy[Any]] = {
    "slow_path": times(31, 1e4),
    "clear_timeout_base": times(0.01, 100),
    "min_clear_rate": RATES,
    "reset": times(0.01, 30),
    "leftover_grace_period": times(0, 1e4),
    "unknown_pod_idle_period": times(0, 1e4),
    "max_temperature_celsius": st.integers(40, 150),
}
HEALTH: dict[str, st.SearchStrategy[Any]] = {
    "quarantine_after": st.dictionaries(
        st.sampled_from(sorted(NVIDIA_SIGNALS.soft)), times(0, 1e5) | NEVER, max_size=4
    ),
    "quiet_period": times(0.01, 1e4),
    "quarantine_at": one_of(QuarantineTiming),
}
OVERRIDES = st.lists(
    st.tuples(NAMES, some(**OF_DEVICES, limits=some(**LIMITS), health=some(**HEALTH))),
    max_size=3,
    unique_by=lambda entry: entry[0],
).map(
    lambda entries: [
        {"name": name, "models": [f"NVIDIA {number}*"], "resources": ["nvidia.com/gpu"], "nodes": ["gpu-?"], **settings}
        for number, (name, settings) in enumerate(entries)
    ]
)
FILES = st.builds(
    lambda name, settings: {"name": name, **settings},
    NAMES,
    some(
        **OF_DEVICES,
        limits=some(
            **LIMITS,
            hand_over=times(6, 25),
            driver_call=times(0.05, 5),
            eraser_slots=st.integers(1, 256) | st.just("auto"),
            break_glass=times(0.01, 1e5),
        ),
        health=some(**HEALTH, tenant_quarantine_threshold=COUNTS),
        breaker=some(max_resets=st.integers(0, 99), window=times(0.01, 86400), max_soft_percent=st.integers(0, 100)),
        stuck_pods=some(notify_after=times(0, 60), evict_after=times(60, 1e5) | NEVER),
        infrastructure=some(
            systemd_units=st.lists(st.sampled_from(["a@1.service", "b.service", "1.service"]), max_size=2),
            groups=st.lists(st.sampled_from(["systemd", "gpu-operator", "eks"]), max_size=2),
            pods=st.lists(
                st.fixed_dictionaries(
                    {"namespace": NAMES},
                    optional={"serviceAccount": NAMES, "class": st.sampled_from(["monitoring", "driver"])},
                ),
                max_size=2,
            ),
        ),
        injection=some(envvar=st.sampled_from(["allow", "refuse"])),
        overrides=OVERRIDES,
    ),
)
