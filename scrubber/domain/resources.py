"""What the kubelet's ids mean: which device, the whole of it or a share, and which resources are our plugin's own. Pure.

A resource's ids are its plugin's to choose. Our devices' own ids, and those with a number behind them, speak for
themselves; what another id means only the plugin can say, and it can never give one of ours another meaning.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from scrubber.domain.errors import InvalidRequest

__all__ = ["LONGEST_NAME", "MOST_OFFERS", "MOST_RESOURCES", "REPLICA", "Announced", "Meaning", "own_meaning"]

REPLICA = "::"
"""Between a device's id and the number of one of its shares."""
MOST_RESOURCES = 64
MOST_OFFERS = 16_384
"""Of all resources together."""
LONGEST_NAME = 512
"""Characters of a resource's name, and of an id; the kubelet's limit for the former is 317."""


@dataclass(frozen=True, slots=True)
class Meaning:
    """``device`` is our id; ``share``: of a device that several containers may have, not the whole of it."""

    device: str
    share: bool = False


def own_meaning(listed: str, ours: Collection[str]) -> Meaning | None:
    """What ``listed`` means by itself, whichever resource has it; None when it is no id made of one of ``ours``."""
    if listed in ours:
        return Meaning(listed)
    device, mark, number = listed.rpartition(REPLICA)
    if mark and number.isdecimal() and number.isascii() and device in ours:
        return Meaning(device, share=True)
    return None


@dataclass(frozen=True, slots=True)
class Announced:
    """What plugins said of their ids: by resource, id → meaning. Kept in memory; a plugin says it to each service anew."""

    resources: Mapping[str, Mapping[str, Meaning]] = field(default_factory=dict)

    def meaning(self, resource: str, listed: str, ours: Collection[str]) -> Meaning | None:
        """The device of ``ours`` that ``resource`` calls ``listed``; None when there is none."""
        own = own_meaning(listed, ours)
        if own is not None:
            return own
        meant = self.resources.get(resource, {}).get(listed)
        return meant if meant is not None and meant.device in ours else None

    def announce(self, resource: str, offers: Mapping[str, str], ours: Collection[str]) -> Announced:
        """``offers`` (id → device) in the place of all that ``resource`` announced before.

        Ids that mean one device together are its shares. A device that is not of ``ours`` yet may be one day.

        Raises:
            InvalidRequest: an impossible name or id, one of ``ours`` with another meaning, or more than is kept.
        """
        for what in (resource, *offers, *offers.values()):
            if not what.strip() or len(what) > LONGEST_NAME or not what.isprintable():
                raise InvalidRequest(f"{what[:80]!r} is no name of a resource and no id of a device.")
        for listed, device in offers.items():
            own = own_meaning(listed, ours)
            if own is not None and own.device != device:
                raise InvalidRequest(f"{resource} cannot call {device} by the id {listed}, which is {own.device}.")
        counts = Counter(offers.values())
        meanings = {listed: Meaning(device, share=counts[device] > 1) for listed, device in offers.items()}
        resources = {**self.resources, resource: meanings}
        if len(resources) > MOST_RESOURCES:
            raise InvalidRequest(f"Over {MOST_RESOURCES} resources were announced; {resource} is one too many.")
        if sum(len(each) for each in resources.values()) > MOST_OFFERS:
            raise InvalidRequest(f"Over {MOST_OFFERS} ids were announced in all; those of {resource} are too many.")
        return Announced(resources)
