"""Determines what a process belongs to, and whether the policy counts it as the node's infrastructure.

Only evidence that a tenant cannot choose decides: the systemd unit by the kernel's cgroups, and the pod's identity as
the kubelet records it. A process name never does.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Protocol

from scrubber.domain.errors import ScrubberError
from scrubber.domain.infrastructure import (
    InfrastructureClass,
    InfrastructureProcess,
    PodIdentity,
    ProcessOwner,
    class_of_pod,
    class_of_unit,
    infrastructure_kind,
)
from scrubber.domain.jobs import parse_process_group
from scrubber.domain.policy import Infrastructure

__all__ = ["PodNames", "ProcessOwners"]


class PodNames(Protocol):
    """The kubelet's record of pods."""

    def find(self, pod_uid: str) -> PodIdentity | None:
        """The identity of a pod, as far as nothing contradicts it."""

    def name_of(self, pod_uid: str) -> tuple[str, str] | None:
        """Namespace and name of a pod, for display."""


class ProcessOwners:
    """What processes of this node belong to.

    Args:
        unit_of: returns the systemd unit of a PID, or None.
        pod_uid_of: returns the UID of the pod of a PID, or None.
        pods: the identities of pods.
        allowed: returns what the policy in force allows.
    """

    def __init__(
        self,
        *,
        unit_of: Callable[[int], str | None],
        pod_uid_of: Callable[[int], Awaitable[str | None]],
        pods: PodNames,
        allowed: Callable[[], Infrastructure],
    ) -> None:
        self._unit_of = unit_of
        self._pod_uid_of = pod_uid_of
        self._pods = pods
        self._allowed = allowed

    async def infrastructure(self, pid: int, *, has_context: bool) -> InfrastructureProcess | None:
        """Implement :class:`scrubber.ports.device.InfrastructureLookup`."""
        allowed = self._allowed()
        unit = self._unit_of(pid)
        found = class_of_unit(allowed.all_units, unit)
        if found is not None and unit is not None:
            return _process(found, unit, has_context=has_context)
        uid = await self._pod_uid_of(pid) if allowed.all_pods else None
        pod = None if uid is None else self._pods.find(uid)
        found = None if pod is None else class_of_pod(allowed.all_pods, pod)
        if pod is None or found is None:
            return None
        return _process(found, f"{pod.namespace}/{pod.name}", has_context=has_context)

    async def owner_of(self, pid: int) -> ProcessOwner:
        """Implement :class:`scrubber.ports.node.Owners`."""
        try:
            uid = await self._pod_uid_of(pid)
        except ScrubberError:
            return ProcessOwner()
        if uid is None:
            return ProcessOwner(unit=self._unit_of(pid) or "")
        if (job := parse_process_group(uid)) is not None:
            return ProcessOwner(unit="{} job {}".format(*job))
        namespace, name = self._pods.name_of(uid) or ("", "")
        return ProcessOwner(namespace, name, uid)


def _process(found: InfrastructureClass, owner: str, *, has_context: bool) -> InfrastructureProcess:
    kind = infrastructure_kind(found, has_context=has_context)
    return InfrastructureProcess(kind, owner, found is InfrastructureClass.MONITORING)
