"""The allocator of devices: which devices of a node's ResourceSlices a claim gets.

Promise: first fit by the names of slices and then in the order of their devices, as in Kubernetes 1.36, with pools that
have binding conditions last. What it does not support (constraints, consumable capacity, CEL beyond comparisons of
driver, attributes and capacity) it refuses with a message, and does not ignore.
"""

from __future__ import annotations

import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from functools import cached_property
from typing import Any

from scrubber.emulator.cluster.resources import Json

BLOCKING_EFFECTS = ("NoSchedule", "NoExecute")
DeviceId = tuple[str, str, str]
"""Driver, pool and device."""


class Unallocatable(Exception):
    """The claim cannot be allocated now; the message says why."""


@dataclass(frozen=True, slots=True)
class PublishedDevice:
    """A device of a complete pool."""

    id: DeviceId
    device: Json
    has_node: bool
    """Whether its slice is one node's."""


@dataclass
class Pool:
    """The slices of a pool in its newest generation; complete before anything is read from it."""

    driver: str
    name: str
    generation: int = -1
    expected: int = 0
    slices: list[Json] = field(default_factory=list)

    def add(self, item: Json) -> None:
        spec = item["spec"]["pool"]
        if spec["generation"] > self.generation:
            self.generation, self.expected, self.slices = spec["generation"], spec["resourceSliceCount"], []
        if spec["generation"] == self.generation:
            self.slices.append(item)

    @cached_property
    def devices(self) -> list[PublishedDevice]:
        """The devices in order; none while slices are missing, or when the pool is invalid."""
        if len(self.slices) != self.expected or not self.is_valid:
            return []
        return [
            PublishedDevice((self.driver, self.name, each["name"]), each, bool(item["spec"].get("nodeName")))
            for item in self.slices
            for each in item["spec"].get("devices") or []
        ]

    @cached_property
    def counters(self) -> dict[tuple[str, str], Decimal]:
        """The shared counters by set and name."""
        return {
            (each["name"], name): quantity(counter["value"])
            for item in self.slices
            for each in item["spec"].get("sharedCounters") or []
            for name, counter in each["counters"].items()
        }

    @property
    def is_valid(self) -> bool:
        """Whether every device has a name of its own and consumes only counters that the pool has."""
        devices = [each for item in self.slices for each in item["spec"].get("devices") or []]
        names = Counter(each["name"] for each in devices)
        consumed = {key for each in devices for key in consumption(each)}
        return max(names.values(), default=1) == 1 and consumed <= self.counters.keys()

    @property
    def has_binding_conditions(self) -> bool:
        return any(each.device.get("bindingConditions") for each in self.devices)


def quantity(value: str | int) -> Decimal:
    """Return the value of a Kubernetes quantity, such as ``80Gi``, ``1500m`` or a number."""
    text = str(value)
    parsed = re.fullmatch(r"([+-]?[\d.]+(?:[eE][+-]?\d+)?)([numkMGTPE]|[KMGTPE]i)?", text)
    if parsed is None:
        raise Unallocatable(f"{text!r} is not a quantity")
    number, unit = parsed.groups()
    if unit is None:
        return Decimal(number)
    if unit.endswith("i"):
        return Decimal(number) * Decimal(1024) ** (1 + "KMGTPE".index(unit[0]))
    powers = {"n": -9, "u": -6, "m": -3, "k": 3, "M": 6, "G": 9, "T": 12, "P": 15, "E": 18}
    return Decimal(number).scaleb(powers[unit])


def consumption(device: Mapping[str, Any]) -> dict[tuple[str, str], Decimal]:
    """Return what a device consumes of the shared counters of its pool, by set and name."""
    return {
        (each["counterSet"], name): quantity(counter["value"])
        for each in device.get("consumesCounters") or []
        for name, counter in each["counters"].items()
    }


def pools_of(slices: Iterable[Json], node: str) -> list[Pool]:
    """Return the pools that a node has access to, those with binding conditions last."""
    pools: dict[tuple[str, str], Pool] = {}
    for item in slices:
        spec = item["spec"]
        if spec.get("nodeName") == node or spec.get("allNodes"):
            key = (spec["driver"], spec["pool"]["name"])
            pools.setdefault(key, Pool(*key)).add(item)
    return sorted(pools.values(), key=lambda pool: pool.has_binding_conditions)


class Allocator:
    """Allocates claims on one node. Devices of earlier claims of the same pod stay taken."""

    def __init__(
        self, node: str, slices: Iterable[Json], classes: Mapping[str, Json], allocated: Iterable[DeviceId]
    ) -> None:
        self._node = node
        self._pools = pools_of(slices, node)
        self._classes = classes
        self._taken = set(allocated)

    def allocate(self, spec: Mapping[str, Any], timestamp: str) -> Json:
        """Return the allocation of a claim with this spec; its devices are then taken.

        Raises:
            Unallocatable: no devices match, too few are free, or the claim uses what is not supported.
        """
        devices = spec.get("devices") or {}
        if devices.get("constraints"):
            raise Unallocatable("constraints of claims are not supported by this scheduler")
        before = set(self._taken)
        results: list[Json] = []
        config: list[Json] = []
        has_node = False
        try:
            for request in devices.get("requests") or []:
                name, exactly, chosen = self._first_available(request)
                results += [_result(name, exactly, each) for each in chosen]
                has_node = has_node or any(each.has_node for each in chosen)
                config += [
                    {"source": "FromClass", "requests": [name], **each}
                    for each in self._class(exactly["deviceClassName"])["spec"].get("config") or []
                ]
        except Unallocatable:
            self._taken = before
            raise
        config += [{"source": "FromClaim", **each} for each in devices.get("config") or []]
        field = {"key": "metadata.name", "operator": "In", "values": [self._node]}
        return {
            "devices": {"results": results, **({"config": config} if config else {})},
            **({"nodeSelector": {"nodeSelectorTerms": [{"matchFields": [field]}]}} if has_node else {}),
            "allocationTimestamp": timestamp,
        }

    def _class(self, name: str) -> Json:
        found = self._classes.get(name)
        if found is None:
            raise Unallocatable(f"device class {name} does not exist")
        return {**found, "spec": found.get("spec") or {}}

    def _first_available(self, request: Json) -> tuple[str, Json, list[PublishedDevice]]:
        if "exactly" in request:
            return request["name"], request["exactly"], self._choose(request["exactly"])
        problem = Unallocatable(f"request {request['name']} has no form that is supported")
        for each in request.get("firstAvailable") or []:
            try:
                return f"{request['name']}/{each['name']}", each, self._choose(each)
            except Unallocatable as error:
                problem = error
        raise problem

    def _choose(self, request: Json) -> list[PublishedDevice]:
        if request.get("capacity"):
            raise Unallocatable("requests of capacity are not supported by this scheduler")
        admin = bool(request.get("adminAccess"))
        selectors = [
            each["cel"]["expression"]
            for source in (self._class(request["deviceClassName"])["spec"], request)
            for each in source.get("selectors") or []
        ]
        candidates = [
            (pool, each)
            for pool in self._pools
            for each in pool.devices
            if all(matches(expression, each.id[0], each.device) for expression in selectors)
        ]
        everything = request.get("allocationMode") == "All"
        count = len(candidates) if everything else request.get("count") or 1
        chosen: list[PublishedDevice] = []
        for pool, each in candidates:
            if len(chosen) < count and self._is_usable(pool, each, request.get("tolerations") or [], admin):
                chosen.append(each)
                if not admin:
                    self._taken.add(each.id)
        if len(chosen) < count or not chosen:
            self._taken -= set() if admin else {each.id for each in chosen}
            raise Unallocatable("cannot allocate all claims")
        return chosen

    def _is_usable(self, pool: Pool, published: PublishedDevice, tolerations: Sequence[Json], admin: bool) -> bool:
        taints = published.device.get("taints") or []
        if any(each["effect"] in BLOCKING_EFFECTS and not tolerates(tolerations, each) for each in taints):
            return False
        return admin or (published.id not in self._taken and self._has_counters(pool, published))

    def _has_counters(self, pool: Pool, published: PublishedDevice) -> bool:
        if not pool.counters:
            return True
        used: defaultdict[tuple[str, str], Decimal] = defaultdict(Decimal)
        for each in pool.devices:
            if each.id in self._taken or each.id == published.id:
                for key, value in consumption(each.device).items():
                    used[key] += value
        return all(used[key] <= limit for key, limit in pool.counters.items())


def _result(request: str, exactly: Json, published: PublishedDevice) -> Json:
    driver, pool, device = published.id
    copied = {key: published.device.get(key) for key in ("bindingConditions", "bindingFailureConditions")}
    return {
        "request": request,
        "driver": driver,
        "pool": pool,
        "device": device,
        **({"adminAccess": True} if exactly.get("adminAccess") else {}),
        **({"tolerations": exactly["tolerations"]} if exactly.get("tolerations") else {}),
        **{key: value for key, value in copied.items() if value},
    }


def tolerates(tolerations: Iterable[Mapping[str, Any]], taint: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the toleration that matches a taint; None without one."""
    for each in tolerations:
        same_key = not each.get("key") or each["key"] == taint["key"]
        same_value = each.get("operator") == "Exists" or (each.get("value") or "") == (taint.get("value") or "")
        if same_key and same_value and each.get("effect") in (None, "", taint["effect"]):
            return each
    return None


# Selectors

_TERM = re.compile(
    r"\s*(?:(?P<driver>device\.driver)"
    r"|device\.(?P<place>attributes|capacity)\[(?P<quote>[\"'])(?P<domain>[^\"']+)(?P=quote)\]\.(?P<name>\w+))"
    r"\s*(?:\.compareTo\(quantity\((?P<mark>[\"'])(?P<quantity>[^\"']+)(?P=mark)\)\)\s*(?P<sign>==|!=|>=|<=|>|<)\s*0"
    r"|(?P<operator>==|!=)\s*(?P<value>\"[^\"]*\"|'[^']*'|-?\d+|true|false))?\s*"
)


def matches(expression: str, driver: str, device: Mapping[str, Any]) -> bool:
    """Evaluate a selector: comparisons of driver, attributes and capacity, joined by ``&&``.

    Raises:
        Unallocatable: the expression is beyond that.
    """
    return all(_holds(term, driver, device) for term in expression.split("&&"))


def _holds(term: str, driver: str, device: Mapping[str, Any]) -> bool:
    parsed = _TERM.fullmatch(term)
    if parsed is None:
        raise Unallocatable(f"the CEL expression {term.strip()!r} is not supported by this scheduler")
    if parsed["driver"]:
        actual: Any = driver
    else:
        values = dict(_values(device.get(parsed["place"]) or {}, driver))
        actual = values.get((parsed["domain"], parsed["name"]))
    if actual is None:
        return False  # a field that does not exist is an error in CEL, and the device does not match
    if parsed["quantity"]:
        return _compare(quantity(str(actual)), parsed["sign"], quantity(parsed["quantity"]))
    if not parsed["operator"]:
        return actual is True
    expected = json.loads(parsed["value"].replace("'", '"'))
    return (actual == expected) is (parsed["operator"] == "==")


def _values(fields: Mapping[str, Json], driver: str) -> Iterator[tuple[tuple[str, str], Any]]:
    for name, each in fields.items():
        domain, _, identifier = name.rpartition("/")
        yield (domain or driver, identifier), next(iter(each.values()), None)


def _compare(left: Decimal, sign: str, right: Decimal) -> bool:
    order = (left > right) - (left < right)
    return {"==": order == 0, "!=": order != 0, ">=": order >= 0, "<=": order <= 0, ">": order > 0, "<": order < 0}[
        sign
    ]
