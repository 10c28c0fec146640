"""The Lease that allows one node of the cluster at a time to pause its agents.

Its holder is the node, not the instance of the plugin: an instance that follows one that died goes on at once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime

from plugin.cluster.errors import ApiConflict, ApiNotFound
from plugin.cluster.pause_labels import LeaseName
from plugin.cluster.port import LeaseState, PauseApi

__all__ = ["PauseLease"]


class PauseLease:
    """The Lease ``name``, on behalf of ``node``.

    A holder that does not renew loses it. How long that was is measured here, from the last renewal that was seen, so
    the clocks of the nodes need not agree.

    Args:
        seconds: for how long the holder has it without a renewal.
        clock: monotonic seconds; ``wall_clock``: seconds since the epoch.
    """

    def __init__(
        self,
        name: LeaseName,
        node: str,
        *,
        seconds: int,
        clock: Callable[[], float],
        wall_clock: Callable[[], float],
    ) -> None:
        self._name = name
        self._node = node
        self._seconds = seconds
        self._clock = clock
        self._wall_clock = wall_clock
        self._seen: LeaseState | None = None
        self._seen_at = 0.0

    def __str__(self) -> str:
        return str(self._name)

    async def acquire(self, api: PauseApi) -> str:
        """Acquire or renew it; return the name of the other node that has it, empty if this one has it now.

        Raises:
            ClusterError: as for every request, except that the Lease does not exist, or was changed meanwhile.
        """
        for _ in range(2):
            try:
                found = await api.get_lease(self._name.namespace, self._name.name)
            except ApiNotFound:
                found = None
            try:
                if found is None:
                    await api.create_lease(*self._key, self._held(LeaseState("", 0, None)))
                elif found.holder in {"", self._node} or self._has_expired(found):
                    await api.update_lease(*self._key, self._held(found))
                else:
                    return found.holder
            except ApiConflict:
                continue  # another node was faster, or an earlier request of this one arrived late
            return ""
        return "another node"

    async def release(self, api: PauseApi) -> None:
        """Release it; no effect when this node does not have it.

        Raises:
            ClusterError: as for every request, except that the Lease does not exist.
        """
        try:
            found = await api.get_lease(self._name.namespace, self._name.name)
            if found.holder == self._node:
                await api.update_lease(*self._key, replace(found, holder=""))
        except (ApiNotFound, ApiConflict):
            return

    @property
    def _key(self) -> tuple[str, str]:
        return self._name.namespace, self._name.name

    def _has_expired(self, found: LeaseState) -> bool:
        if found != self._seen:
            self._seen, self._seen_at = found, self._clock()
        return self._clock() - self._seen_at > (found.seconds if found.seconds > 0 else self._seconds)

    def _held(self, before: LeaseState) -> LeaseState:
        return LeaseState(
            self._node,
            self._seconds,
            datetime.fromtimestamp(self._wall_clock(), UTC),
            before.transitions + (before.holder != self._node and before.renewed_at is not None),
            before.resource_version,
        )
