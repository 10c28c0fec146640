"""Start Python programs by forking an interpreter that has already imported what they need.

Starting ``python -m scrubber.cli.main`` spends most of its time on imports, and the tests start thousands of programs.
The result is an ordinary process: it has its own PID, streams, environment and session, dies of ``kill -9``, and
executes its children as usual. It differs from an exec'ed process in its command line and in the modules that are
imported before its first line. Tests of either start their programs with :func:`asyncio.create_subprocess_exec`.

    python -m tests.forkserver FD KIND    serves requests on a listening socket until the process that started it ends

Another server forks the children of adapters: they import little, but hundreds of tests start half a dozen each.
"""

from __future__ import annotations

import asyncio
import asyncio.base_subprocess
import atexit
import ctypes
import gc
import importlib
import io
import json
import os
import pkgutil
import runpy
import selectors
import signal
import socket
import subprocess
import sys
import threading
import traceback
from collections.abc import Collection, Mapping
from contextlib import ExitStack, suppress
from functools import cache, partial
from types import ModuleType
from typing import IO, Any, Final, NoReturn

from tests.forked_children import leave_forking_process

__all__ = ["start", "start_child"]

_LARGEST: Final = 1 << 20
"""Maximum bytes of one request: argument vector and environment."""
_FORKED: Final = ("scrubber.cli.main", "tests.clustercheck", "tests.dashboards.service", "tests.nvidia.service")
"""Programs that do not change any module imported before them."""
_CODE: Final = "-c"
"""In place of a module: the first argument is the program itself."""
_CHILDREN: Final = (
    *(f"scrubber.adapters.nvidia.{name}" for name in ("driver", "zygote")),
    *(f"scrubber.adapters.sim.{name}" for name in ("diagnosis", "driver", "zygote")),
    *("scrubber.adapters.amd.driver", "scrubber.adapters.command.zygote"),
    *("scrubber.adapters.cuda.zygote", "scrubber.adapters.walker"),
)
"""Children of adapters."""
_PRELOADED: Final[Mapping[str, Collection[str]]] = {
    "daemons": ("scrubber.cli", "scrubber.daemon", "plugin.main"),
    "cluster check": ("tests.clustercheck.check", "tests.clustercheck.report", "tests.clustercheck.scenarios"),
    "children": (*_CHILDREN, "scrubber.adapters.nvidia.events", "scrubber.adapters.sim.eraser", "numpy", "pynvml"),
}
"""What each kind of server imports. Not CuPy, nor what imports it: for most children another package is CuPy."""

_exec = asyncio.create_subprocess_exec


async def start(
    module: str,
    *arguments: str,
    stdin: int | IO[Any] | None = None,
    stdout: int | IO[Any] | None = None,
    stderr: int | IO[Any] | None = None,
    env: Mapping[str, str] | None = None,
    terminal: str | None = None,
    on_terminal: Collection[int] = (),
    forks_children: bool = False,
) -> asyncio.subprocess.Process:
    """Start ``python -m MODULE ARGUMENTS``; parameters as those of :func:`asyncio.create_subprocess_exec`.

    ``module`` may be ``-c``, and the first of ``arguments`` code. A program that changes what it imports, or that needs its own interpreter variables (``PYTHONPATH``), is still
    exec'ed.

    Args:
        terminal: path of the controlling terminal of the program's new session; None: it stays in the session of this
            process.
        on_terminal: which of the descriptors 0, 1 and 2 are that terminal.
        forks_children: whether a service forks children of adapters (:mod:`tests.forked_children`). It then has one more
            child process.
    """
    env = os.environ if env is None else env
    if module not in (*_FORKED, _CODE) or any(
        env.get(name) != os.environ.get(name) for name in env if name.startswith("PYTHON")
    ):
        command = (sys.executable, *(() if module == _CODE else ("-m",)), module, *arguments)
        return await asyncio.create_subprocess_exec(*command, stdin=stdin, stdout=stdout, stderr=stderr, env=env)
    request = {
        "module": module,
        "arguments": arguments,
        "environment": dict(env),
        "directory": os.getcwd(),
        "terminal": terminal,
        "on_terminal": [*on_terminal],
        "forks_children": forks_children and "serve" in arguments,
    }
    return await _fork("daemons", request, stdin, stdout, stderr)


async def start_child(program: str, *words: str, **options: Any) -> asyncio.subprocess.Process:
    """Replace :func:`asyncio.create_subprocess_exec` in :mod:`scrubber.adapters.children.process`.

    The parent of the child is the server, which ends with this process; its socket may have another number.
    """
    if program != sys.executable or words[:3] != ("-s", "-P", "-m") or words[3] not in _CHILDREN:
        return await _exec(program, *words, **options)
    _, _, _, module, _, _, *arguments = words
    request = {"module": module, "arguments": arguments, "environment": options["env"], "directory": options["cwd"]}
    return await _fork("children", request, options["stdin"], options["stdout"], None, *options["pass_fds"])


async def _fork(kind: str, request: Mapping[str, Any], *streams: int | IO[Any] | None) -> asyncio.subprocess.Process:
    """Have the server of that ``kind`` fork; after the three standard streams it is passed other descriptors."""
    loop = asyncio.get_running_loop()
    protocol = asyncio.subprocess.SubprocessStreamProtocol(limit=1 << 16, loop=loop)
    waiter = loop.create_future()
    forked: Any = partial(_Forked, kind, json.dumps(request), *streams)
    stdin, stdout, stderr = streams[:3]
    transport = _Transport(loop, protocol, forked, False, stdin, stdout, stderr, 0, waiter)
    await waiter
    return asyncio.subprocess.Process(transport, protocol, loop)


class _Transport(asyncio.base_subprocess.BaseSubprocessTransport):
    """Asyncio's transport over a process that the server has forked."""

    def _start(self, args: Any, shell: bool, stdin: Any, stdout: Any, stderr: Any, bufsize: int, **_: Any) -> None:
        self._proc = forked = args()
        self._loop.add_reader(forked.connection, self._ended, forked)

    def _ended(self, forked: _Forked) -> None:
        self._loop.remove_reader(forked.connection)
        self._process_exited(forked.read_status())


class _Forked:
    """The part of :class:`subprocess.Popen` that a transport uses."""

    def __init__(self, kind: str, request: str, *streams: int | IO[Any] | None) -> None:
        self.args = request
        self.returncode: int | None = None
        theirs: list[int] = []
        ours: list[IO[bytes] | None] = [None, None, None]
        with ExitStack() as passed_on:
            for number, stream in enumerate(streams):
                if stream == subprocess.PIPE:
                    reading, writing = os.pipe()
                    mine, other = (writing, reading) if number == 0 else (reading, writing)
                    ours[number] = open(mine, "wb" if number == 0 else "rb", buffering=0)  # noqa: SIM115 - the transport closes it
                    passed_on.callback(os.close, other)
                elif stream == subprocess.DEVNULL:
                    passed_on.callback(os.close, other := os.open(os.devnull, os.O_RDWR))
                elif stream == subprocess.STDOUT:
                    other = theirs[1]
                elif stream is None:
                    other = number
                else:
                    other = stream if isinstance(stream, int) else stream.fileno()
                theirs.append(other)
            self.stdin, self.stdout, self.stderr = ours[:3]
            self._connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            try:
                self._connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _LARGEST)
                self._connection.connect(_address(kind))
                socket.send_fds(self._connection, [request.encode()], theirs)
            except BaseException:
                self._connection.close()
                raise
        pid, descriptors, _, _ = socket.recv_fds(self._connection, 64, 1)
        assert pid, "the server that forks has ended"
        self.pid, (self._pidfd,) = int(pid), descriptors

    @property
    def connection(self) -> int:
        return self._connection.fileno()

    def poll(self) -> int | None:
        return self.returncode

    def send_signal(self, number: int) -> None:
        with suppress(ProcessLookupError):  # as Popen: the process has ended and its end is not reported yet
            signal.pidfd_send_signal(self._pidfd, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def read_status(self) -> int:
        self.returncode = int(self._connection.recv(64) or -signal.SIGKILL)
        self._connection.close()
        os.close(self._pidfd)
        return self.returncode


@cache
def _address(kind: str) -> str:
    """Start the server of that kind of this process, which ends with it; return the address of its socket."""
    address = f"\0gpu-scrubber-tests-{os.getpid()}-{os.urandom(8).hex()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listening:
        listening.bind(address)
        listening.listen(64)
        command = [sys.executable, "-m", "tests.forkserver", str(listening.fileno()), kind]
        server = subprocess.Popen(command, stdin=subprocess.PIPE, pass_fds=[listening.fileno()])
    atexit.register(server.communicate)
    return address


class _Server:
    """Forks on request and reports when a forked process has ended."""

    def __init__(self, listening: socket.socket) -> None:
        self._listening = listening
        self._forked: dict[int, socket.socket] = {}

    def run(self) -> dict[str, Any] | None:
        """Return the request in each forked process, and None in the server when it ends."""
        woken, wakes = socket.socketpair()
        woken.setblocking(False)
        wakes.setblocking(False)
        signal.set_wakeup_fd(wakes.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        with selectors.DefaultSelector() as selector, woken, wakes:
            selector.register(self._listening, selectors.EVENT_READ)
            selector.register(woken, selectors.EVENT_READ)
            selector.register(sys.stdin, selectors.EVENT_READ)
            while True:
                ready = {key.fileobj for key, _ in selector.select()}
                if sys.stdin in ready:
                    return None
                if woken in ready:
                    woken.recv(4096)
                    self._reap()
                if self._listening in ready and (request := self._fork()) is not None:
                    return request

    def _fork(self) -> dict[str, Any] | None:
        connection, _ = self._listening.accept()
        words, streams, _, _ = socket.recv_fds(connection, _LARGEST, 4)
        request: dict[str, Any] = json.loads(words)
        if request.get("forks_children"):
            _preload("children")  # in this process, once
        if request["module"] == "tests.clustercheck":
            _preload("cluster check")
        if (pid := os.fork()) == 0:  # noqa: TID251 - this process has one thread, see _preload
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            for inherited in (connection, self._listening, *self._forked.values()):
                inherited.close()
            _become(request, streams[:3])
            if streams[3:]:
                _become_child(request, streams[3])
            return request
        for each in streams:
            os.close(each)
        pidfd = os.pidfd_open(pid)
        socket.send_fds(connection, [str(pid).encode()], [pidfd])
        os.close(pidfd)
        self._forked[pid] = connection
        return None

    def _reap(self) -> None:
        while self._forked:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            with self._forked.pop(pid) as connection, suppress(BrokenPipeError):
                connection.send(str(os.waitstatus_to_exitcode(status)).encode())


def _become(request: Mapping[str, Any], streams: list[int]) -> None:
    """Apply the request to this process: session, streams, environment, arguments."""
    for number, each in enumerate(streams):
        os.dup2(each, number)
        os.close(each)
    if request.get("terminal") is not None:
        os.setsid()
    if request.get("on_terminal"):
        # The first terminal that a session leader opens becomes its controlling terminal: Ctrl-C and resizes reach it.
        opened = os.open(request["terminal"], os.O_RDWR)
        for number in request["on_terminal"]:
            os.dup2(opened, number)
        os.close(opened)
    for name, number, mode in (("stdin", 0, "r"), ("stdout", 1, "w"), ("stderr", 2, "w")):
        before = getattr(sys, name)
        at_once = name == "stderr" or os.isatty(number)
        binary = open(number, f"{mode}b", closefd=False)  # noqa: SIM115 - open to the end, like the interpreter's own
        stream = io.TextIOWrapper(binary, encoding=before.encoding, errors=before.errors, line_buffering=at_once)
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["directory"])
    sys.argv = [request["module"], *request["arguments"]]
    if request["module"] == _CODE:
        del sys.argv[1]
    sys.path[0] = request["directory"]


def _become_child(request: Mapping[str, Any], link: int) -> None:
    """Apply what the start of an interpreter for a child would: session, arguments, and paths from the environment."""
    environment = request["environment"]
    os.setsid()
    sys.argv[1:] = [str(link), str(os.getppid()), *request["arguments"]]
    sys.path[:1] = environment["PYTHONPATH"].split(":")
    if (directories := environment.get("LD_LIBRARY_PATH")) is not None:
        # The loader has read this variable already.
        vars(sys.modules["pynvml"])["CDLL"] = partial(_load_library, directories.split(":"))


def _load_library(directories: Collection[str], name: str) -> ctypes.CDLL:
    return ctypes.CDLL(next(filter(os.path.exists, (f"{each}/{name}" for each in directories)), name))


def _run(module: str, code: str = "") -> NoReturn:
    """Run a program, or ``code``, to its end without freeing memory at exit: freeing would copy each shared page."""
    status: object = 0
    try:
        if module in _CHILDREN:
            importlib.import_module(module).main()
        elif module == _CODE:
            sys.modules["__main__"] = program = ModuleType("__main__")
            exec(compile(code, "<string>", "exec"), vars(program))  # noqa: S102 - a test's own program
        else:
            runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as ending:
        status = ending.code
    except BaseException:  # noqa: BLE001 - the caller is the interpreter, which does the same
        traceback.print_exc()
        status = 1
    if status is not None and not isinstance(status, int):
        print(status, file=sys.stderr)
        status = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except OSError:
        status = status or 120
    os._exit(status or 0)


@cache
def _preload(kind: str) -> None:
    """Import what the programs import, except the module that a daemon starts with."""
    os.environ["GRPC_VERBOSITY"] = "NONE"  # as the programs do; gRPC reads it when it is imported
    os.environ["OPENBLAS_NUM_THREADS"] = "1"
    gc.disable()
    for name in _PRELOADED[kind]:
        package = importlib.import_module(name)
        for each in pkgutil.iter_modules(getattr(package, "__path__", ()), f"{name}."):
            if each.name != "scrubber.cli.main":
                importlib.import_module(each.name)
    gc.collect()
    gc.freeze()
    gc.enable()
    assert len(os.listdir("/proc/self/task")) == 1, "what has threads cannot be forked"


if __name__ == "__main__":
    _preload(sys.argv[2])
    with socket.socket(fileno=int(sys.argv[1])) as at:
        begun = _Server(at).run()
    if begun is not None:
        child = leave_forking_process(_CHILDREN, _become_child) if begun.get("forks_children") else None
        _run(begun["module"] if child is None else child, *begun["arguments"][:1])
