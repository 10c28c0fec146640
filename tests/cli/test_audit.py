"""``scrubber audit``: the audit log of a service and of a stopped service's directory, intact and tampered with."""

import hashlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from scrubber.adapters.ledger.memory import MemoryLedger
from scrubber.adapters.ledger.sqlite import SqliteLedger
from scrubber.domain.errors import LedgerFailure, NotReady
from scrubber.ports.record import AuditHead, Event, LedgerChange
from tests.cli.audit_stage import ROWS, Reading, grow, reading, tamper, verdict, written
from tests.cli.stage import Ended, run
from tests.cli.terminal import WIDTHS, agrees_with, at_terminal
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


class TestVerifyService:
    async def test_complete_audit_log_is_intact(self, service: Reading, short_tmp: Path) -> None:
        await grow(service.ledger, 600)
        ended = await run(short_tmp, "audit", "verify", "-o", "json")
        assert (ended.code, ended.err) == (0, "")
        head = service.ledger.head()
        assert ended.json == {
            "apiVersion": "cli.scrubber.dev/v1",
            "kind": "AuditReport",
            "source": "service",
            "verdict": "intact",
            "message": "The audit log is intact: 620 rows.",
            "rowCount": 620,
            "first": {"sequence": 1, "timestamp": "1970-01-01T00:01:40.000000Z"},
            "last": {"sequence": 620, "timestamp": "1970-01-01T00:11:39.000000Z"},
            "pruned": None,
            "head": {"sequence": 620, "hash": head.hash},
            "savedHeads": [],
        }

    async def test_name_output_prints_the_head_to_save(self, service: Reading, short_tmp: Path) -> None:
        ended = await run(short_tmp, "audit", "verify", "-o", "name")
        assert ended == Ended(0, f"{written(service.ledger.head())}\n", "")

    async def test_saved_head_is_found_in_the_audit_log(self, service: Reading, short_tmp: Path) -> None:
        kept = service.ledger.head()
        await grow(service.ledger, 5)
        ended = await run(short_tmp, "audit", "verify", "--head", written(kept).upper(), "-o", "json")
        assert verdict(ended) == (0, "intact")
        assert ended.json["savedHeads"] == [
            {
                "sequence": ROWS,
                "hash": kept.hash,
                "status": "found",
                "message": "Row 20 matches the saved head.",
            }
        ]

    async def test_cut_off_tail_is_detected_by_a_head_beyond_the_end(self, service: Reading, short_tmp: Path) -> None:
        ended = await run(short_tmp, "audit", "verify", "--head", f"{ROWS + 1}:{'a' * 64}", "-o", "json")
        assert verdict(ended) == (1, "broken")
        assert ended.json["savedHeads"][0]["status"] == "truncated"
        assert ended.json["message"] == "The audit log ends at row 20: its end was truncated."

    async def test_rewritten_audit_log_is_detected_by_a_different_hash(self, service: Reading, short_tmp: Path) -> None:
        ended = await run(short_tmp, "audit", "verify", "--head", f"7:{'a' * 64}", "-o", "json")
        assert verdict(ended) == (1, "broken")
        assert ended.json["savedHeads"][0]["status"] == "replaced"
        assert ended.json["message"].endswith("…: it, or a row before it, was rewritten.")

    async def test_head_before_the_pruned_end_gives_no_verdict(self, service: Reading, short_tmp: Path) -> None:
        kept = service.ledger.head()
        await grow(service.ledger, 700)
        ended = await run(short_tmp, "audit", "verify", "--head", written(kept), "-o", "json")
        assert verdict(ended) == (1, "unknown")
        pruned = ended.json["pruned"]
        assert pruned["sequence"] > kept.sequence
        assert "can no longer be compared" in ended.json["message"]
        assert (await run(short_tmp, "audit", "verify", "--head", written(AuditHead(**pruned)))).code == 0

    async def test_one_contradicting_head_makes_the_audit_log_broken(self, service: Reading, short_tmp: Path) -> None:
        kept = written(service.ledger.head())
        words = ("audit", "verify", "--head", kept, "--head", f"3:{'b' * 64}", "-o", "json")
        ended = await run(short_tmp, *words)
        assert verdict(ended) == (1, "broken")
        assert [each["status"] for each in ended.json["savedHeads"]] == ["found", "replaced"]

    async def test_replaced_head_and_cut_off_head_are_distinguished(self, service: Reading, short_tmp: Path) -> None:
        ended = await run(short_tmp, "audit", "verify", "--head", f"3:{'b' * 64}", "--head", f"99:{'c' * 64}")
        assert ended.code == 1
        assert "3:bbbbbbbbbbbb replaced" in ended.out
        assert "99:cccccccccccc truncated" in ended.out

    @pytest.mark.parametrize("head", ["20", f"0:{'a' * 64}", "20:abcdef"])
    async def test_malformed_head_is_refused_before_any_row_is_read(self, short_tmp: Path, head: str) -> None:
        ended = await run(short_tmp, "audit", "verify", "--head", head)
        assert (ended.code, ended.out) == (2, "")
        assert f'"{head}"' in ended.err

    async def test_changed_row_is_detected_independently_of_the_service(
        self, service: Reading, short_tmp: Path
    ) -> None:
        """Only rows are requested from the service: its own verification results do not count."""
        rows = service.ledger._rows.audit
        rows[6] = type(rows[6])(7, 0.0, "nothing.happened", None, None, "x", "{}", rows[6].prev_hash, rows[6].hash)
        ended = await run(short_tmp, "audit", "verify", "-o", "json")
        assert verdict(ended) == (1, "broken")
        assert ended.json["message"] == "Audit row 7 was changed after it was written."

    async def test_empty_and_missing_device_names_keep_different_hashes(
        self, service: Reading, short_tmp: Path
    ) -> None:
        odd = (Event("odd", 1.0, "", "", ""), Event("odd", 1.0, None, None))
        await service.ledger.commit(LedgerChange(events=odd))
        assert verdict(await run(short_tmp, "audit", "verify", "-o", "json")) == (0, "intact")

    async def test_empty_audit_log_is_intact_and_has_no_head(self, service: Reading, short_tmp: Path) -> None:
        service.ledger = MemoryLedger()
        await service.ledger.load()
        ended = await run(short_tmp, "audit", "verify", "-o", "json")
        assert verdict(ended) == (0, "intact")
        assert (ended.json["first"], ended.json["last"], ended.json["head"]) == (None, None, None)
        assert await run(short_tmp, "audit", "verify", "-o", "name") == Ended(0, "", "")

    async def test_rows_pruned_during_verification_give_no_verdict(self, service: Reading, short_tmp: Path) -> None:
        service.error = NotReady("Audit rows 5 to 9 were given up while it was read; ask again.")
        ended = await run(short_tmp, "audit", "verify", "-o", "json")
        assert (ended.code, ended.out) == (3, "")
        assert ended.err == "Error: Audit rows 5 to 9 were given up while it was read; ask again.\n"

    async def test_unreadable_ledger_gives_no_verdict(self, service: Reading, short_tmp: Path) -> None:
        service.error = LedgerFailure("The storage under the ledger failed.")
        assert await run(short_tmp, "audit", "verify") == Ended(1, "", "Error: The storage under the ledger failed.\n")

    async def test_unavailable_service_gives_no_verdict(self, short_tmp: Path) -> None:
        for words in (("verify",), ("export",), ("head",)):
            ended = await run(short_tmp, "audit", *words)
            assert (ended.code, ended.out) == (1, "")
            assert ended.err.startswith("Error: ")
            assert str(short_tmp) in ended.err


class TestVerifyLedger:
    async def test_ledger_of_a_stopped_service_is_verified_and_unchanged(self, home: Path, short_tmp: Path) -> None:
        def digest() -> dict[str, str]:
            return {each.name: hashlib.sha256(each.read_bytes()).hexdigest() for each in home.iterdir()}

        before = digest()
        ended = await run(short_tmp, "audit", "verify", "--ledger-dir", str(home), "-o", "json")
        assert verdict(ended) == (0, "intact")
        assert (ended.json["source"], ended.json["rowCount"]) == ("ledger", ROWS)
        assert digest() == before

    @pytest.mark.parametrize(
        ("statement", "message"),
        [
            ("UPDATE audit SET actor = 'uid:0' WHERE sequence = 7", "row 7 was changed"),
            ("DELETE FROM audit WHERE sequence = 7", "row 7 is missing"),
            ("DELETE FROM audit WHERE sequence > 15", "ends at row 15, but 20 rows were written"),
            ("UPDATE chain SET head_hash = 'x'", "is not the recorded head"),
        ],
    )
    async def test_tampering_with_the_ledger_is_named(
        self, home: Path, short_tmp: Path, statement: str, message: str
    ) -> None:
        tamper(home, statement)
        ended = await run(short_tmp, "audit", "verify", "--ledger-dir", str(home), "-o", "json")
        assert verdict(ended) == (1, "broken")
        assert message in ended.json["message"]
        ended = await run(short_tmp, "audit", "verify", "--ledger-dir", str(home), "-o", "name")
        assert (ended.code, ended.out) == (1, ""), "the head of a broken audit log is nothing to keep"
        assert message in ended.err

    async def test_tail_cut_off_together_with_its_head_is_detected_only_by_a_saved_head(
        self, home: Path, short_tmp: Path
    ) -> None:
        ended = await run(short_tmp, "audit", "verify", "--ledger-dir", str(home), "-o", "name")
        kept = ended.out.strip()
        tamper(home, "DELETE FROM audit WHERE sequence > 15")
        tamper(
            home, "UPDATE chain SET (head_sequence, head_hash) = (SELECT sequence, hash FROM audit WHERE sequence = 15)"
        )
        words = ("audit", "verify", "--ledger-dir", str(home), "-o", "json")
        assert verdict(await run(short_tmp, *words)) == (0, "intact")
        ended = await run(short_tmp, *words, "--head", kept)
        assert verdict(ended) == (1, "broken")
        assert ended.json["savedHeads"][0]["status"] == "truncated"

    async def test_ledger_open_in_a_service_is_refused(self, home: Path, short_tmp: Path) -> None:
        ledger = SqliteLedger(home)
        await ledger.load()
        for word in ("verify", "export"):
            ended = await run(short_tmp, "audit", word, "--ledger-dir", str(home))
            assert (ended.code, ended.out) == (3, "")
            assert "query that service, stop it first, or use a copy" in ended.err
        await ledger.close()

    @pytest.mark.parametrize(
        ("content", "message"), [(b"not a database, by any means" * 100, "is not a ledger"), (b"", "is a database")]
    )
    async def test_damaged_ledger_gives_no_verdict(
        self, home: Path, short_tmp: Path, content: bytes, message: str
    ) -> None:
        (home / "ledger.db").write_bytes(content)
        ended = await run(short_tmp, "audit", "verify", "--ledger-dir", str(home))
        assert (ended.code, ended.out) == (1, "")
        assert message in ended.err
        assert str(home) in ended.err, "it is named where it lies, not where its copy lay"

    async def test_directory_without_a_ledger_gives_no_verdict(self, tmp_path: Path, short_tmp: Path) -> None:
        for word in ("verify", "export"):
            ended = await run(short_tmp, "audit", word, "--ledger-dir", str(tmp_path))
            assert (ended.code, ended.out) == (1, "")
            assert f"There is no ledger in {tmp_path}" in ended.err


class TestAuditHead:
    async def test_audit_head_output_is_accepted_by_verify(self, service: Reading, short_tmp: Path) -> None:
        ended = await run(short_tmp, "audit", "head")
        assert ended == Ended(0, f"{written(service.ledger.head())}\n", "")
        assert (await run(short_tmp, "audit", "verify", "--head", ended.out.strip())).code == 0
        assert (await run(short_tmp, "audit", "head", "-o", "name")).out == ended.out

    async def test_audit_head_in_json_has_sequence_and_hash(self, service: Reading, short_tmp: Path) -> None:
        head = service.ledger.head()
        assert (await run(short_tmp, "audit", "head", "-o", "json")).json == {
            "apiVersion": "cli.scrubber.dev/v1",
            "kind": "AuditHead",
            "sequence": ROWS,
            "hash": head.hash,
        }

    async def test_audit_log_without_rows_has_no_audit_head(self, service: Reading, short_tmp: Path) -> None:
        service.ledger = MemoryLedger()
        ended = await run(short_tmp, "audit", "head")
        assert (ended.code, ended.out) == (1, "")
        assert "its audit log is empty" in ended.err


@pytest.mark.parametrize("columns", WIDTHS)
class TestTerminalOutput:
    async def test_broken_verdict_fits_the_terminal(self, home: Path, columns: int) -> None:
        shown = await at_terminal(
            "audit", "verify", "--ledger-dir", str(home), "--head", f"7:{'a' * 64}", columns=columns
        )
        assert shown.code == 1
        agrees_with(f"audit-verify-broken-{columns}", shown.text)

    async def test_intact_verdict_fits_the_terminal(self, service: Reading, short_tmp: Path, columns: int) -> None:
        shown = await at_terminal(
            "audit", "verify", columns=columns, environment={"SCRUBBER_SOCKET_DIR": str(short_tmp)}
        )
        assert shown.code == 0
        agrees_with(f"audit-verify-intact-{columns}", shown.text)

    async def test_audit_head_is_never_wrapped(self, service: Reading, short_tmp: Path, columns: int) -> None:
        shown = await at_terminal("audit", "head", columns=columns, environment={"SCRUBBER_SOCKET_DIR": str(short_tmp)})
        assert shown.text == f"{written(service.ledger.head())}\n"
