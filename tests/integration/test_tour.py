"""Replay ``docs/tour.md`` and compare the output of each command with the page.

The commands run in order, each on a terminal of 100 columns, on their own simulated node and service. Values that change with
every run (ids, hashes, times, durations, paths) are removed from both sides before the comparison. A command that only reads
is repeated until it prints what the page shows, because the recovery of a device takes time.

``GOLDEN=write`` writes the output of the commands into the page. Every line of a shortened output must still occur in it.
"""

from __future__ import annotations

import asyncio
import os
import re
import secrets
import shutil
import sys
import time
from asyncio.subprocess import Process
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.cli.terminal import at_terminal
from tests.integration.acting import SOON

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "tour.md"
COLUMNS = 100
PLACE = "/dev/shm/tour"
LEFT_OUT = "…"
RECORDED = 12.0
"""Seconds after which the output of a read-only command is recorded: nothing indicates that it is final."""
WRITES = os.environ.get("GOLDEN") == "write"
LOOKS = re.compile(r"scrubber (devices|device|history|doctor)\b")
WARNINGS_ONLY = 5
"""Exit status of ``doctor`` on a node without a kubelet; every other command of the tour exits with 0."""

# The shipped policy, with a recovery that is long enough to be observed and short enough for a test. No device becomes
# unhealthy because the machine is busy.
POLICY = """\
name: default
limits:
  driverCall: 10s
recovery:
  initialBackoff: 300ms
  probationInterval: 2s
"""

# The order matters: a pattern that is part of another comes after it.
VARIES = (
    (r"\b\d+ of (\d+ clean scrubs); [^.]*\.", r"N of \1; LATER."),
    (r"SIM-GPU-[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", "SIM-GPU"),
    (r"SIM-GPU-[0-9a-f-]{4,}…", "SIM-GPU…"),
    (r"\b(cert|scrub)-[0-9a-f]{12}\b", r"\1"),
    (r"\bsha256:[0-9a-f]{64}\b", "KEY"),
    (r"\b\d+:[0-9a-f]{12,64}\b", "HEAD"),
    (r"\bboot [0-9a-f-]{36}\b", "boot"),
    (r"\b\d+(?= +\d{4}-\d\d-\d\dT)", "N"),
    (r"\b\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", "MOMENT"),
    (r"\bduration_seconds=[0-9.]+", "duration_seconds=N"),
    (r"\b\d+(\.\d+)? ?(s|m|h)(?= |\)|$)", "TIME"),
    (r"\buid([ :])\d+", r"uid\1N"),
    (r"\b\d+\.\d+\.\d+\b", "VERSION"),
    (r"\b(rows +|Row |to )\d+\b", r"\1N"),
    (r"\b\d+ rows\b", "N rows"),
    (r"--before \d+", "--before N"),
)


@dataclass(frozen=True, slots=True)
class Step:
    """A command of the tour, and the lines that the page shows below it."""

    command: str
    answer: tuple[str, ...]

    @property
    def looks(self) -> bool:
        return LOOKS.match(self.command) is not None

    @property
    def warns(self) -> bool:
        return self.command == "scrubber doctor"

    def matches(self, lines: tuple[str, ...]) -> bool:
        """Return whether ``lines`` match the page, with any lines in place of a line ``…``."""
        shown = plain("\n".join("\0" if line == LEFT_OUT else line for line in self.answer))
        pattern = ".*".join(re.escape(part.strip()) for part in shown.split("\0"))
        return re.fullmatch(pattern, plain("\n".join(lines))) is not None

    def expected_output(self, lines: tuple[str, ...]) -> tuple[str, ...]:
        """Return what the page should show: the output, or those of its lines that the page showed before."""
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
    """Return the text without varying values and with single blanks, because the values decide where lines break."""
    text = " ".join(text.split())
    for pattern, instead in VARIES:
        text = re.sub(pattern, instead, text)
    return text


def blocks(page: str) -> Iterator[re.Match[str]]:
    return re.finditer(r"(?<=^```console\n).*?(?=^```$)", page, re.MULTILINE | re.DOTALL)


def steps(block: str) -> list[Step]:
    parts = re.split(r"^\$ ", block, flags=re.MULTILINE)
    assert not parts[0], "a block begins with a command"
    return [Step(lines[0], tuple(lines[1:])) for lines in (part.splitlines() for part in parts[1:])]


class Shell:
    """A shell with the reader's directory and variables: each command starts in the state that the last one left."""

    def __init__(self, tour: str, place: Path) -> None:
        self._tour = tour
        self._left = place / "left"
        self._variables = {
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "NO_COLOR": "1",
            "SCRUBBER_KUBELET_DIR": str(place / "kubelet"),
            "SCRUBBER_METRICS_ADDRESS": "off",
            "SCRUBBER_POD_LOGS_DIR": str(place / "pods"),
            "SCRUBBER_POLICY": str(place / "policy.yaml"),
        }

    async def run(self, command: str) -> tuple[int, tuple[str, ...]]:
        """Run the command; return its exit status and the lines that it left on the terminal."""
        script = f"{self._begin(command)}; code=$?; (export -p; echo cd $PWD) > {self._left}; exit $code"
        result = await at_terminal(
            script, columns=COLUMNS, environment=self._variables, program=("/bin/bash", "-o", "pipefail", "-c")
        )
        return result.code, tuple(result.text.replace(self._tour, PLACE).rstrip("\n").splitlines())

    async def start(self, command: str) -> Process:
        """Start a command that ends with ``&``."""
        script = self._begin("exec " + command.removesuffix("&"))
        return await asyncio.create_subprocess_exec("/bin/bash", "-c", script, env=os.environ | self._variables)

    def _begin(self, command: str) -> str:
        place = f". {self._left}" if self._left.exists() else f"cd {ROOT}"
        return f"{place}; {command.replace(PLACE, self._tour)}"


@pytest.fixture
def shell(short_tmp: Path) -> Iterator[Shell]:
    (short_tmp / "policy.yaml").write_text(POLICY)
    # As long as the page's directory: the width of a table depends on it.
    tour = Path(PLACE[:-4] + secrets.token_hex(2))
    yield Shell(str(tour), short_tmp)
    if tour.exists():
        shutil.rmtree(tour)


async def command_output(shell: Shell, step: Step) -> tuple[str, ...]:
    """Return the command's output; of a read-only command, its final output."""
    deadline = time.monotonic() + (RECORDED if WRITES else SOON)
    while True:
        code, lines = await shell.run(step.command)
        if step.matches(lines) or not step.looks or time.monotonic() > deadline:
            assert code == 0 or (step.warns and code == WARNINGS_ONLY), f"$ {step.command}\n" + "\n".join(
                (*lines, str(code))
            )
            return lines


async def test_commands_of_the_tour_print_what_the_page_shows(shell: Shell) -> None:
    page = PAGE.read_text()
    begun: list[Process] = []
    try:
        for block in blocks(page):
            recorded = ""
            for step in steps(block[0]):
                lines: tuple[str, ...] = ()
                if step.command.endswith("&"):
                    begun.append(await shell.start(step.command))
                else:
                    lines = await command_output(shell, step)
                assert WRITES or step.matches(lines), "\n".join(("$ " + step.command, *lines))
                recorded += "\n".join(("$ " + step.command, *step.expected_output(lines), ""))
            page = page.replace(block[0], recorded)
        (service,) = begun
        service.terminate()
        assert await asyncio.wait_for(service.wait(), SOON) == 0
    finally:
        for process in begun:
            if process.returncode is None:
                process.kill()
                await process.wait()
    if WRITES:
        PAGE.write_text(page)


def test_output_in_the_tour_fits_a_terminal_of_100_columns() -> None:
    lines = [line for block in blocks(PAGE.read_text()) for line in block[0].splitlines()]
    assert len(lines) > 50
    assert [line for line in lines if len(line) > COLUMNS] == []
