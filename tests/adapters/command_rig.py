"""A command backend over a simulated node, with the sample program or with one that a test writes."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

from scrubber.adapters.children.process import Children
from scrubber.adapters.command.backend import command_backend
from scrubber.adapters.sim import shape
from scrubber.config.command_file import CommandFileSource
from scrubber.domain.device import Device
from scrubber.ports.device import DeviceBackend

__all__ = ["SAMPLE", "Commands", "commands", "hostile", "write_program"]

SAMPLE = Path(__file__).parents[2] / "deploy" / "backends" / "simulated-node"


def write_program(path: Path, text: str) -> Path:
    """Write a program that only its owner may change."""
    path.write_text(text)
    path.chmod(0o755)
    return path


ANSWER = """#!/usr/bin/env python3
import json, os, subprocess, sys, time
from pathlib import Path
verb, request = sys.argv[1], json.load(sys.stdin)
here = Path(os.environ["SIMULATED_NODE"])

def answer(**values):
    print(json.dumps({"apiVersion": request["apiVersion"], "kind": "Response", "id": request["id"], **values}), flush=True)

if verb == "capabilities":
    answer(verbs=["inventory", "telemetry", "erase", "reset", "reset-plan", "diagnose", "holders"])
elif verb == "inventory":
    memory = str(here / "devices/0/memory")
    answer(driver="1", devices=[{"id": "dev-0", "index": "0", "model": "Hostile", "memoryBytes": 1024, "nodes": [{"path": memory}]}])
elif verb == "holders":
    answer(pids=[], complete=True)
else:
    body()
"""


def hostile(directory: Path, body: str) -> Path:
    """Write a program that lists one device and runs ``body`` for whatever else it is asked."""
    indented = "\n".join(f"    {line}" for line in body.splitlines())
    return write_program(directory / "hostile", ANSWER.replace("def answer", f"def body():\n{indented}\n\ndef answer"))


class Commands:
    """The rig of both contracts, over the files of the sample."""

    error_signal = "error"

    def __init__(self, directory: Path, program: Path, backend: DeviceBackend) -> None:
        self.directory = directory
        self.program = program
        self.backend = backend
        self.diagnostics = backend.diagnostics
        self.device: Device
        self.other: Device

    def of(self, device: Device) -> Path:
        return self.directory / "node" / "devices" / device.index

    def memory(self, device: Device) -> Path:
        return self.of(device) / "memory"

    def fill(self, device: Device, text: str) -> None:
        repeated = text.encode() * (device.memory_bytes // len(text) + 1)
        self.memory(device).write_bytes(repeated[: device.memory_bytes])

    def content(self, device: Device) -> bytes:
        return self.memory(device).read_bytes()

    @contextmanager
    def hold(self, device: Device) -> Iterator[int]:
        with self.memory(device).open("rb") as memory:
            process = subprocess.Popen(("sleep", "600"), stdin=memory)
        try:
            yield process.pid
        finally:
            process.kill()
            process.wait()

    def fault(self, device: Device, **faults: object) -> None:
        self._write(self.of(device) / "faults.json", {**self._faults(device), **faults})

    def raise_error(self, device: Device, code: int) -> None:
        errors = self._faults(device).get("errors", {})
        self.fault(device, errors={**errors, str(code): errors.get(str(code), 0) + 1})

    def add_ecc_errors(self, device: Device, errors: int) -> None:
        self.fault(device, ecc=errors)

    def lose(self, device: Device) -> None:
        self.fault(device, lost=True)

    def hang(self, device: Device) -> None:
        self.fault(device, hangs=True)

    def spoil(self, device: Device) -> None:
        self.fault(device, spoiled=True)

    def fail_resets(self, device: Device) -> None:
        self.fault(device, resetFails=True)

    def tamper(self, device: Device) -> tuple[str, str]:
        defaults = json.loads((self.of(device) / "device.json").read_text())["defaults"]
        name = min(defaults)
        self._write(self.of(device) / "settings.json", {**defaults, name: "tampered"})
        return name, "tampered"

    def remove_driver(self) -> None:
        (self.directory / "node" / "no-driver").touch()

    async def at_work(self, device: Device) -> int | None:
        return await self.backend.eraser.find_orphan(device)

    def _faults(self, device: Device) -> Mapping[str, Any]:
        file = self.of(device) / "faults.json"
        return dict(json.loads(file.read_text())) if file.exists() else {}

    def _write(self, path: Path, values: object) -> None:
        """Replace the file at once: the program may read it at any time."""
        new = path.with_suffix(".new")
        new.write_text(json.dumps(values))
        new.replace(path)


@asynccontextmanager
async def commands(
    directory: Path, program: Path = SAMPLE, *, telemetry: str = "5s", mebibytes: int = 1
) -> AsyncIterator[Commands]:
    """Start the backend of ``program`` over a simulated node of two devices in ``directory``."""
    shape.create(directory / "node", devices=2, memory=mebibytes * shape.MIB, node_name="node-1")
    config = directory / "command.yaml"
    config.write_text(
        f"program: {program}\npollInterval: 100ms\ndeadlines: {{telemetry: {telemetry}}}\n"
        f"environment: {{SIMULATED_NODE: {directory / 'node'}}}\n"
    )
    children = Children()
    async with command_backend(
        CommandFileSource(config),
        directory / "locks",
        node="node-1",
        infrastructure=None,
        owner=os.geteuid(),
        children=children,
    ) as backend:
        yield Commands(directory, program, backend)
    assert children.pids() == frozenset()
