"""Where NVIDIA's driver keeps its things on this node: libraries, device nodes, and what it says in /proc and /sys.

The driver may live in the node's root, or below another one (a driver container's). Everything that looks for a file of
the driver asks here, so that a test can point all of it at a directory.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

__all__ = ["DriverPaths"]

_LIBRARY = "libnvidia-ml.so.1"
_LIBRARIES = (
    "usr/lib/x86_64-linux-gnu",
    "usr/lib/aarch64-linux-gnu",
    "usr/lib64",
    "usr/lib",
    "lib64",
    "usr/local/nvidia/lib64",
    "lib/x86_64-linux-gnu",
)
_PROGRAMS = ("usr/bin", "usr/local/nvidia/bin", "usr/local/bin", "usr/sbin", "bin")


@dataclass(frozen=True, slots=True)
class DriverPaths:
    """Paths of the driver.

    Attributes:
        driver_root: where the driver's libraries and programs are installed.
        dev: where its device nodes are.
        proc_driver: what the kernel module says about itself and its GPUs.
        sys: the node's sysfs.
        run: the node's ``/run``.
    """

    driver_root: Path = Path("/")
    dev: Path = Path("/dev")
    proc_driver: Path = Path("/proc/driver/nvidia")
    sys: Path = Path("/sys")
    run: Path = Path("/run")

    @classmethod
    def below(cls, driver_root: Path) -> DriverPaths:
        """Those of a driver that is installed below ``driver_root``: its own device nodes, where it has made some."""
        below = driver_root / "dev"
        return cls(driver_root, below if (below / "nvidiactl").exists() else Path("/dev"))

    @property
    def pci_devices(self) -> Path:
        return self.sys / "bus/pci/devices"

    @property
    def mig_minors(self) -> Path:
        """Which capability node belongs to which MIG instance."""
        return self.proc_driver.with_name("nvidia-caps") / "mig-minors"

    def library_directories(self) -> tuple[str, ...]:
        """Directories that hold NVML; none for the node's own root, where the loader finds it by itself."""
        if self.driver_root == Path("/"):
            return ()
        candidates = (self.driver_root / each for each in _LIBRARIES)
        return tuple(str(each) for each in candidates if (each / _LIBRARY).exists())

    def environment(self) -> Mapping[str, str]:
        """What a child's environment needs so that its loader finds the driver's libraries."""
        directories = self.library_directories()
        return {"LD_LIBRARY_PATH": ":".join(directories)} if directories else {}

    def find_program(self, name: str) -> Path | None:
        """One of the driver's programs, ``nvidia-smi`` say; None when it is not installed."""
        candidates = (self.driver_root / each / name for each in _PROGRAMS)
        return next((each for each in candidates if each.is_file()), None)
