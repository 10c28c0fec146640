"""A process that commits as fast as it can and prints one line with the version for each change that is stored."""

import asyncio
import os
import sys
from pathlib import Path

from scrubber.adapters.ledger.sqlite import SqliteLedger
from scrubber.ports.record import LedgerChange
from tests.ledger_samples import GPU, certificate, event, record, scrub


async def write(directory: Path, max_audit_rows: int) -> None:
    """Commit until killed; every change contains its version in each of its parts."""
    ledger = SqliteLedger(directory, max_audit_rows=max_audit_rows)
    state = await ledger.load()
    version = state.records[GPU].version if GPU in state.records else 0
    while True:
        version += 1
        await ledger.commit(
            LedgerChange(
                records=(record(version, failures=version),),
                certificates=(certificate(f"C-{version}"),),
                scrubs=(scrub(f"S-{version}", finished=False), scrub(f"S-{version - 1}")),
                events=(event("scrub.started", number=version), event(number=version, certificate=f"C-{version}")),
            )
        )
        os.write(sys.stdout.fileno(), b"%d\n" % version)


if __name__ == "__main__":
    asyncio.run(write(Path(sys.argv[1]), int(sys.argv[2])))
