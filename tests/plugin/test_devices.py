"""The advertised devices: streams receive every change that the kubelet can see, and nothing else."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from plugin.kubelet.devices import AdvertisedDevice, AdvertisedDevices, ServiceVerdict

DEVICE = AdvertisedDevice(id="gpu-0", index="0", verdict=ServiceVerdict.ADVERTISED, healthy=True)


async def test_the_first_snapshot_makes_the_first_version_even_of_an_empty_node() -> None:
    advertised = AdvertisedDevices()
    assert advertised.version == 0
    await advertised.update((), "one")
    assert advertised.version == 1


async def test_version_of_the_list_grows_only_when_an_advertised_field_changes() -> None:
    advertised = AdvertisedDevices()
    await advertised.update((DEVICE,), "one")
    await advertised.update((replace(DEVICE, certified=True, scrubbing=True),), "two")
    assert advertised.version == 1
    assert advertised.epoch == "two"
    assert advertised.devices[0].certified
    await advertised.update((replace(DEVICE, healthy=False),), "two")
    assert advertised.version == 2
    await advertised.update((replace(DEVICE, healthy=False, numa_node=1),), "two")
    assert advertised.version == 3


async def test_all_waiting_readers_are_notified_of_a_change() -> None:
    advertised = AdvertisedDevices()
    waiting = [asyncio.create_task(advertised.wait_until(lambda: advertised.version > 0)) for _ in range(3)]
    await advertised.update((DEVICE,), "one")
    async with asyncio.timeout(5):
        await asyncio.gather(*waiting)
    assert advertised.find("gpu-0") == DEVICE
    assert advertised.find("gpu-1") is None
