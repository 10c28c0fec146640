"""The real ``scrubber`` command on a world of stand-ins: ``python -m tests.nvidia.service WORLD serve --backend nvidia …``.

Two things are exchanged in this process, and nothing else: where the driver keeps its files, which the service can be told
of its libraries only, and the environment of the CUDA children, which import the stand-in for CuPy. A world that is not
there is made, with two GPUs, and lives as long as the command; one that a test has made is the test's.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from pathlib import Path
from typing import Any

from scrubber import backends, daemon
from scrubber.adapters.nvidia.places import Places
from scrubber.cli.main import main
from tests.nvidia.world import World

__all__ = ["CUDA_ENVIRONMENT", "cuda_environment", "run"]

CUDA_ENVIRONMENT = "SCRUBBER_STANDIN_WORLD"

_ROOT = Path(__file__).parents[2]
_STANDIN = Path(__file__).with_name("standin")


def cuda_environment(world: Path) -> Mapping[str, str]:
    """What has a program import the stand-in for CuPy, and compute in ``world``."""
    return {"PYTHONPATH": f"{_STANDIN}:{_ROOT}", CUDA_ENVIRONMENT: str(world), "PATH": os.defpath}


def run(root: Path, arguments: Sequence[str]) -> None:
    """``scrubber ARGUMENTS`` over the world in ``root``; exits as the command does."""
    world = World(root)

    def over_the_world(_: Places, state: Path, **more: Any) -> AbstractAsyncContextManager[backends.DeviceBackend]:
        return backends.nvidia_backend(world.places, state, environment=cuda_environment(root), **more)

    vars(daemon)["nvidia_backend"] = over_the_world
    with nullcontext() if (root / "state").is_dir() else World.create(root, mebibytes=48):
        main([*arguments, *(("--nvidia-driver-root", str(root)) if "serve" in arguments[:1] else ())])


if __name__ == "__main__":
    run(Path(sys.argv[1]).absolute(), sys.argv[2:])
