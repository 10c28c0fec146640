"""What the scenes of the demo are made of: pods of tenants, expectations, and lines of output.

Promise: a pod is created, read and ended in the same way whether it gets its devices from the device plugin or by a claim.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

from rich.console import Console
from rich.markup import escape

from scrubber.emulator.playground import LONGEST_WAIT, RESOURCE, Playground, tenant_argv
from scrubber.emulator.pods import ContainerState, EmulatedPod, PodPhase, PodSpec
from scrubber.emulator.ungated_driver import UngatedDriver
from scrubber.emulator.ungated_plugin import UngatedPlugin, read_sim_devices

__all__ = ["SECRET", "DemoStage", "ExpectationFailed", "text_read"]

SECRET = "team-a's model weights"


class ExpectationFailed(Exception):
    """An expectation of the scenario did not hold."""


class DemoStage:
    """The node of the demo and its console."""

    def __init__(self, playground: Playground, console: Console) -> None:
        self.playground = playground
        self.console = console

    # -- actions ---------------------------------------------------------------------------------------------------

    def offer_without_service(self) -> AbstractAsyncContextManager[object]:
        """Offer all devices without the scrub service, as an ordinary plugin or driver does."""
        playground, devices = self.playground, read_sim_devices(self.playground.sim_dir)
        if playground.cluster is not None:
            return UngatedDriver(playground.kubelet, playground.cluster.api, devices)
        return UngatedPlugin(playground.kubelet.root, devices, resource_name=RESOURCE)

    @asynccontextmanager
    async def only_one_device(self) -> AsyncIterator[str]:
        """Occupy every device but one, so that the pods inside follow each other on that one; yield its index."""
        await self.wait_for_available(4)
        argv = tenant_argv("--hold", "forever")
        others = await self.run_ready_pod(self.playground.gpu_pod("others", "team-z", argv, gpus=3))
        taken = {json.loads(path.read_text())["id"]: path.parent.name for path in self.playground.device_files()}
        (free,) = taken.keys() - set(self.playground.devices_of(others))
        yield taken[free]
        await self.playground.kubelet.delete(others, grace=0)

    def tenant(self, name: str, *options: str, **more: Any) -> PodSpec:
        """Return a pod that runs ``scrubber sim tenant OPTIONS``; the first letter of its name is its tenant's."""
        return self.playground.gpu_pod(name, f"team-{name[0]}", tenant_argv(*options), **more)

    async def write_secret_and_read_back(self) -> str:
        """Let tenant A write a secret all over the device and kill it; return what tenant B finds on the device."""
        pod = await self.run_ready_pod(self.tenant("a", "--write", SECRET, "--hold", "forever"))
        await self.playground.kubelet.delete(pod, grace=0)
        return await self.read_back()

    async def read_back(self) -> str:
        """Return what tenant B finds on the device."""
        pod = await self.run_admitted_pod(self.tenant("b", "--read"))
        await pod.wait(PodPhase.SUCCEEDED, LONGEST_WAIT)
        found = text_read(pod)
        await self.playground.kubelet.delete(pod, grace=0)
        return found

    async def run_admitted_pod(self, spec: PodSpec) -> EmulatedPod:
        """Return a pod that the kubelet admitted, or with claims one that was scheduled."""
        pod = await self.playground.run_pod(spec)
        if pod.admitted is False:
            raise ExpectationFailed(f"{pod.full_name} was not admitted: {pod.describe()}")
        return pod

    async def run_ready_pod(self, spec: PodSpec) -> EmulatedPod:
        """Return a pod whose tenant has finished its first actions, and lives."""
        pod = await self.run_admitted_pod(spec)
        await self.wait_for_container(pod)
        await pod.wait(lambda _: "ready" in pod.read_log("main"), LONGEST_WAIT, "the end of its tenant's first actions")
        return pod

    async def wait_for_container(self, pod: EmulatedPod) -> None:
        """Wait until the pod's container was started."""
        await pod.wait(
            lambda status: status.containers["main"].state is not ContainerState.WAITING,
            LONGEST_WAIT,
            "the start of its container",
        )

    async def wait_for_available(self, count: int) -> None:
        """Wait until pods can get exactly ``count`` devices, those that they have included."""
        await self.playground.wait_for_available(count, LONGEST_WAIT)

    async def history(self) -> list[dict[str, Any]]:
        """Return the events of the audit log, the newest first."""
        done = await self.playground.run_command("history", "--limit", "1000", "-o", "json")
        if done.returncode != 0:
            raise ExpectationFailed(f"scrubber history: {done.stderr}")
        rows: list[dict[str, Any]] = json.loads(done.stdout)["items"]
        return rows

    async def newest_event(self, name: str) -> dict[str, Any]:
        """Return the newest event of that name in the audit log."""
        return next(row for row in await self.history() if row["event"] == name)

    # -- output ----------------------------------------------------------------------------------------------------

    def print_heading(self, title: str) -> None:
        self.console.print(f"\n[bold]{escape(title)}[/]")

    def print_check(self, message: str) -> None:
        self.console.print(f"  [green]✓[/] {escape(message)}")

    def print_detail(self, message: str, style: str = "cyan") -> None:
        self.console.print(f"    {escape(message)}", style=style)

    def expect(self, held: bool, message: str) -> None:
        """Print what held.

        Raises:
            ExpectationFailed: it did not hold.
        """
        if not held:
            raise ExpectationFailed(f"expectation not met: {message}")
        self.print_check(message)


def text_read(pod: EmulatedPod) -> str:
    """Return the text that the tenant reports as read; the empty text for nothing but zeros.

    Raises:
        ExpectationFailed: it reported nothing.
    """
    for line in reversed(pod.read_log("main").splitlines()):
        if line.startswith("{"):
            record = json.loads(line)
            if "residue_bytes" in record:
                return str(record["found"]) if record["residue_bytes"] else ""
    raise ExpectationFailed(f"{pod.full_name} did not report what it read: {pod.read_log('main')!r}")
