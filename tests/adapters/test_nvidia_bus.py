"""Which GPUs exist is read from the kernel's own files, and a GPU that another driver uses is left alone."""

from collections.abc import Callable
from pathlib import Path

import pytest

from scrubber.adapters.nvidia import bus
from scrubber.adapters.nvidia.driver_paths import DriverPaths

FIRST, SECOND = "0000:1b:00.0", "0000:3b:00.0"


class Bus:
    """A small sysfs and the kernel module's files."""

    def __init__(self, root: Path) -> None:
        self.places = DriverPaths(
            driver_root=root, dev=root / "dev", proc_driver=root / "proc/driver/nvidia", sys=root / "sys"
        )
        self.write(self.places.proc_driver / "version", "NVRM version: 580.65.06\n")

    def write(self, path: Path, text: str) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="ascii")

    def add(
        self, address: str, *, driver: str | None = "nvidia", vendor: str = "0x10de", kind: str = "0x030200"
    ) -> Path:
        place = self.places.pci_devices / address
        self.write(place / "vendor", vendor)
        self.write(place / "class", kind)
        if driver is not None:
            (place / "driver").symlink_to(f"../../drivers/{driver}")
        if driver == "nvidia":
            self.write(self.places.proc_driver / "gpus" / address / "information", "GPU Excluded:\t No\n")
        return place


@pytest.fixture
def pci(tmp_path: Path) -> Bus:
    return Bus(tmp_path)


def test_gpus_are_listed_in_address_order(pci: Bus) -> None:
    for address in ("0001:02:00.0", "0000:ff:00.0", SECOND, FIRST):
        pci.add(address)
    assert [gpu.address for gpu in bus.list_gpus(pci.places)] == [FIRST, SECOND, "0000:ff:00.0", "0001:02:00.0"]


def test_other_pci_functions_and_vendors_are_no_gpus(pci: Bus) -> None:
    pci.add("0000:1b:00.1", kind="0x040300", driver="snd_hda_intel")
    pci.add("0000:02:00.0", vendor="0x8086", driver="i915")
    pci.add("0000:05:00.0", kind="0x068000", driver="nvidia-nvswitch")
    assert bus.list_gpus(pci.places) == ()


@pytest.mark.parametrize("driver", ["vfio-pci", "nvgrace_gpu_vfio_pci", "nouveau"])
def test_gpu_bound_to_another_driver_is_listed_with_that_driver(pci: Bus, driver: str) -> None:
    pci.add(FIRST, driver=driver)
    (gpu,) = bus.list_gpus(pci.places)
    assert gpu.unusable_reason is not None
    assert driver in gpu.unusable_reason


def test_gpu_without_a_driver_is_listed_as_unusable(pci: Bus) -> None:
    pci.add(FIRST, driver=None)
    (gpu,) = bus.list_gpus(pci.places)
    assert gpu.unusable_reason == f"No driver is bound to the GPU at {FIRST}."


def test_gpu_excluded_by_the_kernel_module_is_not_queried(pci: Bus) -> None:
    pci.add(FIRST)
    pci.write(pci.places.proc_driver / "gpus" / FIRST / "information", "Device Minor: \t 0\nGPU Excluded:\t Yes\n")
    (gpu,) = bus.list_gpus(pci.places)
    assert gpu.unusable_reason is not None
    assert "NVreg_ExcludedGpus" in gpu.unusable_reason


def test_gpu_known_only_to_the_kernel_module_is_listed(pci: Bus) -> None:
    pci.write(pci.places.proc_driver / "gpus" / FIRST / "information", "Model: x\n")
    assert bus.list_gpus(pci.places) == (bus.PciGpu(FIRST),)


def test_numa_node_is_none_on_a_platform_without_numa(pci: Bus) -> None:
    place = pci.add(FIRST)
    assert bus.numa_node(pci.places, FIRST) is None
    pci.write(place / "numa_node", "-1\n")
    assert bus.numa_node(pci.places, FIRST) is None
    pci.write(place / "numa_node", "1\n")
    assert bus.numa_node(pci.places, FIRST) == 1


def test_capability_nodes_are_found_by_name(pci: Bus) -> None:
    assert bus.mig_minors(pci.places) == {}
    pci.write(pci.places.mig_minors, "config 1\nmonitor 2\ngpu0/gi1/access 12\ngpu0/gi1/ci0/access 13\n")
    assert bus.mig_minors(pci.places)["gpu0/gi1/ci0/access"] == 13


def rebind(pci: Bus) -> None:
    link = pci.places.pci_devices / FIRST / "driver"
    link.unlink()
    link.symlink_to("../../drivers/vfio-pci")


def plug(pci: Bus) -> None:
    pci.add(SECOND)


def reload(pci: Bus) -> None:
    pci.write(pci.places.proc_driver / "version", "NVRM version: 590.10\n")


def split(pci: Bus) -> None:
    (pci.places.proc_driver / "capabilities/gpu0/mig/gi1/ci0").mkdir(parents=True)


def rescan(pci: Bus) -> None:
    """Remove the GPU from the bus and add it again at the same address."""
    place = pci.places.pci_devices / FIRST
    place.rename(place.with_name("gone"))
    place.with_name("gone").rename(pci.places.driver_root / "gone")
    pci.add(FIRST)


@pytest.mark.parametrize("change", [rebind, plug, reload, split, rescan])
def test_pci_fingerprint_changes_with_gpus_drivers_and_instances(pci: Bus, change: Callable[[Bus], None]) -> None:
    pci.add(FIRST)
    before = bus.fingerprint(pci.places)
    assert bus.fingerprint(pci.places) == before
    change(pci)
    assert bus.fingerprint(pci.places) != before


# --- places


def test_driver_of_the_host_is_found_by_the_dynamic_loader() -> None:
    assert DriverPaths().library_directories() == ()
    assert DriverPaths().environment() == {}


def test_driver_below_another_root_is_found_in_its_library_directory(tmp_path: Path) -> None:
    for directory in ("usr/lib64", "usr/lib/x86_64-linux-gnu"):
        (tmp_path / directory).mkdir(parents=True)
    (tmp_path / "usr/lib64/libnvidia-ml.so.1").touch()
    places = DriverPaths(driver_root=tmp_path)
    assert places.environment() == {"LD_LIBRARY_PATH": str(tmp_path / "usr/lib64")}
    assert places.find_program("nvidia-smi") is None
    (tmp_path / "usr/bin").mkdir()
    (tmp_path / "usr/bin/nvidia-smi").touch()
    assert places.find_program("nvidia-smi") == tmp_path / "usr/bin/nvidia-smi"


def test_device_nodes_below_the_driver_root_are_used_when_present(tmp_path: Path) -> None:
    assert DriverPaths.below(tmp_path).dev == Path("/dev")
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/nvidiactl").touch()
    assert DriverPaths.below(tmp_path).dev == tmp_path / "dev"
