"""Under which resources plugins advertise devices, and when that ends."""

from __future__ import annotations

from scrubber.engine.resource_ids import ANNOUNCEMENT_SECONDS, Announcer, ResourceIds

GPU = "GPU-0"
RESOURCE = "nvidia.com/gpu"


class Time:
    """A clock that a test moves."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def advertised(ids: ResourceIds) -> frozenset[str]:
    """Return the resources of the device, which is the node's only one."""
    assert ids.advertised == ids.advertised_as(GPU)
    return ids.advertised


def test_announcement_keeps_devices_from_claims_until_a_while_after_its_plugin_has_ended() -> None:
    time, ids = Time(), ResourceIds()
    plugin = Announcer(time)
    with plugin.following():
        ids.announce(RESOURCE, {GPU: GPU}, [GPU], plugin)
        time.now += ANNOUNCEMENT_SECONDS * 10
        assert advertised(ids) == {RESOURCE}
    time.now += ANNOUNCEMENT_SECONDS - 1
    assert advertised(ids) == {RESOURCE}
    with plugin.following():  # its stream broke, and it is back
        time.now += ANNOUNCEMENT_SECONDS * 10
        assert advertised(ids) == {RESOURCE}
    time.now += ANNOUNCEMENT_SECONDS
    assert advertised(ids) == frozenset()


def test_meaning_of_ids_and_the_resources_that_are_ours_outlive_the_plugin() -> None:
    time, ids = Time(), ResourceIds()
    ids.announce(RESOURCE, {"nvidia0": GPU}, [GPU], Announcer(time))
    time.now += ANNOUNCEMENT_SECONDS
    assert advertised(ids) == frozenset()
    assert ids.own_resources(()) == {RESOURCE}
    assert ids.plugin_resources(GPU) == {RESOURCE}
    meaning = ids.resolve_one(RESOURCE, "nvidia0", [GPU])
    assert meaning is not None
    assert meaning.device == GPU


def test_announcement_lasts_as_long_as_one_of_several_instances_follows_the_service() -> None:
    time, ids = Time(), ResourceIds()
    old, new = Announcer(time), Announcer(time)
    with new.following():
        with old.following():
            ids.announce(RESOURCE, {GPU: GPU}, [GPU], new)
            ids.announce(RESOURCE, {GPU: GPU}, [GPU], old)
        time.now += ANNOUNCEMENT_SECONDS
        assert advertised(ids) == {RESOURCE}
    time.now += ANNOUNCEMENT_SECONDS
    assert advertised(ids) == frozenset()


def test_announcement_of_a_plugin_whose_end_cannot_be_noticed_does_not_end() -> None:
    time, ids = Time(), ResourceIds()
    ids.announce(RESOURCE, {GPU: GPU}, [GPU], Announcer(time))
    ids.announce(RESOURCE, {GPU: GPU}, [GPU])
    time.now += ANNOUNCEMENT_SECONDS
    assert advertised(ids) == {RESOURCE}
