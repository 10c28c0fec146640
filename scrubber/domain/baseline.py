"""The baseline of a device: facts that do not change from tenant to tenant and have no driver default.

It is recorded when the device is first seen, and afterwards only an operator changes it. Firmware that differs later is
reported, because a process that could write it could leave more behind than any scrub clears. Settings are not part of
it: they are restored to the policy's or the driver's values, never to the values that were found.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from scrubber.domain.device import Device

__all__ = ["Baseline", "BaselineDifference", "baseline_differences", "baseline_facts"]

_FACTS = ("serial", "vbios", "inforom")
"""Traits of a device that do not change unless the device is serviced."""


# See docs/decisions/0032-device-baseline.md.
@dataclass(frozen=True, slots=True)
class Baseline:
    """The expected facts of one device.

    Attributes:
        facts: by name, in order.
        conditions: conditions that an operator accepted as normal, each with the value read then (``pcie-width``, ``x8
            of x16``).
        at: wall-clock seconds.
        actor: ``service`` for the first baseline, ``uid:1000`` for one accepted by an operator.
        reason: the operator's reason; empty for the service.
    """

    facts: tuple[tuple[str, str], ...]
    conditions: tuple[tuple[str, str], ...] = ()
    at: float = 0.0
    actor: str = "service"
    reason: str = ""

    def with_new_facts(self, device: Device) -> Baseline:
        """Return the baseline with the facts of ``device`` that it did not contain yet."""
        new = {name: value for name, value in baseline_facts(device) if name not in dict(self.facts)}
        return replace(self, facts=tuple(sorted({**dict(self.facts), **new}.items()))) if new else self


@dataclass(frozen=True, slots=True)
class BaselineDifference:
    """A fact that differs from the baseline; ``actual`` is None where it is no longer reported."""

    name: str
    expected: str
    actual: str | None

    def __str__(self) -> str:
        if self.actual is None:
            return f"{self.name} is no longer reported (was {self.expected})"
        return f"{self.name} is {self.actual}, not {self.expected}"


def baseline_facts(device: Device) -> tuple[tuple[str, str], ...]:
    """Return the facts that a baseline of ``device`` would contain now."""
    traits = dict(device.traits)
    values: Mapping[str, str] = {"model": device.model, **{name: traits[name] for name in _FACTS if name in traits}}
    return tuple(sorted(values.items()))


def baseline_differences(device: Device, baseline: Baseline | None) -> tuple[BaselineDifference, ...]:
    """Return where ``device`` differs from its baseline; empty where it has none.

    A fact that was not reported before, for example by an older driver, is no difference:
    :meth:`Baseline.with_new_facts` adds it.
    """
    if baseline is None:
        return ()
    expected, found = dict(baseline.facts), dict(baseline_facts(device))
    return tuple(
        BaselineDifference(name, value, found.get(name))
        for name, value in sorted(expected.items())
        if found.get(name) != value
    )
