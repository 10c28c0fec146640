"""The kinds of objects that the API server has, and how clients select among them.

Promise: a resource, a subresource or a selector that a real API server refuses is refused here with the same code.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from scrubber.emulator.cluster.status import StatusError

Json = dict[str, Any]
Predicate = Callable[[Mapping[str, Any]], bool]
"""Whether an object is selected."""


@dataclass(frozen=True, slots=True, eq=False)
class ResourceType:
    """One kind of object and its place in URLs."""

    group: str
    """Empty for the core group."""
    plural: str
    kind: str
    namespaced: bool
    has_status: bool = False
    """Whether ``status`` is written through a subresource only."""
    has_generation: bool = False
    """Whether ``metadata.generation`` counts the changes of the spec."""
    fields: tuple[str, ...] = ()
    """Field selectors beside ``metadata.name`` and ``metadata.namespace``."""
    version: str = "v1"
    custom: bool = False
    """Whether a CustomResourceDefinition defines it, which the cluster need not have."""

    @property
    def api_version(self) -> str:
        return f"{self.group}/{self.version}" if self.group else self.version

    @property
    def qualified(self) -> str:
        """The resource as error messages name it, such as ``resourceclaims.resource.k8s.io``."""
        return f"{self.plural}.{self.group}" if self.group else self.plural

    @property
    def qualified_kind(self) -> str:
        """The kind as error messages name it, such as ``ResourceSlice.resource.k8s.io``."""
        return f"{self.kind}.{self.group}" if self.group else self.kind

    def not_found(self, name: str) -> StatusError:
        return StatusError(404, "NotFound", f'{self.qualified} "{name}" not found')

    def conflict(self, name: str, problem: str) -> StatusError:
        return StatusError(409, "Conflict", f'Operation cannot be fulfilled on {self.qualified} "{name}": {problem}')


RESOURCE_GROUP = "resource.k8s.io"

NODES = ResourceType("", "nodes", "Node", False, has_status=True, fields=("spec.unschedulable",))
NAMESPACES = ResourceType("", "namespaces", "Namespace", False, has_status=True, fields=("status.phase",))
PODS = ResourceType(
    "", "pods", "Pod", True, has_status=True, has_generation=True, fields=("spec.nodeName", "status.phase")
)
EVENTS = ResourceType(
    "",
    "events",
    "Event",
    True,
    fields=("involvedObject.kind", "involvedObject.name", "involvedObject.namespace", "involvedObject.uid", "reason"),
)
SECRETS = ResourceType("", "secrets", "Secret", True)
LEASES = ResourceType("coordination.k8s.io", "leases", "Lease", True)
BUDGETS = ResourceType(
    "policy", "poddisruptionbudgets", "PodDisruptionBudget", True, has_status=True, has_generation=True
)
CLAIMS = ResourceType(RESOURCE_GROUP, "resourceclaims", "ResourceClaim", True, has_status=True)
CLAIM_TEMPLATES = ResourceType(RESOURCE_GROUP, "resourceclaimtemplates", "ResourceClaimTemplate", True)
SLICES = ResourceType(
    RESOURCE_GROUP,
    "resourceslices",
    "ResourceSlice",
    False,
    has_generation=True,
    fields=("spec.nodeName", "spec.driver"),
)
DEVICE_CLASSES = ResourceType(RESOURCE_GROUP, "deviceclasses", "DeviceClass", False, has_generation=True)

RESOURCE_TYPES = (
    NODES,
    NAMESPACES,
    PODS,
    EVENTS,
    SECRETS,
    LEASES,
    BUDGETS,
    CLAIMS,
    CLAIM_TEMPLATES,
    SLICES,
    DEVICE_CLASSES,
)


@dataclass(frozen=True, slots=True)
class Selection:
    """Which objects of a resource a request is about."""

    namespace: str = ""
    """Empty: every namespace."""
    fields: str = ""
    labels: str = ""

    def compile(self, kind: ResourceType) -> Predicate:
        """Return the predicate that decides for one object.

        Raises:
            StatusError: 400, a selector cannot be parsed, or names a field that the resource cannot be selected by.
        """
        predicates = [*_field_predicates(kind, self.fields), *_label_predicates(self.labels)]
        if self.namespace:
            predicates.append(lambda item: item["metadata"].get("namespace") == self.namespace)
        return lambda item: all(holds(item) for holds in predicates)


def lookup(item: Mapping[str, Any], path: str) -> Any:
    """Return the value at a dotted path, or None where a part of it is missing."""
    found: Any = item
    for key in path.split("."):
        found = found.get(key) if isinstance(found, Mapping) else None
    return found


def _field_predicates(kind: ResourceType, selector: str) -> Iterator[Predicate]:
    for term in filter(None, selector.split(",")):
        parsed = re.fullmatch(r"([\w.]+)(==|!=|=)(.*)", term)
        if parsed is None:
            raise StatusError(400, "BadRequest", f"invalid selector: {selector!r}; can't understand {term!r}")
        path, operator, value = parsed.groups()
        if path not in ("metadata.name", "metadata.namespace", *kind.fields):
            message = f'Unable to find "{kind.qualified}" that match field selector: field label not supported: {path}'
            raise StatusError(400, "BadRequest", message)
        yield _compare(path, value, operator != "!=")


def _compare(path: str, value: str, equal: bool) -> Predicate:
    return lambda item: (str(lookup(item, path) or "") == value) is equal


_LABEL_TERM = re.compile(
    r"\s*(?:(?P<absent>!)\s*)?(?P<key>[\w./-]+)\s*"
    r"(?:(?P<operator>==|!=|=)\s*(?P<value>[\w.-]*)|(?P<set>in|notin)\s*\((?P<values>[^)]*)\))?\s*(?:,|$)"
)


def _label_predicates(selector: str) -> Iterator[Predicate]:
    at = 0
    while at < len(selector):
        term = _LABEL_TERM.match(selector, at)
        if term is None or term.end() == at:
            raise StatusError(400, "BadRequest", f"unable to parse requirement: {selector[at:]!r}")
        at = term.end()
        key = term["key"]
        if term["set"]:
            yield _label_in(key, {each.strip() for each in term["values"].split(",")}, term["set"] == "in")
        elif term["operator"]:
            yield _label_in(key, {term["value"]}, term["operator"] != "!=")
        else:
            yield _has_label(key, not term["absent"])


def _labels(item: Mapping[str, Any]) -> Mapping[str, str]:
    return item["metadata"].get("labels") or {}


def _label_in(key: str, values: set[str], positive: bool) -> Predicate:
    return lambda item: (_labels(item).get(key) in values) is positive


def _has_label(key: str, positive: bool) -> Predicate:
    return lambda item: (key in _labels(item)) is positive


def matches_label_selector(item: Mapping[str, Any], selector: Mapping[str, Any]) -> bool:
    """Whether a ``LabelSelector`` of another object selects ``item``; an empty one selects everything."""
    labels = _labels(item)
    operators: Mapping[str, Callable[[str, Sequence[str]], bool]] = {
        "In": lambda key, values: labels.get(key) in values,
        "NotIn": lambda key, values: labels.get(key) not in values,
        "Exists": lambda key, _: key in labels,
        "DoesNotExist": lambda key, _: key not in labels,
    }
    exact = all(labels.get(key) == value for key, value in (selector.get("matchLabels") or {}).items())
    expressions = selector.get("matchExpressions") or []
    return exact and all(operators[each["operator"]](each["key"], each.get("values") or []) for each in expressions)
