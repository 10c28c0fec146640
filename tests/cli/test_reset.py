"""``scrubber reset-plan`` and ``reset`` against a service on real sockets: output and exit codes."""

import asyncio
import json
import os
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from scrubber.api import scrubber_pb2 as pb
from scrubber.api.client import ReadClient
from scrubber.api.server import serve
from scrubber.api.sockets import Sockets
from scrubber.domain.agent_pause import PauseOffer, PauseWay
from scrubber.domain.errors import DeviceBusy, DriverTimeout, InvalidRequest
from scrubber.domain.reset_plan import ResetPlan
from tests import forkserver
from tests.api.service import FakeNode
from tests.cli.acting_stage import NEVER as FOREVER
from tests.cli.acting_stage import Node, begun, device, passed, result, served
from tests.cli.stage import run as command
from tests.cli.terminal import WIDTHS, agrees_with, at_terminal, terminal

FREE = ResetPlan(
    device="GPU-a0",
    method="nvidia-smi --gpu-reset",
    actions=("Switch persistence mode off.", "Reset it."),
    also_reset=("GPU-a1",),
)
HELD = replace(FREE, blockers=("train (PID 7) holds it.", "Its name is \x1b[31mred."))
MONITORED = replace(
    FREE,
    agents=("monitor (PID 9) holds it.",),
    pause_ways=(
        PauseOffer(PauseWay.BACKEND, ("ask it to let go",)),
        PauseOffer(PauseWay.LABELS, ("set a=false", "set b=false")),
    ),
)
NEVER = replace(FREE, unavailable="The service does not run as root.", blockers=HELD.blockers)


@pytest.fixture
async def node(short_tmp: Path) -> AsyncIterator[FakeNode]:
    node = FakeNode()
    node.plan = FREE
    async with serve(node, Sockets(short_tmp / "s"), grace=0):
        yield node


async def run(sockets: Path, *words: str) -> tuple[int | None, str, str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("SCRUBBER_")}
    process = await forkserver.start(
        *("scrubber.cli.main", "reset-plan", *words, "--socket-dir", str(sockets)),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=environment,
    )
    out, err = await process.communicate()
    return process.returncode, out.decode(), err.decode()


async def test_reset_plan_is_printed_as_made_by_the_engine(node: FakeNode, short_tmp: Path) -> None:
    async with ReadClient(short_tmp / "s") as client:
        plan = await client.reset_plan("0")
    assert node.requests == [("reset-plan", "GPU-a0")]
    assert (plan.device_id, plan.method, plan.unavailable_reason) == (FREE.device, FREE.method, "")
    assert (tuple(plan.actions), tuple(plan.also_reset_ids)) == (FREE.actions, FREE.also_reset)


async def test_reset_plan_lists_the_pause_of_agents_before_the_reset_and_their_return_after_it(
    node: FakeNode, short_tmp: Path
) -> None:
    node.plan = MONITORED
    ended, out, _ = await run(short_tmp / "s", "GPU-a0")
    assert ended == 0
    lines = [" ".join(line.split()) for line in out.splitlines()]
    assert [line for line in lines if line.startswith(("agent", "action", "or by", "verdict"))] == [
        "agent monitor (PID 9) holds it.",
        "action 1 Pause agents (backend): ask it to let go.",
        "action 2 Wait until they have released the device.",
        "action 3 Switch persistence mode off.",
        "action 4 Reset it.",
        "action 5 Restore the agents (backend): undo what was changed, in reverse order.",
        "or by labels set a=false",
        "or by labels set b=false",
        "verdict can be reset now; agents are paused meanwhile",
    ]


async def test_reset_plan_lists_the_actions_of_a_reset_by_another_service_instead_of_those_of_this_one(
    node: FakeNode, short_tmp: Path
) -> None:
    node.plan = replace(MONITORED, pause_ways=(PauseOffer(PauseWay.EXTERNAL_RESET, ("yield", "request it")),))
    _, out, _ = await run(short_tmp / "s", "GPU-a0")
    lines = [" ".join(line.split()) for line in out.splitlines()]
    assert [line for line in lines if line.startswith("action")] == [
        "action 1 By another service (gpu-reset): yield.",
        "action 2 By another service (gpu-reset): request it.",
    ]


@pytest.mark.parametrize(("plan", "code"), [(FREE, 0), (HELD, 3), (NEVER, 1), (MONITORED, 0)])
async def test_reset_plan_exits_with_zero_only_if_a_reset_is_possible_now(
    node: FakeNode, short_tmp: Path, plan: ResetPlan, code: int
) -> None:
    node.plan = plan
    ended, out, err = await run(short_tmp / "s", "GPU-a0", "-o", "json")
    assert (ended, err) == (code, "")
    assert json.loads(out) == {
        "apiVersion": "cli.scrubber.dev/v1",
        "kind": "ResetPlan",
        "deviceID": "GPU-a0",
        "possible": code == 0,
        "method": "nvidia-smi --gpu-reset",
        "actions": list(plan.actions),
        "unavailableReason": plan.unavailable,
        "blockers": list(plan.blockers),
        "alsoResetIDs": ["GPU-a1"],
        "agents": list(plan.agents),
        "pauseWays": [{"way": each.way, "actions": list(each.actions)} for each in plan.pause_ways],
    }


async def test_reset_plan_lists_actions_in_order_and_blockers(node: FakeNode, short_tmp: Path) -> None:
    node.plan = HELD
    _, out, _ = await run(short_tmp / "s", "0")
    assert [line.split("  ")[0] for line in out.splitlines()] == [
        *("device", "method", "also reset", "action 1", "action 2", "blocker", "blocker", "verdict"),
    ]
    assert "train (PID 7) holds it." in out
    assert "\x1b" not in out


async def test_reset_plan_for_an_unresponsive_device_gives_no_verdict(node: FakeNode, short_tmp: Path) -> None:
    node.failure = DriverTimeout("The driver did not answer.")
    assert await run(short_tmp / "s", "0") == (1, "", "Error: The driver did not answer.\n")


async def test_unknown_device_is_a_usage_error(node: FakeNode, short_tmp: Path) -> None:
    with pytest.raises(InvalidRequest):
        async with ReadClient(short_tmp / "s") as client:
            await client.reset_plan("7")
    code, out, err = await run(short_tmp / "s", "7")
    assert (code, out) == (2, "")
    assert "No device matches '7'" in err


DEVICE = device(1)
RESET = ("reset", "1", "--reason", "it hangs")


@pytest.fixture
async def stage(short_tmp: Path) -> AsyncIterator[Node]:
    async with served(short_tmp) as stage:
        stage.plan = pb.ResetPlan(
            device_id=DEVICE.id, method="nvidia-smi --gpu-reset", actions=["Reset it."], also_reset_ids=["GPU-2a-0000"]
        )
        stage.scripts["1"] = [begun(DEVICE, step="reset", phase=""), passed(DEVICE)]
        yield stage


class TestReset:
    async def test_reset_shows_its_plan_and_sends_its_reason(self, stage: Node, short_tmp: Path) -> None:
        ended = await command(short_tmp, *RESET, "--yes", "-o", "json")
        assert ended.code == 0
        assert stage.requests == [
            pb.GetResetPlanRequest(device="1"),
            pb.ResetRequest(device="1", reason="it hangs"),
        ]
        assert (ended.json["kind"], ended.json["scrub"]["outcome"]) == ("ScrubResult", "passed")
        assert [line.split("  ")[0] for line in ended.err.splitlines()] == [
            *("device", "method", "also reset", "action 1", "verdict"),
        ]

    async def test_unavailable_reset_is_refused_with_the_reason(self, stage: Node, short_tmp: Path) -> None:
        stage.plan.unavailable_reason = "The service does not run as root."
        ended = await command(short_tmp, *RESET, "--yes")
        assert (ended.code, ended.out, len(stage.requests)) == (3, "", 1)
        assert ended.err.endswith("Error: The service does not run as root.\n")

    async def test_blockers_are_shown_and_the_decision_is_left_to_the_service(
        self, stage: Node, short_tmp: Path
    ) -> None:
        stage.plan.blockers.append("train (PID 7) \x1b[31mholds it.")
        stage.scripts["1"] = [DeviceBusy("Device 1 is in use by red/train (main).")]
        ended = await command(short_tmp, *RESET, "--yes")
        assert (ended.code, ended.out, len(stage.requests)) == (3, "", 2)
        assert "\x1b" not in ended.err
        assert "train (PID 7)" in ended.err
        assert ended.err.endswith("Error: Device 1 is in use by red/train (main).\n")

    async def test_device_that_did_not_return_after_a_reset_exits_with_one(self, stage: Node, short_tmp: Path) -> None:
        stage.scripts["1"] = [result(DEVICE, "failed", pb.Finding(severity="fault", message="It did not come back."))]
        ended = await command(short_tmp, *RESET, "--yes")
        assert (ended.code, "It did not come back." in ended.out.splitlines()[1]) == (1, True)

    @pytest.mark.parametrize("health", ["quarantined", "condemned"])
    async def test_device_still_out_of_service_after_a_reset_exits_with_one(
        self, stage: Node, short_tmp: Path, health: str
    ) -> None:
        update = passed(DEVICE)
        cause = pb.Cause(code="operator", message="It is noisy", recovery_method="operator", since=1.0, actor="uid:0")
        out = device(1, state=health, health=health, cause=cause, advertised=False)
        update.result.device.CopyFrom(out)
        stage.scripts["1"] = [update]
        ended = await command(short_tmp, *RESET, "--yes", "-o", "json")
        assert (ended.code, ended.json["scrub"]["outcome"], ended.json["device"]["health"]) == (1, "passed", health)
        assert ended.err.endswith(
            f"Error: Device 1 was reset and proved clean, but is still {health}: It is noisy. Only an operator can release it: "
            "scrubber unquarantine 1 --reason …\n"
        )
        assert "Note: Device 1 is" not in ended.err

    async def test_device_on_probation_after_a_reset_exits_with_zero(self, stage: Node, short_tmp: Path) -> None:
        update = passed(DEVICE)
        update.result.device.CopyFrom(device(1, state="probation", health="probation", advertised=False))
        stage.scripts["1"] = [update]
        ended = await command(short_tmp, *RESET, "--yes")
        assert ended.code == 0
        assert "Note: Device 1 is on probation" in ended.err

    async def test_timeout_leaves_the_reset_running(self, stage: Node, short_tmp: Path) -> None:
        stage.scripts["1"] = [begun(DEVICE), FOREVER]
        ended = await command(short_tmp, *RESET, "--yes", "--timeout", "3s")
        assert (ended.code, ended.out) == (4, "")
        message = (
            f"Error: The reset s-1 of device {DEVICE.id} continues. Run `scrubber scrub 1` to wait for it, or "
            "`scrubber device 1` to see its result.\n"
        )
        assert ended.err.endswith(message)

    async def test_no_wait_option_prints_the_scrub_id_and_returns(self, stage: Node, short_tmp: Path) -> None:
        stage.scripts["1"] = [begun(DEVICE), FOREVER]
        ended = await command(short_tmp, *RESET, "--yes", "--no-wait", "-o", "name")
        assert (ended.code, ended.out) == (0, "s-1\n")

    async def test_stream_without_a_result_gives_no_verdict(self, stage: Node, short_tmp: Path) -> None:
        stage.scripts["1"] = [begun(DEVICE)]
        ended = await command(short_tmp, *RESET, "--yes")
        assert (ended.code, ended.out) == (1, "")

    async def test_reset_without_a_reason_sends_no_request(self, stage: Node, short_tmp: Path) -> None:
        ended = await command(short_tmp, "reset", "1", "--yes")
        assert (ended.code, ended.out, stage.requests) == (2, "", [])
        assert "--reason" in ended.err

    @pytest.mark.parametrize("columns", WIDTHS)
    async def test_terminal_shows_plan_confirmation_and_verdict(
        self, stage: Node, short_tmp: Path, columns: int
    ) -> None:
        environment = {"SCRUBBER_SOCKET_DIR": str(short_tmp)}
        async with terminal(*RESET, columns=columns, environment=environment) as session:
            await session.shows("Continue? [y/N]")
            session.type("y\n")
            result = await session.ended()
            assert session.is_as_before
        assert result.code == 0
        agrees_with(f"reset-{columns}", result.text)

    @pytest.mark.parametrize("columns", WIDTHS)
    async def test_reset_plan_fits_the_terminal(self, stage: Node, short_tmp: Path, columns: int) -> None:
        stage.plan.blockers.append("train (PID 7) holds it, and so does a process with quite a long name (PID 4711).")
        environment = {"SCRUBBER_SOCKET_DIR": str(short_tmp)}
        result = await at_terminal("reset-plan", "1", columns=columns, environment=environment)
        assert result.code == 3
        agrees_with(f"reset-plan-{columns}", result.text)
