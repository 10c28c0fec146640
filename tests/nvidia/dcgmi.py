"""A stand-in for DCGM: a host engine that has device nodes open, and a ``dcgmi`` that lets it close and open them.

Both are real processes. They behave as DCGM's user guide says: a host engine that was detached goes on without any GPU,
``--attach-driver`` makes it open them again, also where it has them open already, and one that starts opens them.
"""

from __future__ import annotations

import sys
from pathlib import Path

__all__ = ["HOST_ENGINE", "DcgmStandIn"]

HOST_ENGINE = """
import json, os, signal, sys
state, *paths = sys.argv[1:]
kept = []
def attach(*_):
    kept[:] = kept or [os.open(path, os.O_RDWR) for path in paths]
    note("attached")
def detach(*_):
    while kept:
        os.close(kept.pop())
    note("detached")
def note(what):
    with open(state + ".new", "w") as file:
        file.write(f"{os.getpid()} {what}")
    os.replace(state + ".new", state)
signal.signal(signal.SIGUSR1, detach)
signal.signal(signal.SIGUSR2, attach)
attach()
print(json.dumps({"ready": True, "pid": os.getpid()}), flush=True)
while True:
    signal.pause()
"""
"""A program: the state file of the stand-in, and the nodes to have open."""

_DCGMI = """#!{python}
import os, signal, sys, time
from pathlib import Path
here = Path({directory!r})
def mode():
    return (here / "mode").read_text()
def state():
    pid, what = (here / "state").read_text().split()
    return int(pid), what
with (here / "calls").open("a") as calls:
    print(*sys.argv[1:], file=calls)
if sys.argv[1:] == ["--version"]:
    print("\\ndcgmi  version:", (here / "version").read_text())
    sys.exit(0)
action = next((each for each in sys.argv if each in ("--attach-driver", "--detach-driver")), None)
if mode() == "old" or action is None:
    print("PARSE ERROR: Argument:", action, "\\n             Couldn't find match for argument")
    sys.exit(1)
while mode() == "hang-" + action[2:8]:
    time.sleep(0.05)
if mode() in ("refuse", "refuse-" + action[2:8]):
    print("Error: unable to establish a connection to the specified host: localhost")
    print("Error: Unable to connect to host engine. Host engine is not running.")
    sys.exit(1)
if (here / "state").exists():
    wanted = action[2:8] + "ed"
    os.kill(state()[0], signal.SIGUSR1 if wanted == "detached" else signal.SIGUSR2)
    while state()[1] != wanted:
        time.sleep(0.01)
print("Successfully", action[2:8] + "ed the driver.")
"""


class DcgmStandIn:
    """The program :attr:`path`, and what it does.

    Attributes:
        state: the file for :data:`HOST_ENGINE`.
    """

    def __init__(self, directory: Path, version: str = "4.5.1") -> None:
        self._directory = directory
        self.path = directory / "dcgmi"
        self.state = directory / "state"
        self.path.write_text(_DCGMI.format(python=sys.executable, directory=str(directory)))
        self.path.chmod(0o755)
        (directory / "version").write_text(version)
        (directory / "calls").write_text("")
        self.set_mode("works")

    def set_mode(self, mode: str) -> None:
        """Set what it does: works, old, refuse, refuse-detach, refuse-attach, hang-detach, hang-attach."""
        new = self._directory / "mode.new"
        new.write_text(mode)
        new.replace(self._directory / "mode")

    @property
    def calls(self) -> list[str]:
        """The arguments of each run."""
        return (self._directory / "calls").read_text().splitlines()

    @property
    def is_attached(self) -> bool:
        """Whether the host engine has its nodes open."""
        return self.state.read_text().endswith(" attached")
