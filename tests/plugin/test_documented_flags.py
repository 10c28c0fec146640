"""The documentation on replacing NVIDIA's plugin matches the program."""

from __future__ import annotations

import re
from pathlib import Path

import typer

from scrubber.cli.command_tree import app

PAGE = (Path(__file__).parents[2] / "docs" / "replacing-nvidias-plugin.md").read_text()


def options() -> list[typer.core.TyperOption]:
    group = typer.main.get_command(app)
    assert isinstance(group, typer.core.TyperGroup)
    return [
        each
        for each in group.commands["plugin"].params
        if isinstance(each, typer.core.TyperOption) and each.name != "help"
    ]


def rows() -> list[tuple[set[str], set[str], str]]:
    """Return flags, variables and the last cell of each row of the table of flags."""
    table = PAGE.partition("## Flags")[2].partition("\n## ")[0]
    cells = [line.strip("| ").split(" | ") for line in table.splitlines() if line.startswith("| ")]
    return [(_code(row[0]), _code(row[1]), row[2]) for row in cells if row[0] not in ("NVIDIA's flag", "---")]


def _code(cell: str) -> set[str]:
    return set(re.findall(r"`([^`]+)`", cell))


def ours() -> set[str]:
    """Return the flags that, according to the page, NVIDIA's plugin does not have."""
    match = re.search(r"Flags that NVIDIA's plugin does not have:\n\n((?:[-\x20] .*\n)+)", PAGE)
    assert match is not None
    return _code(match[1])


def test_every_flag_is_documented_with_its_variable() -> None:
    accepted = [
        (flags, variables) for flags, variables, what in rows() if not what.startswith("not available") and flags
    ]
    for option in options():
        variables = {option.envvar} if isinstance(option.envvar, str) else set(option.envvar or ())
        if all(each.startswith("SCRUBBER_") for each in variables):
            assert set(option.opts) <= ours()
        else:
            assert (set(option.opts), variables) in accepted


def test_documented_flags_exist() -> None:
    known = {flag for option in options() for flag in option.opts}
    for flags, _, what in rows():
        assert flags.isdisjoint(known) if what.startswith("not available") else flags <= known
    assert ours() <= known


def test_every_flag_of_nvidias_plugin_is_documented() -> None:
    """The flags of version 0.20, by their first names."""
    named = {flag for flags, _, _ in rows() for flag in flags}
    assert named >= {
        *("--mig-strategy", "--fail-on-init-error", "--driver-root", "--dev-root", "--pass-device-specs"),
        *("--device-list-strategy", "--device-id-strategy", "--gdrcopy-enabled", "--gds-enabled", "--mofed-enabled"),
        *("--cdi-annotation-prefix", "--nvidia-cdi-hook-path", "--driver-root-ctr-path", "--mps-root"),
        *("--shared-devices-allocation-policy", "--device-discovery-strategy", "--imex-channel-ids"),
        *("--imex-required", "--kubelet-socket", "--config-file", "--cdi-feature-flags", "--cdi-disable-hooks"),
    }
