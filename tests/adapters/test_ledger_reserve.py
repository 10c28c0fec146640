"""A full disk and the ledger's reserve on it: important changes are still recorded, and nothing is granted meanwhile.

Uses real file systems of one MiB in memory, filled to the last byte. Only root can mount one; on other machines the
missing tests are reported.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from io import RawIOBase
from itertools import count
from pathlib import Path

import pytest

from scrubber.adapters.ledger.offline import verify_ledger
from scrubber.adapters.ledger.reserve import RESERVE_BYTES, SLICE_BYTES, DiskReserve
from scrubber.adapters.ledger.sqlite import SqliteLedger
from scrubber.domain.errors import LedgerFailure
from scrubber.ports.record import HistoryQuery, LedgerChange
from tests.ledger_samples import GPU, certificate, event, grant, record, scrub
from tests.ledger_versions import make_newer
from tests.pods import only_with

SIZE = 16 * SLICE_BYTES
NO_SPACE = "No space left for the ledger in .*; free some. Hand-overs are refused until then"


def _mount(directory: Path) -> bool:
    command = ["mount", "-t", "tmpfs", "-o", "size=1m,mode=0700", "tmpfs", str(directory)]
    return os.geteuid() == 0 and subprocess.run(command, capture_output=True, check=False).returncode == 0


def _can_mount() -> bool:
    probe = Path(tempfile.mkdtemp(prefix="gs-reserve-", dir="/tmp"))
    try:
        mounted = _mount(probe)
        if mounted:
            subprocess.run(["umount", "--lazy", str(probe)], check=True)
    finally:
        probe.rmdir()
    return mounted


CAN_MOUNT = _can_mount()
if not CAN_MOUNT:
    print(
        "NOT TESTED HERE: the ledger's reserve on a full disk (mounting a tmpfs is not permitted)", file=sys.__stderr__
    )


@dataclass(frozen=True, slots=True)
class Disk:
    """A file system of one MiB, with a ledger in ``home`` and a tenant that fills it."""

    directory: Path

    @property
    def home(self) -> Path:
        return self.directory / "state"

    @property
    def reserve(self) -> Path:
        return self.home / "ledger.reserve"

    def held(self) -> int:
        """Bytes of the disk that the reserve occupies."""
        return self.reserve.stat().st_blocks * 512

    def fill(self) -> int:
        """Fill the disk completely; return how many bytes that took."""
        with (self.directory / "ballast").open("ab", buffering=0) as file:
            before = file.tell()
            with pytest.raises(OSError, match="No space left on device"):
                _write_without_end(file)
            return file.tell() - before

    def free(self) -> None:
        (self.directory / "ballast").unlink()

    def ledger(self, reserve_bytes: int = SIZE) -> SqliteLedger:
        return SqliteLedger(self.home, reserve_bytes=reserve_bytes)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    directory = tmp_path / "disk"
    directory.mkdir()
    assert _mount(directory)
    yield Disk(directory)
    subprocess.run(["umount", "--lazy", str(directory)], check=True)


def granting(version: int) -> LedgerChange:
    given = grant(version)
    return LedgerChange(
        (record(version, last_grant=given),), ((GPU, given),), (certificate(f"C-{version}"),), (), (event(),)
    )


def what_matters(version: int) -> LedgerChange:
    """A change as large as a quarantine with the end of a scrub and a finding."""
    return LedgerChange(
        (record(version),), (), (), (scrub(f"S-{version}"),), (event("device.quarantined", note="x" * 500),)
    )


def _write_without_end(file: RawIOBase) -> None:
    while True:
        file.write(b"\0" * 4096)


async def store_all(ledger: SqliteLedger, changes: Iterator[LedgerChange]) -> None:
    for each in changes:
        await ledger.commit(each)


async def until_no_grant_is_stored(ledger: SqliteLedger, version: int) -> int:
    """Commit grants until there is no room for one (the log may have some left); return the record's next version."""
    with pytest.raises(LedgerFailure, match=NO_SPACE):
        await store_all(ledger, (granting(each) for each in count(version)))
    return await stored(ledger) + 1


async def stored(ledger: SqliteLedger) -> int:
    """Return the version of the record; there is one audit row for each."""
    rows = await ledger.history(HistoryQuery(limit=1))
    return rows[0].sequence if rows else 0


@only_with(CAN_MOUNT)
async def test_full_disk_leaves_room_to_record_critical_changes(disk: Disk) -> None:
    ledger = disk.ledger()
    await ledger.load()
    await ledger.commit(granting(1))
    assert disk.held() >= SIZE
    disk.fill()
    version = await until_no_grant_is_stored(ledger, 2)
    for each in range(version, version + 20):
        await ledger.commit(what_matters(each))
        with pytest.raises(LedgerFailure, match=NO_SPACE):
            await ledger.commit(granting(each + 1))
    assert "No space left" in ledger.health()
    disk.free()
    await ledger.commit(granting(version + 20))
    assert ledger.health() == "ok"
    assert disk.held() >= SIZE
    await ledger.close()
    assert verify_ledger(disk.home).intact
    ledger = disk.ledger()
    assert (await ledger.load()).records[GPU].version == version + 20
    await ledger.close()


@only_with(CAN_MOUNT)
async def test_process_filling_the_disk_gets_no_more_than_the_released_slice_of_the_reserve(disk: Disk) -> None:
    ledger = disk.ledger()
    await ledger.load()
    disk.fill()
    version = await until_no_grant_is_stored(ledger, 1)
    for each in range(version, version + 30):
        held = disk.held()
        await ledger.commit(what_matters(each))
        assert disk.fill() < max(held - disk.held(), 1)
    assert disk.held() > 0
    await ledger.close()


@only_with(CAN_MOUNT)
async def test_exhausted_reserve_refuses_every_change_and_stores_none_in_part(disk: Disk) -> None:
    ledger = disk.ledger()
    await ledger.load()
    disk.fill()
    large = (LedgerChange(records=(record(each),), events=(event(note="x" * 3000),)) for each in count(1))
    with pytest.raises(LedgerFailure, match=NO_SPACE):
        await store_all(ledger, large)
    assert disk.held() == 0
    last = await stored(ledger)
    assert last > 30
    disk.free()
    await ledger.commit(granting(last + 1))
    assert ledger.health() == "ok"
    await ledger.close()
    assert verify_ledger(disk.home).intact


@only_with(CAN_MOUNT)
async def test_service_that_starts_on_a_full_disk_still_records_critical_changes(disk: Disk) -> None:
    ledger = disk.ledger()
    await ledger.load()
    await ledger.commit(what_matters(1))
    await ledger.close()
    disk.fill()
    ledger = disk.ledger()
    assert (await ledger.load()).records[GPU].version == 1
    await ledger.commit(what_matters(2))
    with pytest.raises(LedgerFailure, match=NO_SPACE):
        await ledger.commit(granting(3))
    assert "No space left" in ledger.health()
    await ledger.close()
    disk.fill()
    ledger = disk.ledger()
    assert (await ledger.load()).records[GPU].version == 2
    assert "No space left" in ledger.health()
    await ledger.close()


@only_with(CAN_MOUNT)
async def test_no_grant_is_stored_while_there_is_no_room_for_the_reserve(disk: Disk) -> None:
    ledger = disk.ledger(reserve_bytes=RESERVE_BYTES)
    await ledger.load()
    assert "No space left" in ledger.health()
    with pytest.raises(LedgerFailure, match=NO_SPACE):
        await ledger.commit(granting(1))
    await ledger.commit(what_matters(1))
    assert (await ledger.history(HistoryQuery(limit=1)))[0].event.name == "device.quarantined"
    # The reserve is held whole or not at all: a part of it would only be missing for other changes.
    assert disk.held() == 0
    await ledger.close()


@only_with(CAN_MOUNT)
def test_reserve_keeps_its_blocks_across_restarts_and_releases_them_in_slices(disk: Disk) -> None:
    disk.home.mkdir()
    reserve = DiskReserve(disk.reserve, SIZE)
    assert reserve.allocate()
    reserve.close()
    disk.fill()
    reserve = DiskReserve(disk.reserve, SIZE)
    assert reserve.allocate()
    for left in reversed(range(SIZE // SLICE_BYTES)):
        assert reserve.release_slice()
        assert disk.held() == left * SLICE_BYTES
    assert not reserve.release_slice()
    assert reserve.allocate()
    reserve.close()


def test_reserve_of_size_zero_creates_no_file(tmp_path: Path) -> None:
    reserve = DiskReserve(tmp_path / "ledger.reserve", 0)
    assert reserve.allocate()
    assert not reserve.release_slice()
    reserve.close()
    assert not (tmp_path / "ledger.reserve").exists()


async def test_reserve_does_not_follow_a_symlink(tmp_path: Path) -> None:
    home = tmp_path / "state"
    home.mkdir(mode=0o700)
    (tmp_path / "precious").write_text("precious")
    (home / "ledger.reserve").symlink_to(tmp_path / "precious")
    ledger = SqliteLedger(home)
    with pytest.raises(LedgerFailure):
        await ledger.load()
    await ledger.close()
    assert (tmp_path / "precious").read_text() == "precious"


@only_with(CAN_MOUNT)
async def test_ledger_of_another_version_is_unchanged_on_a_full_disk_and_converted_once_there_is_room(
    disk: Disk,
) -> None:
    ledger = disk.ledger()
    await ledger.load()
    await ledger.commit(granting(1))
    await ledger.close()
    make_newer(disk.home)
    before = (disk.home / "ledger.db").read_bytes()
    disk.fill()
    ledger = disk.ledger()
    with pytest.raises(
        LedgerFailure, match=r"No space left to convert the ledger .* needs about 1 MiB. Nothing was changed"
    ):
        await ledger.load()
    await ledger.close()
    assert (disk.home / "ledger.db").read_bytes() == before
    assert list(disk.home.glob("ledger.db.new*")) == []
    disk.free()
    ledger = disk.ledger()
    state = await ledger.load()
    await ledger.close()
    assert state.records[GPU].grant_sequence == 1
