"""A node without a kubelet: no pod exists, which is certain because the administrator says so."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from scrubber.domain.assignment import KubeletReading, Pod, Trust

if TYPE_CHECKING:
    from scrubber.ports.runtime import Clock

__all__ = ["NoKubelet"]


class NoKubelet:
    """:class:`scrubber.ports.node.Assignments` of a node that has no pods: only jobs get its devices."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    async def read(self) -> KubeletReading:
        now = self._clock.monotonic()
        return KubeletReading(Trust.TRUSTED, started_at=now, finished_at=now, has_kubelet=False)

    def container_starts(self, pod: Pod) -> Mapping[str, int] | None:
        return None

    async def close(self) -> None:
        """Return: nothing is open."""
