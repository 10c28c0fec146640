"""Builds a release into dist/VERSION: wheel, images, chart and Debian package, with their checksums and their provenance.

    python -m scripts.release VERSION [--key FILE] [--source URL]      as root, on Debian 12

Nothing is uploaded. One commit gives the same files each time. See docs/releasing.md.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import io
import json
import os
import re
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

import scrubber
from scripts import build_deb, build_image, gen_chart
from scripts.bill_of_materials import locked_packages, write_bill_of_materials
from scripts.check_image import CheckError
from scrubber.adapters.signing.ed25519 import Ed25519Key, load_private_key
from scrubber.adapters.signing.envelope import write_envelope
from scrubber.domain.statement import STATEMENT_TYPE

_ROOT = Path(__file__).resolve().parent.parent
SUMS = "SHA256SUMS"
_BUILDER = "https://scrubber.dev/make-release"
_BUILD_TYPE = "https://scrubber.dev/make-release/v1"
_INPUTS = ("deploy/container/*.txt", "requirements/*.txt")


class ReleaseError(Exception):
    """The release cannot be built; the message says why and what to do."""


# --- what is checked first --------------------------------------------------------------------------------------------


def check_version(version: str, changelog: str, *, signed: bool) -> None:
    """Check that the sources are those of ``version``.

    Raises:
        ReleaseError: the code has another version, or the changelog has no entry for it; for a signed release also, if the
            entry has no date.
    """
    if version != scrubber.__version__:
        raise ReleaseError(
            f"scrubber/__init__.py has version {scrubber.__version__}, and not {version}; change one of them."
        )
    entry = re.search(rf"^## \[{re.escape(version)}\] - (.+)$", changelog, re.MULTILINE)
    if entry is None:
        raise ReleaseError(f'CHANGELOG.md has no entry "## [{version}] - DATE"; write it.')
    if signed and not re.fullmatch(r"\d{4}-\d\d-\d\d", entry[1]):
        raise ReleaseError(
            f'CHANGELOG.md says "{entry[1]}" for {version}. A signed release needs its date (YYYY-MM-DD).'
        )


def commit_of(tree: Path) -> str:
    """Return the commit that is checked out in ``tree``.

    Raises:
        ReleaseError: it is not a git checkout, or contains changes that are not committed.
    """
    try:
        changed = _git(tree, "status", "--porcelain")
        commit = _git(tree, "rev-parse", "HEAD")
    except subprocess.CalledProcessError:
        raise ReleaseError(f"{tree} is not a git checkout with a commit; a release is built from one.") from None
    if changed:
        raise ReleaseError(f"These changes are not committed, and a release is built from a commit:\n{changed}")
    return commit


def read_key(path: Path) -> Ed25519PrivateKey:
    """Return the private key in ``path``.

    Raises:
        ReleaseError: the file cannot be read, or contains something else.
    """
    try:
        return load_private_key(path.read_bytes())
    except OSError as error:
        raise ReleaseError(f"The key {path} cannot be read: {error.strerror}.") from None
    except ValueError as error:
        raise ReleaseError(
            f"{path} {error}. Create a key with: openssl genpkey -algorithm ed25519 -out {path}"
        ) from None


# --- what is built ----------------------------------------------------------------------------------------------------


def build(directory: Path, source: str | None) -> None:
    """Build all artefacts into ``directory``.

    Raises:
        BuildError, CheckError, CalledProcessError: as :func:`scripts.build_image.build_and_check`.
        ReleaseError: the chart or the Debian package cannot be built.
    """
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input", "wheel", "--quiet")
    subprocess.run(
        [*pip, "--no-deps", "--no-build-isolation", "--wheel-dir", directory, _ROOT], check=True, stdout=sys.stderr
    )
    for wheel in directory.glob("*.whl"):
        write_bill_of_materials(wheel, locked_packages(_ROOT / "requirements" / "base.txt"))
    if gen_chart.main(["--package", str(directory)]) != 0:
        raise ReleaseError("The chart has errors; see above.")
    for chart in directory.glob("*.tgz"):
        normalize(chart, build_image.epoch())
    if build_deb.main(["--out", str(directory)]) != 0:
        raise ReleaseError("The Debian package could not be built; see above.")
    for cuda in build_deb.LOCKS:
        build_image.build_and_check(cuda, directory, _ROOT / "build" / "debs", source)


def normalize(archive: Path, time: int) -> None:
    """Rewrite a compressed tar archive with ``time`` (Unix time, in seconds) as the time of each file, in order of names."""
    content = io.BytesIO()
    with tarfile.open(archive) as old, tarfile.open(fileobj=content, mode="w", format=tarfile.USTAR_FORMAT) as new:
        for entry in sorted(old.getmembers(), key=lambda each: each.name):
            entry.mtime, entry.pax_headers = time, {}
            new.addfile(entry, old.extractfile(entry))
    archive.write_bytes(gzip.compress(content.getvalue(), 9, mtime=0))


def write_sums(directory: Path) -> None:
    """Write the SHA-256 of each file in ``directory`` to SHA256SUMS, as sha256sum does."""
    lines = [f"{digest}  {name}\n" for name, digest in digests(directory).items() if name != SUMS]
    (directory / SUMS).write_text("".join(lines), encoding="utf-8")


def digests(directory: Path) -> dict[str, str]:
    """Return the SHA-256, in hexadecimal digits, of each file in ``directory``, by name."""
    found = {}
    for path in sorted(directory.iterdir()):
        with path.open("rb") as file:
            found[path.name] = hashlib.file_digest(file, "sha256").hexdigest()
    return found


# --- provenance -------------------------------------------------------------------------------------------------------


def statement(version: str, commit: str, source: str | None, artefacts: Mapping[str, str]) -> dict[str, Any]:
    """Return the in-toto statement of a release, with SLSA provenance (v1).

    Args:
        source: the URL of the sources; None if it is not to be named.
        artefacts: SHA-256 of each file, by name.
    """
    inputs = {path.relative_to(_ROOT).as_posix(): path for pattern in _INPUTS for path in _ROOT.glob(pattern)}
    sources = {"name": "sources", "digest": {"gitCommit": commit}} | ({"uri": source} if source else {})
    locks = [
        {"name": name, "digest": {"sha256": hashlib.sha256(path.read_bytes()).hexdigest()}}
        for name, path in sorted(inputs.items())
    ]
    return {
        "_type": STATEMENT_TYPE,
        "subject": [{"name": name, "digest": {"sha256": digest}} for name, digest in sorted(artefacts.items())],
        "predicateType": "https://slsa.dev/provenance/v1",
        "predicate": {
            "buildDefinition": {
                "buildType": _BUILD_TYPE,
                "externalParameters": {"version": version, "source": source},
                "internalParameters": {},
                "resolvedDependencies": [sources, *locks],
            },
            "runDetails": {"builder": {"id": _BUILDER, "version": {"gpu-scrubber": version}}},
        },
    }


def sign(document: Mapping[str, Any], key: Ed25519PrivateKey) -> str:
    """Return ``document`` in a DSSE envelope signed with ``key``, as one line of JSON."""
    payload = json.dumps(document, sort_keys=True, separators=(",", ":")).encode()
    signer = Ed25519Key(key)
    return json.dumps(json.loads(write_envelope(payload, signer.key_id, signer.sign(payload)))) + "\n"


def _git(tree: Path, *words: str) -> str:
    return subprocess.run(
        ["git", "-C", tree, *words], check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ).stdout.strip()


def main(arguments: Sequence[str] | None = None) -> int:
    """Build the release, and print its directory."""
    parser = argparse.ArgumentParser(description="Build a release. Nothing is uploaded.")
    parser.add_argument("version", metavar="VERSION", help="the version, such as 0.1.0")
    parser.add_argument("--key", type=Path, help="private key (Ed25519, PEM) that signs the provenance")
    parser.add_argument("--source", help="URL of the sources, for the provenance and the images")
    parser.add_argument("--out", type=Path, default=_ROOT / "dist", help="directory of the release's directory")
    options = parser.parse_args(arguments)
    os.umask(0o022)
    release = options.out / options.version
    try:
        check_version(
            options.version, (_ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), signed=options.key is not None
        )
        key = None if options.key is None else read_key(options.key)
        commit = commit_of(_ROOT)
        if release.exists():
            raise ReleaseError(f"{release} exists; move or delete it.")
        build_image.require_tools()
        os.environ["SOURCE_DATE_EPOCH"] = str(build_image.epoch())
        options.out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".release-", dir=options.out) as name:
            directory = Path(name, options.version)
            directory.mkdir()
            build(directory, options.source)
            if commit_of(_ROOT) != commit:
                raise ReleaseError("Another commit was checked out meanwhile; run this again.")
            write_sums(directory)
            if key is not None:
                provenance = statement(options.version, commit, options.source, digests(directory))
                file = directory / f"gpu-scrubber-{options.version}.intoto.jsonl"
                file.write_text(sign(provenance, key), encoding="utf-8")
            directory.rename(release)
    except (ReleaseError, build_image.BuildError, CheckError) as error:
        print(f"release: {error}", file=sys.stderr)
        return 1
    except subprocess.CalledProcessError as error:
        print(f"release: {error.cmd[0]} failed with {error.returncode}; its message is above.", file=sys.stderr)
        return 1
    if key is None:
        print(
            "release: not signed, because no key was given: there is no provenance. Use it for trials only.",
            file=sys.stderr,
        )
    print(release)
    return 0


if __name__ == "__main__":
    sys.exit(main())
