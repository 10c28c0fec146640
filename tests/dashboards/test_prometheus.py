"""The download of the real Prometheus: only the archive's own package is unpacked."""

from __future__ import annotations

import hashlib
import subprocess
from pathlib import Path

import pytest

from tests.dashboards.prometheus import POSSIBLE, PROMETHEUS, Unfetched, alertmanager, binaries, fetch, promtool
from tests.pods import only_with

_PACKAGE = b"the package"


class Archive:
    """Programs that replace apt's, first on the PATH."""

    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._directory = directory
        directory.mkdir()
        monkeypatch.setenv("PATH", f"{directory}:/usr/bin:/bin")
        self.program("apt-get", "printf 'the package' > prometheus_1.deb")
        self.index(_PACKAGE)
        self.program("dpkg-deb", 'mkdir -p "$3/usr/bin"; touch "$3/usr/bin/prometheus" "$3/usr/bin/promtool"')

    def program(self, name: str, script: str) -> None:
        path = self._directory / name
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)

    def index(self, package: bytes) -> None:
        digest = hashlib.sha256(package).hexdigest()
        self.program("apt-cache", f"printf 'Package: prometheus\\nVersion: 1\\nSHA256: {digest}\\n'")


@pytest.fixture
def archive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Archive:
    return Archive(tmp_path / "bin", monkeypatch)


@pytest.fixture
def work(tmp_path: Path) -> Path:
    (tmp_path / "work").mkdir()
    return tmp_path / "work"


def test_prometheus_package_of_the_archive_is_unpacked(archive: Archive, work: Path) -> None:
    fetch(work, PROMETHEUS)
    assert {path.name for path in (work / "unpacked/usr/bin").iterdir()} == {"prometheus", "promtool"}


def test_package_with_another_digest_than_in_the_archive_index_is_not_unpacked(archive: Archive, work: Path) -> None:
    archive.index(b"another")
    with pytest.raises(Unfetched, match=r"prometheus_1\.deb has the SHA-256 \w+, and the archive's index says"):
        fetch(work, PROMETHEUS)
    assert not (work / "unpacked").exists()


def test_a_package_without_the_programs_is_refused(archive: Archive, work: Path) -> None:
    archive.program("dpkg-deb", 'mkdir -p "$3/usr/bin"; touch "$3/usr/bin/prometheus"')
    with pytest.raises(Unfetched, match="holds no prometheus or promtool"):
        fetch(work, PROMETHEUS)


def test_unreachable_archive_is_reported_with_its_error(archive: Archive, work: Path) -> None:
    archive.program("apt-get", "echo 'E: no route to the archive' >&2; exit 100")
    with pytest.raises(Unfetched, match="E: no route to the archive"):
        fetch(work, PROMETHEUS)


def test_package_lists_are_fetched_into_the_work_directory_if_apt_has_none(archive: Archive, work: Path) -> None:
    archive.program("apt-cache", "exit 100")
    archive.program("apt-get", 'echo "$@" >> arguments')
    with pytest.raises(Unfetched, match="knows no package prometheus: put prometheus and promtool on the PATH"):
        fetch(work, PROMETHEUS)
    assert f"Dir::State::lists={work}/lists" in (work / "arguments").read_text()


@only_with(POSSIBLE)
def test_fetched_promtool_runs() -> None:
    assert binaries().prometheus.is_file()
    assert promtool("--version").stdout.startswith("promtool, version")


@only_with(POSSIBLE)
def test_fetched_alertmanager_runs() -> None:
    done = subprocess.run([alertmanager(), "--version"], capture_output=True, text=True, check=True)
    assert "alertmanager, version" in done.stdout + done.stderr
