"""What the kubelet decided."""

from __future__ import annotations

from typing import Protocol

from scrubber.domain.assignment import Reading

__all__ = ["Assignments"]


class Assignments(Protocol):
    async def read(self) -> Reading:
        """A fresh reading of PodResources, corroborated by the checkpoint and the pod log directories.

        Never raises for a kubelet that is away or talks nonsense: the reading is then ``UNREADABLE`` and says why.
        """
