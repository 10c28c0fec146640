"""The scenario of ``scrubber demo``: seven scenes on a node whose bytes, processes and kubelet protocol are real.

Promise: every line with a tick was checked when it was printed; a check that fails ends the demo with a non-zero status
and reports where the logs are.
"""

from __future__ import annotations

import asyncio
import json
import os
import shlex
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

from scrubber.emulator.console import DemoConsole, OutputClosed
from scrubber.emulator.interrupts import cancel_on_first_signal
from scrubber.emulator.playground import LONGEST_WAIT, RESOURCE, Daemon, Playground, gpu_pod_spec, tenant_argv
from scrubber.emulator.pods import ContainerState, EmulatedPod, PodPhase, PodSpec, RestartPolicy
from scrubber.emulator.ungated_plugin import UngatedPlugin, read_sim_devices

__all__ = ["main"]

SECRET = "team-a's model weights"
_LINGER_SECONDS = 20.0
"""Seconds for which a pod that was force-deleted would live on.

It is killed as soon as the next pod was seen beside it.
"""


class ExpectationFailed(Exception):
    """An expectation of the scenario did not hold."""


def main(*, keep: bool = False, directory: Path | None = None, stay: bool = False) -> int:
    """Run the scenario.

    Return 0 if every expectation held, else 1, or 128 plus the number of the signal that interrupted it.

    A closed terminal, or a pipe without a reader, interrupts it as SIGHUP does.

    Args:
        keep: leave the logs and the ledger where they are, and report where.
        directory: where to put them; a temporary directory when None.
        stay: leave the node running afterwards, until SIGINT, SIGTERM or SIGHUP, with both daemons' metrics on
            loopback.
    """
    return asyncio.run(
        _run_demo(DemoConsole(highlight=False, soft_wrap=True), keep=keep, directory=directory, stay=stay)
    )


async def _run_demo(console: Console, *, keep: bool, directory: Path | None, stay: bool) -> int:
    with cancel_on_first_signal() as interruption:
        stage = Playground(directory=directory, keep=True)
        if stay:
            _enable_metrics(stage)
        began = time.monotonic()
        status = 0
        last_words = []
        try:
            async with stage:
                try:
                    await DemoScenario(stage, console).run()
                    console.print(f"\nAll expectations were met, in {time.monotonic() - began:.0f} s.")
                    if stay:
                        await _wait_for_interrupt(stage, console)
                finally:
                    interruption.cleaning_up = True
        except (ExpectationFailed, TimeoutError, RuntimeError) as failure:
            last_words.append(f"\n[bold red]The scenario failed:[/] {escape(str(failure))}")
            status, keep = 1, True
        except OutputClosed:
            status = 128 + signal.SIGHUP
        except asyncio.CancelledError:
            if interruption.received is None:
                raise
            last_words.append("\nThe scenario was interrupted; the node was removed.")
            status = 128 + interruption.received
        if keep:
            last_words.append(f"Logs and ledger: {stage.directory}")
        elif directory is None:
            stage.remove()
        with suppress(OutputClosed):
            for each in last_words:
                console.print(each)
        return status


# -- stay: the node is left as it is after the scenario, and its metrics can be scraped on loopback --------------------


def _enable_metrics(stage: Playground) -> None:
    """Have both daemons serve metrics, each on a free port of loopback. Must be called before they are started."""
    for daemon in (stage.service, stage.plugin):
        daemon.arguments = (*daemon.arguments, "--metrics-address", "127.0.0.1:0")


async def _wait_for_interrupt(stage: Playground, console: Console) -> None:
    """Print where the metrics are and what to try, then wait to be cancelled, which counts as a normal end."""
    sockets, node = shlex.quote(str(stage.socket_dir)), shlex.quote(str(stage.sim_dir))
    console.print("\n[bold]The node keeps running until Ctrl-C[/]")
    for words, what in (
        ("service's metrics", f"http://{_metrics_address(stage.service)}/metrics"),
        ("plugin's metrics", f"http://{_metrics_address(stage.plugin)}/metrics"),
        ("query the service", f"scrubber devices --socket-dir {sockets}"),
        ("inject a fault", f"scrubber sim fault --dir {node} --device 0 --xid 95"),
    ):
        console.print(f"  {words:<19}{escape(what)}")
    waiting = asyncio.current_task()
    assert waiting is not None
    with suppress(asyncio.CancelledError):
        await asyncio.Event().wait()
    waiting.uncancel()


def _metrics_address(daemon: Daemon) -> str:
    """Return ``HOST:PORT`` from the log of the last start, because the system chose the port.

    Raises:
        RuntimeError: the daemon serves no metrics.
    """
    lines = [json.loads(line) for line in daemon.log.read_text().splitlines() if '"metrics.serving"' in line]
    if not lines:
        raise RuntimeError(f"no metrics are served; see {daemon.log}")
    return str(lines[-1]["address"])


class DemoScenario:
    """The scenes, in order. Each leaves the node as it found it: four devices, no pods."""

    def __init__(self, stage: Playground, console: Console) -> None:
        self._playground = stage
        self._kubelet = stage.kubelet
        self._console = console
        self._pods = 0

    async def run(self) -> None:
        self._console.print(
            "A node with four simulated GPUs of 256 MiB, a kubelet (emulated, with the real protocol), and "
            f"two tenants.\n[dim]{self._playground.directory} · memory files in {self._playground.sim_dir}[/]"
        )
        await self._without_the_service()
        self._print_heading("With the service: scrubber serve, scrubber plugin")
        await self._playground.start_daemons()
        await self._playground.wait_until_clean()
        self._print_check("both daemons are running; every device was scrubbed once, because it was not watched before")
        await self._same_pods_with_the_service()
        await self._leftover_child()
        await self._forced_delete()
        await self._restart()
        await self._fault_and_recovery()
        await self._kill_service_during_scrub()
        await self._closing_table()

    # -- scenes ----------------------------------------------------------------------------------------------------

    async def _without_the_service(self) -> None:
        self._print_heading("1. Without the scrub service: an ordinary device plugin")
        async with UngatedPlugin(
            self._kubelet.root, read_sim_devices(self._playground.sim_dir), resource_name=RESOURCE
        ):
            await self._wait_for_allocatable(4)
            async with self._only_one_device():
                found = await self._write_secret_and_read_back()
                self._expect(SECRET in found, f"team-b's pod reads what team-a's killed pod left: {found[:40]!r}")
                first = await self._run_ready_pod(
                    gpu_pod_spec("a", "team-a", tenant_argv("--write", SECRET, "--hold", "forever"))
                )
                await self._kubelet.delete(first, force=True, linger=_LINGER_SECONDS)
                second = await self._run_ready_pod(gpu_pod_spec("b", "team-b", tenant_argv("--hold", "forever")))
                beside = self._playground.pod_processes(first)
                self._expect(
                    bool(beside), "after a forced delete team-b's container starts beside team-a's, on the same GPU"
                )
                for pid in beside:
                    os.kill(pid, signal.SIGKILL)
                await self._kubelet.delete(second, grace=0)

    async def _same_pods_with_the_service(self) -> None:
        self._print_heading("2. The same pods, with the service")
        async with self._only_one_device():
            found = await self._write_secret_and_read_back()
            self._expect(found == "", "team-b's pod finds nothing but zeros")
            last = await self._newest_event("certificate.issued")
            certificate = last["certificate"]
            self._console.print(f"    certificate {certificate['metadata']['name']}", style="cyan")
            for line in certificate["covered"]:
                self._console.print(f"      proved       {line}", style="cyan")
            for line in certificate["notCovered"]:
                self._console.print(f"      not covered  {line}", style="dim")

    async def _leftover_child(self) -> None:
        self._print_heading("3. A child process outlives its pod and holds the device")
        async with self._only_one_device():
            argv = tenant_argv("--write", SECRET, "--leave-leftover", "--hold", "1.5")
            pod = await self._run_ready_pod(gpu_pod_spec("a", "team-a", argv, leave_children=True))
            await pod.wait(lambda status: status.phase.terminal, LONGEST_WAIT, "its end")
            left = self._playground.pod_processes(pod)
            self._expect(bool(left), f"the pod has ended; its child (PID {left[0]}) still holds the GPU")
            await self._kubelet.delete(pod, grace=0)
            found = await self._read_back()
            self._expect(found == "", "the next tenant finds nothing but zeros")
            self._expect(not self._playground.pod_processes(pod), "the child was proved a leftover and killed")
            ended = await self._newest_event("leftover.process.killed")
            self._expect(
                str(ended["fields"]["pid"]) == str(left[0]), f"the audit log names it: PID {ended['fields']['pid']}"
            )

    async def _forced_delete(self) -> None:
        self._print_heading("4. Force deletion: the pod is gone, its process still runs")
        async with self._only_one_device():
            first = await self._run_ready_pod(
                gpu_pod_spec("a", "team-a", tenant_argv("--write", SECRET, "--hold", "forever"))
            )
            await self._kubelet.delete(first, force=True, linger=1.5)
            began = time.monotonic()
            pod = await self._run_admitted_pod(gpu_pod_spec("b", "team-b", tenant_argv("--read", "--hold", "0")))
            await self._wait_for_container(pod)
            waited = time.monotonic() - began
            self._expect(
                not self._playground.pod_processes(first), f"team-b started after team-a's end ({waited:.1f} s)"
            )
            await pod.wait(PodPhase.SUCCEEDED, LONGEST_WAIT)
            self._expect(_text_read(pod) == "", "and found nothing but zeros")
            await self._kubelet.delete(pod, grace=0)

    async def _restart(self) -> None:
        self._print_heading("5. The same container restarts")
        argv = tenant_argv("--write", "its own work", "--hold", "1.0")
        pod = await self._run_admitted_pod(gpu_pod_spec("a", "team-a", argv, restart=RestartPolicy.ALWAYS))
        await pod.wait(lambda status: status.containers["main"].restarts >= 2, LONGEST_WAIT, "its second restart")
        starts = [
            event for event in self._kubelet.events if event.name == "PreStartContainer" and event.pod_uid == pod.uid
        ]
        times = [event.duration * 1000 for event in starts if event.outcome == "OK"][1:]
        rows = [row["fields"] for row in await self._history() if row["event"] == "handover.granted"]
        again = [row for row in rows if row["pod"] == "a" and row["kind"] == "same-container"]
        by_exception = all((row["exception"], row["path"]) == ("same-container", "fast") for row in again)
        self._expect(len(again) >= 2 and by_exception, "by the policy's exception, on checks alone: the fast path")
        self._expect(bool(times), f"the gate took {', '.join(f'{each:.1f} ms' for each in times)}")
        await self._kubelet.delete(pod, grace=0)

    async def _fault_and_recovery(self) -> None:
        self._print_heading("6. XID 95 on one device")
        await self._playground.wait_until_clean()
        began = time.monotonic()
        await self._playground.run_command(
            "sim", "fault", "--dir", str(self._playground.sim_dir), "--device", "0", "--xid", "95"
        )
        await self._wait_for_allocatable(3)
        self._print_check("the kubelet's allocatable went from 4 to 3")
        # The device is withheld at once; the check that quarantines it follows.
        devices = await self._playground.wait_for_devices(
            lambda all_of: any(each.index == "0" and each.cause.message for each in all_of),
            LONGEST_WAIT,
            "device 0 is quarantined",
        )
        sick = next(device for device in devices if device.index == "0")
        self._console.print(f"    {sick.health}: {sick.cause.message}", style="yellow")
        pods = [
            await self._run_ready_pod(gpu_pod_spec(f"c{n}", "team-c", tenant_argv("--hold", "forever")))
            for n in range(3)
        ]
        used = {device for pod in pods for device in pod.device_ids}
        self._expect(sick.id not in used, "three pods start, on the other three devices")
        for pod in pods:
            await self._kubelet.delete(pod, grace=0)
        await self._wait_for_allocatable(4)
        self._print_check(
            f"reset, scrubbed, on probation, and back: 4 again after {time.monotonic() - began:.1f} s, "
            "without an operator"
        )

    async def _kill_service_during_scrub(self) -> None:
        self._print_heading("7. kill -9 of the service during a scrub")
        stage = self._playground
        async with self._only_one_device() as device:
            pod = await self._run_ready_pod(
                gpu_pod_spec("a", "team-a", tenant_argv("--write", SECRET, "--hold", "forever"))
            )
            await stage.run_command(
                "sim", "fault", "--dir", str(stage.sim_dir), "--device", device, "--slow-clear", "20"
            )
            await self._kubelet.delete(pod, grace=0)
            await stage.wait_for_devices(
                lambda all_of: any(each.state == "scrubbing" for each in all_of), LONGEST_WAIT, "a device is scrubbed"
            )
            children = await stage.wait_for_eraser(stage.service, LONGEST_WAIT)
            await stage.service.kill()
            self._print_check("killed while the device was being cleared")
            waiting = await self._run_admitted_pod(gpu_pod_spec("b", "team-b", tenant_argv("--read", "--hold", "0")))
            await waiting.wait(
                lambda status: status.containers["main"].reason == "CreateContainerConfigError",
                LONGEST_WAIT,
                "a refused start",
            )
            message = waiting.status.containers["main"].message
            self._print_check("team-b's start is refused meanwhile")
            self._console.print(f"    {message}", style="yellow")
            await stage.run_command("sim", "clear", "--dir", str(stage.sim_dir), "--device", device)
            await stage.service.start()
            await waiting.wait(PodPhase.SUCCEEDED, LONGEST_WAIT)
            self._expect(not stage.running_processes(children), "the eraser that it left behind has ended")
            self._expect(
                _text_read(waiting) == "", "the service restarted and scrubbed again, and team-b found only zeros"
            )
            await self._kubelet.delete(waiting, grace=0)

    async def _closing_table(self) -> None:
        rows = await self._history()
        granted = [row["fields"] for row in rows if row["event"] == "handover.granted"]
        table = Table(title="Summary", title_justify="left")
        table.add_column("hand-overs")
        for name in ("count", "median", "slowest"):
            table.add_column(name, justify="right")
        for path, meaning in (("fast", "on a certificate or the exception"), ("slow", "waited for a scrub or a pod")):
            times = [fields["duration_seconds"] * 1000 for fields in granted if fields["path"] == path]
            if times:
                middle, slowest = f"{statistics.median(times):.1f} ms", f"{max(times):.1f} ms"
                table.add_row(f"{path} path: {meaning}", str(len(times)), middle, slowest)
        self._console.print()
        self._console.print(table)
        scrubs = [row["fields"] for row in rows if row["event"] == "scrub.finished"]
        passed = [fields for fields in scrubs if fields["outcome"] == "passed"]
        residue = sum(int(fields["residue_bytes"] or 0) for fields in passed)
        ended = sum(row["event"] == "leftover.process.killed" for row in rows)
        refused = sum(each.name == "PreStartContainer" and each.outcome != "OK" for each in self._kubelet.events)
        self._console.print(
            f"{len(passed)} scrubs passed · {residue / 2**20:.0f} MiB of residue found and cleared · {ended} "
            f"leftover(s) killed · {refused} start(s) refused and retried"
        )

    # -- actions ---------------------------------------------------------------------------------------------------

    @asynccontextmanager
    async def _only_one_device(self) -> AsyncIterator[str]:
        """Occupy every device but one, so that the pods inside follow each other on that one; yield its index."""
        await self._wait_for_allocatable(4)
        others = await self._run_ready_pod(gpu_pod_spec("others", "team-z", tenant_argv("--hold", "forever"), gpus=3))
        taken = {json.loads(path.read_text())["id"]: path.parent.name for path in self._playground.device_files()}
        (free,) = taken.keys() - set(others.device_ids)
        yield taken[free]
        await self._kubelet.delete(others, grace=0)

    async def _write_secret_and_read_back(self) -> str:
        """Let tenant A write a secret all over the device and kill it; return what tenant B finds on the device."""
        pod = await self._run_ready_pod(
            gpu_pod_spec("a", "team-a", tenant_argv("--write", SECRET, "--hold", "forever"))
        )
        await self._kubelet.delete(pod, grace=0)
        return await self._read_back()

    async def _read_back(self) -> str:
        pod = await self._run_admitted_pod(gpu_pod_spec("b", "team-b", tenant_argv("--read")))
        await pod.wait(PodPhase.SUCCEEDED, LONGEST_WAIT)
        found = _text_read(pod)
        await self._kubelet.delete(pod, grace=0)
        return found

    async def _run_admitted_pod(self, spec: PodSpec) -> EmulatedPod:
        pod = await self._kubelet.run(spec)
        if not pod.admitted:
            raise ExpectationFailed(f"{pod.full_name} was not admitted: {pod.describe()}")
        return pod

    async def _run_ready_pod(self, spec: PodSpec) -> EmulatedPod:
        """Return a pod whose tenant has finished its first actions, and lives."""
        pod = await self._run_admitted_pod(spec)
        await self._wait_for_container(pod)
        await pod.wait(lambda _: "ready" in pod.read_log("main"), LONGEST_WAIT, "the end of its tenant's first actions")
        return pod

    async def _wait_for_container(self, pod: EmulatedPod) -> None:
        await pod.wait(
            lambda status: status.containers["main"].state is not ContainerState.WAITING,
            LONGEST_WAIT,
            "the start of its container",
        )

    async def _wait_for_allocatable(self, count: int) -> None:
        await self._kubelet.wait_for_allocatable(RESOURCE, count, LONGEST_WAIT)

    async def _history(self) -> list[dict[str, Any]]:
        done = await self._playground.run_command("history", "--limit", "1000", "-o", "json")
        if done.returncode != 0:
            raise ExpectationFailed(f"scrubber history: {done.stderr}")
        rows: list[dict[str, Any]] = json.loads(done.stdout)["items"]
        return rows

    async def _newest_event(self, name: str) -> dict[str, Any]:
        """Return the newest event of that name in the audit log."""
        return next(row for row in await self._history() if row["event"] == name)

    # -- output ----------------------------------------------------------------------------------------------------

    def _print_heading(self, title: str) -> None:
        self._console.print(f"\n[bold]{escape(title)}[/]")

    def _print_check(self, message: str) -> None:
        self._console.print(f"  [green]✓[/] {escape(message)}")

    def _expect(self, held: bool, message: str) -> None:
        if not held:
            raise ExpectationFailed(f"expectation not met: {message}")
        self._print_check(message)


def _text_read(pod: EmulatedPod) -> str:
    """Return the text that the tenant reports as read; the empty text for nothing but zeros."""
    for line in reversed(pod.read_log("main").splitlines()):
        if line.startswith("{"):
            record = json.loads(line)
            if "residue_bytes" in record:
                return str(record["found"]) if record["residue_bytes"] else ""
    raise ExpectationFailed(f"{pod.full_name} did not report what it read: {pod.read_log('main')!r}")
