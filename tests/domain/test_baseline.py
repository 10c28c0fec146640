"""What a device should be: its firmware as it was, and the few lasting conditions that a person called normal for it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scrubber.adapters.nvidia.conditions import NVIDIA_SIGNALS
from scrubber.domain.baseline import Baseline, Difference, differences, facts_of
from scrubber.domain.device import Device
from scrubber.domain.evidence import Finding, Severity
from scrubber.domain.policy import Policy
from scrubber.domain.signals import baseline_findings, snapshot_findings
from scrubber.domain.telemetry import Snapshot

GPU = Device(
    "GPU-a",
    "0",
    "Labelled One",
    1024,
    traits=(
        ("pci_address", "0000:0a:00.0"),
        ("vbios", "96.00.89"),
        ("serial", "S1"),
        ("inforom", "G520.1"),
        ("minor", "0"),
    ),
)
SEEN = Baseline(facts_of(GPU), at=900.0)


def described(**traits: str | None) -> Device:
    """The device, where these traits say something else; None takes one away."""
    changed = {**dict(GPU.traits), **traits}
    return replace(GPU, traits=tuple((name, value) for name, value in changed.items() if value is not None))


def of_conditions(conditions: dict[str, str], *normal: tuple[str, str]) -> tuple[Finding, ...]:
    """What is found of a device that reads ``conditions``, and of which a person called ``normal`` what they say."""
    snapshot = Snapshot("GPU-a", conditions=conditions)
    return snapshot_findings(snapshot, Policy(signals=NVIDIA_SIGNALS), None, replace(SEEN, conditions=normal))


# -- facts -------------------------------------------------------------------------------------------------------------


def test_the_facts_are_the_model_and_the_firmware_in_order_and_nothing_that_a_move_or_a_restart_changes() -> None:
    assert facts_of(GPU) == (("inforom", "G520.1"), ("model", "Labelled One"), ("serial", "S1"), ("vbios", "96.00.89"))


def test_a_fact_that_the_driver_does_not_tell_is_none() -> None:
    assert facts_of(Device("GPU-b", "1", "Labelled One", 1024)) == (("model", "Labelled One"),)


def test_a_device_that_is_as_it_was_differs_in_nothing() -> None:
    assert differences(GPU, SEEN) == ()
    assert baseline_findings(GPU, SEEN) == ()


def test_a_device_of_which_nobody_knows_what_it_should_be_differs_in_nothing() -> None:
    assert differences(GPU, None) == ()
    assert baseline_findings(GPU, None) == ()


@pytest.mark.parametrize(
    ("now", "difference", "sentence"),
    [
        (described(vbios="96.00.90"), Difference("vbios", "96.00.89", "96.00.90"), "vbios is 96.00.90, not 96.00.89"),
        (described(serial="S2"), Difference("serial", "S1", "S2"), "serial is S2, not S1"),
        (described(inforom="G520.2"), Difference("inforom", "G520.1", "G520.2"), "inforom is G520.2, not G520.1"),
        (replace(GPU, model="Two"), Difference("model", "Labelled One", "Two"), "model is Two, not Labelled One"),
        (described(vbios=None), Difference("vbios", "96.00.89", None), "vbios is not told any more, not 96.00.89"),
    ],
)
def test_what_is_another_one_is_named_with_both(now: Device, difference: Difference, sentence: str) -> None:
    assert differences(now, SEEN) == (difference,)
    assert str(difference) == sentence


def test_a_fact_that_nobody_told_before_is_no_difference_and_is_learnt() -> None:
    """Of an older driver say; what was told before is never learnt anew."""
    before = Baseline((("model", "Labelled One"), ("serial", "S1")), (("pcie-width", "x8"),), 900.0, "uid:7", "moved")
    now = described(inforom=None, serial="S2")
    assert differences(now, before) == (Difference("serial", "S1", "S2"),)
    learnt = before.learning(now)
    assert learnt == replace(before, facts=(("model", "Labelled One"), ("serial", "S1"), ("vbios", "96.00.89")))
    assert differences(now, learnt) == (Difference("serial", "S1", "S2"),)
    assert learnt.learning(now) is learnt


@pytest.mark.parametrize("trait", ["pci_address", "minor"])
def test_where_a_device_is_and_how_it_is_numbered_is_no_part_of_what_it_should_be(trait: str) -> None:
    assert differences(described(**{trait: "7"}), SEEN) == ()


@given(st.dictionaries(st.sampled_from(["serial", "vbios", "inforom"]), st.text(min_size=1, max_size=5)))
def test_accepting_what_a_device_is_leaves_no_difference_whatever_it_is(traits: dict[str, str]) -> None:
    now = replace(GPU, traits=tuple(traits.items()))
    assert differences(now, Baseline(facts_of(now))) == ()
    assert {each.name for each in differences(now, SEEN)} == {
        name for name in ("serial", "vbios", "inforom") if traits.get(name) != dict(SEEN.facts)[name]
    }
    assert SEEN.learning(now) is SEEN


# -- findings ----------------------------------------------------------------------------------------------------------


def test_all_that_changed_is_one_warning_with_every_name_and_what_to_do() -> None:
    (found,) = baseline_findings(described(vbios="96.00.90", serial="S2"), SEEN)
    assert (found.code, found.severity) == ("baseline-changed", Severity.WARNING)
    assert "serial is S2, not S1; vbios is 96.00.90, not 96.00.89" in found.sentence
    assert "scrubber baseline accept" in found.sentence
    assert found.evidence["changed"] == "serial vbios"


def test_firmware_that_changed_is_a_persons_to_judge_and_no_policy_waits_for_it_to_pass() -> None:
    assert NVIDIA_SIGNALS.meanings["baseline-changed"].way_back.value == "person"
    assert "baseline-changed" in NVIDIA_SIGNALS.soft


def test_only_what_warns_and_lies_in_the_slot_or_the_nature_of_a_device_can_be_called_normal() -> None:
    assert {NVIDIA_SIGNALS.meanings[code].severity for code in NVIDIA_SIGNALS.acceptable} == {Severity.WARNING}


@pytest.mark.parametrize("code", sorted(NVIDIA_SIGNALS.acceptable))
def test_a_condition_that_a_person_called_normal_is_a_note_for_as_long_as_the_very_same_is_read(code: str) -> None:
    assert [each.severity for each in of_conditions({code: "x8 of x16"})] == [Severity.WARNING]
    (same,) = of_conditions({code: "x8 of x16"}, (code, "x8 of x16"))
    assert (same.severity, same.code) == (Severity.NOTE, code)
    assert "A person called that normal here." in same.sentence
    for read in ("x4 of x16", "", "x8 of x16 "):
        assert [each.severity for each in of_conditions({code: read}, (code, "x8 of x16"))] == [Severity.WARNING]


@pytest.mark.parametrize("code", sorted(set(NVIDIA_SIGNALS.meanings) - NVIDIA_SIGNALS.acceptable))
def test_nobody_calls_anything_else_normal_and_a_fault_never(code: str) -> None:
    """Also a record that was written by hand excuses nothing."""
    assert of_conditions({code: "as read"}, (code, "as read")) == of_conditions({code: "as read"})


def test_what_nobody_has_heard_of_is_never_normal() -> None:
    (found,) = of_conditions({"quite-new": "as read"}, ("quite-new", "as read"))
    assert found.severity is Severity.WARNING


def test_what_was_called_normal_of_one_condition_says_nothing_of_another() -> None:
    found = of_conditions({"pcie-width": "x8", "nvlink-down": "x8"}, ("pcie-width", "x8"))
    assert {each.code: each.severity for each in found} == {
        "pcie-width": Severity.NOTE,
        "nvlink-down": Severity.WARNING,
    }
