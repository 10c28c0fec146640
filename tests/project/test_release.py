"""A release: what it refuses, its checksums, and its provenance, which OpenSSL verifies as the page says."""

from __future__ import annotations

import hashlib
import io
import re
import subprocess
import tarfile
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

import scrubber
from scripts.release import (
    SUMS,
    ReleaseError,
    check_version,
    commit_of,
    digests,
    normalize,
    read_key,
    sign,
    statement,
    write_sums,
)
from scrubber.adapters.signing.ed25519 import encode_private_key

ROOT = Path(__file__).parents[2]
VERSION = scrubber.__version__
DATED = f"# Changelog\n\n## [{VERSION}] - 2026-12-01\n"
UNDATED = f"# Changelog\n\n## [{VERSION}] - unreleased\n"
(RECIPE,) = re.findall(r"```sh\n(python3 .*?)```", (ROOT / "docs/releasing.md").read_text(), re.DOTALL)


def run(*command: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*map(str, command)], cwd=cwd, capture_output=True, text=True, check=False)


# --- refusals ---------------------------------------------------------------------------------------------------------


def test_release_of_this_version_with_an_entry_in_the_changelog_is_accepted() -> None:
    check_version(VERSION, DATED, signed=True)
    check_version(VERSION, UNDATED, signed=False)


def test_changelog_of_this_tree_has_an_entry_for_its_version() -> None:
    check_version(VERSION, (ROOT / "CHANGELOG.md").read_text(), signed=False)


@pytest.mark.parametrize(
    ("version", "changelog", "message"),
    [
        ("9.9.9", DATED, f"has version {re.escape(VERSION)}, and not 9.9.9"),
        (VERSION, "# Changelog\n\n## [9.9.9] - 2026-12-01\n", "CHANGELOG.md has no entry"),
        (VERSION, UNDATED, 'says "unreleased".*needs its date'),
    ],
)
def test_signed_release_of_other_sources_is_refused(version: str, changelog: str, message: str) -> None:
    with pytest.raises(ReleaseError, match=message):
        check_version(version, changelog, signed=True)


def test_release_is_built_from_a_commit_only(tmp_path: Path) -> None:
    with pytest.raises(ReleaseError, match="is not a git checkout"):
        commit_of(tmp_path)
    who = ("-c", "user.name=a", "-c", "user.email=a@b")
    for words in (("init", "-q"), (*who, "commit", "-q", "--allow-empty", "-m", "first")):
        assert run("git", *words, cwd=tmp_path).returncode == 0
    assert commit_of(tmp_path) == run("git", "rev-parse", "HEAD", cwd=tmp_path).stdout.strip()
    (tmp_path / "file").touch()
    with pytest.raises(ReleaseError, match=r"not committed.*\n.*file"):
        commit_of(tmp_path)


def test_file_that_is_no_key_of_this_kind_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "release.key"
    with pytest.raises(ReleaseError, match=r"release\.key cannot be read: No such file"):
        read_key(path)
    path.write_text("nothing")
    with pytest.raises(ReleaseError, match=r"release\.key is not a private key.*openssl genpkey"):
        read_key(path)
    other = ec.generate_private_key(ec.SECP256R1())
    pem, pkcs8, plain = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    path.write_bytes(other.private_bytes(pem, pkcs8, plain))
    with pytest.raises(ReleaseError, match="another algorithm"):
        read_key(path)


# --- checksums and provenance -----------------------------------------------------------------------------------------


@pytest.fixture
def release(tmp_path: Path) -> Path:
    """Return the directory of a signed release, with the public key in it as its reader would put it."""
    directory = tmp_path / VERSION
    directory.mkdir()
    for name in ("gpu-scrubber-0.1.0.tgz", "scrubber.oci.tar"):
        (directory / name).write_text(name)
    write_sums(directory)
    key = tmp_path / "release.key"
    key.write_bytes(encode_private_key(Ed25519PrivateKey.generate()))
    provenance = statement(VERSION, "c" * 40, "https://git.example.com/x", digests(directory))
    (directory / f"gpu-scrubber-{VERSION}.intoto.jsonl").write_text(sign(provenance, read_key(key)))
    assert (
        run("openssl", "pkey", "-in", key, "-pubout", "-out", directory / "release.pem", cwd=tmp_path).returncode == 0
    )
    return directory


def test_sha256sum_accepts_the_checksums(release: Path) -> None:
    done = run("sha256sum", "--check", "--strict", SUMS, cwd=release)
    assert done.stdout.splitlines() == ["gpu-scrubber-0.1.0.tgz: OK", "scrubber.oci.tar: OK"]


def test_recipe_of_the_page_verifies_a_release_with_openssl(release: Path) -> None:
    done = run("bash", "-c", RECIPE, cwd=release)
    assert done.returncode == 0, done.stderr
    assert "Signature Verified Successfully" in done.stdout
    assert {f"{name}: OK" for name in ("SHA256SUMS", "scrubber.oci.tar")} < set(done.stdout.splitlines())


def test_recipe_of_the_page_refuses_an_altered_file(release: Path) -> None:
    (release / "scrubber.oci.tar").write_text("altered")
    done = run("bash", "-c", RECIPE, cwd=release)
    assert done.returncode != 0
    assert "scrubber.oci.tar: FAILED" in done.stdout


def test_recipe_of_the_page_refuses_the_signature_of_another_key(release: Path) -> None:
    (envelope,) = release.glob("*.intoto.jsonl")
    envelope.write_text(sign(statement(VERSION, "d" * 40, None, digests(release)), Ed25519PrivateKey.generate()))
    done = run("bash", "-c", RECIPE, cwd=release)
    assert done.returncode != 0
    assert "OK" not in done.stdout


def test_provenance_names_the_commit_and_every_lock_file() -> None:
    document = statement(VERSION, "c" * 40, None, {"a.whl": "1" * 64})
    assert document["_type"] == "https://in-toto.io/Statement/v1"
    assert document["predicateType"] == "https://slsa.dev/provenance/v1"
    assert document["subject"] == [{"name": "a.whl", "digest": {"sha256": "1" * 64}}]
    inputs = {each["name"]: each["digest"] for each in document["predicate"]["buildDefinition"]["resolvedDependencies"]}
    locks = [*(ROOT / "requirements").glob("*.txt"), *(ROOT / "deploy/container").glob("*.txt")]
    assert inputs == {"sources": {"gitCommit": "c" * 40}} | {
        path.relative_to(ROOT).as_posix(): {"sha256": hashlib.sha256(path.read_bytes()).hexdigest()} for path in locks
    }


def test_chart_archive_depends_on_its_files_only(tmp_path: Path) -> None:
    archives = []
    for time, names in ((1, ("a", "b")), (2, ("b", "a"))):
        archive = tmp_path / f"{time}.tgz"
        with tarfile.open(archive, "w:gz") as tar:
            for name in names:
                entry = tarfile.TarInfo(name)
                entry.size, entry.mtime = 1, time
                tar.addfile(entry, io.BytesIO(name.encode()))
        normalize(archive, 1_700_000_000)
        archives.append(archive.read_bytes())
    assert archives[0] == archives[1]
    with tarfile.open(tmp_path / "1.tgz") as tar:
        assert [(each.name, each.mtime) for each in tar] == [("a", 1_700_000_000), ("b", 1_700_000_000)]
