"""Patches of an object: JSON merge patch, JSON patch, strategic merge patch and server-side apply.

Promise: no patch modifies the object that it is applied to; one that cannot be applied is refused as an API server
refuses it. Lists are merged by key only where Kubernetes does that for the kinds that this API server has.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from scrubber.emulator.cluster.resources import Json
from scrubber.emulator.cluster.status import FieldError, StatusError

MERGE_PATCH = "application/merge-patch+json"
JSON_PATCH = "application/json-patch+json"
STRATEGIC_PATCH = "application/strategic-merge-patch+json"
APPLY_PATCH = "application/apply-patch+yaml"

STRATEGIC_KEYS: Mapping[str, str] = {
    "status.conditions": "type",
    "status.reservedFor": "uid",
    "metadata.ownerReferences": "uid",
}
"""Lists that a strategic merge patch merges, with their keys; it replaces all others, taints of nodes included."""
SETS = frozenset({"metadata.finalizers"})
APPLY_KEYS: Mapping[str, tuple[str, ...]] = {
    "metadata.ownerReferences": ("uid",),
    "status.conditions": ("type",),
    "status.reservedFor": ("uid",),
    "status.devices": ("driver", "device", "pool", "shareID"),
    "status.devices.conditions": ("type",),
}
"""Lists that server-side apply merges, with their keys; all others have one owner."""

Path = tuple[str, ...]


def merge_patch(target: Any, patch: Any) -> Any:
    """Apply a JSON merge patch (RFC 7396)."""
    if not isinstance(patch, dict):
        return copy.deepcopy(patch)
    merged = dict(target) if isinstance(target, dict) else {}
    for key, value in patch.items():
        if value is None:
            merged.pop(key, None)
        else:
            merged[key] = merge_patch(merged.get(key), value)
    return merged


def strategic_patch(target: Any, patch: Any, path: Path = ()) -> Any:
    """Apply a strategic merge patch; of its directives, ``$patch`` with ``delete`` and ``replace`` are supported."""
    where = ".".join(path)
    if isinstance(patch, list) and where in STRATEGIC_KEYS:
        key = STRATEGIC_KEYS[where]
        return _merge_by_key(_entries(target, (key,), where), _entries(patch, (key,), where), key, path)
    if isinstance(patch, list) and where in SETS:
        present = target if isinstance(target, list) else []
        return [*present, *(each for each in patch if each not in present)]
    if not isinstance(patch, dict):
        return copy.deepcopy(patch)
    if patch.get("$patch") == "replace":
        return {key: copy.deepcopy(value) for key, value in patch.items() if key != "$patch"}
    merged = dict(target) if isinstance(target, dict) else {}
    for key, value in patch.items():
        if value is None:
            merged.pop(key, None)
        elif not key.startswith("$"):
            merged[key] = strategic_patch(merged.get(key), value, (*path, key))
    return merged


def _entries(items: Any, keys: Sequence[str], where: str) -> list[Json]:
    """Return the entries of a list that is merged by ``keys``, of which each entry has at least one, a string.

    Raises:
        StatusError: 400, it is another list, or none.
    """
    entries = [] if items is None else items
    for each in entries if isinstance(entries, list) else [entries]:
        if not isinstance(each, dict) or not any(isinstance(each.get(key), str) for key in keys):
            message = f"{where}: {each!r} does not contain declared merge key: {', '.join(keys)}"
            raise StatusError(400, "BadRequest", message)
    return list(entries)


def _merge_by_key(target: Sequence[Json], patch: Sequence[Json], key: str, path: Path) -> list[Json]:
    merged = {each[key]: each for each in target}
    for each in patch:
        if each.get("$patch") == "delete":
            merged.pop(each[key], None)
        else:
            merged[each[key]] = strategic_patch(merged.get(each[key]), each, path)
    return list(merged.values())


def json_patch(target: Json, operations: Any) -> Json:
    """Apply a JSON patch (RFC 6902).

    Raises:
        StatusError: 400, it is not a list of operations; 422, an operation cannot be applied, or a test failed.
    """
    if not isinstance(operations, list) or not all(isinstance(each, dict) for each in operations):
        raise StatusError(400, "BadRequest", "error decoding patch: a JSON patch is a list of operations")
    patched: Any = copy.deepcopy(target)
    for each in operations:
        try:
            patched = _operate(patched, each)
        except (LookupError, TypeError, ValueError) as error:
            raise StatusError(
                422, "Invalid", f"the server rejected our request due to an error in our request: {error}"
            ) from error
    if not isinstance(patched, dict):
        raise StatusError(
            422, "Invalid", "the server rejected our request due to an error in our request: not an object"
        )
    return patched


def _operate(document: Any, operation: Json) -> Any:
    path = _pointer(operation["path"])
    match operation["op"]:
        case "add":
            return _add(document, path, copy.deepcopy(operation["value"]))
        case "remove":
            _remove(document, path)
        case "replace":
            _remove(document, path)
            return _add(document, path, copy.deepcopy(operation["value"]))
        case "test":
            if _resolve(document, path) != operation["value"]:
                raise ValueError(f"testing value {operation['path']} failed")
        case "move":
            return _add(document, path, _remove(document, _pointer(operation["from"])))
        case "copy":
            return _add(document, path, copy.deepcopy(_resolve(document, _pointer(operation["from"]))))
        case other:
            raise ValueError(f"unexpected kind: {other}")
    return document


def _pointer(text: str) -> list[str]:
    if text and not text.startswith("/"):
        raise ValueError(f"invalid JSON pointer {text!r}")
    return [part.replace("~1", "/").replace("~0", "~") for part in text.split("/")[1:]]


def _resolve(document: Any, path: Sequence[str]) -> Any:
    for part in path:
        document = document[int(part)] if isinstance(document, list) else document[part]
    return document


def _add(document: Any, path: Sequence[str], value: Any) -> Any:
    if not path:
        return value
    parent, last = _resolve(document, path[:-1]), path[-1]
    if isinstance(parent, list):
        index = len(parent) if last == "-" else int(last)
        if not 0 <= index <= len(parent):
            raise IndexError(f"index {index} is out of bounds")
        parent.insert(index, value)
    else:
        parent[last] = value
    return document


def _remove(document: Any, path: Sequence[str]) -> Any:
    parent, last = _resolve(document, path[:-1]), path[-1]
    return parent.pop(int(last)) if isinstance(parent, list) else parent.pop(last)


class FieldOwners:
    """What each field manager of an object applied last, which decides about conflicts and removals."""

    def __init__(self) -> None:
        self._applied: dict[str, Json] = {}

    def apply(self, live: Json, configuration: Json, manager: str, *, force: bool) -> Json:
        """Apply ``configuration`` on behalf of ``manager``: set its fields, remove those that it applied before.

        Raises:
            StatusError: 409, another manager applied one of the fields with a different value; not with ``force``.
        """
        fields = dict(leaves(configuration))
        conflicts = [
            (other, path)
            for other, applied in self._applied.items()
            if other != manager
            for path, value in leaves(applied)
            if path in fields and fields[path] != value
        ]
        if conflicts and not force:
            causes = [
                FieldError(_text(path), "FieldManagerConflict", f'conflict with "{other}"') for other, path in conflicts
            ]
            message = f"Apply failed with {len(conflicts)} conflict{'s' * (len(conflicts) > 1)}: " + ", ".join(
                f"{each.message}: {each.field}" for each in causes
            )
            raise StatusError(409, "Conflict", message, causes=causes)
        merged = copy.deepcopy(live)
        elsewhere = {
            path for other, applied in self._applied.items() if other != manager for path, _ in leaves(applied)
        }
        for path, value in leaves(self._applied.get(manager, {})):
            if path not in fields and path not in elsewhere:
                _drop(merged, path, only_empty=value == {})
        for path, value in fields.items():
            _set(merged, path, copy.deepcopy(value))
        self._applied[manager] = copy.deepcopy(configuration)
        return merged


Step = str | tuple[tuple[str, Any], ...]
"""A key of an object, or the keys that identify an entry of a list."""
Leaf = tuple[Step, ...]


def leaves(configuration: Any, path: Leaf = ()) -> Iterator[tuple[Leaf, Any]]:
    """Return the fields of an applied configuration that have one owner each, with their values."""
    names = ".".join(step for step in path if isinstance(step, str))
    if isinstance(configuration, dict) and configuration:
        for key, value in configuration.items():
            if path or key not in ("apiVersion", "kind"):
                yield from leaves(value, (*path, key))
    elif isinstance(configuration, list) and names in APPLY_KEYS:
        for each in _entries(configuration, APPLY_KEYS[names], names):
            keys = tuple((key, each[key]) for key in APPLY_KEYS[names] if key in each)
            yield from leaves(each, (*path, keys))
    elif path and path[:2] != ("metadata", "name") and path[:2] != ("metadata", "namespace"):
        yield path, configuration


def _text(path: Leaf) -> str:
    return "".join(
        f".{step}" if isinstance(step, str) else f"[{','.join(f'{key}={value!r}' for key, value in step)}]"
        for step in path
    )


def _entry(items: list[Any], keys: tuple[tuple[str, Any], ...]) -> Json | None:
    entries = (each for each in items if isinstance(each, dict))
    return next((each for each in entries if all(each.get(key) == value for key, value in keys)), None)


def _set(document: Json, path: Leaf, value: Any) -> None:
    parent: Any = document
    for step, following in zip(path, (*path[1:], None), strict=True):
        if isinstance(step, tuple):
            found = _entry(parent, step)
            if found is None:
                found = dict(step)
                parent.append(found)
            parent = found
        elif following is None:
            kept = parent.get(step)
            parent[step] = kept if value == {} and isinstance(kept, dict) else value
        else:
            kind = list if isinstance(following, tuple) else dict
            if not isinstance(parent.get(step), kind):
                parent[step] = kind()
            parent = parent[step]


def _drop(document: Json, path: Leaf, *, only_empty: bool) -> None:
    """Remove a field, if it is empty or need not be, and the entries of lists and objects that are then without any but their keys."""
    parents: list[tuple[Any, Step]] = []
    parent: Any = document
    for step in path[:-1]:
        parents.append((parent, step))
        parent = _entry(parent, step) if isinstance(step, tuple) else parent.get(step)
        if not isinstance(parent, dict | list):
            return
    if only_empty and parent.get(path[-1]):
        return
    identity = path[-2] if len(path) > 1 and isinstance(path[-2], tuple) else ()
    if path[-1] not in dict(identity):
        parent.pop(path[-1], None)
    for above, step in reversed(parents):
        below = _entry(above, step) if isinstance(step, tuple) else above.get(step)
        if isinstance(step, tuple) and below is not None and below.keys() <= {key for key, _ in step}:
            above.remove(below)
        elif isinstance(step, str) and not below:
            above.pop(step, None)
        else:
            return
