"""Maps a vendor's ids to the devices of the service.

Invariant: an id means one device or none. An id that could mean two, or that the service has no device for, is refused
with a message. So are two ids that claim one device without being replicas of each other: otherwise the gate would
guard a different device from the one that is handed over.

Pure.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from scrubber.domain.resource_mapping import REPLICA_SEPARATOR

__all__ = ["DeviceIds", "DeviceNames", "ResolvedId", "parse_pci_address", "refuse_if_changed", "resolve_lists"]

_PCI = re.compile(r"(?:([0-9a-f]{4,8}):)?([0-9a-f]{2}):([0-9a-f]{2})\.([0-7])", re.IGNORECASE)
_NODE = re.compile(r"[a-z]+\d+", re.IGNORECASE)
"""The node of a single device, ``nvidia0``; not one that all share, such as ``nvidiactl`` and ``nvidia-uvm``."""


@dataclass(frozen=True, slots=True)
class DeviceNames:
    """A device of the service and its other names.

    Attributes:
        id: the UUID.
        index: the driver's; ``"0:1"`` for instance 1 of GPU 0.
        parent: id of the GPU that a MIG instance belongs to; empty for a whole GPU.
        pci: its PCI address in any spelling; empty when the service does not report it.
        nodes: base names of the device nodes, or of the mounts, by which a container reaches it.
    """

    id: str
    index: str
    parent: str = ""
    pci: str = ""
    nodes: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class ResolvedId:
    """The meaning of an id: ``device`` is the service's id, or empty, and then ``refusal`` gives the reason.

    Attributes:
        base: the id without its replica number.
        replica: whether it has one.
    """

    device: str = ""
    refusal: str = ""
    base: str = ""
    replica: bool = False


def parse_pci_address(text: str) -> tuple[int, int, int, int] | None:
    """Return domain, bus, device and function of an address in any spelling; None for anything else."""
    found = _PCI.fullmatch(text)
    if found is None:
        return None
    domain, bus, device, function = found.groups()
    return int(domain or "0", 16), int(bus, 16), int(device, 16), int(function, 16)


@dataclass(frozen=True, slots=True)
class DeviceIds:
    """Resolves ids to the devices of the service.

    An id is a UUID, a PCI address, an index, or the name of a device node that only one whole device has. Each of them
    may be followed by ``::`` and the number of a replica. A whole GPU that is partitioned into instances is not a
    device of the service, so its names resolve to no device.
    """

    devices: tuple[DeviceNames, ...]
    _by_name: Mapping[str, frozenset[str]] = field(init=False, repr=False, compare=False)
    _by_address: Mapping[tuple[int, int, int, int], frozenset[str]] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        named: dict[str, set[str]] = {}
        addressed: dict[tuple[int, int, int, int], set[str]] = {}
        for each in self.devices:
            words = {each.id, each.index} - {""}
            if not each.parent:
                words |= {node for node in each.nodes if _NODE.fullmatch(node)}
                if (address := parse_pci_address(each.pci)) is not None:
                    addressed.setdefault(address, set()).add(each.id)
            for word in words:
                named.setdefault(word, set()).add(each.id)
        object.__setattr__(self, "_by_name", {word: frozenset(ids) for word, ids in named.items()})
        object.__setattr__(self, "_by_address", {address: frozenset(ids) for address, ids in addressed.items()})

    def resolve(self, id_: str) -> ResolvedId:
        """Return the one device that ``id_`` means."""
        base, mark, number = id_.rpartition(REPLICA_SEPARATOR)
        replica = bool(mark) and bool(base) and number.isdecimal() and number.isascii()
        if not replica:
            base = id_
        matches = self._matches(base)
        if len(matches) == 1:
            return ResolvedId(next(iter(matches)), base=base, replica=replica)
        if matches:
            refusal = f"Device {id_} is withheld: its id is ambiguous and may mean {', '.join(sorted(matches))}."
        elif base and any(each.parent == base for each in self.devices):
            refusal = f"Device {id_} is withheld: it is partitioned into instances, which are allocated individually."
        else:
            refusal = f"Device {id_} is withheld: the scrub service knows no device with this id."
        return ResolvedId(refusal=refusal, base=base, replica=replica)

    def _matches(self, base: str) -> frozenset[str]:
        """Return every device that matches any interpretation of ``base``."""
        found = self._by_name.get(base, frozenset())
        if (address := parse_pci_address(base)) is not None:
            found |= self._by_address.get(address, frozenset())
        return found


def resolve_lists(
    directory: DeviceIds, lists: Mapping[str, Iterable[str]], away: Collection[str] = ()
) -> dict[str, dict[str, ResolvedId]]:
    """Return the meaning of each id of each resource: resource → id → meaning.

    A device may be in one resource only, and there under one name or as its replicas.

    Args:
        lists: resource → the ids that its plugin lists.
        away: the resources whose plugin is away: they give way to one whose plugin is present.
    """
    meanings = {resource: {id_: directory.resolve(id_) for id_ in ids} for resource, ids in lists.items()}
    present = {resource: ids for resource, ids in meanings.items() if resource not in away}
    by_present, by_any = _claimants(present), _claimants(meanings)
    claimed = by_any | by_present
    return {
        resource: {id_: _check_claim(id_, meaning, claimed, resource) for id_, meaning in ids.items()}
        for resource, ids in meanings.items()
    }


def refuse_if_changed(id_: str, resolved: ResolvedId, before: str) -> ResolvedId:
    """Return ``resolved``, refused when ``id_`` meant another device before.

    The kubelet gives a container the response of that time.

    Args:
        before: the device that the id first meant; empty when it meant none.
    """
    if not resolved.device or not before or resolved.device == before:
        return resolved
    refusal = (
        f"Device {id_} is withheld: its id meant {before} and now means {resolved.device}. Containers that were allocated "
        f"it have {before}; restart the plugin once there are none."
    )
    return ResolvedId(refusal=refusal, base=resolved.base, replica=resolved.replica)


_Claimants = Mapping[str, Sequence[tuple[str, str, bool]]]


def _claimants(meanings: Mapping[str, Mapping[str, ResolvedId]]) -> dict[str, list[tuple[str, str, bool]]]:
    """Return device → its claimants: resource, name without the replica number, whether it is a replica."""
    found: dict[str, set[tuple[str, str, bool]]] = {}
    for resource, ids in meanings.items():
        for meaning in ids.values():
            if meaning.device:
                found.setdefault(meaning.device, set()).add((resource, meaning.base, meaning.replica))
    return {device: sorted(claimants) for device, claimants in found.items()}


def _check_claim(id_: str, resolved: ResolvedId, claimants: _Claimants, resource: str) -> ResolvedId:
    others = [
        each for each in claimants.get(resolved.device, ()) if each != (resource, resolved.base, resolved.replica)
    ]
    if not resolved.device or not others:
        return resolved
    other, base, replica = others[0]
    called = f"{base}{REPLICA_SEPARATOR}…" if replica else base
    listed = f"is also listed as {called}" if other == resource else f"{other} also lists as {called}"
    refusal = f"Device {id_} is withheld: it is {resolved.device}, which {listed}."
    return ResolvedId(refusal=refusal, base=resolved.base, replica=resolved.replica)
