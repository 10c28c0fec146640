"""What the driver says, and what it means: codes, snapshots, settings."""

from __future__ import annotations

from dataclasses import replace

import pytest

from scrubber.adapters.nvidia.conditions import NVIDIA_SIGNALS
from scrubber.domain.errors import DeviceFault, Lost, Stuck, Unreadable
from scrubber.domain.evidence import Severity, Step
from scrubber.domain.health import WayBack
from scrubber.domain.signal_table import ErrorClass
from scrubber.domain.signals import (
    fault_finding,
    lifetime_findings,
    settings_off,
    snapshot_findings,
    wanted_settings,
    way_back,
)
from scrubber.domain.telemetry import Snapshot
from tests.world.samples import DEVICE, POLICY

QUIET = Snapshot(DEVICE, settings={"power": "400", "mode": "default"}, defaults={"power": "400", "mode": "default"})


def test_a_snapshot_without_conditions_finds_nothing() -> None:
    assert snapshot_findings(QUIET, POLICY) == ()


@pytest.mark.parametrize(
    ("kind", "severity"),
    [
        (ErrorClass.IGNORE, Severity.NOTE),
        (ErrorClass.APPLICATION, Severity.NOTE),
        (ErrorClass.CONTEXT, Severity.WARNING),
        (ErrorClass.UNKNOWN, Severity.WARNING),
        (ErrorClass.RESET, Severity.FAULT),
        (ErrorClass.REBOOT, Severity.FAULT),
        (ErrorClass.SERVICE, Severity.FAULT),
    ],
)
def test_a_standing_xid_weighs_what_its_class_says(kind: ErrorClass, severity: Severity) -> None:
    (found,) = snapshot_findings(replace(QUIET, errors={7: 2}), replace(POLICY, error_classes={7: kind}))
    assert (found.code, found.severity) == ("xid-7", severity)
    assert found.evidence == {"xid": 7, "class": kind.value, "count": 2, "new": 2}


def test_an_xid_that_nobody_listed_is_never_taken_for_healthy() -> None:
    (found,) = snapshot_findings(replace(QUIET, errors={4242: 1}), POLICY)
    assert found.severity is Severity.WARNING
    assert way_back("xid-4242", POLICY) is WayBack.PERSON


@pytest.mark.parametrize(
    ("change", "code", "severity"),
    [
        ({"ecc_uncorrected": 1}, "ecc-uncorrected", Severity.FAULT),
        ({"recovery": "reset"}, "recovery-reset", Severity.FAULT),
        ({"recovery": "drain-and-reboot"}, "recovery-reboot", Severity.FAULT),
        ({"recovery": "drain-and-reset"}, "recovery-reset", Severity.FAULT),
        ({"recovery": "imex"}, "recovery-service", Severity.FAULT),
        ({"recovery": "drain-p2p"}, "recovery-service", Severity.FAULT),
        ({"temperature_celsius": 96}, "too-hot", Severity.WARNING),
    ],
)
def test_a_condition_is_a_finding(change: dict[str, object], code: str, severity: Severity) -> None:
    (found,) = snapshot_findings(replace(QUIET, **change), POLICY)  # type: ignore[arg-type]
    assert (found.code, found.severity) == (code, severity)


@pytest.mark.parametrize(
    ("code", "severity", "way"),
    [
        ("reset-required", Severity.FAULT, WayBack.RESET),
        ("row-remap-pending", Severity.FAULT, WayBack.RESET),
        ("row-remap-failure", Severity.FAULT, WayBack.PERSON),
        ("page-retirement-pending", Severity.FAULT, WayBack.RESET),
        ("page-retirement-limit", Severity.FAULT, WayBack.PERSON),
        ("fabric-failed", Severity.FAULT, WayBack.RESET),
        ("pcie-width", Severity.WARNING, WayBack.RESET),
        ("nvlink-down", Severity.WARNING, WayBack.RESET),
        ("events-unheard", Severity.WARNING, WayBack.WAIT),
        ("scrub-on-free-disabled", Severity.NOTE, WayBack.PERSON),
        ("heard-of-by-nobody", Severity.WARNING, WayBack.PERSON),
    ],
)
def test_a_condition_of_the_driver_weighs_what_the_table_says(code: str, severity: Severity, way: WayBack) -> None:
    (found,) = snapshot_findings(replace(QUIET, conditions={code: "x8 of x16"}), POLICY)
    assert (found.code, found.severity, found.evidence) == (code, severity, {"read": "x8 of x16"})
    assert "x8 of x16" in found.sentence
    assert way_back(code, POLICY) is way


AGED = replace(QUIET, counters={"ecc_uncorrected_aggregate": 7, "retired_pages": 2, "pcie_replays": 900})


def test_counters_that_nobody_has_recorded_are_noted_and_blame_nobody() -> None:
    found = lifetime_findings(AGED, {})
    assert {(each.evidence["counter"], each.evidence["value"]) for each in found} == {
        ("ecc_uncorrected_aggregate", 7),
        ("retired_pages", 2),
    }
    assert {each.severity for each in found} == {Severity.NOTE}


def test_errors_that_happened_while_nobody_looked_are_found_whatever_was_reloaded_meanwhile() -> None:
    (found,) = lifetime_findings(AGED, {"ecc_uncorrected_aggregate": 5, "retired_pages": 2})
    assert (found.code, found.severity) == ("lifetime-ecc-uncorrected-aggregate", Severity.FAULT)
    assert found.sentence.startswith("2 more uncorrected ECC errors")
    assert way_back(found.code, POLICY) is WayBack.RESET


def test_a_counter_that_went_down_is_noted_anew() -> None:
    (found,) = lifetime_findings(AGED, {"ecc_uncorrected_aggregate": 9, "retired_pages": 2})
    assert (found.severity, found.evidence["value"]) == (Severity.NOTE, 7)


def test_xids_that_were_turned_off_count_for_nothing() -> None:
    (found,) = snapshot_findings(
        replace(QUIET, errors={79: 1}), replace(POLICY, error_classes={}, unlisted_error=ErrorClass.IGNORE)
    )
    assert found.severity is Severity.NOTE


@pytest.mark.parametrize(
    "change", [{"ecc_uncorrected": 0}, {"ecc_uncorrected": None}, {"recovery": "none"}, {"temperature_celsius": 95}]
)
def test_zero_none_and_the_limit_itself_are_no_condition(change: dict[str, object]) -> None:
    assert snapshot_findings(replace(QUIET, **change), POLICY) == ()  # type: ignore[arg-type]


@pytest.mark.parametrize("fault", [Stuck("hung"), Lost("gone"), Unreadable("nonsense"), DeviceFault("odd", code="odd")])
def test_a_fault_of_a_port_is_a_finding_of_the_step_that_met_it(fault: DeviceFault) -> None:
    found = fault_finding(Step.MEMORY, fault)
    assert (found.step, found.code, found.severity, found.sentence) == (
        Step.MEMORY,
        fault.code,
        Severity.FAULT,
        str(fault),
    )


def test_settings_are_wanted_as_the_driver_has_them_by_default_unless_the_policy_wants_more() -> None:
    policy = replace(POLICY, settings={"power": "300", "not-on-this-device": "1"})
    assert wanted_settings(QUIET, policy) == {"power": "300", "mode": "default"}


def test_a_setting_that_a_tenant_changed_is_off() -> None:
    changed = replace(QUIET, settings={"power": "400", "mode": "exclusive"})
    assert settings_off(changed, POLICY) == {"mode": ("exclusive", "default")}
    assert settings_off(QUIET, POLICY) == {}


# -- XIDs are news once ------------------------------------------------------------------------------------------------

CONTEXT = replace(POLICY, error_classes={45: ErrorClass.CONTEXT}, error_notes={45: "channels were torn down"})


@pytest.mark.parametrize(
    ("times", "known", "new"), [(1, None, 1), (3, 1, 2), (3, 3, 0), (2, 5, 2)], ids=["first", "more", "none", "anew"]
)
def test_what_came_since_it_was_last_recorded_is_new_and_a_count_that_went_down_began_anew(
    times: int, known: int | None, new: int
) -> None:
    (seen,) = snapshot_findings(replace(QUIET, errors={45: times}), CONTEXT, {} if known is None else {"xid-45": known})
    assert (seen.evidence["new"], seen.evidence["count"]) == (new, times)
    assert seen.severity is (Severity.WARNING if new else Severity.NOTE)


def test_an_xid_that_asks_for_a_reset_is_a_fault_for_as_long_as_it_stands() -> None:
    (seen,) = snapshot_findings(replace(QUIET, errors={95: 1}), POLICY, {"xid-95": 1})
    assert (seen.severity, seen.evidence["new"]) == (Severity.FAULT, 0)


@pytest.mark.parametrize("kind", ErrorClass)
def test_where_the_driver_asks_for_something_itself_the_xid_is_a_note_beside_it(kind: ErrorClass) -> None:
    policy = replace(POLICY, error_classes={7: kind})
    seen = snapshot_findings(replace(QUIET, errors={7: 1}, recovery="reset"), policy)
    assert [(each.code, each.severity) for each in seen] == [
        ("xid-7", Severity.NOTE),
        ("recovery-reset", Severity.FAULT),
    ]


def test_where_the_driver_asks_for_nothing_only_what_depends_on_its_context_is_settled_by_that() -> None:
    snapshot = replace(QUIET, errors={45: 1, 95: 1}, recovery="none")
    policy = replace(POLICY, error_classes={45: ErrorClass.CONTEXT, 95: ErrorClass.RESET})
    assert [each.severity for each in snapshot_findings(snapshot, policy)] == [Severity.NOTE, Severity.FAULT]


def test_a_sentence_says_what_the_code_means_where_somebody_wrote_it_down() -> None:
    (seen,) = snapshot_findings(replace(QUIET, errors={45: 1}), CONTEXT)
    assert "channels were torn down" in seen.sentence


@pytest.mark.parametrize("code", ["xid-", "xid-x", "too-hot", "xid", ""])
def test_a_code_that_is_no_xid_has_no_number(code: str) -> None:
    assert NVIDIA_SIGNALS.errors.number(code) is None
    assert NVIDIA_SIGNALS.errors.number("xid-95") == 95


def test_soft_is_what_warns_for_as_long_as_it_lasts() -> None:
    assert {NVIDIA_SIGNALS.meanings[code].severity for code in NVIDIA_SIGNALS.soft} == {Severity.WARNING}
    assert {*POLICY.health.sustained} <= NVIDIA_SIGNALS.soft
    assert not [code for code in NVIDIA_SIGNALS.soft if code.startswith("lifetime-")]


def test_every_meaning_has_a_sentence_that_can_be_said_or_is_told_by_who_finds_it() -> None:
    by_a_condition = replace(
        QUIET, conditions={code: "" for code, each in NVIDIA_SIGNALS.meanings.items() if each.sentence}
    )
    for seen in snapshot_findings(by_a_condition, POLICY):
        assert seen.sentence.endswith(".")
        assert len(seen.sentence) > len(seen.code) + 5
