"""The independent reader of the soak: receives every tenant's messages, and judges. A separate process.

``python -m tests.chaos.reader DIRECTORY`` listens on ``DIRECTORY/reader.sock``. Each connection is one process, whose
PID comes from the kernel. The end of the connection is the end of the process, for any reason, and cannot be forged. A
line ``judge FACTS`` on standard input is answered with the verdict as one line of JSON: the received messages compared
with the soak's record of its own actions (:mod:`tests.chaos.judgement`).

This process contains neither the service's code nor the plugin's, so that it shares no mistake with them.
"""

from __future__ import annotations

import json
import os
import select
import selectors
import socket
import struct
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from tests.chaos import judgement
from tests.chaos.judgement import Message

__all__ = ["Hearing", "main"]

_LONGEST = 1024
_FORBIDDEN = {"scrubber", "plugin"}


@dataclass(slots=True)
class _Speaker:
    """One connected process, as it introduced itself."""

    line: socket.socket
    number: int
    pid: int
    role: str = ""
    name: str = ""
    uid: str = ""
    run: str = ""
    devices: tuple[str, ...] = ()


class Hearing:
    """All messages, in the order in which they were received."""

    def __init__(self, place: Path) -> None:
        self.messages: list[Message] = []
        self.bytes_read = 0
        self._count = 0
        self._now = 0.0
        self._place = place
        self._speakers: dict[int, _Speaker] = {}
        self._selector = selectors.DefaultSelector()
        self._door = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._door.bind(str(place))
        self._door.listen(4096)
        self._selector.register(self._door, selectors.EVENT_READ)

    def also(self, fd: int) -> None:
        """Make :meth:`turn` return for ``fd`` as well."""
        self._selector.register(fd, selectors.EVENT_READ)

    def turn(self, timeout: float | None) -> set[int]:
        """Wait for input and receive all messages; return the ready descriptors of :meth:`also`."""
        ready = {key.fd for key, _ in self._selector.select(timeout)}
        self._now = time.monotonic()  # one time for all: their order is unknown
        if self._door.fileno() in ready:
            self._let_in()
        for fd in ready & self._speakers.keys():
            self._receive(self._speakers[fd])
        return ready - self._speakers.keys() - {self._door.fileno()}

    def drain(self) -> None:
        """Receive every message sent by now."""
        while any(key.fd in self._speakers or key.fd == self._door.fileno() for key, _ in self._selector.select(0)):
            self.turn(0)

    def close(self) -> None:
        for speaker in self._speakers.values():
            speaker.line.close()
        self._door.close()
        self._selector.close()
        self._place.unlink(missing_ok=True)

    def _let_in(self) -> None:
        line, _ = self._door.accept()
        pid, _, _ = struct.unpack("3i", line.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        self._count += 1
        self._speakers[line.fileno()] = _Speaker(line, self._count, pid)
        self._selector.register(line, selectors.EVENT_READ)

    def _receive(self, speaker: _Speaker) -> None:
        try:
            line = speaker.line.recv(_LONGEST)
        except ConnectionResetError:
            line = b""
        if not line:
            self._note(speaker, "ended", self._now, {})
            self._selector.unregister(speaker.line)
            del self._speakers[speaker.line.fileno()]
            speaker.line.close()
            return
        what, *words = line.decode().split(" ")
        facts = dict(word.split("=", 1) for word in words)
        at = float(facts.pop("at"))
        self.bytes_read += int(facts.get("bytes", 0))
        if what == "looked":
            return
        if what == "hello":
            speaker.role, speaker.name = facts["role"], facts["name"]
            speaker.uid, speaker.run = facts["uid"], facts["run"]
            speaker.devices = tuple(name for name in facts["devices"].split(",") if name != "none")
        self._note(speaker, what, at, facts)
        if what == "wrote":
            self._see_who_is_beside(speaker, at)

    def _see_who_is_beside(self, speaker: _Speaker, at: float) -> None:
        """Record processes of other pods that have a device of ``speaker`` now: ended ones are no longer connected."""
        for other in list(self._speakers.values()):
            shared = set(other.devices) & set(speaker.devices)
            if shared and other.uid != speaker.uid and other.role != "unauthorized" and not _has_ended(other.line):
                facts = {
                    "device": min(shared),
                    "other": other.name,
                    "other_pid": str(other.pid),
                    "other_uid": other.uid,
                }
                self._note(speaker, "beside", at, facts)

    def _note(self, speaker: _Speaker, what: str, at: float, facts: dict[str, str]) -> None:
        who = (speaker.number, speaker.pid, speaker.role, speaker.name, speaker.uid, speaker.run, speaker.devices)
        self.messages.append(Message(what, at, *who, facts))


def _has_ended(line: socket.socket) -> bool:
    """Return whether the connection has ended, even if unread messages precede the end."""
    waiting = select.poll()
    waiting.register(line, select.POLLRDHUP)
    return bool(waiting.poll(0))


def main(directory: str) -> int:
    """Receive until standard input ends; return 0."""
    hearing = Hearing(Path(directory) / "reader.sock")
    orders = sys.stdin.fileno()
    hearing.also(orders)
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    try:
        while True:
            if orders not in hearing.turn(None):
                continue
            order = os.read(orders, 4096).decode().split()
            if not order:
                return 0
            hearing.drain()
            forbidden = sorted(_FORBIDDEN & {name.partition(".")[0] for name in sys.modules})
            assert not forbidden, f"the reader is to share no code with {forbidden}"
            verdict = judgement.judge(hearing.messages, judgement.read_facts(Path(order[1])))
            verdict.counts["bytes read by tenants"] = hearing.bytes_read
            sys.stdout.write(json.dumps(asdict(verdict)) + "\n")
            sys.stdout.flush()
    finally:
        hearing.close()


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
