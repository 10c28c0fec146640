"""Jobs: their names, and the numbers by which a workload manager knows devices."""

from __future__ import annotations

import pytest

from scrubber.domain.assignment import Claim, JobManager, Pod, Process
from scrubber.domain.device import Device
from scrubber.domain.errors import InvalidRequest
from scrubber.domain.jobs import Job, find_numbered_device, job_of, parse_process_group
from scrubber.domain.pods import PodLiveness, PodState, job_liveness


def device(index: str, minor: str = "", parent: str | None = None) -> Device:
    traits = (("minor", minor),) if minor else ()
    return Device(f"GPU-{index}", index, "model", 1, parent=parent, traits=traits)


def test_job_is_a_claim_of_its_manager_whose_only_pod_stands_for_its_processes() -> None:
    claim = Job(JobManager.SLURM, "4711", "alice", 1000).claim
    assert (claim.uid, claim.driver, claim.tenant) == ("slurm:1000:4711", "slurm", "alice")
    assert claim.pods == (Pod("alice", "job-4711", "slurm-job-4711"),)
    assert parse_process_group("slurm-job-4711") == (JobManager.SLURM, "4711")
    assert parse_process_group("1f6e5f0e-8a57-4f7c-9d57-0b8c5f2f3a11") is None
    assert (claim.title, job_of(claim)) == ("job 4711 of alice", "slurm/4711")
    other = Claim("claim-1", "team-a", "training", "gpu.scrubber.dev")
    assert (other.title, job_of(other), job_of(None)) == ("the claim team-a/training", "", "")


@pytest.mark.parametrize("id", ["", "4711_3", "../4711", "4" * 33, "4711\n"])
def test_job_id_that_could_lead_out_of_a_directory_is_refused(id: str) -> None:
    with pytest.raises(InvalidRequest, match="job ID"):
        Job(JobManager.SLURM, id, "alice", 1000)


@pytest.mark.parametrize("user", ["", " ", "a\nb", "a" * 129])
def test_user_that_cannot_be_printed_is_refused(user: str) -> None:
    with pytest.raises(InvalidRequest, match="user of a job"):
        Job(JobManager.SLURM, "4711", user, 1000)


def test_number_is_that_of_the_device_node_and_not_of_the_drivers_list() -> None:
    swapped = [device("0", minor="1"), device("1", minor="0")]
    assert find_numbered_device(swapped, "0").index == "1"
    assert find_numbered_device(swapped, "GPU-0").index == "0"
    with pytest.raises(InvalidRequest, match="number 7"):
        find_numbered_device(swapped, "7")


def test_number_is_the_index_where_no_device_node_has_one() -> None:
    assert find_numbered_device([device("0"), device("1")], "1").index == "1"


def test_number_of_a_device_node_that_several_instances_share_names_none_of_them() -> None:
    with pytest.raises(InvalidRequest):
        find_numbered_device([device("0", minor="0", parent="GPU-x"), device("2", minor="2")], "0")


def test_job_lives_while_it_has_a_process_or_may_start_one_and_never_has_leftovers() -> None:
    process = Process(17, 1)
    assert job_liveness([process], may_start_more=False) == PodLiveness(PodState.ALIVE, (process,))
    assert job_liveness([], may_start_more=True).state is PodState.ALIVE
    assert job_liveness([], may_start_more=False) == PodLiveness(PodState.OVER, ended=True)
