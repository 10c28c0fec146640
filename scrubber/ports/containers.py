"""Which processes a pod has, and how leftovers are ended."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from scrubber.domain.assignment import Pod, Process

__all__ = ["Containers"]


class Containers(Protocol):
    async def processes(self, pod: Pod) -> tuple[Process, ...]:
        """All processes in any container of ``pod``, the sandbox included, whether or not they hold a device.

        Precondition: ``pod.uid`` is known.

        Raises:
            Unreadable: the processes cannot be told (never an empty answer instead).
        """

    async def pod_uid_of(self, pid: int) -> str | None:
        """UID of the pod that ``pid`` belongs to; None when it belongs to no pod or is gone."""

    async def end(self, pod: Pod, leftovers: Iterable[Process], deadline: float) -> tuple[Process, ...]:
        """End ``leftovers``, and whatever they fork meanwhile; answers those still alive after ``deadline`` seconds.

        A process is signalled only while it is still the one that was named (start time) and still in ``pod``.
        """

    def not_covered(self) -> tuple[str, ...]:
        """What this way of telling containers apart cannot see; empty with cgroups."""
