"""The lists of contents beside the wheel and the Debian package. That of the image is tested with the image."""

from __future__ import annotations

import json
from hashlib import sha256
from pathlib import Path

import pytest
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator

from scripts.bill_of_materials import installed_packages, locked_packages, write_bill_of_materials

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _fixed_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1700000000")


def test_list_beside_the_wheel_names_the_wheel_and_every_locked_package(tmp_path: Path) -> None:
    wheel = tmp_path / "gpu_scrubber-1.0-py3-none-any.whl"
    wheel.write_bytes(b"wheel")
    listed = write_bill_of_materials(wheel, locked_packages(ROOT / "requirements" / "base.txt"))
    assert listed.name == "gpu_scrubber-1.0-py3-none-any.whl.cdx.json"
    text = listed.read_text()
    assert JsonStrictValidator(SchemaVersion.V1_6).validate_str(text) is None
    document = json.loads(text)
    assert document["metadata"]["component"]["name"] == wheel.name
    assert document["metadata"]["component"]["hashes"][0]["content"] == sha256(b"wheel").hexdigest()
    purls = {each["purl"].partition("@")[0] for each in document["components"]}
    assert {"pkg:pypi/cryptography", "pkg:pypi/grpcio", "pkg:pypi/typer"} <= purls
    assert "pkg:pypi/colorama" not in purls, "it is for Windows only"
    assert text == write_bill_of_materials(wheel, locked_packages(ROOT / "requirements" / "base.txt")).read_text()


def test_packages_of_a_lock_file_have_exact_versions_and_no_marker_of_another_system(tmp_path: Path) -> None:
    lock = tmp_path / "lock.txt"
    lock.write_text(
        "# made by hand\nalpha==1.0 \\\n    --hash=sha256:00\n    # via beta\n"
        "beta-b==2.0rc1 ; sys_platform == 'linux' \\\n    --hash=sha256:00\ngamma==3 ; sys_platform == 'win32' \\\n"
    )
    assert [str(each.purl) for each in locked_packages(lock)] == ["pkg:pypi/alpha@1.0", "pkg:pypi/beta-b@2.0rc1"]


def test_list_beside_the_debian_package_names_what_is_installed_in_it(tmp_path: Path) -> None:
    metadata = tmp_path / "site-packages" / "alpha-1.0.dist-info" / "METADATA"
    metadata.parent.mkdir(parents=True)
    metadata.write_text("Metadata-Version: 2.4\nName: alpha\nVersion: 1.0\nLicense-Expression: MIT\n")
    package = tmp_path / "gpu-scrubber_1.0_amd64.deb"
    package.write_bytes(b"package")
    document = json.loads(write_bill_of_materials(package, installed_packages(tmp_path / "site-packages")).read_text())
    (component,) = document["components"]
    assert (component["purl"], component["licenses"]) == ("pkg:pypi/alpha@1.0", [{"expression": "MIT"}])
