"""``scrubber prolog`` and ``epilog``: what they read from Slurm's environment, and with which status they end."""

from __future__ import annotations

import pytest

from scrubber.cli.commands.job import job_devices, slurm_job
from scrubber.domain.errors import InvalidConfiguration

JOB = {"SLURM_JOB_ID": "4711", "SLURM_JOB_UID": "1000", "SLURM_JOB_USER": "alice"}


def test_job_is_read_from_the_environment_of_slurmd() -> None:
    job = slurm_job(JOB)
    assert (job.manager, job.id, job.user, job.user_id) == ("slurm", "4711", "alice", 1000)
    assert slurm_job({**JOB, "SLURM_JOB_USER": ""}).user == "uid-1000"


@pytest.mark.parametrize("change", [{"SLURM_JOB_ID": ""}, {"SLURM_JOB_ID": "4711_3"}, {"SLURM_JOB_UID": "alice"}])
def test_environment_without_a_job_is_refused_with_where_the_command_belongs(change: dict[str, str]) -> None:
    with pytest.raises(InvalidConfiguration, match=r"Prolog= or Epilog= in slurm\.conf"):
        slurm_job({**JOB, **change})


@pytest.mark.parametrize(
    ("environment", "devices"),
    [
        ({}, []),
        ({"SLURM_JOB_GPUS": ""}, []),
        ({"SLURM_JOB_GPUS": "0"}, ["0"]),
        ({"SLURM_JOB_GPUS": "0,2-4, 7"}, ["0", "2", "3", "4", "7"]),
        ({"SLURM_JOB_GPUS": "3", "CUDA_VISIBLE_DEVICES": "0"}, ["3"]),
        ({"SLURM_JOB_GPUS": "0,1", "CUDA_VISIBLE_DEVICES": "GPU-1f3a,MIG-77"}, ["GPU-1f3a", "MIG-77"]),
        ({"SLURM_JOB_GPUS": "0", "CUDA_VISIBLE_DEVICES": "GPU-1f3a,0"}, ["0"]),
    ],
)
def test_devices_are_uuids_where_slurm_passes_them_and_otherwise_numbers(
    environment: dict[str, str], devices: list[str]
) -> None:
    assert job_devices(environment) == devices


@pytest.mark.parametrize("value", ["gpu:2", "3-1", "0-99999", "-1", "0-", "0;1", "9999999"])
def test_value_that_names_no_devices_is_refused_and_never_taken_for_a_job_without_devices(value: str) -> None:
    with pytest.raises(InvalidConfiguration, match="SLURM_JOB_GPUS"):
        job_devices({"SLURM_JOB_GPUS": value})
