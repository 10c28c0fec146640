"""What the engine asks of the node: who the kubelet gives devices to, and the processes of pods."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from typing import Protocol

from scrubber.domain.assignment import KubeletReading, Pod, Process

__all__ = ["Assignments", "Containers"]


class Assignments(Protocol):
    async def read(self) -> KubeletReading:
        """A fresh reading of PodResources, corroborated by the checkpoint and the pod log directories.

        Never raises for a kubelet that is away or talks nonsense: the reading is then ``UNREADABLE`` and says why.
        """

    def container_starts(self, pod: Pod) -> Mapping[str, int] | None:
        """How often each container of ``pod`` was started, init containers included, by the logs that a runtime opens
        at each start. None where that cannot be told; empty where no container of the pod was ever started.
        """


class Containers(Protocol):
    async def processes(self, pod: Pod) -> tuple[Process, ...]:
        """All processes in any container of ``pod``, the sandbox included, whether or not they hold a device.

        Precondition: ``pod.uid`` is known.

        Raises:
            Unreadable: the processes cannot be told (never an empty answer instead), or there are so many that they
                are not listed one by one.
        """

    async def pod_uid_of(self, pid: int) -> str | None:
        """UID of the pod that ``pid`` belongs to; None when it belongs to no pod or is gone.

        Raises:
            Unavailable: the node is short of descriptors or memory.
            Unreadable: it is there, and which pod it is in cannot be told.
        """

    def watch_first_container(self, pod: Pod) -> asyncio.Future[str] | None:
        """Return a future of the name of the first container that a runtime creates in ``pod`` from now on.

        The name is that of :attr:`~scrubber.domain.assignment.Process.container`. The future waits for as long as none is
        created; cancel it to stop. None where the creation of a container cannot be seen. Precondition: ``pod.uid`` is
        known.
        """

    async def terminate(self, pod: Pod, leftovers: Iterable[Process], deadline: float) -> tuple[Process, ...]:
        """End ``leftovers``, and whatever they fork meanwhile; answers those alive ``deadline`` seconds after the signal.

        A process is signalled only while it is still the one that was named (start time) and still in ``pod``.
        """

    async def kill_cgroups(self, pod: Pod, deadline: float) -> bool:
        """End everything in the pod's own cgroups without having listed it; whether the kernel says that nobody is left.

        Precondition: ``pod`` is proved gone and beyond its grace. Nobody is asked here which of its processes are
        leftovers: all of them are.

        Args:
            deadline: seconds that they have to die, once they were signalled; and at most as many to signal them.

        Raises:
            Unreadable: which cgroups are the pod's, or who is in them, cannot be told for certain; or the service itself
                is in it. A way of telling containers apart that has not the kernel's word answers False and ends nobody.
        """

    def not_covered(self) -> tuple[str, ...]:
        """What this way of telling containers apart cannot see; empty with cgroups."""
