"""``scrubber prolog`` and ``epilog``: what they read from Slurm's environment, and with which status they end."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from scrubber.cli.commands.job import job_devices, slurm_job
from scrubber.domain.errors import InvalidConfiguration
from tests.deployed import DEPLOY, unit
from tests.project.test_deploy import parsed

JOB = {"SLURM_JOB_ID": "4711", "SLURM_JOB_UID": "1000", "SLURM_JOB_USER": "alice"}


def test_job_is_read_from_the_environment_of_slurmd() -> None:
    job = slurm_job(JOB)
    assert (job.manager, job.id, job.user, job.user_id) == ("slurm", "4711", "alice", 1000)
    assert slurm_job({**JOB, "SLURM_JOB_USER": ""}).user == "uid-1000"


def test_user_name_that_is_not_utf8_is_replaced_by_the_uid() -> None:
    """The request to the service carries UTF-8, and a prolog that fails for a name drains the node."""
    assert slurm_job({**JOB, "SLURM_JOB_USER": "al\udcefce"}).user == "uid-1000"


@pytest.mark.parametrize(
    "change",
    [
        {"SLURM_JOB_ID": ""},
        {"SLURM_JOB_ID": "4711_3"},
        {"SLURM_JOB_ID": "٣"},
        {"SLURM_JOB_UID": "alice"},
        {"SLURM_JOB_UID": "4294967296"},
        {"SLURM_JOB_UID": "9" * 5000},
    ],
)
def test_environment_without_a_job_is_refused_with_where_the_command_belongs(change: dict[str, str]) -> None:
    with pytest.raises(InvalidConfiguration, match=r"Prolog= or Epilog= in slurm\.conf"):
        slurm_job({**JOB, **change})


ENVIRONMENTS: list[tuple[dict[str, str], list[str]]] = [
    ({}, []),
    ({"SLURM_JOB_GPUS": "", "CUDA_VISIBLE_DEVICES": "NoDevFiles"}, []),
    ({"SLURM_JOB_GPUS": "0"}, ["0"]),
    ({"SLURM_JOB_GPUS": "0,2-4, 7"}, ["0", "2", "3", "4", "7"]),
    ({"SLURM_JOB_GPUS": "3", "CUDA_VISIBLE_DEVICES": "0"}, ["3"]),
    ({"SLURM_JOB_GPUS": "0,1", "CUDA_VISIBLE_DEVICES": "GPU-1f3a,MIG-77"}, ["GPU-1f3a", "MIG-77"]),
    ({"SLURM_JOB_GPUS": "0", "CUDA_VISIBLE_DEVICES": "GPU-1f3a,0"}, ["0"]),
    ({"CUDA_VISIBLE_DEVICES": " GPU-1f3a"}, ["GPU-1f3a"]),
    ({"CUDA_VISIBLE_DEVICES": "MIG-77"}, ["MIG-77"]),
    ({"CUDA_VISIBLE_DEVICES": "-1"}, []),
]


@pytest.mark.parametrize(("environment", "devices"), ENVIRONMENTS)
def test_devices_are_uuids_where_slurm_passes_them_and_otherwise_numbers(
    environment: dict[str, str], devices: list[str]
) -> None:
    assert job_devices(environment) == devices


@pytest.mark.parametrize("value", [",", " ", "gpu:2", "3-1", "0-99999", "-1", "0-", "0;1", "9999999", "٣", "0-٣"])
def test_value_that_names_no_devices_is_refused_and_never_taken_for_a_job_without_devices(value: str) -> None:
    with pytest.raises(InvalidConfiguration, match="SLURM_JOB_GPUS"):
        job_devices({"SLURM_JOB_GPUS": value})


@pytest.mark.parametrize("value", ["0", "0,1", "GPU-1f3a,0", "all", "GPU-1f3a\udcff"])
def test_devices_that_slurm_names_by_their_position_only_are_refused_and_never_taken_for_a_job_without_devices(
    value: str,
) -> None:
    with pytest.raises(InvalidConfiguration, match="SLURM_JOB_GPUS is empty"):
        job_devices({"SLURM_JOB_GPUS": "", "CUDA_VISIBLE_DEVICES": value})


# --- the scripts for slurm.conf ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["prolog", "epilog"])
@pytest.mark.parametrize(
    ("environment", "devices"),
    [*ENVIRONMENTS, ({"SLURM_JOB_GPUS": "gpu:2"}, ["refused"]), ({"CUDA_VISIBLE_DEVICES": "0"}, ["refused"])],
)
def test_script_runs_the_command_only_for_a_job_with_devices(
    name: str, environment: dict[str, str], devices: list[str], tmp_path: Path
) -> None:
    (start,) = unit("scrubber.service")["ExecStart"]
    program, text = start.split()[0], (DEPLOY / "slurm" / f"scrubber-{name}").read_text()
    assert text.count(f"exec {program} {name} ") == 1
    stand_in, script = tmp_path / "scrubber", tmp_path / "script"
    stand_in.write_text("#!/bin/sh\necho $*; exit 1\n")
    script.write_text(text.replace(program, str(stand_in)))
    for each in (stand_in, script):
        each.chmod(0o755)
    # As slurmd runs it: without PATH.
    done = subprocess.run([script], env={**JOB, **environment}, capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr, done.returncode) == ((f"{name}\n", "", 1) if devices else ("", "", 0))


def test_drop_in_for_nodes_without_a_kubelet_configures_the_service_for_that(monkeypatch: pytest.MonkeyPatch) -> None:
    drop_in = unit("scrubber.service.d/no-kubelet.conf")
    (setting,) = drop_in.pop("Environment")
    assert drop_in == {}
    _, values = parsed(["serve"], monkeypatch, dict([setting.split("=")]))
    assert values["kubelet"] is False
