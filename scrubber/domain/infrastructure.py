"""The node's infrastructure: agents that hold devices without being tenants, and what their use means for a device."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from scrubber.domain.telemetry import Holder, HolderKind

__all__ = [
    "InfrastructureClass",
    "InfrastructurePod",
    "InfrastructureProcess",
    "InfrastructureUnit",
    "NamedHolder",
    "PodIdentity",
    "ProcessOwner",
    "class_of_pod",
    "class_of_unit",
    "infrastructure_kind",
]


class InfrastructureClass(StrEnum):
    """What an agent of the node's infrastructure does with devices."""

    MONITORING = "monitoring"
    """It has devices open. A context counts as validation: it is not needed for monitoring."""
    DRIVER = "driver"
    """It is part of the driver and may also have contexts; certificates list the memory that it uses."""
    VALIDATION = "validation"
    """It runs short programs on devices: a device is dirty afterwards, and a scrub waits until they have ended."""


class InfrastructureUnit(NamedTuple):
    """A systemd unit of the infrastructure."""

    name: str
    agent_class: InfrastructureClass = InfrastructureClass.DRIVER


class InfrastructurePod(NamedTuple):
    """Pods of the infrastructure.

    Attributes:
        service_account: their account, with ``*`` at its end for every account that begins so; empty for any. It
            counts only for a pod whose account is known.
    """

    namespace: str
    service_account: str = ""
    agent_class: InfrastructureClass = InfrastructureClass.MONITORING

    def allows(self, account: str) -> bool:
        """Whether a pod under ``account`` in the namespace is meant."""
        wanted = self.service_account
        return account.startswith(wanted[:-1]) if wanted.endswith("*") else wanted in ("", account)


@dataclass(frozen=True, slots=True)
class PodIdentity:
    """A pod as the kubelet records it.

    Attributes:
        service_account: the account in the token that the kubelet gave to the pod; None for a pod without a token.
    """

    namespace: str
    name: str
    uid: str
    service_account: str | None = None


class InfrastructureProcess(NamedTuple):
    """A process of the infrastructure.

    Attributes:
        kind: ``INFRASTRUCTURE`` or ``VALIDATION``.
        owner: its systemd unit, or its pod (``namespace/name``).
        is_monitoring: whether it is of the class ``monitoring``, and can be paused.
    """

    kind: HolderKind
    owner: str
    is_monitoring: bool = False


@dataclass(frozen=True, slots=True)
class ProcessOwner:
    """What a process belongs to; for display only. A process of the node outside all units has no field set.

    Attributes:
        pod_uid: UID of its pod; the pod's namespace and name are empty where they are not known.
        unit: its systemd unit, or its job (``slurm job 4711``).
    """

    namespace: str = ""
    pod: str = ""
    pod_uid: str = ""
    unit: str = ""

    @property
    def label(self) -> str:
        """The pod (``namespace/name``, or its UID) or the systemd unit; empty if the process belongs to neither."""
        return f"{self.namespace}/{self.pod}" if self.pod else self.pod_uid or self.unit

    def __str__(self) -> str:
        if self.pod:
            return f"of {self.namespace}/{self.pod}"
        if self.pod_uid:
            return f"of pod {self.pod_uid}"
        return f"of {self.unit}" if self.unit else "outside all pods"


@dataclass(frozen=True, slots=True)
class NamedHolder:
    """A holder with what it belongs to; for operators only, and never in a pod's status.

    Attributes:
        code: code of the finding about it, or ``unauthorized-use`` for one that uses a device without a grant.
        since: wall-clock seconds at which it was first seen on the device.
    """

    holder: Holder
    owner: ProcessOwner
    code: str
    since: float

    @property
    def is_blocking(self) -> bool:
        """Whether the device cannot be cleared beside it."""
        return self.holder.kind is not HolderKind.INFRASTRUCTURE


def class_of_unit(units: Iterable[InfrastructureUnit], name: str | None) -> InfrastructureClass | None:
    """Return the class of the unit ``name``; None if it is not one of ``units``."""
    return _widest(each.agent_class for each in units if each.name == name)


def class_of_pod(pods: Iterable[InfrastructurePod], pod: PodIdentity) -> InfrastructureClass | None:
    """Return the class of ``pod``; None if it is none of ``pods``.

    Its namespace decides. A known account must be allowed as well; without one, the pod may be any agent of its
    namespace, and what distinguishes a driver from the others is not known.
    """
    there = [each for each in pods if each.namespace == pod.namespace]
    if pod.service_account is not None:
        return _widest(each.agent_class for each in there if each.allows(pod.service_account))
    named = _widest(each.agent_class for each in there if not each.service_account)
    return named or (InfrastructureClass.MONITORING if there else None)


def _widest(classes: Iterable[InfrastructureClass]) -> InfrastructureClass | None:
    found = set(classes)
    order = (InfrastructureClass.DRIVER, InfrastructureClass.MONITORING, InfrastructureClass.VALIDATION)
    return next((each for each in order if each in found), None)


# A tenant that pretends to be a monitoring agent must gain no access to memory: so only a driver may have a context.
def infrastructure_kind(agent_class: InfrastructureClass, *, has_context: bool) -> HolderKind:
    """Return what a process of ``agent_class`` counts as, on a device on which it may have a context."""
    if has_context and agent_class is not InfrastructureClass.DRIVER:
        return HolderKind.VALIDATION
    return HolderKind.INFRASTRUCTURE
