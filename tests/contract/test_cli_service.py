"""The command against a service on real sockets: what a script gets on standard output, and which exit code."""

import asyncio
import json
import os
import pty
import re
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import pytest
import yaml

from scrubber.api import scrubber_pb2 as pb
from scrubber.api import scrubber_pb2_grpc
from scrubber.api.sockets import Purpose, Sockets, target
from scrubber.api.status import status_of
from scrubber.domain.errors import (
    Held,
    InvalidRequest,
    LedgerFailure,
    NotPermitted,
    NotReady,
    Quarantined,
    Unreadable,
)

CLEAN = pb.Device(
    id="SIM-GPU-aa",
    index="0",
    model="Simulated GPU",
    memory_bytes=256 * 1024 * 1024,
    state="clean",
    hygiene="clean",
    health="healthy",
    certificate=pb.Certificate(
        id="c-7",
        node="n1",
        boot="b1",
        driver="sim-1",
        device="SIM-GPU-aa",
        sequence=7,
        previous_grant=3,
        path="slow",
        scrub="s-9",
        covered=["memory: 268435456 of 268435456 bytes cleared and verified"],
        not_covered=["on-chip memory"],
        policy="default",
        policy_digest="d",
        issued_at=1.5,
    ),
    grants=3,
    numa_node=0,
    profile="1g.10gb",
    peers=["SIM-GPU-bb"],
    traits={"vbios": "96.00.89", "pci_address": "0000:01:00.0"},
    offered=True,
    policy="default",
    enforcement="enforce",
)
SICK = pb.Device(
    id="SIM-GPU-bb",
    index="1",
    model="Simulated GPU",
    memory_bytes=1000,
    state="quarantined",
    hygiene="dirty",
    health="quarantined",
    cause=pb.Cause(code="xid-95", sentence="XID 95 was \x1b[31mseen.", way_back="reset", since=2.5, actor="service"),
    tenant_namespace="red",
    pod="train",
    container="main",
    retry_at=9.5,
    parent="SIM-GPU-aa",
    scrub="s-10",
    policy="default",
    enforcement="enforce",
    failures=2,
)
BROKEN = pb.Device(
    id="SIM-GPU-cc",
    index="2",
    state="quarantined",
    offered=True,
    policy="h200",
    enforcement="observe",
    glass=pb.Glass(until=60.0, reason="a deadline\x1b[2J", actor="uid:7"),
)
PASSED = pb.ScrubUpdate(
    result=pb.ScrubResult(
        scrub=pb.Scrub(
            id="s-9",
            device="SIM-GPU-aa",
            path="slow",
            occasion="on-demand",
            started=1.0,
            ended=1.5,
            outcome="passed",
            certificate="c-7",
            actor="uid:0",
            steps=[
                pb.StepResult(
                    step="memory",
                    verdict="passed",
                    seconds=0.25,
                    measured_json='{"residue_bytes": 12}',
                    findings=[
                        pb.Finding(
                            step="memory",
                            code="residue",
                            severity="note",
                            sentence="12 bytes were not zero.",
                            evidence_json='{"first_offset": 0}',
                        )
                    ],
                )
            ],
        ),
        certificate=CLEAN.certificate,
        device=CLEAN,
    )
)
HALFWAY = pb.ScrubUpdate(
    progress=pb.ScrubProgress(
        scrub="s-9", device="SIM-GPU-aa", step="memory", phase="clear", done_bytes=50, total_bytes=100
    )
)


@dataclass
class Service(scrubber_pb2_grpc.ReadServicer, scrubber_pb2_grpc.AdminServicer):
    """Answers what a test put in, or raises it; remembers what it was asked."""

    devices: list[pb.Device] = field(default_factory=lambda: [CLEAN, SICK])
    info: pb.ServiceInfo = field(default_factory=lambda: pb.ServiceInfo(policy="default", enforcement="enforce"))
    entries: list[pb.HistoryEntry] = field(default_factory=list)
    updates: list[pb.ScrubUpdate] = field(default_factory=lambda: [HALFWAY, PASSED])
    error: Exception | None = None
    endless: bool = False
    asked: list[Any] = field(default_factory=list)
    reached: asyncio.Event = field(default_factory=asyncio.Event)
    left: asyncio.Event = field(default_factory=asyncio.Event)

    async def _answer(self, request: Any, context: Any) -> None:
        self.asked.append(request)
        self.reached.set()
        if self.error is not None:
            status = status_of(self.error, public=False)
            await context.abort(status.code, status.details, status.metadata)

    async def ListDevices(self, request: Any, context: Any) -> pb.ListDevicesResponse:
        await self._answer(request, context)
        return pb.ListDevicesResponse(version=1, devices=self.devices)

    async def GetServiceInfo(self, request: Any, context: Any) -> pb.ServiceInfo:
        await self._answer(request, context)
        return self.info

    async def GetHistory(self, request: Any, context: Any) -> pb.GetHistoryResponse:
        await self._answer(request, context)
        return pb.GetHistoryResponse(entries=self.entries)

    async def Scrub(self, request: Any, context: Any) -> AsyncIterator[pb.ScrubUpdate]:
        await self._answer(request, context)
        try:
            for update in self.updates:
                yield update
            if self.endless:
                await asyncio.Event().wait()
        finally:
            self.left.set()

    async def Quarantine(self, request: Any, context: Any) -> pb.DeviceAnswer:
        await self._answer(request, context)
        return pb.DeviceAnswer(device=SICK)

    async def Unquarantine(self, request: Any, context: Any) -> pb.DeviceAnswer:
        await self._answer(request, context)
        return pb.DeviceAnswer(device=CLEAN)

    async def BreakGlass(self, request: Any, context: Any) -> pb.DeviceAnswer:
        await self._answer(request, context)
        return pb.DeviceAnswer(device=BROKEN if request.seconds else SICK)


@pytest.fixture
async def service(short_tmp: Path) -> AsyncIterator[Service]:
    servicer, server = Service(), grpc.aio.server()
    scrubber_pb2_grpc.add_ReadServicer_to_server(servicer, server)
    scrubber_pb2_grpc.add_AdminServicer_to_server(servicer, server)
    for purpose in (Purpose.READ, Purpose.ADMIN):
        path = Sockets(short_tmp).path(purpose)
        path.parent.mkdir()
        server.add_insecure_port(target(path))
    await server.start()
    yield servicer
    await server.stop(None)


@dataclass(frozen=True)
class Ended:
    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


def environment(sockets: Path, **more: str) -> dict[str, str]:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("SCRUBBER_")}
    return inherited | {"SCRUBBER_SOCKET": str(sockets)} | more


async def start(
    sockets: Path,
    *words: str,
    stdin: int = asyncio.subprocess.DEVNULL,
    stdout: int = asyncio.subprocess.PIPE,
    stderr: int = asyncio.subprocess.PIPE,
) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "scrubber.cli.main",
        *words,
        env=environment(sockets),
        stdin=stdin,
        stdout=stdout,
        stderr=stderr,
    )


async def run(sockets: Path, *words: str) -> Ended:
    process = await start(sockets, *words)
    out, err = await process.communicate()
    assert process.returncode is not None
    assert "Traceback" not in err.decode()
    return Ended(process.returncode, out.decode(), err.decode())


class TestDevices:
    async def test_json_is_a_list_with_what_scripts_ask_for(self, service: Service, short_tmp: Path) -> None:
        ended = await run(short_tmp, "devices", "-o", "json")
        assert (ended.code, ended.err) == (0, "")
        clean, sick = ended.json
        assert clean == {
            "id": "SIM-GPU-aa",
            "index": "0",
            "model": "Simulated GPU",
            "memory_bytes": 268435456,
            "state": "clean",
            "hygiene": "clean",
            "health": "healthy",
            "cause": None,
            "retry_at": None,
            "certificate": {
                "id": "c-7",
                "device": "SIM-GPU-aa",
                "sequence": 7,
                "path": "slow",
                "scrub": "s-9",
                "issued_at": 1.5,
                "previous_grant": 3,
                "next_grant": None,
                "covered": ["memory: 268435456 of 268435456 bytes cleared and verified"],
                "not_covered": ["on-chip memory"],
                "policy": "default",
                "policy_digest": "d",
                "rests_on": None,
                "node": "n1",
                "boot": "b1",
                "driver": "sim-1",
            },
            "tenant_namespace": None,
            "pod": None,
            "container": None,
            "kind": None,
            "grants": 3,
            "scrub": None,
            "parent": None,
            "numa_node": 0,
            "profile": "1g.10gb",
            "peers": ["SIM-GPU-bb"],
            "traits": {"pci_address": "0000:01:00.0", "vbios": "96.00.89"},
            "offered": True,
            "policy": "default",
            "enforcement": "enforce",
            "glass": None,
            "failures": 0,
        }
        assert service.asked == [pb.ListDevicesRequest()], "a script asks one question"
        assert sick["certificate"] is None
        assert sick["cause"] == {
            "code": "xid-95",
            "sentence": "XID 95 was \x1b[31mseen.",
            "way_back": "reset",
            "since": 2.5,
            "actor": "service",
        }
        assert (sick["tenant_namespace"], sick["pod"], sick["container"]) == ("red", "train", "main")
        assert (sick["retry_at"], sick["parent"], sick["scrub"]) == (9.5, "SIM-GPU-aa", "s-10")
        assert (sick["offered"], sick["failures"]) == (False, 2)

    async def test_json_tells_whose_rules_a_device_is_under(self, service: Service, short_tmp: Path) -> None:
        service.devices = [BROKEN, pb.Device(id="SIM-GPU-dd", index="3")]
        service.info = pb.ServiceInfo(policy="default", breaker=pb.Breaker(soft="Stopped."))
        ended = await run(short_tmp, "devices", "-o", "json")
        broken, unknown = ended.json
        assert (broken["offered"], broken["policy"], broken["enforcement"]) == (True, "h200", "observe")
        assert broken["glass"] == {"until": 60.0, "reason": "a deadline\x1b[2J", "actor": "uid:7"}
        # An older service says nothing of all that.
        assert (unknown["policy"], unknown["enforcement"], unknown["glass"]) == (None, None, None)
        assert ended.err == ""

    async def test_yaml_says_the_same_as_json(self, service: Service, short_tmp: Path) -> None:
        in_yaml, in_json = await run(short_tmp, "devices", "-o", "yaml"), await run(short_tmp, "devices", "-o", "json")
        assert yaml.safe_load(in_yaml.out) == in_json.json

    async def test_names_feed_another_command(self, service: Service, short_tmp: Path) -> None:
        assert (await run(short_tmp, "devices", "-o", "name")).out == "SIM-GPU-aa\nSIM-GPU-bb\n"

    async def test_the_table_passes_nothing_on_that_a_terminal_would_act_on(
        self, service: Service, short_tmp: Path
    ) -> None:
        header, clean, sick = (await run(short_tmp, "devices")).out.splitlines()
        assert header.split() == [
            *("INDEX", "DEVICE", "STATE", "MEMORY", "GRANTS", "POD", "CERTIFICATE", "POLICY", "CAUSE")
        ]
        assert clean.split() == ["0", "SIM-GPU-aa", "clean", "256", "MiB", "3", "-", "c-7", "-", "-"]
        assert "red/train/main" in sick
        assert sick.endswith("xid-95: XID 95 was \N{REPLACEMENT CHARACTER}[31mseen.")

    async def test_the_table_names_the_rules_that_are_not_the_nodes(self, service: Service, short_tmp: Path) -> None:
        observed = pb.Device(id="SIM-GPU-dd", index="3", state="clean", policy="default", enforcement="observe")
        older = pb.Device(id="SIM-GPU-ee", index="4", state="clean")
        service.devices = [CLEAN, BROKEN, observed, older]
        ended = await run(short_tmp, "devices")
        header, *rows = (re.split(" {2,}", line) for line in ended.out.splitlines())
        assert [row[header.index("POLICY")] for row in rows] == [
            "-",
            "h200, observe, glass broken until 1970-01-01T00:01:00Z",
            "observe",
            "-",
        ]

    async def test_a_broken_glass_stands_under_the_table_with_who_and_why(
        self, service: Service, short_tmp: Path
    ) -> None:
        service.devices = [CLEAN, BROKEN]
        ended = await run(short_tmp, "devices")
        assert ended.code == 0
        assert ended.err == (
            "Note: Until 1970-01-01T00:01:00Z nothing is refused for device 2 (SIM-GPU-cc), whatever is known of it: "
            "uid:7 broke the glass (a deadline\N{REPLACEMENT CHARACTER}[2J). "
            "scrubber break-glass 2 --end --reason … ends that now.\n"
        )

    async def test_what_the_service_no_longer_does_by_itself_stands_under_the_table(
        self, service: Service, short_tmp: Path
    ) -> None:
        service.info = pb.ServiceInfo(
            policy="default", breaker=pb.Breaker(resets="8 resets in 60 minutes.", resets_until=60.0, soft="2 are out.")
        )
        assert (await run(short_tmp, "devices")).err == (
            "Note: 8 resets in 60 minutes. The next one may be at 1970-01-01T00:01:00Z.\nNote: 2 are out.\n"
        )
        service.info = pb.ServiceInfo(policy="default", breaker=pb.Breaker())
        assert (await run(short_tmp, "devices")).err == ""

    async def test_no_devices_are_an_empty_list(self, service: Service, short_tmp: Path) -> None:
        service.devices = []
        assert (await run(short_tmp, "devices", "-o", "json")).json == []
        assert await run(short_tmp, "devices") == Ended(0, "", "There are no devices on this node.\n")

    async def test_a_reader_that_leaves_early_is_no_error(self, service: Service, short_tmp: Path) -> None:
        reading, writing = os.pipe()
        os.close(reading)
        process = await start(short_tmp, "devices", "-o", "json", stdout=writing)
        os.close(writing)
        _, err = await process.communicate()
        assert (process.returncode, err) == (1, b"")


class TestScrub:
    async def test_json_is_the_scrub_its_certificate_and_the_device(self, service: Service, short_tmp: Path) -> None:
        ended = await run(short_tmp, "scrub", "0", "--path", "fast", "--wait", "-o", "json")
        assert (ended.code, ended.err) == (0, "")
        assert service.asked == [pb.ScrubRequest(device="0", path="fast")]
        assert set(ended.json) == {"scrub", "certificate", "device"}
        assert ended.json["certificate"]["id"] == "c-7"
        assert ended.json["device"]["state"] == "clean"
        assert ended.json["scrub"] == {
            "id": "s-9",
            "device": "SIM-GPU-aa",
            "path": "slow",
            "occasion": "on-demand",
            "started": 1.0,
            "ended": 1.5,
            "outcome": "passed",
            "certificate": "c-7",
            "actor": "uid:0",
            "steps": [
                {
                    "step": "memory",
                    "verdict": "passed",
                    "seconds": 0.25,
                    "measured": {"residue_bytes": 12},
                    "not_covered": [],
                    "findings": [
                        {
                            "code": "residue",
                            "severity": "note",
                            "sentence": "12 bytes were not zero.",
                            "evidence": {"first_offset": 0},
                        }
                    ],
                }
            ],
        }

    async def test_a_person_reads_what_was_covered_and_what_was_not(self, service: Service, short_tmp: Path) -> None:
        out = (await run(short_tmp, "scrub", "0")).out
        assert service.asked == [pb.ScrubRequest(device="0", path="slow")]
        lines = [line.split(maxsplit=1) for line in out.splitlines()]
        assert ["covered", "memory: 268435456 of 268435456 bytes cleared and verified"] in lines
        assert ["not", "covered  on-chip memory"] in lines
        assert ["finding", "note: 12 bytes were not zero."] in lines

    @pytest.mark.parametrize(("outcome", "code"), [("failed", 1), ("abandoned", 1), ("held-up", 3)])
    async def test_only_a_proof_exits_with_zero(
        self, service: Service, short_tmp: Path, outcome: str, code: int
    ) -> None:
        scrub = pb.Scrub(id="s-9", device="SIM-GPU-bb", path="slow", outcome=outcome)
        service.updates = [pb.ScrubUpdate(result=pb.ScrubResult(scrub=scrub, device=SICK))]
        ended = await run(short_tmp, "scrub", "1", "-o", "json")
        assert ended.code == code
        assert ended.json["scrub"]["outcome"] == outcome
        assert ended.json["certificate"] is None

    async def test_without_waiting_it_names_the_scrub_and_leaves(self, service: Service, short_tmp: Path) -> None:
        service.updates, service.endless = [HALFWAY], True
        ended = await run(short_tmp, "scrub", "0", "--no-wait", "-o", "json")
        assert ended.code == 0
        assert (ended.json["scrub"]["id"], ended.json["scrub"]["outcome"]) == ("s-9", None)
        assert (ended.json["certificate"], ended.json["device"]) == (None, None)
        await service.left.wait()

    async def test_a_wait_that_is_over_first_exits_with_four(self, service: Service, short_tmp: Path) -> None:
        service.updates, service.endless = [HALFWAY], True
        ended = await run(short_tmp, "scrub", "0", "--timeout", "3s")
        assert (ended.code, ended.out) == (4, "")
        assert ended.err.startswith("Error: Scrub s-9 of device SIM-GPU-aa is still under way and goes on;")

    async def test_a_service_that_says_nothing_in_time_is_no_verdict(self, service: Service, short_tmp: Path) -> None:
        service.updates, service.endless = [], True
        ended = await run(short_tmp, "scrub", "0", "--timeout", "1")
        assert (ended.code, ended.out) == (1, "")

    async def test_an_answer_without_a_result_is_no_verdict(self, service: Service, short_tmp: Path) -> None:
        service.updates = [HALFWAY]
        ended = await run(short_tmp, "scrub", "0")
        assert (ended.code, ended.out) == (1, "")
        assert "before the scrub of device 0 had ended" in ended.err

    async def test_an_interrupt_exits_with_130_and_leaves_the_scrub(self, service: Service, short_tmp: Path) -> None:
        service.updates, service.endless = [HALFWAY], True
        process = await start(short_tmp, "scrub", "0")
        await service.reached.wait()
        process.send_signal(signal.SIGINT)
        out, err = await process.communicate()
        assert (process.returncode, out, err) == (130, b"", b"")

    async def test_progress_goes_to_a_terminal_and_the_verdict_to_the_script(
        self, service: Service, short_tmp: Path
    ) -> None:
        ours, theirs = pty.openpty()
        try:
            process = await start(short_tmp, "scrub", "0", "-o", "json", stderr=theirs)
            out, _ = await process.communicate()
            shown = os.read(ours, 65536)
        finally:
            os.close(theirs)
            os.close(ours)
        assert process.returncode == 0
        assert json.loads(out)["scrub"]["id"] == "s-9"
        assert b"memory clear" in shown


class TestQuarantine:
    async def test_the_reason_goes_with_the_order(self, service: Service, short_tmp: Path) -> None:
        ended = await run(short_tmp, "quarantine", "SIM-GPU-b", "--reason", "smells burnt", "-o", "json")
        assert (ended.code, ended.err) == (0, "")
        assert service.asked == [pb.QuarantineRequest(device="SIM-GPU-b", reason="smells burnt")]
        assert (ended.json["id"], ended.json["state"]) == ("SIM-GPU-bb", "quarantined")

    async def test_a_person_lets_it_back_in(self, service: Service, short_tmp: Path) -> None:
        ended = await run(short_tmp, "unquarantine", "0", "--reason", "new fan", "-o", "name")
        assert ended == Ended(0, "SIM-GPU-aa\n", "")
        assert service.asked == [pb.QuarantineRequest(device="0", reason="new fan")]

    @pytest.mark.parametrize("words", [(), ("--reason", "  ")])
    async def test_without_a_reason_nothing_is_asked(
        self, service: Service, short_tmp: Path, words: tuple[str, ...]
    ) -> None:
        ended = await run(short_tmp, "quarantine", "0", *words)
        assert (ended.code, ended.out, service.asked) == (2, "", [])
        assert "--reason" in ended.err


class TestBreakGlass:
    async def test_time_and_reason_go_with_the_order(self, service: Service, short_tmp: Path) -> None:
        words = ("break-glass", "2", "--for", "30m", "--reason", "a deadline", "--yes")
        ended = await run(short_tmp, *words, "-o", "json")
        assert (ended.code, ended.err) == (0, "")
        assert service.asked == [pb.BreakGlassRequest(device="2", reason="a deadline", seconds=1800.0)]
        assert (ended.json["id"], ended.json["glass"]["until"]) == ("SIM-GPU-cc", 60.0)

    async def test_ending_it_asks_nobody(self, service: Service, short_tmp: Path) -> None:
        ended = await run(short_tmp, "break-glass", "1", "--end", "--reason", "it held", "-o", "name")
        assert ended == Ended(0, "SIM-GPU-bb\n", "")
        assert service.asked == [pb.BreakGlassRequest(device="1", reason="it held", seconds=0.0)]

    @pytest.mark.parametrize(
        ("words", "named"),
        [
            (("--for", "30m", "--yes"), "--reason"),
            (("--for", "30m", "--reason", " ", "--yes"), "--reason"),
            (("--end",), "--reason"),
            (("--for", "30m", "--reason", "why"), "--yes"),
            (("--reason", "why", "--yes"), "--for"),
            (("--for", "30m", "--end", "--reason", "why", "--yes"), "--end"),
            (("--for", "0", "--reason", "why", "--yes"), "--for"),
            (("--for", "0ms", "--reason", "why", "--yes"), "--for"),
            (("--for", "nan", "--reason", "why", "--yes"), "--for"),
            (("--for", "inf", "--reason", "why", "--yes"), "--for"),
            (("--for=-5", "--reason", "why", "--yes"), "--for"),
            (("--for", "soon", "--reason", "why", "--yes"), "--for"),
        ],
    )
    async def test_an_order_that_is_not_whole_is_not_given(
        self, service: Service, short_tmp: Path, words: tuple[str, ...], named: str
    ) -> None:
        ended = await run(short_tmp, "break-glass", "2", *words)
        assert (ended.code, ended.out, service.asked) == (2, "", [])
        assert named in ended.err

    async def test_what_the_service_refuses_is_told(self, service: Service, short_tmp: Path) -> None:
        service.error = InvalidRequest("The policy allows 4 hours.")
        ended = await run(short_tmp, "break-glass", "2", "--for", "9h", "--reason", "why", "--yes")
        assert ended == Ended(2, "", "Error: The policy allows 4 hours.\n")

    @pytest.mark.parametrize(
        ("typed", "code", "asked"),
        [(b"y\n", 0, 1), (b"YES\n", 0, 1), (b"n\n", 1, 0), (b"sure\n", 1, 0), (b"\n", 1, 0), (b"\x04", 1, 0)],
    )
    async def test_a_person_at_a_terminal_is_asked_and_only_yes_is_yes(
        self, service: Service, short_tmp: Path, typed: bytes, code: int, asked: int
    ) -> None:
        async with _asked(short_tmp) as (process, terminal):
            os.write(terminal, typed)
            out, _ = await process.communicate()
        assert process.returncode == code
        assert (len(service.asked), out.decode()) == (asked, "SIM-GPU-cc\n" if asked else "")

    async def test_an_interrupt_is_no_yes(self, service: Service, short_tmp: Path) -> None:
        async with _asked(short_tmp) as (process, _):
            process.send_signal(signal.SIGINT)
            await process.communicate()
        assert (process.returncode, service.asked) == (130, [])


@asynccontextmanager
async def _asked(sockets: Path) -> AsyncIterator[tuple[asyncio.subprocess.Process, int]]:
    """A command at a terminal that has asked whether it may go on, and our end of the terminal."""
    ours, theirs = pty.openpty()
    words = ("break-glass", "2", "--for", "30m", "--reason", "why", "-o", "name")
    try:
        process = await start(sockets, *words, stdin=theirs, stderr=theirs)
        os.close(theirs)  # so that a command that ends without a question ends the reading, too
        assert b"For 1800 seconds device 2 goes to whoever asks for it" in await asyncio.to_thread(_question, ours)
        yield process, ours
    finally:
        os.close(ours)


def _question(terminal: int) -> bytes:
    shown = b""
    while not shown.endswith(b"[y/N] "):
        shown += os.read(terminal, 4096)
    return shown


class TestHistory:
    @pytest.fixture(autouse=True)
    def happened(self, service: Service) -> None:
        service.entries = [
            pb.HistoryEntry(
                sequence=2,
                hash="h2",
                name="scrub-passed",
                at=0.0,
                device="SIM-GPU-aa",
                scrub_id="s-9",
                actor="uid:0",
                fields_json='{"seconds": 0.5}',
                scrub=PASSED.result.scrub,
                certificate=CLEAN.certificate,
            ),
            pb.HistoryEntry(sequence=1, hash="h1", name="service-started", at=0.0, actor="service"),
        ]

    async def test_json_is_a_list_of_audit_rows(self, service: Service, short_tmp: Path) -> None:
        ended = await run(short_tmp, "history", "-o", "json")
        assert (ended.code, ended.err) == (0, "")
        assert service.asked == [pb.GetHistoryRequest(limit=100)]
        scrubbed, started = ended.json
        assert scrubbed["fields"] == {"seconds": 0.5}
        assert (scrubbed["scrub"]["id"], scrubbed["certificate"]["id"]) == ("s-9", "c-7")
        assert started == {
            "sequence": 1,
            "at": 0.0,
            "name": "service-started",
            "device": None,
            "scrub_id": None,
            "actor": "service",
            "fields": {},
            "scrub": None,
            "certificate": None,
            "hash": "h1",
        }

    async def test_the_question_can_be_narrowed(self, service: Service, short_tmp: Path) -> None:
        moment = "1970-01-01T00:01:00Z"
        ended = await run(short_tmp, "history", "--device", "0", "--since", moment, "--limit", "5")
        assert ended.code == 0
        assert service.asked == [pb.GetHistoryRequest(device="0", since=60.0, limit=5)]
        assert ended.out.splitlines()[1].split() == [
            *("2", "1970-01-01T00:00:00Z", "scrub-passed", "SIM-GPU-aa", "s-9", "uid:0", "seconds=0.5"),
        ]

    @pytest.mark.parametrize(
        ("name", "fields", "told"),
        [
            (
                "glass.broken",
                {"reason": "a deadline", "until": 60.5, "seconds": 30.0},
                "reason=a deadline until=1970-01-01T00:01:00Z seconds=30.0",
            ),
            ("glass.mended", {"sentence": "The time was over."}, "The time was over."),
            ("breaker.opened", {"what": "soft", "sentence": "2 of 8 are out."}, "what=soft: 2 of 8 are out."),
            (
                "tenant.blamed",
                {"tenant_namespace": "red", "quarantines": 3, "sentence": "3 within a day."},
                "tenant_namespace=red quarantines=3: 3 within a day.",
            ),
            (
                "health.signal",
                {"code": "xid-31", "class": "application", "new": 2, "total": 9, "tenant_namespace": None},
                "code=xid-31 class=application new=2 total=9",
            ),
            ("odd", {"until": 1e300, "since": "noon", "sentence": None}, "until=1e+300 since=noon"),
            ("odd", {}, "-"),
        ],
    )
    async def test_a_person_reads_moments_and_sentences(
        self, service: Service, short_tmp: Path, name: str, fields: dict[str, Any], told: str
    ) -> None:
        entry = pb.HistoryEntry(sequence=3, name=name, at=0.0, actor="uid:7", fields_json=json.dumps(fields))
        service.entries = [entry]
        _, row = (await run(short_tmp, "history")).out.splitlines()
        assert row.partition("uid:7")[2].strip() == told


class TestErrors:
    @pytest.mark.parametrize(
        ("error", "code"),
        [
            (InvalidRequest("There is no device 9."), 2),
            (Held("Device 0 is in use."), 3),
            (Quarantined("Device 0 is quarantined."), 3),
            (NotReady("A scrub is under way."), 3),
            (NotPermitted("uid 5 may not do that."), 3),
            (LedgerFailure("The ledger is read-only."), 1),
            (Unreadable("The driver gave no data."), 1),
        ],
    )
    async def test_an_error_is_one_sentence_and_an_exit_code(
        self, service: Service, short_tmp: Path, error: Exception, code: int
    ) -> None:
        service.error = error
        assert await run(short_tmp, "scrub", "0", "-o", "json") == Ended(code, "", f"Error: {error}\n")

    async def test_a_service_that_is_not_there_is_no_verdict(self, short_tmp: Path) -> None:
        ended = await run(short_tmp, "devices", "-o", "json")
        assert (ended.code, ended.out) == (1, "")
        assert ended.err.startswith("Error: The scrub service is not there:")
        assert ended.err.count("\n") == 1
