"""Names of the cgroups of jobs, as Slurm and ``scrubber run`` write them."""

from __future__ import annotations

from pathlib import Path

import pytest

from scrubber.adapters.cgroups.job_paths import job_directories, job_of_path, slurm_directories

PATHS = {
    "/system.slice/slurmstepd.scope/job_4711/step_0/user/task_0": "slurm-job-4711",
    "/system.slice/slurmstepd.scope/job_4711/step_extern/slurm": "slurm-job-4711",
    "/system.slice/node7_slurmstepd.scope/job_4711/step_batch/user/task_0": "slurm-job-4711",
    "/gpu.slice/slurmstepd.scope/job_4711/step_0/user/task_0": "slurm-job-4711",
    "/../slurmstepd.scope/job_4711/step_0/user/task_0": "slurm-job-4711",
    "/../../system.slice/slurmstepd.scope/job_4711/step_0": "slurm-job-4711",
    "/slurm/uid_1000/job_4711/step_0/task_0": "slurm-job-4711",
    "/slurm_node7/uid_1000/job_4711/step_0/task_0 (deleted)": "slurm-job-4711",
    "/scrubber.slice/scrubber-runc0ffee.slice/command": "run-job-c0ffee",
    "/scrubber.slice/scrubber-runc0ffee.slice/docker-3fa9.scope": "run-job-c0ffee",
    # Slurm's own processes, and names that a user may choose below a cgroup of their own.
    "/system.slice/slurmstepd.scope/system": None,
    "/system.slice/slurmd.service": None,
    "/system.slice/slurmstepd.scope": None,
    "/user.slice/user-1000.slice/user@1000.service/slurmstepd.scope/job_4711/step_0": None,
    "/user.slice/user-1000.slice/user@1000.service/system.slice/slurmstepd.scope/job_4711": None,
    "/user.slice/user-1000.slice/scrubber.slice/scrubber-runc0ffee.slice/command": None,
    "/docker/slurmstepd.scope/job_4711/step_0": None,
    "/user.slice/scrubber-runc0ffee.slice/command": None,
    "/slurmstepd.scope/job_4711/step_0": None,
    "/slurm/uid_alice/job_4711": None,
    "/slurm/uid_1000/job_x": None,
    "/": None,
}


@pytest.mark.parametrize("path", PATHS)
def test_job_of_a_process_is_known_by_components_that_only_root_can_create(path: str) -> None:
    assert job_of_path(path) == PATHS[path]


def test_directories_of_a_job_are_found_in_every_layout_of_slurm(tmp_path: Path) -> None:
    layouts = (
        "system.slice/slurmstepd.scope/job_4711",
        "system.slice/node7_slurmstepd.scope/job_4711",
        "slurm/uid_1000/job_4711",
        "slurm_node7/uid_1000/job_4711",
    )
    for each in (*layouts, "user.slice/user-1000.slice/slurmstepd.scope/job_4711"):
        (tmp_path / each).mkdir(parents=True)
    assert {str(each.relative_to(tmp_path)) for each in job_directories(tmp_path, "slurm-job-4711")} == set(layouts)
    assert job_directories(tmp_path, "slurm-job-471") == ()
    assert len(slurm_directories(tmp_path)) == 4
    assert slurm_directories(tmp_path / "missing") == ()
