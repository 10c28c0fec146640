"""Checks of the libraries that the service loads: our own dependencies, NVIDIA's bindings and CuPy, and the driver's.

None of them is loaded for the check: that could take seconds, hang in a broken driver, or change the result.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path

from scrubber.doctor.environment import driver_roots
from scrubber.doctor.files import read_bytes
from scrubber.doctor.gpus import driver_version
from scrubber.doctor.model import CheckContext, CheckLevel, CheckResult

__all__ = ["bindings", "driver_libraries", "libraries"]

_DISTRIBUTION = "gpu-scrubber"
_REPORTED_LIBRARIES = ("grpcio", "protobuf")
_REQUIREMENT = re.compile(r"(?P<name>[A-Za-z0-9._-]+)(?P<bounds>[^;]*)(?P<marker>;.*)?")
_BOUND = re.compile(r"(>=|<)\s*([0-9]+(?:\.[0-9]+)*)")
_CUPY = {"cupy-cuda12x": (12, 525), "cupy-cuda13x": (13, 580)}
"""By distribution: its CUDA version, and the oldest driver that supports it."""
_INSTALL = "Reinstall this program as described in docs/deploying.md; with pip: pip install"
_DRIVERS = ("libcuda.so.1", "libnvidia-ml.so.1")
_LIBRARY_DIRECTORIES = (
    "usr/lib/x86_64-linux-gnu",
    "usr/lib/aarch64-linux-gnu",
    "usr/lib64",
    "usr/lib",
    "usr/local/nvidia/lib64",
)
_LOADER_CACHE = "/etc/ld.so.cache"


def libraries(node: CheckContext) -> Iterator[CheckResult]:
    """This program's dependencies are installed, in supported versions. The service must run from the same installation."""
    del node
    try:
        requirements = metadata.requires(_DISTRIBUTION) or []
    except metadata.PackageNotFoundError:
        message = f"{_DISTRIBUTION} is not installed as a package, so its dependencies are unknown."
        yield CheckResult("dependencies", CheckLevel.WARNING, message, f"{_INSTALL} '.[cuda12]'")
        return
    wrong = [error for each in requirements if (error := _requirement_error(each))]
    if wrong:
        yield CheckResult(
            "dependencies", CheckLevel.ERROR, f"{'; '.join(wrong)}.", f"{_INSTALL} '.[cuda12]' (or cuda13)"
        )
        return
    shown = ", ".join(f"{name} {_version(name)}" for name in _REPORTED_LIBRARIES)
    yield CheckResult("dependencies", CheckLevel.OK, f"All dependencies are installed: {shown}, …")


def _requirement_error(requirement: str) -> str:
    """Return what is wrong with one of our requirements; empty when nothing is, or when it belongs to an extra."""
    found = _REQUIREMENT.fullmatch(requirement)
    if found is None or "extra" in (found["marker"] or ""):
        return ""
    name = found["name"]
    version = _version(name)
    if version is None:
        return f"{name} is not installed"
    for sign, bound in _BOUND.findall(found["bounds"]):
        below = _numbers(version) < _numbers(bound)
        if below == (sign == ">="):
            return f"{name} is version {version}, but {sign}{bound} is needed"
    return ""


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _numbers(version: str) -> list[int]:
    """Return the numbers of a version: ``1.85`` is ``1.85.0``; a suffix after the numbers does not count."""
    numbers = [int(each) for each in re.findall(r"\d+", version)[:4]]
    return [*numbers, *[0] * (4 - len(numbers))]


def bindings(node: CheckContext) -> Iterator[CheckResult]:
    """NVML's bindings and CuPy are installed, for a CUDA version that the driver supports."""
    if node.service.simulated:
        yield CheckResult(
            "driver-bindings", CheckLevel.OK, "The simulated node needs neither NVML's bindings nor CuPy."
        )
        return
    if not node.service.has_hardware and not node.has_driver:
        return  # the driver check reports that there is none
    level = CheckLevel.ERROR if node.service.has_hardware else CheckLevel.WARNING
    nvml = _version("nvidia-ml-py")
    cupy = {name: version for name in _CUPY if (version := _version(name))}
    advice = f"{_INSTALL} '.[cuda12]', or '.[cuda13]' for drivers from 580 on."
    missing = [name for name, found in (("NVML's bindings (nvidia-ml-py)", nvml), ("CuPy", cupy)) if not found]
    if missing:
        message = f"{' and '.join(missing)} {'are' if len(missing) > 1 or nvml is None else 'is'} not installed."
        yield CheckResult("driver-bindings", level, message, advice)
        return
    if len(cupy) > 1:
        message = f"{' and '.join(cupy)} are both installed and overwrite each other."
        yield CheckResult(
            "driver-bindings", level, message, f"pip uninstall {' '.join(cupy)}, then {advice[0].lower()}{advice[1:]}"
        )
        return
    ((name, version),) = cupy.items()
    cuda, oldest = _CUPY[name]
    driver = driver_version(node)
    if driver is not None and int(driver.partition(".")[0]) < oldest:
        message = f"{name} is for CUDA {cuda} and drivers from {oldest} on; this driver is {driver}."
        yield CheckResult(
            "driver-bindings",
            level,
            message,
            f"pip uninstall {name}, then install with '.[cuda12]'; or install a newer driver.",
        )
        return
    yield CheckResult("driver-bindings", CheckLevel.OK, f"nvidia-ml-py {nvml} and {name} {version} are installed.")


def driver_libraries(node: CheckContext) -> Iterator[CheckResult]:
    """The driver's libraries are where the loader finds them. No compiler (NVRTC) is needed: our kernels are shipped."""
    if node.service.simulated or not node.has_driver:
        return  # not needed, or the driver check reports what is missing first
    roots = driver_roots(node)
    missing = [name for name in _DRIVERS if _find(node, name, roots) is None]
    if not missing:
        found = _find(node, _DRIVERS[0], roots)
        yield CheckResult("driver-libraries", CheckLevel.OK, f"The driver's libraries are installed: {found}.")
        return
    message = f"{' and '.join(missing)} {'are' if len(missing) > 1 else 'is'} in none of the searched directories."
    # A service with this backend has found them, possibly below a separate driver root.
    level = CheckLevel.ERROR if not node.service.is_available else CheckLevel.WARNING
    remedy = (
        "Install the driver's libraries (they come with nvidia-smi) and run ldconfig; if the driver has a "
        "separate root: scrubber serve --nvidia-driver-root DIR."
    )
    yield CheckResult("driver-libraries", level, message, remedy)


def _find(node: CheckContext, name: str, roots: Sequence[Path]) -> Path | None:
    named = [Path(each) for each in os.environ.get("LD_LIBRARY_PATH", "").split(":") if each.startswith("/")]
    default_directories = [root / each for root in roots for each in _LIBRARY_DIRECTORIES]
    for directory in (*named, *default_directories):
        try:
            if (directory / name).is_file():
                return directory / name
        except OSError:
            continue
    return _cached(node, name)


def _cached(node: CheckContext, name: str) -> Path | None:
    """Return the path in the loader's cache, which contains the paths as plain text, each with a zero byte after it."""
    try:
        cache = read_bytes(node.path(_LOADER_CACHE), 16 << 20)
    except OSError:
        return None
    for found in re.findall(rb"(/[^\0]*/" + re.escape(name.encode()) + rb")\0", cache):
        path = node.path(os.fsdecode(found))
        if path.is_file():
            return path
    return None
