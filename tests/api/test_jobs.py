"""The calls of prolog, epilog and ``scrubber run`` over a real socket: what reaches the engine, and what comes back."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from scrubber.api import scrubber_pb2 as pb
from scrubber.api.client import AdminClient, PluginClient
from scrubber.api.messages import claim_list_message, device_message
from scrubber.api.server import serve
from scrubber.api.sockets import Sockets
from scrubber.domain.assignment import JobManager
from scrubber.domain.errors import InvalidRequest
from scrubber.domain.handover_kind import HandOverKind
from scrubber.domain.jobs import Job
from scrubber.domain.record import DeviceRecord, Grant
from scrubber.domain.states import Hygiene
from scrubber.engine.views import ClaimRelease, DeviceView, PreparedClaim, StartJobCall, WithheldDevice
from tests.api.service import FakeNode, device

JOB = Job(JobManager.SLURM, "4711", "alice", 1000)
MESSAGE = pb.Job(manager="slurm", id="4711", user="alice", user_id=1000)


@pytest.fixture
async def node(short_tmp: Path) -> AsyncIterator[FakeNode]:
    node = FakeNode()
    async with serve(node, Sockets(short_tmp / "s")):
        yield node


@pytest.fixture
async def admin(node: FakeNode, short_tmp: Path) -> AsyncIterator[AdminClient]:
    async with AdminClient(short_tmp / "s") as client:
        yield client


async def test_start_and_end_of_a_job_reach_the_engine_with_the_uid_of_the_caller(
    node: FakeNode, admin: AdminClient
) -> None:
    node.jobs.release = ClaimRelease(
        done=False, waits_for="Device GPU-a0 is in-use.", withheld=(WithheldDevice("GPU-a1", "held"),)
    )
    started = await admin.start_job(MESSAGE, ["GPU-a0"], wait_seconds=7.0)
    await admin.start_job(MESSAGE, count=2, wait_seconds=7.0)
    ended = await admin.end_job(MESSAGE, wait_seconds=3.0)
    actor = f"uid:{os.geteuid()}"
    assert node.requests == [
        StartJobCall(JOB, actor, ("GPU-a0",), 0, 7.0),
        StartJobCall(JOB, actor, (), 2, 7.0),
        ("end", JOB, 3.0, actor),
    ]
    assert [(each.id, each.grant) for each in started.devices] == [("GPU-a0", 1)]
    assert (ended.done, ended.waits_for) == (False, "Device GPU-a0 is in-use.")
    assert [(each.device_id, each.cause_code) for each in ended.withheld] == [("GPU-a1", "held")]


@pytest.mark.parametrize(
    ("job", "devices", "count"),
    [
        (pb.Job(manager="pbs", id="1", user="alice"), ["0"], 0),
        (pb.Job(id="1", user="alice"), ["0"], 0),
        (pb.Job(manager="slurm", id="../1", user="alice"), ["0"], 0),
        (pb.Job(manager="slurm", id="1"), ["0"], 0),
        (MESSAGE, [], 0),
        (MESSAGE, ["0"], 1),
        (MESSAGE, [str(number) for number in range(2000)], 0),
    ],
)
async def test_invalid_job_is_refused_before_the_engine_is_called(
    node: FakeNode, admin: AdminClient, job: pb.Job, devices: list[str], count: int
) -> None:
    with pytest.raises(InvalidRequest):
        await admin.start_job(job, devices, count=count, wait_seconds=1.0)
    assert node.requests == []


async def test_claim_of_a_driver_cannot_name_a_job(node: FakeNode, short_tmp: Path) -> None:
    async with PluginClient(short_tmp / "s") as driver:
        with pytest.raises(InvalidRequest, match="no colon"):
            await driver.unprepare_claim(JOB.uid, deadline_seconds=0.0, timeout=30.0)
        with pytest.raises(InvalidRequest, match="no colon"):
            await driver.set_claim_pods(JOB.uid, [], timeout=30.0)
    assert node.requests == []


def test_device_names_its_job_and_neither_a_claim_nor_a_pod() -> None:
    claim = JOB.claim
    grant = Grant(1, None, HandOverKind.UNKNOWN, 1000.0, "boot-1", claim=replace(claim, released_at=1001.0))
    record = DeviceRecord("GPU-a0", hygiene=Hygiene.IN_USE, last_grant=grant, open_grants=(grant,))
    shown = device_message(DeviceView(device(0), record))
    assert (shown.tenant, shown.pod, shown.HasField("claim")) == ("alice", "", False)
    assert shown.job == MESSAGE
    (listed,) = shown.open_grants
    assert (listed.job, listed.job_ended) == (MESSAGE, True)
    assert (listed.HasField("claim"), list(listed.claim_pods), listed.claim_releasing) == (False, [], False)
    assert list(claim_list_message([PreparedClaim(claim, ("GPU-a0",))], []).claims) == []
