"""A child that does what the tests tell it to, misbehaviour included."""

import os
import signal
import sys
from pathlib import Path

from scrubber.adapters.children import child
from scrubber.adapters.children.child import Fault
from scrubber.adapters.children.message import Message


def answer(message: Message) -> Message:
    what = message["do"]
    if what == "hang":
        if "fifo" in message:
            Path(str(message["fifo"])).write_text("It hangs.", encoding="ascii")
        while True:
            signal.pause()
    if what == "die":
        os._exit(3)
    if what == "die-once":
        marker = Path(str(message["marker"]))
        if not marker.exists():
            marker.touch()
            os._exit(3)
    if what == "refuse":
        raise Fault(str(message["code"]), "No.")
    return {
        "pid": os.getpid(),
        "nice": os.getpriority(os.PRIO_PROCESS, 0),
        "session": os.getsid(0),
        "environment": sorted(os.environ),
        "echo": message.get("echo"),
    }


def main() -> None:
    link = child.inherit()
    if link.arguments == ("babble",):
        os.write(int(sys.argv[1]), b"\xff" * 64)
    child.serve(link, answer)


if __name__ == "__main__":
    main()
