"""The plugin's log lines about a device whose state changes, or whose service disconnects."""

from __future__ import annotations

import asyncio
import io
import json
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from plugin.device_selection import DeviceSelection
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


async def test_first_ready_snapshot_is_reported_although_it_lists_what_the_last_one_did() -> None:
    class Starting(Service):
        async def watch_snapshots(self) -> AsyncIterator[pb.Snapshot]:
            yield snapshot(ready=False)
            yield snapshot(withheld, version=2, ready=False)
            await self.goes.wait()
            yield snapshot(withheld, version=3)
            await asyncio.Event().wait()

    withheld = device(0, advertised=False, refusal="No: XID 95.")
    service, advertised = Starting(snapshot()), AdvertisedDevices()
    log = create_logger("json", "info", io.StringIO())
    watch = ServiceWatch(service, advertised, times=TIMES, log=log, clock=time.monotonic)
    task = asyncio.create_task(watch.run())
    async with asyncio.timeout(DEADLINE):
        await advertised.wait_until(lambda: advertised.version == 2)
        assert not watch.was_ready
        service.goes.set()
        await advertised.wait_until(lambda: watch.was_ready)
    task.cancel()
    await asyncio.wait({task})


@pytest.mark.parametrize(("text", "selected"), [("1", [device(1).id]), ("GPU-none", [])])
async def test_only_selected_devices_are_followed_and_an_empty_selection_is_logged(
    text: str, selected: list[str]
) -> None:
    stream, advertised = io.StringIO(), AdvertisedDevices()
    watch = ServiceWatch(
        Service(snapshot(device(0), device(1))),
        advertised,
        times=TIMES,
        log=create_logger("json", "info", stream),
        clock=time.monotonic,
        selection=DeviceSelection.parse(text),
    )
    task = asyncio.create_task(watch.run())
    async with asyncio.timeout(DEADLINE):
        await advertised.wait_until(lambda: advertised.version > 0)
    assert [each.id for each in advertised.devices] == selected
    task.cancel()
    await asyncio.wait({task})
    logged = [json.loads(line) for line in stream.getvalue().splitlines()]
    warnings = [each["devices"] for each in logged if each["event"] == "devices.none-selected"]
    assert warnings == ([] if selected else [[f"{each.index}={each.id}" for each in (device(0), device(1))]])
