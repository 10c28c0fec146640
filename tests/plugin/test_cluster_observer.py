"""Observers of the service watch receive exactly what the kubelet receives, at the same time."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from plugin.kubelet.devices import AdvertisedDevices
from plugin.logs import create_logger
from plugin.service_client import ServiceWatch, WatchTimes
from scrubber.api import scrubber_pb2 as pb
from scrubber.api.client import PluginClient
from tests.plugin_collaborators import Bell, FakeService, device, snapshot


class Ear:
    """The snapshots received, newest last."""

    def __init__(self) -> None:
        self.bell = Bell()
        self.received: list[pb.Snapshot | None] = []

    def __call__(self, shown: pb.Snapshot | None) -> None:
        self.received.append(shown)
        self.bell.ring()


@pytest.fixture
async def service(short_tmp: Path) -> AsyncIterator[FakeService]:
    async with FakeService(short_tmp, snapshot(device(0))) as running:
        yield running


@contextlib.asynccontextmanager
async def watching(
    short_tmp: Path, ear: Ear | None, times: WatchTimes, clock: Callable[[], float] = time.monotonic
) -> AsyncIterator[AdvertisedDevices]:
    client, advertised = PluginClient(short_tmp), AdvertisedDevices()
    watch = ServiceWatch(
        client, advertised, times=times, log=create_logger(level="error"), clock=clock, on_snapshot=ear
    )
    task = asyncio.create_task(watch.run())
    try:
        yield advertised
    finally:
        task.cancel()
        await asyncio.wait({task})
        await client.close()


async def test_observer_gets_every_snapshot_and_a_disconnect_after_the_grace_period(
    service: FakeService, short_tmp: Path
) -> None:
    ear = Ear()
    async with watching(short_tmp, ear, WatchTimes(grace=0.05, retry=0.01)) as advertised:
        await ear.bell.until(lambda: bool(ear.received))
        service.show(snapshot(device(0), device(1), version=2))
        await ear.bell.until(lambda: len(ear.received) == 2)
        await service.stop()
        await ear.bell.until(lambda: ear.received[-1] is None)
        assert not any(offer.healthy for offer in advertised.devices)
        await service.start(snapshot(device(0), epoch="second"))
        await ear.bell.until(lambda: ear.received[-1] is not None)
    assert [None if each is None else each.version for each in ear.received] == [1, 2, None, 1]


async def test_observer_gets_a_disconnect_although_the_grace_period_ended_before_it_was_checked(
    service: FakeService, short_tmp: Path
) -> None:
    ear, seconds = Ear(), itertools.count()
    async with watching(short_tmp, ear, WatchTimes(grace=0.5, retry=0.01), clock=lambda: float(next(seconds))):
        await ear.bell.until(lambda: bool(ear.received))
        await service.stop()
        await ear.bell.until(lambda: ear.received[-1] is None)


async def test_observer_gets_no_disconnect_if_the_service_returns_within_the_grace_period(
    service: FakeService, short_tmp: Path
) -> None:
    ear = Ear()
    async with watching(short_tmp, ear, WatchTimes(grace=60, retry=0.01)):
        await ear.bell.until(lambda: bool(ear.received))
        await service.stop()
        await service.start(snapshot(device(0), epoch="second"))
        await ear.bell.until(lambda: len(ear.received) == 2)
    assert None not in ear.received


async def test_watch_on_the_service_needs_no_observer(service: FakeService, short_tmp: Path) -> None:
    async with watching(short_tmp, None, WatchTimes()) as advertised:
        async with asyncio.timeout(20):
            await advertised.wait_until(lambda: bool(advertised.devices))
