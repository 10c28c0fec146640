"""Packages: a wheel that works outside the checkout, and lock files without download locations."""

import importlib.metadata
import os
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

import scrubber

ROOT = Path(__file__).parents[2]
LOCKS = ("base.txt", "build.txt", "dev.txt")
VENDOR = re.compile(r"^(nvidia|cupy|cuda|pynvml|torch|jax|numba|triton)")


def project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("wheel")
    offline = ["--no-index", "--no-deps", "--no-build-isolation", "--no-cache-dir"]
    subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "--quiet", *offline, "--wheel-dir", directory, ROOT],
        env=os.environ | {"PIP_DISABLE_PIP_VERSION_CHECK": "1"},
        check=True,
    )
    (built,) = directory.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Unpack the wheel as an installer would: it is pure Python."""
    directory = tmp_path_factory.mktemp("site")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(directory)
    return directory


@pytest.fixture(scope="module")
def distribution(installed: Path) -> importlib.metadata.Distribution:
    (found,) = importlib.metadata.distributions(path=[str(installed)])
    return found


def run_away_from_the_checkout(installed: Path, code: str) -> str:
    """Run ``code`` where only the wheel provides ``scrubber``; its working directory is the wheel's."""
    run = subprocess.run(
        [sys.executable, "-c", code],
        cwd=installed,
        env=os.environ | {"PYTHONPATH": str(installed)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    return run.stdout


class TestWheel:
    def test_wheel_contains_service_plugin_and_licence(self, installed: Path) -> None:
        for package in ("scrubber", "plugin"):
            in_tree = {path.relative_to(ROOT) for path in (ROOT / package).rglob("*.py")}
            in_wheel = {path.relative_to(installed) for path in (installed / package).rglob("*.py")}
            assert in_wheel == in_tree
        assert list(installed.glob("*.dist-info/licenses/LICENSE"))

    def test_wheel_contains_the_bundled_policies(self, installed: Path) -> None:
        in_tree = {path.name: path.read_bytes() for path in (ROOT / "policies").glob("*.yaml")}
        in_wheel = {path.name: path.read_bytes() for path in (installed / "scrubber/_policies").glob("*.yaml")}
        assert "default.yaml" in in_tree
        assert in_wheel == in_tree

    def test_wheel_contains_no_other_packages(self, installed: Path) -> None:
        assert {path.name for path in installed.iterdir() if path.suffix != ".dist-info"} == {"scrubber", "plugin"}

    def test_wheel_version_equals_the_version_in_the_code(self, distribution: importlib.metadata.Distribution) -> None:
        assert distribution.version == scrubber.__version__

    def test_installed_command_starts_outside_the_checkout(self, installed: Path) -> None:
        where = run_away_from_the_checkout(
            installed,
            "from importlib.metadata import distribution; import sys;"
            "(entry,) = distribution('gpu-scrubber').entry_points.select(name='scrubber');"
            "print(sys.modules[entry.load().__module__].__file__)",
        )
        assert Path(where.strip()).is_relative_to(installed)

    def test_base_requirements_include_no_gpu_library(self, distribution: importlib.metadata.Distribution) -> None:
        requirements = [Requirement(line) for line in distribution.requires or ()]
        base = {requirement.name for requirement in requirements if requirement.marker is None}
        assert base
        assert not {name for name in base if VENDOR.match(name)}

    def test_extras_require_the_optional_libraries(self, distribution: importlib.metadata.Distribution) -> None:
        requirements = [Requirement(line) for line in distribution.requires or ()]
        by_extra = {
            extra: {each.name for each in requirements if each.marker and each.marker.evaluate({"extra": extra})}
            for extra in distribution.metadata.get_all("Provides-Extra") or ()
        }
        assert by_extra == {
            "nvidia": {"nvidia-ml-py"},
            "cuda12": {"nvidia-ml-py", "cupy-cuda12x"},
            "cuda13": {"nvidia-ml-py", "cupy-cuda13x"},
            "otel": {
                "opentelemetry-sdk",
                "opentelemetry-exporter-otlp-proto-grpc",
                "opentelemetry-exporter-otlp-proto-http",
            },
        }


def locked(name: str) -> dict[str, tuple[str, list[str]]]:
    """Return a lock file's requirements: name → (version, hashes)."""
    text = (ROOT / "requirements" / name).read_text().replace("\\\n", " ")
    lines = [line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    found: dict[str, tuple[str, list[str]]] = {}
    for line in lines:
        pinned, *hashes = line.split("--hash=")
        requirement = Requirement(pinned.strip())
        (specifier,) = requirement.specifier
        assert specifier.operator == "=="
        found[canonicalize_name(requirement.name)] = (specifier.version, [each.strip() for each in hashes])
    return found


@pytest.mark.parametrize("name", LOCKS)
class TestLockFile:
    def test_every_locked_requirement_has_a_hash(self, name: str) -> None:
        requirements = locked(name)
        assert requirements
        for package, (_, hashes) in requirements.items():
            assert hashes, package
            assert all(re.fullmatch(r"sha256:[0-9a-f]{64}", each) for each in hashes), package

    def test_lock_file_names_no_host_and_no_path(self, name: str) -> None:
        text = (ROOT / "requirements" / name).read_text()
        assert not re.search(
            r"https?:|://|\bfile:|^-|--(extra-)?index-url|--find-links|(^|[\s=@])[/~]", text, re.MULTILINE
        )

    def test_only_the_lock_file_of_the_tests_includes_gpu_libraries(self, name: str) -> None:
        assert bool([package for package in locked(name) if VENDOR.match(package)]) is (name == "dev.txt")

    def test_lock_file_satisfies_pyproject(self, name: str) -> None:
        base, groups = project()["project"]["dependencies"], project()["dependency-groups"]
        dev = [each for each in groups["dev"] if isinstance(each, str)]
        expected = {"base.txt": base, "build.txt": groups["build"], "dev.txt": base + groups["build"] + dev}[name]
        requirements = locked(name)
        for requirement in map(Requirement, expected):
            version, _ = requirements[canonicalize_name(requirement.name)]
            assert requirement.specifier.contains(version), requirement


def test_tests_run_on_the_locked_versions_of_the_release() -> None:
    dev = locked("dev.txt")
    for part in (locked("base.txt"), locked("build.txt")):
        assert part == {package: dev[package] for package in part}


@pytest.mark.parametrize(
    ("library", "files", "stamp"),
    [
        ("grpcio", "*_pb2_grpc.py", r"^GRPC_GENERATED_VERSION = '([\d.]+)'"),
        ("protobuf", "*_pb2.py", r"^# Protobuf Python Version: ([\d.]+)"),
    ],
)
def test_minimum_runtime_version_satisfies_the_generated_code(library: str, files: str, stamp: str) -> None:
    (declared,) = (each for each in map(Requirement, project()["project"]["dependencies"]) if each.name == library)
    (oldest,) = (Version(each.version) for each in declared.specifier if each.operator == ">=")
    generated = [path for package in ("scrubber", "plugin") for path in (ROOT / package).rglob(files)]
    assert generated
    for path in generated:
        (minimum,) = re.findall(stamp, path.read_text(), re.MULTILINE)
        assert oldest >= Version(minimum), path
