"""The real ``scrubber`` command on a simulated machine.

``python -m tests.nvidia.service MACHINE serve --backend nvidia …``

Only two things are replaced in this process: all paths of the driver are in the machine (the command line can only set
its root), and the CUDA children import the stand-in for CuPy. A missing machine is created, with two GPUs, and its device
nodes live as long as the command; an existing one belongs to the test that created it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from pathlib import Path
from typing import Any

from scrubber.adapters.nvidia import backend
from scrubber.adapters.nvidia.backend import nvidia_backend
from scrubber.adapters.nvidia.driver_paths import DriverPaths
from scrubber.cli.main import main
from scrubber.ports.device import DeviceBackend
from tests.nvidia.machine import Machine

__all__ = ["cuda_environment", "run"]

_ROOT = Path(__file__).parents[2]
_STANDIN = Path(__file__).with_name("standin")


def cuda_environment(machine: Path) -> Mapping[str, str]:
    """Return the environment in which a program imports the stand-in for CuPy, and computes in ``machine``."""
    return {"PYTHONPATH": f"{_STANDIN}:{_ROOT}", "SCRUBBER_STANDIN_WORLD": str(machine), "PATH": os.defpath}


def run(root: Path, arguments: Sequence[str]) -> None:
    """Run ``scrubber ARGUMENTS`` over the machine in ``root``; exits as the command does."""
    machine = Machine(root)

    def over_the_machine(_: DriverPaths, state: Path, **more: Any) -> AbstractAsyncContextManager[DeviceBackend]:
        return nvidia_backend(machine.places, state, environment=cuda_environment(root), **more)

    vars(backend)["nvidia_backend"] = over_the_machine
    where = ("--nvidia-driver-root", str(root)) if arguments[:1] == ["serve"] else ()
    with nullcontext() if (root / "state").is_dir() else Machine.create(root, mebibytes=48):
        main([*arguments, *where])


if __name__ == "__main__":
    run(Path(sys.argv[1]).absolute(), sys.argv[2:])
