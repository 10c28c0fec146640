"""A process that loads a ledger and kills itself at a given one of its own changes to files: ``converting HOME N``."""

import asyncio
import os
import signal
import sys
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

from scrubber.adapters.ledger.sqlite import SqliteLedger

changes = count()


def killing(call: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``call``, which is not made any more once the process has made so many changes."""

    def counted(*arguments: Any, **options: Any) -> Any:
        if next(changes) == int(sys.argv[2]):
            os.kill(os.getpid(), signal.SIGKILL)
        return call(*arguments, **options)

    return counted


async def load(home: Path) -> None:
    ledger = SqliteLedger(home)
    await ledger.load()
    await ledger.close()


for name in ("fsync", "link", "rename", "unlink"):
    setattr(os, name, killing(getattr(os, name)))
asyncio.run(load(Path(sys.argv[1])))
