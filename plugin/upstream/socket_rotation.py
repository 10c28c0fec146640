"""Decides when our kubelet socket is created again, so that a plugin that is gone registers again.

Invariant: every plugin in the directory restarts each time, so it is done rarely: first after a short delay, then with
doubled delays, and after a limited number of times no more. A restarted plugin registers without it. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

__all__ = ["SocketRotation"]


@dataclass(frozen=True, slots=True)
class _Attempts:
    count: int = 0
    at: float = 0.0


@dataclass(slots=True)
class SocketRotation:
    """Counts the rotations for each resource.

    Attributes:
        initial_delay: seconds for a plugin to come back without a rotation, doubled after each consecutive one.
        max_rotations: limit of consecutive rotations.
        reset_after: seconds after which a plugin that came back counts as never gone.
    """

    initial_delay: float = 2.0
    max_rotations: int = 5
    reset_after: float = 300.0
    _attempts: dict[str, _Attempts] = field(default_factory=dict)

    def check_due(self, missing: Mapping[str, float], now: float) -> bool:
        """Return whether a rotation is due, and count it if so.

        Args:
            missing: resource → since when its plugin has been away.
        """
        for resource, tries in list(self._attempts.items()):
            if resource not in missing and now - tries.at >= self.reset_after:
                del self._attempts[resource]
        late = [resource for resource, since in missing.items() if self._is_overdue(resource, since, now)]
        for resource in late:
            self._attempts[resource] = _Attempts(self._attempts.get(resource, _Attempts()).count + 1, now)
        return bool(late)

    def _is_overdue(self, resource: str, since: float, now: float) -> bool:
        tries = self._attempts.get(resource)
        if tries is None:
            return now - since >= self.initial_delay
        return tries.count < self.max_rotations and now - max(since, tries.at) >= self.initial_delay * 2**tries.count
