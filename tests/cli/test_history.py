"""``scrubber history``: the newest part of the audit log, filtered, as a table and for scripts."""

import asyncio
import json
import re
import shlex
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from scrubber.api import scrubber_pb2 as pb
from scrubber.domain.errors import InvalidRequest, LedgerFailure, PermissionDenied, ScrubberError
from tests.cli.stage import CLEAN, PASSED, Ended, Service, run, serving, start
from tests.cli.terminal import WIDTHS, agrees_with, at_terminal


@pytest.fixture
async def service(short_tmp: Path) -> AsyncIterator[Service]:
    async with serving(short_tmp) as servicer:
        yield servicer


class TestHistory:
    @pytest.fixture(autouse=True)
    def happened(self, service: Service) -> None:
        service.entries = [
            pb.HistoryEntry(
                sequence=2,
                hash="h2",
                event="scrub-passed",
                timestamp=0.0,
                device_id="SIM-GPU-aa",
                scrub_id="s-9",
                actor="uid:0",
                fields_json='{"duration_seconds": 0.5}',
                scrub=PASSED.result.scrub,
                certificate=CLEAN.certificate,
            ),
            pb.HistoryEntry(sequence=1, hash="h1", event="service-started", timestamp=0.0, actor="service"),
        ]

    async def test_json_is_a_list_of_audit_rows(self, service: Service, short_tmp: Path) -> None:
        ended = await run(short_tmp, "history", "-o", "json")
        assert (ended.code, ended.err) == (0, "")
        assert service.requests == [pb.GetHistoryRequest(limit=100)]
        scrubbed, started = ended.items
        assert scrubbed["fields"] == {"duration_seconds": 0.5}
        assert (scrubbed["scrub"]["metadata"]["name"], scrubbed["certificate"]["metadata"]["name"]) == ("s-9", "c-7")
        assert started == {
            "sequence": 1,
            "timestamp": "1970-01-01T00:00:00.000000Z",
            "event": "service-started",
            "deviceID": None,
            "scrubID": None,
            "actor": "service",
            "fields": {},
            "scrub": None,
            "certificate": None,
            "hash": "h1",
        }

    async def test_history_filters_reach_the_service(self, service: Service, short_tmp: Path) -> None:
        moment = "1970-01-01T00:01:00Z"
        ended = await run(short_tmp, "history", "--device", "0", "--since", moment, "--limit", "5", "-o", "wide")
        assert ended.code == 0
        assert service.requests == [pb.GetHistoryRequest(device="0", since=60.0, limit=5)]
        assert ended.out.splitlines()[1].split() == [
            *("2", "1970-01-01T00:00:00Z", "scrub-passed", "SIM-GPU-aa", "s-9", "uid:0", "duration_seconds=0.5"),
        ]
        await run(short_tmp, "history", "--tenant", "red", "--outcome", " Blocked ", "--device", "SIM-GPU-1f3a…")
        assert service.requests[1:] == [
            pb.GetHistoryRequest(device="SIM-GPU-1f3a", tenant="red", outcome="blocked", limit=100)
        ]

    @pytest.mark.parametrize("word", ["passed", "blocked", "failed", "abandoned", "ok", "granted", "refused"])
    async def test_every_outcome_can_be_filtered(self, service: Service, short_tmp: Path, word: str) -> None:
        assert (await run(short_tmp, "history", "--outcome", word)).code == 0
        assert service.requests == [pb.GetHistoryRequest(outcome=word, limit=100)]

    async def test_unknown_outcome_is_refused_with_the_valid_ones(self, service: Service, short_tmp: Path) -> None:
        ended = await run(short_tmp, "history", "--outcome", "broken")
        assert (ended.code, ended.out, service.requests) == (2, "", [])
        assert '"broken" is not one of: passed, blocked, failed, abandoned, ok, granted, refused.' in " ".join(
            ended.err.split()
        )

    @pytest.mark.parametrize(
        ("words", "note"),
        [
            ((), "The audit log of this node is empty.\n"),
            (("--device", "GPU-b"), "No entry of the audit log matches: device GPU-b.\n"),
            (
                ("--tenant", "red\x1b[2J", "--outcome", "failed", "--since", "1970-01-01T00:01:00Z"),
                (
                    "No entry of the audit log matches: tenant red\N{REPLACEMENT CHARACTER}[2J, outcome failed, "
                    "since 1970-01-01T00:01:00Z.\n"
                ),
            ),
            (("--before", "1"), "No entry of the audit log matches: before entry 1.\n"),
            (
                ("--event", "health.", "--event", " Unauthorized.use.detected", "--device", "0", "--before", "1"),
                "No entry of the audit log matches: event health.* or unauthorized.use.detected, device 0, before entry 1.\n",
            ),
            (
                ("--outcome", "refused"),
                (
                    "No entry of the audit log matches: outcome refused. Refused hand-overs are not in the audit log; "
                    "see the service's log and metrics.\n"
                ),
            ),
        ],
    )
    async def test_filters_without_a_match_print_a_note(
        self, service: Service, short_tmp: Path, words: tuple[str, ...], note: str
    ) -> None:
        service.entries = []
        assert await run(short_tmp, "history", *words) == Ended(0, "", note)
        assert (await run(short_tmp, "history", *words, "-o", "json")).items == []

    async def test_events_are_filtered_by_their_names(self, service: Service, short_tmp: Path) -> None:
        ended = await run(short_tmp, "history", "--event", "health.", "--event", " Scrub.finished ")
        assert (ended.code, ended.err) == (0, "")
        assert service.requests == [pb.GetHistoryRequest(events=["health.", "scrub.finished"], limit=100)]

    async def test_truncated_history_prints_the_command_for_the_next_page(
        self, service: Service, short_tmp: Path
    ) -> None:
        ended = await run(short_tmp, "history", "--limit", "1")
        assert ended.err == (
            "Note: Showing the newest 1 entries; there are older ones. Pass --all to show all. Next page:\n"
            "  scrubber history --limit 1 --before 2\n"
        )
        following = await run(short_tmp, *ended.err.splitlines()[1].split()[1:])
        assert (following.out.splitlines()[1].split()[1], following.err) == ("service-started", "")
        assert (await run(short_tmp, "history", "--limit", "2")).err == "", "that is all"

    async def test_next_page_command_repeats_the_format_of_the_table(self, service: Service, short_tmp: Path) -> None:
        ended = await run(short_tmp, "history", "--limit", "1", "-o", "wide", "--no-headers")
        assert [line.split()[0] for line in ended.out.splitlines()] == ["2"]
        assert ended.err.endswith("  scrubber history --limit 1 --before 2 --output wide --no-headers\n")

    async def test_next_page_command_repeats_all_filters(self, service: Service, short_tmp: Path) -> None:
        options = (
            "--device",
            "0",
            "--tenant",
            "a b",
            "--outcome",
            "passed",
            "--event",
            "health.",
            "--event",
            "scrub.started",
        )
        ended = await run(
            short_tmp,
            *("history", *options, "--since", "1970-01-01T00:01:00Z", "--before", "9", "--limit", "1"),
            *("--socket-dir", str(short_tmp)),
        )
        note, command = ended.err.splitlines()
        assert note.startswith(
            "Note: Showing the newest 1 entries since 1970-01-01T00:01:00Z before entry 9; there are older ones."
        )
        await run(short_tmp, *shlex.split(command)[1:])
        first, second = service.requests
        first.before_sequence = 2
        assert second == first
        assert f" --socket-dir {short_tmp}" in command

    async def test_next_page_command_keeps_start_time_and_page_size(self, service: Service, short_tmp: Path) -> None:
        result = await at_terminal(
            *("history", "--since", "90s", "--limit", "1"),
            columns=200,
            environment={"SCRUBBER_SOCKET_DIR": str(short_tmp)},
        )
        _, command, *_ = result.text.splitlines()
        await run(short_tmp, *shlex.split(command)[1:])
        first, second = service.requests
        assert (second.limit, second.before_sequence) == (first.limit, 2) == (1, 2)
        assert second.since == pytest.approx(first.since, abs=1e-5)

    async def test_endless_pages_from_a_service_are_detected(self, service: Service, short_tmp: Path) -> None:
        service.page = pb.GetHistoryResponse(entries=[pb.HistoryEntry(sequence=4)], next_before_sequence=4)
        ended = await run(short_tmp, "history", "--all")
        assert (ended.code, ended.out, len(service.requests)) == (1, "", 2)
        assert "rows older than row 4, returned 1 rows and continues before row 4" in ended.err

    @pytest.mark.parametrize("rows", [[], [4], [9, 7]])
    async def test_page_that_does_not_continue_after_its_last_row_is_refused(
        self, service: Service, short_tmp: Path, rows: list[int]
    ) -> None:
        entries = [pb.HistoryEntry(sequence=each) for each in rows]
        service.page = pb.GetHistoryResponse(entries=entries, next_before_sequence=6)
        ended = await run(short_tmp, "history")
        assert (ended.code, ended.out, len(service.requests)) == (1, "", 1)
        assert "does not lead to older rows" in ended.err

    async def test_truncation_note_precedes_the_table_on_a_terminal(self, service: Service, short_tmp: Path) -> None:
        result = await at_terminal(
            *("history", "--since", "1970-01-01T00:01:00Z", "--limit", "1"),
            columns=200,
            environment={"SCRUBBER_SOCKET_DIR": str(short_tmp)},
        )
        note, command, header, *_ = result.text.splitlines()
        assert note == (
            "Note: Showing the newest 1 entries since 1970-01-01T00:01:00Z; there are older ones. "
            "Pass --all to show all. Next page:"
        )
        assert command == "  scrubber history --since 1970-01-01T00:01:00Z --limit 1 --before 2"
        assert header.split() == ["TIME", "EVENT", "DEVICE", "DETAILS"]

    @pytest.mark.parametrize("columns", [80, 100])
    async def test_event_name_is_never_split_across_lines(
        self, service: Service, short_tmp: Path, columns: int
    ) -> None:
        names = ["health.quarantined", "residue.unexplained", "certificate.issued"]
        service.entries = [
            pb.HistoryEntry(
                sequence=n, event=name, device_id="GPU-" + "0123456789abcdef" * 2, scrub_id="s-1", actor="service"
            )
            for n, name in enumerate(names, 1)
        ]
        result = await at_terminal("history", columns=columns, environment={"SCRUBBER_SOCKET_DIR": str(short_tmp)})
        assert all(name in result.text.split() for name in names)

    async def test_name_output_has_no_note_without_a_terminal(self, service: Service, short_tmp: Path) -> None:
        assert await run(short_tmp, "history", "--limit", "1", "-o", "name") == Ended(0, "2\n", "")
        result = await at_terminal(
            *("history", "--limit", "1", "-o", "name"), columns=200, environment={"SCRUBBER_SOCKET_DIR": str(short_tmp)}
        )
        _, command, name = result.text.splitlines()
        assert (command, name) == ("  scrubber history --limit 1 --before 2 --output name", "2")

    @pytest.mark.parametrize("form", ["json", "yaml"])
    async def test_json_and_yaml_contain_the_start_of_the_next_page_or_null(
        self, service: Service, short_tmp: Path, form: str
    ) -> None:
        for limit, next_before in (("1", 2), ("2", None)):
            ended = await run(short_tmp, "history", "--limit", limit, "-o", form)
            document = yaml.safe_load(ended.out)  # which reads JSON, too
            assert (document["kind"], document["metadata"]["continue"]) == ("HistoryEntryList", next_before)
            assert (len(document["items"]), ended.err) == (int(limit), "")

    @pytest.mark.parametrize("form", ["json", "yaml"])
    async def test_rows_are_written_before_the_next_page_is_read(self, short_tmp: Path, form: str) -> None:
        seen, rows = asyncio.Event(), 1001

        class Slow(Service):
            """Withholds the second page until the first one was displayed."""

            async def GetHistory(self, request: Any, context: Any) -> pb.GetHistoryResponse:
                if request.before_sequence:
                    await seen.wait()
                return await super().GetHistory(request, context)

        slow = Slow(entries=[pb.HistoryEntry(sequence=number) for number in range(rows, 0, -1)])
        async with serving(short_tmp, slow), asyncio.timeout(60):
            process = await start(short_tmp, "history", "--all", "-o", form)
            assert process.stdout is not None
            lines = [await process.stdout.readline()]
            try:
                while re.sub(rb'[-," \n]', b"", lines[-1]) != b"sequence:2":  # the last row of the first page
                    lines.append(await process.stdout.readline())
            finally:
                seen.set()
            out, err = await process.communicate()
        document = yaml.load(b"".join(lines) + out, yaml.CSafeLoader)
        assert (process.returncode, err) == (0, b"")
        assert [each["sequence"] for each in document["items"]] == [*range(rows, 0, -1)]
        assert document["metadata"]["continue"] is None

    @pytest.mark.parametrize(
        ("words", "many", "next_before"),
        [
            (("--limit", "1000"), 1000, 1501),
            (("--limit", "2300"), 2300, 201),
            (("--limit", "2500"), 2500, None),
            (("--limit", "3000"), 2500, None),
            (("--all",), 2500, None),
            (("--all", "--limit", "5"), 2500, None),
            (("--before", "1200", "--all"), 1199, None),
            (("--before", "0", "--limit", "1"), 1, 2500),
        ],
        ids=lambda value: " ".join(value) if isinstance(value, tuple) else None,
    )
    async def test_requested_number_of_rows_is_fetched_across_pages(
        self, service: Service, short_tmp: Path, words: tuple[str, ...], many: int, next_before: int | None
    ) -> None:
        service.entries = [pb.HistoryEntry(sequence=number, event="scrub.started") for number in range(2500, 0, -1)]
        ended = await run(short_tmp, "history", *words, "-o", "json")
        first = service.requests[0].before_sequence or 2501
        assert [each["sequence"] for each in ended.items] == [*range(first - 1, first - 1 - many, -1)]
        assert ended.json["metadata"]["continue"] == next_before
        assert all(each.limit <= 1000 for each in service.requests)

    @pytest.mark.parametrize(
        ("error", "code"),
        [
            (InvalidRequest("There is no device 9."), 2),
            (LedgerFailure("The ledger is damaged."), 1),
            (PermissionDenied("uid 5 may not look."), 3),
        ],
    )
    async def test_service_refusal_is_printed(
        self, service: Service, short_tmp: Path, error: ScrubberError, code: int
    ) -> None:
        service.error = error
        assert await run(short_tmp, "history") == Ended(code, "", f"Error: {error}\n")

    async def test_unavailable_service_error_names_the_socket_path(self, tmp_path: Path) -> None:
        ended = await run(tmp_path, "history")
        assert (ended.code, ended.out) == (1, "")
        assert str(tmp_path) in ended.err

    @pytest.mark.parametrize(
        ("name", "fields", "result"),
        [
            (
                "break-glass.started",
                {"reason": "a deadline", "duration_seconds": 30.0, "expires_at": 60.5},
                "reason=a deadline duration_seconds=30.0 expires_at=1970-01-01T00:01:00Z",
            ),
            ("break-glass.ended", {"message": "The time was over."}, "The time was over."),
            (
                "breaker.opened",
                {"breaker": "soft-quarantines", "message": "2 of 8 are out."},
                "breaker=soft-quarantines: 2 of 8 are out.",
            ),
            (
                "tenant.flagged",
                {"tenant": "red", "quarantines": 3, "message": "3 within a day."},
                "tenant=red quarantines=3: 3 within a day.",
            ),
            (
                "health.errors-reported",
                {"code": "xid-31", "class": "application", "new": 2, "total": 9, "tenant": None},
                "code=xid-31 class=application new=2 total=9",
            ),
            ("odd", {"expires_at": 1e300, "since": "noon", "message": None}, "expires_at=1e+300 since=noon"),
            ("odd", {}, "-"),
        ],
    )
    async def test_table_shows_times_and_messages(
        self, service: Service, short_tmp: Path, name: str, fields: dict[str, Any], result: str
    ) -> None:
        entry = pb.HistoryEntry(sequence=3, event=name, timestamp=0.0, actor="uid:7", fields_json=json.dumps(fields))
        service.entries = [entry]
        _, row = (await run(short_tmp, "history", "-o", "wide")).out.splitlines()
        assert row.partition("uid:7")[2].strip() == result


LONG = "GPU-1f3a09c2-7d51-4e0b-9a77-0c5d2b1e4f60"
OTHER = "GPU-1f3a09c2-9999-4e0b-9a77-0c5d2b1e4f60"
HAPPENED = (
    pb.HistoryEntry(
        sequence=99_120,
        event="handover.granted",
        timestamp=1_795_000_000.0,
        device_id=LONG,
        actor="plugin",
        fields_json=json.dumps(
            {
                "kind": "other-tenant",
                "path": "fast",
                "grant": 4,
                "certificate": "cert-5b1f8c2e90ad",
                "exception": None,
                "tenant": "team-a",
                "pod": "train-0",
                "container": "main",
                "duration_seconds": 0.012,
            }
        ),
    ),
    pb.HistoryEntry(
        sequence=99_119,
        event="scrub.finished",
        timestamp=1_794_999_990.0,
        device_id=OTHER,
        scrub_id="scrub-5b1f8c2e90ad",
        actor="uid:1000",
        fields_json=json.dumps({"outcome": "failed", "message": "12 bytes did not read back: \x1b[2J\u4e2d\u6587."}),
    ),
    pb.HistoryEntry(sequence=99_118, event="service.started", timestamp=1_794_999_980.0, actor="service"),
)


@pytest.mark.parametrize("columns", WIDTHS)
async def test_history_fits_the_terminal(service: Service, short_tmp: Path, columns: int) -> None:
    service.entries = list(HAPPENED)
    result = await at_terminal("history", columns=columns, environment={"SCRUBBER_SOCKET_DIR": str(short_tmp)})
    assert result.code == 0
    agrees_with(f"history-{columns}", result.text)


@pytest.mark.parametrize("columns", WIDTHS)
async def test_history_page_with_its_note_fits_the_terminal(service: Service, short_tmp: Path, columns: int) -> None:
    service.entries = list(HAPPENED)
    result = await at_terminal(
        *("history", "--limit", "2"), columns=columns, environment={"SCRUBBER_SOCKET_DIR": str(short_tmp)}
    )
    assert result.code == 0
    agrees_with(f"history-page-{columns}", result.text)


async def test_ids_are_not_shortened_without_a_terminal(service: Service, short_tmp: Path) -> None:
    service.entries = list(HAPPENED)
    header, *rows = (await run(short_tmp, "history", "-o", "wide")).out.splitlines()
    assert header.split() == ["SEQUENCE", "TIME", "EVENT", "DEVICE", "SCRUB", "ACTOR", "DETAILS"]
    assert [row.split()[3] for row in rows] == [LONG, OTHER, "-"]
