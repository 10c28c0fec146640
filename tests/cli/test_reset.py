"""``scrubber reset-plan`` and ``reset`` against a service on real sockets: what is shown, and which exit code says what."""

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from scrubber.api import scrubber_pb2 as pb
from scrubber.api.client import ReadClient
from scrubber.api.server import serve
from scrubber.api.sockets import Sockets
from scrubber.domain.errors import Held, InvalidRequest, Stuck
from scrubber.domain.reset import ResetPlan
from tests.api.service import FakeNode
from tests.cli.acting_stage import NEVER as FOREVER
from tests.cli.acting_stage import Node, begun, device, passed, result, standing
from tests.cli.stage import run as command
from tests.cli.terminal import WIDTHS, agrees_with, at_terminal, terminal

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
        "apiVersion": "cli.scrubber.dev/v1",
        "kind": "ResetPlan",
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


DEVICE = device(1)
RESET = ("reset", "1", "--reason", "it hangs")


@pytest.fixture
async def stage(short_tmp: Path) -> AsyncIterator[Node]:
    async with standing(short_tmp) as stage:
        stage.plan = pb.ResetPlan(
            device=DEVICE.id, method="nvidia-smi --gpu-reset", acts=["Reset it."], together=["GPU-2a-0000"]
        )
        stage.scripts["1"] = [begun(DEVICE, step="reset", phase=""), passed(DEVICE)]
        yield stage


class TestReset:
    async def test_the_plan_is_shown_and_the_reason_goes_with_the_order(self, stage: Node, short_tmp: Path) -> None:
        ended = await command(short_tmp, *RESET, "--yes", "-o", "json")
        assert ended.code == 0
        assert stage.asked == [
            pb.GetResetPlanRequest(device="1"),
            pb.ResetRequest(device="1", reason="it hangs"),
        ]
        assert (ended.json["kind"], ended.json["scrub"]["outcome"]) == ("ScrubResult", "passed")
        assert [line.split("  ")[0] for line in ended.err.splitlines()] == [
            *("device", "method", "together with", "act 1", "verdict"),
        ]

    async def test_what_can_never_be_reset_here_is_refused_with_why(self, stage: Node, short_tmp: Path) -> None:
        stage.plan.unavailable = "The service does not run as root."
        ended = await command(short_tmp, *RESET, "--yes")
        assert (ended.code, ended.out, len(stage.asked)) == (3, "", 1)
        assert ended.err.endswith("Error: The service does not run as root.\n")

    async def test_what_stands_in_the_way_is_shown_and_left_to_the_service(self, stage: Node, short_tmp: Path) -> None:
        stage.plan.blockers.append("train (PID 7) \x1b[31mholds it.")
        stage.scripts["1"] = [Held("Device 1 is in use by red/train (main).")]
        ended = await command(short_tmp, *RESET, "--yes")
        assert (ended.code, ended.out, len(stage.asked)) == (3, "", 2)
        assert "\x1b" not in ended.err
        assert "train (PID 7)" in ended.err
        assert ended.err.endswith("Error: Device 1 is in use by red/train (main).\n")

    async def test_a_device_that_did_not_come_back_is_a_negative_verdict(self, stage: Node, short_tmp: Path) -> None:
        stage.scripts["1"] = [result(DEVICE, "failed", pb.Finding(severity="fault", sentence="It did not come back."))]
        ended = await command(short_tmp, *RESET, "--yes")
        assert (ended.code, "It did not come back." in ended.out.splitlines()[1]) == (1, True)

    @pytest.mark.parametrize("health", ["quarantined", "condemned"])
    async def test_a_reset_after_which_the_device_is_still_out_of_service_is_a_negative_verdict(
        self, stage: Node, short_tmp: Path, health: str
    ) -> None:
        update = passed(DEVICE)
        cause = pb.Cause(code="operator", sentence="It is noisy", way_back="person", since=1.0, actor="uid:0")
        out = device(1, state=health, health=health, cause=cause, offered=False)
        update.result.device.CopyFrom(out)
        stage.scripts["1"] = [update]
        ended = await command(short_tmp, *RESET, "--yes", "-o", "json")
        assert (ended.code, ended.json["scrub"]["outcome"], ended.json["device"]["health"]) == (1, "passed", health)
        assert ended.err.endswith(
            f"Error: Device 1 was reset and proved clean, and is still {health}: It is noisy. Only a person can release it: "
            "scrubber unquarantine 1 --reason …\n"
        )
        assert "Note: Device 1 is" not in ended.err

    async def test_a_reset_that_leads_to_probation_brought_the_device_back(self, stage: Node, short_tmp: Path) -> None:
        update = passed(DEVICE)
        update.result.device.CopyFrom(device(1, state="probation", health="probation", offered=False))
        stage.scripts["1"] = [update]
        ended = await command(short_tmp, *RESET, "--yes")
        assert ended.code == 0
        assert "Note: Device 1 is on probation" in ended.err

    async def test_a_wait_that_is_over_first_leaves_the_reset_going_on(self, stage: Node, short_tmp: Path) -> None:
        stage.scripts["1"] = [begun(DEVICE), FOREVER]
        ended = await command(short_tmp, *RESET, "--yes", "--timeout", "3s")
        assert (ended.code, ended.out) == (4, "")
        told = (
            f"Error: The reset s-1 of device {DEVICE.id} goes on; scrubber scrub 1 joins it, "
            "scrubber device 1 shows how it ends.\n"
        )
        assert ended.err.endswith(told)

    async def test_without_waiting_it_names_the_scrub_and_leaves(self, stage: Node, short_tmp: Path) -> None:
        stage.scripts["1"] = [begun(DEVICE), FOREVER]
        ended = await command(short_tmp, *RESET, "--yes", "--no-wait", "-o", "name")
        assert (ended.code, ended.out) == (0, "s-1\n")

    async def test_an_answer_without_a_result_is_no_verdict(self, stage: Node, short_tmp: Path) -> None:
        stage.scripts["1"] = [begun(DEVICE)]
        ended = await command(short_tmp, *RESET, "--yes")
        assert (ended.code, ended.out) == (1, "")

    async def test_without_a_reason_nothing_is_asked(self, stage: Node, short_tmp: Path) -> None:
        ended = await command(short_tmp, "reset", "1", "--yes")
        assert (ended.code, ended.out, stage.asked) == (2, "", [])
        assert "--reason" in ended.err

    @pytest.mark.parametrize("columns", WIDTHS)
    async def test_a_person_sees_the_plan_the_question_and_the_verdict(
        self, stage: Node, short_tmp: Path, columns: int
    ) -> None:
        there = {"SCRUBBER_SOCKET": str(short_tmp)}
        async with terminal(*RESET, columns=columns, environment=there) as person:
            await person.shows("Go on? [y/N]")
            person.type("y\n")
            told = await person.ended()
            assert person.is_as_before
        assert told.code == 0
        agrees_with(f"reset-{columns}", told.text)

    @pytest.mark.parametrize("columns", WIDTHS)
    async def test_a_plan_fits_the_terminal(self, stage: Node, short_tmp: Path, columns: int) -> None:
        stage.plan.blockers.append("train (PID 7) holds it, and so does a process with quite a long name (PID 4711).")
        there = {"SCRUBBER_SOCKET": str(short_tmp)}
        told = await at_terminal("reset-plan", "1", columns=columns, environment=there)
        assert told.code == 3
        agrees_with(f"reset-plan-{columns}", told.text)
