"""The board: streams hear of every change that the kubelet can see, and of nothing else."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from plugin.devices import AdvertisedDevice, AdvertisedDevices, ServiceVerdict

OFFER = AdvertisedDevice(id="gpu-0", index="0", verdict=ServiceVerdict.OFFERED, healthy=True)


async def test_the_first_snapshot_makes_the_first_version_even_of_an_empty_node() -> None:
    board = AdvertisedDevices()
    assert board.version == 0
    await board.show((), "one")
    assert board.version == 1


async def test_the_version_grows_only_when_something_that_is_sent_has_changed() -> None:
    board = AdvertisedDevices()
    await board.show((OFFER,), "one")
    await board.show((replace(OFFER, certified=True, scrubbing=True),), "two")
    assert board.version == 1
    assert board.epoch == "two"
    assert board.devices[0].certified
    await board.show((replace(OFFER, healthy=False),), "two")
    assert board.version == 2
    await board.show((replace(OFFER, healthy=False, numa_node=1),), "two")
    assert board.version == 3


async def test_everybody_who_waits_hears_of_a_change() -> None:
    board = AdvertisedDevices()
    waiting = [asyncio.create_task(board.until(lambda: board.version > 0)) for _ in range(3)]
    await board.show((OFFER,), "one")
    async with asyncio.timeout(5):
        await asyncio.gather(*waiting)
    assert board.find("gpu-0") == OFFER
    assert board.find("gpu-1") is None
