"""Description of the benchmark machine: enough to judge the figures, without identifying it or its owner."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from pathlib import Path

import grpc

__all__ = ["Machine", "describe_machine"]


@dataclass(frozen=True, slots=True)
class Machine:
    """``cores`` are those available to this process; ``load`` is the one-minute average before the benchmark."""

    cpu: str
    cores: int
    memory_gib: float
    kernel: str
    python: str
    grpc: str
    load: float


def describe_machine() -> Machine:
    """Return the description of the machine that this process runs on."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return Machine(
        cpu=_cpu(),
        cores=len(os.sched_getaffinity(0)),
        memory_gib=round(memory, 1),
        kernel=f"{platform.system()} {platform.release().partition('-')[0]}",
        python=f"{platform.python_implementation()} {platform.python_version()}",
        grpc=grpc.__version__,
        load=round(os.getloadavg()[0], 2),
    )


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
    except OSError:
        lines = []
    for line in lines:
        key, _, value = line.partition(":")
        if key.strip() in ("model name", "Model"):
            return value.strip()
    return platform.machine()
