"""``scrubber devices`` and ``scrubber device``: states, assignments, and warnings that must be visible."""

import asyncio
import json
import os
import re
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from scrubber.api import scrubber_pb2 as pb
from scrubber.cli.render.device_list import format_age
from scrubber.domain.errors import LedgerFailure
from tests.cli.stage import BROKEN, CLEAN, SICK, Ended, Service, run, serving, start
from tests.cli.terminal import WIDTHS, agrees_with, at_terminal
from tests.cli_samples import AT, CERTIFICATE, DEVICE, ENTRY, lately

SMALL = pb.Device(
    id="GPU-1f3a09c2-0000-4e0b-9a77-0c5d2b1e4f60",
    index="4",
    model="NVIDIA H200",
    memory_bytes=141 * 2**30,
    state="in-use",
    hygiene="in-use",
    health="suspect",
    tenant="team-with-a-long-name",
    pod="a-training-job-with-an-even-longer-name-7d9f",
    container="main",
    grant_count=17,
    advertised=True,
    policy="default",
)


@pytest.fixture
async def service(short_tmp: Path) -> AsyncIterator[Service]:
    async with serving(short_tmp) as service:
        yield service


def fresh(device: pb.Device, seconds: float) -> pb.Device:
    """Return ``device`` with an unused certificate of that age."""
    young = pb.Device()
    young.CopyFrom(device)
    young.certificate.CopyFrom(CERTIFICATE)
    young.certificate.ClearField("next_grant")
    young.certificate.issued_at = time.time() - seconds
    return young


def given_back(hygiene: str) -> pb.Device:
    """Return a device that a pod has released, and that no scrub has certified since."""
    device = pb.Device()
    device.CopyFrom(DEVICE)
    device.hygiene = hygiene
    return device


def cells(out: str) -> list[dict[str, str]]:
    """Return the rows of a table that was not fitted to a width."""
    header, *rows = (re.split(" {2,}", line) for line in out.splitlines())
    return [dict(zip(header, row, strict=True)) for row in rows]


def timeless(text: str) -> str:
    """Return ``text`` with every time replaced by the same one, which has the same width."""
    return re.sub(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", "2026-11-18T11:06:40Z", text)


class TestDevices:
    async def test_json_is_a_list_from_a_single_request(self, service: Service, short_tmp: Path) -> None:
        ended = await run(short_tmp, "devices", "-o", "json")
        assert (ended.code, ended.err) == (0, "")
        assert (ended.json["apiVersion"], ended.json["kind"]) == ("cli.scrubber.dev/v1", "DeviceList")
        assert service.requests == [pb.ListDevicesRequest()]
        clean, sick = ended.items
        assert (clean["metadata"]["name"], clean["hygiene"], clean["certificate"]["metadata"]["name"]) == (
            "SIM-GPU-aa",
            "clean",
            "c-7",
        )
        assert (sick["cause"]["message"], sick["certificate"]) == ("XID 95 was \x1b[31mseen.", None)
        assert sick["assignedTo"] == {"tenant": "red", "pod": "train", "container": "main", "claim": None, "job": None}

    async def test_unset_field_is_null(self, service: Service, short_tmp: Path) -> None:
        service.devices = [pb.Device(id="SIM-GPU-dd", index="3")]
        (unknown,) = (await run(short_tmp, "devices", "-o", "json")).items
        names = (
            "policy",
            "enforcement",
            "breakGlass",
            "baseline",
            "recoveryBlocker",
            "lastHandOverKind",
            "nextAttemptAt",
            "numaNode",
        )
        assert [unknown[name] for name in names] == [None] * len(names)

    async def test_yaml_equals_json(self, service: Service, short_tmp: Path) -> None:
        in_yaml, in_json = await run(short_tmp, "devices", "-o", "yaml"), await run(short_tmp, "devices", "-o", "json")
        assert yaml.safe_load(in_yaml.out) == in_json.json

    @pytest.mark.parametrize("hygiene", ["dirty", "scrubbing", "clean"])
    async def test_returned_device_has_no_tenant_until_the_next_grant(
        self, service: Service, short_tmp: Path, hygiene: str
    ) -> None:
        service.devices = [given_back(hygiene)]
        assert [row["TENANT"] for row in cells((await run(short_tmp, "devices")).out)] == ["-"]
        (item,) = (await run(short_tmp, "devices", "-o", "json")).items
        assert item["assignedTo"] is None
        assert [(each["sequence"], each["pod"]) for each in item["openGrants"]] == [(4, "train-0")]

    async def test_assigned_device_shows_its_tenant_whatever_its_health(
        self, service: Service, short_tmp: Path
    ) -> None:
        service.devices = [DEVICE]
        (item,) = (await run(short_tmp, "devices", "-o", "json")).items
        assert item["health"] == "quarantined"
        assert (item["assignedTo"]["tenant"], item["assignedTo"]["pod"]) == ("team-a", "train-0")
        assert [each["sequence"] for each in item["openGrants"]] == [4]

    async def test_name_output_prints_one_id_per_line(self, service: Service, short_tmp: Path) -> None:
        assert (await run(short_tmp, "devices", "-o", "name")).out == "SIM-GPU-aa\nSIM-GPU-bb\n"

    async def test_only_named_devices_are_listed_each_once(self, service: Service, short_tmp: Path) -> None:
        ended = await run(short_tmp, "devices", "SIM-GPU-b", "1", "-o", "name")
        assert ended == Ended(0, "SIM-GPU-bb\n", "")

    @pytest.mark.parametrize(
        ("name", "message"), [("7", "No device matches '7'"), ("SIM-GPU-", "is the prefix of 2 device ids")]
    )
    async def test_ambiguous_or_unknown_device_name_is_a_usage_error(
        self, service: Service, short_tmp: Path, name: str, message: str
    ) -> None:
        for command in ("devices", "device"):
            ended = await run(short_tmp, command, name)
            assert (ended.code, ended.out) == (2, "")
            assert message in ended.err

    async def test_table_without_a_terminal_is_not_truncated(self, service: Service, short_tmp: Path) -> None:
        service.devices = [fresh(CLEAN, 200), SMALL, DEVICE]
        clean, small, device = cells((await run(short_tmp, "devices", "-o", "wide")).out)
        assert (clean["HYGIENE"], clean["HEALTH"], clean["CERTIFICATE"]) == ("clean", "healthy", "3m")
        assert small["DEVICE"] == SMALL.id
        assert small["TENANT"] == "team-with-a-long-name/a-training-job-with-an-even-longer-name-7d9f"
        assert (small["CONTAINER"], clean["CONTAINER"]) == ("main", "-")
        assert (small["HEALTH"], small["CERTIFICATE"], small["MEMORY"]) == ("suspect", "-", "141 GiB")
        assert (device["CERTIFICATE"], device["POLICY"], device["GRANTS"]) == ("consumed", "h200", "4")

    async def test_device_offered_although_out_of_service_is_marked(self, service: Service, short_tmp: Path) -> None:
        service.devices = [CLEAN, BROKEN, SICK]
        clean, broken, sick = cells((await run(short_tmp, "devices", "-o", "wide")).out)
        assert [each["HEALTH"] for each in (clean, broken, sick)] == [
            "healthy",
            "quarantined, advertised",
            "quarantined",
        ]
        assert [each["CAUSE"] for each in (clean, broken, sick)] == ["-", "-", "xid-95"]
        assert broken["MESSAGE"] == (
            "Its policy only observes: no hand-over is refused. Break-glass override until 1970-01-01T00:01:00Z."
        )
        assert sick["MESSAGE"] == "XID 95 was \N{REPLACEMENT CHARACTER}[31mseen."

    async def test_unauthorized_use_is_a_cause_once(self, service: Service, short_tmp: Path) -> None:
        cause = pb.Cause(code="unauthorized-use", message="PID 7 used it.")
        service.devices = [
            pb.Device(id="a", index="0", unauthorized_users=["PID 7 uses it.", "PID 8 uses it."]),
            pb.Device(id="b", index="1", unauthorized_users=["PID 7 uses it."], cause=pb.Cause(code="xid-95")),
            pb.Device(id="c", index="2", unauthorized_users=["PID 7 uses it."], cause=cause),
        ]
        rows = cells((await run(short_tmp, "devices", "-o", "wide")).out)
        assert [each["CAUSE"] for each in rows] == ["unauthorized-use", "xid-95, unauthorized-use", "unauthorized-use"]
        assert rows[0]["MESSAGE"] == "PID 7 uses it. PID 8 uses it."

    async def test_holder_that_keeps_a_device_dirty_is_its_cause_and_named(
        self, service: Service, short_tmp: Path
    ) -> None:
        agent = pb.DeviceHolder(
            pid=4711, command="dcgm-exporter", kind="process", code="unknown-holder", namespace="monitoring",
            pod="dcgm-exporter-x", pod_uid="u", since=60.0, blocking=True,
        )  # fmt: skip
        allowed = pb.DeviceHolder(pid=8, kind="infrastructure", code="infrastructure-holder", unit="a.service")
        of_host = pb.DeviceHolder(pid=9, command="python", code="unknown-holder", since=60.0, blocking=True)
        unnamed = pb.DeviceHolder(pid=9, code="validation-holder", pod_uid="u-1", since=60.0, blocking=True)
        service.devices = [
            pb.Device(id="a", index="0", hygiene="dirty", holders=[agent, allowed]),
            pb.Device(id="b", index="1", hygiene="dirty", holders=[of_host], unauthorized_users=["PID 9 uses it."]),
            pb.Device(id="c", index="2", hygiene="dirty", holders=[unnamed]),
            pb.Device(id="d", index="3", hygiene="in-use", holders=[agent]),
            pb.Device(id="e", index="4", hygiene="clean", holders=[allowed]),
        ]
        rows = cells((await run(short_tmp, "devices", "-o", "wide")).out)
        causes = ["unknown-holder", "unauthorized-use", "validation-holder", "-", "-"]
        assert [each["CAUSE"] for each in rows] == causes
        since = "since 1970-01-01T00:01:00Z."
        assert [each["MESSAGE"] for each in rows[:3]] == [
            f"Held by PID 4711 (dcgm-exporter) of monitoring/dcgm-exporter-x {since}",
            f"PID 9 uses it. Held by PID 9 (python), outside all pods, {since}",
            f"Held by PID 9 (unknown) of pod u-1 {since}",
        ]

    async def test_table_has_few_columns_and_wide_has_all(self, service: Service, short_tmp: Path) -> None:
        table, wide = [(await run(short_tmp, "devices", "-o", output)).out for output in ("table", "wide")]
        few = ["INDEX", "DEVICE", "HYGIENE", "HEALTH", "TENANT", "CAUSE"]
        more = ["CONTAINER", "CERTIFICATE", "MEMORY", "GRANTS", "POLICY", "MODEL", "MESSAGE"]
        assert table.splitlines()[0].split() == few
        assert wide.splitlines()[0].split() == [*few, *more]

    @pytest.mark.parametrize("output", ["table", "wide"])
    async def test_no_headers_prints_the_rows_only(self, service: Service, short_tmp: Path, output: str) -> None:
        ended = await run(short_tmp, "devices", "--no-headers", "-o", output)
        assert [line.split()[:2] for line in ended.out.splitlines()] == [["0", "SIM-GPU-aa"], ["1", "SIM-GPU-bb"]]

    @pytest.mark.parametrize("output", ["json", "yaml", "name"])
    async def test_no_headers_has_no_effect_on_other_formats(
        self, service: Service, short_tmp: Path, output: str
    ) -> None:
        with_flag = await run(short_tmp, "devices", "--no-headers", "-o", output)
        assert with_flag == await run(short_tmp, "devices", "-o", output)

    async def test_policy_of_each_device_is_named_even_if_it_is_the_nodes(
        self, service: Service, short_tmp: Path
    ) -> None:
        service.devices = [CLEAN, BROKEN]
        rows = cells((await run(short_tmp, "devices", "-o", "wide")).out)
        assert [row["POLICY"] for row in rows] == [service.info.policy, "h200"]

    @pytest.mark.parametrize(
        ("more", "progress"),
        [
            ({"next_attempt_at": 9.5}, "0 of 2 clean scrubs; next at 1970-01-01T00:00:09Z"),
            ({"next_attempt_at": 9.5, "active_scrub_id": "s-1"}, "0 of 2 clean scrubs; the next is running"),
            ({"hygiene": "in-use"}, "0 of 2 clean scrubs; next when it is released"),
            ({"probation_scrubs_passed": 1}, "1 of 2 clean scrubs; the next is due"),
        ],
    )
    async def test_progress_of_a_probation_is_shown(
        self, service: Service, short_tmp: Path, more: dict[str, Any], progress: str
    ) -> None:
        cause = pb.Cause(code="xid-95", message="XID 95 was seen.", recovery_method="reset")
        service.devices = [
            pb.Device(
                id="x",
                index="0",
                state="probation",
                health="probation",
                probation_scrubs_required=2,
                cause=cause,
                **more,
            )
        ]
        (row,) = cells((await run(short_tmp, "devices", "-o", "wide")).out)
        assert row["HEALTH"] == f"probation, {progress.partition(' clean')[0]}"
        assert f"On probation: {progress}." in row["MESSAGE"]
        shown = (await run(short_tmp, "device", "0")).out
        assert f"  It returns to service after its probation: {progress}.\n" in shown

    async def test_break_glass_override_is_shown_below_the_table_with_actor_and_reason(
        self, service: Service, short_tmp: Path
    ) -> None:
        service.devices = [CLEAN, BROKEN]
        ended = await run(short_tmp, "devices")
        assert ended.code == 0
        assert ended.err == (
            "Note: Device 2 (SIM-GPU-cc) is handed over whatever its checks find until 1970-01-01T00:01:00Z: "
            "break-glass override by uid:7 (a deadline\N{REPLACEMENT CHARACTER}[2J). "
            "To end it, run `scrubber break-glass 2 --end --reason …`.\n"
        )

    async def test_open_breaker_is_shown_below_the_table(self, service: Service, short_tmp: Path) -> None:
        service.info = pb.ServiceInfo(
            policy="default",
            breaker=pb.Breaker(
                resets_stopped_reason="8 resets in 60 minutes.",
                resets_stopped_until=60.0,
                soft_quarantines_stopped_reason="2 are out.",
                awaiting_reset_ids=[SICK.id],
                kept_in_service_ids=[CLEAN.id],
            ),
        )
        assert (await run(short_tmp, "devices")).err == (
            "Note: 8 resets in 60 minutes. The next reset is allowed at 1970-01-01T00:01:00Z.\nNote: 2 are out.\n"
        )
        of_one = [(await run(short_tmp, "devices", each)).err for each in (SICK.id, CLEAN.id)]
        assert of_one == [
            "Note: 8 resets in 60 minutes. The next reset is allowed at 1970-01-01T00:01:00Z.\n",
            "Note: 2 are out.\n",
        ]
        service.info = pb.ServiceInfo(policy="default", breaker=pb.Breaker())
        assert (await run(short_tmp, "devices")).err == ""

    async def test_node_without_devices_prints_an_empty_list(self, service: Service, short_tmp: Path) -> None:
        service.devices = []
        assert (await run(short_tmp, "devices", "-o", "json")).items == []
        assert await run(short_tmp, "devices") == Ended(0, "", "There are no devices on this node.\n")

    async def test_closed_output_exits_without_an_error_message(self, service: Service, short_tmp: Path) -> None:
        reading, writing = os.pipe()
        os.close(reading)
        process = await start(short_tmp, "devices", "-o", "json", stdout=writing)
        os.close(writing)
        _, err = await process.communicate()
        assert (process.returncode, err) == (1, b"")

    @pytest.mark.parametrize(
        ("seconds", "text"),
        [(-5.0, "0s"), (0.4, "0s"), (59.9, "59s"), (60, "1m"), (3599, "59m"), (7200, "2h"), (200_000, "2d")],
    )
    def test_age_is_shown_in_its_largest_whole_unit(self, seconds: float, text: str) -> None:
        assert format_age(seconds) == text


class TestDevice:
    @pytest.fixture(autouse=True)
    def known(self, service: Service) -> None:
        service.devices, service.entries = [CLEAN, DEVICE], [ENTRY]

    async def test_json_is_the_device_and_its_history(self, service: Service, short_tmp: Path) -> None:
        ended = await run(short_tmp, "device", "3", "-o", "json")
        assert (ended.code, ended.err, ended.json["kind"]) == (0, "", "Device")
        (entry,) = ended.json["history"]
        (listed,) = (await run(short_tmp, "devices", "3", "-o", "json")).items
        assert (entry["sequence"], entry["scrub"]["metadata"]["name"]) == (41, "scrub-77aa01")
        assert {name: ended.json[name] for name in listed} == listed

    async def test_history_is_the_newest_twenty_rows_or_the_requested_number(
        self, service: Service, short_tmp: Path
    ) -> None:
        for words in ((), ("--limit", "300"), ("--limit", "0")):
            assert (await run(short_tmp, "device", "GPU-1", *words)).code == 0
        queries = [each for each in service.requests if isinstance(each, pb.GetHistoryRequest)]
        assert queries == [pb.GetHistoryRequest(device=DEVICE.id, limit=limit) for limit in (20, 300)]

    async def test_healthy_device_output_is_short(self, service: Service, short_tmp: Path) -> None:
        service.entries = []
        out = (await run(short_tmp, "device", "0")).out
        assert "\nAssigned to\nnone\n" in out
        assert "\nBaseline\nnot recorded\n" in out
        assert not {"cause", "blocked by", "reset", "break-glass", "failures"} & {
            line.split("  ")[0] for line in out.splitlines()
        }

    async def test_claim_of_several_pods_is_shown_by_its_name(self, service: Service, short_tmp: Path) -> None:
        claim = pb.Claim(uid="claim-uid-1", namespace="team-a", name="gpus")
        pods = [pb.ClaimPod(uid=f"uid-{number}", namespace="team-a", name=f"train-{number}") for number in range(2)]
        grant = pb.OpenGrant(sequence=4, tenant="team-a", claim=claim, claim_pods=pods, granted_at=AT)
        shared = pb.Device(id="GPU-1", index="0", hygiene="in-use", tenant="team-a", claim=claim, open_grants=[grant])
        service.devices = [shared]
        assert re.search(r"\n4 +team-a \(claim gpus, 2 pods\) ", (await run(short_tmp, "device", "0")).out)
        assert "team-a/claim gpus" in (await run(short_tmp, "devices")).out

    async def test_last_tenant_of_a_returned_device_is_shown_separately(
        self, service: Service, short_tmp: Path
    ) -> None:
        service.devices = [DEVICE]
        out = (await run(short_tmp, "device", "3")).out
        assert re.search(r"\nAssigned to\nGRANT .*\n4 +team-a/train-0/main ", out)
        assert "Previously assigned to" not in out
        service.devices = [given_back("dirty")]
        out = (await run(short_tmp, "device", "3")).out
        assert re.search(
            r"\nAssigned to\nnone, but it is used without a grant\n\nPreviously assigned to\nGRANT .*\n4 +team-a/train-0/main ",
            out,
        )

    @pytest.mark.parametrize(
        ("more", "expected"),
        [
            ({"enforcement": "enforce"}, "pending: the device is not handed over before it"),
            (
                {"enforcement": "observe"},
                "pending: the device is handed over without it because its policy only observes",
            ),
            (
                {"enforcement": "observe", "break_glass": pb.BreakGlass(expires_at=60.0, reason="r", actor="uid:0")},
                "pending: the device is handed over without it while break-glass is active",
            ),
        ],
    )
    async def test_hand_over_behaviour_while_a_reset_is_required_is_shown(
        self, service: Service, short_tmp: Path, more: dict[str, Any], expected: str
    ) -> None:
        service.devices = [pb.Device(id="x", index="0", reset_pending=True, **more)]
        (line,) = (each for each in (await run(short_tmp, "device", "0")).out.splitlines() if each.startswith("reset "))
        assert line.split(maxsplit=1)[1] == expected

    @pytest.mark.parametrize(
        ("way", "is_shown"), [("scrub", True), ("reset", True), ("wait", True), ("reboot", False), ("operator", False)]
    )
    async def test_next_recovery_attempt_is_shown_only_where_the_service_makes_one(
        self, service: Service, short_tmp: Path, way: str, is_shown: bool
    ) -> None:
        service.devices = [
            pb.Device(
                id="x",
                index="0",
                cause=pb.Cause(code="c", recovery_method=way),
                next_attempt_at=9.5,
                failed_recoveries=1,
            )
        ]
        out = (await run(short_tmp, "device", "0")).out
        assert ("next attempt" in out) is is_shown
        assert ("due since 1970-01-01T00:00:09Z, " in out) is is_shown
        assert "1 recovery attempt failed" in out

    async def test_recovery_instruction_names_the_device_in_the_command(
        self, service: Service, short_tmp: Path
    ) -> None:
        service.devices = [pb.Device(id="x", index="4", cause=pb.Cause(code="operator", recovery_method="operator"))]
        assert "scrubber unquarantine 4 --reason …\n" in (await run(short_tmp, "device", "4")).out

    async def test_unknown_next_action_is_shown_unchanged(self, service: Service, short_tmp: Path) -> None:
        service.devices = [pb.Device(id="x", index="0", cause=pb.Cause(code="new", recovery_method="prayer"))]
        assert "recovery  prayer\n" in re.sub(" {3,}", "  ", (await run(short_tmp, "device", "0")).out)

    async def test_operator_text_is_escaped(self, service: Service, short_tmp: Path) -> None:
        hostile = pb.Device(
            id="x", index="0", recovery_blocker="\x1b[2J", break_glass=pb.BreakGlass(reason="\x1b[2J", actor="uid:7")
        )
        hostile.baseline.CopyFrom(pb.Baseline(reason="\x1b[2J", facts=[pb.Fact(name="\x1b[2J", actual="\x1b[2J")]))
        service.devices = [hostile]
        out = (await run(short_tmp, "device", "0")).out
        assert "\x1b" not in out
        assert out.count("\N{REPLACEMENT CHARACTER}[2J") == 5

    async def test_device_without_readable_history_is_an_error(self, service: Service, short_tmp: Path) -> None:
        class Damaged(Service):
            async def GetHistory(self, request: object, context: object) -> pb.GetHistoryResponse:
                self.error = LedgerFailure("The ledger is damaged.")
                await self._answer(request, context)
                raise AssertionError("not reached")

        directory = short_tmp / "damaged"
        directory.mkdir()
        async with serving(directory, Damaged(devices=[DEVICE])):
            ended = await run(directory, "device", "3", "-o", "json")
        assert ended == Ended(1, "", "Error: The ledger is damaged.\n")


class TestOnATerminal:
    @pytest.mark.parametrize("columns", WIDTHS)
    @pytest.mark.parametrize("output", ["table", "wide"])
    async def test_device_list_fits_the_terminal(
        self, service: Service, short_tmp: Path, columns: int, output: str
    ) -> None:
        service.devices = [fresh(CLEAN, 200), SMALL, lately(DEVICE), BROKEN]
        environment = {"SCRUBBER_SOCKET_DIR": str(short_tmp), "SCRUBBER_OUTPUT": output}
        result = await at_terminal("devices", columns=columns, environment=environment)
        assert result.code == 0
        agrees_with(f"devices-{columns}" if output == "table" else f"devices-wide-{columns}", timeless(result.text))

    async def test_row_of_a_common_pod_and_cause_is_one_line_of_80_columns(
        self, service: Service, short_tmp: Path
    ) -> None:
        usual = lately(DEVICE)
        usual.ClearField("break_glass")
        usual.advertised = False
        usual.cause.code = "unauthorized-use"
        service.devices = [CLEAN, usual]
        result = await at_terminal("devices", columns=80, environment={"SCRUBBER_SOCKET_DIR": str(short_tmp)})
        assert len(result.text.splitlines()) == 3
        assert re.search(r" quarantined +team-a/train-0 +unauthorized-use$", result.text, re.MULTILINE)

    async def test_shortened_id_is_accepted_as_an_argument(self, service: Service, short_tmp: Path) -> None:
        service.devices = [SMALL, lately(DEVICE)]
        result = await at_terminal("devices", columns=80, environment={"SCRUBBER_SOCKET_DIR": str(short_tmp)})
        shown = result.text.splitlines()[1].split()[1]
        assert shown.endswith("…")
        assert (await run(short_tmp, "devices", shown, "-o", "name")).out == f"{SMALL.id}\n"

    @pytest.mark.parametrize("columns", WIDTHS)
    async def test_device_details_fit_the_terminal(self, service: Service, short_tmp: Path, columns: int) -> None:
        service.devices, service.entries = [lately(DEVICE)], [ENTRY]
        result = await at_terminal("device", "3", columns=columns, environment={"SCRUBBER_SOCKET_DIR": str(short_tmp)})
        assert result.code == 0
        agrees_with(f"device-{columns}", timeless(result.text))

    async def test_states_are_coloured_unless_colours_are_disabled(self, service: Service, short_tmp: Path) -> None:
        socket = {"SCRUBBER_SOCKET_DIR": str(short_tmp)}
        coloured = await at_terminal("devices", columns=80, environment=socket)
        assert b"\x1b[31mquarantined\x1b[0m" in coloured.raw
        assert b"\x1b[32mclean\x1b[0m" in coloured.raw
        for plain in ({"NO_COLOR": "1"}, {"TERM": "dumb"}):
            result = await at_terminal("devices", columns=80, environment=socket | plain)
            assert b"\x1b" not in result.raw
            assert result.text == coloured.text

    async def test_json_on_a_terminal_is_plain_json(self, service: Service, short_tmp: Path) -> None:
        result = await at_terminal(
            "devices", "-o", "json", columns=80, environment={"SCRUBBER_SOCKET_DIR": str(short_tmp)}, streams=["stderr"]
        )
        assert len(json.loads(result.out)["items"]) == 2

    async def test_interrupt_exits_with_130(self, service: Service, short_tmp: Path) -> None:
        class Slow(Service):
            async def ListDevices(self, request: object, context: object) -> pb.ListDevicesResponse:
                self.reached.set()
                await asyncio.Event().wait()
                raise AssertionError("not reached")

        directory = short_tmp / "slow"
        directory.mkdir()
        async with serving(directory, slow := Slow()):
            process = await start(directory, "devices")
            await slow.reached.wait()
            process.send_signal(2)
            out, err = await process.communicate()
        assert (process.returncode, out, err) == (130, b"", b"")
