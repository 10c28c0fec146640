"""kill -9 at any moment: acknowledged changes are stored, none is stored partially, and the next service can start."""

import asyncio
import random
import sys
from pathlib import Path

from scrubber.adapters.ledger.offline import verify_ledger
from scrubber.adapters.ledger.sqlite import SqliteLedger
from scrubber.ports.record import HistoryQuery
from tests.ledger_samples import GPU, scrub

ROOT = Path(__file__).parents[2]
KILLS = 20
MAX_AUDIT_ROWS = 150
"""Small, so that some of the kills hit a commit that prunes."""


async def written_until_killed(directory: Path, acknowledgements: int) -> int | None:
    """Start a writer, kill it after so many acknowledgements; return the last version it acknowledged, if any."""
    writer = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "tests.chaos.ledger_writer",
        str(directory),
        str(MAX_AUDIT_ROWS),
        cwd=ROOT,
        stdout=asyncio.subprocess.PIPE,
    )
    assert writer.stdout is not None
    lines: list[bytes] = []
    try:
        while len(lines) < acknowledgements:
            line = await writer.stdout.readline()
            assert line, "the writer ended by itself"
            lines.append(line)
    finally:
        writer.kill()
    # What it wrote between the last line read and its death was acknowledged, too.
    lines += (await writer.stdout.read()).splitlines()
    await writer.wait()
    return int(lines[-1]) if lines else None


async def test_every_acknowledged_commit_survives_sigkill(tmp_path: Path) -> None:
    dice = random.Random(20)
    home = tmp_path / "state"
    acknowledged = 0
    for round_ in range(KILLS):
        # The first writers are killed while they create or open the ledger, the others while they write.
        last = await written_until_killed(home, 0 if round_ < 3 else dice.randint(1, 60))
        acknowledged = acknowledged if last is None else last

        ledger = SqliteLedger(home, max_audit_rows=MAX_AUDIT_ROWS)
        state = await ledger.load()
        newest = await ledger.history(HistoryQuery(limit=2))
        await ledger.close()

        version = state.records[GPU].version if GPU in state.records else 0
        assert version in (acknowledged, acknowledged + 1)
        assert state.head_sequence == 2 * version
        if version:
            assert state.records[GPU].failures == version
            assert state.unfinished_scrubs == (scrub(f"S-{version}", finished=False),)
            assert [entry.event.fields["number"] for entry in newest] == [version, version]
            named = newest[0].certificate
            assert named is not None
            assert named.id == f"C-{version}"
        report = verify_ledger(home)
        assert report.intact, report.message
        assert report.rows <= MAX_AUDIT_ROWS
        acknowledged = version
    assert acknowledged > MAX_AUDIT_ROWS
