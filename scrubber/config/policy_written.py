"""A policy in the words of its file: what is shown can be saved, and is then the same policy.

Every value is written out, those included that a file may leave out; of XIDs those whose class is not the shipped table's,
and of an override what differs. Times, sizes and ranges stand as people write them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import yaml

from scrubber.config.quantities import write_codes, write_rate, write_seconds, write_size, write_window
from scrubber.config.yaml_lines import is_word
from scrubber.domain.policy import (
    BreakerRule,
    DiagnosticsRule,
    HealthRule,
    Infrastructure,
    MaintenanceRule,
    MemoryRule,
    Override,
    Policy,
    RecoveryRule,
    StuckRule,
    XidClass,
)
from scrubber.domain.signals import SOFT

__all__ = ["as_yaml", "short_name", "written"]

_Written = dict[str, Any]
"""Keys as a file spells them, and what YAML can carry."""


def written(policy: Policy, table: Mapping[int, XidClass]) -> _Written:
    """What a file with nothing left out would hold: for :func:`~scrubber.config.policy_file.parse_policy`, the same policy.

    Args:
        policy: as it was read from a file.
        table: the classes of the XIDs that need not be written.
    """
    overrides = [_override(each, policy) for each in policy.overrides]
    return {**_values(policy), "xids": _xids(policy.xids, table), "overrides": overrides}


def short_name(override: Override) -> str:
    """What the file calls an override; its policy is called ``<policy>/<override>``."""
    return override.policy.name.partition("/")[2]


def _values(policy: Policy) -> _Written:
    """All but XIDs and overrides, which are written by what differs."""
    return {
        "name": policy.name,
        "hand-over": {kind.value: proof.value for kind, proof in policy.proofs.items()},
        "reset": policy.reset.value,
        "sharing": policy.sharing.value,
        "enforcement": policy.enforcement.value,
        "ungranted": policy.ungranted.value,
        "uninspectable": policy.uninspectable.value,
        "limits": _limits(policy),
        "memory": _memory(policy.memory),
        "diagnostics": _diagnostics(policy.diagnostics),
        "infrastructure": _infrastructure(policy.infrastructure),
        "injection": {"envvar": policy.injection.envvar.value},
        "health": _health(policy.health),
        "recovery": _recovery(policy.recovery),
        "breaker": _breaker(policy.breaker),
        "maintenance": _maintenance(policy.maintenance),
        "stuck": _stuck(policy.stuck),
        "settings": dict(policy.settings),
    }


def _limits(policy: Policy) -> _Written:
    limits = policy.limits
    return {
        "hand-over": write_seconds(limits.hand_over),
        "slow-path": write_seconds(limits.slow_path),
        "memory-floor": write_seconds(limits.memory_floor),
        "memory-rate": write_rate(limits.memory_bytes_per_second),
        "question": write_seconds(limits.question),
        "reset": write_seconds(limits.reset),
        "dying-grace": write_seconds(limits.dying_grace),
        "settle": write_seconds(limits.settle),
        "eraser-slots": limits.eraser_slots,
        "temperature-celsius": limits.temperature_celsius,
        "break-glass": write_seconds(limits.break_glass),
    }


def _memory(rule: MemoryRule) -> _Written:
    return {
        "audit": rule.audit,
        "pattern": rule.pattern,
        "on-chip": rule.on_chip,
        "max-uncovered": write_size(rule.max_uncovered),
    }


def _diagnostics(rule: DiagnosticsRule) -> _Written:
    floors = {
        model: {check: write_rate(int(rate)) for check, rate in rates.items()} for model, rates in rule.floors.items()
    }
    return {"slow-path": rule.slow_path.value, "recovery": rule.recovery.value, "floors": floors}


def _infrastructure(rule: Infrastructure) -> _Written:
    pods = [{"namespace": namespace, "service-account": account} for namespace, account in sorted(rule.pods)]
    return {"units": sorted(rule.units), "pods": pods}


def _health(rule: HealthRule) -> _Written:
    return {
        "sustained": {code: _or_never(rule.sustained.get(code)) for code in sorted(SOFT)},
        "calm": write_seconds(rule.calm),
        "news": rule.news.value,
        "blame": rule.blame,
    }


def _recovery(rule: RecoveryRule) -> _Written:
    return {
        "backoff-initial": write_seconds(rule.backoff_initial),
        "backoff-max": write_seconds(rule.backoff_max),
        "attempts": rule.attempts,
        "attempts-per-day": rule.attempts_per_day,
        "resets-per-day": rule.resets_per_day,
        "probation-scrubs": rule.probation_scrubs,
        "probation-interval": write_seconds(rule.probation_interval),
    }


def _breaker(rule: BreakerRule) -> _Written:
    return {"resets": rule.resets, "window": write_seconds(rule.window), "soft-percent": rule.soft_percent}


def _maintenance(rule: MaintenanceRule) -> _Written:
    return {
        "every": _or_never(rule.every),
        "between": "always" if rule.between is None else write_window(rule.between),
        "diagnostics": rule.diagnostics.value,
    }


def _stuck(rule: StuckRule) -> _Written:
    return {"tell-after": write_seconds(rule.tell_after), "evict-after": _or_never(rule.evict_after)}


def _or_never(seconds: float | None) -> str | float:
    return "never" if seconds is None else write_seconds(seconds)


def _xids(classes: Mapping[int, XidClass], others: Mapping[int, XidClass]) -> _Written:
    """By class, the codes that have another one in ``others``, or none."""
    differing = {code: kind for code, kind in classes.items() if others.get(code) is not kind}
    lists = {kind.value: write_codes(code for code, each in differing.items() if each is kind) for kind in XidClass}
    return {name: codes for name, codes in lists.items() if codes}


def _override(override: Override, node: Policy) -> _Written:
    """For which devices, and what differs from the policy that it stands in."""
    who = {"nodes": override.nodes, "models": override.models, "resources": override.resources}
    mine, others = _values(override.policy), _values(node)
    floors = _first_floors(mine["diagnostics"].pop("floors"), others["diagnostics"].pop("floors"))
    differing = _differing(mine, others) | {"name": short_name(override)}
    if floors:
        differing.setdefault("diagnostics", {})["floors"] = floors
    xids = _xids(override.policy.xids, node.xids)
    differing |= {"xids": xids} if xids else {}
    return {"name": "", **{key: [*each] for key, each in who.items() if each}, **differing}


def _differing(values: _Written, others: _Written) -> _Written:
    """The entries of ``values`` that ``others`` has not, or has otherwise."""
    found: _Written = {}
    for key, value in values.items():
        other = others.get(key)
        if isinstance(value, dict) and isinstance(other, dict):
            inner = _differing(value, other)
            found |= {key: inner} if inner else {}
        elif key not in others or value != other:
            found[key] = value
    return found


def _first_floors(floors: _Written, others: _Written) -> _Written:
    """The fewest of ``floors`` that an override has to name: of patterns the first that fits counts, and its own come first."""
    items = list(floors.items())
    for count in range(len(items)):
        own = dict(items[:count])
        if items[count:] == [(model, rates) for model, rates in others.items() if model not in own]:
            return own
    return floors


class _Writer(yaml.SafeDumper):
    """Writes what :mod:`scrubber.config.yaml_lines` reads: no anchors, and no word that YAML 1.2 takes for a number."""

    def ignore_aliases(self, data: object) -> bool:
        return True

    def word(self, text: str) -> yaml.Node:
        return self.represent_scalar("tag:yaml.org,2002:str", text, style=None if is_word(text) else "'")

    def list(self, entries: list[object]) -> yaml.Node:
        on_one_line = not any(isinstance(each, dict) for each in entries)
        return self.represent_sequence("tag:yaml.org,2002:seq", entries, flow_style=on_one_line)


_Writer.add_representer(str, _Writer.word)
_Writer.add_representer(list, _Writer.list)


def as_yaml(values: Mapping[str, Any]) -> str:
    """``values`` as the text of a file; ASCII."""
    return yaml.dump(dict(values), Dumper=_Writer, sort_keys=False, width=120)
