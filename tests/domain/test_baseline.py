"""The baseline of a device: its original firmware, and the few lasting conditions that an operator accepted."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scrubber.adapters.nvidia.conditions import NVIDIA_SIGNALS
from scrubber.domain.baseline import Baseline, BaselineDifference, baseline_differences, baseline_facts
from scrubber.domain.device import Device
from scrubber.domain.evidence import Finding, Severity
from scrubber.domain.health.signals import baseline_findings, snapshot_findings
from scrubber.domain.policy import Policy
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
SEEN = Baseline(baseline_facts(GPU), at=900.0)


def described(**traits: str | None) -> Device:
    """Return the device with these traits replaced; None removes one."""
    changed = {**dict(GPU.traits), **traits}
    return replace(GPU, traits=tuple((name, value) for name, value in changed.items() if value is not None))


def of_conditions(conditions: dict[str, str], *normal: tuple[str, str]) -> tuple[Finding, ...]:
    """Return the findings for a device that reads ``conditions``, of which an operator accepted ``normal``."""
    snapshot = Snapshot("GPU-a", conditions=conditions)
    return snapshot_findings(snapshot, Policy(signals=NVIDIA_SIGNALS), None, replace(SEEN, conditions=normal))


# -- facts -------------------------------------------------------------------------------------------------------------


def test_baseline_facts_are_model_and_firmware_in_order_and_nothing_that_a_move_or_restart_changes() -> None:
    assert baseline_facts(GPU) == (
        ("inforom", "G520.1"),
        ("model", "Labelled One"),
        ("serial", "S1"),
        ("vbios", "96.00.89"),
    )


def test_baseline_facts_omit_a_fact_that_the_driver_does_not_report() -> None:
    assert baseline_facts(Device("GPU-b", "1", "Labelled One", 1024)) == (("model", "Labelled One"),)


def test_device_that_matches_its_baseline_has_no_differences() -> None:
    assert baseline_differences(GPU, SEEN) == ()
    assert baseline_findings(GPU, SEEN) == ()


def test_device_without_a_baseline_has_no_differences() -> None:
    assert baseline_differences(GPU, None) == ()
    assert baseline_findings(GPU, None) == ()


@pytest.mark.parametrize(
    ("now", "difference", "message"),
    [
        (
            described(vbios="96.00.90"),
            BaselineDifference("vbios", "96.00.89", "96.00.90"),
            "vbios is 96.00.90, not 96.00.89",
        ),
        (described(serial="S2"), BaselineDifference("serial", "S1", "S2"), "serial is S2, not S1"),
        (
            described(inforom="G520.2"),
            BaselineDifference("inforom", "G520.1", "G520.2"),
            "inforom is G520.2, not G520.1",
        ),
        (
            replace(GPU, model="Two"),
            BaselineDifference("model", "Labelled One", "Two"),
            "model is Two, not Labelled One",
        ),
        (
            described(vbios=None),
            BaselineDifference("vbios", "96.00.89", None),
            "vbios is no longer reported (was 96.00.89)",
        ),
    ],
)
def test_baseline_difference_names_current_and_expected_value(
    now: Device, difference: BaselineDifference, message: str
) -> None:
    assert baseline_differences(now, SEEN) == (difference,)
    assert str(difference) == message


def test_fact_missing_from_the_baseline_is_no_difference_and_is_added() -> None:
    """An older driver may have reported fewer facts. A recorded fact is never replaced automatically."""
    before = Baseline((("model", "Labelled One"), ("serial", "S1")), (("pcie-width", "x8"),), 900.0, "uid:7", "moved")
    now = described(inforom=None, serial="S2")
    assert baseline_differences(now, before) == (BaselineDifference("serial", "S1", "S2"),)
    learnt = before.with_new_facts(now)
    assert learnt == replace(before, facts=(("model", "Labelled One"), ("serial", "S1"), ("vbios", "96.00.89")))
    assert baseline_differences(now, learnt) == (BaselineDifference("serial", "S1", "S2"),)
    assert learnt.with_new_facts(now) is learnt


@pytest.mark.parametrize("trait", ["pci_address", "minor"])
def test_location_and_numbering_of_a_device_are_not_part_of_its_baseline(trait: str) -> None:
    assert baseline_differences(described(**{trait: "7"}), SEEN) == ()


@given(st.dictionaries(st.sampled_from(["serial", "vbios", "inforom"]), st.text(min_size=1, max_size=5)))
def test_baseline_of_the_current_facts_has_no_differences(traits: dict[str, str]) -> None:
    now = replace(GPU, traits=tuple(traits.items()))
    assert baseline_differences(now, Baseline(baseline_facts(now))) == ()
    assert {each.name for each in baseline_differences(now, SEEN)} == {
        name for name in ("serial", "vbios", "inforom") if traits.get(name) != dict(SEEN.facts)[name]
    }
    assert SEEN.with_new_facts(now) is SEEN


# -- findings ----------------------------------------------------------------------------------------------------------


def test_all_baseline_differences_are_one_warning_with_every_name_and_the_remedy() -> None:
    (found,) = baseline_findings(described(vbios="96.00.90", serial="S2"), SEEN)
    assert (found.code, found.severity) == ("baseline-mismatch", Severity.WARNING)
    assert "serial is S2, not S1; vbios is 96.00.90, not 96.00.89" in found.message
    assert "scrubber baseline accept" in found.message
    assert found.evidence["changed"] == "serial vbios"


def test_changed_firmware_needs_an_operator_and_is_a_soft_signal() -> None:
    assert NVIDIA_SIGNALS.classifications["baseline-mismatch"].recovery_method.value == "operator"
    assert "baseline-mismatch" in NVIDIA_SIGNALS.soft


def test_only_warnings_can_be_accepted_into_a_baseline() -> None:
    assert {NVIDIA_SIGNALS.classifications[code].severity for code in NVIDIA_SIGNALS.acceptable} == {Severity.WARNING}


@pytest.mark.parametrize("code", sorted(NVIDIA_SIGNALS.acceptable))
def test_accepted_condition_is_a_note_only_while_the_accepted_value_is_read(code: str) -> None:
    assert [each.severity for each in of_conditions({code: "x8 of x16"})] == [Severity.WARNING]
    (same,) = of_conditions({code: "x8 of x16"}, (code, "x8 of x16"))
    assert (same.severity, same.code) == (Severity.NOTE, code)
    assert "An operator accepted this as normal for the device." in same.message
    for read in ("x4 of x16", "", "x8 of x16 "):
        assert [each.severity for each in of_conditions({code: read}, (code, "x8 of x16"))] == [Severity.WARNING]


@pytest.mark.parametrize("code", sorted(set(NVIDIA_SIGNALS.classifications) - NVIDIA_SIGNALS.acceptable))
def test_condition_that_cannot_be_accepted_stays_a_finding_even_if_recorded_as_accepted(code: str) -> None:
    """A manually written record cannot excuse it either."""
    assert of_conditions({code: "as read"}, (code, "as read")) == of_conditions({code: "as read"})


def test_unknown_condition_is_never_accepted() -> None:
    (found,) = of_conditions({"quite-new": "as read"}, ("quite-new", "as read"))
    assert found.severity is Severity.WARNING


def test_acceptance_of_one_condition_does_not_affect_another_condition() -> None:
    found = of_conditions({"pcie-width": "x8", "nvlink-down": "x8"}, ("pcie-width", "x8"))
    assert {each.code: each.severity for each in found} == {
        "pcie-width": Severity.NOTE,
        "nvlink-down": Severity.WARNING,
    }
