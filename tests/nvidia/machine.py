"""The machine behind the stand-ins: a driver's root directory, and the driver's state in it as files.

One attribute is one small file, as in sysfs. It is replaced atomically, so that readers see the old or the new value.
A missing attribute is one that the device does not support. Changes by a test are visible to the next call::

    usr/lib/x86_64-linux-gnu/libnvidia-ml.so.1   the stand-in library, finds this machine by its own path
    usr/bin/nvidia-smi                           the stand-in for resets
    dev/nvidia<minor>, nvidiactl, nvidia-caps/   device nodes (links to otherwise unused terminals)
    proc/driver/nvidia, proc/driver/nvidia-caps  the kernel module's files
    sys/bus/pci/devices/<address>                the PCI bus
    state/node/                                  driver_version nvml_version cuda_version
        init_error                               the result code of every call; 9 = driver not loaded
        errors/<function> missing/<function> hangs/<function>   this function returns a code, is unknown, never returns
        long_process_rows                        a driver whose newer process lists have longer rows than they should
        confidential gpus_ready                  confidential computing: the mode; 1 while the GPUs accept work, else 0
        confidential_devtools confidential_multi_gpu            the mode for debuggers; that of several GPUs
        stubborn/gpus_ready                      the setter reports success and changes nothing
        attaches_all                             a driver that opens every GPU for each process that initialises NVML
    state/gpus/<n>/                              one GPU; NVML's index is its rank by PCI address
        attached                                 a PID a line, for each process that made the driver open this GPU
        error hang errors/<function> hangs/<function>           as above, for calls about this GPU
        stubborn/<attribute>                     setters report success and change nothing
        uuid name pci minor total reserved used  and so on, see ``HEALTHY`` in gpu.py
        retired_pages/<cause> fields/<id>[.<scope>] nvlink/<link> clock_offsets/<type>.<pstate> api_restriction/<type>
        topology/<m>                             where it meets GPU <m>: a level of NVML's; else by numa_node
        processes/<list>                         lines ``PID BYTES [GI CI]``; lists: compute graphics mps
        processes/<list>.d/<pid>                 ``BYTES [GI CI]``, counts while a process holds a lock on it
        events                                   lines ``TYPE DATA [GI CI]``, appended
        mig/<i>/                                 an instance: uuid gi ci name total reserved used …
        memory mig/<i>/memory                    the bytes: ``total - reserved`` of them
        report_is_empty report_is_stale          attestation reports without content, or for an old nonce
        reset resets                             outcome of the next resets (``fail``, ``hang``); past resets
"""

from __future__ import annotations

import os
import shutil
import stat
import sys
import uuid as uuids
from collections.abc import Iterator
from pathlib import Path

from scrubber.adapters.nvidia.driver_paths import DriverPaths
from tests.nvidia.build import LIBRARY, library
from tests.nvidia.gpu import HEALTHY, MIB, NAMES, Gpu, Instance, Subject, known, write

__all__ = ["MIB", "Gpu", "Instance", "Machine", "Subject"]

_LIBRARIES = "usr/lib/x86_64-linux-gnu"
_SMI = Path(__file__).with_name("nvidia_smi.py")


class Machine:
    """A node with NVIDIA GPUs, as far as the stand-ins and the code under test need it. Close it after use."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._terminals: list[int] = []

    @classmethod
    def create(
        cls, root: Path, *, gpus: int = 2, mebibytes: int = 16, reserved_mebibytes: int = 2, driver: str = "580.65.06"
    ) -> Machine:
        """Create a healthy node in ``root`` with ``gpus`` idle GPUs of ``mebibytes`` each."""
        machine = cls(root)
        machine._install()
        machine.set("driver_version", driver)
        machine.set("nvml_version", f"13.{driver}")
        machine.set("cuda_version", 13000)
        for _ in range(gpus):
            machine.add_gpu(mebibytes=mebibytes, reserved_mebibytes=reserved_mebibytes)
        return machine

    def __enter__(self) -> Machine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the device nodes; the files stay."""
        for terminal in self._terminals:
            os.close(terminal)
        self._terminals.clear()

    # --- paths

    @property
    def library_directory(self) -> Path:
        return self.root / _LIBRARIES

    @property
    def environment(self) -> dict[str, str]:
        """The environment of a process whose loader should find the stand-in library, and no other."""
        return {"LD_LIBRARY_PATH": str(self.library_directory)}

    @property
    def places(self) -> DriverPaths:
        """The paths of this machine, as the code under test is given the driver's paths."""
        return DriverPaths(
            driver_root=self.root,
            dev=self.root / "dev",
            proc_driver=self.root / "proc/driver/nvidia",
            sys=self.root / "sys",
            run=self.root / "run",
        )

    @property
    def nvidia_smi(self) -> Path:
        return self.root / "usr/bin/nvidia-smi"

    @property
    def gpus(self) -> tuple[Gpu, ...]:
        directory = self.root / "state/gpus"
        return tuple(Gpu(self, number) for number in sorted(int(each.name) for each in directory.glob("[0-9]*")))

    def subjects(self) -> Iterator[tuple[Gpu, Subject]]:
        """Yield every GPU and every instance, each with its GPU."""
        for gpu in self.gpus:
            yield gpu, gpu
            for instance in gpu.instances:
                yield gpu, instance

    def find(self, uuid: str) -> tuple[Gpu, Subject]:
        return next((gpu, subject) for gpu, subject in self.subjects() if subject.uuid == uuid)

    # --- the node's attributes, and its faults

    def set(self, attribute: str, value: str | int) -> None:
        write(self.root / "state/node" / attribute, f"{value}\n")

    def unset(self, attribute: str) -> None:
        (self.root / "state/node" / attribute).unlink(missing_ok=True)

    def enter_confidential_mode(self) -> None:
        """Put all GPUs into the confidential-computing mode; as after a boot they are not ready."""
        self.set("confidential", 1)
        self.set("gpus_ready", 0)

    @property
    def gpus_ready(self) -> bool:
        return (self.root / "state/node/gpus_ready").read_text().strip() == "1"

    def fail(self, function: str, code: int) -> None:
        """Make ``function``, which is about no GPU, return ``code``."""
        self.set(f"errors/{known(function)}", code)

    def init_error(self, code: int) -> None:
        """Make the initialisation of NVML fail; processes that have initialised it get ``code`` from now on."""
        self.set("init_error", code)

    def remove_driver(self) -> None:
        """Unload the kernel module: its files in ``/proc`` disappear."""
        self.init_error(9)
        source, kept = self._module_files
        if source.exists():
            source.rename(kept)

    def mismatch(self) -> None:
        """Make the library's version differ from the kernel module's: the driver was updated and not reloaded."""
        self.init_error(18)

    def bring_driver_back(self) -> None:
        """Load the module, newly if it was removed; all other faults of it are removed."""
        source, kept = self._module_files
        if kept.exists():
            shutil.copytree(kept, source)  # new files, as after every loading
            shutil.rmtree(kept)
        self.unset("init_error")

    @property
    def _module_files(self) -> tuple[Path, Path]:
        return self.root / "proc/driver/nvidia", self.root / "state/unloaded"

    def age(self, *functions: str) -> None:
        """Simulate an older driver, without ``functions``."""
        for function in functions:
            self.set(f"missing/{known(function)}", "")

    # --- adding and removing GPUs

    def add_gpu(self, *, mebibytes: int = 16, reserved_mebibytes: int = 2) -> Gpu:
        """Add a GPU at the highest PCI address. Processes see it after their next initialisation of NVML."""
        number = max((gpu.index for gpu in self.gpus), default=-1) + 1
        gpu = Gpu(self, number)
        for attribute, value in HEALTHY.items():
            gpu.set(attribute, value)
        gpu.set("serial", f"{1652023000000 + number}")
        gpu.set("minor", number)
        gpu.set("numa_node", number % 2)
        gpu.set("total", mebibytes * MIB)
        gpu.set("reserved", reserved_mebibytes * MIB)
        gpu.set("events", "")
        (gpu.directory / "events").write_text("")
        gpu._make_memory()
        gpu.set("pci", f"00000000:{0x1B + 0x20 * number:02X}:00.0")
        gpu.set("uuid", f"GPU-{uuids.uuid5(NAMES, str(number))}")
        self._make_node(f"nvidia{number}")
        self._describe_to_the_kernel(gpu)
        return gpu

    def remove_gpu(self, gpu: Gpu) -> None:
        """Remove a GPU: from the PCI bus, from ``/proc``, from ``/dev``, and for processes that had it open."""
        shutil.rmtree(gpu.pci_device)
        shutil.rmtree(self.root / "proc/driver/nvidia/gpus" / gpu.pci_address)
        gpu.node.unlink()
        gone = self.root / "state" / "gone" / str(gpu.index)
        gone.parent.mkdir(exist_ok=True)
        gpu.directory.rename(gone)

    # --- creation

    def _install(self) -> None:
        self.library_directory.mkdir(parents=True)
        (self.library_directory / LIBRARY).write_bytes(library())
        self.nvidia_smi.parent.mkdir(parents=True)
        script = _SMI.read_text().split("\n", 1)[1]
        self.nvidia_smi.write_text(f"#!{sys.executable} -IS\n{script}")
        self.nvidia_smi.chmod(self.nvidia_smi.stat().st_mode | stat.S_IXUSR | stat.S_IXGRP | stat.S_IXOTH)
        (self.root / "state/gpus").mkdir(parents=True)
        (self.root / "run").mkdir()
        (self.root / "sys/bus/pci/devices").mkdir(parents=True)
        for name in ("nvidia", "vfio-pci"):
            (self.root / "sys/bus/pci/drivers" / name).mkdir(parents=True)
        for name in ("nvidiactl", "nvidia-uvm", "nvidia-uvm-tools", "nvidia-modeset"):
            self._make_node(name)
        self._make_node("nvidia-caps/nvidia-cap1")
        self._make_node("nvidia-caps/nvidia-cap2")
        source = self.root / "proc/driver/nvidia"
        write(source / "version", "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build\n")
        self.set_parameters("")
        self.write_mig_minors()

    def set_parameters(self, registry: str) -> None:
        """Set the options with which the kernel module was loaded, for example ``RMDisableScrubOnFree=1``."""
        write(
            self.root / "proc/driver/nvidia/params",
            f'ResmanDebugLevel: 4294967295\nModifyDeviceFiles: 1\nRegistryDwords: "{registry}"\n',
        )

    def _make_node(self, name: str) -> None:
        """Create a character device that any user may open, with a number that is not open elsewhere on this machine.

        It is a terminal whose other end this process keeps, so open it with ``O_NOCTTY``.
        """
        ours, theirs = os.openpty()
        self._terminals.append(ours)
        node = self.root / "dev" / name
        node.parent.mkdir(parents=True, exist_ok=True)
        node.symlink_to(os.ttyname(theirs))
        os.close(theirs)

    def _describe_to_the_kernel(self, gpu: Gpu) -> None:
        for name, text in {
            "vendor": "0x10de",
            "device": "0x2335",
            "class": "0x030200",
            "numa_node": gpu.text("numa_node"),
            "reset": "",
            "reset_method": "flr bus",
        }.items():
            write(gpu.pci_device / name, f"{text}\n")
        (gpu.pci_device / "driver").symlink_to("../../drivers/nvidia")
        write(
            self.root / "proc/driver/nvidia/gpus" / gpu.pci_address / "information",
            f"Model: \t\t {gpu.text('name')}\nGPU UUID: \t {gpu.uuid}\nBus Location: \t {gpu.pci_address}\n"
            f"Device Minor: \t {gpu.text('minor')}\n",
        )

    def write_mig_minors(self) -> None:
        """Record which capability node belongs to which instance; create the new nodes."""
        lines, minor = ["config 1", "monitor 2"], 3
        for gpu in self.gpus:
            for instance in gpu.instances:
                gi, ci = instance.ids
                prefix = f"gpu{gpu.text('minor')}/gi{gi}"
                for below in ("access", f"ci{ci}/access"):
                    lines.append(f"{prefix}/{below} {minor}")
                    if not (self.root / f"dev/nvidia-caps/nvidia-cap{minor}").is_symlink():
                        self._make_node(f"nvidia-caps/nvidia-cap{minor}")
                    minor += 1
        write(self.root / "proc/driver/nvidia-caps/mig-minors", "\n".join(lines) + "\n")
