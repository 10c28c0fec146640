#!/usr/bin/env python3
"""A stand-in for ``nvidia-smi``: resets one GPU of its machine, switches persistence mode, and answers simple queries.

It refuses as the real one does: while any process has the device open or memory on it, while persistence mode keeps it
open, and when the GPU is lost. The exit statuses are those of its manual. A reset clears no memory.

It is installed into a machine with the interpreter's path in its first line; it imports only the standard library.
"""

import fcntl
import os
import shutil
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

WORLD = Path(__file__).absolute().parents[2]
GPUS = WORLD / "state" / "gpus"
USAGE, NOT_FOUND, LOST, DRIVER_NOT_LOADED, OTHER = 2, 6, 15, 9, 255

AFTER_A_RESET = {
    "compute_mode": "0",
    "gpu_locked_clocks": "none",
    "memory_locked_clocks": "none",
    "ecc_corrected_volatile": "0",
    "ecc_uncorrected_volatile": "0",
    "remapped_rows_pending": "0",
    "retired_pages_pending": "0",
    "clocks_event_reasons": "0x1",
    "accounting_mode": "0",
    "accounting_pids": "",
    "fields/230": "0",
}
"""What the driver forgets in a reset; an attribute that the GPU does not have is not created."""

TAKEN_OVER = {
    "ecc_mode": "ecc_mode_pending",
    "mig_mode": "mig_mode_pending",
    "application_clocks": "application_clocks_default",
    "power_limit": "power_limit_default",
    "auto_boost": "auto_boost_default",
}
"""Pending values become current, and changed values return to their defaults."""


def get(gpu: Path, attribute: str) -> str | None:
    path = gpu / attribute
    return path.read_text().strip() if path.is_file() else None


def put(gpu: Path, attribute: str, value: str) -> None:
    path = gpu / attribute
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    fresh.write_text(f"{value}\n")
    fresh.replace(path)


def everyone() -> list[Path]:
    """Return the GPUs in the order of their addresses."""
    found = [gpu for gpu in GPUS.glob("[0-9]*") if get(gpu, "pci")]
    return sorted(found, key=lambda gpu: str(get(gpu, "pci")))


def find(requested: str) -> Path | None:
    """Find a GPU by index, UUID or PCI address."""
    for index, gpu in enumerate(everyone()):
        pci = str(get(gpu, "pci")).lower()
        if requested in (str(index), get(gpu, "uuid")) or requested.lower() in (pci, pci[4:]):
            return gpu
    return None


def openers(node: Path) -> Iterator[int]:
    """Yield the PIDs that have the device open, under any name."""
    requested = node.stat().st_rdev
    for process in Path("/proc").glob("[0-9]*"):
        for descriptor in (process / "fd").glob("*"):
            try:
                if descriptor.stat().st_rdev == requested:
                    yield int(process.name)
                    break
            except OSError:
                continue


def lives(entry: Path) -> bool:
    """Return whether the process that created ``entry`` still holds its lock on it."""
    with entry.open() as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def listed(gpu: Path) -> Iterator[int]:
    """Yield the PIDs of living processes with memory on the GPU."""
    for name in ("compute", "graphics", "mps"):
        lines = (get(gpu, f"processes/{name}") or "").splitlines()
        yield from (int(line.split()[0]) for line in lines if Path(f"/proc/{line.split()[0]}").exists())
        yield from (int(entry.name) for entry in (gpu / "processes" / f"{name}.d").glob("[0-9]*") if lives(entry))


def refuse(status: int, *lines: str) -> int:
    print(*lines, sep="\n")
    return status


def blocked(gpu: Path, pci: str) -> bool:
    node = WORLD / "dev" / f"nvidia{get(gpu, 'minor')}"
    if not any(openers(node)) and not any(listed(gpu)) and get(gpu, "persistence_mode") != "1":
        return False
    print(
        "The following GPUs could not be reset:",
        f"  GPU {pci}: In use by another client",
        "",
        "1 device is currently being used by one or more other processes (e.g., Fabric Manager, CUDA application,",
        "graphics application such as an X server, or a monitoring application such as another instance of",
        "nvidia-smi). Please first kill all processes using this device and all compute applications running in",
        "the system.",
        sep="\n",
    )
    return True


def forget(gpu: Path) -> None:
    """Reset the driver's state: conditions, volatile settings and dead processes are removed; memory stays."""
    for attribute, value in AFTER_A_RESET.items():
        if get(gpu, attribute) is not None:
            put(gpu, attribute, value)
    for attribute, source in TAKEN_OVER.items():
        value_then = get(gpu, source)
        if value_then is not None and get(gpu, attribute) is not None:
            put(gpu, attribute, value_then)
    for offset in (gpu / "clock_offsets").glob("[0-9]*"):
        put(gpu, f"clock_offsets/{offset.name}", "0 " + offset.read_text().split(" ", 1)[1].strip())
    for name in ("compute", "graphics", "mps"):
        (gpu / "processes" / name).unlink(missing_ok=True)
    shutil.rmtree(gpu / "mig", ignore_errors=True)  # MIG mode stays, the instances do not
    if get(gpu, "used") is not None:
        put(gpu, "used", "0")  # memory without a holder
    if get(gpu, "error") == "16":
        (gpu / "error").unlink()


def reset(requested: str, method: str) -> int:
    gpu = find(requested)
    if gpu is None:
        return refuse(NOT_FOUND, "No devices were found")
    pci = str(get(gpu, "pci"))
    how = get(gpu, "reset")
    if how == "hang" or (gpu / "hang").exists():
        while True:
            signal.pause()
    if get(gpu, "error") == "15":
        return refuse(
            LOST,
            f"Unable to determine the device handle for GPU {pci}: GPU is lost.  Reboot the system to recover this GPU",
        )
    if blocked(gpu, pci):
        return OTHER
    if how == "fail":
        return refuse(OTHER, f"GPU Reset couldn't run because GPU {pci} could not be reset: Unknown Error")
    forget(gpu)
    with (gpu / "resets").open("a") as record:
        record.write(f"{os.getpid()} {method}\n")
    print(f"GPU {pci} was successfully reset.", "All done.", sep="\n")
    return 0


def set_persistence(requested: str | None, mode: str) -> int:
    chosen = everyone() if requested is None else [gpu for gpu in (find(requested),) if gpu is not None]
    if not chosen or mode not in ("0", "1"):
        return refuse(NOT_FOUND if mode in ("0", "1") else USAGE, "No devices were found")
    for gpu in chosen:
        put(gpu, "persistence_mode", mode)
        print(f"{'Enabled' if mode == '1' else 'Disabled'} persistence mode for GPU {get(gpu, 'pci')}.")
    print("All done.")
    return 0


QUERIES = {
    "uuid": "uuid",
    "gpu_uuid": "uuid",
    "name": "name",
    "gpu_name": "name",
    "pci.bus_id": "pci",
    "memory.total": "total",
    "memory.reserved": "reserved",
    "memory.used": "used",
    "serial": "serial",
    "vbios_version": "vbios",
    "temperature.gpu": "temperature",
    "minor_number": "minor",
}


def query(fields: list[str], requested: str | None) -> int:
    """Print one line for each GPU, comma-separated, without a header: enough to compare with other sources."""
    for index, gpu in enumerate(everyone()):
        if requested is not None and find(requested) != gpu:
            continue
        row = []
        for field in fields:
            if field in ("index", "driver_version"):
                value = str(index) if field == "index" else get(WORLD / "state" / "node", "driver_version")
            elif field in QUERIES:
                value = get(gpu, QUERIES[field])
                if field.startswith("memory.") and value is not None:
                    value = f"{int(value) >> 20} MiB"
            else:
                return refuse(USAGE, f'Field "{field}" is not a valid field to query.')
            row.append("[N/A]" if value is None else value)
        print(", ".join(row))
    return 0


def main(words: list[str]) -> int:
    target: str | None = None
    act: str | None = None
    argument = ""
    while words:
        word, _, value = words.pop(0).partition("=")
        if word in ("-i", "--id") and (value or words):
            target = value or words.pop(0)
        elif word in ("-r", "--gpu-reset"):
            act = "reset"
            argument = value or (words.pop(0) if words and words[0] == "bus" else argument)
        elif word in ("-pm", "--persistence-mode") and (value or words):
            act, argument = "persistence", value or words.pop(0)
        elif word == "--query-gpu":
            act, argument = "query", value
        elif word != "--format":
            return refuse(
                USAGE, f"Invalid combination of input arguments: {word}. Please run 'nvidia-smi -h' for help."
            )
    if (WORLD / "state" / "node" / "init_error").exists():
        return refuse(
            DRIVER_NOT_LOADED,
            "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver. Make sure that the latest "
            "NVIDIA driver is installed and running.",
        )
    if act == "reset" and target is not None:
        return reset(target, argument or "function-level")
    if act == "persistence":
        return set_persistence(target, argument)
    if act == "query":
        return query(argument.split(","), target)
    return refuse(USAGE, "Invalid combination of input arguments. Please run 'nvidia-smi -h' for help.")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
