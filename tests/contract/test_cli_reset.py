"""``scrubber reset-plan`` against a service on real sockets: what is shown, and which exit code says what."""

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from scrubber.api.client import ReadClient
from scrubber.api.server import serve
from scrubber.api.sockets import Sockets
from scrubber.domain.errors import InvalidRequest, Stuck
from scrubber.domain.reset import ResetPlan
from tests.contract.api_service import FakeNode

FREE = ResetPlan(
    device="GPU-a0",
    method="nvidia-smi --gpu-reset",
    acts=("Switch persistence mode off.", "Reset it."),
    together=("GPU-a1",),
)
HELD = replace(FREE, blockers=("train (PID 7) holds it.", "Its name is \x1b[31mred."))
NEVER = replace(FREE, unavailable="The service does not run as root.", blockers=HELD.blockers)


@pytest.fixture
async def node(short_tmp: Path) -> AsyncIterator[FakeNode]:
    node = FakeNode()
    node.plan = FREE
    async with serve(node, Sockets(short_tmp / "s"), grace=0):
        yield node


async def run(sockets: Path, *words: str) -> tuple[int | None, str, str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("SCRUBBER_")}
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "scrubber.cli.main", "reset-plan", *words, "--socket", str(sockets)),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=environment,
    )
    out, err = await process.communicate()
    return process.returncode, out.decode(), err.decode()


async def test_a_plan_arrives_as_the_engine_made_it(node: FakeNode, short_tmp: Path) -> None:
    async with ReadClient(short_tmp / "s") as client:
        told = await client.reset_plan("0")
    assert node.asked == [("reset-plan", "GPU-a0")]
    assert (told.device, told.method, told.unavailable) == (FREE.device, FREE.method, "")
    assert (tuple(told.acts), tuple(told.together)) == (FREE.acts, FREE.together)


@pytest.mark.parametrize(("plan", "code"), [(FREE, 0), (HELD, 3), (NEVER, 1)])
async def test_only_a_reset_that_could_be_done_now_exits_with_zero(
    node: FakeNode, short_tmp: Path, plan: ResetPlan, code: int
) -> None:
    node.plan = plan
    ended, out, err = await run(short_tmp / "s", "GPU-a0", "-o", "json")
    assert (ended, err) == (code, "")
    assert json.loads(out) == {
        "device": "GPU-a0",
        "possible": code == 0,
        "method": "nvidia-smi --gpu-reset",
        "acts": list(plan.acts),
        "unavailable": plan.unavailable,
        "blockers": list(plan.blockers),
        "together": ["GPU-a1"],
    }


async def test_a_person_reads_the_acts_in_order_and_what_blocks_them(node: FakeNode, short_tmp: Path) -> None:
    node.plan = HELD
    _, out, _ = await run(short_tmp / "s", "0")
    assert [line.split("  ")[0] for line in out.splitlines()] == [
        *("device", "method", "together with", "act 1", "act 2", "blocked", "blocked", "verdict"),
    ]
    assert "train (PID 7) holds it." in out
    assert "\x1b" not in out


async def test_a_device_that_cannot_be_asked_is_no_verdict(node: FakeNode, short_tmp: Path) -> None:
    node.failure = Stuck("The driver did not answer.")
    assert await run(short_tmp / "s", "0") == (1, "", "Error: The driver did not answer.\n")


async def test_a_device_that_is_not_there_is_a_wrong_request(node: FakeNode, short_tmp: Path) -> None:
    with pytest.raises(InvalidRequest):
        async with ReadClient(short_tmp / "s") as client:
            await client.reset_plan("7")
    code, out, err = await run(short_tmp / "s", "7")
    assert (code, out) == (2, "")
    assert "No device is called '7'" in err
