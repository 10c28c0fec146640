"""The toy backend fulfils the contracts of every backend, and runs in the service as shipped.

This proves that the contract suites require nothing beyond what :mod:`tests.toy_backend` has.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from scrubber.adapters.children.process import Children
from scrubber.domain.device import Device
from scrubber.emulator.playground import Daemon, Playground, gpu_pod_spec
from scrubber.ports.device import DeviceBackend
from tests.adapters.backend_contract import BackendContract
from tests.adapters.diagnostics_contract import DiagnosticsContract
from tests.integration.acting import QUICK, SOON
from tests.toy_backend import MODULE, ToyNode, make, toy_backend

# --- the contract -----------------------------------------------------------------------------------------------------


class Toys:
    """The rig of both contracts."""

    error_signal = "fault"

    def __init__(self, backend: DeviceBackend, node: ToyNode, device: Device, other: Device) -> None:
        self.backend = backend
        self.diagnostics = backend.diagnostics
        self.node = node
        self.device = device
        self.other = other

    def fill(self, device: Device, text: str) -> None:
        repeated = text.encode() * (device.memory_bytes // len(text) + 1)
        self.node.memory(device).write_bytes(repeated[: device.memory_bytes])

    def content(self, device: Device) -> bytes:
        return self.node.memory(device).read_bytes()

    @contextmanager
    def hold(self, device: Device) -> Iterator[int]:
        with self.node.memory(device).open("rb") as memory:
            process = subprocess.Popen(("sleep", "600"), stdin=memory)
        try:
            yield process.pid
        finally:
            process.kill()
            process.wait()

    def raise_error(self, device: Device, code: int) -> None:
        with (self.node.of(device) / "errors").open("a") as file:
            file.write(f"{code}\n")

    def add_ecc_errors(self, device: Device, errors: int) -> None:
        (self.node.of(device) / "ecc").write_text(str(errors))

    def lose(self, device: Device) -> None:
        self._flag(device, "lost")

    def hang(self, device: Device) -> None:
        self._flag(device, "stuck")

    def spoil(self, device: Device) -> None:
        self._flag(device, "spoiled")

    def fail_resets(self, device: Device) -> None:
        self._flag(device, "reset-fails")

    def tamper(self, device: Device) -> tuple[str, str]:
        self.node.apply(device, {"mode": "unfair"})
        return "mode", "unfair"

    def remove_driver(self) -> None:
        (self.node.directory / "driver").unlink()

    async def at_work(self, device: Device) -> int | None:
        return await self.backend.eraser.find_orphan(device)

    def _flag(self, device: Device, name: str) -> None:
        (self.node.of(device) / name).touch()


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[Toys]:
    directory, children = make(tmp_path / "toys"), Children()
    async with toy_backend(directory, children) as backend:
        device, other = await backend.inventory.devices()
        yield Toys(backend, ToyNode(directory), device, other)
    assert children.pids() == frozenset()


class TestToyBackend(BackendContract):
    """The contract, over plain files."""


class TestToyDiagnostics(DiagnosticsContract):
    """The contract, over plain files."""


# --- the service ------------------------------------------------------------------------------------------------------


class ToyStage(Playground):
    """The shipped plugin and an emulated kubelet, with a service that has the toy backend."""

    def __init__(self) -> None:
        super().__init__(devices=2, policy=QUICK)
        self.node = ToyNode(make(self.directory / "toys"))
        words = list(self.service.arguments)
        words[words.index("sim")] = "toy"
        del words[(at := words.index("--sim-dir")) : at + 2]
        self.service = Daemon(words, self.service.log, program=(MODULE, str(self.node.directory)))

    async def device(self, name: str, state: str) -> Mapping[str, Any]:
        """Return the device, once its hygiene or its health is ``state``."""
        await self.wait_for_devices(
            lambda devices: any(each.id == name and state in (each.hygiene, each.health) for each in devices), SOON
        )
        answer = json.loads((await self.run_command("device", name, "-o", "json")).stdout)
        return dict(answer)


async def test_pods_get_toy_devices_from_service_and_plugin_like_any_device() -> None:
    async with ToyStage() as stage:
        await stage.start_daemons(SOON)
        await stage.wait_until_clean(SOON)
        writes = "printf secret 1<> $(echo run/toys/*) && echo written && exec sleep 600"
        pod = await stage.kubelet.run(gpu_pod_spec("p", "team-a", ("sh", "-c", writes)))
        await pod.wait(lambda _: "written" in pod.read_log("main"), SOON)
        (name,) = pod.device_ids
        memory = stage.node.directory / name / "memory"
        assert memory.read_bytes().startswith(b"secret")
        await stage.device(name, "in-use")
        await stage.kubelet.delete(pod, grace=0)
        await stage.device(name, "clean")
        assert memory.read_bytes() == bytes(1024 * 1024)


async def test_toy_device_faults_are_described_with_the_backends_own_messages() -> None:
    async with ToyStage() as stage:
        await stage.start_daemons(SOON)
        await stage.wait_until_clean(SOON)
        (stage.node.directory / "toy-a" / "worn-out").write_text("7 years")
        (stage.node.directory / "toy-b" / "errors").write_text("7\n")
        worn, faulty = await stage.device("toy-a", "suspect"), await stage.device("toy-b", "suspect")
        assert worn["cause"]["message"] == "worn-out (7 years): it was used too often."
        assert faulty["cause"]["code"] == "fault-7"
        assert faulty["cause"]["message"] == "Fault 7 was reported: it is not in the table of error codes."
