"""The pure rules of proxying a vendor's plugin: what is listed, what is requested, which paths a response exposes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plugin.api import deviceplugin_pb2 as api
from plugin.kubelet.devices import AdvertisedDevice, ServiceVerdict
from plugin.upstream.allocate_response import DevicePaths, uses_envvar
from plugin.upstream.device_ids import DeviceIds, DeviceNames, ResolvedId
from plugin.upstream.device_list import VendorReport, build_entries
from plugin.upstream.server import is_valid_preference, narrow_to_clean
from plugin.upstream.socket_rotation import SocketRotation
from plugin.upstream.vendor_state import VendorState


def offer(id_: str, **facts: object) -> AdvertisedDevice:
    return AdvertisedDevice(**{"id": id_, "index": id_, "verdict": ServiceVerdict.ADVERTISED, "healthy": True, **facts})  # type: ignore[arg-type]


def listed(report: VendorReport, offers: dict[str, AdvertisedDevice]) -> dict[str, tuple[str, str]]:
    meanings = {each.ID: ResolvedId(each.ID) for each in report.devices}
    return {
        entry.id: (entry.message.health, entry.unhealthy_reason) for entry in build_entries(report, meanings, offers)
    }


# What is listed


@given(
    vendors=st.sampled_from(["Healthy", "Unhealthy", "healthy", "", "Broken"]),
    trouble=st.sampled_from(["", "It is away."]),
    verdict=st.sampled_from(ServiceVerdict),
    healthy=st.booleans(),
    known=st.booleans(),
)
def test_device_is_healthy_only_if_vendor_and_service_agree(
    vendors: str, trouble: str, verdict: ServiceVerdict, healthy: bool, known: bool
) -> None:
    report = VendorReport((api.Device(ID="a", health=vendors),), unusable_reason=trouble)
    meaning = ResolvedId("a") if known else ResolvedId(refusal="Who is that?")
    (entry,) = build_entries(
        report,
        {"a": meaning},
        {"a": offer("a", verdict=verdict, healthy=healthy and verdict is ServiceVerdict.ADVERTISED)},
    )
    everyone_agrees = (
        vendors == "Healthy" and not trouble and verdict is ServiceVerdict.ADVERTISED and healthy and known
    )
    assert (entry.message.health == "Healthy") is everyone_agrees
    assert bool(entry.unhealthy_reason) is not everyone_agrees


def test_vendors_list_entry_is_unchanged_except_for_health() -> None:
    topology = api.TopologyInfo(nodes=[api.NUMANode(ID=0), api.NUMANode(ID=1)])
    newer = b"\xfa\x01\x05later"  # a field that a later protocol may have
    device = api.Device.FromString(api.Device(ID="a", health="Healthy", topology=topology).SerializeToString() + newer)
    (well,) = build_entries(VendorReport((device,)), {"a": ResolvedId("a")}, {"a": offer("a")})
    assert well.message.SerializeToString() == device.SerializeToString()
    (sick,) = build_entries(VendorReport((device,)), {"a": ResolvedId("a")}, {"a": offer("a", healthy=False)})
    sick.message.health = "Healthy"
    assert sick.message.SerializeToString() == device.SerializeToString()


def test_vendors_own_name_for_an_unhealthy_state_is_kept() -> None:
    report = VendorReport((api.Device(ID="a", health="Overheated"),))
    assert listed(report, {"a": offer("a")})["a"][0] == "Overheated"


def test_device_dropped_from_the_vendors_list_stays_unhealthy_until_it_returns() -> None:
    a, b = api.Device(ID="a", health="Healthy"), api.Device(ID="b", health="Healthy")
    report = VendorReport().with_list((a, b)).with_list((b,)).with_list((b,))
    assert [each.ID for each in report.dropped] == ["a"]
    assert listed(report, {"a": offer("a"), "b": offer("b")})["a"][0] == "Unhealthy"
    assert report.with_list((a, b)).dropped == ()


# State of a vendor's plugin


def test_disconnected_vendor_keeps_its_health_for_the_grace_period_only() -> None:
    away = VendorState(10.0).on_disconnect("It went.", 100.0).on_disconnect("Still away.", 105.0)
    assert (away.unusable_reason(109.9), away.unusable_reason(110.0)) == ("", "Still away.")
    assert away.seconds_until_change(104.0) == 6.0
    assert away.seconds_until_change(110.0) is None
    assert away.on_list().unusable_reason(500.0) == ""


def test_registration_alone_does_not_end_a_vendors_absence() -> None:
    assert VendorState(10.0).on_disconnect("It went.", 100.0).on_registration().unusable_reason(111.0) == "It went."


def test_vendor_is_not_used_after_a_timeout_until_it_registers_again_or_the_pause_ends() -> None:
    resting = VendorState(10.0).on_timeout("It hung.", 160.0, public_reason="It is away.")
    assert (resting.public_fault(159.9), resting.public_fault(160.0)) == ("It is away.", "")
    assert (resting.unusable_reason(159.9), resting.unusable_reason(160.0)) == ("It hung.", "")
    assert resting.seconds_until_change(100.0) == 60.0
    assert resting.on_registration().unusable_reason(120.0) == ""


def test_invalid_list_is_forgiven_only_when_the_vendor_registers_again() -> None:
    useless = VendorState(10.0).on_invalid("It names a device twice.", public_reason="It cannot be used.")
    assert (useless.public_fault(0.0), useless.on_registration().public_fault(0.0)) == ("It cannot be used.", "")
    assert not useless.is_present
    assert useless.on_list().unusable_reason(1e9) == "It names a device twice."
    assert useless.on_registration().unusable_reason(0.0) == ""


# When the socket is rotated


def test_upstream_socket_is_rotated_with_growing_delays_and_a_limited_number_of_times() -> None:
    renewals = SocketRotation(initial_delay=2.0, max_rotations=3)
    done = [tenth / 10 for tenth in range(600) if renewals.check_due({"v/gpu": 0.0}, tenth / 10)]
    assert done == [2.0, 6.0, 14.0]


def test_rotation_delay_is_reset_only_after_a_long_presence_of_the_vendor() -> None:
    renewals = SocketRotation(initial_delay=2.0, reset_after=300.0)
    assert renewals.check_due({"v/gpu": 0.0}, 2.0)
    assert not renewals.check_due({}, 3.0)
    assert not renewals.check_due({"v/gpu": 4.0}, 6.5)
    assert renewals.check_due({"v/gpu": 4.0}, 8.0)
    assert not renewals.check_due({}, 400.0)
    assert renewals.check_due({"v/gpu": 401.0}, 403.0)


# What is preferred


def preference(available: str, size: int, must: str = "") -> api.ContainerPreferredAllocationRequest:
    return api.ContainerPreferredAllocationRequest(
        available_deviceIDs=available.split(), must_include_deviceIDs=must.split(), allocation_size=size
    )


@pytest.mark.parametrize(
    ("size", "must", "requested"),
    [
        (1, "", "a c"),
        (2, "", "a c"),
        (3, "", "a b c"),
        (4, "", "a b c d"),
        (2, "d", "a c d"),
        (1, "d", "a c d"),
    ],
)
def test_vendor_chooses_among_clean_devices_where_enough_are_available(size: int, must: str, requested: str) -> None:
    offers = {
        "a": offer("a", certified=True),
        "b": offer("b", scrubbing=True),
        "c": offer("c", certified=True),
        "d": offer("d"),
    }
    request = narrow_to_clean(preference("a b c d", size, must), offers)
    assert list(request.available_deviceIDs) == requested.split()
    assert (list(request.must_include_deviceIDs), request.allocation_size) == (must.split(), size)


@pytest.mark.parametrize(
    ("answer", "good"),
    [("a b", True), ("b", False), ("a", True), ("", True), ("a a", False), ("a z", False), ("a b c", False)],
)
def test_vendors_preference_is_valid_only_for_the_requested_devices(answer: str, good: bool) -> None:
    requested = api.PreferredAllocationRequest(container_requests=[preference("a b c", 2, "a")])
    expected = api.ContainerPreferredAllocationResponse(deviceIDs=answer.split())
    assert is_valid_preference(requested, api.PreferredAllocationResponse(container_responses=[expected])) is good
    assert not is_valid_preference(requested, api.PreferredAllocationResponse())


# What a response exposes

CONTROL = "/dev/nvidiactl"
NODE = DeviceIds((DeviceNames("GPU-a", "0"), DeviceNames("GPU-b", "1")))
REACH = DevicePaths(
    {"GPU-a": frozenset({"/dev/nvidia0", CONTROL}), "GPU-b": frozenset({"/dev/nvidia1", CONTROL})}, NODE
)


def spec(path: str) -> api.DeviceSpec:
    return api.DeviceSpec(container_path=path, host_path=f"/run/nvidia/driver{path}", permissions="rw")


@pytest.mark.parametrize(
    ("answer", "unexpected"),
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
                devices=[api.DeviceSpec(host_path="/dev/nvidia1", container_path="/dev/nvidia0")]
            ),
            ["GPU-b"],
        ),
        (
            api.ContainerAllocateResponse(
                devices=[api.DeviceSpec(host_path="/run/nvidia/driver/dev/nvidia1", container_path="/dev/nvidia0")]
            ),
            ["GPU-b"],
        ),
        (api.ContainerAllocateResponse(devices=[spec("/dev//nvidia1")]), ["GPU-b"]),
        (api.ContainerAllocateResponse(devices=[spec("/dev/dri/../nvidia1")]), ["GPU-b"]),
        (
            api.ContainerAllocateResponse(mounts=[api.Mount(host_path="/dev/./nvidia1/", container_path="/x")]),
            ["GPU-b"],
        ),
        (
            api.ContainerAllocateResponse(
                devices=[api.DeviceSpec(host_path="/dev/nvidia0", container_path="/dev/nvidia1")]
            ),
            [],
        ),
        (
            api.ContainerAllocateResponse(
                envs={"NVIDIA_VISIBLE_DEVICES": "/var/run/nvidia-container-devices"},
                mounts=[api.Mount(host_path="/dev/null", container_path="/var/run/nvidia-container-devices/GPU-b")],
            ),
            ["GPU-b"],
        ),
        (
            api.ContainerAllocateResponse(
                mounts=[api.Mount(host_path="/dev/null", container_path="/var/run//nvidia-container-devices/./GPU-b")]
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
def test_vendors_answer_that_reaches_an_unallocated_device_is_detected(
    answer: api.ContainerAllocateResponse, unexpected: list[str]
) -> None:
    assert REACH.unallocated_devices(answer, ["GPU-a"]) == unexpected


@pytest.mark.parametrize(
    ("value", "named"),
    [("GPU-a", True), ("all", True), ("void", False), ("", False), ("/var/run/nvidia-container-devices", False)],
)
def test_uses_envvar_detects_whether_the_variable_names_devices(value: str, named: bool) -> None:
    answer = api.ContainerAllocateResponse(envs={"NVIDIA_VISIBLE_DEVICES": value})
    assert uses_envvar(answer) is named
