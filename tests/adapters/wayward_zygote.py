"""A zygote that misbehaves as its first argument says; with a marker file as the second one, only in its first process."""

import os
import signal
import socket
import sys
from pathlib import Path

from scrubber.adapters.children.child import connect_to_parent_as
from scrubber.adapters.children.message import pack
from scrubber.adapters.children.zygote_server import ZygoteSocket

PIDS: dict[str, object] = {"zero": 0, "negative": -7, "text": "7", "missing": None, "boolean": True, "fraction": 1.5}


def misbehave(link: ZygoteSocket, how: str) -> None:
    """Answer one request wrongly."""
    descriptors = link.take_descriptors()
    match how.partition("-"):
        case ["short", *_]:
            os.write(int(sys.argv[1]), pack({"ok": {"pid": os.getpid()}})[:-3])
            os._exit(0)
        case ["close", *_]:
            os.close(int(sys.argv[1]))
            while True:
                signal.pause()
        case ["garbage", *_]:
            os.write(int(sys.argv[1]), b"\0\0\0\2[]")
        case ["pid", _, what]:
            link.send({"ok": {"pid": PIDS[what]}})
        case ["descriptors", _, count]:
            ends = [os.pidfd_open(os.getpid()) for _ in range(int(count))]
            with socket.socket(fileno=os.dup(int(sys.argv[1]))) as own:
                socket.send_fds(own, [pack({"ok": {"pid": os.getpid()}})], ends)
            for each in ends:
                os.close(each)
    for each in descriptors:
        os.close(each)


def main() -> None:
    link = connect_to_parent_as(ZygoteSocket)
    how, *marker = link.arguments
    if marker and Path(marker[0]).exists():
        how = "good"
    while link.receive() is not None:
        if marker:
            Path(marker[0]).touch()
        if how == "good":
            link.send({"ok": {"pid": os.getpid()}})
        else:
            misbehave(link, how)


if __name__ == "__main__":
    main()
