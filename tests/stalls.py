"""Run tests while their processes are stopped at random, to find those that fail by chance on a busy machine.

``python -m tests.stalls [options] -- COMMAND...`` runs the command. While it lives, a part of its process tree is
stopped with SIGSTOP for ``--seconds``, on average once in ``--every`` seconds, and then continued. This uses almost no
CPU time, so that a long run disturbs no other work. It exits as the command did:

    python -m tests.stalls --seed 1 -- .venv/bin/python -m pytest --timeout 900 tests/adapters/test_children.py

``--who`` selects what is stopped: ``first``, the command itself (pytest, and with it every event loop of a test);
``one`` of the processes that it started, for example a daemon; ``all``, the whole tree, as when a virtual machine is
not scheduled. A test that fails under stalls of a second requires an event within a second, or mistakes a stall for a
fault.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import subprocess
import sys
import time
from collections import defaultdict
from contextlib import suppress


def tree(root: int) -> list[int]:
    """Return ``root`` and every process below it, each before its children."""
    children = defaultdict[int, list[int]](list)
    for name in os.listdir("/proc"):
        if name.isdigit() and (found := stat(int(name))) is not None:
            children[found[1]].append(int(name))
    found_below = [root]
    for each in found_below:
        found_below += children[each]
    return found_below


def stat(pid: int) -> tuple[str, int] | None:
    """Return state and parent of a process; None when it no longer exists."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            state, parent, *_ = file.read().rpartition(")")[2].split()
    except OSError:
        return None
    return state, int(parent)


def running(pid: int) -> bool:
    """Return whether a process runs and is not already stopped: a process that a test has stopped is left to it."""
    found = stat(pid)
    return found is not None and found[0] not in "TtZX"


def chosen(who: str, root: int, draw: random.Random) -> list[int]:
    """Return the processes to stop now."""
    if who == "first":
        return [root]
    everything = tree(root)
    if who == "all":
        return everything
    below = everything[1:]
    return [draw.choice(below)] if below else []


def stall(pids: list[int], seconds: float) -> None:
    """Stop ``pids`` for ``seconds``."""
    stopped = [pid for pid in pids if running(pid)]
    try:
        for pid in stopped:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGSTOP)
        time.sleep(seconds)
    finally:
        for pid in reversed(stopped):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.stalls", description="Run a command that is stopped at random."
    )
    parser.add_argument("--who", choices=("first", "one", "all"), default="first", help="what is stopped")
    parser.add_argument("--seconds", type=float, default=1.2, help="how long each stall lasts")
    parser.add_argument("--every", type=float, default=0.7, help="seconds between two stalls, on average")
    parser.add_argument("--after", type=float, default=3.0, help="seconds before the first one")
    parser.add_argument("--seed", type=int, default=0, help="of what is drawn at random")
    parser.add_argument("command", nargs="+")
    options = parser.parse_args(arguments)
    draw, stalls = random.Random(options.seed), 0
    with subprocess.Popen(options.command) as process:
        pause = options.after
        while True:
            with suppress(subprocess.TimeoutExpired):
                process.wait(pause)
                break
            stall(chosen(options.who, process.pid, draw), options.seconds)
            stalls += 1
            pause = draw.expovariate(1 / options.every)
    print(f"{stalls} stalls")
    return process.returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
