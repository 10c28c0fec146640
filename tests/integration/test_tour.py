"""The tour in the README, replayed: a reader who types it sees what stands there, so that the page cannot drift.

The commands run in their order, each on a terminal of 100 columns, on a simulated node and a service of their own. What is
another one each time (ids, hashes, moments, durations, places) is taken out of both sides before they are compared. A command
that only looks is asked again until it says what the page says: the way back of a device takes its time.

``GOLDEN=write`` writes what the commands say into the page. Lines of a shortened answer have to be there still.
"""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.contract.terminal import Told, at_terminal
from tests.integration.acting import SOON

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "README.md"
COLUMNS = 100
PLACE = "/dev/shm/tour"
LEFT_OUT = "…"
WRITES = os.environ.get("GOLDEN") == "write"
LOOKS = re.compile(r"scrubber (devices|device|history|doctor)\b")
WARNINGS_ONLY = 5
"""How ``doctor`` ends on a node without a kubelet; every other command of the tour ends with 0."""

# The shipped policy, and a way back that is long enough to be looked at and short enough for a test.
POLICY = """\
name: default
recovery:
  backoff-initial: 300ms
  probation-interval: 2500ms
"""

# In this order: what is a part of another thing comes after it.
VARIES = (
    (r"SIM-GPU-[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", "SIM-GPU"),
    (r"SIM-GPU-[0-9a-f-]{4,}…", "SIM-GPU…"),
    (r"\b(cert|scrub)-[0-9a-f]{12}\b", r"\1"),
    (r"\bsha256:[0-9a-f]{64}\b", "KEY"),
    (r"\b\d+:[0-9a-f]{12,64}\b", "HEAD"),
    (r"\bboot [0-9a-f-]{36}\b", "boot"),
    (r"\b\d+(?= +\d{4}-\d\d-\d\dT)", "N"),
    (r"\b\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", "MOMENT"),
    (r"\bseconds=[0-9.]+", "seconds=N"),
    (r"\b\d+(\.\d+)? ?(s|m|h)(?= |\)|$)", "TIME"),
    (r"\buid([ :])\d+", r"uid\1N"),
    (r"\b\d+\.\d+\.\d+\b", "VERSION"),
    (r"\b(rows +|Row |to )\d+\b", r"\1N"),
    (r"\b\d+ rows\b", "N rows"),
)


@dataclass(frozen=True, slots=True)
class Step:
    """A command of the tour, and the lines that the page shows below it."""

    command: str
    answer: tuple[str, ...]

    @property
    def looks(self) -> bool:
        return LOOKS.match(self.command) is not None

    def is_told_by(self, lines: tuple[str, ...]) -> bool:
        """Whether the answer says what the page says, with anything in the place of a line ``…``."""
        parts = "\n".join(self.answer).split(LEFT_OUT + "\n") if LEFT_OUT in self.answer else ["\n".join(self.answer)]
        if self.answer and self.answer[-1] == LEFT_OUT:
            parts = [*"\n".join(self.answer[:-1]).split(LEFT_OUT + "\n"), ""]
        wanted = r"(?:.*\S)?\s*".join(re.escape(plain(part)).replace(r"\ ", r"\s+") for part in parts)
        return re.fullmatch(r"\s*" + wanted + r"\s*", plain("\n".join(lines)), re.DOTALL) is not None

    def anew(self, lines: tuple[str, ...]) -> tuple[str, ...]:
        """What the page is to show: the answer, or those of its lines that it showed."""
        if LEFT_OUT not in self.answer:
            return lines
        left = iter(lines)
        kept = []
        for line in self.answer:
            found = line if line == LEFT_OUT else next((each for each in left if plain(each) == plain(line)), None)
            assert found is not None, f"{self.command} does not say {line!r} any more: change the page by hand"
            kept.append(found)
        return tuple(kept)


def plain(text: str) -> str:
    """The text without what varies; blanks count as one, because what varies decides where lines are broken."""
    text = " ".join(text.split())
    for pattern, instead in VARIES:
        text = re.sub(pattern, instead, text)
    return text


def blocks(page: str) -> Iterator[re.Match[str]]:
    tour = re.search(r"^## A tour$.*?^## ", page, re.MULTILINE | re.DOTALL)
    assert tour is not None
    return re.finditer(r"(?<=^```console\n).*?(?=^```$)", page[: tour.end()], re.MULTILINE | re.DOTALL)


def steps(block: str) -> list[Step]:
    parts = re.split(r"^\$ ", block, flags=re.MULTILINE)
    assert not parts[0], "a block begins with a command"
    return [Step(lines[0], tuple(lines[1:])) for lines in (part.splitlines() for part in parts[1:])]


class Shell:
    """A shell whose directory and variables are those of the reader: each command takes over what the last one left."""

    def __init__(self, place: Path) -> None:
        self.place = place
        self._policy = place / "policy.yaml"
        self._left = place / "left"

    async def run(self, command: str) -> Told:
        # Of a command that was asked for something to be put into its place, the exit code counts, too.
        script = f"{self._begin(command)}; code=$?; {{ export -p; echo cd $PWD; }} > {self._left}; exit $code"
        return await at_terminal(script, columns=COLUMNS, program=("/bin/bash", "-o", "pipefail", "-c"))

    @asynccontextmanager
    async def behind(self, command: str) -> AsyncIterator[asyncio.subprocess.Process]:
        """The command in the background, until the tour is over."""
        process = await asyncio.create_subprocess_exec(
            *("/bin/bash", "-c", self._begin("exec " + command.removesuffix("&"))), start_new_session=True
        )
        try:
            yield process
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()

    def told(self, told: Told) -> tuple[str, ...]:
        return tuple(told.text.replace(str(self.place / "tour"), PLACE).rstrip("\n").splitlines())

    def _begin(self, command: str) -> str:
        first = (
            f"cd {ROOT}; export PATH={Path(sys.executable).parent}:$PATH NO_COLOR=1 SCRUBBER_POLICY={self._policy}"
            " SCRUBBER_METRICS_ADDRESS=off"
        )
        return f"{first}; [ ! -e {self._left} ] || . {self._left}; {command.replace(PLACE, str(self.place / 'tour'))}"


@pytest.fixture
def shell(short_tmp: Path) -> Iterator[Shell]:
    (short_tmp / "policy.yaml").write_text(POLICY)
    yield Shell(short_tmp)
    shutil.rmtree(short_tmp / "tour")


async def answered(shell: Shell, step: Step) -> tuple[str, ...]:
    """What the command says; of one that looks, what it says at last."""
    deadline = time.monotonic() + SOON
    while True:
        told = await shell.run(step.command)
        lines = shell.told(told)
        if step.is_told_by(lines) or not step.looks or time.monotonic() > deadline:
            wanted = (0, WARNINGS_ONLY) if "doctor" in step.command else (0,)
            assert told.code in wanted, f"{step.command} ended with {told.code}:\n{told.text}"
            return lines
        await asyncio.sleep(0.05)


async def test_the_tour_in_the_readme_says_what_the_commands_say(shell: Shell) -> None:
    page = PAGE.read_text()
    parts = [steps(block[0]) for block in blocks(page)]
    anew: list[list[Step]] = []
    service = next(step for part in parts for step in part if step.command.endswith("&"))
    for part in parts:
        anew.append([])
        for step in part:
            if step is service:
                break
            lines = await answered(shell, step)
            assert WRITES or step.is_told_by(lines), f"$ {step.command}\n" + "\n".join(lines)
            anew[-1].append(Step(step.command, step.anew(lines)))
