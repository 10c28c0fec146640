"""A stand-in for slurmd: it runs prolog and epilog as slurmd does, and keeps the steps of jobs in cgroups as slurmstepd does.

Where cgroups cannot be written, the steps have the marker of the emulated kubelet's containers instead.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from scrubber.adapters.cgroups.environment_marker import CONTAINER_MARKER, POD_MARKER
from scrubber.emulator.playground import CompletedCommand, Playground, start_module

__all__ = ["SlurmJob", "Slurmd", "Step"]

_ENTER = 'echo 0 > "$1/cgroup.procs"; shift; exec "$@"'
_TENANT = """
import pathlib, sys, time
with pathlib.Path(sys.argv[1]).open("r+b") as device:
    found = device.read(1 << 20).strip(b"\\0")
    device.seek(0)
    device.write(sys.argv[2].encode())
    device.flush()
    print(found.decode() or "clean", flush=True)
    time.sleep(3600)
"""


@dataclass(frozen=True, slots=True)
class SlurmJob:
    """A job with the numbers of its GPUs, as Slurm writes them; empty for a job without GPUs."""

    id: int
    user: str
    gpus: str = "0"

    @property
    def environment(self) -> Mapping[str, str]:
        """The environment of prolog and epilog; it has no PATH."""
        found = {"SLURM_JOB_ID": str(self.id), "SLURM_JOB_UID": "1000", "SLURM_JOB_USER": self.user}
        return {**found, "SLURM_JOB_GPUS": self.gpus} if self.gpus else found


@dataclass(slots=True)
class Step:
    """A step of a job that has a device open and has written to it.

    Attributes:
        found: what it read before that; ``clean`` for nothing but zeros.
    """

    process: asyncio.subprocess.Process
    found: str

    async def kill(self) -> None:
        if self.process.returncode is None:
            self.process.kill()
        await self.process.wait()


@dataclass(slots=True)
class Slurmd:
    stage: Playground
    steps: list[Step] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.scope is not None:
            (self.scope / "system").mkdir(parents=True)

    @property
    def scope(self) -> Path | None:
        root = self.stage.cgroup_parent
        return None if root is None else root / "system.slice" / "slurmstepd.scope"

    async def start_prolog(self, job: SlurmJob, *options: str) -> asyncio.subprocess.Process:
        return await self._start("prolog", job, options)

    async def prolog(self, job: SlurmJob, *options: str) -> CompletedCommand:
        return await _completed(await self.start_prolog(job, *options))

    async def epilog(self, job: SlurmJob, *options: str) -> CompletedCommand:
        return await _completed(await self._start("epilog", job, options))

    async def step(self, job: SlurmJob, device: int = 0, name: str = "step_0") -> Step:
        """Start a step that reads the device, and writes the name of its user to it."""
        memory = self.stage.sim_dir / "devices" / str(device) / "memory"
        tenant = [sys.executable, "-S", "-c", _TENANT, str(memory), f"secret of {job.user}"]
        environment = dict(os.environ)
        if self.scope is None:
            environment |= {POD_MARKER: f"slurm-job-{job.id}", CONTAINER_MARKER: name}
            command = tenant
        else:
            cgroup = self.scope / f"job_{job.id}" / name / "user" / "task_0"
            cgroup.mkdir(parents=True, exist_ok=True)
            command = ["/bin/sh", "-ec", _ENTER, "enter", str(cgroup), *tenant]
        process = await asyncio.create_subprocess_exec(
            *command, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, env=environment
        )
        assert process.stdout is not None
        step = Step(process, (await process.stdout.readline()).decode().strip())
        self.steps.append(step)
        return step

    async def end(self, job: SlurmJob) -> None:
        """Kill the steps of every job, and remove the cgroup of ``job``, as slurmd does before the epilog."""
        for each in self.steps:
            await each.kill()
        self._remove(job)

    def _remove(self, job: SlurmJob) -> None:
        if self.scope is not None:
            _remove_tree(self.scope / f"job_{job.id}")

    async def close(self) -> None:
        for each in self.steps:
            await each.kill()
        if self.scope is not None:
            _remove_tree(self.scope.parent)

    async def _start(self, command: str, job: SlurmJob, options: Sequence[str]) -> asyncio.subprocess.Process:
        return await start_module(
            "scrubber.cli.main",
            *(command, "--socket-dir", str(self.stage.socket_dir), *options),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=dict(job.environment),
        )


async def _completed(process: asyncio.subprocess.Process) -> CompletedCommand:
    out, err = await process.communicate()
    return CompletedCommand(process.returncode or 0, out.decode(), err.decode())


def _remove_tree(top: Path) -> None:
    """Remove cgroups that have no process; the kernel releases one shortly after the end of its last process."""
    while top.exists():
        for each in sorted((top, *(path for path in top.rglob("*") if path.is_dir())), reverse=True):
            with suppress(OSError):
                each.rmdir()
