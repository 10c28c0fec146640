"""The GPUs and MIG instances that this node advertises, and why it does not advertise the others.

Promise: a GPU that hangs, is lost or sends malformed replies affects no other GPU. Each GPU is described by its own
child, which ends after its reply: no process remains that has the GPU attached and would block its reset. A GPU that
was seen stays in the list until the PCI bus no longer has it: whether it is out of order is decided by the device
controllers and must not change the node's capacity.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Callable, Collection, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from types import MappingProxyType

from scrubber.adapters.children.driver_response import optional_text, text
from scrubber.adapters.children.message import Message
from scrubber.adapters.children.process import Children
from scrubber.adapters.children.request_pool import RequestPool
from scrubber.adapters.kernel_text import value_in
from scrubber.adapters.nvidia import bus, description
from scrubber.adapters.nvidia.description import GpuDescription
from scrubber.adapters.nvidia.driver_paths import DriverPaths
from scrubber.adapters.nvidia.driver_requests import DRIVER_MODULE, driver_arguments
from scrubber.domain.device import Device, NodeIdentity
from scrubber.domain.errors import DriverTimeout, ScrubberError, Unavailable

__all__ = ["CONFIDENTIAL_MODE", "NvidiaInventory"]

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_THE_DRIVER = "the node's driver"
CONFIDENTIAL_MODE = "confidential"
"""Trait of a device whose driver is in a confidential-computing mode: ``on`` or ``devtools``."""


class NvidiaInventory:
    """:class:`scrubber.ports.Inventory` of the node's NVIDIA GPUs.

    Args:
        node: the node's name, as certificates contain it.
        deadline: timeout of the description of one GPU, in seconds; the first one initialises the GPU, which takes
            seconds unless something keeps it awake.
        retry_after: seconds after which a GPU that could not be described is described again.
        monotonic: returns a time in seconds that never goes backwards.
    """

    def __init__(
        self,
        paths: DriverPaths,
        children: Children,
        *,
        node: str,
        deadline: float = 30.0,
        retry_after: float = 30.0,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._paths = paths
        self._children = children
        self._node = node
        self._deadline = deadline
        self._retry_after = retry_after
        self._monotonic = monotonic
        self._failed_at: float | None = None
        self._confidential = False
        self._pools: dict[str, RequestPool] = {}
        self._refresh_lock = asyncio.Lock()
        self._descriptions: dict[str, GpuDescription] = {}
        self._indexes: dict[str, int] = {}
        self._suspended: set[str] = set()
        self._not_advertised: Mapping[str, str] = MappingProxyType({})

    @property
    def not_advertised(self) -> Mapping[str, str]:
        """GPUs of which no device is advertised, by PCI address, with the reason; as of the last :meth:`devices`."""
        return self._not_advertised

    @property
    def is_confidential(self) -> bool:
        """Whether the driver reported a confidential-computing mode at the last :meth:`devices`."""
        return self._confidential

    async def devices(self) -> tuple[Device, ...]:
        async with self._refresh_lock:
            versions = await self._versions()
            self._confidential = optional_text(versions, CONFIDENTIAL_MODE) is not None
            refused = await self._describe_all()
            found = self._compose(versions, refused)
            self._not_advertised = MappingProxyType(refused)
            return found

    async def identity(self) -> NodeIdentity:
        async with self._refresh_lock:
            versions = await self._versions()
        boot = value_in(_BOOT_ID.read_bytes())
        return NodeIdentity(self._node, boot, text(versions, "driver"))

    async def fingerprint(self) -> str:
        """Return a text that changes when a GPU or an instance appears or disappears.

        While some GPU could not be described, it changes every ``retry_after`` seconds as well. Reads only files of the
        kernel, and calls no driver.
        """
        rounds = 0 if self._failed_at is None else int((self._monotonic() - self._failed_at) / self._retry_after)
        return f"{bus.fingerprint(self._paths)} {rounds}"

    @asynccontextmanager
    async def suspend(self, addresses: Collection[str]) -> AsyncIterator[None]:
        """Leave the GPUs at ``addresses`` alone while this is open: they are listed as last described.

        A reset requires this. It takes effect when the reading in progress is over. Strings that are not the address of
        a GPU are ignored.
        """
        async with self._refresh_lock:
            self._suspended.update(addresses)
        try:
            yield
        finally:
            self._suspended.difference_update(addresses)

    async def close(self) -> None:
        """End every child that is still describing a GPU."""
        pools = list(self._pools.values())
        self._pools.clear()
        await asyncio.gather(*(pool.close() for pool in pools))

    async def _versions(self) -> Message:
        """Return the versions of the driver.

        Raises:
            Unavailable: the driver does not reply, for any reason.
        """
        try:
            return await self._request(_THE_DRIVER, {"ask": "identity"})
        except Unavailable:
            raise
        except ScrubberError as error:
            raise Unavailable(str(error)) from error

    async def _describe_all(self) -> dict[str, str]:
        """Describe every GPU on the bus; return why some are not advertised."""
        present = bus.list_gpus(self._paths)
        refused = {gpu.address: gpu.unusable_reason for gpu in present if gpu.unusable_reason is not None}
        usable = [gpu.address for gpu in present if gpu.unusable_reason is None]
        for address in self._descriptions.keys() - set(usable):
            del self._descriptions[address]
        self._assign_indexes(usable)
        addresses = [address for address in usable if address not in self._suspended]
        answers = await asyncio.gather(*(self._describe(each) for each in addresses))
        for address, found in zip(addresses, answers, strict=True):
            if isinstance(found, GpuDescription):
                self._descriptions[address] = found
            elif address not in self._descriptions:
                refused[address] = f"The GPU at {address} could not be described and is not advertised: {found}"
        if all(isinstance(found, GpuDescription) for found in answers):
            self._failed_at = None
        elif self._failed_at is None:
            self._failed_at = self._monotonic()
        for address, gpu in self._descriptions.items():
            why = description.exclusion_reason(gpu, address)
            if why is not None:
                refused[address] = why
        return refused

    async def _describe(self, address: str) -> GpuDescription | ScrubberError:
        try:
            return description.parse_description(await self._request(address, {"ask": "describe", "pci": address}))
        except ScrubberError as error:
            return error

    def _assign_indexes(self, addresses: Collection[str]) -> None:
        """Number the GPUs in bus order, as NVML counts. An assigned number stays when other GPUs come and go."""
        for position, address in enumerate(addresses):
            if address not in self._indexes:
                taken = set(self._indexes.values())
                free = (number for number in range(len(taken) + 1) if number not in taken)
                self._indexes[address] = position if position not in taken else next(free)

    def _compose(self, versions: Message, refused: Mapping[str, str]) -> tuple[Device, ...]:
        peers = description.peers_of(self._descriptions)
        minors = bus.mig_minors(self._paths)
        known_versions = tuple(
            (name, value)
            for name in ("nvml", "cuda", CONFIDENTIAL_MODE)
            if (value := optional_text(versions, name)) is not None
        )
        found: dict[str, Device] = {}
        for address, gpu in self._descriptions.items():
            if address in refused:
                continue
            for device in description.devices_of(
                gpu,
                address,
                self._indexes[address],
                numa_node=bus.numa_node(self._paths, address),
                peers=peers.get(gpu.uuid, frozenset()),
                minors=minors,
                nodes=self._paths.dev,
                traits=(*known_versions, *_device_number(self._paths.dev / f"nvidia{gpu.minor}")),
            ):
                found[device.id] = device
        return tuple(sorted(found.values(), key=_order))

    async def _request(self, key: str, message: Message) -> Message:
        """Send ``message`` to a child started for it.

        A child that hangs is remembered, so that no second one hangs beside it.
        """
        pool = self._pools.get(key)
        if pool is None:
            pool = self._pools[key] = RequestPool(
                self._children,
                DRIVER_MODULE,
                arguments=driver_arguments(self._paths),
                deadline=self._deadline,
                environment=self._paths.environment(),
            )
        stuck = False
        try:
            return await pool.request(key, message)
        except DriverTimeout:
            stuck = True
            raise
        finally:
            if not stuck:
                self._pools.pop(key, None)
                await pool.close()


def _device_number(node: Path) -> tuple[tuple[str, str], ...]:
    """Return major and minor number of the GPU's node, by which holders are recognised; nothing without a node."""
    try:
        number = node.stat().st_rdev
    except OSError:
        return ()
    return (("device_number", f"{os.major(number)}:{os.minor(number)}"),)


def _order(device: Device) -> tuple[int, ...]:
    return tuple(int(part) for part in device.index.split(":"))
