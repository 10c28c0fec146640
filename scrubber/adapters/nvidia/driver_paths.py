"""Where NVIDIA's driver is on this node: libraries, device nodes, and its files in /proc and /sys.

The driver may be installed in the node's root, or below another root (a driver container's). All code that needs a file
of the driver takes its path from here, so that a test can point all of it at one directory.
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
        driver_root: the root below which the driver's libraries and programs are installed.
        dev: the directory of its device nodes.
        proc_driver: the kernel module's directory in ``/proc``, about itself and its GPUs.
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
        """Paths of a driver installed below ``driver_root``, with the device nodes there if the driver created any."""
        below = driver_root / "dev"
        return cls(driver_root, below if (below / "nvidiactl").exists() else Path("/dev"))

    @property
    def pci_devices(self) -> Path:
        return self.sys / "bus/pci/devices"

    @property
    def mig_minors(self) -> Path:
        """The file that maps MIG instances to their capability nodes."""
        return self.proc_driver.with_name("nvidia-caps") / "mig-minors"

    def library_directories(self) -> tuple[str, ...]:
        """Return the directories that contain NVML; none for the node's root, where the loader finds it."""
        if self.driver_root == Path("/"):
            return ()
        candidates = (self.driver_root / each for each in _LIBRARIES)
        return tuple(str(each) for each in candidates if (each / _LIBRARY).exists())

    def environment(self) -> Mapping[str, str]:
        """Return the environment variables with which a child's loader finds the driver's libraries."""
        directories = self.library_directories()
        return {"LD_LIBRARY_PATH": ":".join(directories)} if directories else {}

    def find_program(self, name: str) -> Path | None:
        """Return the path of one of the driver's programs, such as ``nvidia-smi``; None when it is not installed."""
        candidates = (self.driver_root / each / name for each in _PROGRAMS)
        return next((each for each in candidates if each.is_file()), None)
