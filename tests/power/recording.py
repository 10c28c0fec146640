"""Records the lives of a scenario, and checks what each power cut may leave of it."""

from __future__ import annotations

import functools
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random

from tests.power.disk import Cut, Disk, Operation, read_operations, read_tree, write_tree
from tests.power.scenarios import SCENARIOS

__all__ = ["Record", "Recorder", "Result", "examine"]

_ROOT = Path(__file__).parents[2]
_COMPILE = (
    "gcc",
    "-std=gnu11",
    "-shared",
    "-fPIC",
    "-O1",
    "-U_FORTIFY_SOURCE",
    "-fvisibility=hidden",
    "-Wall",
    "-Wextra",
    "-Werror",
)


@functools.cache
def _library() -> bytes:
    """Return the compiled recorder.

    Raises:
        RuntimeError: there is no gcc, or the source does not compile.
    """
    if shutil.which("gcc") is None:
        raise RuntimeError("The recorder of file operations is compiled by the tests: install gcc.")
    with tempfile.TemporaryDirectory(prefix="gs-power-") as directory:
        built = Path(directory) / "recorder.so"
        source = str(Path(__file__).with_name("recorder.c"))
        done = subprocess.run(
            [*_COMPILE, "-o", str(built), source, "-ldl", "-lpthread"], capture_output=True, text=True, check=False
        )
        if done.returncode != 0:
            raise RuntimeError(f"The recorder does not compile:\n{done.stderr}")
        return built.read_bytes()


@dataclass(frozen=True, slots=True)
class Record:
    """What the lives of a scenario did to its disk, which held ``disk`` before."""

    disk: Disk
    operations: Sequence[Operation]


class Recorder:
    """A process in which lives are recorded, with a directory in memory where there is one: nothing is to be synced."""

    def __init__(self, directory: Path, process: subprocess.Popen[str]) -> None:
        self._directory = directory
        self._process = process
        self._number = 0

    @classmethod
    @contextmanager
    def start(cls) -> Iterator[Recorder]:
        memory = Path("/dev/shm")
        with tempfile.TemporaryDirectory(prefix="gs-power-", dir=memory if memory.is_dir() else None) as name:
            library = Path(name) / "recorder.so"
            library.write_bytes(_library())
            with subprocess.Popen(
                [sys.executable, "-m", "tests.power.host"],
                cwd=_ROOT,
                env={**os.environ, "LD_PRELOAD": str(library)},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            ) as process:
                yield cls(Path(name), process)
                assert process.stdin is not None
                process.stdin.close()

    def new_directory(self) -> Path:
        self._number += 1
        path = self._directory / str(self._number)
        path.mkdir(mode=0o700)
        return path

    def record(
        self, scenario: str, *, defect: str = "none", kills: Sequence[int] = (), after: Cut | None = None
    ) -> Record:
        """Record one life for each of ``kills``, killed instead of its operation of that number, and a whole one.

        Args:
            after: what they find; None: what the scenario prepares.
        """
        place = self.new_directory()
        root, log = place / "disk", place / "log"
        if after is None:
            root.mkdir(mode=0o700)
            SCENARIOS[scenario].prepare(root)
        else:
            write_tree(after.tree, root)
        disk, again = Disk.holding(root), Disk.holding(root)
        for kill_at in (*kills, 0):
            status = self._live(scenario, defect, kill_at, root, log)
            if status != (-9 if kill_at else 0) and not (kill_at and status == 0):
                raise RuntimeError(f"The life {kill_at} of {scenario} with {defect} ended with {status}.")
        operations = read_operations(log.read_bytes())
        for _ in again.cuts(operations, Random(0), 0):
            pass
        if again.present() != read_tree(root):
            raise RuntimeError(f"The recorder missed an operation of {scenario}.")
        shutil.rmtree(root)
        return Record(disk, operations)

    def _live(self, scenario: str, defect: str, kill_at: int, root: Path, log: Path) -> int:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        request = {"scenario": scenario, "defect": defect, "kill_at": kill_at, "root": str(root), "log": str(log)}
        print(json.dumps(request), file=self._process.stdin, flush=True)
        return int(self._process.stdout.readline())


@dataclass
class Result:
    """How many states were opened, and what was wrong with the first that broke a promise; empty: none did."""

    operations: int = 0
    states: int = 0
    broken: str = ""


def examine(
    recorder: Recorder,
    scenario: str,
    *,
    defect: str = "none",
    kills: Sequence[int] = (),
    after: Cut | None = None,
    each: int,
    share: float = 1.0,
    seed: int = 0,
) -> Result:
    """Open what each power cut may leave of ``scenario``, until one breaks a promise. Arguments: see what they go to."""
    record = recorder.record(scenario, defect=defect, kills=kills, after=after)
    before = () if after is None else after.marks
    result = Result(len(record.operations))
    place = recorder.new_directory()
    for cut in record.disk.cuts(record.operations, Random(seed), each, share):
        result.states += 1
        problem = _problem(scenario, cut, before, place / "disk")
        if problem:
            result.broken = f"{scenario}, kills {list(kills)}, {defect}, seed {seed}: {problem}"
            break
    return result


def _problem(scenario: str, cut: Cut, before: Sequence[str], directory: Path) -> str:
    write_tree(cut.tree, directory)
    try:
        SCENARIOS[scenario].check(directory, (*before, *cut.marks))
    except Exception as error:  # noqa: BLE001 - whatever the next start raises is a broken promise
        return (
            f"after {cut.moment} operations ({cut.marks[-1:]}), {cut.lost} lost: {type(error).__name__}: {error}; "
            f"left: { {name: content and len(content) for name, content in cut.tree.items()} }"
        )
    finally:
        shutil.rmtree(directory)
    return ""
