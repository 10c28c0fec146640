"""A policy with an impossible value for a setting is refused with a message before the service starts."""

from __future__ import annotations

import pytest

from scrubber.adapters.nvidia.driver_settings import SETTINGS
from scrubber.adapters.nvidia.setting_values import format_watts, parse_offsets, parse_watts, validation_errors

POSSIBLE = {
    "compute_mode": "exclusive-process",
    "persistence_mode": "enabled",
    "power_limit_watts": "312.5",
    "application_clocks": "3201,1980",
    "clock_offsets": "graphics P0 +100, memory P0 -50, graphics P2 +30",
    "auto_boost": "disabled",
    "accounting_mode": "disabled",
    "api_restriction_application_clocks": "restricted",
    "api_restriction_auto_boosted_clocks": "unrestricted",
    "ecc_mode": "enabled",
}


def test_possible_setting_values_are_accepted() -> None:
    assert validation_errors(POSSIBLE) == ()
    assert validation_errors({}) == ()


def test_exactly_the_restorable_settings_are_accepted() -> None:
    assert {setting.name for setting in SETTINGS} == set(POSSIBLE)
    (message,) = validation_errors({"no_such_setting": "1"})
    assert all(f"{name}" in message for name in ("no_such_setting", *POSSIBLE))


@pytest.mark.parametrize(
    ("name", "value", "advice"),
    [
        ("compute_mode", "fast", "write one of default, prohibited, exclusive-process"),
        ("compute_mode", "exclusive-thread", "write one of default"),
        ("compute_mode", "Default", "write one of default"),
        ("persistence_mode", "on", "write one of disabled, enabled"),
        ("ecc_mode", "1", "write one of disabled, enabled"),
        ("api_restriction_application_clocks", "root", "write one of unrestricted, restricted"),
        ("power_limit_watts", "lots", "write watts, such as 300 or 312.5"),
        ("power_limit_watts", "300 W", "write watts"),
        ("power_limit_watts", "inf", "write watts"),
        ("power_limit_watts", "-300", "write watts"),
        ("power_limit_watts", "", "write watts"),
        ("power_limit_watts", "300.0", "write 300"),
        ("power_limit_watts", "0300", "write 300"),
        ("application_clocks", "1980", "write the clocks of memory and graphics in MHz, such as 3201,1980"),
        ("application_clocks", "3201, 1980", "write the clocks of memory and graphics"),
        ("clock_offsets", "+100", "write none, or offsets in MHz"),
        ("clock_offsets", "graphics P0 +0", "write none, or offsets in MHz"),
        ("clock_offsets", "memory P0 -50, graphics P0 +100", "write graphics P0 +100, memory P0 -50"),
        ("clock_offsets", "graphics P0 +1, graphics P0 +2", "write graphics P0 +2"),
    ],
)
def test_impossible_setting_value_is_refused_with_the_accepted_form(name: str, value: str, advice: str) -> None:
    (message,) = validation_errors({name: value})
    assert f'{name} cannot be "{value}"' in message
    assert advice in message


def test_each_invalid_setting_is_reported() -> None:
    assert len(validation_errors({"compute_mode": "fast", "power_limit_watts": "lots", "ecc_mode": "enabled"})) == 2


@pytest.mark.parametrize("milliwatts", [200_000, 312_500, 700_125, 1_000_000, 1_200_500])
def test_power_limit_of_the_driver_can_be_written_in_watts(milliwatts: int) -> None:
    assert parse_watts(format_watts(milliwatts)) == milliwatts


def test_clock_offsets_are_parsed_and_none_means_no_offsets() -> None:
    assert parse_offsets("none") == {}
    assert parse_offsets("memory P8 -50") == {("memory", 8): -50}
