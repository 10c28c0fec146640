"""The demo as a new user runs it: one command, a fresh process, every scene, exit code 0."""

from __future__ import annotations

import subprocess
import sys

import pytest

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
FLAGS = {"plugin": (), "dra": ("--dra",), "command": ("--backend", "command")}


@pytest.mark.parametrize(
    ("kind", "scenes"), [("plugin", SCENES), ("dra", CLAIM_SCENES), ("command", COMMAND_SCENES)], ids=[*FLAGS]
)
def test_demo_plays_every_scene_and_exits_with_0(kind: str, scenes: tuple[str, ...]) -> None:
    command = [sys.executable, "-m", "scrubber.cli.main", "demo", *FLAGS[kind]]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=400)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    positions = [lines.index(scene) for scene in scenes]
    assert positions == sorted(positions)
    assert ("Summary" in done.stdout) is (kind != "command")
    assert lines[-1].startswith("All expectations were met")
    assert done.stderr == ""
