"""A simulated node for tests: small devices, real tenants, and a count of what has to be ended afterwards."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from scrubber.adapters.kernel_text import parse_stat
from scrubber.adapters.sim import control, shape
from scrubber.adapters.sim.backend import SimBackend
from scrubber.adapters.sim.layout import SimDevice, load_node, write_json
from scrubber.domain.device import Device

__all__ = ["Sim", "Tenant", "make"]

TENANT = "scrubber.adapters.sim.tenant"


class Tenant:
    """A running tenant, or any program that prints JSON lines and then ``{"ready": true}``."""

    def __init__(self, command: list[str]) -> None:
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        self.said: dict[str, object] = {}

    @property
    def pid(self) -> int:
        return self.process.pid

    def until_ready(self) -> Tenant:
        """Read what it says until it holds the device; an end before that is an error."""
        while "ready" not in self.said:
            self.said.update(json.loads(self.line()))
        return self

    def until_its_leader_is_dead(self) -> Tenant:
        """Return once its first thread has ended, while others go on; the test's own deadline is the limit."""
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
        """A tenant of ``device``, not waited for."""
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
    """A node in ``directory``."""
    shape.create(directory, devices=devices, memory=mebibytes * shape.MIB, node_name="node-1")
    assert not load_node(directory).broken_devices
    return directory
