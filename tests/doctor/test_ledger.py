"""``scrubber doctor`` on the state directory: whose it is, whether it lasts, who has it open, and the key in it."""

import errno
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from scrubber.doctor.finding import Level, Node
from scrubber.doctor.looking import FileSystem, file_system_of, lock_holder
from tests.doctor.stage import found, healthy, levels, serving, write

NOBODY = {"refusal": "Nobody answers.", "pid": 0}
ROOT = os.geteuid() == 0


@pytest.fixture
def node(short_tmp: Path) -> Iterator[Node]:
    with healthy(short_tmp) as node:
        yield node


def on(
    node: Node, device: int = 2, network: str = "", free: int = 20 << 30, read_only: bool = False, memory: str = ""
) -> Node:
    """The node with a state directory on such a file system."""

    def tells(path: Path) -> FileSystem:
        path.stat()
        here = path == node.state_dir
        return FileSystem(
            device if here else 1, network if here else "", free, read_only and here, memory if here else ""
        )

    return replace(node, file_system=tells)


# --- the directory


@pytest.mark.parametrize(
    ("mode", "level"), [(0o700, Level.OK), (0o750, Level.WARNING), (0o770, Level.ERROR), (0o702, Level.ERROR)]
)
def test_a_directory_that_others_may_enter_comes_with_the_mode_it_should_have(
    node: Node, mode: int, level: Level
) -> None:
    node.state_dir.chmod(mode)
    check = found(node, "state-dir")
    assert check.level is level
    assert check.remedy == ("" if level is Level.OK else f"chmod 700 {node.state_dir}")


def test_a_directory_of_somebody_else_is_somebody_elses_record(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    mine = node.state_dir.stat().st_uid
    if ROOT:
        os.chown(node.state_dir, 54321, -1)
    else:  # who is not root cannot give it away, but can be somebody else
        monkeypatch.setattr(os, "geteuid", lambda: mine + 1)
    check = found(node, "state-dir")
    assert (check.level, "who can change the record" in check.sentence) == (Level.ERROR, True)
    assert check.remedy.startswith("chown root:")


def test_a_network_keeps_no_ledger_safe(node: Node) -> None:
    check = found(on(node, network="NFS"), "state-dir")
    assert (check.level, "is on NFS" in check.sentence) == (Level.ERROR, True)


def test_memory_forgets_at_a_reboot_whom_a_person_took_out(node: Node) -> None:
    check = found(on(node, memory="tmpfs"), "state-dir")
    assert (check.level, "is on tmpfs: a reboot forgets" in check.sentence) == (Level.WARNING, True)
    assert "--state-dir" in check.remedy


def test_the_kernel_says_what_is_memory() -> None:
    assert file_system_of(Path("/dev/shm")).memory == "tmpfs"


def test_a_disk_that_went_read_only_records_nothing(node: Node) -> None:
    check = found(on(node, read_only=True), "state-dir")
    assert (check.level, "remount,rw" in check.remedy) == (Level.ERROR, True)


def test_a_file_is_no_state_directory(node: Node) -> None:
    file = write(node.root, "file")
    check = found(replace(node, state_dir=file), "state-dir")
    assert (check.level, "is no directory" in check.sentence) == (Level.ERROR, True)


@pytest.mark.parametrize(("said", "words"), [({}, "has its ledger elsewhere"), (NOBODY, "There is no ledger")])
def test_a_directory_that_is_not_there_is_told_once(node: Node, said: dict[str, object], words: str) -> None:
    missing = replace(serving(node, **said, key=""), state_dir=node.root / "nowhere")
    check = found(missing, "state-dir")
    assert (check.level, words in check.sentence) == (Level.WARNING, True)
    assert {"ledger-disk", "signing-key"}.isdisjoint(levels(missing))


@pytest.mark.parametrize("check", ["state-dir", "ledger-disk"])
def test_a_disk_that_fails_is_not_called_ok(node: Node, check: str) -> None:
    def fails(path: Path) -> FileSystem:
        raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))

    one = found(replace(node, file_system=fails), check)
    assert (one.level, "was not seen" in one.sentence) == (Level.WARNING, True)


def test_the_kernel_is_asked_what_is_free(tmp_path: Path) -> None:
    told = file_system_of(tmp_path)
    assert told.device == tmp_path.stat().st_dev
    assert told.free > 0
    assert (told.network, told.read_only) == ("", False)


# --- the disk


def test_a_disk_that_is_nearly_full_is_told_before_it_is(node: Node) -> None:
    check = found(on(node, free=63 << 20), "ledger-disk")
    assert (check.level, check.sentence) == (
        Level.WARNING,
        f"Only 63 MiB are free for {node.state_dir}; a full disk stops every hand-over.",
    )
    assert f"df {node.state_dir}" in check.remedy


def test_a_disk_that_pods_can_fill_is_named_with_who_fills_it(node: Node) -> None:
    check = found(on(node, device=1), "ledger-disk")
    assert (check.level, f"on the file system of {node.root}/var/lib/kubelet" in check.sentence) == (
        Level.WARNING,
        True,
    )
    assert "docs/deploying.md" in check.remedy


@pytest.mark.parametrize("kind", ["short", "sparse"])
def test_a_reserve_that_is_not_whole_grants_nothing(node: Node, kind: str) -> None:
    reserve = node.state_dir / "ledger.reserve"
    with reserve.open("r+b") as file:
        file.truncate(0 if kind == "sparse" else 16384)
        file.truncate(4 << 20 if kind == "sparse" else 16384)
    check = found(node, "ledger-disk")
    assert (check.level, "nothing is granted" in check.sentence) == (Level.ERROR, True)


def test_without_a_reserve_yet_the_room_alone_is_told(node: Node) -> None:
    (node.state_dir / "ledger.reserve").unlink()
    check = found(node, "ledger-disk")
    assert (check.level, check.sentence) == (Level.OK, f"20 GiB are free for {node.state_dir}.")


# --- who has it open


def test_the_service_that_answers_has_the_ledger_open(node: Node) -> None:
    check = found(node, "ledger-lock")
    assert (check.level, f"(PID {os.getpid()})" in check.sentence) == (Level.OK, True)


def test_a_service_that_has_the_ledger_and_does_not_answer_is_named(node: Node) -> None:
    check = found(serving(node, **NOBODY), "ledger-lock")
    assert (check.level, f"PID {os.getpid()} has the ledger open, and does not answer" in check.sentence) == (
        Level.WARNING,
        True,
    )
    assert f"ps -fp {os.getpid()}" in check.remedy


def test_a_ledger_of_nobody_is_free_when_nobody_answers_and_the_wrong_one_when_somebody_does(node: Node) -> None:
    write(node.root, "proc/locks", "1: FLOCK  ADVISORY  WRITE 1 00:00:1 0 EOF\n")
    assert found(serving(node, **NOBODY), "ledger-lock").level is Level.OK
    check = found(node, "ledger-lock")
    assert (check.level, "--state-dir" in check.remedy) == (Level.WARNING, True)
    (node.state_dir / "ledger.lock").unlink()
    check = found(node, "ledger-lock")
    assert (check.level, "ledger.lock is not there" in check.sentence) == (Level.WARNING, True)


def test_another_process_than_the_one_that_answers_is_named(node: Node) -> None:
    check = found(serving(node, pid=4), "ledger-lock")
    assert (
        check.level,
        f"PID {os.getpid()} has the ledger open, and the service that answers says that it is PID 4"
        in (check.sentence),
    ) == (Level.WARNING, True)


def test_a_guess_says_nothing_of_a_service_that_works(node: Node) -> None:
    assert "ledger-lock" not in levels(replace(node, state_dir_known=False))


def test_a_table_of_locks_that_makes_no_sense_names_nobody(node: Node) -> None:
    lock = node.state_dir / "ledger.lock"
    inode = lock.stat().st_ino
    lines = [
        "",
        "x",
        f"1: POSIX  ADVISORY  WRITE {os.getpid()} 00:00:{inode} 0 EOF",
        f"2: FLOCK  ADVISORY  WRITE -1 00:00:{inode} 0 EOF",
        f"3: -> FLOCK  ADVISORY  WRITE {os.getpid()} 00:00:{inode} 0 EOF",
        f"4: FLOCK  ADVISORY  WRITE 7 00:00:{inode} 0 EOF",  # of another file system: the note in the file is not 7
    ]
    table = write(node.root, "proc/locks", "\n".join(lines))
    assert lock_holder(lock, table) is None
    # Btrfs and overlays call a file's device by another number; there the note decides.
    table.write_text(f"1: FLOCK  ADVISORY  WRITE {os.getpid()} 00:00:{inode} 0 EOF\n")
    assert lock_holder(lock, table) == os.getpid()


# --- the key


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o666])
def test_a_key_that_others_may_read_signs_in_the_nodes_name(node: Node, mode: int) -> None:
    (node.state_dir / "signing.key").chmod(mode)
    check = found(node, "signing-key")
    assert (check.level, f"chmod 600 {node.state_dir}/signing.key" in check.remedy) == (Level.ERROR, True)


def test_a_link_and_an_empty_file_are_no_key(node: Node) -> None:
    key = node.state_dir / "signing.key"
    key.rename(node.root / "elsewhere")
    key.symlink_to(node.root / "elsewhere")
    assert "no regular file" in found(node, "signing-key").sentence
    key.unlink()
    write(node.state_dir, "signing.key").chmod(0o600)
    assert "is empty" in found(node, "signing-key").sentence


def test_a_key_that_went_away_under_the_service_is_missed(node: Node) -> None:
    (node.state_dir / "signing.key").unlink()
    check = found(node, "signing-key")
    assert (check.level, "is not there, and the service signs" in check.sentence) == (Level.WARNING, True)
    assert "signing-key" not in levels(serving(node, **NOBODY, key=""))
