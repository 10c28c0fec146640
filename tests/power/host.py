"""The recorded process: ``python -m tests.power.host``, with ``recorder.c`` preloaded (tests/power/recording.py).

Each line on stdin requests one life of a scenario, in a process forked for it, which may be killed before any of its
operations; the answer is that process's exit status. Forking saves the imports, which take longer than a life.
"""

from __future__ import annotations

import ctypes
import json
import os
import sqlite3
import stat
import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tests.power.scenarios import SCENARIOS

__all__ = ["DEFECTS"]

_real_sync = os.fsync
_real_connect = sqlite3.connect


def _sqlite_with(mode: str) -> Callable[[], None]:
    class Careless(sqlite3.Connection):
        def execute(self, sql: str, *arguments: Any) -> sqlite3.Cursor:
            return super().execute(sql.replace("synchronous = FULL", f"synchronous = {mode}"), *arguments)

    def install() -> None:
        sqlite3.connect = lambda *words, **facts: _real_connect(*words, factory=Careless, **facts)  # type: ignore[assignment]

    return install


def _never_sync(kind: Callable[[int], bool]) -> Callable[[], None]:
    def sync(descriptor: int) -> None:
        if not kind(os.fstat(descriptor).st_mode):
            _real_sync(descriptor)

    def install() -> None:
        os.fsync = sync  # type: ignore[assignment]

    return install


DEFECTS: Mapping[str, Callable[[], None]] = {
    "none": lambda: None,
    "synchronous=OFF": _sqlite_with("OFF"),
    "synchronous=NORMAL": _sqlite_with("NORMAL"),
    "no fsync of directories": _never_sync(stat.S_ISDIR),
    "no fsync of files": _never_sync(stat.S_ISREG),
}
"""What a careless program would do, of which the product's code is made."""


def _live(request: Mapping[str, Any]) -> None:
    recorder = ctypes.CDLL(None)
    recorder.power_record(os.fsencode(request["root"]), os.fsencode(request["log"]), ctypes.c_long(request["kill_at"]))
    DEFECTS[request["defect"]]()
    SCENARIOS[request["scenario"]].live(Path(request["root"]), lambda text: recorder.power_mark(text.encode()))


def main() -> None:
    for line in sys.stdin:
        child = os.fork()  # noqa: TID251 - no thread exists here
        if child == 0:
            status = 1
            try:
                _live(json.loads(line))
                status = 0
            except BaseException:  # noqa: BLE001 - printed, and reported by the status
                traceback.print_exc()
            finally:
                sys.stderr.flush()
                os._exit(status)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


if __name__ == "__main__":
    main()
