"""The meaning of the driver's reports: codes, snapshots, settings."""

from __future__ import annotations

from dataclasses import replace

import pytest

from scrubber.adapters.nvidia.conditions import NVIDIA_SIGNALS
from scrubber.domain.errors import DeviceFault, DeviceLost, DriverTimeout, Unreadable
from scrubber.domain.evidence import Severity, Step
from scrubber.domain.health.signal_table import ErrorClass
from scrubber.domain.health.signals import (
    expected_settings,
    fault_finding,
    lifetime_findings,
    recovery_method,
    settings_differences,
    snapshot_findings,
)
from scrubber.domain.states import RecoveryMethod
from scrubber.domain.telemetry import Snapshot
from tests.simulation.samples import DEVICE, POLICY

QUIET = Snapshot(DEVICE, settings={"power": "400", "mode": "default"}, defaults={"power": "400", "mode": "default"})


def test_snapshot_without_conditions_has_no_findings() -> None:
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
        (ErrorClass.REPAIR, Severity.FAULT),
    ],
)
def test_xid_has_the_severity_of_its_error_class(kind: ErrorClass, severity: Severity) -> None:
    (found,) = snapshot_findings(replace(QUIET, errors={7: 2}), replace(POLICY, error_classes={7: kind}))
    assert (found.code, found.severity) == ("xid-7", severity)
    assert found.evidence == {"xid": 7, "class": kind.value, "count": 2, "new": 2}


def test_unlisted_xid_is_a_warning_for_an_operator() -> None:
    (found,) = snapshot_findings(replace(QUIET, errors={4242: 1}), POLICY)
    assert found.severity is Severity.WARNING
    assert recovery_method("xid-4242", POLICY) is RecoveryMethod.OPERATOR


@pytest.mark.parametrize(
    ("change", "code", "severity"),
    [
        ({"ecc_uncorrected": 1}, "ecc-uncorrected", Severity.FAULT),
        ({"recovery_action": "reset"}, "driver-requests-reset", Severity.FAULT),
        ({"recovery_action": "drain-and-reboot"}, "driver-requests-reboot", Severity.FAULT),
        ({"recovery_action": "drain-and-reset"}, "driver-requests-reset", Severity.FAULT),
        ({"recovery_action": "imex"}, "driver-requests-operator", Severity.FAULT),
        ({"recovery_action": "drain-p2p"}, "driver-requests-operator", Severity.FAULT),
        ({"temperature_celsius": 96}, "too-hot", Severity.WARNING),
    ],
)
def test_abnormal_driver_state_is_a_finding(change: dict[str, object], code: str, severity: Severity) -> None:
    (found,) = snapshot_findings(replace(QUIET, **change), POLICY)  # type: ignore[arg-type]
    assert (found.code, found.severity) == (code, severity)


@pytest.mark.parametrize(
    ("code", "severity", "way"),
    [
        ("reset-required", Severity.FAULT, RecoveryMethod.RESET),
        ("row-remap-pending", Severity.FAULT, RecoveryMethod.RESET),
        ("row-remap-failure", Severity.FAULT, RecoveryMethod.OPERATOR),
        ("page-retirement-pending", Severity.FAULT, RecoveryMethod.RESET),
        ("page-retirement-limit", Severity.FAULT, RecoveryMethod.OPERATOR),
        ("fabric-failed", Severity.FAULT, RecoveryMethod.RESET),
        ("pcie-width", Severity.WARNING, RecoveryMethod.RESET),
        ("nvlink-down", Severity.WARNING, RecoveryMethod.RESET),
        ("event-stream-lost", Severity.WARNING, RecoveryMethod.WAIT),
        ("scrub-on-free-disabled", Severity.NOTE, RecoveryMethod.OPERATOR),
        ("unknown-code", Severity.WARNING, RecoveryMethod.OPERATOR),
    ],
)
def test_driver_condition_has_severity_and_recovery_method_of_the_signal_table(
    code: str, severity: Severity, way: RecoveryMethod
) -> None:
    (found,) = snapshot_findings(replace(QUIET, conditions={code: "x8 of x16"}), POLICY)
    assert (found.code, found.severity, found.evidence) == (code, severity, {"read": "x8 of x16"})
    assert "x8 of x16" in found.message
    assert recovery_method(code, POLICY) is way


AGED = replace(QUIET, counters={"ecc_uncorrected_aggregate": 7, "retired_pages": 2, "pcie_replays": 900})


def test_counters_without_a_recorded_value_are_noted_only() -> None:
    found = lifetime_findings(AGED, {})
    assert {(each.evidence["counter"], each.evidence["value"]) for each in found} == {
        ("ecc_uncorrected_aggregate", 7),
        ("retired_pages", 2),
    }
    assert {each.severity for each in found} == {Severity.NOTE}


def test_increased_lifetime_counter_is_a_fault_whatever_was_reloaded_meanwhile() -> None:
    (found,) = lifetime_findings(AGED, {"ecc_uncorrected_aggregate": 5, "retired_pages": 2})
    assert (found.code, found.severity) == ("lifetime-ecc-uncorrected-aggregate", Severity.FAULT)
    assert found.message.startswith("2 new uncorrected ECC errors")
    assert recovery_method(found.code, POLICY) is RecoveryMethod.RESET


def test_decreased_lifetime_counter_is_noted_again() -> None:
    (found,) = lifetime_findings(AGED, {"ecc_uncorrected_aggregate": 9, "retired_pages": 2})
    assert (found.severity, found.evidence["value"]) == (Severity.NOTE, 7)


def test_ignored_xid_is_a_note_only() -> None:
    (found,) = snapshot_findings(
        replace(QUIET, errors={79: 1}), replace(POLICY, error_classes={}, unlisted_error=ErrorClass.IGNORE)
    )
    assert found.severity is Severity.NOTE


@pytest.mark.parametrize(
    "change",
    [{"ecc_uncorrected": 0}, {"ecc_uncorrected": None}, {"recovery_action": "none"}, {"temperature_celsius": 95}],
)
def test_zero_missing_and_limit_values_are_no_condition(change: dict[str, object]) -> None:
    assert snapshot_findings(replace(QUIET, **change), POLICY) == ()  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "fault", [DriverTimeout("hung"), DeviceLost("gone"), Unreadable("nonsense"), DeviceFault("odd", code="odd")]
)
def test_error_of_a_port_is_a_finding_of_the_step_that_raised_it(fault: DeviceFault) -> None:
    found = fault_finding(Step.MEMORY, fault)
    assert (found.step, found.code, found.severity, found.message) == (
        Step.MEMORY,
        fault.code,
        Severity.FAULT,
        str(fault),
    )


def test_expected_settings_are_the_drivers_defaults_unless_the_policy_sets_others() -> None:
    policy = replace(POLICY, settings={"power": "300", "not-on-this-device": "1"})
    assert expected_settings(QUIET, policy) == {"power": "300", "mode": "default"}


def test_setting_changed_by_a_tenant_is_a_difference() -> None:
    changed = replace(QUIET, settings={"power": "400", "mode": "exclusive"})
    assert settings_differences(changed, POLICY) == {"mode": ("exclusive", "default")}
    assert settings_differences(QUIET, POLICY) == {}


# -- XIDs take effect once ---------------------------------------------------------------------------------------------

CONTEXT = replace(POLICY, error_classes={45: ErrorClass.CONTEXT}, error_notes={45: "channels were torn down"})


@pytest.mark.parametrize(
    ("times", "known", "new"),
    [(1, None, 1), (3, 1, 2), (3, 3, 0), (2, 5, 2)],
    ids=["first", "more", "none", "restarted"],
)
def test_xids_since_the_last_recorded_count_are_new_and_a_lower_count_starts_over(
    times: int, known: int | None, new: int
) -> None:
    (seen,) = snapshot_findings(replace(QUIET, errors={45: times}), CONTEXT, {} if known is None else {"xid-45": known})
    assert (seen.evidence["new"], seen.evidence["count"]) == (new, times)
    assert seen.severity is (Severity.WARNING if new else Severity.NOTE)


def test_xid_that_requires_a_reset_is_a_fault_as_long_as_it_is_listed() -> None:
    (seen,) = snapshot_findings(replace(QUIET, errors={95: 1}), POLICY, {"xid-95": 1})
    assert (seen.severity, seen.evidence["new"]) == (Severity.FAULT, 0)


@pytest.mark.parametrize("kind", ErrorClass)
def test_xid_is_a_note_where_the_driver_requests_a_recovery_action_itself(kind: ErrorClass) -> None:
    policy = replace(POLICY, error_classes={7: kind})
    seen = snapshot_findings(replace(QUIET, errors={7: 1}, recovery_action="reset"), policy)
    assert [(each.code, each.severity) for each in seen] == [
        ("xid-7", Severity.NOTE),
        ("driver-requests-reset", Severity.FAULT),
    ]


def test_context_dependent_xid_is_a_note_where_the_driver_requests_no_recovery_action() -> None:
    snapshot = replace(QUIET, errors={45: 1, 95: 1}, recovery_action="none")
    policy = replace(POLICY, error_classes={45: ErrorClass.CONTEXT, 95: ErrorClass.RESET})
    assert [each.severity for each in snapshot_findings(snapshot, policy)] == [Severity.NOTE, Severity.FAULT]


def test_xid_message_includes_the_documented_meaning() -> None:
    (seen,) = snapshot_findings(replace(QUIET, errors={45: 1}), CONTEXT)
    assert "channels were torn down" in seen.message


@pytest.mark.parametrize("code", ["xid-", "xid-x", "too-hot", "xid", ""])
def test_code_of_another_kind_has_no_xid_number(code: str) -> None:
    assert NVIDIA_SIGNALS.errors.parse(code) is None
    assert NVIDIA_SIGNALS.errors.parse("xid-95") == 95


def test_soft_signals_are_lasting_warnings_only() -> None:
    assert {NVIDIA_SIGNALS.classifications[code].severity for code in NVIDIA_SIGNALS.soft} == {Severity.WARNING}
    assert {*POLICY.health.quarantine_after} <= NVIDIA_SIGNALS.soft
    assert not [code for code in NVIDIA_SIGNALS.soft if code.startswith("lifetime-")]


def test_every_classified_condition_has_a_complete_message() -> None:
    by_a_condition = replace(
        QUIET, conditions={code: "" for code, each in NVIDIA_SIGNALS.classifications.items() if each.message}
    )
    for seen in snapshot_findings(by_a_condition, POLICY):
        assert seen.message.endswith(".")
        assert len(seen.message) > len(seen.code) + 5
