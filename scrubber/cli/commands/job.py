"""``scrubber prolog`` and ``epilog``: what slurmd runs before and after a job, so that its GPUs are clean.

Slurm's rules decide about the exit status: a prolog that fails drains the node and queues the job again, so it fails only if a
device must not be used; an epilog that fails drains the node, and nothing that it could report is a reason for that.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from scrubber.cli.client_run import retried, run, start_job
from scrubber.cli.options import JobDeviceOption, SocketOption, seconds
from scrubber.cli.render.output import print_note
from scrubber.domain.errors import InvalidConfiguration, ScrubberError

if TYPE_CHECKING:
    from scrubber.api import scrubber_pb2 as pb

__all__ = ["add_commands", "job_devices", "slurm_job"]

_EPILOG_SECONDS = 5.0
"""Seconds for which an epilog tries to reach the service: what it has to say is known to the next prolog, too."""
_MAX_RANGE = 1024
_NO_DEVICES = frozenset({"", "NoDevFiles", "-1"})
"""Values of ``CUDA_VISIBLE_DEVICES`` for a job without GPUs."""

PrologWaitOption = Annotated[
    float,
    typer.Option(
        "--wait",
        metavar="TIME",
        parser=seconds,
        help="How long to wait for a scrub, for the end of earlier jobs and for the service. Keep it below Slurm's "
        "PrologEpilogTimeout.",
        show_default="5m",
    ),
]
EpilogWaitOption = Annotated[
    float,
    typer.Option(
        "--wait",
        metavar="TIME",
        parser=seconds,
        help="How long to wait until the devices are clean; not with PrologFlags=RunInJob.",
        show_default="0s",
    ),
]


def add_commands(app: typer.Typer) -> None:
    app.command()(prolog)
    app.command()(epilog)


def prolog(
    devices: JobDeviceOption = None,
    wait: PrologWaitOption = 300.0,
    socket: SocketOption = Path("/run/scrubber"),
) -> None:
    """Grant a Slurm job its GPUs, once they are clean.

    For Prolog= in slurm.conf. The job and its GPUs are those in Slurm's environment (SLURM_JOB_ID, SLURM_JOB_UID, SLURM_JOB_USER,
    SLURM_JOB_GPUS or UUIDs in CUDA_VISIBLE_DEVICES); a job without GPUs changes nothing.

    Exits with 0 only if each GPU is clean and belongs to the job now. Otherwise Slurm drains the node and queues the job again.
    """
    job = slurm_job(os.environ)
    names = list(devices or ()) or job_devices(os.environ)
    if names:
        run(start_job(socket, job, names, wait=wait))


def epilog(wait: EpilogWaitOption = 0.0, socket: SocketOption = Path("/run/scrubber")) -> None:
    """Report the end of a Slurm job, so that its GPUs are scrubbed.

    For Epilog= in slurm.conf. The GPUs are released once no process is left in the job's cgroup. Exits with 0 even if the service
    does not answer, because Slurm would drain the node: the next prolog notes the end of the job, too.
    """
    job = slurm_job(os.environ)
    try:
        ended = run(_end_job(socket, job, wait))
    except ScrubberError as error:
        print_note(f"The end of job {job.id} was not reported; the next job on its devices does it. {error}")
        return
    if wait and not ended.done:
        print_note(f"The devices of job {job.id} are not clean yet. {ended.waits_for}")
    for each in ended.withheld:
        print_note(f"Device {each.device_id} is out of service ({each.cause_code}).")


async def _end_job(socket: Path, job: pb.Job, wait: float) -> pb.EndJobResponse:
    from scrubber.api.client import AdminClient

    deadline = time.monotonic() + wait

    async def call(client: AdminClient) -> pb.EndJobResponse:
        left = max(0.0, deadline - time.monotonic())
        return await retried(
            lambda limit: client.end_job(job, wait_seconds=min(left, limit)), max(left, _EPILOG_SECONDS)
        )

    async with AdminClient(socket) as client:
        ended = await call(client)
        while not ended.done and time.monotonic() < deadline:
            ended = await call(client)
        return ended


def slurm_job(environment: Mapping[str, str]) -> pb.Job:
    """Return the job that slurmd describes in ``environment``; raises :class:`InvalidConfiguration` if it describes none."""
    from scrubber.api import scrubber_pb2 as pb

    id, uid = environment.get("SLURM_JOB_ID", ""), environment.get("SLURM_JOB_UID", "")
    if not (_is_number(id, 20) and _is_number(uid, 10) and int(uid) < 1 << 32):
        raise InvalidConfiguration(
            "SLURM_JOB_ID and SLURM_JOB_UID do not describe a job: slurmd runs this command, as Prolog= or Epilog= in slurm.conf."
        )
    named = environment.get("SLURM_JOB_USER", "")
    # A name that is not UTF-8 does not fit into the request.
    user = named if named and named.isprintable() else f"uid-{uid}"
    return pb.Job(manager="slurm", id=id, user=user, user_id=int(uid))


def _is_number(text: str, longest: int) -> bool:
    return text.isascii() and text.isdecimal() and len(text) <= longest


def job_devices(environment: Mapping[str, str]) -> Sequence[str]:
    """Return the names of the job's GPUs: their UUIDs where Slurm passes them, otherwise their numbers; none without GPUs.

    Raises:
        InvalidConfiguration: a value that names no GPUs.
    """
    visible = [each.strip() for each in environment.get("CUDA_VISIBLE_DEVICES", "").split(",")]
    if all(each.startswith(("GPU-", "MIG-")) and each.isascii() and each.isprintable() for each in visible):
        return visible
    found: list[str] = []
    value, listed = environment.get("SLURM_JOB_GPUS", ""), environment.get("CUDA_VISIBLE_DEVICES", "")
    if not value and listed not in _NO_DEVICES:
        raise InvalidConfiguration(
            f"CUDA_VISIBLE_DEVICES is {listed!r}, which are no UUIDs, and SLURM_JOB_GPUS is empty: pass the devices with --device."
        )
    for part in (each.strip() for each in value.split(",") if each.strip()):
        first, dash, last = part.partition("-")
        if not _is_number(first, 6) or (dash and not _is_number(last, 6)):
            raise InvalidConfiguration(f"SLURM_JOB_GPUS is {value!r}: pass the devices with --device.")
        numbers = range(int(first), int(last or first) + 1)
        if not 0 < len(numbers) <= _MAX_RANGE:
            raise InvalidConfiguration(f"SLURM_JOB_GPUS is {value!r}: pass the devices with --device.")
        found += map(str, numbers)
    if value and not found:
        raise InvalidConfiguration(f"SLURM_JOB_GPUS is {value!r}: pass the devices with --device.")
    return list(dict.fromkeys(found))
