"""The scenario of ``scrubber demo``: seven scenes on a node whose bytes, processes and kubelet protocol are real.

With ``--dra`` pods request devices by claims. The story is the same; scenes 5 and 7 differ, and others show more.

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
from contextlib import suppress
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

import scrubber
from scrubber.emulator.claim_cluster import DRIVER, ClaimCluster
from scrubber.emulator.cluster.resources import SLICES
from scrubber.emulator.console import DemoConsole, OutputClosed
from scrubber.emulator.demo_stage import SECRET, DemoStage, ExpectationFailed, text_read
from scrubber.emulator.events import KubeletEvent
from scrubber.emulator.interrupts import cancel_on_first_signal
from scrubber.emulator.playground import LONGEST_WAIT, Daemon, Playground
from scrubber.emulator.pods import ContainerState, EmulatedPod, PodPhase, RestartPolicy

__all__ = ["main"]

_LINGER_SECONDS = 20.0
"""Seconds for which a pod that was force-deleted would live on.

It is killed as soon as the next pod was seen beside it.
"""
_CLAIM_POLICY = """\
name: demo
limits:
  leftoverGracePeriod: 5s
"""
"""The default policy, but for the time after which a leftover process of a released claim is proved: there 30 s."""


_COMMAND_POLICY = """\
name: demo
memory:
  acceptClaims: true
"""
_PROGRAM = Path(scrubber.__file__).parents[1] / "deploy" / "backends" / "simulated-node"


def main(
    *, keep: bool = False, directory: Path | None = None, stay: bool = False, dra: bool = False, command: bool = False
) -> int:
    """Run the scenario.

    Return 0 if every expectation held, else 1, or 128 plus the number of the signal that interrupted it.

    A closed terminal, or a pipe without a reader, interrupts it as SIGHUP does.

    Args:
        keep: leave the logs and the ledger where they are, and report where.
        directory: where to put them; a temporary directory when None.
        stay: leave the node running afterwards, until SIGINT, SIGTERM or SIGHUP, with both daemons' metrics on
            loopback.
        dra: have pods request devices by claims.
        command: have the sample program of the source tree manage the devices.
    """
    console = DemoConsole(highlight=False, soft_wrap=True)
    return asyncio.run(_run_demo(console, keep=keep, directory=directory, stay=stay, dra=dra, command=command))


async def _run_demo(
    console: Console, *, keep: bool, directory: Path | None, stay: bool, dra: bool, command: bool
) -> int:
    with cancel_on_first_signal() as interruption:
        stage = (
            Playground(directory=directory, keep=True, memory="16MiB", watch_interval=1.0, program=_PROGRAM)
            if command
            else Playground(directory=directory, keep=True, dra=dra)
        )
        if dra or command:
            _use_policy(stage, _CLAIM_POLICY if dra else _COMMAND_POLICY)
        if stay:
            _enable_metrics(stage)
        began = time.monotonic()
        status = 0
        last_words = []
        try:
            async with stage:
                try:
                    await (CommandScenario if command else DemoScenario)(stage, console).run()
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


def _use_policy(stage: Playground, content: str) -> None:
    """Write a policy for the service, which uses the last one that it is given. Must be called before it is started."""
    policy = stage.directory / "policy.yaml"
    policy.write_text(content)
    stage.service.arguments = (*stage.service.arguments, "--policy", str(policy))


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
        ("service's metrics", f"http://{await _metrics_address(stage.service)}/metrics"),
        (
            f"{'plugin' if stage.cluster is None else 'driver'}'s metrics",
            f"http://{await _metrics_address(stage.plugin)}/metrics",
        ),
        ("query the service", f"scrubber devices --socket-dir {sockets}"),
        ("inject a fault", f"scrubber sim fault --dir {node} --device 0 --xid 95"),
    ):
        console.print(f"  {words:<19}{escape(what)}")
    if stage.cluster is not None:
        console.print(f"  {'read the slices':<19}{escape(stage.cluster.read_command(SLICES))}")
    waiting = asyncio.current_task()
    assert waiting is not None
    with suppress(asyncio.CancelledError):
        await asyncio.Event().wait()
    waiting.uncancel()


async def _metrics_address(daemon: Daemon) -> str:
    """Wait for ``HOST:PORT`` in the log of the last start: the system chose the port, after the devices were published.

    Raises:
        RuntimeError: the daemon serves no metrics within :data:`LONGEST_WAIT`.
    """
    with suppress(TimeoutError):
        async with asyncio.timeout(LONGEST_WAIT):
            while True:
                lines = [
                    json.loads(each) for each in daemon.log.read_text().splitlines() if '"metrics.serving"' in each
                ]
                if lines:
                    return str(lines[-1]["address"])
                await asyncio.sleep(0.05)
    raise RuntimeError(f"no metrics are served; see {daemon.log}")


class DemoScenario:
    """The scenes, in order. Each leaves the node as it found it: four devices, no pods."""

    def __init__(self, stage: Playground, console: Console) -> None:
        self._playground = stage
        self._kubelet = stage.kubelet
        self._console = console
        self._stage = DemoStage(stage, console)
        self._cluster = stage.cluster

    async def run(self) -> None:
        stage, cluster = self._stage, self._cluster
        emulated = "a kubelet" if cluster is None else "a kubelet, an API server and a scheduler"
        self._console.print(
            f"A node with four simulated GPUs of 64 MiB, {emulated} (emulated, with the real protocol), and two "
            f"tenants.\n[dim]{self._playground.directory} · memory files in {self._playground.sim_dir}[/]"
        )
        if cluster is not None:
            self._console.print("Pods request GPUs by resource claims, and the scheduler chooses the devices.")
        await self._without_the_service()
        stage.print_heading(f"With the service: scrubber serve, scrubber {'plugin' if cluster is None else 'dra'}")
        await self._playground.start_daemons()
        await self._playground.wait_until_clean()
        stage.print_check("both daemons are running; every device was scrubbed once, because it was not watched before")
        await self._same_pods_with_the_service()
        await self._leftover_child()
        await self._forced_delete()
        await (self._restart() if cluster is None else self._restart_within_a_claim(cluster))
        await self._fault_and_recovery()
        await (self._kill_service_during_scrub() if cluster is None else self._kill_service_during_release())
        await self._closing_table()

    # -- scenes ----------------------------------------------------------------------------------------------------

    async def _without_the_service(self) -> None:
        stage = self._stage
        ordinary = "device plugin" if self._cluster is None else "DRA driver"
        stage.print_heading(f"1. Without the scrub service: an ordinary {ordinary}")
        async with stage.offer_without_service():
            await stage.wait_for_available(4)
            async with stage.only_one_device():
                found = await stage.write_secret_and_read_back()
                stage.expect(SECRET in found, f"team-b's pod reads what team-a's killed pod left: {found[:40]!r}")
                first = await stage.run_ready_pod(stage.tenant("a", "--write", SECRET, "--hold", "forever"))
                await self._kubelet.delete(first, force=True, linger=_LINGER_SECONDS)
                second = await stage.run_ready_pod(stage.tenant("b", "--hold", "forever"))
                beside = self._playground.pod_processes(first)
                stage.expect(
                    bool(beside), "after a forced delete team-b's container starts beside team-a's, on the same GPU"
                )
                for pid in beside:
                    os.kill(pid, signal.SIGKILL)
                await self._kubelet.delete(second, grace=0)

    async def _same_pods_with_the_service(self) -> None:
        stage = self._stage
        stage.print_heading("2. The same pods, with the service")
        async with stage.only_one_device():
            found = await stage.write_secret_and_read_back()
            stage.expect(found == "", "team-b's pod finds nothing but zeros")
            last = await stage.newest_event("certificate.issued")
            certificate = last["certificate"]
            stage.print_detail(f"certificate {certificate['metadata']['name']}")
            for line in certificate["covered"]:
                stage.print_detail(f"  {'claimed' if '(claimed by ' in line else 'proved ':<11}  {line}")
            for line in certificate["notCovered"]:
                stage.print_detail(f"  not covered  {line}", "dim")
            if self._cluster is not None:
                await self._certificate_in_claim(self._cluster)

    async def _certificate_in_claim(self, cluster: ClaimCluster) -> None:
        stage = self._stage
        pod = await stage.run_ready_pod(stage.tenant("b", "--hold", "forever"))
        (prepared,) = self._calls("NodePrepareResources", pod)
        stage.expect(
            prepared.outcome == "OK", f"Prepare is the gate, once for each claim: {prepared.duration * 1000:.1f} ms"
        )
        (certificate,) = await cluster.certificates(pod, LONGEST_WAIT)
        stage.expect(
            (certificate["device"],) == cluster.device_ids(pod),
            f"the status of its claim has the device's certificate: {certificate['id']}",
        )
        await self._kubelet.delete(pod, grace=0)

    async def _leftover_child(self) -> None:
        stage = self._stage
        stage.print_heading("3. A child process outlives its pod and holds the device")
        async with stage.only_one_device():
            # A name of its own: its UID is unambiguous then, and only such a pod of a claim can have leftovers.
            spec = stage.tenant("a-forks", "--write", SECRET, "--leave-leftover", "--hold", "3", leave_children=True)
            pod = await stage.run_ready_pod(spec)
            await pod.wait(
                lambda status: status.containers["main"].state is ContainerState.TERMINATED, LONGEST_WAIT, "its end"
            )
            left = self._playground.pod_processes(pod)
            stage.expect(bool(left), f"the pod has ended; its child (PID {left[0]}) still holds the GPU")
            await self._kubelet.delete(pod, grace=0)
            if self._cluster is not None:
                waited = sum(each.duration for each in self._calls("NodeUnprepareResources", pod))
                stage.expect(
                    not self._playground.pod_processes(pod),
                    f"Unprepare kept the pod Terminating until the GPU was scrubbed ({waited:.1f} s)",
                )
            found = await stage.read_back()
            stage.expect(found == "", "the next tenant finds nothing but zeros")
            stage.expect(not self._playground.pod_processes(pod), "the child was proved a leftover and killed")
            ended = await stage.newest_event("leftover.process.killed")
            stage.expect(
                str(ended["fields"]["pid"]) == str(left[0]), f"the audit log names it: PID {ended['fields']['pid']}"
            )

    async def _forced_delete(self) -> None:
        stage = self._stage
        stage.print_heading("4. Force deletion: the pod is gone, its process still runs")
        async with stage.only_one_device():
            first = await stage.run_ready_pod(stage.tenant("a", "--write", SECRET, "--hold", "forever"))
            devices = self._playground.devices_of(first)
            await self._kubelet.delete(first, force=True, linger=1.5 if self._cluster is None else 3.0)
            began = time.monotonic()
            pod = await stage.run_admitted_pod(stage.tenant("b", "--read", "--hold", "0"))
            if self._cluster is not None:
                booked = devices == self._playground.devices_of(pod)
                beside = self._playground.pod_processes(first)
                stage.expect(
                    booked and bool(beside), "the scheduler gives team-b the GPU that team-a's process still uses"
                )
            await stage.wait_for_container(pod)
            waited = time.monotonic() - began
            stage.expect(
                not self._playground.pod_processes(first), f"team-b started after team-a's end ({waited:.1f} s)"
            )
            await pod.wait(PodPhase.SUCCEEDED, LONGEST_WAIT)
            stage.expect(text_read(pod) == "", "and found nothing but zeros")
            await self._kubelet.delete(pod, grace=0)

    async def _restart(self) -> None:
        stage = self._stage
        stage.print_heading("5. The same container restarts")
        pod = await self._run_restarting_pod()
        starts = self._calls("PreStartContainer", pod)
        times = [event.duration * 1000 for event in starts if event.outcome == "OK"][1:]
        rows = [row["fields"] for row in await stage.history() if row["event"] == "handover.granted"]
        again = [row for row in rows if row["pod"] == "a" and row["kind"] == "same-container"]
        by_exception = all((row["exception"], row["path"]) == ("same-container", "fast") for row in again)
        stage.expect(len(again) >= 2 and by_exception, "by the policy's exception, on checks alone: the fast path")
        stage.expect(bool(times), f"the gate took {', '.join(f'{each:.1f} ms' for each in times)}")
        await self._kubelet.delete(pod, grace=0)

    async def _restart_within_a_claim(self, cluster: ClaimCluster) -> None:
        stage = self._stage
        stage.print_heading("5. The same container restarts: within its claim")
        pod = await self._run_restarting_pod()
        stage.expect(
            len(self._calls("NodePrepareResources", pod)) == 1,
            "the kubelet prepared the claim once, and made no call for the restarts",
        )
        missing = [line for each in await cluster.certificates(pod, LONGEST_WAIT) for line in each["notCovered"]]
        (restarts,) = [line for line in missing if "restarts of containers" in line]
        stage.print_check("the certificate in the claim's status says so")
        stage.print_detail(f"  not covered  {restarts}", "dim")
        await self._kubelet.delete(pod, grace=0)

    async def _run_restarting_pod(self) -> EmulatedPod:
        stage = self._stage
        pod = await stage.run_admitted_pod(
            stage.tenant("a", "--write", "its own work", "--hold", "1.0", restart=RestartPolicy.ALWAYS)
        )
        await pod.wait(lambda status: status.containers["main"].restarts >= 2, LONGEST_WAIT, "its second restart")
        return pod

    async def _fault_and_recovery(self) -> None:
        stage, cluster = self._stage, self._cluster
        stage.print_heading("6. XID 95 on one device")
        await self._playground.wait_until_clean()
        began = time.monotonic()
        await self._playground.run_command(
            "sim", "fault", "--dir", str(self._playground.sim_dir), "--device", "0", "--xid", "95"
        )
        await stage.wait_for_available(3)
        if cluster is None:
            stage.print_check("the kubelet's allocatable went from 4 to 3")
        else:
            stage.print_check("the device has a taint in its ResourceSlice: the scheduler has 3 devices instead of 4")
        # The device is withheld at once; the check that quarantines it follows.
        devices = await self._playground.wait_for_devices(
            lambda all_of: any(each.index == "0" and each.cause.message for each in all_of),
            LONGEST_WAIT,
            "device 0 is quarantined",
        )
        sick = next(device for device in devices if device.index == "0")
        stage.print_detail(f"{sick.health}: {sick.cause.message}", "yellow")
        if cluster is not None:
            taint = f"{DRIVER}/{sick.cause.code}"
            await cluster.wait_for_taint(sick.id, LONGEST_WAIT, key=taint)
            stage.print_detail(f"taint: {taint}", "yellow")
        pods = [await stage.run_ready_pod(stage.tenant(f"c{n}", "--hold", "forever")) for n in range(3)]
        used = {device for pod in pods for device in self._playground.devices_of(pod)}
        stage.expect(sick.id not in used, "three pods start, on the other three devices")
        for pod in pods:
            await self._kubelet.delete(pod, grace=0)
        await stage.wait_for_available(4)
        stage.print_check(
            f"reset, scrubbed, on probation, and back: 4 again after {time.monotonic() - began:.1f} s, "
            "without an operator"
        )

    async def _kill_service_during_scrub(self) -> None:
        stage = self._stage
        stage.print_heading("7. kill -9 of the service during a scrub")
        async with stage.only_one_device() as device:
            pod = await self._start_slow_scrub(device)
            await self._kubelet.delete(pod, grace=0)
            children = await self._kill_service()
            waiting = await stage.run_admitted_pod(stage.tenant("b", "--read", "--hold", "0"))
            await waiting.wait(
                lambda status: status.containers["main"].reason == "CreateContainerConfigError",
                LONGEST_WAIT,
                "a refused start",
            )
            stage.print_check("team-b's start is refused meanwhile")
            stage.print_detail(waiting.status.containers["main"].message, "yellow")
            await self._restart_service(device)
            await self._expect_only_zeros(waiting, children)

    async def _kill_service_during_release(self) -> None:
        stage = self._stage
        stage.print_heading("7. kill -9 of the service during a scrub, which Unprepare waits for")
        async with stage.only_one_device() as device:
            pod = await self._start_slow_scrub(device)
            deletion = asyncio.create_task(self._kubelet.delete(pod, grace=0))
            children = await self._kill_service()
            await self._kubelet.wait_until(lambda _: bool(self._calls("FailedKillPod", pod)), LONGEST_WAIT)
            stage.expect(not deletion.done(), "team-a's pod stays Terminating, and keeps its claim")
            stage.print_detail(self._calls("FailedKillPod", pod)[0].detail, "yellow")
            arrival = asyncio.create_task(stage.run_admitted_pod(stage.tenant("b", "--read", "--hold", "0")))
            await self._restart_service(device)
            await deletion
            await self._expect_only_zeros(await arrival, children)

    async def _start_slow_scrub(self, device: str) -> EmulatedPod:
        """Return a pod that has written to the device, whose next scrub takes 20 s."""
        stage = self._stage
        pod = await stage.run_ready_pod(stage.tenant("a", "--write", SECRET, "--hold", "forever"))
        directory = str(self._playground.sim_dir)
        await self._playground.run_command("sim", "fault", "--dir", directory, "--device", device, "--slow-clear", "20")
        return pod

    async def _kill_service(self) -> dict[int, int]:
        """Kill the service while it clears a device; return PID → start time of the eraser."""
        playground = self._playground
        await playground.wait_for_devices(
            lambda all_of: any(each.state == "scrubbing" for each in all_of), LONGEST_WAIT, "a device is scrubbed"
        )
        children = await playground.wait_for_eraser(playground.service, LONGEST_WAIT)
        await playground.service.kill()
        self._stage.print_check("killed while the device was being cleared")
        return children

    async def _restart_service(self, device: str) -> None:
        playground = self._playground
        await playground.run_command("sim", "clear", "--dir", str(playground.sim_dir), "--device", device)
        await playground.service.start()

    async def _expect_only_zeros(self, pod: EmulatedPod, children: dict[int, int]) -> None:
        stage = self._stage
        await pod.wait(PodPhase.SUCCEEDED, LONGEST_WAIT)
        stage.expect(not self._playground.running_processes(children), "the eraser that it left behind has ended")
        stage.expect(text_read(pod) == "", "the service restarted and scrubbed again, and team-b found only zeros")
        await self._kubelet.delete(pod, grace=0)

    def _calls(self, name: str, pod: EmulatedPod) -> list[KubeletEvent]:
        """Return the kubelet's events of a name about a pod."""
        return [each for each in self._kubelet.events if each.name == name and each.pod_uid == pod.uid]

    async def _closing_table(self) -> None:
        rows = await self._stage.history()
        granted = [row["fields"] for row in rows if row["event"] == "handover.granted"]
        table = Table(title="Summary", title_justify="left")
        table.add_column("hand-overs")
        for name in ("count", "median", "slowest"):
            table.add_column(name, justify="right")
        basis = "on a certificate" if self._cluster is not None else "on a certificate or the exception"
        for path, meaning in (("fast", basis), ("slow", "waited for a scrub or a pod")):
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
        events = self._kubelet.events
        if self._cluster is None:
            refused = sum(each.name == "PreStartContainer" and each.outcome != "OK" for each in events)
            repeated = f"{refused} start(s) refused and retried"
        else:
            pending = sum(each.name == "FailedKillPod" for each in events)
            repeated = f"{pending} release(s) refused and retried"
        self._console.print(
            f"{len(passed)} scrubs passed · {residue / 2**20:.0f} MiB of residue found and cleared · {ended} "
            f"leftover(s) killed · {repeated}"
        )


class CommandScenario(DemoScenario):
    """The scenes of a node whose devices a program of the administrator manages."""

    async def run(self) -> None:
        stage = self._stage
        self._console.print(
            "A node with four devices that a program manages (deploy/backends/simulated-node), a kubelet (emulated, with "
            f"the real protocol), and two tenants.\n[dim]{self._playground.directory} · memory files in "
            f"{self._playground.sim_dir}[/]"
        )
        await self._without_the_service()
        stage.print_heading("With the service: scrubber serve --backend command, scrubber plugin")
        await self._playground.start_daemons()
        await self._playground.wait_until_clean()
        stage.print_check("both daemons are running; the program has cleared every device once")
        await self._same_pods_with_the_service()
        issued = (await stage.newest_event("certificate.issued"))["certificate"]["covered"]
        claims = [line for line in issued if "(claimed by command sha256:" in line]
        stage.expect(bool(claims), "the certificate says what the program claims, and what was measured")
        await self._leftover_child()
        await self._broken_program()

    async def _broken_program(self) -> None:
        stage, playground = self._stage, self._playground
        stage.print_heading("4. A mistake in the program")
        await playground.wait_until_clean()
        works = playground.program.read_text()
        playground.program.write_text("#!/bin/sh\nexit 1\n")
        scrub = await playground.run_command("scrub", "0")
        stage.expect(scrub.returncode != 0, "a program that fails proves nothing: scrubber scrub 0 does not succeed")
        devices = await playground.wait_for_devices(
            lambda each: all(one.cause.code == "command-broken" for one in each), LONGEST_WAIT, "the fault is reported"
        )
        stage.print_detail(devices[0].cause.message)
        stage.expect(
            {each.health for each in devices} == {"suspect"},
            "no device is blamed: all of them are suspect, none is out",
        )
        playground.program.write_text(works)
        await playground.wait_until_clean()
        async with stage.only_one_device():
            stage.expect(await stage.read_back() == "", "the program is repaired, and pods start again")
