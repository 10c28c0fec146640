"""Programs that compute on a simulated node, each in a separate process that ends or is killed by a test."""

import inspect
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.nvidia.machine import Machine, Subject

__all__ = ["Program", "Programs"]

ROOT = Path(__file__).parents[2]
KERNELS = ROOT / "scrubber/adapters/cuda/kernels.ptx"
ATTACKS = ROOT / "tests/gpu/attacks.ptx"

# Prelude of each program: `tell` sends a message to the test, `wait` blocks until the test answers or kills the
# program.
PRELUDE = """
import ctypes, json, os, sys
import cupy
from cupy.cuda import runtime
from numpy import uint32, uint64

def tell(**what):
    print(json.dumps(what), flush=True)

def wait():
    sys.stdin.readline()

def status(call):
    try:
        call()
    except (runtime.CUDARuntimeError, cupy.cuda.driver.CUDADriverError) as error:
        return error.status
    return 0

def content(address, size):
    buffer = ctypes.create_string_buffer(size)
    runtime.memcpy(ctypes.addressof(buffer), address, size, runtime.memcpyDeviceToHost)
    return buffer.raw

def word(address):
    return int.from_bytes(content(address, 8), "little")

def zeroed(size):
    address = runtime.malloc(size)
    runtime.memset(address, 0, size)
    runtime.deviceSynchronize()
    return address

def kernel(name, path=KERNELS):
    return cupy.RawModule(path=path).get_function(name)
"""


class Program:
    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self._process = process
        self.pid = process.pid

    def next_message(self) -> dict[str, Any]:
        """Return its next message."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, "the program ended without a word"
        answer = json.loads(line)
        assert isinstance(answer, dict)
        return answer

    def kill(self) -> None:
        """Kill it, as a node without memory would; none of its threads runs any more when this returns."""
        self._process.kill()
        self._process.wait()

    def kill_and_leave_unreaped(self) -> None:
        """Kill it without reaping it, so that ``/proc`` still lists it."""
        self._process.kill()
        os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)


class Programs:
    """Starts programs on the devices of ``machine``; kernels are compiled into ``cache``."""

    def __init__(self, machine: Machine, cache: Path) -> None:
        self._environment = {
            "PATH": os.defpath,
            "PYTHONPATH": f"{ROOT / 'tests/nvidia/standin'}:{ROOT}",
            "SCRUBBER_STANDIN_WORLD": str(machine.root),
            "SCRUBBER_STANDIN_CACHE": str(cache),
        }
        self._running: list[subprocess.Popen[str]] = []

    def start(self, *code: str, on: Subject | str) -> Program:
        """Run pieces of code, one after the other, in a process that sees one device."""
        places = f"KERNELS = {str(KERNELS)!r}\nATTACKS = {str(ATTACKS)!r}\n"
        process = subprocess.Popen(
            [sys.executable, "-c", "\n".join([places, PRELUDE, *map(inspect.cleandoc, code)])],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**self._environment, "CUDA_VISIBLE_DEVICES": on if isinstance(on, str) else on.uuid},
        )
        self._running.append(process)
        return Program(process)

    def end(self) -> None:
        for process in self._running:
            with process:
                process.kill()
