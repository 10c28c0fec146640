"""What a workload manager passes to its prolog and epilog."""

from __future__ import annotations

import os
import re

from scrubber.api import scrubber_pb2 as pb
from scrubber.cli.commands.job import job_devices, slurm_job
from scrubber.domain.errors import InvalidConfiguration
from tests.fuzz.target import target

_PART = re.compile(r"([0-9]{1,6})(?:-([0-9]{1,6}))?")
_UUID = re.compile(r"(?:GPU-|MIG-)[ -~]*")


def _numbers(value: str) -> list[str] | None:
    """Return the numbers in ``SLURM_JOB_GPUS``, each once; None if it has anything else, or none at all."""
    found: list[str] = []
    for part in filter(None, (each.strip() for each in value.split(","))):
        numbers = _PART.fullmatch(part)
        if numbers is None or not 0 <= int(numbers[2] or numbers[1]) - int(numbers[1]) < 1024:
            return None
        found += [str(each) for each in range(int(numbers[1]), int(numbers[2] or numbers[1]) + 1)]
    return list(dict.fromkeys(found)) or None


@target(
    "slurm-environment",
    parser="the variables with which slurmd describes a job to its prolog",
    covers=("scrubber.cli.commands.job",),
    oracle="the job is refused if and only if its ID or its user's ID is no number of Slurm's, and fits into a request; its "
    "devices are the UUIDs or the numbers that regular expressions find, or are refused on one printable line",
    seeds=(
        b"SLURM_JOB_ID=4711\0SLURM_JOB_UID=1000\0SLURM_JOB_USER=alice\0SLURM_JOB_GPUS=0,2-4",
        b"SLURM_JOB_ID=1\0SLURM_JOB_UID=0\0CUDA_VISIBLE_DEVICES=GPU-1f3a,MIG-77",
        b"SLURM_JOB_ID=1\0SLURM_JOB_UID=4294967295\0SLURM_JOB_USER=\xff\0CUDA_VISIBLE_DEVICES=NoDevFiles",
        "SLURM_JOB_ID=٣\0SLURM_JOB_UID=1\0SLURM_JOB_GPUS=٣".encode(),
    ),
    words=(
        b"\0SLURM_JOB_GPUS=",
        b"\0CUDA_VISIBLE_DEVICES=",
        b"\0SLURM_JOB_UID=",
        b"GPU-",
        b"MIG-",
        b"0-1023",
        b",",
        b"-1",
    ),
)
def slurm_environment(data: bytes) -> bool:
    pairs = (os.fsdecode(each).partition("=") for each in data.split(b"\0"))
    environment = {name: value for name, mark, value in pairs if mark}
    id, uid = environment.get("SLURM_JOB_ID", ""), environment.get("SLURM_JOB_UID", "")
    valid = re.fullmatch("[0-9]{1,20}", id) and re.fullmatch("[0-9]{1,10}", uid) and int(uid) < 2**32
    try:
        job = slurm_job(environment)
    except InvalidConfiguration as error:
        assert not valid
        assert str(error).isprintable()
    else:
        assert valid
        assert pb.Job.FromString(job.SerializeToString()) == job
        assert (job.id, job.user_id) == (id, int(uid))
        assert job.user == environment.get("SLURM_JOB_USER", "") or job.user == f"uid-{uid}"
        assert job.user.isprintable()
    gpus, visible = environment.get("SLURM_JOB_GPUS", ""), environment.get("CUDA_VISIBLE_DEVICES", "")
    uuids = [each.strip() for each in visible.split(",")]
    try:
        found = list(job_devices(environment))
    except InvalidConfiguration as error:
        assert str(error).isprintable()
        assert not all(map(_UUID.fullmatch, uuids))
        assert _numbers(gpus) is None
        return False
    if all(map(_UUID.fullmatch, uuids)):
        assert found == uuids
    else:
        assert found == (_numbers(gpus) or [])
        assert found or (not gpus and visible in ("", "NoDevFiles", "-1"))
    return bool(valid)
