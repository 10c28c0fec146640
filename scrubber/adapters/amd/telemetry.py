"""The health of AMD GPUs: snapshots from the driver's child, and signals from its counters, which are polled.

The driver sends its events only to processes that open ``/dev/kfd``, and such a process counts as a user of every GPU.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence

from scrubber.adapters.amd import cper
from scrubber.adapters.amd.conditions import ERROR_SIGNAL, MEMORY_BLOCK, block_number
from scrubber.adapters.amd.errors import ErrorCounters
from scrubber.adapters.amd.holders import AmdHolders
from scrubber.adapters.amd.requests import device_request, pci_address
from scrubber.adapters.children.driver_response import counts as count_map
from scrubber.adapters.children.driver_response import malformed, optional_count, optional_number, texts
from scrubber.adapters.children.message import Message
from scrubber.adapters.children.request_pool import RequestPool
from scrubber.adapters.signal_stream import SignalBroadcaster
from scrubber.domain.device import Device
from scrubber.domain.errors import ScrubberError
from scrubber.domain.telemetry import Signal, Snapshot

__all__ = ["AmdTelemetry"]

_UNCORRECTED, _CORRECTED, _DEFERRED = "ue", "ce", "de"
_RETIRED, _PENDING, _FAILED = "R", "P", "F"


class AmdTelemetry:
    """:class:`scrubber.ports.Telemetry` of the driver's files.

    Args:
        devices: returns the devices as last listed.
        fingerprint: returns a text that changes with the inventory.
        poll_interval: seconds between two polls of the counters.
    """

    def __init__(
        self,
        requests: RequestPool,
        holders: AmdHolders,
        errors: ErrorCounters,
        *,
        devices: Callable[[], Sequence[Device]],
        fingerprint: Callable[[], str],
        poll_interval: float,
    ) -> None:
        self._requests = requests
        self._holders = holders
        self._errors = errors
        self._devices = devices
        self._fingerprint = fingerprint
        self._poll_interval = poll_interval
        self._signals = SignalBroadcaster()
        self._seen: dict[str, dict[str, int]] = {}
        self._poller: asyncio.Task[None] | None = None

    async def snapshot(self, device: Device) -> Snapshot:
        answer = await self._requests.request(pci_address(device), device_request(device, "snapshot"))
        counts, records = _counts(answer), _records(answer)
        uncorrected = self._errors.since_reset(pci_address(device), _of_kind(counts, _UNCORRECTED))
        fatal = self._errors.records_since_reset(pci_address(device), _fatal_records(answer))
        self._notice(device, uncorrected)
        errors: dict[int, int] = {}
        for block, count in uncorrected.items():
            if count and block != MEMORY_BLOCK:
                errors[block_number(block)] = errors.get(block_number(block), 0) + count
        pages = None if answer.get("pages") is None else count_map(answer, "pages")
        retired = dict.fromkeys((_RETIRED, _PENDING, _FAILED), 0) | (pages or {})
        counters = {
            "ecc_corrected": sum(_of_kind(counts, _CORRECTED).values()),
            "ecc_deferred": sum(_of_kind(counts, _DEFERRED).values()),
        }
        if pages is not None:
            counters["retired_pages"] = retired[_RETIRED]
        counters |= {f"cper_{kind.replace('-', '_')}": count for kind, count in records.items()}
        conditions = _conditions(answer, retired)
        if fatal:
            conditions["cper-fatal"] = f"{fatal} records"
        if threshold := records.get(cper.BAD_PAGE_THRESHOLD, 0):
            conditions["bad-page-threshold"] = f"{threshold} records"
        return Snapshot(
            device.id,
            errors=errors,
            ecc_uncorrected=uncorrected.get(MEMORY_BLOCK),
            temperature_celsius=optional_number(answer, "temperature"),
            is_held=await self._holders.usage_shows_holder(device, answer),
            settings=texts(answer, "settings"),
            defaults=texts(answer, "defaults"),
            conditions=conditions,
            counters=counters,
        )

    def signals(self) -> AsyncIterator[Signal]:
        if self._poller is None:
            self._poller = asyncio.create_task(self._poll(self._fingerprint()), name="AMD counters")
        return self._signals.subscribe()

    async def record_reset(self, device: Device) -> None:
        """Record that the device was reset: uncorrected errors and fatal records that the driver still reports are cured."""
        answer = await self._requests.request(pci_address(device), device_request(device, "snapshot"))
        uncorrected = _of_kind(_counts(answer), _UNCORRECTED)
        self._errors.record_reset(pci_address(device), uncorrected, _fatal_records(answer))
        self._seen.pop(device.id, None)

    def report_change(self) -> None:
        """Send the signal that the devices of the node are described differently from now on."""
        self._signals.publish([Signal(None, "changed")])

    async def close(self) -> None:
        """Stop polling; every stream ends."""
        if self._poller is not None:
            self._poller.cancel()
            await asyncio.wait({self._poller})
        self._signals.close()

    async def _poll(self, fingerprint: str) -> None:
        while True:
            for device in self._devices():
                try:
                    await self.snapshot(device)
                except ScrubberError:
                    continue  # the health loop reads each device itself, and acts on it
            await asyncio.sleep(self._poll_interval)
            if (now := self._fingerprint()) != fingerprint:
                fingerprint = now
                self.report_change()

    def _notice(self, device: Device, uncorrected: Mapping[str, int]) -> None:
        """Send a signal for each block whose count has grown since it was last read."""
        before, self._seen[device.id] = self._seen.get(device.id, {}), dict(uncorrected)
        self._signals.publish(
            Signal(device.id, "ecc", count)
            if block == MEMORY_BLOCK
            else Signal(device.id, ERROR_SIGNAL, block_number(block))
            for block, count in uncorrected.items()
            if count > before.get(block, 0)
        )


def _conditions(answer: Message, pages: Mapping[str, int]) -> dict[str, str]:
    found = {
        "page-retirement-pending": pages[_PENDING],
        "page-retirement-failure": pages[_FAILED],
    }
    conditions = {code: f"{count} pages" for code, count in found.items() if count}
    width, most = optional_count(answer, "width"), optional_count(answer, "max_width")
    if width is not None and most is not None and 0 < width < most:
        conditions["pcie-width"] = f"x{width} of x{most}"
    return conditions


def _counts(answer: Message) -> dict[str, dict[str, int]]:
    """Return the error counters: block → kind → count.

    Raises:
        Unreadable: the reply has none.
    """
    found = answer.get("errors")
    if not isinstance(found, dict) or not all(isinstance(each, dict) for each in found.values()):
        raise malformed("errors", "is not an object of counters")
    return {block: count_map(found, block) for block in found}


def _records(answer: Message) -> dict[str, int]:
    """Return the numbers of hardware error records by kind; empty where the driver offers none."""
    return {} if answer.get("records") is None else count_map(answer, "records")


def _fatal_records(answer: Message) -> list[str]:
    """Return the identities of the fatal hardware error records."""
    found = answer.get("fatal_records")
    if not isinstance(found, list) or not all(isinstance(record, str) for record in found):
        raise malformed("fatal_records", "is not a list of strings")
    return found


def _of_kind(counts: Mapping[str, Mapping[str, int]], kind: str) -> dict[str, int]:
    return {block: kinds[kind] for block, kinds in counts.items() if kind in kinds}
