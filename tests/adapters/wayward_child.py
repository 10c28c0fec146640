"""A child that does what the tests tell it to, misbehaviour included."""

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
    what = message.get("do", "hang")  # asked in the place of a child that knows better
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
    if what == "leave-once":  # it says nothing any more, and stays
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
    """What a zygote forks."""
    child.serve(link, answer)


def main() -> None:
    link = child.connect_to_parent()
    if link.arguments == ("babble",):
        os.write(int(sys.argv[1]), b"\xff" * 64)
    child.serve(link, answer)


if __name__ == "__main__":
    main()
