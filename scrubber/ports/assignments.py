"""What the kubelet decided."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from scrubber.domain.assignment import Pod, Reading

__all__ = ["Assignments"]


class Assignments(Protocol):
    async def read(self) -> Reading:
        """A fresh reading of PodResources, corroborated by the checkpoint and the pod log directories.

        Never raises for a kubelet that is away or talks nonsense: the reading is then ``UNREADABLE`` and says why.
        """

    def starts(self, pod: Pod) -> Mapping[str, int] | None:
        """How often each container of ``pod`` was started, init containers included, by the logs that a runtime opens
        at each start. None where that cannot be told; empty where no container of the pod was ever started.
        """
