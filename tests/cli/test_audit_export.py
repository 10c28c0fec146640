"""``scrubber audit export``, and ``audit verify`` on complete and incomplete exports."""

import asyncio
import json
import os
import re
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from scrubber.domain.errors import NotReady
from tests.cli.audit_stage import ROWS, Reading, grow, reading, tamper, verdict, written
from tests.cli.stage import Ended, run, start
from tests.ledger_samples import fill


@pytest.fixture
async def service(short_tmp: Path) -> AsyncIterator[Reading]:
    async with reading(short_tmp) as node:
        yield node


@pytest.fixture
async def home(tmp_path: Path) -> Path:
    """Return the state directory of a stopped service; its audit log has twenty rows."""
    await fill(tmp_path / "state", ROWS)
    return tmp_path / "state"


@pytest.fixture
async def exported(home: Path, short_tmp: Path) -> Path:
    """Return an export of :func:`home`."""
    ended = await run(short_tmp, "audit", "export", "--ledger-dir", str(home))
    assert (ended.code, ended.err) == (0, "")
    file = home.parent / "audit.jsonl"
    file.write_text(ended.out)
    return file


class TestVerifyFile:
    async def test_export_is_verified_without_a_service(self, exported: Path, short_tmp: Path) -> None:
        ended = await run(short_tmp, "audit", "verify", "--file", str(exported), "-o", "json")
        assert verdict(ended) == (0, "intact")
        assert (ended.json["source"], ended.json["rowCount"]) == ("file", ROWS)

    async def test_export_is_verified_from_standard_input(self, exported: Path, short_tmp: Path) -> None:
        with exported.open("rb") as stream:
            process = await start(short_tmp, "audit", "verify", "--file", "-", "-o", "name", stdin=stream.fileno())
            out, err = await process.communicate()
        assert (process.returncode, err) == (0, b"")
        assert out.startswith(b"20:")

    async def test_truncated_export_is_broken_at_the_named_row(self, exported: Path, short_tmp: Path) -> None:
        whole = exported.read_text()
        exported.write_text(whole[: len(whole) // 2])
        ended = await run(short_tmp, "audit", "verify", "--file", str(exported), "-o", "json")
        assert verdict(ended) == (1, "broken")
        assert re.match(
            r"Line \d+ of .*audit.jsonl is not an audit row \(.*\): it was edited or truncated", ended.json["message"]
        )

    async def test_file_that_is_no_export_gives_no_verdict(self, tmp_path: Path, short_tmp: Path) -> None:
        file = tmp_path / "odd"
        file.write_bytes(b"\xff\x1b[2J")
        ended = await run(short_tmp, "audit", "verify", "--file", str(file))
        assert (ended.code, ended.out) == (1, "")
        assert ended.err.startswith(f"Error: {file} is not an export of an audit log (")
        assert ended.err.endswith("Run `scrubber audit export` to create one.\n")

    async def test_missing_export_file_is_a_usage_error(self, tmp_path: Path, short_tmp: Path) -> None:
        ended = await run(short_tmp, "audit", "verify", "--file", str(tmp_path / "none"))
        assert ended == Ended(2, "", f"Error: Cannot read {tmp_path / 'none'}: No such file or directory.\n")

    async def test_ledger_and_file_options_together_are_refused(
        self, exported: Path, home: Path, short_tmp: Path
    ) -> None:
        ended = await run(short_tmp, "audit", "verify", "--file", str(exported), "--ledger-dir", str(home))
        assert (ended.code, ended.out) == (2, "")
        assert "--file: cannot be combined with --ledger-dir" in ended.err


class TestExport:
    async def test_first_export_line_is_the_audit_logs_ends_and_others_are_rows_as_hashed(
        self, service: Reading, short_tmp: Path
    ) -> None:
        ended = await run(short_tmp, "audit", "export", "-")
        assert (ended.code, ended.err) == (0, "")
        first, *rows = (json.loads(line) for line in ended.out.splitlines())
        head = service.ledger.head()
        assert first == {
            "apiVersion": "cli.scrubber.dev/v1",
            "kind": "AuditLog",
            "pruned": {"sequence": 0, "hash": ""},
            "head": {"sequence": ROWS, "hash": head.hash},
        }
        assert rows[0] == {
            "apiVersion": "cli.scrubber.dev/v1",
            "kind": "AuditRow",
            "sequence": 1,
            "timestamp": 100.0,
            "event": "device.marked-dirty",
            "deviceID": "GPU-a",
            "scrubID": None,
            "actor": "service",
            "fields": '{"message":"row \\u001b[2J0"}',
            "previousHash": "",
            "hash": rows[1]["previousHash"],
        }
        assert rows[-1]["hash"] == head.hash
        assert "\x1b" not in ended.out

    async def test_service_and_its_ledger_directory_export_the_same(self, home: Path, short_tmp: Path) -> None:
        ended = await run(short_tmp, "audit", "export", "--ledger-dir", str(home), "--after", "12")
        first, *rows = (json.loads(line) for line in ended.out.splitlines())
        assert [row["sequence"] for row in rows] == list(range(13, ROWS + 1))
        assert first["pruned"] == {"sequence": 12, "hash": rows[0]["previousHash"]}

    async def test_partial_export_is_verified_from_its_first_row(
        self, service: Reading, tmp_path: Path, short_tmp: Path
    ) -> None:
        kept = service.ledger.head()
        await grow(service.ledger, 10)
        file = tmp_path / "part.jsonl"
        file.write_text((await run(short_tmp, "audit", "export", "--after", str(ROWS))).out)
        words = ("audit", "verify", "--file", str(file), "-o", "json")
        assert verdict(await run(short_tmp, *words, "--head", written(kept))) == (0, "intact")
        assert verdict(await run(short_tmp, *words, "--head", f"{ROWS}:{'0' * 64}")) == (1, "broken")
        assert verdict(await run(short_tmp, *words, "--head", f"3:{'0' * 64}")) == (1, "unknown")

    async def test_export_after_a_row_beyond_the_end_is_refused(self, service: Reading, short_tmp: Path) -> None:
        ended = await run(short_tmp, "audit", "export", "--after", "21")
        assert (ended.code, ended.out) == (2, "")
        assert "ends at row 20: there is no row 21" in ended.err

    async def test_export_target_other_than_standard_output_is_refused(self, short_tmp: Path) -> None:
        ended = await run(short_tmp, "audit", "export", "audit.jsonl")
        assert (ended.code, ended.out) == (2, "")
        assert "scrubber audit export > FILE" in " ".join(ended.err.split())

    async def test_closed_output_of_an_export_is_an_error_exit(self, home: Path, short_tmp: Path) -> None:
        reading, writing = os.pipe()
        os.close(reading)
        process = await start(short_tmp, "audit", "export", "--ledger-dir", str(home), stdout=writing)
        os.close(writing)
        _, err = await process.communicate()
        assert (process.returncode, err) == (1, b"")

    async def test_full_disk_during_an_export_is_an_error_exit(self, service: Reading, short_tmp: Path) -> None:
        full = os.open("/dev/full", os.O_WRONLY)
        process = await start(short_tmp, "audit", "export", stdout=full)
        os.close(full)
        _, err = await process.communicate()
        assert (process.returncode, err) == (
            1,
            b"Error: Standard output could not be written: No space left on device.\n",
        )

    async def test_export_interrupted_by_the_service_is_an_error_exit_and_does_not_verify(
        self, service: Reading, tmp_path: Path, short_tmp: Path
    ) -> None:
        await grow(service.ledger, 600)
        service.error = NotReady("Rows were given up; ask again.")
        ended = await run(short_tmp, "audit", "export")
        assert (ended.code, ended.err) == (3, "Error: Rows were given up; ask again.\n")
        file = tmp_path / "part.jsonl"
        file.write_text(ended.out)
        ended = await run(short_tmp, "audit", "verify", "--file", str(file), "-o", "json")
        assert verdict(ended) == (1, "broken")

    async def test_export_of_a_audit_log_without_its_end_is_an_error_exit(self, home: Path, short_tmp: Path) -> None:
        tamper(home, "DELETE FROM audit WHERE sequence > 15")
        ended = await run(short_tmp, "audit", "export", "--ledger-dir", str(home))
        assert ended.code == 1
        assert len(ended.out.splitlines()) == 16
        assert "ends at row 15, but its head is row 20: the export is incomplete" in ended.err


async def test_interrupted_verification_gives_no_verdict(tmp_path: Path, short_tmp: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    process = await start(short_tmp, "audit", "verify", "--file", str(pipe))
    with await asyncio.to_thread(pipe.open, "wb"):  # returns once the command has opened it, too
        process.send_signal(signal.SIGINT)
        out, err = await process.communicate()
    assert (process.returncode, out, err) == (130, b"", b"")
