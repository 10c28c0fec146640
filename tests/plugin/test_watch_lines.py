"""The plugin's log lines about a device whose state changes, or whose service disconnects."""

from __future__ import annotations

import asyncio
import io
import json
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

from plugin.kubelet.devices import AdvertisedDevice, AdvertisedDevices
from plugin.logs import create_logger
from plugin.service_client import ServiceWatch, WatchTimes
from scrubber.api import scrubber_pb2 as pb
from scrubber.domain.errors import Unavailable
from tests.plugin_collaborators import DEADLINE, device, snapshot

TIMES = WatchTimes(grace=0.05, heartbeat=60.0, probe=1.0, retry=0.01)


class Service:
    """A service that sends one snapshot, and disconnects when the test requests it."""

    def __init__(self, shown: pb.Snapshot) -> None:
        self._shown = shown
        self._sent = False
        self.goes = asyncio.Event()

    async def watch_snapshots(self) -> AsyncIterator[pb.Snapshot]:
        if not self._sent:
            self._sent = True
            yield self._shown
            await self.goes.wait()
        raise Unavailable("The scrub service does not answer.")

    async def snapshot(self, timeout: float) -> pb.Snapshot:
        return self._shown

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"unexpected call of {name}")


async def lines(service: Service, until: Callable[[tuple[AdvertisedDevice, ...]], bool]) -> list[dict[str, Any]]:
    """Return the log lines about devices, once ``until`` holds for the devices after the service disconnected."""
    stream, advertised = io.StringIO(), AdvertisedDevices()
    log = create_logger("json", "info", stream)
    watch = ServiceWatch(service, advertised, times=TIMES, log=log, clock=time.monotonic)
    task = asyncio.create_task(watch.run())
    async with asyncio.timeout(DEADLINE):
        await advertised.wait_until(lambda: bool(advertised.devices))
        service.goes.set()
        await advertised.wait_until(lambda: until(advertised.devices))
    task.cancel()
    await asyncio.wait({task})
    logged = [json.loads(line) for line in stream.getvalue().splitlines()]
    return [each for each in logged if each["event"].startswith("device.")]


def none_healthy(offers: tuple[AdvertisedDevice, ...]) -> bool:
    return not any(offer.healthy for offer in offers)


async def test_device_withheld_with_the_service_down_is_logged_with_the_reason() -> None:
    good, bad = await lines(Service(snapshot(device(0))), none_healthy)
    assert (good["event"], good["level"], good["verdict"], good["message"]) == (
        "device.healthy",
        "info",
        "advertised",
        None,
    )
    assert (bad["event"], bad["level"], bad["verdict"]) == ("device.unhealthy", "warning", "withheld")
    assert "No ready scrub service was connected for 0.05 s" in bad["message"]


async def test_device_out_of_service_is_logged_with_the_services_message() -> None:
    (line,) = await lines(Service(snapshot(device(0, advertised=False, refusal="No: XID 95."))), none_healthy)
    assert (line["level"], line["verdict"], line["message"]) == ("warning", "withheld", "No: XID 95.")


async def test_device_without_a_verdict_is_logged_as_neither_offered_nor_withheld() -> None:
    (line,) = await lines(Service(snapshot(device(0), ready=False)), none_healthy)
    assert (line["level"], line["verdict"]) == ("warning", "unknown")
    assert "has reported this device" in line["message"]
