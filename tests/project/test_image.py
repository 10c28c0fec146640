"""The image: its Debian packages, its configuration, the list of its contents, and its archive.

The packages here are stand-ins, built by dpkg. `make image` itself starts every image that it builds.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import subprocess
import tarfile
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path

import pytest
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator

from scripts import check_image
from scripts.build_deb import PREFIX
from scripts.build_image import (
    CONTAINER,
    BuildError,
    DebianPackage,
    complete,
    configuration,
    contents,
    epoch,
    fetch,
    pack,
    read_lock,
    unpack,
    write_lock,
)
from scripts.check_image import CheckError, digest_file

DIGEST = "sha256:" + "0" * 64
TIME = "1700000000"


@pytest.fixture(autouse=True)
def time_of_the_sources(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOURCE_DATE_EPOCH", TIME)


def deb(directory: Path, name: str, files: Mapping[str, str]) -> DebianPackage:
    """Build a package with these files in ``directory``."""
    tree = directory / f"tree-{name}"
    for path, text in ({"DEBIAN/control": control(name)} | dict(files)).items():
        (tree / path).parent.mkdir(parents=True, exist_ok=True)
        (tree / path).write_text(text)
    file = directory / f"{name}.deb"
    subprocess.run(["dpkg-deb", "--root-owner-group", "-Znone", "--build", tree, file], check=True, capture_output=True)
    return DebianPackage(name, "1:2.0-3", hashlib.sha256(file.read_bytes()).hexdigest())


def control(name: str) -> str:
    return f"Package: {name}\nVersion: 1:2.0-3\nArchitecture: all\nMaintainer: A <a@b>\nDescription: a stand-in\n"


def program(directory: Path, name: str, script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put a shell script called ``name`` first in PATH."""
    path = directory / "bin" / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{path.parent}:{os.environ['PATH']}")


def test_time_of_the_sources_that_is_no_number_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "yesterday")
    with pytest.raises(BuildError, match=r"unknown \(\"yesterday\"\); set SOURCE_DATE_EPOCH"):
        epoch()


# --- packages ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """Return the root directory of an image of two packages."""
    deb(
        tmp_path,
        "tool",
        {
            "bin/tool": "old place",
            "usr/share/doc/tool/copyright": "MIT",
            "usr/share/doc/tool/README": "text",
            "usr/share/doc/tool/examples/one": "text",
            "usr/share/man/man1/tool.1": "text",
        },
    )
    deb(tmp_path, "other", {"usr/bin/other": "new place", "usr/share/ca-certificates/x/a.crt": "A\n"})
    tree = tmp_path / "root"
    tree.mkdir()
    unpack(sorted(tmp_path.glob("*.deb")), tree)
    return tree


def test_directories_at_the_top_are_links_into_usr_as_on_debian(tree: Path) -> None:
    assert (tree / "bin").readlink() == Path("usr/bin")
    assert (tree / "usr/bin/tool").read_text() == "old place"
    assert (tree / "bin/other").read_text() == "new place"


def test_image_has_the_licence_and_the_control_file_of_each_package_and_no_documentation(tree: Path) -> None:
    assert [each.name for each in (tree / "usr/share/doc/tool").iterdir()] == ["copyright"]
    assert not (tree / "usr/share/man").exists()
    records = tree / "var/lib/dpkg/status.d"
    assert sorted(each.name for each in records.iterdir()) == ["other", "tool"]
    assert "Version: 1:2.0-3\n" in (records / "tool").read_text()


def test_completed_image_has_certificates_users_and_the_command(tree: Path) -> None:
    complete(tree)
    assert (tree / "etc/ssl/certs/ca-certificates.crt").read_text() == "A\n"
    assert "root:x:0:0:" in (tree / "etc/passwd").read_text()
    assert (tree / "usr/bin/scrubber").readlink() == Path("/") / PREFIX / "bin" / "scrubber"
    assert (tree / "bin/sh").readlink() == Path("busybox")


def test_packages_in_the_directory_are_used_without_a_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program(tmp_path, "apt-get", "exit 100", monkeypatch)
    package = deb(tmp_path, "tool", {})
    assert fetch([package], tmp_path) == [tmp_path / "tool.deb"]


def test_debian_package_with_another_hash_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = deb(tmp_path, "tool", {})
    program(tmp_path, "apt-get", 'echo "$@" >arguments; echo altered >tool.deb', monkeypatch)
    with pytest.raises(BuildError, match=r"tool 1:2\.0-3 has another hash than the lock file says"):
        fetch([package], tmp_path / "debs")
    assert (tmp_path / "debs" / "arguments").read_text().endswith("download tool=1:2.0-3\n")


def test_package_lists_are_updated_if_apt_does_not_know_the_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = deb(tmp_path, "tool", {})
    updated = tmp_path / "updated"
    script = f'case "$*" in *update) touch {updated};; *) test -e {updated} && cp {tmp_path}/tool.deb .;; esac'
    program(tmp_path, "apt-get", script, monkeypatch)
    assert fetch([package], tmp_path / "debs") == [tmp_path / "debs" / "tool.deb"]


def test_version_that_apt_does_not_offer_names_the_ways_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program(tmp_path, "apt-get", "exit 100", monkeypatch)
    with pytest.raises(BuildError, match=r"cannot download tool=9\. .*snapshot.*--lock"):
        fetch([DebianPackage("tool", "9", "0" * 64)], tmp_path)


def test_lock_file_of_the_image_has_python_and_a_hash_for_each_package() -> None:
    for path in CONTAINER.glob("debian-*.txt"):
        packages = read_lock(path)
        assert "python3.11-minimal" in {each.name for each in packages}


@pytest.mark.parametrize("line", ["libc6", "libc6=2.36", "libc6=2.36 md5:00", "libc6 = 2.36 sha256:" + "0" * 64])
def test_line_of_the_lock_file_without_version_or_hash_is_refused(tmp_path: Path, line: str) -> None:
    path = tmp_path / "debian.txt"
    path.write_text(f"# comment\n{line}\n")
    with pytest.raises(BuildError, match="is not NAME=VERSION sha256:DIGITS"):
        read_lock(path)


def test_architecture_without_a_lock_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BuildError, match=r"debian-s390x\.txt does not exist"):
        read_lock(tmp_path / "debian-s390x.txt")


def test_locking_takes_the_versions_that_apt_offers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    digits = "a" * 64
    program(tmp_path, "apt-cache", f'printf "Package: x\\nVersion: 1:3\\nSHA256: {digits}\\n\\n"', monkeypatch)
    path = tmp_path / "debian.txt"
    path.write_text(f"# comment\nold=1 sha256:{'0' * 64}\nnew\n")
    write_lock(path)
    assert path.read_text() == f"# comment\nold=1:3 sha256:{digits}\nnew=1:3 sha256:{digits}\n"


# --- the image and its contents ---------------------------------------------------------------------------------------


def test_image_runs_the_command_as_a_numeric_user_with_labels() -> None:
    flags = configuration("abc", None)
    pairs = list(pairwise(flags))
    assert ("--entrypoint", '["/opt/scrubber/bin/scrubber"]') in pairs
    assert ("--user", "0:0") in pairs
    labels = dict(value.split("=", 1) for flag, value in pairs if flag == "--label")
    assert labels["org.opencontainers.image.created"] == "2023-11-14T22:13:20Z"
    assert labels["org.opencontainers.image.revision"] == "abc"
    assert "org.opencontainers.image.source" not in labels


@pytest.fixture
def installed(tree: Path) -> Path:
    metadata = tree / PREFIX / "lib/python3.11/site-packages/Some_Package-1.5.dist-info/METADATA"
    metadata.parent.mkdir(parents=True)
    metadata.write_text("Metadata-Version: 2.4\nName: Some_Package\nVersion: 1.5\nLicense-Expression: MIT\n")
    return tree


def test_list_of_contents_is_valid_and_names_debian_and_python_packages(installed: Path) -> None:
    packages = [DebianPackage("libc6", "2.36-9", "1" * 64)]
    text = contents(installed, packages, "amd64", DIGEST)
    assert JsonStrictValidator(SchemaVersion.V1_6).validate_str(text) is None
    components = {each["purl"]: each for each in json.loads(text)["components"]}
    assert set(components) == {"pkg:deb/debian/libc6@2.36-9?arch=amd64&distro=debian-12", "pkg:pypi/some-package@1.5"}
    assert components["pkg:pypi/some-package@1.5"]["licenses"] == [{"expression": "MIT"}]
    assert text == contents(installed, packages, "amd64", DIGEST)


# --- the archive ------------------------------------------------------------------------------------------------------


def store(layout: Path, content: bytes) -> dict[str, str]:
    digest = hashlib.sha256(content).hexdigest()
    (layout / "blobs/sha256" / digest).write_bytes(content)
    return {"digest": f"sha256:{digest}"}


@pytest.fixture
def layout(tmp_path: Path) -> Path:
    """Return an OCI layout with an image of one file."""
    layout = tmp_path / "layout"
    (layout / "blobs/sha256").mkdir(parents=True)
    files = io.BytesIO()
    with tarfile.open(fileobj=files, mode="w:gz") as tar:
        entry = tarfile.TarInfo("etc/greeting")
        entry.size = 5
        tar.addfile(entry, io.BytesIO(b"hello"))
    manifest = {
        "config": store(layout, json.dumps({"config": {"User": "0:0"}}).encode()),
        "layers": [store(layout, files.getvalue())],
    }
    index = {"manifests": [store(layout, json.dumps(manifest).encode())]}
    (layout / "index.json").write_text(json.dumps(index))
    return layout


def archived(layout: Path) -> Path:
    archive = layout.parent / "image.oci.tar"
    pack(layout, archive)
    index = json.loads((layout / "index.json").read_text())
    digest_file(archive).write_text(index["manifests"][0]["digest"] + "\n")
    return archive


def unpacked(archive: Path) -> Path:
    root = archive.parent / "unpacked"
    root.mkdir()
    assert check_image.unpack(archive, root)["config"] == {"User": "0:0"}
    return root


def test_unpacked_archive_has_the_files_of_the_image(layout: Path) -> None:
    assert (unpacked(archived(layout)) / "etc/greeting").read_text() == "hello"


def test_archive_with_an_altered_part_is_refused(layout: Path) -> None:
    largest = max((layout / "blobs/sha256").iterdir(), key=lambda each: each.stat().st_size)
    largest.write_bytes(largest.read_bytes() + b"x")
    with pytest.raises(CheckError, match=f"The content of sha256:{largest.name} has another digest"):
        unpacked(archived(layout))


def test_archive_of_another_image_is_refused(layout: Path) -> None:
    archive = archived(layout)
    digest_file(archive).write_text(DIGEST + "\n")
    with pytest.raises(CheckError, match=f"and not {DIGEST}"):
        unpacked(archive)


@pytest.mark.parametrize("content", [b"", b"not a tar archive"])
def test_file_that_is_no_archive_is_refused(tmp_path: Path, content: bytes) -> None:
    archive = tmp_path / "image.oci.tar"
    archive.write_bytes(content)
    digest_file(archive).write_text(DIGEST)
    with pytest.raises(CheckError, match=r"image\.oci\.tar is not an OCI archive"):
        unpacked(archive)


def test_archive_depends_on_the_contents_only(layout: Path) -> None:
    first = archived(layout).read_bytes()
    for path in layout.rglob("*"):
        os.utime(path, (1, 1))
        path.chmod(0o700)
    assert archived(layout).read_bytes() == first
