"""The API server's objects with one counter of versions, and the history of their changes for watches.

Promise: an object in the store is never modified in place, every change has a version of its own, and a reader who
asks for changes since a version gets all of them in order, or is refused because some were compacted.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from scrubber.emulator.changes import ChangeNotifier
from scrubber.emulator.cluster.resources import Json, ResourceType
from scrubber.emulator.cluster.status import StatusError

Key = tuple[str, str]
"""Namespace (empty for objects of the cluster) and name."""
MAX_HISTORY = 20_000
"""Changes that are kept; older ones are compacted."""


def key_of(item: Mapping[str, dict[str, str]]) -> Key:
    """Return the key of an object."""
    return item["metadata"].get("namespace", ""), item["metadata"]["name"]


@dataclass(frozen=True, slots=True)
class ObjectChange:
    """One change: ``before`` is None for a new object, ``after`` for a removed one."""

    version: int
    kind: ResourceType
    before: Json | None
    after: Json | None


class ObjectStore:
    """Objects by resource and key. A writer does not modify an object after it was stored."""

    def __init__(self) -> None:
        self.version = 0
        """The version of the last change."""
        self.changes = ChangeNotifier()
        self._objects: dict[ResourceType, dict[Key, Json]] = {}
        self._history: list[ObjectChange] = []
        self._compacted = 0
        """Changes up to this version are no longer known."""

    def get(self, kind: ResourceType, name: str, namespace: str = "") -> Json | None:
        """Return an object, which the caller does not modify, or None."""
        return self._objects.get(kind, {}).get((namespace, name))

    def items(self, kind: ResourceType) -> Iterable[Json]:
        """Return every object of a resource by namespace and name; the caller does not modify them."""
        return [item for _, item in sorted(self._objects.get(kind, {}).items())]

    def put(self, kind: ResourceType, item: Json) -> Json:
        """Store a new object or replace one, and give it its version."""
        key = key_of(item)
        before = self._objects.get(kind, {}).get(key)
        self.version += 1
        item["metadata"]["resourceVersion"] = str(self.version)
        self._objects.setdefault(kind, {})[key] = item
        self._record(ObjectChange(self.version, kind, before, item))
        return item

    def remove(self, kind: ResourceType, item: Json) -> Json:
        """Remove an object; return it as watches report it, with the version of the removal."""
        before = self._objects[kind].pop(key_of(item))
        self.version += 1
        last = {**item, "metadata": {**item["metadata"], "resourceVersion": str(self.version)}}
        self._record(ObjectChange(self.version, kind, {**before, "metadata": last["metadata"]}, None))
        return last

    def changes_since(self, version: int) -> list[ObjectChange]:
        """Return the changes after ``version``, in order.

        Raises:
            StatusError: 410, some of them were compacted.
        """
        if version < self._compacted:
            raise StatusError(410, "Expired", f"too old resource version: {version} ({self._compacted})")
        return self._history[version - self._compacted :]

    async def wait_beyond(self, version: int, timeout: float | None = None) -> None:
        """Wait until there are changes after ``version``, at most ``timeout`` seconds."""
        await self.changes.wait_until(lambda: self.version > version, timeout)

    def compact(self) -> None:
        """Forget the history, as the API server does with changes older than five minutes."""
        self._history.clear()
        self._compacted = self.version

    def _record(self, change: ObjectChange) -> None:
        self._history.append(change)
        if len(self._history) > MAX_HISTORY:
            surplus = len(self._history) - MAX_HISTORY // 2
            del self._history[:surplus]
            self._compacted += surplus
        self.changes.notify()
