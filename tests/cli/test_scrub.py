"""``scrubber scrub``: a line for each device, one exit code for all, and scrubs that continue without their client."""

import asyncio
import re
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from scrubber.api import scrubber_pb2 as pb
from scrubber.domain.errors import (
    DeviceBusy,
    InvalidRequest,
    LedgerFailure,
    NotReady,
    PermissionDenied,
    Quarantined,
    Unreadable,
)
from scrubber.domain.evidence import Severity
from tests.cli.acting_stage import NEVER, Node, begun, device, passed, result, served
from tests.cli.stage import HALFWAY, PASSED, SICK, Ended, run, start

ZERO, ONE, TWO, THREE = (device(n) for n in range(4))
IN_USE = DeviceBusy("Device GPU-3a is in use by red/train (main); it is scrubbed when it is released.")


@pytest.fixture
async def node(short_tmp: Path) -> AsyncIterator[Node]:
    async with served(short_tmp) as node:
        node.devices = [ZERO, ONE, TWO, THREE]
        yield node


def cells(line: str) -> list[str]:
    return re.split(r" {2,}", line.strip())


class TestOneDevice:
    async def test_json_contains_scrub_certificate_and_device(self, node: Node, short_tmp: Path) -> None:
        node.scripts["0"] = [HALFWAY, PASSED]
        ended = await run(short_tmp, "scrub", "0", "--path", "fast", "--wait", "-o", "json")
        assert (ended.code, ended.err) == (0, "")
        assert node.requests == [pb.ScrubRequest(device="0", path="fast")], "one device is one question"
        assert set(ended.json) == {
            "apiVersion",
            "kind",
            "target",
            "scrub",
            "certificate",
            "device",
            "unexplainedResidue",
            "error",
        }
        assert (ended.json["kind"], ended.json["target"], ended.json["error"]) == ("ScrubResult", "SIM-GPU-aa", None)
        assert ended.json["certificate"]["metadata"]["name"] == "c-7"
        assert ended.json["device"]["state"] == "clean"
        assert ended.json["scrub"] == {
            "metadata": {"name": "s-9"},
            "deviceID": "SIM-GPU-aa",
            "path": "slow",
            "trigger": "on-demand",
            "startedAt": "1970-01-01T00:00:01.000000Z",
            "finishedAt": "1970-01-01T00:00:01.500000Z",
            "outcome": "passed",
            "certificateID": "c-7",
            "actor": "uid:0",
            "steps": [
                {
                    "step": "memory",
                    "verdict": "passed",
                    "durationSeconds": 0.25,
                    "measurements": {"residue_bytes": 12},
                    "notCovered": [],
                    "findings": [
                        {
                            "code": "residue",
                            "severity": "note",
                            "message": "12 bytes were not zero.",
                            "evidence": {"first_offset": 0},
                        }
                    ],
                }
            ],
        }

    async def test_result_is_printed_as_one_table_row(self, node: Node, short_tmp: Path) -> None:
        node.scripts["0"] = [begun(ZERO), passed(ZERO)]
        ended = await run(short_tmp, "scrub", "0", "-o", "wide")
        assert (ended.code, ended.err) == (0, "")
        assert node.requests == [pb.ScrubRequest(device="0", path="slow")]
        line = cells(ended.out.splitlines()[1])
        assert line == ["0", ZERO.id, "passed", "1.2 s", "64 MiB cleared, 12 bytes of residue", "cert-0"]

    async def test_output_lists_covered_and_not_covered_memory(self, node: Node, short_tmp: Path) -> None:
        node.scripts["0"] = [PASSED]
        lines = [cells(line) for line in (await run(short_tmp, "scrub", "0")).out.splitlines()]
        assert ["covered", "memory: 268435456 of 268435456 bytes cleared and verified"] in lines
        assert ["not covered", "on-chip memory"] in lines
        assert ["finding", "note: 12 bytes were not zero."] in lines

    @pytest.mark.parametrize("measured", ["[]", "nonsense", '{"cleared_bytes": 1e999}', '{"cleared_bytes": "all"}', ""])
    async def test_malformed_measurements_are_not_shown(self, node: Node, short_tmp: Path, measured: str) -> None:
        update = passed(ZERO)
        update.result.scrub.steps[1].measurements_json = measured
        node.scripts["0"] = [update]
        ended = await run(short_tmp, "scrub", "0")
        assert (ended.code, cells(ended.out.splitlines()[1])[4]) == (0, "no memory cleared")

    async def test_failed_scrub_shows_its_worst_finding(self, node: Node, short_tmp: Path) -> None:
        small = pb.Finding(severity="note", message="A fan was loud.")
        large = pb.Finding(severity="fault", message="8 bytes \x1b[2J did not take the clearing.")
        node.scripts["1"] = [result(ONE, "failed", small, large)]
        ended = await run(short_tmp, "scrub", "1")
        assert ended.code == 1
        message = "8 bytes \N{REPLACEMENT CHARACTER}[2J did not take the clearing."
        assert cells(ended.out.splitlines()[1]) == ["1", ONE.id, "failed", "1.2 s", message]

    @pytest.mark.parametrize("severity", Severity)
    async def test_finding_of_any_severity_is_shown(self, node: Node, short_tmp: Path, severity: Severity) -> None:
        finding = pb.Finding(severity=severity.value, message="A process holds it.")
        node.scripts["1"] = [result(ONE, "blocked", finding)]
        ended = await run(short_tmp, "scrub", "1")
        assert cells(ended.out.splitlines()[1])[4] == "A process holds it."

    @pytest.mark.parametrize(("outcome", "code"), [("failed", 1), ("abandoned", 1), ("blocked", 3), ("", 1)])
    async def test_unsuccessful_scrub_outcome_never_exits_with_zero(
        self, node: Node, short_tmp: Path, outcome: str, code: int
    ) -> None:
        scrub = pb.Scrub(id="s-9", device_id="SIM-GPU-bb", path="slow", outcome=outcome)
        node.scripts["1"] = [pb.ScrubUpdate(result=pb.ScrubResult(scrub=scrub, device=SICK))]
        ended = await run(short_tmp, "scrub", "1", "-o", "json")
        assert ended.code == code
        assert ended.json["scrub"]["outcome"] == (outcome or None)
        assert ended.json["certificate"] is None

    async def test_passed_slow_path_without_a_certificate_exits_with_one(self, node: Node, short_tmp: Path) -> None:
        node.scripts["0"] = [result(ZERO, "passed")]
        ended = await run(short_tmp, "scrub", "0")
        assert (ended.code, cells(ended.out.splitlines()[1])[2]) == (1, "not-certified")

    async def test_residue_that_contradicts_a_certificate_is_reported_although_the_device_is_now_clean(
        self, node: Node, short_tmp: Path
    ) -> None:
        found = passed(ZERO)
        found.result.unexplained_residue = (
            "12 bytes of residue were found although certificate c-1 states that the device was clean."
        )
        node.scripts["0"] = [found]
        ended = await run(short_tmp, "scrub", "0")
        assert (ended.code, ended.err) == (
            0,
            (
                f"Note: Device 0: {found.result.unexplained_residue} Follow docs/runbooks/ScrubberResidueAfterCertificate.md; "
                "run `scrubber history --device 0 --event residue.unexplained` to list every case.\n"
            ),
        )
        assert (await run(short_tmp, "scrub", "0", "-o", "json")).json[
            "unexplainedResidue"
        ] == found.result.unexplained_residue

    async def test_fast_path_passes_without_a_certificate(self, node: Node, short_tmp: Path) -> None:
        node.scripts["0"] = [result(ZERO, "passed", path="fast")]
        ended = await run(short_tmp, "scrub", "0", "--path", "fast")
        assert (ended.code, cells(ended.out.splitlines()[1])[2:5]) == (0, ["passed", "1.2 s", "checks only"])

    @pytest.mark.parametrize(
        ("error", "code"),
        [
            (InvalidRequest("There is no device 0."), 2),
            (InvalidRequest("'GPU' is the prefix of 4 device ids; use a longer one."), 2),
            (IN_USE, 3),
            (DeviceBusy("Device 0 is being scrubbed (s-1), and checks would interrupt the scrub."), 3),
            (Quarantined("Device 0 is quarantined."), 3),
            (NotReady("A scrub is in progress."), 3),
            (PermissionDenied("uid 5 may not do that."), 3),
            (LedgerFailure("The ledger is read-only."), 1),
            (Unreadable("The driver gave no data."), 1),
        ],
    )
    async def test_refused_scrub_is_one_message_and_an_exit_code(
        self, node: Node, short_tmp: Path, error: Exception, code: int
    ) -> None:
        node.scripts["0"] = [error]
        assert await run(short_tmp, "scrub", "0", "-o", "json") == Ended(code, "", f"Error: {error}\n")


class TestNotWaiting:
    async def test_no_wait_option_prints_the_scrub_id_and_returns(self, node: Node, short_tmp: Path) -> None:
        node.scripts["0"] = [begun(ZERO), NEVER]
        ended = await run(short_tmp, "scrub", "0", "--no-wait", "-o", "json")
        assert (ended.code, ended.err) == (0, "")
        assert (ended.json["scrub"]["metadata"]["name"], ended.json["scrub"]["outcome"]) == ("s-0", None)
        assert (ended.json["certificate"], ended.json["device"]) == (None, None)
        await node.left.wait()

    @pytest.mark.parametrize(("joined", "message"), [(False, "started scrub s-0"), (True, "joined scrub s-0")])
    async def test_no_wait_output_states_whether_the_scrub_was_joined(
        self, node: Node, short_tmp: Path, joined: bool, message: str
    ) -> None:
        node.scripts["0"] = [begun(ZERO, joined=joined), NEVER]
        ended = await run(short_tmp, "scrub", "0", "--no-wait")
        line = cells(ended.out.splitlines()[1])
        assert (ended.code, line) == (0, ["0", ZERO.id, "under-way", "-", f"{message}, which continues"])

    async def test_timeout_exits_with_four(self, node: Node, short_tmp: Path) -> None:
        node.scripts["0"] = [begun(ZERO), NEVER]
        ended = await run(short_tmp, "scrub", "0", "--timeout", "3s")
        assert (ended.code, ended.out) == (4, "")
        assert ended.err == (
            f"Error: The scrub s-0 of device {ZERO.id} continues. Run `scrubber scrub 0` to wait for it, or "
            "`scrubber device 0` to see its result.\n"
        )

    async def test_unresponsive_service_gives_no_verdict(self, node: Node, short_tmp: Path) -> None:
        node.scripts["0"] = [NEVER]
        ended = await run(short_tmp, "scrub", "0", "--timeout", "1")
        assert (ended.code, ended.out) == (1, "")
        assert "has not reported on device 0 yet. Run `scrubber device 0` to see" in ended.err

    @pytest.mark.parametrize("script", [[HALFWAY], [], [pb.ScrubUpdate()]])
    async def test_stream_without_a_result_gives_no_verdict(
        self, node: Node, short_tmp: Path, script: list[pb.ScrubUpdate]
    ) -> None:
        node.scripts["0"] = script
        ended = await run(short_tmp, "scrub", "0")
        assert (ended.code, ended.out) == (1, "")
        assert "closed the stream before device 0 was finished" in ended.err

    async def test_interrupt_prints_how_to_follow_the_running_scrub(self, node: Node, short_tmp: Path) -> None:
        node.scripts["0"] = [begun(ZERO), NEVER]
        process = await start(short_tmp, "scrub", "0")
        await node.listened(1)
        process.send_signal(signal.SIGINT)
        out, err = await process.communicate()
        assert (process.returncode, out) == (130, b"")
        assert re.fullmatch(r"Note: The .*Run .*`scrubber device \S+` to see .*\.\n", err.decode())
        await node.left.wait()


class TestSeveralDevices:
    async def test_several_devices_are_scrubbed_concurrently_with_a_row_each(self, node: Node, short_tmp: Path) -> None:
        both = asyncio.Event()
        node.scripts[ZERO.id] = [begun(ZERO), both, passed(ZERO)]
        node.scripts[ONE.id] = [begun(ONE), both, passed(ONE, residue=0)]
        process = asyncio.create_task(run(short_tmp, "scrub", "0", "GPU-1a", ZERO.id, "-o", "wide"))
        await node.listened(2)
        both.set()
        ended = await process
        assert (ended.code, ended.err) == (0, "")
        assert sorted(each.device for each in node.requests[1:]) == [ZERO.id, ONE.id], "named twice, scrubbed once"
        assert [cells(line) for line in ended.out.splitlines()[1:]] == [
            ["0", ZERO.id, "passed", "1.2 s", "64 MiB cleared, 12 bytes of residue", "cert-0"],
            ["1", ONE.id, "passed", "1.2 s", "64 MiB cleared", "cert-1"],
        ]

    async def test_json_list_contains_the_refusal_of_a_device(self, node: Node, short_tmp: Path) -> None:
        node.scripts[ZERO.id] = [passed(ZERO)]
        node.scripts[THREE.id] = [IN_USE]
        ended = await run(short_tmp, "scrub", "0", "3", "-o", "json")
        assert (ended.code, ended.err, ended.json["kind"]) == (3, "", "ScrubResultList")
        first, second = ended.items
        assert (first["target"], first["scrub"]["outcome"], first["error"]) == (ZERO.id, "passed", None)
        assert second == {
            "target": THREE.id,
            "scrub": None,
            "certificate": None,
            "device": None,
            "unexplainedResidue": None,
            "error": {"code": "device-busy", "message": str(IN_USE)},
        }

    async def test_table_shows_the_tenant_of_a_refused_device(self, node: Node, short_tmp: Path) -> None:
        node.scripts[ZERO.id] = [passed(ZERO)]
        node.scripts[THREE.id] = [IN_USE]
        ended = await run(short_tmp, "scrub", "0", "3")
        assert cells(ended.out.splitlines()[2]) == ["3", THREE.id, "refused", "-", str(IN_USE)]

    @pytest.mark.parametrize(
        ("worst", "code"),
        [
            ([passed(TWO)], 0),
            ([begun(TWO), NEVER], 4),
            ([IN_USE], 3),
            ([result(TWO, "blocked")], 3),
            ([InvalidRequest("No device matches that any more.")], 2),
            ([result(TWO, "failed")], 1),
            ([LedgerFailure("The ledger is read-only.")], 1),
            ([begun(TWO)], 1),
        ],
    )
    async def test_exit_code_is_the_worst_of_all_devices(
        self, node: Node, short_tmp: Path, worst: list[object], code: int
    ) -> None:
        node.scripts |= {ZERO.id: [passed(ZERO)], TWO.id: worst}  # type: ignore[dict-item]
        words = ("--timeout", "3s") if code == 4 else ()
        assert (await run(short_tmp, "scrub", "0", "2", *words)).code == code

    async def test_failed_scrub_outweighs_busy_and_unfinished_devices_in_the_exit_code(
        self, node: Node, short_tmp: Path
    ) -> None:
        node.scripts |= {ZERO.id: [IN_USE], ONE.id: [result(ONE, "failed")], TWO.id: [begun(TWO), NEVER]}
        ended = await run(short_tmp, "scrub", "0", "1", "2", "--timeout", "3s", "-o", "json")
        assert ended.code == 1
        assert [each["scrub"] and each["scrub"]["outcome"] for each in ended.items] == [None, "failed", None]
        assert ended.items[2]["scrub"]["metadata"]["name"] == "s-2"
        assert ended.err.count("\n") == 1, "a note only for the scrub that continues"

    async def test_error_is_reported_although_the_wait_for_others_timed_out(self, node: Node, short_tmp: Path) -> None:
        node.scripts |= {ZERO.id: [begun(ZERO)], ONE.id: [begun(ONE), NEVER]}
        ended = await run(short_tmp, "scrub", "0", "1", "--timeout", "3s")
        assert [cells(line)[:3] for line in ended.out.splitlines()[1:]] == [["0", ZERO.id, "unknown"]]
        assert (ended.code, "The scrub s-1 of device" in ended.err) == (1, True)

    async def test_unknown_device_prevents_the_scrub_of_all(self, node: Node, short_tmp: Path) -> None:
        ended = await run(short_tmp, "scrub", "0", "77", "-o", "json")
        assert (ended.code, ended.out, node.requests) == (2, "", [pb.ListDevicesRequest()])
        assert ended.err.startswith("Error: No device matches '77'; this node has: 0 (GPU-0a")

    async def test_error_common_to_all_devices_is_printed_once(self, node: Node, short_tmp: Path) -> None:
        refusal = PermissionDenied("uid 5 may not do that.")
        node.scripts |= {each.id: [refusal] for each in node.devices}
        ended = await run(short_tmp, "scrub", "0", "1", "2")
        assert ended == Ended(3, "", "Error: uid 5 may not do that.\n")

    async def test_many_devices_are_scrubbed_over_one_connection(self, node: Node, short_tmp: Path) -> None:
        node.devices = [device(n) for n in range(80)]
        node.scripts = {each.id: [begun(each), passed(each)] for each in node.devices}
        ended = await run(short_tmp, "scrub", "--all-idle", "-o", "name")
        assert (ended.code, ended.err, ended.out.split()) == (0, "", [f"s-{n}" for n in range(80)])


class TestAllIdle:
    async def test_all_idle_names_each_omitted_device_with_the_reason(self, node: Node, short_tmp: Path) -> None:
        gone = pb.OpenGrant(tenant="blue", pod="old")
        node.devices = [
            ZERO,
            device(1, hygiene="in-use", tenant="red", pod="train", container="main"),
            device(2, open_grants=[gone]),
            device(3, hygiene="clean", health="quarantined"),
        ]
        node.scripts = {each.id: [passed(each)] for each in (ZERO, node.devices[3])}
        ended = await run(short_tmp, "scrub", "--all-idle", "-o", "json")
        assert ended.code == 0
        assert [each["target"] for each in ended.items] == [ZERO.id, node.devices[3].id]
        assert ended.err.splitlines() == [
            f"Note: Device {each.index} ({each.id}) is skipped: {why}."
            for each, why in zip(
                node.devices[1:3],
                (
                    "it is in use by red/train",
                    "no scrub has shown yet that its previous pods have ended (blue/old)",
                ),
                strict=True,
            )
        ]

    @pytest.mark.parametrize(
        "busy",
        [
            {"hygiene": "scrubbing", "active_scrub_id": "s-1"},
            {"active_scrub_id": "s-1", "health": "recovering"},
            {"health": "recovering"},
        ],
    )
    async def test_all_idle_joins_a_running_scrub_of_an_unassigned_device(
        self, node: Node, short_tmp: Path, busy: dict[str, str]
    ) -> None:
        node.devices = [device(1, **busy)]
        node.scripts = {node.devices[0].id: [passed(node.devices[0])]}
        ended = await run(short_tmp, "scrub", "--all-idle", "-o", "json")
        assert (ended.code, ended.err, ended.items[0]["target"]) == (0, "", node.devices[0].id)

    async def test_all_idle_fast_path_omits_devices_being_scrubbed(self, node: Node, short_tmp: Path) -> None:
        node.devices = [device(2, hygiene="scrubbing", active_scrub_id="s-2")]
        ended = await run(short_tmp, "scrub", "--all-idle", "--path", "fast")
        assert node.requests == [pb.ListDevicesRequest()]
        assert ended.err.startswith(f"Note: Device 2 ({node.devices[0].id}) is skipped: it is being scrubbed (s-2).\n")

    async def test_all_idle_prints_a_list_even_for_one_device(self, node: Node, short_tmp: Path) -> None:
        node.devices = [ZERO]
        node.scripts = {ZERO.id: [passed(ZERO)]}
        ended = await run(short_tmp, "scrub", "--all-idle", "-o", "json")
        assert (ended.code, ended.json["kind"], len(ended.items)) == (0, "ScrubResultList", 1)

    async def test_all_idle_reports_a_device_that_was_assigned_meanwhile(self, node: Node, short_tmp: Path) -> None:
        node.devices = [THREE]
        node.scripts = {THREE.id: [IN_USE]}
        ended = await run(short_tmp, "scrub", "--all-idle", "-o", "json")
        assert (ended.code, ended.err, ended.items[0]["error"]["code"]) == (3, "", "device-busy")

    async def test_all_idle_without_idle_devices_prints_a_note(self, node: Node, short_tmp: Path) -> None:
        node.devices = []
        assert await run(short_tmp, "scrub", "--all-idle") == Ended(0, "", "No device is idle.\n")
        assert node.requests == [pb.ListDevicesRequest()]

    @pytest.mark.parametrize(
        ("words", "message"),
        [((), "Pass a DEVICE, or --all-idle"), (("0", "--all-idle"), "Pass either a DEVICE or --all-idle, not both")],
    )
    async def test_all_idle_and_named_devices_exclude_each_other(
        self, node: Node, short_tmp: Path, words: tuple[str, ...], message: str
    ) -> None:
        ended = await run(short_tmp, "scrub", *words)
        assert (ended.code, ended.out, node.requests) == (2, "", [])
        assert message in ended.err


class TestScrubbedButNotOffered:
    """A device can be certified, and still not be advertised."""

    OUT = pb.Cause(code="operator", message="noisy", recovery_method="operator", since=1.0, actor="uid:7")
    OFF_THE_BUS = pb.Cause(code="xid-79", message="XID 79 was \x1b[31mseen.", recovery_method="reboot", since=1.0)

    @pytest.mark.parametrize(
        ("more", "message"),
        [
            (
                {"state": "quarantined", "health": "quarantined", "cause": OUT},
                "quarantined: noisy. Only an operator can release it: scrubber unquarantine 1 --reason …",
            ),
            (
                {"state": "quarantined", "health": "quarantined", "cause": OFF_THE_BUS},
                "quarantined: XID 79 was \N{REPLACEMENT CHARACTER}[31mseen. It needs a reboot of the node.",
            ),
            ({"state": "probation", "health": "probation"}, "on probation."),
            (
                {"state": "probation", "health": "probation", "cause": OFF_THE_BUS, "probation_scrubs_required": 3},
                (
                    "on probation: XID 79 was \N{REPLACEMENT CHARACTER}[31mseen. It returns to service after its probation: "
                    "0 of 3 clean scrubs; the next is due."
                ),
            ),
            (
                {"state": "probation", "health": "probation", "cause": OFF_THE_BUS, "reset_pending": True},
                "on probation: XID 79 was \N{REPLACEMENT CHARACTER}[31mseen. It needs a reboot of the node.",
            ),
            ({"state": "clean"}, "out of service: its state is clean."),
        ],
    )
    async def test_note_names_cause_and_next_action_of_a_clean_device_out_of_service(
        self, node: Node, short_tmp: Path, more: dict[str, object], message: str
    ) -> None:
        out = device(1, advertised=False, **more)
        node.scripts |= {ZERO.id: [passed(ZERO)], ONE.id: [passed(out)]}
        ended = await run(short_tmp, "scrub", "0", "1")
        assert (ended.code, ended.err) == (0, f"Note: Device 1 is {message}\n")

    async def test_single_device_output_contains_the_command_for_the_next_action(
        self, node: Node, short_tmp: Path
    ) -> None:
        node.scripts["1"] = [passed(device(1, advertised=False, health="quarantined", cause=self.OUT))]
        ended = await run(short_tmp, "scrub", "1")
        assert "recovery     Only an operator can release it: scrubber unquarantine 1 --reason …\n" in ended.out


class TestUnavailableService:
    @pytest.mark.parametrize("words", [("0",), ("0", "1"), ("--all-idle",)])
    async def test_unavailable_service_gives_no_verdict(self, short_tmp: Path, words: tuple[str, ...]) -> None:
        ended = await run(short_tmp, "scrub", *words)
        assert (ended.code, ended.out) == (1, "")
        assert ended.err.startswith("Error: The scrub service is not reachable:")
        assert ended.err.count("\n") == 1

    @pytest.mark.parametrize("words", [("0",), ("0", "1")])
    async def test_service_that_stops_during_a_scrub_gives_no_verdict(
        self, short_tmp: Path, words: tuple[str, ...]
    ) -> None:
        async with served(short_tmp) as node:
            node.devices = [ZERO, ONE]
            node.scripts = {each: [begun(ZERO), NEVER] for each in ("0", ZERO.id, ONE.id)}
            process = await start(short_tmp, "scrub", *words)
            await node.listened(len(words))
        out, err = await process.communicate()
        assert process.returncode == 1
        assert b"passed" not in out
        lines = err.decode().splitlines()
        assert [line.split()[0] for line in lines] == ["Error:"] * len(lines), "gRPC says nothing of its own"

    async def test_socket_of_another_program_gives_no_verdict(self, short_tmp: Path) -> None:
        async def garbage(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(b"HTTP/1.0 200 OK\r\n\r\nclean!\n" * 20)
            writer.close()

        (short_tmp / "admin").mkdir()
        async with await asyncio.start_unix_server(garbage, short_tmp / "admin" / "admin.sock"):
            ended = await run(short_tmp, "scrub", "0")
        assert (ended.code, ended.out) == (1, "")
        assert ended.err.startswith("Error: ")
