"""The demo: every scene is played, every expectation is met, and the exit code is 0."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from functools import partial

import pytest

from scrubber.emulator import playground, scenario
from scrubber.emulator.playground import Playground
from tests import forkserver

SCENES = (
    "1. Without the scrub service: an ordinary device plugin",
    "2. The same pods, with the service",
    "3. A child process outlives its pod and holds the device",
    "4. Force deletion: the pod is gone, its process still runs",
    "5. The same container restarts",
    "6. XID 95 on one device",
    "7. kill -9 of the service during a scrub",
)
CLAIM_SCENES = (
    "1. Without the scrub service: an ordinary DRA driver",
    *SCENES[1:4],
    "5. The same container restarts: within its claim",
    SCENES[5],
    "7. kill -9 of the service during a scrub, which Unprepare waits for",
)


COMMAND_SCENES = (
    "1. Without the scrub service: an ordinary device plugin",
    "2. The same pods, with the service",
    "3. A child process outlives its pod and holds the device",
    "4. A mistake in the program",
)


@pytest.fixture(autouse=True)
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """The services execute their children: the scenario finds the eraser by its command line."""
    monkeypatch.setattr(playground, "start_module", forkserver.start)


def scenes_are_played(scenes: Sequence[str], output: str) -> None:
    lines = output.splitlines()
    positions = [lines.index(scene) for scene in scenes]
    assert positions == sorted(positions)
    assert lines[-1].startswith("All expectations were met")


def test_demo_as_a_new_user_runs_it_plays_every_scene_and_exits_with_0() -> None:
    command = [sys.executable, "-m", "scrubber.cli.main", "demo"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=400)
    assert done.returncode == 0, done.stdout + done.stderr
    scenes_are_played(SCENES, done.stdout)
    assert "Summary" in done.stdout
    assert done.stderr == ""


@pytest.mark.parametrize("kind", ["dra", "command"])
def test_demo_of_another_kind_plays_every_scene_and_returns_0(
    kind: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # Smaller than what users see: most of the demo's time is the clearing of memory.
    monkeypatch.setattr(scenario, "Playground", partial(Playground, memory="16MiB"))
    status = scenario.main(dra=kind == "dra", command=kind == "command")
    output = capsys.readouterr().out
    assert status == 0, output
    scenes_are_played(CLAIM_SCENES if kind == "dra" else COMMAND_SCENES, output)
    assert ("Summary" in output) is (kind == "dra")
