"""What was answered survives a power cut, and what a power cut leaves is intact: a part of ``python -m tests.power``."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest

from scrubber.durability import sync_path
from tests.power.disk import Disk, Operation
from tests.power.recording import Recorder, examine
from tests.power.scenarios import SCENARIOS

SMALL = ("claim-specifications", "gpu-specification", "fence")
"""Scenarios that are looked at completely: they have few operations."""


@pytest.fixture(scope="module")
def recorder() -> Iterator[Recorder]:
    with Recorder.start() as started:
        yield started


@pytest.mark.parametrize(
    ("scenario", "share"), [("service", 0.05), ("conversion", 0.3), *((name, 1.0) for name in SMALL)]
)
def test_what_was_answered_survives_a_power_cut(recorder: Recorder, scenario: str, share: float) -> None:
    result = examine(recorder, scenario, each=6, share=share)
    assert not result.broken
    assert result.states > 10


@pytest.mark.parametrize("scenario", SMALL)
def test_power_cut_after_a_kill_loses_nothing_that_was_answered(recorder: Recorder, scenario: str) -> None:
    """The next process finds names that the killed one did not make durable, and answers because they are there."""
    operations = examine(recorder, scenario, each=0).operations
    for kill in range(1, operations):
        assert not examine(recorder, scenario, kills=[kill], each=6).broken


def test_power_cut_after_a_kill_of_the_service_loses_nothing_that_was_answered(recorder: Recorder) -> None:
    for kill in (3, 34, 38, 45, 150):  # of some 270 operations: the new database, marker, key, commits, a checkpoint
        assert not examine(recorder, "service", kills=[kill], each=2, share=0.02).broken


@pytest.mark.parametrize(
    ("scenario", "defect"),
    [
        ("service", "synchronous=OFF"),
        ("service", "synchronous=NORMAL"),
        ("service", "no fsync of directories"),
        ("service", "no fsync of files"),
        ("conversion", "no fsync of directories"),
        *((name, defect) for name in SMALL for defect in ("no fsync of directories", "no fsync of files")),
    ],
)
def test_power_cut_reveals_a_missing_sync(recorder: Recorder, scenario: str, defect: str) -> None:
    assert examine(recorder, scenario, defect=defect, each=6).broken


def test_names_on_the_way_to_a_directory_are_synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[Path] = []
    monkeypatch.setattr("scrubber.durability.sync_directory", synced.append)
    place = tmp_path / "a/b"
    place.mkdir(parents=True)
    (tmp_path / "link").symlink_to(place)
    sync_path(tmp_path / "link")
    real = tmp_path.resolve()
    assert synced[:3] == [real / "a/b", real / "a", real]


class TestDisk:
    """The model of the disk itself, on three operations that everybody knows."""

    def trees(self, *operations: Operation) -> set[tuple[tuple[str, bytes | None], ...]]:
        """Return all that a power cut after ``operations`` may leave."""
        mark = Operation("A", "", "", 0, 0, b"now")
        cuts = Disk("/d").cuts((*operations, mark), Random(1), 200)
        return {tuple(cut.tree.items()) for cut in cuts if cut.marks}

    def test_unsynced_file_may_be_absent_empty_torn_or_complete(self) -> None:
        data = b"a" * 512 + b"b" * 512
        found = self.trees(Operation("C", "/d/x", "", 1, 0, b""), Operation("W", "", "", 1, 0, data))
        assert found == {
            (),
            (("x", b""),),
            (("x", b"a" * 512),),
            (("x", bytes(512) + b"b" * 512),),
            (("x", data),),
        }

    def test_synced_file_in_an_unsynced_directory_may_be_absent_but_not_torn(self) -> None:
        found = self.trees(
            Operation("C", "/d/x", "", 1, 0, b""),
            Operation("W", "", "", 1, 0, b"text"),
            Operation("S", "", "", 1, 0, b""),
        )
        assert found == {(), (("x", b"text"),)}

    def test_renamed_file_has_the_old_name_or_the_new_one(self) -> None:
        found = self.trees(
            Operation("C", "/d/x", "", 1, 0, b""),
            Operation("D", "/d", "", 0, 0, b""),
            Operation("R", "/d/x", "/d/y", 0, 0, b""),
        )
        assert found == {(("x", b""),), (("y", b""),)}

    def test_file_in_a_lost_directory_is_lost(self) -> None:
        found = self.trees(
            Operation("M", "/d/m", "", 0, 0, b""),
            Operation("C", "/d/m/x", "", 1, 0, b""),
            Operation("D", "/d/m", "", 0, 0, b""),
        )
        assert found == {(), (("m", None), ("m/x", b""))}


def test_every_scenario_is_examined() -> None:
    assert set(SCENARIOS) == {"service", "conversion", *SMALL}
