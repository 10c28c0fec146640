"""The GPUs and partitions that this node advertises, and why it does not advertise the others.

Promise: a GPU that hangs or is lost affects no other GPU. A GPU that was seen stays in the list until the PCI bus no
longer has it: whether it is out of order is decided by the device controllers.

The ids are those of AMD's own device plugin, so that this service also works behind or in place of it: the PCI address
of a GPU and of its first partition, ``amdgpu_xcp_N`` of each further partition. So are the profiles: the modes of a GPU
that can be partitioned, also of a whole one (``spx_nps1``), and none of a GPU without such modes.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
from collections.abc import AsyncIterator, Collection, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

from scrubber.adapters.amd.kernel_files import AmdPaths
from scrubber.adapters.amd.requests import Trait
from scrubber.adapters.children.driver_response import (
    malformed,
    objects,
    optional_count,
    optional_number,
    optional_text,
    text,
)
from scrubber.adapters.children.message import Message
from scrubber.adapters.children.request_pool import RequestPool
from scrubber.adapters.kernel_text import value_in
from scrubber.domain.device import Access, AccessKind, Device, NodeIdentity
from scrubber.domain.errors import ScrubberError, Unavailable, Unreadable

__all__ = ["AmdInventory"]

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_THE_DRIVER = "the node's driver"
_DRIVER = "amdgpu"
_SINGLE = "SPX"
_RENDER, _CARD = re.compile(r"renderD[0-9]+"), re.compile(r"card[0-9]+")


class AmdInventory:
    """:class:`scrubber.ports.Inventory` of the node's AMD GPUs.

    Args:
        requests: children of :data:`~scrubber.adapters.amd.requests.DRIVER_MODULE`.
        node: the node's name, as certificates contain it.
    """

    def __init__(self, paths: AmdPaths, requests: RequestPool, *, node: str) -> None:
        self._paths = paths
        self._requests = requests
        self._node = node
        self._lock = asyncio.Lock()
        self._known: dict[str, tuple[Device, ...]] = {}
        self._indexes: dict[str, int] = {}
        self._suspended: set[str] = set()
        self._not_advertised: Mapping[str, str] = MappingProxyType({})

    @property
    def not_advertised(self) -> Mapping[str, str]:
        """GPUs of which no device is advertised, by PCI address, with the reason; as of the last :meth:`devices`."""
        return self._not_advertised

    @property
    def last_devices(self) -> tuple[Device, ...]:
        """The devices as of the last :meth:`devices`, in order."""
        return tuple(
            device for address in sorted(self._known, key=self._indexes.__getitem__) for device in self._known[address]
        )

    async def devices(self) -> tuple[Device, ...]:
        async with self._lock:
            await self._driver_version()
            present, refused = self._present()
            for address in self._known.keys() - set(present):
                del self._known[address]
            self._assign_indexes(present)
            described = [address for address in present if address not in self._suspended]
            answers = await asyncio.gather(*(self._describe(address) for address in described))
            for address, found in zip(described, answers, strict=True):
                if not isinstance(found, ScrubberError):
                    self._known[address] = found
                elif address not in self._known:
                    refused[address] = f"The GPU at {address} could not be described and is not advertised: {found}"
            self._join_hives()
            self._not_advertised = MappingProxyType(refused)
            return self.last_devices

    async def identity(self) -> NodeIdentity:
        version = await self._driver_version()
        return NodeIdentity(self._node, value_in(_BOOT_ID.read_bytes()), version)

    def fingerprint(self) -> str:
        """Return a text that changes when a GPU or a partition appears or disappears. Reads no file of a GPU."""
        digest = hashlib.sha256()
        for address in self._paths.gpu_addresses():
            digest.update(f"{address} {self._paths.driver_of(address)}\n".encode())
        for directory in (self._paths.root / "sys/class/drm", self._paths.root / "sys/devices/platform"):
            names = sorted(path.name for path in directory.glob("*")) if directory.is_dir() else []
            digest.update("\n".join(name for name in names if name.startswith(("renderD", "amdgpu_xcp"))).encode())
        return digest.hexdigest()

    @asynccontextmanager
    async def suspend(self, addresses: Collection[str]) -> AsyncIterator[None]:
        """List the GPUs at ``addresses`` as last described while this is open; a reset requires this."""
        async with self._lock:
            self._suspended.update(addresses)
        try:
            yield
        finally:
            self._suspended.difference_update(addresses)

    async def _driver_version(self) -> str:
        """Return the driver's version.

        Raises:
            Unavailable: there is no driver, or it does not answer.
        """
        try:
            return text(await self._requests.request(_THE_DRIVER, {"ask": "driver"}), "version")
        except Unavailable:
            raise
        except ScrubberError as error:
            raise Unavailable(str(error)) from error

    def _present(self) -> tuple[list[str], dict[str, str]]:
        """Return the GPUs that the driver has, or had before a reset, and why others are not advertised."""
        present: list[str] = []
        refused: dict[str, str] = {}
        for address in self._paths.gpu_addresses():
            driver = self._paths.driver_of(address)
            if driver == _DRIVER or (driver is None and address in self._known):
                present.append(address)
            elif driver is None:
                refused[address] = f"No driver is bound to the GPU at {address}."
            else:
                refused[address] = (
                    f"The GPU at {address} is bound to {driver}: it is passed through and is not advertised."
                )
        return present, refused

    def _assign_indexes(self, addresses: Collection[str]) -> None:
        """Number the GPUs in bus order. An assigned number stays when other GPUs come and go."""
        for address in addresses:
            if address not in self._indexes:
                taken = set(self._indexes.values())
                self._indexes[address] = next(number for number in range(len(taken) + 1) if number not in taken)

    async def _describe(self, address: str) -> tuple[Device, ...] | ScrubberError:
        try:
            answer = await self._requests.request(address, {"ask": "describe", "pci": address})
            return self._compose(address, answer)
        except ScrubberError as error:
            return error

    def _compose(self, address: str, answer: Message) -> tuple[Device, ...]:
        nodes = sorted(objects(answer, "nodes"), key=lambda node: optional_count(node, "partition") or 0)
        if not nodes:
            raise Unreadable(f"The compute driver (KFD) does not list the GPU at {address}; the kernel log shows why.")
        names, partitions = (
            {text(node, "name") for node in nodes},
            {optional_count(node, "partition") or 0 for node in nodes},
        )
        if not len(names) == len(partitions) == len(nodes):
            raise malformed("nodes", "has two partitions with the same name or number")
        partitioned = len(nodes) > 1 or (optional_text(answer, "compute_partition") or _SINGLE) != _SINGLE
        return tuple(self._device(address, answer, node, partitioned=partitioned) for node in nodes)

    def _device(self, address: str, gpu: Message, node: Mapping[str, object], *, partitioned: bool) -> Device:
        index, partition = str(self._indexes[address]), optional_count(node, "partition") or 0
        unique_id = optional_text(gpu, "unique_id")
        whole, own = optional_count(gpu, "memory"), optional_count(node, "memory")
        memory = (not partitioned and whole) or own or 0
        if memory <= 0:
            raise Unreadable(f"The GPU at {address} reports no memory.")
        compute_mode, memory_mode = optional_text(gpu, "compute_partition"), optional_text(gpu, "memory_partition")
        numa = optional_number(gpu, "numa_node")
        traits = {
            Trait.PCI: address,
            Trait.UNIQUE_ID: unique_id,
            Trait.KFD_ID: str(optional_count(node, "gpu_id")),
            Trait.ARCHITECTURE: text(node, "architecture"),
            Trait.COMPUTE_UNITS: str(optional_count(node, "compute_units") or 0),
            Trait.POSITION: str(optional_count(node, "position") or 0),
            Trait.PARTITION: str(partition),
            Trait.HIVE: f"{hive:#x}" if (hive := optional_count(node, "hive", bits=64)) else None,
            Trait.NUMBER: text(node, "render_number"),
            Trait.CARD_NUMBER: optional_text(node, "card_number"),
            Trait.KFD_NUMBER: optional_text(gpu, "kfd_number"),
            Trait.MEMORY_MODE: memory_mode,
            Trait.COMPUTE_MODE: compute_mode,
            "serial": optional_text(gpu, "serial"),
            "vbios": optional_text(gpu, "vbios"),
        }
        return Device(
            text(node, "name"),
            f"{index}:{partition}" if partitioned else index,
            optional_text(gpu, "model") or f"AMD GPU {optional_text(gpu, 'pci_id') or 'of unknown model'}",
            memory,
            f"GPU-{unique_id or address}" if partitioned else None,
            numa_node=numa if numa is not None and numa >= 0 else None,
            access=self._access(node),
            profile=f"{compute_mode}_{memory_mode}".lower() if compute_mode and memory_mode else None,
            traits=tuple((name, value) for name, value in traits.items() if value is not None),
        )

    def _access(self, node: Mapping[str, object]) -> tuple[Access, ...]:
        render, card = text(node, "render"), optional_text(node, "card")
        if not _RENDER.fullmatch(render) or not (card is None or _CARD.fullmatch(card)):
            raise malformed("nodes", f"names {render!r} and {card!r}, which are not the device nodes of a GPU")
        paths = ["/dev/kfd", *(f"/dev/dri/{name}" for name in (render, card) if name is not None)]
        return tuple(
            Access(AccessKind.DEVICE_NODE, f"{str(self._paths.root).rstrip('/')}{path}", path) for path in paths
        )

    def _join_hives(self) -> None:
        """Make the GPUs of a hive peers of each other: their links are fast, and a reset of one may need all."""
        members: dict[str, set[str]] = {}
        for device in self.last_devices:
            if (hive := dict(device.traits).get(Trait.HIVE)) is not None:
                members.setdefault(hive, set()).add(device.id)
        for address, devices in self._known.items():
            self._known[address] = tuple(_with_peers(device, members) for device in devices)


def _with_peers(device: Device, members: Mapping[str, Collection[str]]) -> Device:
    hive = dict(device.traits).get(Trait.HIVE, "")
    return replace(device, peers=frozenset(members.get(hive, ())) - {device.id})
