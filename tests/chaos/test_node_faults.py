"""The faults that a soak's daemons meet: each affects a process with the preloaded library, and no other."""

from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.chaos.node_faults import NodeFaults, tear_a_page

ROWS = 300


@pytest.fixture
def faults(tmp_path: Path) -> NodeFaults:
    faults = NodeFaults()
    faults.use_directory(tmp_path / "disk")
    (tmp_path / "disk").mkdir()
    return faults


def printed(faults: NodeFaults, program: str, tmp_path: Path) -> str:
    """Return what a Python program prints that meets the faults; ``disk`` is the path of the disk."""
    command = [sys.executable, "-c", f"disk = {str(tmp_path / 'disk')!r}\n{program}"]
    environment = {**os.environ, **faults.environment}
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.strip()


WRITE = """
import os
file = os.open(f"{disk}/file", os.O_RDWR | os.O_CREAT)
for action in (lambda: os.pwrite(file, b"x" * 100, 0), lambda: os.posix_fallocate(file, 0, 200), lambda: os.fsync(file)):
    try:
        action()
        print("done", end=" ")
    except OSError as error:
        print(error.errno, end=" ")
"""


@pytest.mark.parametrize("hours", [6.0, -11.5])
async def test_clock_that_was_set_is_shown_to_the_daemons_alone(
    faults: NodeFaults, tmp_path: Path, hours: float
) -> None:
    faults.set_clock(hours * 3600.0)
    program = "import time; print(time.time(), time.clock_gettime(time.CLOCK_BOOTTIME), time.monotonic())"
    wall, boot, monotonic = map(float, printed(faults, program, tmp_path).split())
    assert wall - time.time() == pytest.approx(hours * 3600.0, abs=60.0)
    assert boot == pytest.approx(time.clock_gettime(time.CLOCK_BOOTTIME), abs=60.0)  # as the start times in /proc
    assert monotonic == pytest.approx(time.monotonic(), abs=60.0)
    assert [offset for _, offset in faults.clock_steps] == [hours * 3600.0]


def test_read_only_disk_refuses_every_change_until_it_is_repaired(faults: NodeFaults, tmp_path: Path) -> None:
    (tmp_path / "disk/file").touch()
    faults.make_disk_read_only()
    with pytest.raises(subprocess.CalledProcessError):
        printed(faults, WRITE, tmp_path)
    (tmp_path / "disk/other").write_text("this process has no faulty disk")
    faults.repair_disk()
    assert printed(faults, WRITE, tmp_path) == "done done done"


def test_full_disk_refuses_growth_beyond_its_room(faults: NodeFaults, tmp_path: Path) -> None:
    faults.fill_disk(150)
    assert printed(faults, WRITE, tmp_path) == "done 28 done"
    faults.fill_disk(0)
    assert printed(faults, WRITE, tmp_path) == "done 28 done"  # the 100 bytes are there already
    (tmp_path / "disk/file").unlink()
    assert printed(faults, WRITE, tmp_path) == "28 28 done"


def test_exhausted_inotify_has_no_instance_left(faults: NodeFaults, tmp_path: Path) -> None:
    program = "import ctypes; c = ctypes.CDLL(None, use_errno=True); print(c.inotify_init1(0) >= 0, ctypes.get_errno())"
    faults.exhaust_inotify(exhausted=True)
    assert printed(faults, program, tmp_path) == "False 24"
    faults.exhaust_inotify(exhausted=False)
    assert printed(faults, program, tmp_path) == "True 0"


@pytest.mark.parametrize("of_log", [True, False])
def test_torn_page_loses_nothing_that_was_committed(tmp_path: Path, of_log: bool) -> None:
    database = tmp_path / "ledger.db"
    connection = sqlite3.connect(database)
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("CREATE TABLE rows (text TEXT)")
    for text in ("before", "after"):
        for _ in range(ROWS):
            connection.execute("INSERT INTO rows VALUES (?)", (text * 20,))
            connection.commit()
        if text == "before":
            connection.execute("PRAGMA wal_checkpoint(FULL)")
    crashed = tmp_path / "crashed"
    crashed.mkdir()
    for path in tmp_path.glob("ledger.db*"):
        if not path.name.endswith("-shm"):
            (crashed / path.name).write_bytes(path.read_bytes())
    connection.close()
    before = [path.read_bytes() for path in sorted(crashed.iterdir())]
    assert tear_a_page(crashed / "ledger.db", of_log=of_log, torn=b"torn")
    assert [path.read_bytes() for path in sorted(crashed.iterdir())] != before
    recovered = sqlite3.connect(crashed / "ledger.db")
    assert recovered.execute("SELECT count(*) FROM rows").fetchone() == (2 * ROWS,)
    assert recovered.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    recovered.close()
