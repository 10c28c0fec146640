"""The operations of the API server on its objects: validation, conflicts, finalizers, subresources, ownership.

Promise: every client sees the same rules, whether its requests come over HTTP (:mod:`scrubber.emulator.cluster.server`)
or from a part of the emulated cluster in this process.
"""

from __future__ import annotations

import copy
import random
import uuid
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from scrubber.emulator.cluster import gates as feature_gates
from scrubber.emulator.cluster.access import ADMIN, Account, missing_status_permissions
from scrubber.emulator.cluster.evictions import check_budget, protects
from scrubber.emulator.cluster.patches import (
    APPLY_PATCH,
    JSON_PATCH,
    MERGE_PATCH,
    STRATEGIC_PATCH,
    FieldOwners,
    json_patch,
    merge_patch,
    strategic_patch,
)
from scrubber.emulator.cluster.resources import (
    BUDGETS,
    CLAIMS,
    EVENTS,
    NAMESPACES,
    NODES,
    PODS,
    RESOURCE_TYPES,
    SLICES,
    Json,
    Predicate,
    ResourceType,
    Selection,
)
from scrubber.emulator.cluster.schema import decoded
from scrubber.emulator.cluster.status import FieldError, StatusError, invalid
from scrubber.emulator.cluster.store import Key, ObjectStore
from scrubber.emulator.cluster.validation import validate_claim_status, validate_object
from scrubber.emulator.podobjects import pod_spec

EVERYTHING = Selection()
NAME_CHARACTERS = "bcdfghjklmnpqrstvwxz2456789"
"""Of the random part of generated names."""

Admission = Callable[[str, ResourceType, Json | None, Json | None, Account], str | None]
"""An admission policy: (operation, resource, object, old object, account) → why it denies the request, or None.

The operation is ``CREATE``, ``UPDATE`` or ``DELETE``, and the object is None for the last.
"""

LogReader = Callable[[str, str], str]
"""(UID of the pod, container) → what the container's last run has printed; raises :class:`StatusError`."""


class EmulatedApi:
    """The objects of the cluster, and the only way to change them.

    Every method raises :class:`StatusError` with the code and the reason of a real API server.
    """

    def __init__(
        self,
        *,
        gates: Mapping[str, bool] = feature_gates.DEFAULT_GATES,
        rng: random.Random | None = None,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        """Create the API with the namespaces ``default`` and ``kube-system``.

        Args:
            gates: the feature gates that differ from the defaults of 1.36.
            now: the wall clock, for timestamps.

        Raises:
            ValueError: a gate is not known.
        """
        unknown = gates.keys() - feature_gates.DEFAULT_GATES.keys()
        if unknown:
            raise ValueError(f"unknown feature gates: {', '.join(sorted(unknown))}")
        self.gates = {**feature_gates.DEFAULT_GATES, **gates}
        self.store = ObjectStore()
        self.types = list(RESOURCE_TYPES)
        self.admission: list[Admission] = []
        self.log_readers: dict[str, LogReader] = {}
        """The kubelets of the cluster, by the name of their node."""
        self.now = now
        self._rng = rng or random.Random()
        self._owners: dict[tuple[ResourceType, Key], FieldOwners] = {}
        self._available = True
        for name in ("default", "kube-system"):
            self.create(NAMESPACES, {"metadata": {"name": name}})

    def install(self, kind: ResourceType) -> None:
        """Let the cluster have a kind of custom resources."""
        if kind not in self.types:
            self.types.append(kind)

    def uninstall(self, kind: ResourceType) -> None:
        """Remove a kind of custom resources with its objects, whatever finalizers they have."""
        self.types.remove(kind)
        for item in list(self.store.items(kind)):
            self.store.remove(kind, item)
        self.store.changes.notify()

    # Availability, for the parts of the cluster in this process

    @property
    def available(self) -> bool:
        return self._available

    @available.setter
    def available(self, available: bool) -> None:
        self._available = available
        self.store.changes.notify()

    async def wait_until_available(self) -> None:
        """Wait until requests are answered."""
        await self.store.changes.wait_until(lambda: self._available, None)

    def _check_available(self) -> None:
        if not self._available:
            raise StatusError(503, "ServiceUnavailable", "the server is currently unable to handle the request")

    # Reading

    def get(self, kind: ResourceType, name: str, namespace: str = "") -> Json:
        """Return a copy of an object."""
        self._check_available()
        return copy.deepcopy(self._existing(kind, name, namespace))

    def find(self, kind: ResourceType, name: str, namespace: str = "") -> Json | None:
        """Return a copy of an object, or None where there is none."""
        self._check_available()
        return copy.deepcopy(self.store.get(kind, name, namespace))

    def list(self, kind: ResourceType, selection: Selection = EVERYTHING) -> Sequence[Json]:
        """Return copies of the selected objects, by namespace and name."""
        self._check_available()
        selected = selection.compile(kind)
        return [copy.deepcopy(item) for item in self.store.items(kind) if selected(item)]

    def events_since(
        self, kind: ResourceType, selected: Predicate, version: int
    ) -> tuple[Sequence[tuple[str, Json]], int]:
        """Return the events of a watch after ``version``, and the version that they lead to.

        Raises:
            StatusError: 410, some were compacted.
        """
        changes = [change for change in self.store.changes_since(version) if change.kind is kind]
        events = [_watch_event(change.before, change.after, selected) for change in changes]
        return [event for event in events if event is not None], self.store.version

    def read_log(self, name: str, namespace: str, container: str) -> str:
        """Return what a container of a pod has printed in its last run; ``container`` may be empty if it has one only."""
        pod = self.get(PODS, name, namespace)
        names = [each["name"] for each in pod["spec"]["containers"]]
        if not container and len(names) > 1:
            message = f"a container name must be specified for pod {name}, choose one of: [{' '.join(names)}]"
            raise StatusError(400, "BadRequest", message)
        container = container or names[0]
        inits = [each["name"] for each in pod["spec"].get("initContainers") or []]
        if container not in (*names, *inits):
            raise StatusError(400, "BadRequest", f"container {container} is not valid for pod {name}")
        reader = self.log_readers.get(pod["spec"].get("nodeName", ""))
        if reader is None:
            raise StatusError(400, "BadRequest", f"pod {name} does not have a host assigned")
        return reader(pod["metadata"]["uid"], container)

    def _existing(self, kind: ResourceType, name: str, namespace: str) -> Json:
        found = self.store.get(kind, name, namespace)
        if found is None:
            raise kind.not_found(name)
        return found

    # Writing

    def create(self, kind: ResourceType, item: Mapping[str, Any], *, account: Account = ADMIN) -> Json:
        """Store a new object and return it. A status is dropped where it has a subresource, except on nodes."""
        self._check_available()
        made = self._prepared(kind, item)
        metadata = made["metadata"]
        if not metadata.get("name"):
            if not metadata.get("generateName"):
                raise StatusError(422, "Invalid", "metadata.name: Required value: name or generateName is required")
            metadata["name"] = metadata["generateName"] + "".join(self._rng.choices(NAME_CHARACTERS, k=5))
        namespace, name = metadata.get("namespace", ""), metadata["name"]
        if kind.namespaced and self.store.get(NAMESPACES, namespace) is None:
            raise NAMESPACES.not_found(namespace)
        if self.store.get(kind, name, namespace) is not None:
            raise StatusError(409, "AlreadyExists", f'{kind.qualified} "{name}" already exists')
        if metadata.get("resourceVersion"):
            raise StatusError(400, "BadRequest", "resourceVersion should not be set on objects to be created")
        if kind.has_status and kind is not NODES:
            made.pop("status", None)
        if kind is PODS:
            made["status"] = {"phase": "Pending"}
        metadata["uid"] = str(uuid.UUID(bytes=self._rng.randbytes(16), version=4))
        metadata["creationTimestamp"] = self.timestamp()
        metadata.pop("deletionTimestamp", None)
        if kind.has_generation:
            metadata["generation"] = 1
        self._validate(kind, made, None)
        self._admit("CREATE", kind, made, None, account)
        return copy.deepcopy(self.store.put(kind, made))

    def update(
        self, kind: ResourceType, item: Mapping[str, Any], *, subresource: str = "", account: Account = ADMIN
    ) -> Json:
        """Replace an object, or its status; one without a resourceVersion is replaced whatever it is now."""
        self._check_available()
        made = self._prepared(kind, item)
        before = self._existing(kind, made["metadata"].get("name", ""), made["metadata"].get("namespace", ""))
        return self._replace(kind, before, made, subresource, account, "update")

    def patch(
        self,
        kind: ResourceType,
        name: str,
        patch: Any,
        namespace: str = "",
        *,
        patch_type: str = MERGE_PATCH,
        subresource: str = "",
        account: Account = ADMIN,
        field_manager: str = "",
        force: bool = False,
    ) -> Json:
        """Patch an object or its status; server-side apply creates an object that does not exist."""
        self._check_available()
        before = self.store.get(kind, name, namespace)
        if patch_type == APPLY_PATCH:
            return self._apply(kind, name, namespace, before, patch, subresource, account, field_manager, force)
        if before is None:
            raise kind.not_found(name)
        if patch_type == JSON_PATCH:
            made: Any = json_patch(before, patch)
        elif not isinstance(patch, dict):
            raise StatusError(400, "BadRequest", "error decoding patch: it is not an object")
        elif patch_type == MERGE_PATCH:
            made = merge_patch(before, patch)
        elif patch_type == STRATEGIC_PATCH and not kind.custom:
            made = strategic_patch(before, patch)
        else:
            strategic = () if kind.custom else (STRATEGIC_PATCH,)
            supported = ", ".join((JSON_PATCH, MERGE_PATCH, *strategic, APPLY_PATCH))
            message = f"the body of the request was in an unknown format - accepted media types include: {supported}"
            raise StatusError(415, "UnsupportedMediaType", message)
        return self._replace(kind, before, self._prepared(kind, made), subresource, account, "patch")

    def _apply(
        self,
        kind: ResourceType,
        name: str,
        namespace: str,
        before: Json | None,
        patch: Any,
        subresource: str,
        account: Account,
        manager: str,
        force: bool,
    ) -> Json:
        if not manager:
            raise StatusError(400, "BadRequest", "fieldManager is required for apply patch")
        if not isinstance(patch, dict) or patch.get("kind") != kind.kind or patch.get("apiVersion") != kind.api_version:
            raise StatusError(400, "BadRequest", "an apply patch has the object's apiVersion and kind")
        patch = decoded(kind, patch)
        if before is None and subresource:
            raise kind.not_found(name)
        key = (kind, (namespace, name))
        owners = copy.deepcopy(self._owners.get(key)) or FieldOwners()
        place = {"name": name, **({"namespace": namespace} if kind.namespaced else {})}
        start = before or {"apiVersion": kind.api_version, "kind": kind.kind, "metadata": place}
        made = self._prepared(kind, owners.apply(start, patch, manager, force=force))
        if before is None:
            applied = self.create(kind, made, account=account)
        else:
            applied = self._replace(kind, before, made, subresource, account, "patch")
        self._owners[key] = owners
        return applied

    def _prepared(self, kind: ResourceType, item: Mapping[str, Any]) -> Json:
        """Return a copy with the fields that the kind has, without those of disabled gates."""
        if item.get("kind", kind.kind) != kind.kind or item.get("apiVersion", kind.api_version) != kind.api_version:
            given = f"{item.get('apiVersion')}, {item.get('kind')}"
            message = f"the object provided is {given}, not {kind.api_version}, {kind.kind}"
            raise StatusError(400, "BadRequest", message)
        made = decoded(kind, item)
        metadata = {key: value for key, value in (made.get("metadata") or {}).items() if value not in ("", [], {})}
        made = {"apiVersion": kind.api_version, "kind": kind.kind, **made, "metadata": metadata}
        if kind in (CLAIMS, PODS, SLICES):
            made.setdefault("spec", {})
        return feature_gates.drop_disabled_fields(kind, made, self.gates)

    def _replace(
        self, kind: ResourceType, before: Json, made: Json, subresource: str, account: Account, verb: str
    ) -> Json:
        old, new = before["metadata"], made["metadata"]
        name = old["name"]
        for key in ("name", "namespace"):
            if new.setdefault(key, old.get(key, "")) != old.get(key, ""):
                message = (
                    f"the {key} of the object ({new[key]}) does not match the {key} on the URL ({old.get(key, '')})"
                )
                raise StatusError(400, "BadRequest", message)
            if not new[key]:
                del new[key]
        if new.get("uid", old["uid"]) != old["uid"]:
            problem = f"Precondition failed: UID in precondition: {new['uid']}, UID in object meta: {old['uid']}"
            raise kind.conflict(name, problem)
        if new.get("resourceVersion", old["resourceVersion"]) != old["resourceVersion"]:
            problem = "the object has been modified; please apply your changes to the latest version and try again"
            raise kind.conflict(name, problem)
        if subresource:
            made = {**before, "status": made.get("status") or {}, "metadata": {**old}}
        else:
            kept = ("uid", "creationTimestamp", "deletionTimestamp", "deletionGracePeriodSeconds", "generation")
            made["metadata"] = {**new, **{key: old[key] for key in kept if key in old}}
            if kind.has_status:
                made["status"] = before.get("status") or {}
                if not made["status"]:
                    del made["status"]
        made["metadata"]["resourceVersion"] = old["resourceVersion"]
        self._validate(kind, made, before)
        if subresource == "status" and kind is CLAIMS:
            made = self._checked_claim_status(made, before, account, verb)
        if kind.has_generation and made.get("spec") != before.get("spec"):
            made["metadata"]["generation"] += 1
        if made == before:
            return copy.deepcopy(before)  # as the API server: a write that changes nothing has no version
        self._admit("UPDATE", kind, made, before, account)
        if "deletionTimestamp" in old and not made["metadata"].get("finalizers") and kind is not PODS:
            return self._remove(kind, made)
        return copy.deepcopy(self.store.put(kind, made))

    def _checked_claim_status(self, made: Json, before: Json, account: Account, verb: str) -> Json:
        status = made["status"]
        if not status.get("allocation") and status.get("devices"):
            status = {key: value for key, value in status.items() if key != "devices"}
        made = {**made, "status": status}
        causes = validate_claim_status(made, before)
        if not causes and self.gates["DRAResourceClaimGranularStatusAuthorization"]:
            causes = missing_status_permissions(account, verb, made, before)
        if causes:
            raise invalid(CLAIMS.qualified_kind, before["metadata"]["name"], causes)
        return made

    def _validate(self, kind: ResourceType, made: Json, before: Json | None) -> None:
        if kind is SLICES:
            self._fill_taint_times(made)
        namespace = self.store.get(NAMESPACES, made["metadata"].get("namespace", "")) or {"metadata": {}}
        labels = namespace["metadata"].get("labels") or {}
        causes = validate_object(kind, made, before, namespace_labels=labels)
        if kind is PODS and not causes:
            causes = _unusable_pod(made)
        if causes:
            raise invalid(kind.qualified_kind, made["metadata"]["name"], causes)

    def _fill_taint_times(self, made: Json) -> None:
        for device in (made.get("spec") or {}).get("devices") or []:
            for taint in device.get("taints") or []:
                if not taint.get("timeAdded"):
                    taint["timeAdded"] = self.timestamp()

    def _admit(self, operation: str, kind: ResourceType, new: Json | None, old: Json | None, account: Account) -> None:
        found = old if new is None else new
        name = found["metadata"]["name"] if found is not None else ""
        for policy in self.admission:
            denied = policy(operation, kind, new, old, account)
            if denied is not None:
                raise StatusError(422, "Invalid", f'{kind.qualified} "{name}" is forbidden: {denied}')

    # Deleting

    def delete(
        self,
        kind: ResourceType,
        name: str,
        namespace: str = "",
        *,
        options: Mapping[str, Any] | None = None,
        account: Account = ADMIN,
    ) -> Json:
        """Delete an object under the preconditions of ``options``, and return its last state.

        One with finalizers only gets a deletion time, and so does a pod on a node, unless its grace period is 0.
        """
        self._check_available()
        before = self._existing(kind, name, namespace)
        options = options or {}
        self._check_preconditions(kind, before, options)
        self._admit("DELETE", kind, None, before, account)
        if kind is NAMESPACES:
            marked = copy.deepcopy(before)
            marked["metadata"].setdefault("deletionTimestamp", self.timestamp())
            marked["status"] = {"phase": "Terminating"}
            self._finish_namespace(self.store.put(kind, marked))
            return copy.deepcopy(marked)
        grace = self._grace(kind, before, options)
        if not grace and not before["metadata"].get("finalizers"):
            return self._remove(kind, before)
        if "deletionTimestamp" in before["metadata"] and grace >= before["metadata"]["deletionGracePeriodSeconds"]:
            return copy.deepcopy(before)
        marked = copy.deepcopy(before)
        marked["metadata"] |= {"deletionTimestamp": self.timestamp(), "deletionGracePeriodSeconds": grace}
        return copy.deepcopy(self.store.put(kind, marked))

    def evict(self, name: str, namespace: str, eviction: Json, *, account: Account = ADMIN) -> Json:
        """Delete a pod unless a disruption budget protects it; return the ``Status`` of the answer.

        As the API server, answer with a status of failure instead of a refusal where two budgets select the pod.
        """
        self._check_available()
        if (eviction.get("metadata") or {}).get("name") != name:
            raise StatusError(400, "BadRequest", "name in URL does not match name in Eviction object")
        pod = self._existing(PODS, name, namespace)
        budgets = [each for each in self.store.items(BUDGETS) if protects(each, pod)]
        if len(budgets) > 1:
            message = "This pod has more than one PodDisruptionBudget, which the eviction subresource does not support."
            return {
                "kind": "Status",
                "apiVersion": "v1",
                "metadata": {},
                "status": "Failure",
                "message": message,
                "code": 500,
            }
        options = eviction.get("deleteOptions") or {}
        self._check_preconditions(PODS, pod, options)
        for budget in budgets:
            check_budget(budget, pod, self.store.items(PODS))
        self.delete(PODS, name, namespace, options=options, account=account)
        return {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success", "code": 201}

    def delete_collection(
        self, kind: ResourceType, selection: Selection, *, account: Account = ADMIN
    ) -> Sequence[Json]:
        """Delete every selected object; return their last states."""
        self._check_available()
        found = [
            (each["metadata"]["name"], each["metadata"].get("namespace", "")) for each in self.list(kind, selection)
        ]
        return [self.delete(kind, *each, account=account) for each in found]

    def _check_preconditions(self, kind: ResourceType, item: Json, options: Mapping[str, Any]) -> None:
        for key, label in (("uid", "UID"), ("resourceVersion", "ResourceVersion")):
            expected, actual = (options.get("preconditions") or {}).get(key), item["metadata"][key]
            if expected is not None and expected != actual:
                problem = f"Precondition failed: {label} in precondition: {expected}, {label} in object meta: {actual}"
                raise kind.conflict(item["metadata"]["name"], problem)

    def _grace(self, kind: ResourceType, before: Json, options: Mapping[str, Any]) -> float:
        over = (before.get("status") or {}).get("phase") in ("Succeeded", "Failed")
        if kind is not PODS or over or not (before.get("spec") or {}).get("nodeName"):
            return 0
        default = before["spec"].get("terminationGracePeriodSeconds", 30)
        grace: float = default if options.get("gracePeriodSeconds") is None else options["gracePeriodSeconds"]
        return grace

    def _remove(self, kind: ResourceType, item: Json) -> Json:
        self._owners.pop((kind, (item["metadata"].get("namespace", ""), item["metadata"]["name"])), None)
        last = self.store.remove(kind, item)
        self._collect_garbage(item["metadata"]["uid"])
        namespace = self.store.get(NAMESPACES, item["metadata"].get("namespace", ""))
        if namespace is not None and "deletionTimestamp" in namespace["metadata"]:
            self._finish_namespace(namespace)
        return copy.deepcopy(last)

    def _finish_namespace(self, namespace: Json) -> None:
        """Delete what is in a namespace that is being deleted, and then the namespace."""
        content = Selection(namespace=namespace["metadata"]["name"])
        for kind in [each for each in self.types if each.namespaced]:
            for item in self.list(kind, content):
                if "deletionTimestamp" not in item["metadata"] and self.store.get(kind, *_place(item)) is not None:
                    self.delete(kind, *_place(item))
        empty = not any(self.list(each, content) for each in self.types if each.namespaced)
        if empty and self.store.get(NAMESPACES, namespace["metadata"]["name"]) is not None:
            self.store.remove(NAMESPACES, namespace)

    def _collect_garbage(self, uid: str) -> None:
        """Delete the objects that the removed one owned, at once; the real collector takes some seconds."""
        for kind in self.types:
            for item in list(self.store.items(kind)):
                owners = item["metadata"].get("ownerReferences") or []
                if len(owners) == 1 and owners[0].get("uid") == uid and self.store.get(kind, *_place(item)) is item:
                    self.delete(kind, *_place(item))

    def timestamp(self) -> str:
        """Return the time of the wall clock in whole seconds, as objects contain it."""
        return self.now().astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")

    def record_event(self, about: Json, reason: str, message: str, *, component: str, warning: bool = True) -> None:
        """Create an event about an object; nothing happens while the API server is away."""
        if not self._available:
            return
        metadata = about["metadata"]
        event = {
            "metadata": {"generateName": f"{metadata['name']}.", "namespace": metadata.get("namespace") or "default"},
            "involvedObject": {
                "apiVersion": about["apiVersion"],
                "kind": about["kind"],
                "name": metadata["name"],
                "namespace": metadata.get("namespace", ""),
                "uid": metadata["uid"],
            },
            "reason": reason,
            "message": message,
            "type": "Warning" if warning else "Normal",
            "source": {"component": component},
            "count": 1,
            "firstTimestamp": self.timestamp(),
            "lastTimestamp": self.timestamp(),
        }
        self.create(EVENTS, event)


def _unusable_pod(item: Json) -> list[FieldError]:
    """Return why the emulated kubelet could not run a pod."""
    try:
        pod_spec(item)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        return [FieldError("spec", "FieldValueInvalid", f"Invalid value: {error}")]
    return []


def _place(item: Json) -> tuple[str, str]:
    return item["metadata"]["name"], item["metadata"].get("namespace", "")


def _watch_event(before: Json | None, after: Json | None, selected: Predicate) -> tuple[str, Json] | None:
    """Return the event that a watch with a selector shows: leaving the selection is a deletion, entering an addition."""
    was, now = before is not None and selected(before), after is not None and selected(after)
    if after is not None and now:
        return ("MODIFIED" if was else "ADDED"), after
    if before is not None and was:
        last = (
            before
            if after is None
            else {**before, "metadata": {**before["metadata"], "resourceVersion": after["metadata"]["resourceVersion"]}}
        )
        return "DELETED", last
    return None


async def reconcile_on_change(api: EmulatedApi, reconcile: Callable[[], float | None]) -> None:
    """Run ``reconcile`` now, after every change, and after the seconds that it returns; not while the server is away.

    A write that loses against another client's ends the pass; the next one starts from the new state.
    """
    while True:
        await api.wait_until_available()
        seen = api.store.version
        due: float | None = None
        try:
            due = reconcile()
        except StatusError as error:
            if error.code not in (404, 409, 503):
                raise
        await api.store.wait_beyond(seen, due)
