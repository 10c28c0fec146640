"""An honest tenant: a program for a container of the simulated node that does to a device what tenants do.

It writes a text all over the memory, reads what it finds, keeps the device open, leaves a child behind, holds the
device only through a descriptor in flight or a mapping, or dies of SIGKILL. Each result is one JSON line on stdout.
Exit code: 0 all is well, 1 the memory does not match ``--expect``, 2 usage error or no device.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import signal
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

__all__ = ["main"]

_CHUNK = 1024 * 1024
_MAX_SHOWN = 80
_USAGE = 2


def main(argv: Sequence[str] | None = None) -> int:
    """Run the tenant with ``argv`` (by default the process's own); return the exit code."""
    parser = _parser()
    options = parser.parse_args(argv)
    if "" in (options.write, options.expect):
        parser.error("the string must not be empty")
    path = _device(options.device)
    if path is None:
        return _usage_error("no device found: there is no dev/simgpu* here; pass one with --device")
    if options.hold is not None:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})  # before anything that it must not interrupt
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        return _usage_error(f"{path} cannot be opened: {error.strerror}")
    if options.resize is not None:
        os.ftruncate(fd, options.resize)
        _print_json(resized_bytes=options.resize)
    if options.read:
        residue, found = _read(fd)
        _print_json(residue_bytes=residue, found=found)
    if options.expect is not None and options.write is None and not _check(fd, options.expect):
        return 1
    if options.write is not None:
        _print_json(wrote_bytes=_fill(fd, options.write.encode()))
    kept = _keep_open(fd, in_flight=options.in_flight, mapped=options.mmap)
    if options.leave_leftover:
        _print_json(child_pid=_leave_child(path))
    if options.ready_file is not None:
        options.ready_file.write_text(f"{os.getpid()}\n", encoding="ascii")
    _print_json(ready=True, pid=os.getpid())
    if options.hold is not None:
        _hold(options.hold)
    if options.sigkill:
        os.kill(os.getpid(), signal.SIGKILL)
    if options.expect is not None and options.write is not None:
        again = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        if not _check(again, options.expect):
            return 1
        os.close(again)
    del kept
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="scrubber sim tenant", description="An honest tenant of a simulated GPU.")
    parser.add_argument("--device", type=Path, help="path of the device (default: the first dev/simgpu* here)")
    parser.add_argument("--resize", type=int, metavar="BYTES", help="change the size of the device's file")
    parser.add_argument(
        "--read", action="store_true", help="print how many bytes are not zero, and the first text among them"
    )
    parser.add_argument(
        "--expect",
        metavar="TEXT",
        help="fail unless the whole memory contains this text repeated; after --write: checked at the end",
    )
    parser.add_argument("--write", metavar="TEXT", help="fill the memory with this text, repeated")
    parser.add_argument("--in-flight", action="store_true", help="hold the device only by a descriptor in flight")
    parser.add_argument("--mmap", action="store_true", help="hold the device only by a mapping")
    parser.add_argument("--leave-leftover", action="store_true", help="leave a process behind that holds the device")
    parser.add_argument("--ready-file", type=Path, help="file to write once everything before is done")
    parser.add_argument(
        "--hold", type=_seconds, metavar="SECONDS|forever", help="keep running; SIGTERM ends it gracefully"
    )
    parser.add_argument("--sigkill", action="store_true", help="end with SIGKILL")
    return parser


def _seconds(text: str) -> float:
    return float("inf") if text == "forever" else float(text)


def _device(named: Path | None) -> Path | None:
    if named is not None:
        return named
    found = [path for root in (Path(), Path("/")) for path in sorted(root.glob("dev/simgpu*"))]
    return found[0] if found else None


def _hold(seconds: float) -> None:
    """Wait until the time is over or SIGTERM arrives."""
    if seconds == float("inf"):
        signal.sigwait({signal.SIGTERM})
    else:
        signal.sigtimedwait({signal.SIGTERM}, seconds)


def _keep_open(fd: int, *, in_flight: bool, mapped: bool) -> object:
    """Keep holding the device in the requested way; the returned object holds it."""
    if in_flight:
        ours, other_end = socket.socketpair()
        socket.send_fds(ours, [b"x"], [fd])
        os.close(fd)
        return ours, other_end
    if mapped:
        mapping = mmap.mmap(fd, os.fstat(fd).st_size)
        os.close(fd)
        return mapping
    return fd


def _leave_child(path: Path) -> int:
    """Start a process in this session that holds the device forever; return its PID once it does."""
    import subprocess

    child = subprocess.Popen(
        [sys.executable, "-m", "scrubber.adapters.sim.tenant", "--device", str(path), "--hold", "forever"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
    )
    if child.stdout is None or not child.stdout.readline():
        raise SystemExit("tenant: the leftover child process did not start.")
    return child.pid


def _fill(fd: int, text: bytes) -> int:
    """Write ``text`` over and over, from the first byte to the last."""
    total = os.fstat(fd).st_size
    for offset in range(0, total, _CHUNK):
        os.pwrite(fd, _repeated(text, offset, min(_CHUNK, total - offset)), offset)
    return total


def _check(fd: int, text: str) -> bool:
    expected = text.encode()
    total = os.fstat(fd).st_size
    wrong = 0
    for offset in range(0, total, _CHUNK):
        size = min(_CHUNK, total - offset)
        chunk, right = os.pread(fd, size, offset), _repeated(expected, offset, size)
        if chunk != right:
            wrong += sum(one != other for one, other in zip(chunk, right, strict=False))
    _print_json(expected=wrong == 0, wrong_bytes=wrong)
    return wrong == 0


def _read(fd: int) -> tuple[int, str]:
    """Return how many bytes are not zero, and the beginning of the first text among them."""
    residue, found = 0, b""
    for offset in range(0, os.fstat(fd).st_size, _CHUNK):
        chunk = os.pread(fd, _CHUNK, offset)
        wrong = len(chunk) - chunk.count(0)
        if wrong and not residue:
            found = chunk.lstrip(b"\0")[:_MAX_SHOWN].split(b"\0", 1)[0]
        residue += wrong
    return residue, found.decode(errors="replace")


def _repeated(text: bytes, offset: int, size: int) -> bytes:
    start = offset % len(text)
    return (text * ((start + size) // len(text) + 1))[start : start + size]


def _usage_error(why: str) -> int:
    sys.stderr.write(f"tenant: {why}.\n")
    return _USAGE


def _print_json(**what: object) -> None:
    sys.stdout.write(json.dumps(what) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
