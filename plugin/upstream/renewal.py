"""When the kubelet's socket of ours is made anew, so that a plugin that is gone registers again.

Promise: every plugin in the directory starts afresh each time, so it is done seldom: first after a little patience,
then twice as late each time, and after a handful of times not any more. A plugin that is started anew registers by
itself. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

__all__ = ["Renewals"]


@dataclass(frozen=True, slots=True)
class _Tries:
    count: int = 0
    at: float = 0.0


@dataclass(slots=True)
class Renewals:
    """Counts them for each resource.

    Attributes:
        patience: seconds that a plugin has to come back by itself, doubled each time in a row.
        most: times in a row.
        steady: seconds after which a plugin that came back counts as one that never went.
    """

    patience: float = 2.0
    most: int = 5
    steady: float = 300.0
    _tries: dict[str, _Tries] = field(default_factory=dict)

    def due(self, missing: Mapping[str, float], now: float) -> bool:
        """Whether it is time, and if so counts it.

        Args:
            missing: resource → since when its plugin has been away.
        """
        for resource, tries in list(self._tries.items()):
            if resource not in missing and now - tries.at >= self.steady:
                del self._tries[resource]
        late = [resource for resource, since in missing.items() if self._is_late(resource, since, now)]
        for resource in late:
            self._tries[resource] = _Tries(self._tries.get(resource, _Tries()).count + 1, now)
        return bool(late)

    def _is_late(self, resource: str, since: float, now: float) -> bool:
        tries = self._tries.get(resource)
        if tries is None:
            return now - since >= self.patience
        return tries.count < self.most and now - max(since, tries.at) >= self.patience * 2**tries.count
