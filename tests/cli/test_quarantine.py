"""``quarantine``, ``unquarantine`` and ``break-glass``: which device is affected, and confirmation."""

import asyncio
import os
import re
import signal
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from scrubber.api import scrubber_pb2 as pb
from scrubber.api.sockets import Purpose
from scrubber.api.status import status_from_error
from scrubber.domain.errors import (
    DeviceBusy,
    InvalidRequest,
    LedgerFailure,
    PermissionDenied,
    Refused,
    ScrubberError,
)
from tests.cli.acting_stage import Node, served
from tests.cli.stage import BROKEN, CLEAN, SICK, Ended, environment, run, start
from tests.cli.terminal import WIDTHS, Terminal, agrees_with, at_terminal, terminal

WHY = ("--reason", "new fan")
UNQUARANTINE = ("unquarantine", "1", *WHY)
BREAK_GLASS = ("break-glass", "2", "--duration", "30m", *WHY)
RESET = ("reset", "1", *WHY)
ACCEPT = ("baseline", "accept", "1", *WHY)
WITH_CONFIRMATION = (UNQUARANTINE, BREAK_GLASS, RESET, ACCEPT)
ACTS = (pb.QuarantineRequest, pb.BreakGlassRequest, pb.ResetRequest, pb.AcceptBaselineRequest)


@dataclass
class Several(Node):
    """A node of three devices, each of which can be quarantined.

    Attributes:
        refusals: by device, why it is not quarantined.
        silent_for: the device whose order is never answered.
    """

    refusals: dict[str, ScrubberError] = field(default_factory=dict)
    silent_for: str = ""
    fell_silent: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.devices = [CLEAN, SICK, BROKEN]

    async def Quarantine(self, request: Any, context: Any) -> pb.DeviceResponse:
        answer = await super().Quarantine(request, context)
        if request.device == self.silent_for:
            self.fell_silent.set()
            await asyncio.Event().wait()
        if refusal := self.refusals.get(request.device):
            status = status_from_error(refusal, public=False)
            await context.abort(status.code, status.details, status.metadata)
        for each in self.devices:
            if each.id == request.device:
                if each.HasField("cause"):
                    answer.previous_cause.CopyFrom(each.cause)
                cause = pb.Cause(code="operator", message=request.reason, recovery_method="operator", actor="uid:0")
                answer.device.CopyFrom(each)
                answer.device.MergeFrom(pb.Device(health="quarantined", state="quarantined", cause=cause))
        return answer


@pytest.fixture
async def several(short_tmp: Path) -> AsyncIterator[Several]:
    node = Several()
    async with served(short_tmp, node=node):
        yield node


@pytest.fixture
async def node(short_tmp: Path) -> AsyncIterator[Node]:
    async with served(short_tmp) as node:
        node.plan = pb.ResetPlan(device_id=SICK.id, method="bus reset", actions=["Reset it."])
        yield node


@pytest.fixture
def socket_environment(short_tmp: Path) -> Mapping[str, str]:
    return {"SCRUBBER_SOCKET_DIR": str(short_tmp)}


def done(node: Node) -> list[object]:
    return [each for each in node.requests if isinstance(each, ACTS)]


class TestQuarantine:
    async def test_quarantine_needs_no_confirmation_and_sends_its_reason(self, node: Node, short_tmp: Path) -> None:
        ended = await run(short_tmp, "quarantine", "SIM-GPU-b", "--reason", "smells burnt", "-o", "json")
        assert (ended.code, ended.err) == (0, "")
        assert node.requests == [pb.QuarantineRequest(device="SIM-GPU-b", reason="smells burnt")]
        assert (ended.json["metadata"]["name"], ended.json["state"]) == ("SIM-GPU-bb", "quarantined")

    async def test_quarantine_table_shows_the_same_policy_as_the_device_list(self, node: Node, short_tmp: Path) -> None:
        ended = await run(short_tmp, "quarantine", "1", *WHY)
        listed = await run(short_tmp, "devices", "1")
        assert (ended.code, ended.out) == (0, listed.out)

    async def test_quarantine_without_read_access_confirms_the_result(self, short_tmp: Path) -> None:
        async with served(short_tmp, Purpose.ADMIN):
            ended = await run(short_tmp, "quarantine", "1", *WHY)
        assert (ended.code, ended.err, SICK.id in ended.out) == (0, "", True)

    @pytest.mark.parametrize("words", [(), ("--reason", "  ")])
    async def test_quarantine_without_a_reason_sends_no_request(
        self, node: Node, short_tmp: Path, words: tuple[str, ...]
    ) -> None:
        ended = await run(short_tmp, "quarantine", "0", *words)
        assert (ended.code, ended.out, node.requests) == (2, "", [])
        assert "--reason" in ended.err

    async def test_quarantine_of_several_devices_prints_a_line_for_each(
        self, several: Several, short_tmp: Path
    ) -> None:
        ended = await run(short_tmp, "quarantine", "2", "0", "SIM-GPU-c", *WHY)
        assert (ended.code, ended.err) == (0, "")
        assert [line.split() for line in ended.out.splitlines()[1:]] == [
            ["2", "SIM-GPU-cc", "quarantined", "new", "fan."],
            ["0", "SIM-GPU-aa", "quarantined", "new", "fan."],
        ]
        assert done(several) == [
            pb.QuarantineRequest(device=each, reason="new fan") for each in ("SIM-GPU-cc", "SIM-GPU-aa")
        ]

    async def test_quarantine_names_actor_time_and_reason_of_an_earlier_one(
        self, several: Several, short_tmp: Path
    ) -> None:
        note = (
            "Note: Device 1 (SIM-GPU-bb) was already out of service, since 1970-01-01T00:00:02Z by service: XID 95 was "
            "\N{REPLACEMENT CHARACTER}[31mseen. The new reason replaces it.\n"
        )
        for names in ((SICK.id,), (CLEAN.id, SICK.id)):
            assert (await run(short_tmp, "quarantine", *names, *WHY)).err == note
        results = (await run(short_tmp, "quarantine", CLEAN.id, SICK.id, *WHY, "-o", "json")).items
        assert [each["previousCause"] and each["previousCause"]["actor"] for each in results] == [None, "service"]

    @pytest.mark.parametrize("wrong", ["7", "SIM"], ids=["none", "more than one"])
    async def test_wrong_device_name_prevents_quarantine_of_every_device(
        self, several: Several, short_tmp: Path, wrong: str
    ) -> None:
        ended = await run(short_tmp, "quarantine", "0", "1", wrong, *WHY)
        assert (ended.code, ended.out, done(several)) == (2, "", [])
        assert f"'{wrong}'" in ended.err

    async def test_refused_device_does_not_prevent_quarantine_of_the_others(
        self, several: Several, short_tmp: Path
    ) -> None:
        several.refusals = {
            "SIM-GPU-aa": Refused("It is not allowed."),
            "SIM-GPU-bb": LedgerFailure("The disk is full."),
        }
        ended = await run(short_tmp, "quarantine", "0", "1", "2", *WHY, "-o", "json")
        assert (ended.code, ended.json["kind"]) == (1, "QuarantineResultList")
        assert [
            (each["target"], each["device"] and each["device"]["health"], each["error"]) for each in ended.items
        ] == [
            ("SIM-GPU-aa", None, {"code": "refused", "message": "It is not allowed."}),
            ("SIM-GPU-bb", None, {"code": "ledger-failure", "message": "The disk is full."}),
            ("SIM-GPU-cc", "quarantined", None),
        ]
        several.refusals = {"SIM-GPU-aa": Refused("It is not allowed.")}
        result = await run(short_tmp, "quarantine", "0", "2", *WHY)
        assert result.code == 3
        assert [line.split()[2:] for line in result.out.splitlines()[1:]] == [
            ["refused", "It", "is", "not", "allowed."],
            ["quarantined", "new", "fan."],
        ]

    async def test_refusal_common_to_all_devices_is_printed_once(self, several: Several, short_tmp: Path) -> None:
        several.refusals = dict.fromkeys(("SIM-GPU-aa", "SIM-GPU-bb"), PermissionDenied("Only root may act."))
        ended = await run(short_tmp, "quarantine", "0", "1", *WHY)
        assert ended == Ended(3, "", "Error: Only root may act.\n")

    async def test_interrupt_between_two_devices_reports_which_were_quarantined(
        self, several: Several, short_tmp: Path
    ) -> None:
        several.silent_for = "SIM-GPU-bb"
        process = await start(short_tmp, "quarantine", "0", "1", "2", *WHY)
        async with asyncio.timeout(60):
            await several.fell_silent.wait()
            process.send_signal(signal.SIGINT)
            out, _ = await process.communicate()
        assert process.returncode == 130
        assert [line.split()[2] for line in out.decode().splitlines()[1:]] == ["quarantined", "unknown", "not-tried"]

    @pytest.mark.parametrize("columns", WIDTHS)
    async def test_quarantine_output_fits_the_terminal_and_shows_the_devices_new_state(
        self, node: Node, socket_environment: Mapping[str, str], columns: int
    ) -> None:
        result = await at_terminal("quarantine", "1", *WHY, columns=columns, environment=socket_environment)
        assert result.code == 0
        agrees_with(f"quarantine-{columns}", result.text)


class TestUnquarantine:
    async def test_unquarantine_with_yes_releases_the_device(self, node: Node, short_tmp: Path) -> None:
        ended = await run(short_tmp, "unquarantine", "0", *WHY, "--yes", "-o", "name")
        assert ended == Ended(0, "SIM-GPU-aa\n", "")
        assert node.requests == [pb.QuarantineRequest(device="0", reason="new fan")]

    @pytest.mark.parametrize("columns", WIDTHS)
    async def test_unquarantine_shows_the_cause_before_confirmation(
        self, node: Node, socket_environment: Mapping[str, str], columns: int
    ) -> None:
        async with confirmation_prompt(*UNQUARANTINE, there=socket_environment, columns=columns) as session:
            agrees_with(f"unquarantine-{columns}", session.screen.text)
            assert b"\x1b[31m" not in session.raw, "words of the node do nothing to the terminal"
            session.type("y\n")
            assert (await session.ended()).code == 0

    async def test_unquarantine_shows_the_progress_of_the_probation(self, node: Node, short_tmp: Path) -> None:
        node.released = pb.Device(
            id="GPU-a", index="1", health="probation", probation_scrubs_required=2, next_attempt_at=9.5
        )
        assert (await run(short_tmp, *UNQUARANTINE, "--yes")).err == (
            "Note: Device 1 (GPU-a) is on probation: 0 of 2 clean scrubs; next at 1970-01-01T00:00:09Z.\n"
        )

    @pytest.mark.parametrize(("health", "result"), [("healthy", "healthy"), ("probation", "on probation")])
    async def test_unquarantine_of_a_device_in_service_is_refused_without_confirmation(
        self, node: Node, socket_environment: Mapping[str, str], health: str, result: str
    ) -> None:
        node.devices = [pb.Device(id="GPU-a", index="1", state=health, health=health)]
        ended = await at_terminal(*UNQUARANTINE, columns=80, environment=socket_environment)
        assert (ended.code, ended.text) == (3, f"Error: Device 1 (GPU-a) is {result}, not quarantined.\n")
        assert done(node) == []

    async def test_quarantine_reason_without_a_full_stop_gets_one_in_the_confirmation(
        self, node: Node, socket_environment: Mapping[str, str]
    ) -> None:
        cause = pb.Cause(code="operator", message="noisy", recovery_method="operator", actor="uid:7")
        node.devices = [pb.Device(id="GPU-a", index="1", state="quarantined", health="quarantined", cause=cause)]
        async with confirmation_prompt(*UNQUARANTINE, there=socket_environment) as session:
            assert "is quarantined: noisy. After it passes its probation" in session.screen.text


class TestBreakGlass:
    async def test_break_glass_request_carries_duration_and_reason(self, node: Node, short_tmp: Path) -> None:
        words = ("break-glass", "2", "--duration", "30m", "--reason", "a deadline", "--yes")
        ended = await run(short_tmp, *words, "-o", "json")
        assert (ended.code, ended.err) == (0, "")
        assert node.requests == [pb.BreakGlassRequest(device="2", reason="a deadline", duration_seconds=1800.0)]
        assert ended.json["metadata"]["name"] == "SIM-GPU-cc"
        assert ended.json["breakGlass"]["expiresAt"] == "1970-01-01T00:01:00.000000Z"

    async def test_ending_a_break_glass_override_needs_no_confirmation(self, node: Node, short_tmp: Path) -> None:
        ended = await run(short_tmp, "break-glass", "1", "--end", "--reason", "it held", "-o", "name")
        assert ended == Ended(0, "SIM-GPU-bb\n", "")
        assert node.requests == [pb.BreakGlassRequest(device="1", reason="it held", duration_seconds=0.0)]

    @pytest.mark.parametrize(
        ("words", "named"),
        [
            (("--duration", "30m", "--yes"), "--reason"),
            (("--duration", "30m", "--reason", " ", "--yes"), "--reason"),
            (("--end",), "--reason"),
            (("--reason", "why", "--yes"), "--duration"),
            (("--duration", "30m", "--end", "--reason", "why", "--yes"), "--end"),
            (("--duration", "0", "--reason", "why", "--yes"), "--duration"),
            (("--duration", "0ms", "--reason", "why", "--yes"), "--duration"),
            (("--duration", "nan", "--reason", "why", "--yes"), "--duration"),
            (("--duration", "inf", "--reason", "why", "--yes"), "--duration"),
            (("--duration=-5", "--reason", "why", "--yes"), "--duration"),
            (("--duration", "soon", "--reason", "why", "--yes"), "--duration"),
        ],
    )
    async def test_incomplete_break_glass_request_is_not_sent(
        self, node: Node, short_tmp: Path, words: tuple[str, ...], named: str
    ) -> None:
        ended = await run(short_tmp, "break-glass", "2", *words)
        assert (ended.code, ended.out, node.requests) == (2, "", [])
        assert named in ended.err

    @pytest.mark.parametrize("columns", WIDTHS)
    async def test_break_glass_confirmation_names_the_risk_for_tenants(
        self, node: Node, socket_environment: Mapping[str, str], columns: int
    ) -> None:
        async with confirmation_prompt(*BREAK_GLASS, there=socket_environment, columns=columns) as session:
            agrees_with(f"break-glass-{columns}", session.screen.text)

    @pytest.mark.parametrize("columns", WIDTHS)
    async def test_break_glass_output_shows_the_end_time_and_the_command_to_end_the_override(
        self, node: Node, socket_environment: Mapping[str, str], columns: int
    ) -> None:
        result = await at_terminal(*BREAK_GLASS, "--yes", columns=columns, environment=socket_environment)
        assert result.code == 0
        agrees_with(f"break-glass-done-{columns}", result.text)


class TestConfirmation:
    @pytest.mark.parametrize("words", WITH_CONFIRMATION)
    @pytest.mark.parametrize(
        ("typed", "code"),
        [("y\n", 0), ("YES\n", 0), ("n\n", 1), ("sure\n", 1), ("\n", 1), ("\x04", 1), ("yes please\n", 1)],
    )
    async def test_only_yes_confirms_an_action(
        self, node: Node, socket_environment: Mapping[str, str], words: tuple[str, ...], typed: str, code: int
    ) -> None:
        async with confirmation_prompt(*words, there=socket_environment) as session:
            session.type(typed)
            result = await session.ended()
        assert (result.code, len(done(node))) == (code, 1 - code)
        assert ("Nothing was changed." in result.text) is bool(code)

    async def test_non_utf8_input_does_not_confirm_an_action(
        self, node: Node, socket_environment: Mapping[str, str]
    ) -> None:
        async with confirmation_prompt(*UNQUARANTINE, there=socket_environment) as session:
            os.write(session._ours, b"y\xff\n")
            assert (await session.ended()).code == 1
        assert done(node) == []

    async def test_interrupt_does_not_confirm_an_action(
        self, node: Node, socket_environment: Mapping[str, str]
    ) -> None:
        async with confirmation_prompt(*UNQUARANTINE, there=socket_environment) as session:
            session.type("\x03")
            result = await session.ended()
            assert session.is_as_before
        assert (result.code, done(node)) == (130, [])
        assert result.text.endswith("Nothing was changed.\n")

    @pytest.mark.parametrize("words", WITH_CONFIRMATION)
    async def test_action_without_a_terminal_requires_the_yes_option(
        self, node: Node, short_tmp: Path, words: tuple[str, ...]
    ) -> None:
        ended = await run(short_tmp, *words)
        assert (ended.code, ended.out, node.requests) == (2, "", [])
        assert ended.err.endswith("Error: stdin is not a terminal; pass --yes to confirm.\n")

    @pytest.mark.parametrize("more", [("--no-input",), ()])
    @pytest.mark.parametrize("words", WITH_CONFIRMATION)
    async def test_action_with_no_input_requires_the_yes_option(
        self, node: Node, socket_environment: Mapping[str, str], words: tuple[str, ...], more: tuple[str, ...]
    ) -> None:
        variables = {} if more else {"SCRUBBER_NO_INPUT": "1"}
        result = await at_terminal(*words, *more, columns=80, environment={**socket_environment, **variables})
        assert (result.code, node.requests) == (2, [])

    @pytest.mark.parametrize("streams", [("stdin", "stdout"), ("stdout", "stderr")])
    async def test_confirmation_requires_both_streams_on_a_terminal(
        self, node: Node, socket_environment: Mapping[str, str], streams: tuple[str, ...]
    ) -> None:
        result = await at_terminal(*UNQUARANTINE, columns=80, environment=socket_environment, streams=streams)
        assert (result.code, node.requests) == (2, [])

    @pytest.mark.parametrize("words", WITH_CONFIRMATION)
    async def test_yes_option_skips_the_confirmation(
        self, node: Node, socket_environment: Mapping[str, str], words: tuple[str, ...]
    ) -> None:
        result = await at_terminal(*words, "--yes", "--no-input", columns=80, environment=socket_environment)
        assert (result.code, len(done(node)), "[y/N]" in result.text) == (0, 1, False)


class TestRefusals:
    @pytest.mark.parametrize("words", [("quarantine", "1", *WHY), *((*each, "--yes") for each in WITH_CONFIRMATION)])
    @pytest.mark.parametrize(
        ("error", "code"),
        [
            (InvalidRequest("No device matches '1'."), 2),
            (InvalidRequest("'GPU' is the prefix of 2 device ids; use a longer one."), 2),
            (DeviceBusy("Device 1 is in use by red/train (main)."), 3),
            (DeviceBusy("Device 1 is being scrubbed (s-1); wait until that has ended."), 3),
            (Refused("Device 1 is healthy, not quarantined."), 3),
            (PermissionDenied("uid 5 may not do that."), 3),
            (LedgerFailure("The ledger is read-only."), 1),
        ],
    )
    async def test_service_refusal_is_one_message_and_an_exit_code(
        self, node: Node, short_tmp: Path, words: tuple[str, ...], error: ScrubberError, code: int
    ) -> None:
        node.error = error
        assert await run(short_tmp, *words) == Ended(code, "", f"Error: {error}\n")

    @pytest.mark.parametrize("words", [("quarantine", "1", *WHY), *((*each, "--yes") for each in WITH_CONFIRMATION)])
    async def test_unavailable_service_is_an_error_and_changes_nothing(
        self, short_tmp: Path, words: tuple[str, ...]
    ) -> None:
        ended = await run(short_tmp, *words)
        assert (ended.code, ended.out) == (1, "")
        assert re.fullmatch(r"Error: The scrub service is not reachable: .*\n", ended.err)

    @pytest.mark.parametrize(
        "words", [("scrub", "0"), ("quarantine", "1", *WHY), *((*e, "--yes") for e in WITH_CONFIRMATION)]
    )
    async def test_user_with_read_access_only_is_given_the_missing_option(
        self, short_tmp: Path, words: tuple[str, ...]
    ) -> None:
        async with served(short_tmp, Purpose.READ) as node:
            node.plan = pb.ResetPlan(device_id=SICK.id, method="bus reset")
            # A reader may enter this directory; the other one is closed to all but the service.
            short_tmp.chmod(0o755)
            for path in (short_tmp / "read", short_tmp / "read" / "read.sock"):
                path.chmod(0o777)
            (short_tmp / "admin").mkdir(mode=0)
            ended = await run_unprivileged(short_tmp, *words)
            (short_tmp / "admin").chmod(0o700)
        assert (ended.code, ended.out, done(node)) == (3, "", []), ended.err
        last = ended.err.splitlines()[-1]
        assert re.match(r"Error: uid \d+ may not use .*/admin/admin.sock: ", last)
        assert "scrubber serve --admin-group" in last

    @pytest.mark.parametrize("words", WITH_CONFIRMATION)
    async def test_user_without_admin_access_gets_no_confirmation_prompt(
        self, short_tmp: Path, socket_environment: Mapping[str, str], words: tuple[str, ...]
    ) -> None:
        async with served(short_tmp, Purpose.READ) as node:
            ended = await at_terminal(*words, columns=200, environment=socket_environment)
        assert (ended.code, node.requests, "[y/N]" in ended.text) == (1, [], False)
        assert "admin/admin.sock does not exist" in ended.text


@asynccontextmanager
async def confirmation_prompt(*words: str, there: Mapping[str, str], columns: int = 80) -> AsyncIterator[Terminal]:
    """A command at a terminal that waits for a confirmation."""
    async with terminal(*words, "-o", "name", columns=columns, environment=there) as session:
        await session.shows("Continue? [y/N]")
        yield session


UNPRIVILEGED = """
import json, os, sys
import scrubber.api.client, scrubber.cli.commands.baseline, scrubber.cli.commands.devices, scrubber.cli.render.scrub_result, scrubber.cli.client_run
import scrubber.domain.device
from scrubber.cli.main import main

if os.geteuid() == 0:
    os.setgroups([])
    os.setgid(54321)
    os.setuid(54321)
main(sys.argv[1:])
"""


async def run_unprivileged(sockets: Path, *words: str) -> Ended:
    """The command of a user who is not root; it starts as this one, because another one need not read this tree."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", UNPRIVILEGED, *words),
        env=environment(sockets),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, err = await process.communicate()
    return Ended(process.returncode or 0, out.decode(), err.decode())
