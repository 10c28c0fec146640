"""``scrubber audit``: the trail of a service and of a stopped one's directory, whole and tampered with."""

import hashlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from scrubber.adapters.ledger.memory import MemoryLedger
from scrubber.adapters.ledger.sqlite import SqliteLedger
from scrubber.domain.errors import LedgerFailure, NotReady
from scrubber.ports.record import Change, Event, Head
from tests.cli.audit_stage import ROWS, Reading, grow, reading, tamper, verdict, written
from tests.cli.stage import Ended, run
from tests.cli.terminal import WIDTHS, agrees_with, at_terminal
from tests.ledger_samples import fill


@pytest.fixture
async def service(short_tmp: Path) -> AsyncIterator[Reading]:
    async with reading(short_tmp) as there:
        yield there


@pytest.fixture
async def home(tmp_path: Path) -> Path:
    """The state directory of a service that has stopped; its trail has twenty rows."""
    await fill(tmp_path / "state", ROWS)
    return tmp_path / "state"


class TestVerifyAService:
    async def test_a_whole_trail_is_intact(self, service: Reading, short_tmp: Path) -> None:
        await grow(service.ledger, 600)
        ended = await run(short_tmp, "audit", "verify", "-o", "json")
        assert (ended.code, ended.err) == (0, "")
        head = service.ledger.head()
        assert ended.json == {
            "apiVersion": "cli.scrubber.dev/v1",
            "kind": "AuditReport",
            "source": "service",
            "verdict": "intact",
            "sentence": "The audit trail is intact: 620 rows.",
            "rows": 620,
            "first": {"sequence": 1, "at": 100.0},
            "last": {"sequence": 620, "at": 699.0},
            "pruned": None,
            "head": {"sequence": 620, "hash": head.hash},
            "kept": [],
        }

    async def test_a_script_gets_the_head_to_keep(self, service: Reading, short_tmp: Path) -> None:
        ended = await run(short_tmp, "audit", "verify", "-o", "name")
        assert ended == Ended(0, f"{written(service.ledger.head())}\n", "")

    async def test_a_head_that_was_kept_is_found(self, service: Reading, short_tmp: Path) -> None:
        kept = service.ledger.head()
        await grow(service.ledger, 5)
        ended = await run(short_tmp, "audit", "verify", "--head", written(kept).upper(), "-o", "json")
        assert verdict(ended) == (0, "intact")
        assert ended.json["kept"] == [
            {
                "sequence": ROWS,
                "hash": kept.hash,
                "standing": "found",
                "sentence": "Row 20 is the one that was kept.",
            }
        ]

    async def test_a_tail_that_was_cut_off_is_noticed_by_a_head_behind_the_end(
        self, service: Reading, short_tmp: Path
    ) -> None:
        ended = await run(short_tmp, "audit", "verify", "--head", f"{ROWS + 1}:{'a' * 64}", "-o", "json")
        assert verdict(ended) == (1, "broken")
        assert ended.json["kept"][0]["standing"] == "cut-off"
        assert ended.json["sentence"] == "The audit trail ends at row 20: its end was cut off."

    async def test_a_trail_that_was_written_anew_is_noticed_by_another_hash(
        self, service: Reading, short_tmp: Path
    ) -> None:
        ended = await run(short_tmp, "audit", "verify", "--head", f"7:{'a' * 64}", "-o", "json")
        assert verdict(ended) == (1, "broken")
        assert ended.json["kept"][0]["standing"] == "replaced"
        assert ended.json["sentence"].endswith("now: it, or a row before it, was written anew.")

    async def test_of_a_head_behind_the_pruned_end_nothing_can_be_told(self, service: Reading, short_tmp: Path) -> None:
        kept = service.ledger.head()
        await grow(service.ledger, 700)
        ended = await run(short_tmp, "audit", "verify", "--head", written(kept), "-o", "json")
        assert verdict(ended) == (1, "cannot-tell")
        pruned = ended.json["pruned"]
        assert pruned["sequence"] > kept.sequence
        assert "cannot be compared any more" in ended.json["sentence"]
        assert (await run(short_tmp, "audit", "verify", "--head", written(Head(**pruned)))).code == 0

    async def test_one_head_that_speaks_against_it_is_enough(self, service: Reading, short_tmp: Path) -> None:
        kept = written(service.ledger.head())
        words = ("audit", "verify", "--head", kept, "--head", f"3:{'b' * 64}", "-o", "json")
        ended = await run(short_tmp, *words)
        assert verdict(ended) == (1, "broken")
        assert [each["standing"] for each in ended.json["kept"]] == ["found", "replaced"]

    async def test_a_head_that_was_replaced_and_one_that_was_cut_off_are_told_apart(
        self, service: Reading, short_tmp: Path
    ) -> None:
        ended = await run(short_tmp, "audit", "verify", "--head", f"3:{'b' * 64}", "--head", f"99:{'c' * 64}")
        assert ended.code == 1
        assert "3:bbbbbbbbbbbb replaced" in ended.out
        assert "99:cccccccccccc cut-off" in ended.out

    @pytest.mark.parametrize("head", ["20", f"0:{'a' * 64}", "20:abcdef"])
    async def test_a_head_that_is_none_is_refused_before_anything_is_read(self, short_tmp: Path, head: str) -> None:
        ended = await run(short_tmp, "audit", "verify", "--head", head)
        assert (ended.code, ended.out) == (2, "")
        assert f'"{head}"' in ended.err

    async def test_a_trail_that_lies_is_seen_through(self, service: Reading, short_tmp: Path) -> None:
        """The service is asked for rows only: what it says of itself counts for nothing."""
        rows = service.ledger._rows.audit
        rows[6] = type(rows[6])(7, 0.0, "nothing.happened", None, None, "x", "{}", rows[6].prev_hash, rows[6].hash)
        ended = await run(short_tmp, "audit", "verify", "-o", "json")
        assert verdict(ended) == (1, "broken")
        assert ended.json["sentence"] == "Audit row 7 was changed after it was written."

    async def test_an_empty_name_stays_one_on_its_way(self, service: Reading, short_tmp: Path) -> None:
        """No device and a device without a name have different hashes."""
        odd = (Event("odd", 1.0, "", "", ""), Event("odd", 1.0, None, None))
        await service.ledger.commit(Change(events=odd))
        assert verdict(await run(short_tmp, "audit", "verify", "-o", "json")) == (0, "intact")

    async def test_an_empty_trail_is_intact_and_has_no_head(self, service: Reading, short_tmp: Path) -> None:
        service.ledger = MemoryLedger()
        await service.ledger.load()
        ended = await run(short_tmp, "audit", "verify", "-o", "json")
        assert verdict(ended) == (0, "intact")
        assert (ended.json["first"], ended.json["last"], ended.json["head"]) == (None, None, None)
        assert await run(short_tmp, "audit", "verify", "-o", "name") == Ended(0, "", "")

    async def test_rows_that_are_given_up_meanwhile_are_no_verdict(self, service: Reading, short_tmp: Path) -> None:
        service.error = NotReady("Audit rows 5 to 9 were given up while it was read; ask again.")
        ended = await run(short_tmp, "audit", "verify", "-o", "json")
        assert (ended.code, ended.out) == (3, "")
        assert ended.err == "Error: Audit rows 5 to 9 were given up while it was read; ask again.\n"

    async def test_a_ledger_that_cannot_be_read_is_no_verdict(self, service: Reading, short_tmp: Path) -> None:
        service.error = LedgerFailure("The storage under the ledger failed.")
        assert await run(short_tmp, "audit", "verify") == Ended(1, "", "Error: The storage under the ledger failed.\n")

    async def test_a_service_that_is_away_is_no_verdict(self, short_tmp: Path) -> None:
        for words in (("verify",), ("export",), ("head",)):
            ended = await run(short_tmp, "audit", *words)
            assert (ended.code, ended.out) == (1, "")
            assert ended.err.startswith("Error: ")
            assert str(short_tmp) in ended.err


class TestVerifyALedger:
    async def test_a_stopped_service_s_directory_is_verified_and_left_alone(self, home: Path, short_tmp: Path) -> None:
        def digest() -> dict[str, str]:
            return {each.name: hashlib.sha256(each.read_bytes()).hexdigest() for each in home.iterdir()}

        before = digest()
        ended = await run(short_tmp, "audit", "verify", "--ledger", str(home), "-o", "json")
        assert verdict(ended) == (0, "intact")
        assert (ended.json["source"], ended.json["rows"]) == ("ledger", ROWS)
        assert digest() == before

    @pytest.mark.parametrize(
        ("statement", "complaint"),
        [
            ("UPDATE audit SET actor = 'uid:0' WHERE sequence = 7", "row 7 was changed"),
            ("DELETE FROM audit WHERE sequence = 7", "row 7 is missing"),
            ("DELETE FROM audit WHERE sequence > 15", "ends at row 15, but 20 rows were written"),
            ("UPDATE chain SET head_hash = 'x'", "is not the recorded head"),
        ],
    )
    async def test_what_was_done_to_it_is_named(
        self, home: Path, short_tmp: Path, statement: str, complaint: str
    ) -> None:
        tamper(home, statement)
        ended = await run(short_tmp, "audit", "verify", "--ledger", str(home), "-o", "json")
        assert verdict(ended) == (1, "broken")
        assert complaint in ended.json["sentence"]
        ended = await run(short_tmp, "audit", "verify", "--ledger", str(home), "-o", "name")
        assert (ended.code, ended.out) == (1, ""), "the head of a broken trail is nothing to keep"
        assert complaint in ended.err

    async def test_a_tail_that_was_cut_off_with_its_record_is_noticed_by_a_head_alone(
        self, home: Path, short_tmp: Path
    ) -> None:
        ended = await run(short_tmp, "audit", "verify", "--ledger", str(home), "-o", "name")
        kept = ended.out.strip()
        tamper(home, "DELETE FROM audit WHERE sequence > 15")
        tamper(
            home, "UPDATE chain SET (head_sequence, head_hash) = (SELECT sequence, hash FROM audit WHERE sequence = 15)"
        )
        words = ("audit", "verify", "--ledger", str(home), "-o", "json")
        assert verdict(await run(short_tmp, *words)) == (0, "intact")
        ended = await run(short_tmp, *words, "--head", kept)
        assert verdict(ended) == (1, "broken")
        assert ended.json["kept"][0]["standing"] == "cut-off"

    async def test_a_ledger_that_a_service_has_open_is_left_to_it(self, home: Path, short_tmp: Path) -> None:
        ledger = SqliteLedger(home)
        await ledger.load()
        for word in ("verify", "export"):
            ended = await run(short_tmp, "audit", word, "--ledger", str(home))
            assert (ended.code, ended.out) == (3, "")
            assert "ask that service, stop it first, or look at a copy" in ended.err
        await ledger.close()

    @pytest.mark.parametrize(
        ("content", "complaint"), [(b"not a database, by any means" * 100, "is not a ledger"), (b"", "is a database")]
    )
    async def test_a_damaged_ledger_is_no_verdict(
        self, home: Path, short_tmp: Path, content: bytes, complaint: str
    ) -> None:
        (home / "ledger.db").write_bytes(content)
        ended = await run(short_tmp, "audit", "verify", "--ledger", str(home))
        assert (ended.code, ended.out) == (1, "")
        assert complaint in ended.err
        assert str(home) in ended.err, "it is named where it lies, not where its copy lay"

    async def test_a_directory_without_a_ledger_is_no_verdict(self, tmp_path: Path, short_tmp: Path) -> None:
        for word in ("verify", "export"):
            ended = await run(short_tmp, "audit", word, "--ledger", str(tmp_path))
            assert (ended.code, ended.out) == (1, "")
            assert f"There is no ledger in {tmp_path}" in ended.err


class TestHead:
    async def test_it_is_one_word_that_verify_takes(self, service: Reading, short_tmp: Path) -> None:
        ended = await run(short_tmp, "audit", "head")
        assert ended == Ended(0, f"{written(service.ledger.head())}\n", "")
        assert (await run(short_tmp, "audit", "verify", "--head", ended.out.strip())).code == 0
        assert (await run(short_tmp, "audit", "head", "-o", "name")).out == ended.out

    async def test_json_has_its_parts(self, service: Reading, short_tmp: Path) -> None:
        head = service.ledger.head()
        assert (await run(short_tmp, "audit", "head", "-o", "json")).json == {
            "apiVersion": "cli.scrubber.dev/v1",
            "kind": "AuditHead",
            "sequence": ROWS,
            "hash": head.hash,
        }

    async def test_a_trail_without_rows_has_none(self, service: Reading, short_tmp: Path) -> None:
        service.ledger = MemoryLedger()
        ended = await run(short_tmp, "audit", "head")
        assert (ended.code, ended.out) == (1, "")
        assert "has no row yet" in ended.err


@pytest.mark.parametrize("columns", WIDTHS)
class TestAtATerminal:
    async def test_a_verdict_fits(self, home: Path, columns: int) -> None:
        told = await at_terminal("audit", "verify", "--ledger", str(home), "--head", f"7:{'a' * 64}", columns=columns)
        assert told.code == 1
        agrees_with(f"audit-verify-broken-{columns}", told.text)

    async def test_good_news_fit(self, service: Reading, short_tmp: Path, columns: int) -> None:
        told = await at_terminal("audit", "verify", columns=columns, environment={"SCRUBBER_SOCKET": str(short_tmp)})
        assert told.code == 0
        agrees_with(f"audit-verify-intact-{columns}", told.text)

    async def test_the_head_stays_one_word(self, service: Reading, short_tmp: Path, columns: int) -> None:
        told = await at_terminal("audit", "head", columns=columns, environment={"SCRUBBER_SOCKET": str(short_tmp)})
        assert told.text == f"{written(service.ledger.head())}\n"
