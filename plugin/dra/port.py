"""The requests to the API server that the driver needs. Objects are JSON, as the API defines them.

All raise the errors of :mod:`plugin.cluster.errors`.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, Protocol

from plugin.cluster.port import EventContent

__all__ = ["AllClaimsApi", "ClaimApi", "ClaimWatchApi", "Json", "SliceApi", "SliceWatchApi"]

Json = Mapping[str, Any]


class ClaimApi(Protocol):
    """Requests about claims."""

    async def get_claim(self, namespace: str, name: str) -> Json: ...

    async def get_device_class(self, name: str) -> Json: ...

    async def patch_claim_status(self, namespace: str, name: str, patch: Json) -> Json:
        """Apply a merge patch to the claim with its status."""
        ...

    async def create_event(self, event: EventContent, now: datetime) -> None: ...

    async def repeat_event(self, event: EventContent, now: datetime, count: int | None) -> int: ...


class ClaimWatchApi(Protocol):
    """A connection for one watch of a claim."""

    def watch_claim(self, namespace: str, name: str) -> AsyncGenerator[tuple[str, Json], None]:
        """Yield the claim, now and after each change: ``ADDED``, ``MODIFIED`` or ``DELETED``. It ends after some minutes."""
        ...

    async def close(self) -> None: ...


class AllClaimsApi(Protocol):
    """A connection for a watch of the claims of all namespaces."""

    async def list_claims(self, selected: Callable[[Json], bool]) -> tuple[str, Sequence[Json]]:
        """Return the resource version of the list, and the claims for which ``selected`` returns true."""
        ...

    def watch_claims(self, version: str) -> AsyncGenerator[tuple[str, Json], None]:
        """Yield each change after ``version``: ``ADDED``, ``MODIFIED`` or ``DELETED``, and the claim.

        It ends after some minutes. :class:`plugin.cluster.errors.ApiNotFound` if ``version`` is too old.
        """
        ...


class SliceApi(Protocol):
    """Requests about the ResourceSlices of one driver on one node."""

    async def get_node_uid(self) -> str: ...

    async def list_slices(self, driver: str) -> tuple[str, Sequence[Json]]:
        """Return the resource version of the list, and the slices of this node."""
        ...

    async def create_slice(self, slice_: Json) -> Json: ...

    async def replace_slice(self, slice_: Json) -> Json:
        """Replace the slice; :class:`plugin.cluster.errors.ApiConflict` if it is another one, or has another version."""
        ...

    async def delete_slice(self, slice_: Json) -> None:
        """Delete the slice; :class:`plugin.cluster.errors.ApiConflict` if it is another one, or has another version."""
        ...


class SliceWatchApi(Protocol):
    def watch_slices(self, driver: str, version: str) -> AsyncGenerator[tuple[str, Json], None]:
        """Yield each change after ``version``: ``ADDED``, ``MODIFIED`` or ``DELETED``, and the slice.

        It ends after some minutes. :class:`plugin.cluster.errors.ApiNotFound` if ``version`` is too old.
        """
        ...
