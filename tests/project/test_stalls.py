"""The tool that stops tests at random stops the selected processes, continues them all, and exits as the command."""

import subprocess
import sys

import pytest

STOPPED = "import signal, sys, time; signal.signal(signal.SIGCONT, lambda *_: sys.exit(7)); print('.'); time.sleep(60)"
"""Exits with 7 as soon as it continues after having been stopped."""
PARENT = f"import subprocess, sys; sys.exit(10 + subprocess.call([sys.executable, '-c', {STOPPED!r}]))"


@pytest.mark.parametrize(
    ("who", "program", "status"),
    [("first", STOPPED, 7), ("one", PARENT, 17), ("all", PARENT, 17)],
)
def test_stall_tool_stops_and_resumes_the_selected_processes(who: str, program: str, status: int) -> None:
    often = ["--seconds", "0.05", "--every", "0.05", "--after", "0"]
    command = [sys.executable, "-m", "tests.stalls", "--who", who, *often, "--", sys.executable, "-c", program]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert ended.returncode == status, ended.stderr
    assert ended.stdout.endswith(" stalls\n")


def test_stall_tool_does_not_wait_after_its_command_has_ended() -> None:
    command = [
        sys.executable,
        "-m",
        "tests.stalls",
        "--after",
        "3600",
        "--",
        sys.executable,
        "-c",
        "raise SystemExit(3)",
    ]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert (ended.returncode, ended.stdout) == (3, "0 stalls\n")
