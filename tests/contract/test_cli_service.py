"""The command against a service on real sockets: what a script gets on standard output, and which exit code."""

import asyncio
import json
import os
import pty
import signal
import sys
from collections.abc import AsyncIterator
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
    sockets: Path, *words: str, stdout: int = asyncio.subprocess.PIPE, stderr: int = asyncio.subprocess.PIPE
) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "scrubber.cli.main",
        *words,
        env=environment(sockets),
        stdin=asyncio.subprocess.DEVNULL,
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
        }
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

    async def test_yaml_says_the_same_as_json(self, service: Service, short_tmp: Path) -> None:
        in_yaml, in_json = await run(short_tmp, "devices", "-o", "yaml"), await run(short_tmp, "devices", "-o", "json")
        assert yaml.safe_load(in_yaml.out) == in_json.json

    async def test_names_feed_another_command(self, service: Service, short_tmp: Path) -> None:
        assert (await run(short_tmp, "devices", "-o", "name")).out == "SIM-GPU-aa\nSIM-GPU-bb\n"

    async def test_the_table_passes_nothing_on_that_a_terminal_would_act_on(
        self, service: Service, short_tmp: Path
    ) -> None:
        header, clean, sick = (await run(short_tmp, "devices")).out.splitlines()
        assert header.split() == ["INDEX", "DEVICE", "STATE", "MEMORY", "GRANTS", "POD", "CERTIFICATE", "CAUSE"]
        assert clean.split() == ["0", "SIM-GPU-aa", "clean", "256", "MiB", "3", "-", "c-7", "-"]
        assert "red/train/main" in sick
        assert sick.endswith("xid-95: XID 95 was \N{REPLACEMENT CHARACTER}[31mseen.")

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
