"""Fork the children of a forked service as well; they are its own children, like those that it executes.

Between its fork and its first line the service leaves a process with a single thread behind. On request that process
forks with ``CLONE_PARENT``: the service is the parent of the new process, so the service reaps it, and the kernel kills
it when the service dies. The process that forks dies with the service, too.
"""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import platform
import signal
import socket
import sys
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, Final

from scrubber.adapters.children.child import die_with_parent

__all__ = ["NAME", "leave_forking_process", "without_forking_process"]

NAME: Final = "forks-children"
"""The name that the kernel shows for the process that forks."""

_LARGEST: Final = 1 << 20
"""Maximum bytes of one request: arguments and environment."""
_PR_SET_NAME: Final = 15
_CLONE_PARENT: Final = 0x8000
_CLONE_CALL: Final = {"x86_64": 56, "aarch64": 220}[platform.machine()]

_exec = asyncio.create_subprocess_exec


def without_forking_process(pids: Collection[int]) -> list[int]:
    """Return those of ``pids`` that still exist and are not a process that forks children."""
    return [pid for pid in pids if _name(pid) not in ("", NAME)]


def leave_forking_process(forked: Collection[str], become: Callable[[dict[str, Any], int], None]) -> str | None:
    """Fork the process that forks children of this one.

    Args:
        forked: modules of the children to fork; others are executed.
        become: prepares a child: receives its request and its socket.

    Returns:
        In this process None; in each child its module, which it must run.
    """
    parent, name = os.getpid(), _name(os.getpid())
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    # The name comes before the fork: without it the new process could be counted as a child of the service.
    _set_name(NAME)
    if os.fork() == 0:  # noqa: TID251 - this process has one thread
        ours.close()
        die_with_parent(parent)
        for number in (0, 1):
            os.dup2(null := os.open(os.devnull, os.O_RDWR), number)
            os.close(null)
        return _serve(theirs, name, become)
    _set_name(name)
    theirs.close()
    vars(asyncio)["create_subprocess_exec"] = _Forking(ours, forked).start
    return None


def _serve(requests: socket.socket, name: str, become: Callable[[dict[str, Any], int], None]) -> str:
    """Fork a child for each request; return its module in the child."""
    while True:
        words, descriptors, _, _ = socket.recv_fds(requests, _LARGEST, 1)
        if not words:
            os._exit(0)
        if (pid := _fork_for_parent()) == 0:
            requests.close()
            _set_name(name)
            request: dict[str, Any] = json.loads(words)
            os.environ.clear()
            os.environ.update(request["environment"])
            os.chdir(request["directory"])
            become(request, descriptors[0])
            return str(request["module"])
        for each in descriptors:
            os.close(each)
        requests.send(str(pid).encode())


def _fork_for_parent() -> int:
    """Fork a process whose parent is the parent of this one; return as :func:`os.fork` does."""
    python = ctypes.pythonapi
    python.PyOS_BeforeFork()
    # With the interpreter's lock held: the new process has no other thread that could release it.
    pid = int(ctypes.PyDLL(None).syscall(_CLONE_CALL, _CLONE_PARENT | signal.SIGCHLD, 0, 0, 0, 0))
    if pid == 0:
        python.PyOS_AfterFork_Child()
    else:
        python.PyOS_AfterFork_Parent()
    assert pid >= 0, "a child cannot be forked"
    return pid


class _Forking:
    """Requests children in the service."""

    def __init__(self, requests: socket.socket, forked: Collection[str]) -> None:
        self._requests = requests
        self._forked = forked

    async def start(self, program: str, *words: str, **options: Any) -> Any:
        """Replace :func:`asyncio.create_subprocess_exec` for children of adapters."""
        if program != sys.executable or words[:3] != ("-s", "-P", "-m") or words[3] not in self._forked:
            return await _exec(program, *words, **options)
        _, _, _, module, _, _, *arguments = words
        request = {
            "module": module,
            "arguments": arguments,
            "environment": options["env"],
            "directory": options["cwd"],
        }
        socket.send_fds(self._requests, [json.dumps(request).encode()], options["pass_fds"])
        pid = self._requests.recv(64)
        if not pid:
            raise OSError("the process that forks children has ended")
        return _Started(int(pid))


class _Started:
    """The part of :class:`asyncio.subprocess.Process` that the service uses."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._pidfd = os.pidfd_open(pid)
        loop = asyncio.get_running_loop()
        self._ended: asyncio.Future[int] = loop.create_future()
        loop.add_reader(self._pidfd, self._reap, loop)

    async def wait(self) -> int:
        """Return the exit status when the process has ended and was reaped."""
        return await asyncio.shield(self._ended)

    def _reap(self, loop: asyncio.AbstractEventLoop) -> None:
        loop.remove_reader(self._pidfd)
        os.close(self._pidfd)
        _, status = os.waitpid(self.pid, 0)
        if not self._ended.done():
            self._ended.set_result(os.waitstatus_to_exitcode(status))


def _name(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""


def _set_name(name: str) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_NAME, name.encode(), 0, 0, 0)
