"""What a device should be: what does not change from tenant to tenant, and no default of the driver's tells.

It is taken when the device is first seen, and from then on only a person changes it. Firmware that differs afterwards is
told of, because whoever could write it could leave more behind than any scrub clears. Settings are not in here: those are
brought back to the policy's or the driver's values, never to what was found.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from scrubber.domain.device import Device

__all__ = ["Baseline", "BaselineDifference", "baseline_differences", "baseline_facts"]

_FACTS = ("serial", "vbios", "inforom")
"""Traits of a device that stay as they are while nobody services it."""


@dataclass(frozen=True, slots=True)
class Baseline:
    """What one device should be.

    Attributes:
        facts: by name, in order.
        conditions: that a person called normal, each with what was read then (``pcie-width``, ``x8 of x16``).
        at: wall-clock seconds.
        actor: ``service`` when the device was first seen, ``uid:1000`` for a person since.
        reason: the person's; empty for the service.
    """

    facts: tuple[tuple[str, str], ...]
    conditions: tuple[tuple[str, str], ...] = ()
    at: float = 0.0
    actor: str = "service"
    reason: str = ""

    def with_new_facts(self, device: Device) -> Baseline:
        """With the facts of ``device`` as it is described now that were never told before."""
        new = {name: value for name, value in baseline_facts(device) if name not in dict(self.facts)}
        return replace(self, facts=tuple(sorted({**dict(self.facts), **new}.items()))) if new else self


@dataclass(frozen=True, slots=True)
class BaselineDifference:
    """A fact that is not as it should be; ``actual`` None where it is not told any more."""

    name: str
    expected: str
    actual: str | None

    def __str__(self) -> str:
        return f"{self.name} is {self.actual or 'not told any more'}, not {self.expected}"


def baseline_facts(device: Device) -> tuple[tuple[str, str], ...]:
    """What a baseline of ``device`` as it is described now would say."""
    traits = dict(device.traits)
    said: Mapping[str, str] = {"model": device.model, **{name: traits[name] for name in _FACTS if name in traits}}
    return tuple(sorted(said.items()))


def baseline_differences(device: Device, baseline: Baseline | None) -> tuple[BaselineDifference, ...]:
    """Where ``device`` as it is described now is not as it should be; nothing where nobody knows what it should be.

    A fact that nobody told before, by an older driver say, is no difference: :meth:`Baseline.with_new_facts` takes it in.
    """
    if baseline is None:
        return ()
    expected, found = dict(baseline.facts), dict(baseline_facts(device))
    return tuple(
        BaselineDifference(name, wanted, found.get(name))
        for name, wanted in sorted(expected.items())
        if found.get(name) != wanted
    )
