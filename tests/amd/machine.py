"""A node with AMD GPUs in a directory: ``sys``, ``dev`` and ``opt/rocm`` as the backend reads them, with plain files.

Below the root:

    sys/bus/pci/devices/<address>/    a GPU's attributes; sys/bus/pci/drivers/amdgpu/{bind,unbind}
    sys/class/drm, sys/devices/platform/amdgpu_xcp_<n>    render nodes, and partitions beyond the first
    sys/class/kfd/kfd/                topology, and the processes with a compute context
    dev/kfd, dev/dri/                 device nodes (links to otherwise unused terminals)
    standin/devices/<name>/           memory and identity of each device, for the library in opt/rocm/lib
"""

from __future__ import annotations

import os
import shutil
import struct
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from types import TracebackType
from typing import Self

__all__ = ["MIB", "AmdMachine", "Part", "hip_library"]

MIB = 1 << 20
_SOURCE = Path(__file__).with_name("hip.c")
_ROOT = Path(__file__).parents[2]
_SOURCES = {"KERNELS": _ROOT / "scrubber/adapters/amd/kernels.c", "ATTACKS": _ROOT / "tests/gpu/amd/attacks.c"}
_FLAGS = ("-std=gnu11", "-O2", "-shared", "-fPIC", "-Wall", "-Wextra", "-Wno-unused-parameter", "-Werror")
_HOLDER = (
    "import os, sys, time; os.open(sys.argv[1], os.O_RDWR | os.O_NOCTTY); print('ready', flush=True); time.sleep(600)"
)
_BASELINE = 10 * MIB
_RECORD_BYTES = 128 + 72


@cache
def hip_library() -> Path:
    """Return the library in the place of HIP, compiled once for this process."""
    library = Path(mkdtemp(prefix="hip-")) / "libamdhip64.so.7"
    sources = [f'-D{name}="{path}"' for name, path in _SOURCES.items()]
    subprocess.run(["gcc", *_FLAGS, *sources, "-o", str(library), str(_SOURCE), "-ldl"], check=True)
    return library


@dataclass(frozen=True, slots=True)
class Part:
    """A whole GPU or a partition: what the tests change."""

    name: str
    gpu_id: int
    gpu: Path
    memory: Path
    node: Path
    card: Path


class AmdMachine:
    """A machine; close it after use."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.parts: dict[str, Part] = {}
        self._terminals: list[int] = []

    @classmethod
    def create(
        cls,
        root: Path,
        *,
        gpus: int = 2,
        partitions: int = 1,
        mebibytes: int = 16,
        architecture: int = 90402,
        hive: int = 0,
        tidy: bool = False,
    ) -> Self:
        """Create a healthy node.

        Args:
            partitions: partitions of each GPU, which share its memory equally.
            architecture: the version in the topology; 90402 is gfx942.
            hive: number of the hive that all GPUs belong to; 0: none.
            tidy: whether the memory of a killed process is freed, as the driver does, and its entry removed.
        """
        machine = cls(root)
        write(root / "sys/module/amdgpu/version", "6.10.5")
        for name in ("bind", "unbind"):
            write(root / "sys/bus/pci/drivers/amdgpu" / name, "")
        write(root / "sys/class/kfd/kfd/topology/nodes/0/gpu_id", "0")
        (root / "sys/class/kfd/kfd/proc").mkdir(parents=True)
        write(root / "sys/class/kfd/kfd/dev", machine._make_node("kfd"))
        for number in range(gpus):
            machine._make_gpu(number, partitions, mebibytes * MIB, architecture, hive)
        library = root / "opt/rocm/lib/libamdhip64.so.7"
        library.parent.mkdir(parents=True)
        shutil.copy(hip_library(), library)
        if tidy:
            write(root / "standin/outlives", "")
        return machine

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the device nodes; the files stay."""
        for terminal in self._terminals:
            os.close(terminal)
        self._terminals.clear()

    # --- changes as processes, drivers and faults make them

    def remove_driver(self) -> None:
        shutil.rmtree(self.root / "sys/module/amdgpu")

    def kfd_process(self, pid: int) -> Path:
        """Return the directory of a process in the compute driver's list."""
        return self.root / "sys/class/kfd/kfd/proc" / str(pid)

    def remove_ended_processes(self) -> None:
        """Remove processes that have ended from the compute driver's list, as the driver does by itself."""
        for entry in (self.root / "sys/class/kfd/kfd/proc").iterdir():
            if not Path("/proc", entry.name).exists():
                shutil.rmtree(entry)

    @contextmanager
    def hold(self, part: Part, *, computes: bool = True, node: Path | None = None) -> Iterator[int]:
        """Run a process that has a node of ``part`` open, and yield its PID.

        Args:
            computes: whether it has a compute context too.
            node: the node that it opens; None: the render node.
        """
        command = [sys.executable, "-c", _HOLDER, str(node or part.node)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            entry = self.kfd_process(process.pid)
            if computes:
                write(entry / f"vram_{part.gpu_id}", str(MIB))
            try:
                yield process.pid
            finally:
                process.kill()
                process.wait()
                shutil.rmtree(entry, ignore_errors=True)

    def add_errors(self, part: Part, block: str, errors: int, kind: str = "ue") -> None:
        file = part.gpu / "ras" / f"{block}_err_count"
        counts = dict(line.split(": ") for line in file.read_text().splitlines())
        counts[kind] = str(int(counts[kind]) + errors)
        write(file, "".join(f"{name}: {count}\n" for name, count in counts.items()))

    def add_record(
        self,
        part: Part,
        severity: int,
        *,
        number: int = 1,
        second: int = 0,
        section_flags: int = 0,
        keep: int | None = None,
    ) -> None:
        """Append a hardware error record to the driver's ring; of one that was overwritten, only the last ``keep`` bytes.

        Args:
            number: the record's ID: the driver counts them from 1 whenever it is bound.
            second: the second in the record's timestamp.
        """
        header = struct.pack(
            "<4sHIHIIIB7x64x8s24x",
            *(b"CPER", 0x100, 0xFFFFFFFF, 1, severity, 3, _RECORD_BYTES),
            *(second, f"0:{number:X}".encode()),
        )
        record = header + struct.pack("<12xI56x", section_flags)
        ring = self.error_records(part)
        ring.parent.mkdir(parents=True, exist_ok=True)
        before = ring.read_bytes() if ring.exists() else bytes(12)
        ring.write_bytes(before + (record if keep is None else record[-keep:]))

    def overwrite_records(self, part: Part, records: int) -> None:
        """Let the driver's ring lose its oldest ``records``."""
        ring = self.error_records(part)
        content = ring.read_bytes()
        ring.write_bytes(content[:12] + content[12 + records * _RECORD_BYTES :])

    def error_records(self, part: Part) -> Path:
        """Return the file with the driver's ring of hardware error records."""
        return self.root / "sys/kernel/debug/dri" / part.card.name.removeprefix("card") / "amdgpu_ring_cper"

    def lose(self, part: Part) -> None:
        """Let the GPU fall off the bus."""
        (part.gpu / "config").write_bytes(b"\xff" * 64)

    def hang(self, part: Part) -> None:
        """Make the files of the GPU block that report its errors and that reset it."""
        for file in (part.gpu / "ras/umc_err_count", part.gpu / "reset"):
            file.unlink()
            os.mkfifo(file)

    def fail_resets(self, part: Part) -> None:
        (part.gpu / "reset").unlink()
        (part.gpu / "reset").symlink_to("/dev/full")

    # --- how it is made

    def _make_gpu(self, number: int, partitions: int, memory: int, architecture: int, hive: int) -> None:
        address = f"0000:{0x0C + number:02x}:00.0"
        unique_id = f"{0x1B2C3D4E5F600000 + number:016x}"
        gpu = self.root / "sys/bus/pci/devices" / address
        gpu.mkdir(parents=True)
        (gpu / "driver").symlink_to("../../drivers/amdgpu")
        (gpu / "config").write_bytes(b"\x02\x10\xa1\x74" + bytes(60))
        mode = {1: "SPX", 2: "DPX", 4: "QPX", 8: "CPX"}[partitions]
        attributes = {
            "vendor": "0x1002",
            "class": "0x120000",
            "device": "0x74a1",
            "unique_id": unique_id,
            "product_name": "AMD Instinct MI300X",
            "serial_number": f"69230{number}",
            "vbios_version": "113-M3000100-102",
            "mem_info_vram_total": str(memory),
            "mem_info_vram_used": str(_BASELINE),
            "numa_node": str(number % 2),
            "current_compute_partition": mode,
            "current_memory_partition": "NPS1",
            "reset": "",
            "reset_method": "flr bus",
            "gfx_reset_mask": "full",
            "compute_reset_mask": "full",
            "current_link_width": "16",
            "max_link_width": "16",
            "gpu_busy_percent": "0",
            "power_dpm_force_performance_level": "auto",
            "enforce_isolation": " ".join(["0"] * partitions),
            "run_cleaner_shader": "",
            "hwmon/hwmon0/power1_cap": "750000000",
            "hwmon/hwmon0/power1_cap_default": "750000000",
            "hwmon/hwmon0/temp2_label": "junction",
            "hwmon/hwmon0/temp2_input": "41000",
            "ras/gpu_vram_bad_pages": "",
        }
        for name, value in attributes.items():
            write(gpu / name, value)
        for block in ("umc", "sdma", "gfx", "mmhub", "xgmi_wafl"):
            write(gpu / "ras" / f"{block}_err_count", "ue: 0\nce: 0\n")
        for partition in range(partitions):
            self._make_part(number, partition, partitions, gpu, unique_id, memory // partitions, architecture, hive)

    def _make_part(
        self,
        number: int,
        partition: int,
        partitions: int,
        gpu: Path,
        unique_id: str,
        memory: int,
        architecture: int,
        hive: int,
    ) -> None:
        position = len(self.parts)
        minor, card, gpu_id = 128 + position, 1 + position, 1000 + position
        device, name = gpu, gpu.name
        if partition:
            name = f"amdgpu_xcp_{position - number - 1}"
            device = self.root / "sys/devices/platform" / name
        render = self.root / "sys/class/drm" / f"renderD{minor}"
        write(render / "dev", self._make_node(f"dri/renderD{minor}"))
        (render / "device").symlink_to(os.path.relpath(device, render))
        write(device / f"drm/card{card}/dev", self._make_node(f"dri/card{card}"))
        node = self.root / "sys/class/kfd/kfd/topology/nodes" / str(position + 1)
        properties = {
            "simd_count": 4,
            "simd_per_cu": 4,
            "domain": 0,
            "location_id": (0x0C + number) << 8 | partition,
            "drm_render_minor": minor,
            "gfx_target_version": architecture,
            "hive_id": hive,
        }
        write(node / "gpu_id", str(gpu_id))
        write(node / "properties", "".join(f"{key} {value}\n" for key, value in properties.items()))
        write(node / "mem_banks/0/properties", f"heap_type 1\nsize_in_bytes {memory}\n")
        standin = self.root / "standin/devices" / name
        standin.mkdir(parents=True)
        (standin / "memory").write_bytes(bytes(memory))
        write(standin / "address", f"{gpu.name.removesuffix('0')}{partition}")
        write(standin / "gpu_id", str(gpu_id))
        (standin.parent / str(position)).symlink_to(name)
        if partitions == 1:
            (standin.parent / f"GPU-{unique_id}").symlink_to(name)
        dri = self.root / "dev/dri"
        self.parts[name] = Part(name, gpu_id, gpu, standin / "memory", dri / f"renderD{minor}", dri / f"card{card}")

    def _make_node(self, name: str) -> str:
        """Make a device node, and return its number as the kernel writes it.

        It is a terminal whose other end this process keeps, so open it with ``O_NOCTTY``.
        """
        ours, theirs = os.openpty()
        self._terminals.append(ours)
        node = self.root / "dev" / name
        node.parent.mkdir(parents=True, exist_ok=True)
        node.symlink_to(os.ttyname(theirs))
        number = os.fstat(theirs).st_rdev
        os.close(theirs)
        return f"{os.major(number)}:{os.minor(number)}"


def write(file: Path, text: str) -> None:
    """Write a file as the kernel shows it: with a line end, if it has a value."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text if text.endswith("\n") or not text else f"{text}\n")
