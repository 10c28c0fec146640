"""A simulated node for tests: small devices, real tenants, and a list of what has to be ended afterwards."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from scrubber.adapters.kernel_text import ProcStat, parse_stat
from scrubber.adapters.procwalk import process
from scrubber.adapters.sim import control, shape
from scrubber.adapters.sim.backend import SimBackend
from scrubber.adapters.sim.layout import SimDevice, load_node, write_json
from scrubber.domain.device import Device

__all__ = ["Sim", "Tenant", "kill_and_wait", "make", "report_as_kernel_thread"]

TENANT = "scrubber.adapters.sim.tenant"


class Tenant:
    """A running tenant, or any program that prints JSON lines and then ``{"ready": true}``."""

    def __init__(self, command: list[str]) -> None:
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        self.message: dict[str, object] = {}

    @property
    def pid(self) -> int:
        return self.process.pid

    def until_ready(self) -> Tenant:
        """Read its output until it holds the device; an end before that is an error."""
        while "ready" not in self.message:
            self.message.update(json.loads(self.line()))
        return self

    def until_its_leader_is_dead(self) -> Tenant:
        """Return once its first thread has ended, while others continue; only the test's timeout limits the wait."""
        while True:
            with open(f"/proc/{self.pid}/stat", "rb") as file:
                if parse_stat(file.read()).is_dead:
                    return self
            os.sched_yield()

    def line(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"the tenant ended with {self.process.wait()}"
        return line

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        if self.process.stdout is not None:
            self.process.stdout.close()


def kill_and_wait(pid: int) -> None:
    """Kill a process of any parent, and wait until it has released its files: the next test may look for their holders."""
    descriptor = os.pidfd_open(pid)
    try:
        signal.pidfd_send_signal(descriptor, signal.SIGKILL)
        select.select([descriptor], [], [])
    finally:
        os.close(descriptor)


def report_as_kernel_thread(monkeypatch: pytest.MonkeyPatch, pid: int) -> None:
    """Have ``/proc/PID/stat`` name a kernel thread: a PID namespace has none of its own."""
    read_stat = process.read_stat

    def read(path: str) -> ProcStat | None:
        stat = read_stat(path)
        return stat if stat is None or path != f"/proc/{pid}/stat" else replace(stat, kernel_thread=True)

    monkeypatch.setattr(process, "read_stat", read)


class Sim:
    """The rig of the contract, and what only the simulated node can do."""

    error_signal = "xid"

    def __init__(self, directory: Path, backend: SimBackend) -> None:
        self.directory = directory
        self.backend = backend
        self._tenants: list[Tenant] = []

    def files(self, device: Device) -> SimDevice:
        return self.backend.inventory.find_sim_device(device)

    def start(self, device: Device, *options: str) -> Tenant:
        """Start a tenant of ``device`` without waiting for it."""
        return self.run([sys.executable, "-m", TENANT, "--device", str(self.files(device).memory), *options])

    def run(self, command: list[str]) -> Tenant:
        tenant = Tenant(command)
        self._tenants.append(tenant)
        return tenant

    def close(self) -> None:
        for tenant in self._tenants:
            tenant.end()

    # --- the contract's rig

    def fill(self, device: Device, text: str) -> None:
        pattern = text.encode()
        size = device.memory_bytes
        self.files(device).memory.write_bytes((pattern * (size // len(pattern) + 1))[:size])

    def content(self, device: Device) -> bytes:
        return self.files(device).memory.read_bytes()

    @contextmanager
    def hold(self, device: Device) -> Iterator[int]:
        tenant = self.start(device, "--hold", "forever").until_ready()
        try:
            yield tenant.pid
        finally:
            tenant.end()

    def raise_error(self, device: Device, code: int) -> None:
        control.add_faults(self.directory, device.id, xid=code)

    def add_ecc_errors(self, device: Device, errors: int) -> None:
        control.add_faults(self.directory, device.id, ecc=errors)

    def lose(self, device: Device) -> None:
        control.add_faults(self.directory, device.id, lost=True)

    def hang(self, device: Device) -> None:
        control.add_faults(self.directory, device.id, stuck=True)

    def fail_resets(self, device: Device) -> None:
        control.add_faults(self.directory, device.id, reset="fail")

    def tamper(self, device: Device) -> tuple[str, str]:
        name = min(self.files(device).defaults)
        self.change_setting(device, name, "tampered")
        return name, "tampered"

    def change_setting(self, device: Device, name: str, value: str) -> None:
        found = self.files(device)
        write_json(found.directory / "settings.json", {**found.defaults, name: value})

    def remove_driver(self) -> None:
        control.add_faults(self.directory, driver_absent=True)


def make(directory: Path, *, devices: int = 2, mebibytes: int = 2) -> Path:
    """Create a node in ``directory``."""
    shape.create(directory, devices=devices, memory=mebibytes * shape.MIB, node_name="node-1")
    assert not load_node(directory).broken_devices
    return directory
