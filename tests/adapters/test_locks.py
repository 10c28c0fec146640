"""A device's lock identifies the process that works on the device, and ignores processes that only claim to hold it."""

import fcntl
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from scrubber.adapters.locks import UNIDENTIFIED, acquire_lock, lock_holder, lock_path
from scrubber.adapters.procwalk import start_time
from scrubber.domain.errors import Unreadable

HOLDER = """\
import sys
from scrubber.adapters.locks import acquire_lock
print(acquire_lock(sys.argv[1]), flush=True)
sys.stdin.read()
"""


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Run a process that holds the lock ``GPU-1`` until its standard input ends."""
    command = [sys.executable, "-c", HOLDER, str(tmp_path / "GPU-1")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"True\n"
        yield process


def test_lock_path_accepts_only_device_ids(tmp_path: Path) -> None:
    assert lock_path(tmp_path, "SIM-GPU-1") == tmp_path / "SIM-GPU-1"
    assert lock_path(tmp_path, "MIG-c7384736-a75d-5afc-978f-d2f1294409fd").parent == tmp_path
    for no_id in ("", "..", "../x", "service", "a/b"):
        with pytest.raises(Unreadable, match="not a device id"):
            lock_path(tmp_path, no_id)


def test_unlocked_file_has_no_lock_holder_whatever_its_content(tmp_path: Path) -> None:
    assert lock_holder(tmp_path / "GPU-1") is None
    (tmp_path / "GPU-1").write_text(f"{os.getpid()} {start_time(os.getpid())}\n", encoding="ascii")
    assert lock_holder(tmp_path / "GPU-1") is None


def test_lock_holder_is_identified_until_its_process_ends(holder: subprocess.Popen[bytes], tmp_path: Path) -> None:
    assert lock_holder(tmp_path / "GPU-1") == holder.pid
    assert not acquire_lock(str(tmp_path / "GPU-1"), timeout=0.0)
    assert lock_holder(tmp_path / "GPU-1") == holder.pid
    holder.kill()
    holder.wait()
    assert lock_holder(tmp_path / "GPU-1") is None


def test_lock_holder_with_a_false_claim_is_unidentified(tmp_path: Path) -> None:
    lock = tmp_path / "GPU-1"
    for claim in ("", "words", f"{os.getppid()} 1", f"1 {start_time(1)}", f"{os.getpid()} 1"):
        lock.write_text(claim, encoding="ascii")
        with lock.open("r+") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            assert lock_holder(lock) == UNIDENTIFIED


def test_lock_file_that_is_a_symlink_is_refused(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("precious", encoding="ascii")
    (tmp_path / "GPU-1").symlink_to("precious")
    with pytest.raises(Unreadable):
        lock_holder(tmp_path / "GPU-1")
    with pytest.raises(OSError, match="symbolic links"):
        acquire_lock(str(tmp_path / "GPU-1"))
    assert (tmp_path / "precious").read_text(encoding="ascii") == "precious"
