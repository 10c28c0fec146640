"""The Debian package: dpkg installs, upgrades, removes and purges it below a directory of its own.

The environment in it is a stand-in: the lock files and the wheel have tests of their own.
"""

from __future__ import annotations

import os
import re
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from scripts.build_deb import DEBIAN, PREFIX, assemble, update_records
from scrubber.config.policy_file import load_policy
from tests.deployed import DEPLOY, DROP_INS, UNITS, unit

CONFIGURATION = ("plugin.env", "policy.yaml", "service.env")
LEDGER = Path("var/lib/scrubber/ledger.db")


def run(*command: str | Path, **environment: str) -> str:
    done = subprocess.run(
        [*map(str, command)], env=os.environ | environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def build(directory: Path, version: str) -> Path:
    tree = directory / f"tree-{version}"
    program = tree / PREFIX / "bin" / "scrubber"
    program.parent.mkdir(parents=True)
    program.write_text(f"#!/bin/sh\necho {version}\n")
    program.chmod(0o755)
    return assemble(tree, directory, version, "python3.11")


class Root:
    """A root directory with dpkg's database; the maintainer scripts run with ``DPKG_ROOT``."""

    def __init__(self, path: Path) -> None:
        self.path = path
        database = path / "var/lib/dpkg"
        for name in ("info", "updates", "triggers"):
            (database / name).mkdir(parents=True)
        for name in ("status", "available"):
            (database / name).touch()

    def dpkg(self, *words: str | Path, **environment: str) -> str:
        forced = (
            "--force-script-chrootless",
            "--force-depends",
            "--force-not-root",
            "--force-confdef",
            "--force-confold",
        )
        return run("dpkg", f"--root={self.path}", *forced, *words, **environment)


@pytest.fixture
def root(tmp_path: Path) -> Root:
    return Root(tmp_path / "root")


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two versions of the package."""
    directory = tmp_path_factory.mktemp("packages")
    return build(directory, "0.1.0"), build(directory, "0.2.0")


@pytest.fixture
def installed(root: Root, packages: tuple[Path, Path]) -> Root:
    root.dpkg("--install", packages[0])
    return root


def test_package_contains_units_that_start_the_program_in_it(installed: Root) -> None:
    for name, text in UNITS.items():
        assert (installed.path / "usr/lib/systemd/system" / name).read_text() == text
        (start,) = unit(name)["ExecStart"]
        assert Path(start.split()[0]) == Path("/") / PREFIX / "bin" / "scrubber"
    for name, text in DROP_INS.items():
        assert (installed.path / "usr/share/doc/gpu-scrubber/examples" / name).read_text() == text
    for script in (DEPLOY / "slurm").iterdir():
        example = installed.path / "usr/share/doc/gpu-scrubber/examples/slurm" / script.name
        assert example.read_text() == script.read_text()
        assert os.access(example, os.X_OK)
    command = installed.path / "usr/bin/scrubber"
    assert command.readlink() == Path("/") / PREFIX / "bin" / "scrubber"


def test_records_of_installed_files_agree_with_the_scripts(tmp_path: Path) -> None:
    record = tmp_path / "lib/python3.11/site-packages/tool-1.dist-info/RECORD"
    record.parent.mkdir(parents=True)
    record.write_text(
        "../../../bin/kept,sha256=before,9\n../../../bin/removed,sha256=before,9\ntool.py,sha256=unchanged,1\n"
    )
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "kept").write_text("hello")
    update_records(tmp_path)
    # The form of https://packaging.python.org/specifications/recording-installed-packages: URL-safe base64 without padding.
    hello = "LPJNul-wow4m6DsqxbninhsWHlwfp0JecwQzYpOLmCQ"
    assert record.read_text() == f"../../../bin/kept,sha256={hello},5\ntool.py,sha256=unchanged,1\n"


def test_configuration_is_read_by_the_units_and_valid(installed: Root) -> None:
    directory = installed.path / "etc/scrubber"
    assert sorted(each.name for each in directory.iterdir()) == list(CONFIGURATION)
    for name, file in (("scrubber.service", "service.env"), ("scrubber-plugin.service", "plugin.env")):
        assert unit(name)["EnvironmentFile"] == [f"-/etc/scrubber/{file}"]
    assert "\nSCRUBBER_POLICY=/etc/scrubber/policy.yaml\n" in (directory / "service.env").read_text()
    policy, default = load_policy(directory / "policy.yaml"), load_policy("default")
    assert replace(policy, name=default.name) == default


def test_upgrade_keeps_changed_configuration(installed: Root, packages: tuple[Path, Path]) -> None:
    policy = installed.path / "etc/scrubber/policy.yaml"
    policy.write_text("name: mine\n")
    installed.dpkg("--install", packages[1])
    assert policy.read_text() == "name: mine\n"
    assert "0.2.0" in (installed.path / PREFIX / "bin" / "scrubber").read_text()


def with_ledger(root: Root) -> Path:
    ledger = root.path / LEDGER
    ledger.parent.mkdir(parents=True)
    ledger.write_text("quarantines")
    return ledger


def test_removal_keeps_configuration_and_ledger(installed: Root) -> None:
    ledger = with_ledger(installed)
    installed.dpkg("--remove", "gpu-scrubber")
    assert ledger.exists()
    assert (installed.path / "etc/scrubber/policy.yaml").exists()
    assert not (installed.path / PREFIX).exists()


def test_purge_removes_the_configuration_and_keeps_the_ledger(installed: Root) -> None:
    ledger = with_ledger(installed)
    (installed.path / "etc/scrubber/metrics.key").touch()
    output = installed.dpkg("--purge", "gpu-scrubber")
    assert ledger.read_text() == "quarantines"
    assert not (installed.path / "etc/scrubber").exists()
    assert "SCRUBBER_PURGE_LEDGER=yes" in output


def test_purge_removes_the_ledger_if_requested(installed: Root) -> None:
    ledger = with_ledger(installed)
    installed.dpkg("--purge", "gpu-scrubber", SCRUBBER_PURGE_LEDGER="yes")
    assert not ledger.parent.exists()


def test_files_of_the_package_belong_to_root_and_only_root_may_write_them(packages: tuple[Path, Path]) -> None:
    for line in run("dpkg-deb", "--contents", packages[0]).splitlines():
        mode, owner, *_ = line.split()
        assert owner == "root/root", line
        assert mode.startswith("l") or (mode[5], mode[8]) == ("-", "-"), line


def test_same_sources_and_time_give_the_same_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1700000000")
    first, second = (build(tmp_path / name, "0.1.0") for name in ("first", "second"))
    assert first.read_bytes() == second.read_bytes()


@pytest.mark.parametrize("name", ["postinst", "prerm", "postrm"])
def test_maintainer_script_fails_on_errors_and_calls_systemd_only_on_the_running_system(name: str) -> None:
    text = (DEBIAN / name).read_text()
    run("sh", "-n", DEBIAN / name)
    assert text.startswith("#!/bin/sh\nset -e\n")
    guard = re.search(r'\[ -z "\$\{DPKG_ROOT:-\}" \] && \[ -d /run/systemd/system \]', text)
    assert guard
    assert "systemctl" not in text[: guard.start()]
