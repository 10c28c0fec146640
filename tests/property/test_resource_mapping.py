"""Announcements that are lost, late or contradictory never cause a start on devices other than the container's."""

from __future__ import annotations

import asyncio
import io
import time
from collections.abc import Mapping, Sequence
from typing import Any, cast

from hypothesis import given, settings
from hypothesis import strategies as st

from plugin.gate import Gate, GateTimes
from plugin.kubelet.devices import AdvertisedDevices
from plugin.logs import create_logger
from plugin.resource_mapping import ResourceMapping
from plugin.service_client import ScrubService
from scrubber.api import scrubber_pb2 as pb
from scrubber.domain.errors import InvalidRequest, ScrubberError, Unavailable
from scrubber.domain.resource_mapping import ResourceMappings
from tests.simulation.spans import RecordedSpan

GPU = "vendor.example/gpu"
DEVICES = ("gpu-0", "gpu-1")
IDS = ("0", "0", "1", "gpu-1", "gpu-1::1")
AT_ONCE = GateTimes(service_away=0.0, retry=0.01)
LOG = create_logger("json", "error", io.StringIO())

meanings = st.fixed_dictionaries({"0": st.sampled_from(DEVICES)}, optional={"1": st.sampled_from(DEVICES)})
act = st.one_of(
    st.tuples(st.just("list"), st.integers(0, 1), meanings, st.booleans()),
    st.tuples(st.just("service restarts"), st.booleans()),
    st.tuples(st.just("plugin restarts"), st.integers(0, 1)),
    st.tuples(
        st.just("start"), st.integers(0, 1), st.sets(st.sampled_from(IDS), min_size=1, max_size=2), st.booleans()
    ),
)


class Service:
    """The id mappings of a service; ``lossy``: every announcement is lost on the way."""

    def __init__(self) -> None:
        self.announced = ResourceMappings()
        self.epoch = 1
        self.lossy = False

    async def announce(self, resource: str, offers: Mapping[str, str], timeout: float) -> None:
        if self.lossy:
            raise Unavailable("lost")
        self.announced = self.announced.with_mapping(resource, offers, DEVICES)

    async def hand_over(self, device_ids: Sequence[str], *, resource: str = "", **_: Any) -> pb.HandOverResponse:
        meant = [self.announced.resolve(resource, id_, DEVICES) for id_ in device_ids]
        if any(each is None for each in meant):
            raise InvalidRequest("This node has no such device.")
        devices = sorted({each.device for each in meant if each is not None})
        return pb.HandOverResponse(devices=[pb.GrantedDevice(id=device, path="fast") for device in devices])


class Plugin:
    """One of two plugins that serve the same resource."""

    def __init__(self, service: Service) -> None:
        self.means: dict[str, str] = {}
        self.advertised = AdvertisedDevices()
        self.announcements = ResourceMapping(cast(ScrubService, service), log=LOG)
        self.gate = Gate(
            cast(ScrubService, service),
            self.advertised,
            self.announcements,
            times=AT_ONCE,
            log=LOG,
            clock=time.monotonic,
        )

    def has(self, id_: str) -> str:
        """Return the device that a container with ``id_`` is given."""
        return self.means.get(id_) or id_.partition("::")[0]


@settings(deadline=None)
@given(st.lists(act, min_size=4, max_size=16))
def test_start_succeeds_only_for_the_devices_of_its_container_whatever_happens_to_announcements(
    acts: list[Any],
) -> None:
    asyncio.run(play(acts))


async def play(acts: list[Any]) -> None:
    service = Service()
    plugins = [Plugin(service), Plugin(service)]
    for what, *how in acts:
        if what == "service restarts":
            service.announced, service.epoch = ResourceMappings(), service.epoch + 1
            for plugin in plugins if how[0] else ():
                await plugin.announcements.publish(GPU, plugin.means, str(service.epoch))
        elif what == "plugin restarts":
            plugins[how[0]] = Plugin(service)
        elif what == "list":
            plugin, service.lossy = plugins[how[0]], how[2]
            plugin.means = how[1]
            await plugin.announcements.publish(GPU, plugin.means, str(service.epoch))
        else:
            plugin, service.lossy = plugins[how[0]], how[2]
            await start(plugin, sorted(how[1]), service)


async def start(plugin: Plugin, ids: list[str], service: Service) -> None:
    try:
        await plugin.gate.hand_over(ids, GPU, 30.0, RecordedSpan("", {}))
    except ScrubberError:
        known = all(id_ in plugin.means or id_.partition("::")[0] in DEVICES for id_ in ids)
        assert service.lossy or not known, f"{ids} are {plugin.means}, and the service could have received the mapping"
        return
    resolved = {each.device for id_ in ids if (each := service.announced.resolve(GPU, id_, DEVICES)) is not None}
    assert resolved == {plugin.has(id_) for id_ in ids}
