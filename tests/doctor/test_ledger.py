"""``scrubber doctor`` on the state directory: its owner, its durability, its lock holder, and the key in it."""

import errno
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from scrubber.doctor.files import FileSystem, file_system_of, lock_holder
from scrubber.doctor.model import CheckContext, CheckLevel
from tests.doctor.stage import found, healthy, levels, serving, write

NO_ANSWER = {"error": "No answer.", "pid": 0}
ROOT = os.geteuid() == 0


@pytest.fixture
def node(short_tmp: Path) -> Iterator[CheckContext]:
    with healthy(short_tmp) as node:
        yield node


def on(
    node: CheckContext,
    device: int = 2,
    network: str = "",
    free: int = 20 << 30,
    read_only: bool = False,
    memory: str = "",
) -> CheckContext:
    """Return the node with a state directory on such a file system."""

    def reports(path: Path) -> FileSystem:
        path.stat()
        here = path == node.state_dir
        return FileSystem(
            device if here else 1, network if here else "", free, read_only and here, memory if here else ""
        )

    return replace(node, file_system=reports)


# --- the directory


@pytest.mark.parametrize(
    ("mode", "level"),
    [(0o700, CheckLevel.OK), (0o750, CheckLevel.WARNING), (0o770, CheckLevel.ERROR), (0o702, CheckLevel.ERROR)],
)
def test_state_directory_accessible_by_others_is_reported_with_the_required_mode(
    node: CheckContext, mode: int, level: CheckLevel
) -> None:
    node.state_dir.chmod(mode)
    check = found(node, "state-dir")
    assert check.level is level
    assert check.remedy == ("" if level is CheckLevel.OK else f"chmod 700 {node.state_dir}")


def test_state_directory_of_another_user_is_reported(node: CheckContext, monkeypatch: pytest.MonkeyPatch) -> None:
    mine = node.state_dir.stat().st_uid
    if ROOT:
        os.chown(node.state_dir, 54321, -1)
    else:  # without root the owner cannot be changed, but the expected user can
        monkeypatch.setattr(os, "geteuid", lambda: mine + 1)
    check = found(node, "state-dir")
    assert (check.level, "who can change the ledger" in check.message) == (CheckLevel.ERROR, True)
    assert check.remedy.startswith("chown root:")


def test_state_directory_on_a_network_file_system_is_an_error(node: CheckContext) -> None:
    check = found(on(node, network="NFS"), "state-dir")
    assert (check.level, "is on NFS" in check.message) == (CheckLevel.ERROR, True)


def test_state_directory_on_tmpfs_is_a_warning(node: CheckContext) -> None:
    check = found(on(node, memory="tmpfs"), "state-dir")
    assert (check.level, "is on tmpfs: a reboot deletes" in check.message) == (CheckLevel.WARNING, True)
    assert "--state-dir" in check.remedy


def test_volatile_file_system_is_detected_by_the_kernel() -> None:
    assert file_system_of(Path("/dev/shm")).volatile_type == "tmpfs"


def test_read_only_state_directory_is_an_error(node: CheckContext) -> None:
    check = found(on(node, read_only=True), "state-dir")
    assert (check.level, "remount,rw" in check.remedy) == (CheckLevel.ERROR, True)


def test_file_in_place_of_the_state_directory_is_reported(node: CheckContext) -> None:
    file = write(node.root, "file")
    check = found(replace(node, state_dir=file), "state-dir")
    assert (check.level, "is not a directory" in check.message) == (CheckLevel.ERROR, True)


@pytest.mark.parametrize(("expected", "words"), [({}, "has its ledger elsewhere"), (NO_ANSWER, "There is no ledger")])
def test_missing_state_directory_is_reported_once(node: CheckContext, expected: dict[str, object], words: str) -> None:
    missing = replace(serving(node, **expected, key_id=""), state_dir=node.root / "nowhere")
    check = found(missing, "state-dir")
    assert (check.level, words in check.message) == (CheckLevel.WARNING, True)
    assert {"ledger-disk", "signing-key"}.isdisjoint(levels(missing))


@pytest.mark.parametrize("check", ["state-dir", "ledger-disk"])
def test_failing_disk_is_never_ok(node: CheckContext, check: str) -> None:
    def fails(path: Path) -> FileSystem:
        raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))

    one = found(replace(node, file_system=fails), check)
    assert (one.level, "is unknown" in one.message) == (CheckLevel.WARNING, True)


def test_free_space_is_queried_from_the_kernel(tmp_path: Path) -> None:
    reported = file_system_of(tmp_path)
    assert reported.device == tmp_path.stat().st_dev
    assert reported.free_bytes > 0
    assert (reported.network_type, reported.read_only) == ("", False)


# --- the disk


def test_nearly_full_disk_is_a_warning(node: CheckContext) -> None:
    check = found(on(node, free=63 << 20), "ledger-disk")
    assert (check.level, check.message) == (
        CheckLevel.WARNING,
        f"Only 63 MiB are free for {node.state_dir}; a full disk stops every hand-over.",
    )
    assert f"df {node.state_dir}" in check.remedy


def test_disk_shared_with_pods_is_reported_with_the_other_path(node: CheckContext) -> None:
    check = found(on(node, device=1), "ledger-disk")
    assert (check.level, f"on the file system of {node.root}/var/lib/kubelet" in check.message) == (
        CheckLevel.WARNING,
        True,
    )
    assert "docs/deploying.md" in check.remedy


@pytest.mark.parametrize("kind", ["short", "sparse"])
def test_incomplete_ledger_reserve_is_reported(node: CheckContext, kind: str) -> None:
    reserve = node.state_dir / "ledger.reserve"
    with reserve.open("r+b") as file:
        file.truncate(0 if kind == "sparse" else 16384)
        file.truncate(4 << 20 if kind == "sparse" else 16384)
    check = found(node, "ledger-disk")
    assert (check.level, "nothing is granted" in check.message) == (CheckLevel.ERROR, True)


def test_missing_ledger_reserve_reports_only_the_free_space(node: CheckContext) -> None:
    (node.state_dir / "ledger.reserve").unlink()
    check = found(node, "ledger-disk")
    assert (check.level, check.message) == (CheckLevel.OK, f"20 GiB are free for {node.state_dir}.")


# --- the lock holder


def test_ledger_lock_held_by_the_answering_service_is_ok(node: CheckContext) -> None:
    check = found(node, "ledger-lock")
    assert (check.level, f"(PID {os.getpid()})" in check.message) == (CheckLevel.OK, True)


def test_unresponsive_service_that_holds_the_ledger_lock_is_named(node: CheckContext) -> None:
    check = found(serving(node, **NO_ANSWER), "ledger-lock")
    assert (check.level, f"PID {os.getpid()} has the ledger open, but does not answer" in check.message) == (
        CheckLevel.WARNING,
        True,
    )
    assert f"ps -fp {os.getpid()}" in check.remedy


def test_unlocked_ledger_is_ok_only_without_an_answering_service(
    node: CheckContext,
) -> None:
    write(node.root, "proc/locks", "1: FLOCK  ADVISORY  WRITE 1 00:00:1 0 EOF\n")
    assert found(serving(node, **NO_ANSWER), "ledger-lock").level is CheckLevel.OK
    check = found(node, "ledger-lock")
    assert (check.level, "--state-dir" in check.remedy) == (CheckLevel.WARNING, True)
    (node.state_dir / "ledger.lock").unlink()
    check = found(node, "ledger-lock")
    assert (check.level, "ledger.lock does not exist" in check.message) == (CheckLevel.WARNING, True)


def test_ledger_lock_held_by_another_process_is_named(node: CheckContext) -> None:
    check = found(serving(node, pid=4), "ledger-lock")
    assert (
        check.level,
        f"PID {os.getpid()} has the ledger open, but the service that answers reports PID 4" in (check.message),
    ) == (CheckLevel.WARNING, True)


def test_guessed_state_directory_is_not_checked_for_a_lock(node: CheckContext) -> None:
    assert "ledger-lock" not in levels(replace(node, state_dir_known=False))


def test_malformed_lock_table_line_names_no_holder(node: CheckContext) -> None:
    lock = node.state_dir / "ledger.lock"
    inode = lock.stat().st_ino
    lines = [
        "",
        "x",
        f"1: POSIX  ADVISORY  WRITE {os.getpid()} 00:00:{inode} 0 EOF",
        f"2: FLOCK  ADVISORY  WRITE -1 00:00:{inode} 0 EOF",
        f"3: -> FLOCK  ADVISORY  WRITE {os.getpid()} 00:00:{inode} 0 EOF",
        f"4: FLOCK  ADVISORY  WRITE 7 00:00:{inode} 0 EOF",  # of another file system: the PID in the file is not 7
    ]
    table = write(node.root, "proc/locks", "\n".join(lines))
    assert lock_holder(lock, table) is None
    # Btrfs and overlays report another device number for a file; then the PID in the file decides.
    table.write_text(f"1: FLOCK  ADVISORY  WRITE {os.getpid()} 00:00:{inode} 0 EOF\n")
    assert lock_holder(lock, table) == os.getpid()


# --- the key


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o666])
def test_signing_key_readable_by_others_is_an_error(node: CheckContext, mode: int) -> None:
    (node.state_dir / "signing.key").chmod(mode)
    check = found(node, "signing-key")
    assert (check.level, f"chmod 600 {node.state_dir}/signing.key" in check.remedy) == (CheckLevel.ERROR, True)


def test_symlink_or_empty_file_is_no_signing_key(node: CheckContext) -> None:
    key = node.state_dir / "signing.key"
    key.rename(node.root / "elsewhere")
    key.symlink_to(node.root / "elsewhere")
    assert "not a regular file" in found(node, "signing-key").message
    key.unlink()
    write(node.state_dir, "signing.key").chmod(0o600)
    assert "is empty" in found(node, "signing-key").message


def test_signing_key_removed_under_a_running_service_is_reported(node: CheckContext) -> None:
    (node.state_dir / "signing.key").unlink()
    check = found(node, "signing-key")
    assert (check.level, "does not exist, but the service signs" in check.message) == (CheckLevel.WARNING, True)
    assert "signing-key" not in levels(serving(node, **NO_ANSWER, key_id=""))
