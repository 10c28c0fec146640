"""The pure rules of standing in front of a vendor's plugin: what is listed, what is asked, what an answer reaches."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plugin.api import deviceplugin_pb2 as api
from plugin.devices import AdvertisedDevice, ServiceVerdict
from plugin.upstream.answers import Reach, named_by_variable
from plugin.upstream.listing import Said, judged
from plugin.upstream.names import Directory, Known, Meaning
from plugin.upstream.renewal import Renewals
from plugin.upstream.server import clean_first, within
from plugin.upstream.standing import Standing


def offer(id_: str, **facts: object) -> AdvertisedDevice:
    return AdvertisedDevice(**{"id": id_, "index": id_, "verdict": ServiceVerdict.OFFERED, "healthy": True, **facts})  # type: ignore[arg-type]


def listed(said: Said, offers: dict[str, AdvertisedDevice]) -> dict[str, tuple[str, str]]:
    meanings = {each.ID: Meaning(each.ID) for each in said.devices}
    return {entry.id: (entry.sent.health, entry.why) for entry in judged(said, meanings, offers)}


# What is listed


@given(
    vendors=st.sampled_from(["Healthy", "Unhealthy", "healthy", "", "Broken"]),
    trouble=st.sampled_from(["", "It is away."]),
    verdict=st.sampled_from(ServiceVerdict),
    healthy=st.booleans(),
    known=st.booleans(),
)
def test_healthy_is_said_only_when_everybody_says_so(
    vendors: str, trouble: str, verdict: ServiceVerdict, healthy: bool, known: bool
) -> None:
    said = Said((api.Device(ID="a", health=vendors),), trouble=trouble)
    meaning = Meaning("a") if known else Meaning(refusal="Who is that?")
    (entry,) = judged(
        said, {"a": meaning}, {"a": offer("a", verdict=verdict, healthy=healthy and verdict is ServiceVerdict.OFFERED)}
    )
    everybody = vendors == "Healthy" and not trouble and verdict is ServiceVerdict.OFFERED and healthy and known
    assert (entry.sent.health == "Healthy") is everybody
    assert bool(entry.why) is not everybody


def test_nothing_of_the_vendors_list_is_changed_but_health() -> None:
    topology = api.TopologyInfo(nodes=[api.NUMANode(ID=0), api.NUMANode(ID=1)])
    newer = b"\xfa\x01\x05later"  # a field that a later protocol may have
    device = api.Device.FromString(api.Device(ID="a", health="Healthy", topology=topology).SerializeToString() + newer)
    (well,) = judged(Said((device,)), {"a": Meaning("a")}, {"a": offer("a")})
    assert well.sent.SerializeToString() == device.SerializeToString()
    (sick,) = judged(Said((device,)), {"a": Meaning("a")}, {"a": offer("a", healthy=False)})
    sick.sent.health = "Healthy"
    assert sick.sent.SerializeToString() == device.SerializeToString()


def test_the_vendors_own_word_for_what_is_not_healthy_stays() -> None:
    said = Said((api.Device(ID="a", health="Overheated"),))
    assert listed(said, {"a": offer("a")})["a"][0] == "Overheated"


def test_what_a_list_leaves_out_stays_unhealthy_until_it_is_back() -> None:
    a, b = api.Device(ID="a", health="Healthy"), api.Device(ID="b", health="Healthy")
    said = Said().after((a, b)).after((b,)).after((b,))
    assert [each.ID for each in said.dropped] == ["a"]
    assert listed(said, {"a": offer("a"), "b": offer("b")})["a"][0] == "Unhealthy"
    assert said.after((a, b)).dropped == ()


# How a plugin stands


def test_a_plugin_that_is_away_keeps_its_health_for_the_grace_and_not_longer() -> None:
    away = Standing(10.0).lost("It went.", 100.0).lost("Still away.", 105.0)
    assert (away.trouble(109.9), away.trouble(110.0)) == ("", "Still away.")
    assert away.changes_in(104.0) == 6.0
    assert away.changes_in(110.0) is None
    assert away.heard().trouble(500.0) == ""


def test_registering_alone_does_not_end_an_absence() -> None:
    assert Standing(10.0).lost("It went.", 100.0).registered().trouble(111.0) == "It went."


def test_a_plugin_at_rest_is_not_used_and_registering_ends_that() -> None:
    resting = Standing(10.0).resting("It hung.", 160.0, told="It is away.")
    assert (resting.fault(159.9), resting.fault(160.0)) == ("It is away.", "")
    assert (resting.trouble(159.9), resting.trouble(160.0)) == ("It hung.", "")
    assert resting.changes_in(100.0) == 60.0
    assert resting.registered().trouble(120.0) == ""


def test_a_list_that_cannot_be_used_is_forgiven_only_when_the_plugin_registers_again() -> None:
    useless = Standing(10.0).useless("It names a device twice.", told="It cannot be used.")
    assert (useless.fault(0.0), useless.registered().fault(0.0)) == ("It cannot be used.", "")
    assert not useless.present
    assert useless.heard().trouble(1e9) == "It names a device twice."
    assert useless.registered().trouble(0.0) == ""


# When the socket is made anew


def test_the_socket_is_made_anew_later_each_time_and_a_handful_of_times() -> None:
    renewals = Renewals(patience=2.0, most=3)
    done = [tenth / 10 for tenth in range(600) if renewals.due({"v/gpu": 0.0}, tenth / 10)]
    assert done == [2.0, 6.0, 14.0]


def test_a_plugin_that_comes_and_goes_is_not_met_with_patience_anew_each_time() -> None:
    renewals = Renewals(patience=2.0, steady=300.0)
    assert renewals.due({"v/gpu": 0.0}, 2.0)
    assert not renewals.due({}, 3.0)
    assert not renewals.due({"v/gpu": 4.0}, 6.5)
    assert renewals.due({"v/gpu": 4.0}, 8.0)
    assert not renewals.due({}, 400.0)
    assert renewals.due({"v/gpu": 401.0}, 403.0)


# What is preferred


def preference(available: str, size: int, must: str = "") -> api.ContainerPreferredAllocationRequest:
    return api.ContainerPreferredAllocationRequest(
        available_deviceIDs=available.split(), must_include_deviceIDs=must.split(), allocation_size=size
    )


@pytest.mark.parametrize(
    ("size", "must", "asked"),
    [
        (1, "", "a c"),
        (2, "", "a c"),
        (3, "", "a b c"),
        (4, "", "a b c d"),
        (2, "d", "a c d"),
        (1, "d", "a c d"),
    ],
)
def test_the_vendor_is_asked_among_the_clean_ones_where_there_are_enough(size: int, must: str, asked: str) -> None:
    offers = {
        "a": offer("a", certified=True),
        "b": offer("b", scrubbing=True),
        "c": offer("c", certified=True),
        "d": offer("d"),
    }
    request = clean_first(preference("a b c d", size, must), offers)
    assert list(request.available_deviceIDs) == asked.split()
    assert (list(request.must_include_deviceIDs), request.allocation_size) == (must.split(), size)


@pytest.mark.parametrize(
    ("answer", "good"),
    [("a b", True), ("b", False), ("a", True), ("", True), ("a a", False), ("a z", False), ("a b c", False)],
)
def test_a_preference_is_of_what_was_asked_or_it_is_none(answer: str, good: bool) -> None:
    asked = api.PreferredAllocationRequest(container_requests=[preference("a b c", 2, "a")])
    answered = api.ContainerPreferredAllocationResponse(deviceIDs=answer.split())
    assert within(asked, api.PreferredAllocationResponse(container_responses=[answered])) is good
    assert not within(asked, api.PreferredAllocationResponse())


# What an answer reaches

CONTROL = "/dev/nvidiactl"
NODE = Directory((Known("GPU-a", "0"), Known("GPU-b", "1")))
REACH = Reach({"GPU-a": frozenset({"/dev/nvidia0", CONTROL}), "GPU-b": frozenset({"/dev/nvidia1", CONTROL})}, NODE)


def spec(path: str) -> api.DeviceSpec:
    return api.DeviceSpec(container_path=path, host_path=f"/run/nvidia/driver{path}", permissions="rw")


@pytest.mark.parametrize(
    ("answer", "strangers"),
    [
        (api.ContainerAllocateResponse(), []),
        (api.ContainerAllocateResponse(envs={"NVIDIA_VISIBLE_DEVICES": "GPU-a"}), []),
        (api.ContainerAllocateResponse(envs={"NVIDIA_VISIBLE_DEVICES": "0"}), []),
        (api.ContainerAllocateResponse(envs={"NVIDIA_VISIBLE_DEVICES": "void"}), []),
        (api.ContainerAllocateResponse(envs={"NVIDIA_VISIBLE_DEVICES": "GPU-a,GPU-b"}), ["GPU-b"]),
        (api.ContainerAllocateResponse(envs={"NVIDIA_VISIBLE_DEVICES": "all"}), ["GPU-b"]),
        (api.ContainerAllocateResponse(devices=[spec("/dev/nvidia0"), spec(CONTROL)]), []),
        (api.ContainerAllocateResponse(devices=[spec("/dev/nvidia1"), spec(CONTROL)]), ["GPU-b"]),
        (api.ContainerAllocateResponse(mounts=[api.Mount(host_path="/dev/nvidia1", container_path="/x")]), ["GPU-b"]),
        (
            api.ContainerAllocateResponse(
                envs={"NVIDIA_VISIBLE_DEVICES": "/var/run/nvidia-container-devices"},
                mounts=[api.Mount(host_path="/dev/null", container_path="/var/run/nvidia-container-devices/GPU-b")],
            ),
            ["GPU-b"],
        ),
        (api.ContainerAllocateResponse(cdi_devices=[api.CDIDevice(name="nvidia.com/gpu=GPU-b")]), ["GPU-b"]),
        (api.ContainerAllocateResponse(cdi_devices=[api.CDIDevice(name="nvidia.com/gpu=all")]), ["GPU-b"]),
        (api.ContainerAllocateResponse(annotations={"cdi.k8s.io/x": "nvidia.com/gpu=0,nvidia.com/gpu=1"}), ["GPU-b"]),
        (api.ContainerAllocateResponse(annotations={"note": "x=1"}), []),
        (api.ContainerAllocateResponse(mounts=[api.Mount(host_path="/opt/vendor", container_path="/opt")]), []),
    ],
)
def test_an_answer_that_reaches_another_device_is_found(
    answer: api.ContainerAllocateResponse, strangers: list[str]
) -> None:
    assert REACH.strangers(answer, ["GPU-a"]) == strangers


@pytest.mark.parametrize(
    ("value", "named"),
    [("GPU-a", True), ("all", True), ("void", False), ("", False), ("/var/run/nvidia-container-devices", False)],
)
def test_whether_the_variable_names_devices(value: str, named: bool) -> None:
    answer = api.ContainerAllocateResponse(envs={"NVIDIA_VISIBLE_DEVICES": value})
    assert named_by_variable(answer) is named
