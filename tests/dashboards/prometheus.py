"""The real Prometheus, promtool and Alertmanager, for tests: installed ones, or Debian's packages, downloaded once.

Nothing is installed and no service is started. A package comes from the archive configured in this machine's apt. Apt
verifies it against the signed index, and its SHA-256 is compared with the index again before it is unpacked. The
unpacked files appear completely or not at all, even with concurrent downloads.

``POSSIBLE`` is False only on a machine that has neither the programs nor apt; that is reported when tests are
collected.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import pwd
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Final, NamedTuple

__all__ = [
    "ALERTMANAGER",
    "POSSIBLE",
    "PROMETHEUS",
    "Binaries",
    "Package",
    "Unfetched",
    "alertmanager",
    "binaries",
    "fetch",
    "promtool",
]

_TOOLS: Final = ("apt-get", "apt-cache", "dpkg-deb")
_DEADLINE: Final = 300.0
"""Seconds for one apt command: 19 MB over a slow line."""


class Package(NamedTuple):
    """A package of the archive, and the paths of its programs."""

    name: str
    programs: tuple[str, ...]


PROMETHEUS: Final = Package("prometheus", ("prometheus", "promtool"))
ALERTMANAGER: Final = Package("prometheus-alertmanager", ("prometheus-alertmanager",))


class Binaries(NamedTuple):
    """The paths of the two programs."""

    prometheus: Path
    promtool: Path


class Unfetched(Exception):
    """The programs are not available; the message states what was tried, and what to do."""


def _installed(package: Package) -> list[Path] | None:
    found = [shutil.which(name) for name in package.programs]
    return [Path(each) for each in found if each] if all(found) else None


def _cache(package: Package) -> Path:
    """Return a directory in the tests' virtual environment; without one, in the user's cache."""
    if sys.prefix != sys.base_prefix:
        return Path(sys.prefix) / package.name
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "gpu-scrubber" / package.name


def _unpacked(cache: Path, package: Package) -> list[Path]:
    return [cache / "usr" / "bin" / name for name in package.programs]


POSSIBLE: Final = all(map(_installed, (PROMETHEUS, ALERTMANAGER))) or all(map(shutil.which, _TOOLS))
if not POSSIBLE:
    print(
        "NOT TESTED HERE: rules, boards and metrics with a real Prometheus and Alertmanager "
        "(put their programs on the PATH; this machine has no apt to fetch them with)",
        file=sys.__stderr__,
    )


@cache
def binaries() -> Binaries:
    """Return Prometheus and promtool. Raises :class:`Unfetched`."""
    return Binaries(*_programs(PROMETHEUS))


@cache
def alertmanager() -> Path:
    """Return Alertmanager. Raises :class:`Unfetched`."""
    (program,) = _programs(ALERTMANAGER)
    return program


def _programs(package: Package) -> list[Path]:
    """Return a package's programs; the first caller downloads them (seconds), all later ones find them."""
    installed = _installed(package)
    if installed is not None:
        return installed
    cache = _cache(package)
    cache.parent.mkdir(parents=True, exist_ok=True)
    with (cache.parent / f".{package.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not all(map(Path.exists, _unpacked(cache, package))):
            with tempfile.TemporaryDirectory(dir=cache.parent, prefix=f".{package.name}-") as work:
                fetch(Path(work), package)
                shutil.rmtree(cache, ignore_errors=True)
                (Path(work) / "unpacked").rename(cache)
    return _unpacked(cache, package)


def promtool(*arguments: str | Path, stdin: str | None = None) -> subprocess.CompletedProcess[str]:
    """Run promtool; the caller checks its exit status. Standard error is merged into ``stdout``, in order."""
    return subprocess.run(
        [binaries().promtool, *arguments],
        env={**os.environ, "GOGC": "800"},  # it keeps little, and would collect garbage all the time
        input=stdin,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=_DEADLINE,
        check=False,
    )


def fetch(work: Path, package: Package) -> None:
    """Unpack the package's files into ``work/unpacked``; raises :class:`Unfetched`."""
    apt = _Apt(work, package.name)
    record = apt.candidate()
    if (
        record is None
    ):  # an image whose package lists were removed: fetch them from the same archive into a private directory
        apt.with_lists_of_its_own()
        record = apt.candidate()
    if record is None:
        programs = " and ".join(package.programs)
        raise Unfetched(f"This machine's apt knows no package {package.name}: put {programs} on the PATH")
    (work / "download").mkdir()
    apt.run("apt-get", "-q", "download", f"{package.name}={record['Version']}", where=work / "download")
    (archive,) = (work / "download").glob("*.deb")
    digest = hashlib.sha256(archive.read_bytes()).hexdigest()
    if digest != record["SHA256"]:
        raise Unfetched(f"{archive.name} has the SHA-256 {digest}, and the archive's index says {record['SHA256']}")
    apt.run("dpkg-deb", "--extract", str(archive), str(work / "unpacked"), where=work)
    if not all(map(Path.exists, _unpacked(work / "unpacked", package))):
        raise Unfetched(f"{archive.name} holds no {' or '.join(package.programs)}")


class _Apt:
    """Apt, used without root and without changing its state."""

    def __init__(self, work: Path, package: str) -> None:
        self._work, self._package = work, package
        self._options: tuple[str, ...] = ("-o", "Debug::NoLocking=1", "-o", "Acquire::Retries=2")

    def with_lists_of_its_own(self) -> None:
        for directory in ("lists/partial", "cache/archives/partial"):
            (self._work / directory).mkdir(parents=True)
        # apt drops privileges to a user that may not write here.
        self._options += ("-o", f"Dir::State::lists={self._work}/lists", "-o", f"Dir::Cache={self._work}/cache")
        self._options += ("-o", f"APT::Sandbox::User={pwd.getpwuid(os.geteuid()).pw_name}")
        self.run("apt-get", "-q", "update", where=self._work)

    def candidate(self) -> dict[str, str] | None:
        """Return the index fields of the candidate version; None where apt has none."""
        shown = self._call("apt-cache", "show", "--no-all-versions", self._package, where=self._work)
        lines = (line.partition(": ") for line in shown.stdout.splitlines() if not line.startswith(" "))
        fields = {name: value for name, _, value in lines}
        return fields if {"Version", "SHA256"} <= fields.keys() else None

    def run(self, program: str, *arguments: str, where: Path) -> None:
        done = self._call(program, *arguments, where=where)
        if done.returncode != 0:
            raise Unfetched(f"{program} {' '.join(arguments)} failed: {done.stderr.strip() or done.stdout.strip()}")

    def _call(self, program: str, *arguments: str, where: Path) -> subprocess.CompletedProcess[str]:
        command: Sequence[str] = (program, *arguments)
        if program.startswith("apt-"):
            command = (program, *self._options, *arguments)
        environment = {**os.environ, "LC_ALL": "C"}
        return subprocess.run(
            command, cwd=where, capture_output=True, text=True, timeout=_DEADLINE, check=False, env=environment
        )
