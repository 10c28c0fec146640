"""The meaning of the kubelet's ids: what is known without a mapping, and what a plugin may and may not announce."""

from __future__ import annotations

import pytest

from scrubber.domain.errors import InvalidRequest
from scrubber.domain.resource_mapping import MAX_MAPPED_IDS, MAX_RESOURCES, MappedDevice, ResourceMappings

OURS = frozenset({"GPU-0", "GPU-1"})
VENDOR = "vendor.dev/gpu"


@pytest.mark.parametrize(
    ("listed", "meaning"),
    [
        ("GPU-0", MappedDevice("GPU-0")),
        ("GPU-0::0", MappedDevice("GPU-0", is_share=True)),
        ("GPU-0::17", MappedDevice("GPU-0", is_share=True)),
        ("GPU-9", None),
        ("GPU-9::0", None),
        ("GPU-0::", None),
        ("GPU-0::x", None),
        ("GPU-0::²", None),
        ("GPU-0::1::2", None),
        ("::0", None),
        ("", None),
    ],
)
def test_device_id_and_share_id_of_a_known_device_resolve_without_an_announcement(
    listed: str, meaning: MappedDevice | None
) -> None:
    assert ResourceMappings().resolve("any.dev/resource", listed, OURS) == meaning
    assert ResourceMappings().resolve("", listed, OURS) == meaning


def test_announced_id_resolves_for_its_own_resource_only() -> None:
    announced = ResourceMappings().with_mapping(VENDOR, {"0": "GPU-0", "1": "GPU-1"}, OURS)
    assert announced.resolve(VENDOR, "1", OURS) == MappedDevice("GPU-1")
    assert announced.resolve("other.dev/gpu", "1", OURS) is None
    assert announced.resolve("", "1", OURS) is None


def test_ids_announced_for_the_same_device_are_shares() -> None:
    announced = ResourceMappings().with_mapping(VENDOR, {"0::0": "GPU-0", "0::1": "GPU-0", "1": "GPU-1"}, OURS)
    assert announced.resolve(VENDOR, "0::1", OURS) == MappedDevice("GPU-0", is_share=True)
    assert announced.resolve(VENDOR, "1", OURS) == MappedDevice("GPU-1")


def test_announcement_replaces_the_previous_mapping_of_its_resource() -> None:
    first = ResourceMappings().with_mapping(VENDOR, {"0": "GPU-0", "1": "GPU-1"}, OURS)
    second = first.with_mapping(VENDOR, {"1": "GPU-0"}, OURS)
    assert second.resolve(VENDOR, "0", OURS) is None
    assert second.resolve(VENDOR, "1", OURS) == MappedDevice("GPU-0")


@pytest.mark.parametrize("listed", ["GPU-0", "GPU-0::3"])
def test_id_of_a_known_device_can_never_be_mapped_to_another_device(listed: str) -> None:
    with pytest.raises(InvalidRequest, match="it is an id of GPU-0"):
        ResourceMappings().with_mapping(VENDOR, {listed: "GPU-1"}, OURS)
    unknown_yet = ResourceMappings().with_mapping(VENDOR, {listed: "GPU-1"}, frozenset())
    meaning = unknown_yet.resolve(VENDOR, listed, OURS)
    assert meaning is not None
    assert meaning.device == "GPU-0"


def test_announced_id_does_not_resolve_while_its_device_is_absent() -> None:
    announced = ResourceMappings().with_mapping(VENDOR, {"7": "GPU-7"}, OURS)
    assert announced.resolve(VENDOR, "7", OURS) is None
    assert announced.resolve(VENDOR, "7", OURS | {"GPU-7"}) == MappedDevice("GPU-7")


@pytest.mark.parametrize(
    ("resource", "offers"),
    [
        ("", {"0": "GPU-0"}),
        (VENDOR, {"": "GPU-0"}),
        (VENDOR, {"0": " "}),
        (VENDOR, {"0\n": "GPU-0"}),
        ("x" * 513, {"0": "GPU-0"}),
    ],
)
def test_invalid_resource_name_or_id_is_refused(resource: str, offers: dict[str, str]) -> None:
    with pytest.raises(InvalidRequest, match="not a valid resource name or device id"):
        ResourceMappings().with_mapping(resource, offers, OURS)


def test_number_of_resources_and_mapped_ids_is_bounded() -> None:
    announced = ResourceMappings()
    for number in range(MAX_RESOURCES):
        announced = announced.with_mapping(f"vendor.dev/{number}", {}, OURS)
    announced.with_mapping("vendor.dev/0", {"0": "GPU-0"}, OURS)
    with pytest.raises(InvalidRequest, match="would exceed the limit of"):
        announced.with_mapping("vendor.dev/more", {}, OURS)
    many = {str(number): "GPU-0" for number in range(MAX_MAPPED_IDS)}
    full = ResourceMappings().with_mapping(VENDOR, many, OURS)
    with pytest.raises(InvalidRequest, match=r"The ids of other\.dev/gpu would exceed the limit"):
        full.with_mapping("other.dev/gpu", {"0": "GPU-1"}, OURS)
