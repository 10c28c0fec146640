"""A child that does what the tests request, misbehaviour included."""

import atexit
import os
import signal
import sys
from pathlib import Path

from scrubber.adapters.children import child
from scrubber.adapters.children.child import Fault, ParentSocket
from scrubber.adapters.children.message import Message


def linger() -> None:
    while True:
        signal.pause()


def answer(message: Message) -> Message:
    what = message.get("do", "hang")  # a child without requests of its own hangs
    if what == "hang" or (what == "hang-without" and not Path(str(message["file"])).exists()):
        if "fifo" in message:
            Path(str(message["fifo"])).write_text("It hangs.", encoding="ascii")
        linger()
    if what == "die":
        os._exit(3)
    if what == "die-once":
        marker = Path(str(message["marker"]))
        if not marker.exists():
            marker.touch()
            os._exit(3)
    if what == "leave-once":  # it closes its socket, and stays
        marker = Path(str(message["marker"]))
        if not marker.exists():
            marker.touch()
            os.close(int(sys.argv[1]))
            linger()
    if message.get("then") == "linger":
        atexit.register(linger)
    if what == "refuse":
        raise Fault(str(message["code"]), "No.")
    return {
        "pid": os.getpid(),
        "nice": os.getpriority(os.PRIO_PROCESS, 0),
        "session": os.getsid(0),
        "environment": sorted(os.environ),
        "parent": os.getppid(),
        "threads": len(os.listdir("/proc/self/task")),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "variables": {name: os.environ.get(name) for name in str(message.get("variables", "")).split()},
        "echo": message.get("echo"),
    }


def run(link: ParentSocket) -> None:
    """Entry point in a process that a zygote forked."""
    child.serve(link, answer)


def main() -> None:
    link = child.connect_to_parent()
    if link.arguments == ("babble",):
        os.write(int(sys.argv[1]), b"\xff" * 64)
    child.serve(link, answer)


if __name__ == "__main__":
    main()
