"""Which device of the service a vendor's id means.

Promise: an id is one device or none. One that could be two, or that the service has no device for, is refused with a
sentence, and so are two ids that claim one device without being replicas of each other: the gate would otherwise guard
another device than the one that is handed out.

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
"""A device node of one device, ``nvidia0``; not one that all share, such as ``nvidiactl`` and ``nvidia-uvm``."""


@dataclass(frozen=True, slots=True)
class DeviceNames:
    """A device of the service, and what else it is called.

    Attributes:
        id: the UUID.
        index: the driver's; ``"0:1"`` for instance 1 of GPU 0.
        parent: id of the GPU that an instance is cut from; empty for a whole GPU.
        pci: its PCI address in any spelling; empty when the service does not say.
        nodes: base names of the device nodes, or of the mounts, that a container reaches it by.
    """

    id: str
    index: str
    parent: str = ""
    pci: str = ""
    nodes: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class ResolvedId:
    """What an id means: ``device`` is the service's id, or empty, and then ``refusal`` says why.

    Attributes:
        base: the id without its replica's number.
        replica: whether it has one.
    """

    device: str = ""
    refusal: str = ""
    base: str = ""
    replica: bool = False


def parse_pci_address(text: str) -> tuple[int, int, int, int] | None:
    """Domain, bus, device and function of an address, however it is spelled; None for anything else."""
    found = _PCI.fullmatch(text)
    if found is None:
        return None
    domain, bus, device, function = found.groups()
    return int(domain or "0", 16), int(bus, 16), int(device, 16), int(function, 16)


@dataclass(frozen=True, slots=True)
class DeviceIds:
    """Looks ids up among the devices of the service.

    An id is a UUID, a PCI address, an index, or the name of a device node that only one whole device has; each of them
    may be followed by ``::`` and the number of a replica. A whole GPU that is cut into instances is none of the
    service's devices, so its names are nobody's.
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
        """The one device that ``id_`` means."""
        base, mark, number = id_.rpartition(REPLICA_SEPARATOR)
        replica = bool(mark) and bool(base) and number.isdecimal() and number.isascii()
        if not replica:
            base = id_
        matches = self._matches(base)
        if len(matches) == 1:
            return ResolvedId(next(iter(matches)), base=base, replica=replica)
        if matches:
            refusal = f"Device {id_} is not handed out: it could be any of {', '.join(sorted(matches))}."
        elif base and any(each.parent == base for each in self.devices):
            refusal = f"Device {id_} is not handed out: it is cut into instances, which are handed out one by one."
        else:
            refusal = f"Device {id_} is not handed out: the scrub service knows no device that is called so."
        return ResolvedId(refusal=refusal, base=base, replica=replica)

    def _matches(self, base: str) -> frozenset[str]:
        """Every device that any reading of ``base`` leads to."""
        found = self._by_name.get(base, frozenset())
        if (address := parse_pci_address(base)) is not None:
            found |= self._by_address.get(address, frozenset())
        return found


def resolve_lists(
    directory: DeviceIds, lists: Mapping[str, Iterable[str]], away: Collection[str] = ()
) -> dict[str, dict[str, ResolvedId]]:
    """What each id of each resource means: resource → id → meaning.

    A device may be in one resource only, and there under one name or as its replicas.

    Args:
        lists: resource → the ids that its plugin lists.
        away: those of the resources whose plugin is away: they give way to one that is there.
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
    """``resolved``, refused when ``id_`` was another device before: the kubelet gives a container the answer of then.

    Args:
        before: the device that the id first meant; empty when it meant none.
    """
    if not resolved.device or not before or resolved.device == before:
        return resolved
    refusal = (
        f"Device {id_} is not handed out: it was {before} and is {resolved.device} now. Containers that were given it "
        "have the former; restart the plugin once there are none."
    )
    return ResolvedId(refusal=refusal, base=resolved.base, replica=resolved.replica)


_Claimants = Mapping[str, Sequence[tuple[str, str, bool]]]


def _claimants(meanings: Mapping[str, Mapping[str, ResolvedId]]) -> dict[str, list[tuple[str, str, bool]]]:
    """Device → who claims it: resource, name without the replica's number, whether it is a replica."""
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
    listed = f"is also listed as {called}" if other == resource else f"{other} lists as {called}"
    refusal = f"Device {id_} is not handed out: it is {resolved.device}, which {listed}."
    return ResolvedId(refusal=refusal, base=resolved.base, replica=resolved.replica)
