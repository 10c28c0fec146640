"""Ports for the node: the kubelet's device assignments and the processes of pods."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from typing import Protocol

from scrubber.domain.assignment import KubeletReading, Pod, Process
from scrubber.domain.infrastructure import ProcessOwner
from scrubber.domain.pods import RemainingCgroups

__all__ = ["Assignments", "Containers", "Owners", "PodCgroups"]


class Assignments(Protocol):
    async def read(self) -> KubeletReading:
        """Read PodResources now, corroborated by the checkpoint and the pod log directories.

        Never raises when the kubelet is unavailable or returns invalid data: the reading is then ``UNREADABLE`` and
        contains the reason.
        """

    def container_starts(self, pod: Pod) -> Mapping[str, int] | None:
        """How often each container of ``pod`` was started, init containers included.

        Counted by the log files that a runtime opens at each start.

        None when this cannot be determined; empty when no container of the pod was ever started.
        """


class Containers(Protocol):
    async def processes(self, pod: Pod) -> tuple[Process, ...]:
        """All processes in any container of ``pod``, the sandbox included, whether or not they hold a device.

        Precondition: ``pod.uid`` is known.

        Raises:
            Unreadable: the processes cannot be determined (never reported as an empty result), or there are too many to
                list individually.
        """

    async def pod_uid_of(self, pid: int) -> str | None:
        """UID of the pod that ``pid`` belongs to; None when it belongs to no pod or has exited.

        Raises:
            Unavailable: the node is short of descriptors or memory.
            Unreadable: the process exists, but its pod cannot be determined.
        """

    async def terminate(self, pod: Pod, leftovers: Iterable[Process], deadline: float) -> tuple[Process, ...]:
        """Kill ``leftovers`` and what they fork; return those still alive ``deadline`` seconds after the signal.

        A process is signalled only while it is still the one that was named (same start time) and still in ``pod``.
        """

    async def kill_cgroups(self, pod: Pod, deadline: float) -> bool:
        """Kill everything in the pod's own cgroups without listing it; return whether the kernel reports them empty.

        Precondition: ``pod`` is proved gone and past its grace period. This method does not check which of its
        processes are leftovers: all of them are.

        Args:
            deadline: seconds that the processes have to exit once signalled; signalling them may take the same time
                again.

        Raises:
            Unreadable: which cgroups are the pod's, or which processes are in them, cannot be determined for certain;
                or the service itself is in one of them.

        An implementation that identifies containers without the kernel's confirmation returns False and kills nothing.
        """

    def not_covered(self) -> tuple[str, ...]:
        """What this way of identifying containers cannot detect; empty with cgroups."""


class PodCgroups(Protocol):
    """How containers begin and end, as the kernel shows it. Precondition of all: ``pod.uid`` is known."""

    def watch_first_container(self, pod: Pod) -> asyncio.Future[str] | None:
        """Return a future of the name of the first container that a runtime creates in ``pod`` after this call.

        The name has the form of :attr:`~scrubber.domain.assignment.Process.container`. The future stays pending until a
        container is created; cancel it to stop watching. Returns None where the creation of a container cannot be
        observed.
        """

    def watch_end(self, pod: Pod) -> asyncio.Future[None] | None:
        """Return a future that is done when a container of ``pod``, or the last one, has ended after this call.

        That is a reason to look, and proves nothing. Cancel it to stop watching. The future of a pod of which no cgroup
        is left stays pending. Returns None where containers are not identified by cgroups.

        Raises:
            Unreadable: it cannot be watched now; the message names the limit or the file.
        """

    async def require_job_cgroups(self) -> None:
        """Return if the workload manager of the node keeps jobs in cgroups: otherwise a running job would look over.

        Raises:
            Unreadable: it keeps none; the message names what to set.
        """

    async def remaining_cgroups(self, pod: Pod) -> RemainingCgroups | None:
        """Return which cgroups are left of ``pod``; None where containers are not identified by cgroups.

        Raises:
            Unreadable: that cannot be determined.
        """


class Owners(Protocol):
    async def owner_of(self, pid: int) -> ProcessOwner:
        """What ``pid`` belongs to, for display only; never raises, and is empty where nothing is known."""
