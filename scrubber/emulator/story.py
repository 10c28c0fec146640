"""The story of ``scrubber demo``: seven scenes on a node whose bytes, processes and kubelet protocol are real.

Promise: every sentence that begins with a tick was checked when it was printed; one that did not hold ends the demo
with a non-zero status and says where the logs are.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import statistics
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from scrubber.emulator.interrupts import ended_once
from scrubber.emulator.pods import ContainerState, Phase, Pod, PodSpec, RestartPolicy
from scrubber.emulator.stage import RESOURCE, Stage, gpu_pod, tenant
from scrubber.emulator.staying import serve_metrics, until_interrupted
from scrubber.emulator.telling import Teller, Unheard
from scrubber.emulator.ungated import UngatedPlugin, devices_below

__all__ = ["main"]

SECRET = "team-a's model weights"
_DYING = 20.0
"""Seconds for which a pod that was deleted by force would live on; it is ended as soon as the next one was seen beside it."""


class Unexpected(Exception):
    """An expectation of the story did not hold."""


def main(*, keep: bool = False, directory: Path | None = None, stay: bool = False) -> int:
    """Tell the story; 0 if every expectation held, else 1, or 128 and the number of the signal that broke it off.

    A terminal that was closed, or a pipe that nobody reads any more, breaks it off as SIGHUP does.

    Args:
        keep: leave the logs and the ledger where they are, and say where.
        directory: where to put them; a temporary directory when None.
        stay: leave the node running afterwards, until SIGINT, SIGTERM or SIGHUP, with both daemons' metrics on loopback.
    """
    return asyncio.run(_tell(Teller(highlight=False, soft_wrap=True), keep=keep, directory=directory, stay=stay))


async def _tell(console: Console, *, keep: bool, directory: Path | None, stay: bool) -> int:
    with ended_once() as interruption:
        stage = Stage(directory=directory, keep=True)
        if stay:
            serve_metrics(stage)
        began = time.monotonic()
        status = 0
        last_words = []
        try:
            async with stage:
                try:
                    await Story(stage, console).run()
                    console.print(f"\nEvery expectation held, in {time.monotonic() - began:.0f} s.")
                    if stay:
                        await until_interrupted(stage, console)
                finally:
                    interruption.over = True
        except (Unexpected, TimeoutError, RuntimeError) as failure:
            last_words.append(f"\n[bold red]The story broke:[/] {escape(str(failure))}")
            status, keep = 1, True
        except Unheard:
            status = 128 + signal.SIGHUP
        except asyncio.CancelledError:
            if interruption.by is None:
                raise
            last_words.append("\nThe story was broken off; the node was taken down.")
            status = 128 + interruption.by
        if keep:
            last_words.append(f"Logs and ledger: {stage.directory}")
        elif directory is None:
            stage.remove()
        with suppress(Unheard):
            for each in last_words:
                console.print(each)
        return status


class Story:
    """The scenes, in order. Each leaves the node as it found it: four devices, no pods."""

    def __init__(self, stage: Stage, console: Console) -> None:
        self._stage = stage
        self._kubelet = stage.kubelet
        self._console = console
        self._pods = 0

    async def run(self) -> None:
        self._console.print(
            f"A node with four simulated GPUs of 256 MiB, a kubelet (emulated, with the real protocol), two tenants.\n"
            f"[dim]{self._stage.directory} · memory files in {self._stage.sim}[/]"
        )
        await self._without_the_service()
        self._scene("With the service: scrubber serve, scrubber plugin")
        await self._stage.start_daemons()
        await self._stage.all_clean()
        self._tick("both daemons are up; every device was scrubbed once, because nobody watched it before")
        await self._same_pods_with_the_service()
        await self._leftover_child()
        await self._forced_delete()
        await self._restart()
        await self._fault_and_back()
        await self._killed_in_mid_scrub()
        await self._closing_table()

    # -- scenes ----------------------------------------------------------------------------------------------------

    async def _without_the_service(self) -> None:
        self._scene("1. Without the service: a device plugin as they are")
        async with UngatedPlugin(self._kubelet.root, devices_below(self._stage.sim), resource_name=RESOURCE):
            await self._kubelet.changed(lambda kubelet: kubelet.allocatable(RESOURCE) == 4, 20)
            async with self._only_one_device():
                found = await self._secret_then_reader()
                self._expect(SECRET in found, f"team-b's pod reads what team-a's killed pod left: {found[:40]!r}")
                first = await self._running(gpu_pod("a", "team-a", tenant("--write", SECRET, "--hold", "forever")))
                await self._kubelet.delete(first, force=True, dying_for=_DYING)
                second = await self._running(gpu_pod("b", "team-b", tenant("--hold", "forever")))
                beside = self._stage.processes_of(first)
                self._expect(
                    bool(beside), "after a forced delete team-b's container starts beside team-a's, on the same GPU"
                )
                for pid in beside:
                    os.kill(pid, signal.SIGKILL)
                await self._kubelet.delete(second, grace=0)

    async def _same_pods_with_the_service(self) -> None:
        self._scene("2. The same pods, with the service")
        async with self._only_one_device():
            found = await self._secret_then_reader()
            self._expect(found == "", "team-b's pod finds nothing but zeros")
            last = await self._newest("certificate.issued")
            certificate = last["certificate"]
            self._console.print(f"    certificate {certificate['id']}", style="cyan")
            for line in certificate["covered"]:
                self._console.print(f"      proved       {line}", style="cyan")
            for line in certificate["not_covered"]:
                self._console.print(f"      not covered  {line}", style="dim")

    async def _leftover_child(self) -> None:
        self._scene("3. A child outlives its pod and holds the device")
        async with self._only_one_device():
            argv = tenant("--write", SECRET, "--leave-child", "--hold", "1.5")
            pod = await self._running(gpu_pod("a", "team-a", argv, leave_children=True))
            await pod.wait(lambda status: status.phase.terminal, 20)
            left = self._stage.processes_of(pod)
            self._expect(bool(left), f"the pod has ended; its child (PID {left[0]}) still holds the GPU")
            await self._kubelet.delete(pod, grace=0)
            found = await self._read_back()
            self._expect(found == "", "the next tenant finds nothing but zeros")
            self._expect(not self._stage.processes_of(pod), "the child was proved a leftover and ended")
            ended = await self._newest("leftover.ended")
            self._expect(
                str(ended["fields"]["pid"]) == str(left[0]), f"the audit names it: PID {ended['fields']['pid']}"
            )

    async def _forced_delete(self) -> None:
        self._scene("4. A forced delete: the pod is gone, its process lives on")
        async with self._only_one_device():
            first = await self._running(gpu_pod("a", "team-a", tenant("--write", SECRET, "--hold", "forever")))
            await self._kubelet.delete(first, force=True, dying_for=1.5)
            began = time.monotonic()
            pod = await self._admitted(gpu_pod("b", "team-b", tenant("--read", "--hold", "0")))
            await pod.wait(lambda status: status.containers["main"].state is not ContainerState.WAITING, 40)
            waited = time.monotonic() - began
            self._expect(not self._stage.processes_of(first), f"team-b started after team-a's end ({waited:.1f} s)")
            await pod.wait(Phase.SUCCEEDED, 30)
            self._expect(_found(pod) == "", "and found nothing but zeros")
            await self._kubelet.delete(pod, grace=0)

    async def _restart(self) -> None:
        self._scene("5. The same container restarts")
        argv = tenant("--write", "its own work", "--hold", "1.0")
        pod = await self._admitted(gpu_pod("a", "team-a", argv, restart=RestartPolicy.ALWAYS))
        await pod.wait(lambda status: status.containers["main"].restarts >= 2, 30)
        starts = [
            event for event in self._kubelet.events if event.name == "PreStartContainer" and event.pod_uid == pod.uid
        ]
        times = [event.duration * 1000 for event in starts if event.outcome == "OK"][1:]
        rows = [row["fields"] for row in await self._history() if row["name"] == "handover.granted"]
        again = [row for row in rows if row["pod"] == "a" and row["kind"] == "same-container"]
        by_exception = all((row["exception"], row["path"]) == ("same-container", "fast") for row in again)
        self._expect(len(again) >= 2 and by_exception, "by the policy's exception, on checks alone: the fast path")
        self._expect(0 < max(times) < 1000, f"the gate took {', '.join(f'{each:.1f} ms' for each in times)}")
        await self._kubelet.delete(pod, grace=0)

    async def _fault_and_back(self) -> None:
        self._scene("6. XID 95 on one device")
        await self._stage.all_clean()
        began = time.monotonic()
        await self._stage.command("sim", "fault", "--dir", str(self._stage.sim), "--device", "0", "--xid", "95")
        await self._kubelet.changed(lambda kubelet: kubelet.allocatable(RESOURCE) == 3, 10)
        self._tick("the kubelet's allocatable went from 4 to 3")
        sick = next(device for device in (await self._stage.read.devices()).devices if device.index == "0")
        self._console.print(f"    {sick.health}: {sick.cause.sentence}", style="yellow")
        pods = [await self._running(gpu_pod(f"c{n}", "team-c", tenant("--hold", "forever"))) for n in range(3)]
        used = {device for pod in pods for device in pod.device_ids}
        self._expect(sick.id not in used, "three pods start, on the other three devices")
        for pod in pods:
            await self._kubelet.delete(pod, grace=0)
        await self._kubelet.changed(lambda kubelet: kubelet.allocatable(RESOURCE) == 4, 40)
        self._tick(f"reset, scrubbed, on probation, and back: 4 again after {time.monotonic() - began:.1f} s, unaided")

    async def _killed_in_mid_scrub(self) -> None:
        self._scene("7. kill -9 of the service in mid-scrub")
        stage = self._stage
        async with self._only_one_device() as device:
            pod = await self._running(gpu_pod("a", "team-a", tenant("--write", SECRET, "--hold", "forever")))
            await stage.command("sim", "fault", "--dir", str(stage.sim), "--device", device, "--slow-clear", "20")
            await self._kubelet.delete(pod, grace=0)
            await stage.devices_are(lambda all_of: any(each.state == "scrubbing" for each in all_of), 20)
            children = await stage.erasing(stage.service, 10)
            await stage.service.kill()
            self._tick("killed while the device was being cleared")
            waiting = await self._admitted(gpu_pod("b", "team-b", tenant("--read", "--hold", "0")))
            await waiting.wait(lambda status: status.containers["main"].reason == "CreateContainerConfigError", 30)
            said = waiting.status.containers["main"].message
            self._tick("team-b's start is refused meanwhile")
            self._console.print(f"    {said}", style="yellow")
            await stage.command("sim", "clear", "--dir", str(stage.sim), "--device", device)
            await stage.service.start()
            await waiting.wait(Phase.SUCCEEDED, 40)
            self._expect(not stage.alive(children), "the eraser that it left behind is over")
            self._expect(_found(waiting) == "", "the service came back, scrubbed again, and team-b found only zeros")
            await self._kubelet.delete(waiting, grace=0)

    async def _closing_table(self) -> None:
        rows = await self._history()
        granted = [row["fields"] for row in rows if row["name"] == "handover.granted"]
        table = Table(title="What was done", title_justify="left")
        table.add_column("hand-overs")
        for name in ("count", "median", "slowest"):
            table.add_column(name, justify="right")
        for path, meaning in (("fast", "on a certificate or the exception"), ("slow", "waited for a scrub or a pod")):
            times = [fields["seconds"] * 1000 for fields in granted if fields["path"] == path]
            if times:
                middle, slowest = f"{statistics.median(times):.1f} ms", f"{max(times):.1f} ms"
                table.add_row(f"{path} path: {meaning}", str(len(times)), middle, slowest)
        self._console.print()
        self._console.print(table)
        scrubs = [row["fields"] for row in rows if row["name"] == "scrub.finished"]
        passed = [fields for fields in scrubs if fields["outcome"] == "passed"]
        residue = sum(int(fields["residue_bytes"] or 0) for fields in passed)
        ended = sum(row["name"] == "leftover.ended" for row in rows)
        refused = sum(each.name == "PreStartContainer" and each.outcome != "OK" for each in self._kubelet.events)
        self._console.print(
            f"{len(passed)} scrubs passed · {residue / 2**20:.0f} MiB of residue found and cleared · "
            f"{ended} leftover(s) ended · {refused} start(s) refused, and tried again"
        )

    # -- acting ----------------------------------------------------------------------------------------------------

    @asynccontextmanager
    async def _only_one_device(self) -> AsyncIterator[str]:
        """Take every device but one, so that the pods inside follow each other on that one; its index."""
        await self._kubelet.changed(lambda kubelet: kubelet.allocatable(RESOURCE) == 4, 30)
        others = await self._running(gpu_pod("others", "team-z", tenant("--hold", "forever"), gpus=3))
        taken = {json.loads(path.read_text())["id"]: path.parent.name for path in self._stage.device_files()}
        (free,) = taken.keys() - set(others.device_ids)
        yield taken[free]
        await self._kubelet.delete(others, grace=0)

    async def _secret_then_reader(self) -> str:
        """Tenant A writes a secret all over the device and is killed; what tenant B finds on it."""
        pod = await self._running(gpu_pod("a", "team-a", tenant("--write", SECRET, "--hold", "forever")))
        await self._kubelet.delete(pod, grace=0)
        return await self._read_back()

    async def _read_back(self) -> str:
        pod = await self._admitted(gpu_pod("b", "team-b", tenant("--read")))
        await pod.wait(Phase.SUCCEEDED, 40)
        found = _found(pod)
        await self._kubelet.delete(pod, grace=0)
        return found

    async def _admitted(self, spec: PodSpec) -> Pod:
        pod = await self._kubelet.run(spec)
        if not pod.admitted:
            raise Unexpected(f"{pod.full_name} was not admitted: {pod.describe()}")
        return pod

    async def _running(self, spec: PodSpec) -> Pod:
        """A pod whose tenant has done what it was told to do first, and lives."""
        pod = await self._admitted(spec)
        await pod.wait(lambda status: status.containers["main"].state is not ContainerState.WAITING, 40)
        await pod.wait(lambda _: "ready" in pod.log("main"), 40)
        return pod

    async def _history(self) -> list[dict[str, Any]]:
        done = await self._stage.command("history", "--limit", "1000", "-o", "json")
        if done.status != 0:
            raise Unexpected(f"scrubber history: {done.err}")
        rows: list[dict[str, Any]] = json.loads(done.out)["items"]
        return rows

    async def _newest(self, name: str) -> dict[str, Any]:
        """The newest event of that name in the audit."""
        return next(row for row in await self._history() if row["name"] == name)

    # -- telling ---------------------------------------------------------------------------------------------------

    def _scene(self, title: str) -> None:
        self._console.print(f"\n[bold]{escape(title)}[/]")

    def _tick(self, sentence: str) -> None:
        self._console.print(f"  [green]✓[/] {escape(sentence)}")

    def _expect(self, held: bool, sentence: str) -> None:
        if not held:
            raise Unexpected(f"this did not hold: {sentence}")
        self._tick(sentence)


def _found(pod: Pod) -> str:
    """What the tenant said it read; the empty text for nothing but zeros."""
    for line in reversed(pod.log("main").splitlines()):
        if line.startswith("{"):
            said = json.loads(line)
            if "residue_bytes" in said:
                return str(said["found"]) if said["residue_bytes"] else ""
    raise Unexpected(f"{pod.full_name} said nothing about what it read: {pod.log('main')!r}")
