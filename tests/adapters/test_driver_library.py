"""Behaviour of NVIDIA's own library, not the stand-in, on a node without a driver.

The library is Debian's; ``scripts/fetch_driver_library.sh`` downloads it once into the tests' environment. Without a
driver, all it can do is report that there is none. Most nodes of a cluster are in that state.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from scrubber.adapters.children.process import Children
from scrubber.adapters.nvidia.driver_paths import DriverPaths
from scrubber.adapters.nvidia.inventory import NvidiaInventory
from scrubber.domain.errors import Unavailable
from tests.nvidia.build import LIBRARY, exported_functions
from tests.nvidia.machine import Machine
from tests.pods import DEADLINE, only_with

FETCH = Path(__file__).parents[2] / "scripts" / "fetch_driver_library.sh"
NEWER = {
    "nvmlDeviceGetClockOffsets",
    "nvmlDeviceSetClockOffsets",
    "nvmlDeviceGetGpuFabricInfoV",
    "nvmlDeviceGetNumaNodeId",
    "nvmlDeviceGetTemperatureV",
    "nvmlSystemGetConfComputeSettings",
}
"""Functions of the stand-in that NVML introduced after the oldest driver that Debian ships."""
NO_DRIVER = not Path("/proc/driver/nvidia").exists()
DEBIAN = shutil.which("apt-get") is not None and shutil.which("dpkg-deb") is not None
if not NO_DRIVER:
    print("NOT TESTED HERE: NVIDIA's library without a driver (there is one)", file=sys.__stderr__)
elif not DEBIAN:
    print("NOT TESTED HERE: NVIDIA's library without a driver (it comes from Debian's archive)", file=sys.__stderr__)


@pytest.fixture(scope="module")
def driver_root() -> Path:
    """Return a driver root with only NVIDIA's library; fails with a message when the archive does not answer."""
    kept = Path(sys.prefix) / "driver-library"
    done = subprocess.run([FETCH, kept], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return kept


@pytest.fixture
async def children() -> AsyncIterator[Children]:
    children = Children(kill_timeout=DEADLINE)
    yield children
    await children.close()
    assert children.pids() == frozenset()


def places(driver_root: Path, nowhere: Path) -> DriverPaths:
    """Return paths to the library of ``driver_root``, on a node that has no GPU."""
    return DriverPaths(driver_root, nowhere / "dev", nowhere / "proc", nowhere / "sys", nowhere / "run")


@pytest.fixture
def both(driver_root: Path, tmp_path: Path) -> Iterator[tuple[ctypes.CDLL, ctypes.CDLL]]:
    """Load NVIDIA's library and the stand-in for it, both without a driver."""
    (directory,) = places(driver_root, tmp_path).library_directories()
    with Machine.create(tmp_path / "world") as machine:
        machine.remove_driver()
        yield ctypes.CDLL(f"{directory}/{LIBRARY}"), ctypes.CDLL(str(machine.library_directory / LIBRARY))


@only_with(NO_DRIVER and DEBIAN)
def test_stand_in_exports_no_function_that_the_real_library_lacks(both: tuple[ctypes.CDLL, ctypes.CDLL]) -> None:
    real, _ = both
    assert {name for name in exported_functions() if not hasattr(real, name)} <= NEWER


@only_with(NO_DRIVER and DEBIAN)
def test_real_library_and_stand_in_answer_alike_without_a_driver(both: tuple[ctypes.CDLL, ctypes.CDLL]) -> None:
    def answers(library: ctypes.CDLL) -> list[object]:
        library.nvmlErrorString.restype = ctypes.c_char_p
        number, pointer, text = ctypes.c_uint(), ctypes.c_void_p(), ctypes.create_string_buffer(80)
        return [
            [library.nvmlErrorString(code) for code in (*range(31), 999)],
            [library.nvmlInitWithFlags(flags) for flags in (0, 1, 2)],
            library.nvmlInit_v2(),
            library.nvmlDeviceGetCount_v2(ctypes.byref(number)),
            library.nvmlDeviceGetHandleByIndex_v2(0, ctypes.byref(pointer)),
            library.nvmlDeviceGetUUID(None, text, 80),
            library.nvmlEventSetCreate(ctypes.byref(pointer)),
            library.nvmlSystemGetDriverVersion(text, 80),
            library.nvmlSystemGetCudaDriverVersion(ctypes.byref(number)),
            library.nvmlSystemGetNVMLVersion(text, 80),
            library.nvmlSystemGetNVMLVersion(text, 2),
            [library.nvmlShutdown() for _ in range(2)],
        ]

    real, standin = both
    assert answers(standin) == answers(real)


@only_with(NO_DRIVER and DEBIAN)
async def test_library_without_a_driver_is_unavailable_and_names_the_module_to_load(
    driver_root: Path, tmp_path: Path, children: Children
) -> None:
    inventory = NvidiaInventory(places(driver_root, tmp_path), children, node="node-1")
    for query in (inventory.identity, inventory.devices):
        with pytest.raises(Unavailable, match=r"The driver is not loaded: load it .*NVML error 9 at initialisation"):
            await query()
    await inventory.close()


async def test_library_that_cannot_be_loaded_is_unavailable_and_named(tmp_path: Path, children: Children) -> None:
    directory = tmp_path / "usr/lib/x86_64-linux-gnu"
    directory.mkdir(parents=True)
    (directory / LIBRARY).write_bytes(b"")  # any library installed on this machine is searched after this one
    inventory = NvidiaInventory(places(tmp_path, tmp_path), children, node="node-1")
    for query in (inventory.identity, inventory.devices):
        with pytest.raises(Unavailable, match=r"The driver's library \(libnvidia-ml\.so\.1\) was not found"):
            await query()
    await inventory.close()


def test_fetch_script_without_arguments_prints_its_usage(tmp_path: Path) -> None:
    usage = subprocess.run([FETCH], capture_output=True, text=True, check=False)
    assert usage.returncode == 1
    assert "usage" in usage.stderr


async def test_library_version_mismatch_is_unavailable_and_requests_a_module_reload(
    tmp_path: Path, children: Children
) -> None:
    with Machine.create(tmp_path / "world") as machine:
        machine.mismatch()
        inventory = NvidiaInventory(machine.places, children, node="node-1")
        with pytest.raises(Unavailable, match="differ: reboot, or reload the driver"):
            await inventory.identity()
        await inventory.close()
