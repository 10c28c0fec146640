"""The real Prometheus and its promtool, for tests: the machine's own, or Debian's package, fetched once and unpacked.

Nothing is installed and no service is started. The package comes from the archive that this machine's own apt is set up
with, apt holds it against the signed index, and it is held against the index's SHA-256 once more before it is unpacked.
What was unpacked appears whole or not at all, whoever else fetches it at the same time.

``POSSIBLE`` is False only on a machine that has neither the programs nor apt; that is said aloud when tests are collected.
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

__all__ = ["POSSIBLE", "Binaries", "Unfetched", "binaries", "fetch", "promtool"]

_PACKAGE: Final = "prometheus"
_TOOLS: Final = ("apt-get", "apt-cache", "dpkg-deb")
_PATIENCE: Final = 300.0
"""Seconds for one command of apt's: 19 MB over a slow line."""


class Binaries(NamedTuple):
    """Where the two programs are."""

    prometheus: Path
    promtool: Path


class Unfetched(Exception):
    """The programs could not be had; the message says what was tried, and what to do."""


def _installed() -> Binaries | None:
    found = [shutil.which(name) for name in Binaries._fields]
    return Binaries(*map(Path, filter(None, found))) if all(found) else None


def _cache() -> Path:
    """Beside the tests' own environment; where the tests have none, in the user's cache."""
    if sys.prefix != sys.base_prefix:
        return Path(sys.prefix) / _PACKAGE
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "gpu-scrubber" / _PACKAGE


def _unpacked(cache: Path) -> Binaries:
    return Binaries(*(cache / "usr" / "bin" / name for name in Binaries._fields))


POSSIBLE: Final = _installed() is not None or all(map(shutil.which, _TOOLS))
if not POSSIBLE:
    print(
        "NOT TESTED HERE: rules, boards and metrics with a real Prometheus "
        "(put prometheus and promtool on the PATH; this machine has no apt to fetch them with)",
        file=sys.__stderr__,
    )


@cache
def binaries() -> Binaries:
    """Both programs; fetched by the first caller of all (one second and 19 MB), found by all later ones.

    Raises:
        Unfetched: the archive does not answer, or does not have them.
    """
    installed = _installed()
    if installed is not None:
        return installed
    cache = _cache()
    cache.parent.mkdir(parents=True, exist_ok=True)
    with (cache.parent / f".{_PACKAGE}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not all(map(Path.exists, _unpacked(cache))):
            with tempfile.TemporaryDirectory(dir=cache.parent, prefix=f".{_PACKAGE}-") as work:
                fetch(Path(work))
                shutil.rmtree(cache, ignore_errors=True)
                (Path(work) / "unpacked").rename(cache)
    return _unpacked(cache)


def promtool(*arguments: str | Path, stdin: str | None = None) -> subprocess.CompletedProcess[str]:
    """Run promtool; its exit status is the caller's to judge. Standard error is in ``stdout``, in its order."""
    return subprocess.run(
        [binaries().promtool, *arguments],
        input=stdin,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=_PATIENCE,
        check=False,
    )


def fetch(work: Path) -> None:
    """Leave the package's files in ``work/unpacked``; raises :class:`Unfetched`."""
    apt = _Apt(work)
    record = apt.candidate()
    if (
        record is None
    ):  # an image whose lists were removed to make it small: ask the same archive, keep them to ourselves
        apt.with_lists_of_its_own()
        record = apt.candidate()
    if record is None:
        raise Unfetched(f"This machine's apt knows no package {_PACKAGE}: put prometheus and promtool on the PATH")
    (work / "download").mkdir()
    apt.run("apt-get", "-q", "download", f"{_PACKAGE}={record['Version']}", where=work / "download")
    (package,) = (work / "download").glob("*.deb")
    digest = hashlib.sha256(package.read_bytes()).hexdigest()
    if digest != record["SHA256"]:
        raise Unfetched(f"{package.name} has the SHA-256 {digest}, and the archive's index says {record['SHA256']}")
    apt.run("dpkg-deb", "--extract", str(package), str(work / "unpacked"), where=work)
    if not all(map(Path.exists, _unpacked(work / "unpacked"))):
        raise Unfetched(f"{package.name} holds no {' or '.join(Binaries._fields)}")


class _Apt:
    """apt, asked without being root and without a change to what it knows."""

    def __init__(self, work: Path) -> None:
        self._work = work
        self._options: tuple[str, ...] = ("-o", "Debug::NoLocking=1", "-o", "Acquire::Retries=2")

    def with_lists_of_its_own(self) -> None:
        for directory in ("lists/partial", "cache/archives/partial"):
            (self._work / directory).mkdir(parents=True)
        # apt drops to a user of its own, who may not write here.
        self._options += ("-o", f"Dir::State::lists={self._work}/lists", "-o", f"Dir::Cache={self._work}/cache")
        self._options += ("-o", f"APT::Sandbox::User={pwd.getpwuid(os.geteuid()).pw_name}")
        self.run("apt-get", "-q", "update", where=self._work)

    def candidate(self) -> dict[str, str] | None:
        """The index's fields of the version that would be installed; None where apt knows of none."""
        shown = self._call("apt-cache", "show", "--no-all-versions", _PACKAGE, where=self._work)
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
            command, cwd=where, capture_output=True, text=True, timeout=_PATIENCE, check=False, env=environment
        )
