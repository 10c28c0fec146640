"""The ``scrubber`` command with one more backend: a machine of GPUs, and devices that a program manages, in one service.

``python -m tests.integration.two_resources MACHINE CONFIG serve --backend both …``
"""

from __future__ import annotations

import os
import sys
from contextlib import AbstractAsyncContextManager
from pathlib import Path

from scrubber import backends
from scrubber.adapters.command.backend import command_backend
from scrubber.adapters.nvidia.backend import nvidia_backend
from scrubber.backends import BACKENDS, Backend, BackendContext
from scrubber.composite_backend import composite_backend
from scrubber.config.command_file import CommandFileSource
from scrubber.ports.device import DeviceBackend
from tests.nvidia.machine import Machine
from tests.nvidia.service import cuda_environment

__all__: list[str] = []


def run(machine: Path, config: Path, arguments: list[str]) -> None:
    """Run ``scrubber ARGUMENTS`` with the backend ``both``; exits as the command does."""

    def both(context: BackendContext) -> AbstractAsyncContextManager[DeviceBackend]:
        gpus = nvidia_backend(
            Machine(machine).places,
            context.settings.state_dir,
            node=context.settings.node_name,
            driver_call_timeout=context.driver_call_timeout,
            infrastructure=context.infrastructure,
            environment=cuda_environment(machine),
        )
        managed = command_backend(
            CommandFileSource(config),
            context.settings.state_dir / "locks",
            node=context.settings.node_name,
            infrastructure=context.infrastructure,
            owner=os.geteuid(),
        )
        return composite_backend({"nvidia": gpus, "command": managed})

    row = Backend(
        name="both",
        summary="GPUs and devices of a program",
        signal_table=BACKENDS["nvidia"].signal_table,
        check_settings=lambda _: None,
        open=both,
    )
    vars(backends)["BACKENDS"] = {**BACKENDS, row.name: row}
    from scrubber.cli.main import main

    main(arguments)


if __name__ == "__main__":
    run(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:])
