"""Resets of GPUs of this node by NVSentinel, as the scrub service requests: objects of its kind ``GPUReset``.

Each object is named by the id of the service's pause, so that requesting a reset can be repeated after a crash of any
party. NVSentinel pauses the agents itself, resets the GPUs, and writes the result to the object's status. The reset is
over for the node when the object is gone: until then NVSentinel may still work on it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from plugin.cluster.errors import ApiConflict, ApiNotFound
from plugin.cluster.text import one_line

__all__ = ["GPU_RESET_WAY", "GpuReset", "GpuResetApi", "ResetResult", "remove_reset", "request_reset"]

GPU_RESET_WAY = "gpu-reset"

_SUCCEEDED = "GPUResetSucceeded"


class ResetResult(Enum):
    """How far NVSentinel is."""

    PENDING = "pending"
    SUCCEEDED = "succeeded"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class GpuReset:
    """The part of a ``GPUReset`` that the plugin uses.

    Attributes:
        node: its ``spec.nodeName``.
        completed: whether its status has a completion time.
        complete: whether its condition ``Complete`` is true; that says nothing about success.
        reason, message: of that condition; of its last other condition while it is not true. As other clients wrote them.
    """

    name: str
    node: str
    completed: bool = False
    complete: bool = False
    reason: str = ""
    message: str = ""

    @property
    def result(self) -> ResetResult:
        """Its result; success only where the status says so in every field."""
        if not (self.completed and self.complete):
            return ResetResult.PENDING
        return ResetResult.SUCCEEDED if self.reason == _SUCCEEDED else ResetResult.FAILED

    @property
    def status_text(self) -> str:
        """The reason and message of its status, for operators."""
        return ": ".join(text for each in (self.reason, self.message) if (text := one_line(each))) or "no status yet"


class GpuResetApi(Protocol):
    """The requests about resets by NVSentinel; all raise the errors of :mod:`plugin.cluster.errors`."""

    async def list_gpu_resets(self) -> Sequence[GpuReset]:
        """Return the objects that plugins have created, of all nodes.

        Raises:
            ApiNotFound: the cluster has no such kind of object.
        """
        ...

    async def get_gpu_reset(self, name: str) -> GpuReset: ...

    async def create_gpu_reset(self, name: str, uuids: Sequence[str]) -> GpuReset:
        """Create one for this node; :class:`plugin.cluster.errors.ApiConflict` if there is one of this name."""
        ...

    async def delete_gpu_reset(self, name: str) -> None: ...


async def request_reset(api: GpuResetApi, name: str, uuids: Sequence[str]) -> GpuReset:
    """Request a reset, unless that was done already; return the object."""
    try:
        return await api.get_gpu_reset(name)
    except ApiNotFound:
        pass
    try:
        return await api.create_gpu_reset(name, uuids)
    except ApiConflict:
        return await api.get_gpu_reset(name)


async def remove_reset(api: GpuResetApi, name: str) -> bool:
    """Delete the object if it exists; return whether it is gone. NVSentinel may have to finish first."""
    try:
        await api.delete_gpu_reset(name)
        await api.get_gpu_reset(name)
    except ApiNotFound:
        return True
    return False
