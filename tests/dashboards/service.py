"""The real ``scrubber`` command with one difference: the hourly verification of the audit log runs every two seconds.

While the file :data:`HELD_UP` is in the ledger's directory, no verification completes.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from typing import Any, Final

from scrubber import daemon
from scrubber.adapters.ledger.sqlite import SqliteLedger
from scrubber.cli.main import main

__all__ = ["HELD_UP"]

HELD_UP: Final = "the-look-is-held-up"


def _run() -> None:
    pages = SqliteLedger.pages

    async def delayed(ledger: SqliteLedger, *arguments: Any, **named: Any) -> AsyncIterator[Any]:
        while (ledger._directory.directory / HELD_UP).exists():  # noqa: ASYNC110 - a file offers no event
            await asyncio.sleep(0.1)
        async for page in pages(ledger, *arguments, **named):
            yield page

    vars(daemon)["_AUDIT_VERIFY_INTERVAL"] = 2.0
    SqliteLedger.pages = delayed  # type: ignore[method-assign, assignment]
    main(sys.argv[1:])


if __name__ == "__main__":
    _run()
