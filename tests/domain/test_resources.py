"""What an id of the kubelet's means: what needs no saying, what a plugin may say, and what it can never say."""

from __future__ import annotations

import pytest

from scrubber.domain.errors import InvalidRequest
from scrubber.domain.resources import MOST_OFFERS, MOST_RESOURCES, Announced, Meaning

OURS = frozenset({"GPU-0", "GPU-1"})
VENDOR = "vendor.dev/gpu"


@pytest.mark.parametrize(
    ("listed", "meaning"),
    [
        ("GPU-0", Meaning("GPU-0")),
        ("GPU-0::0", Meaning("GPU-0", share=True)),
        ("GPU-0::17", Meaning("GPU-0", share=True)),
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
def test_an_id_of_a_device_and_one_with_a_number_behind_it_speak_for_themselves(
    listed: str, meaning: Meaning | None
) -> None:
    assert Announced().meaning("any.dev/resource", listed, OURS) == meaning
    assert Announced().meaning("", listed, OURS) == meaning


def test_what_a_plugin_announced_holds_for_its_own_resource() -> None:
    announced = Announced().announce(VENDOR, {"0": "GPU-0", "1": "GPU-1"}, OURS)
    assert announced.meaning(VENDOR, "1", OURS) == Meaning("GPU-1")
    assert announced.meaning("other.dev/gpu", "1", OURS) is None
    assert announced.meaning("", "1", OURS) is None


def test_ids_that_mean_one_device_together_are_its_shares() -> None:
    announced = Announced().announce(VENDOR, {"0::0": "GPU-0", "0::1": "GPU-0", "1": "GPU-1"}, OURS)
    assert announced.meaning(VENDOR, "0::1", OURS) == Meaning("GPU-0", share=True)
    assert announced.meaning(VENDOR, "1", OURS) == Meaning("GPU-1")


def test_an_announcement_replaces_the_one_before() -> None:
    first = Announced().announce(VENDOR, {"0": "GPU-0", "1": "GPU-1"}, OURS)
    second = first.announce(VENDOR, {"1": "GPU-0"}, OURS)
    assert second.meaning(VENDOR, "0", OURS) is None
    assert second.meaning(VENDOR, "1", OURS) == Meaning("GPU-0")


@pytest.mark.parametrize("listed", ["GPU-0", "GPU-0::3"])
def test_an_id_of_ours_can_never_be_made_to_mean_another_device(listed: str) -> None:
    with pytest.raises(InvalidRequest, match="which is GPU-0"):
        Announced().announce(VENDOR, {listed: "GPU-1"}, OURS)
    unknown_yet = Announced().announce(VENDOR, {listed: "GPU-1"}, frozenset())
    meaning = unknown_yet.meaning(VENDOR, listed, OURS)
    assert meaning is not None
    assert meaning.device == "GPU-0"


def test_an_id_means_nothing_while_its_device_is_not_there() -> None:
    announced = Announced().announce(VENDOR, {"7": "GPU-7"}, OURS)
    assert announced.meaning(VENDOR, "7", OURS) is None
    assert announced.meaning(VENDOR, "7", OURS | {"GPU-7"}) == Meaning("GPU-7")


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
def test_what_is_no_name_is_refused(resource: str, offers: dict[str, str]) -> None:
    with pytest.raises(InvalidRequest, match="no name"):
        Announced().announce(resource, offers, OURS)


def test_no_more_is_kept_than_a_node_has_use_for() -> None:
    announced = Announced()
    for number in range(MOST_RESOURCES):
        announced = announced.announce(f"vendor.dev/{number}", {}, OURS)
    announced.announce("vendor.dev/0", {"0": "GPU-0"}, OURS)
    with pytest.raises(InvalidRequest, match="one too many"):
        announced.announce("vendor.dev/more", {}, OURS)
    many = {str(number): "GPU-0" for number in range(MOST_OFFERS)}
    full = Announced().announce(VENDOR, many, OURS)
    with pytest.raises(InvalidRequest, match="too many"):
        full.announce("other.dev/gpu", {"0": "GPU-1"}, OURS)
