"""Chooses the devices that the kubelet should prefer: clean ones first, then those close to each other.

Invariants: a pure function of what is advertised, so no hardware is touched. It never fails, for any input, because an
error here would fail a pod permanently. It does not depend on the order of the ids, which is random in every message of
the kubelet.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence

from plugin.kubelet.devices import AdvertisedDevice, ServiceVerdict
from plugin.kubelet.shares import SharePreference, choose_shares

__all__ = ["preferred_devices"]

MAX_SEEDS = 16
"""Limit of start devices to try on a topology with many kinds: the kubelet's main loop waits for the response."""


def preferred_devices(
    available: Iterable[str],
    must_include: Iterable[str],
    size: int,
    devices: Mapping[str, AdvertisedDevice],
    preference: SharePreference = SharePreference.DISTRIBUTED,
) -> tuple[str, ...]:
    """Choose ``size`` ids, those of ``must_include`` first; fewer when there are not enough.

    Readiness is the first criterion: certified-clean, then being scrubbed, then dirty or unknown, then out of service.
    Within the last readiness of which only a part is taken, topology decides: fast links to the chosen devices, then
    their NUMA node, then keeping the groups of the remaining devices whole. Instances of one GPU count as close as
    linked GPUs.

    Where there are shares, ``preference`` is the first criterion (:func:`plugin.kubelet.shares.choose_shares`).
    """
    chosen = sorted(set(must_include))[: max(size, 0)]
    left = set(available).difference(chosen)
    if any(devices[id_].share_of for id_ in left.intersection(devices)):
        return choose_shares(left, chosen, size, devices, preference, _readiness)
    while left and len(chosen) < size:
        best = max(_readiness(devices.get(id_)) for id_ in left)
        pool = sorted(id_ for id_ in left if _readiness(devices.get(id_)) == best)
        need = size - len(chosen)
        chosen += pool if len(pool) <= need else _closest(pool, need, chosen, _Topology(devices, chosen, left))
        left.difference_update(pool)
    return tuple(chosen)


def _readiness(device: AdvertisedDevice | None) -> int:
    if device is None or device.verdict is ServiceVerdict.UNKNOWN:
        return 1
    if device.verdict in (ServiceVerdict.WITHHELD, ServiceVerdict.HELD):
        return 0
    return 3 if device.certified else 2 if device.scrubbing else 1


def _by_parent(ids: Iterable[str], devices: Mapping[str, AdvertisedDevice]) -> dict[str, set[str]]:
    """Return the MIG instances among ``ids``, by their GPU."""
    found: dict[str, set[str]] = {}
    for id_ in ids:
        if (device := devices.get(id_)) and device.parent:
            found.setdefault(device.parent, set()).add(id_)
    return found


class _Topology:
    """How close devices are, and how many links a choice would break to the rest."""

    def __init__(self, devices: Mapping[str, AdvertisedDevice], chosen: Iterable[str], left: Iterable[str]) -> None:
        self._left = frozenset(left)
        ids = self._left.union(chosen)
        self.node = {id_: device.numa_node if (device := devices.get(id_)) else None for id_ in ids}
        self.links: dict[str, set[str]] = {id_: set() for id_ in ids}
        for id_ in ids:
            for peer in ids.intersection(devices[id_].peers if id_ in devices else ()):
                if peer != id_:
                    self.links[id_].add(peer)
                    self.links[peer].add(id_)
        for siblings in _by_parent(ids, devices).values():
            for id_ in siblings:
                self.links[id_] |= siblings - {id_}
        self._nodes = self._on_nodes(self._left)

    def _on_nodes(self, ids: Iterable[str]) -> Counter[int]:
        return Counter(node for id_ in ids if (node := self.node[id_]) is not None)

    def inside(self, group: Collection[str]) -> tuple[int, int]:
        """Return the fast links within ``group``, and the pairs on the same NUMA node; each pair counts twice."""
        links = sum(len(self.links[id_].intersection(group)) for id_ in group)
        return (links, sum(count * (count - 1) for count in self._on_nodes(group).values()))

    def cut(self, group: Collection[str]) -> tuple[int, int]:
        """Return the same numbers for pairs of a device of ``group`` and a device that would be left."""
        of_group = self._on_nodes(group)
        links = sum(len((self.links[id_] & self._left).difference(group)) for id_ in group)
        near = sum(count * (self._nodes[node] - count) for node, count in of_group.items())
        return (links, near)

    def seeds(self, pool: Sequence[str]) -> list[str]:
        """Return one device of each kind with equal topology, so that 256 equal instances cost one attempt."""
        kinds: dict[tuple[int | None, frozenset[str]], str] = {}
        for id_ in pool:
            links = self.links[id_]
            kinds.setdefault((self.node[id_], frozenset(links | {id_}) if links else frozenset()), id_)
        return list(kinds.values())[:MAX_SEEDS]


class _ChosenDevices:
    """The devices taken so far, and how close each candidate is to them, updated incrementally."""

    def __init__(self, topology: _Topology, pool: Sequence[str], cut: Mapping[str, tuple[int, int]]) -> None:
        self._topology = topology
        self._cut = cut
        self._links = dict.fromkeys(pool, 0)
        self._near: dict[int | None, int] = dict.fromkeys(topology.node.values(), 0)

    def add(self, id_: str) -> None:
        """Take ``id_``, which is then no longer a candidate."""
        self._links.pop(id_, None)
        for peer in self._topology.links[id_]:
            if peer in self._links:
                self._links[peer] += 1
        if (node := self._topology.node[id_]) is not None:
            self._near[node] += 1

    def closest(self) -> str:
        """Return the candidate that is closest to the devices taken so far.

        The criteria are the most fast links to them, then the most devices of theirs on its NUMA node, then the fewest
        links broken to the rest. Ties are resolved by the order of the pool.
        """
        node, near, cut = self._topology.node, self._near, self._cut
        return max(self._links.items(), key=lambda each: (each[1], near[node[each[0]]], cut[each[0]]))[0]


def _closest(pool: Sequence[str], need: int, chosen: Sequence[str], topology: _Topology) -> list[str]:
    """Return ``need`` ids of the longer ``pool``, close to ``chosen`` or, when nothing is chosen, to each other."""
    cut = {id_: _negative(topology.cut((id_,))) for id_ in pool}
    if chosen:
        return _grow([], need, chosen, _ChosenDevices(topology, pool, cut))
    attempts = [_grow([seed], need, (), _ChosenDevices(topology, pool, cut)) for seed in topology.seeds(pool)]
    return max(attempts, key=lambda attempt: _score(attempt, topology))


def _grow(start: Sequence[str], need: int, chosen: Sequence[str], company: _ChosenDevices) -> list[str]:
    """Add the closest id greedily until there are ``need`` ids."""
    taken = list(start)
    for id_ in (*chosen, *taken):
        company.add(id_)
    while len(taken) < need:
        closest = company.closest()
        company.add(closest)
        taken.append(closest)
    return taken


def _score(attempt: Sequence[str], topology: _Topology) -> tuple[tuple[int, int], tuple[int, int]]:
    group = frozenset(attempt)
    return (topology.inside(group), _negative(topology.cut(group)))


def _negative(pair: tuple[int, int]) -> tuple[int, int]:
    return (-pair[0], -pair[1])
