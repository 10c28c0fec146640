"""Create a directory from which the service and its children start with an audit hook that records listings of /proc.

The interpreter runs ``sitecustomize`` at its start, and the service passes the directory of its own package on to its
children. The directory therefore contains links to the packages, and a ``sitecustomize.py``.
"""

from __future__ import annotations

import json
from pathlib import Path

import plugin
import scrubber

__all__ = ["environment", "listings"]

_HOOK = """
import json, os, sys, time

_sink = os.open({sink!r}, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)

def _hook(event, arguments):
    if event in ("os.listdir", "os.scandir") and os.fspath(arguments[0] or ".") in ("/proc", "/proc/", b"/proc"):
        os.write(_sink, (json.dumps([os.getpid(), time.monotonic()]) + "\\n").encode())

os.write(_sink, (json.dumps([os.getpid(), None]) + "\\n").encode())
sys.addaudithook(_hook)
"""


def environment(directory: Path) -> dict[str, str]:
    """Return the additions to a daemon's environment; the record is ``directory/listings``."""
    for package in (scrubber, plugin):
        found = Path(package.__file__ or "").parent
        (directory / found.name).symlink_to(found)
    policies = Path(scrubber.__file__).parent.parent / "policies"
    if policies.is_dir():
        (directory / "policies").symlink_to(policies)
    (directory / "sitecustomize.py").write_text(_HOOK.format(sink=str(directory / "listings")))
    return {"PYTHONPATH": str(directory), "PYTHONSAFEPATH": "1"}


def listings(directory: Path) -> tuple[set[int], list[tuple[int, float]]]:
    """Return the PIDs of the watched processes, and PID and time (monotonic seconds) of each listing of /proc."""
    lines = [json.loads(line) for line in (directory / "listings").read_text().splitlines()]
    return {pid for pid, at in lines if at is None}, [(pid, at) for pid, at in lines if at is not None]
