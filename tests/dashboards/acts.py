"""The acts on each node of the scenario. Each ends when its alert has fired, or should have long ago."""

from __future__ import annotations

import asyncio
import shutil
import signal
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import count

from scrubber.adapters.ledger.sqlite import SqliteLedger
from scrubber.adapters.sim import control
from scrubber.api import scrubber_pb2 as pb
from scrubber.api.client import PluginClient
from scrubber.domain.agent_pause import AgentPause, AgentPauseRecord, LabelChange, PauseWay
from scrubber.emulator.playground import RESOURCE, Daemon, tenant_argv
from scrubber.ports.record import LedgerChange
from tests.chaos.children import children_of
from tests.dashboards.calm import job
from tests.dashboards.faster import SECONDS
from tests.dashboards.running import Prometheus
from tests.dashboards.service import HELD_UP
from tests.dashboards.stage import CLEARING, FULL_DISKS, SOON, Node
from tests.integration.acting import running, seen_to_run, writer

__all__ = ["Acts"]

_LONGEST = 240.0
"""Seconds after which the wait for an alert ends; the test of the alert then fails."""

_STORM = """
import sys
from pathlib import Path
from scrubber.adapters.sim.xid_storm import raise_xids
raise_xids(Path(sys.argv[1]), sys.argv[2], (13, 31, 43, 45), repeat=4000, rate=200.0)
"""


@dataclass(frozen=True, slots=True)
class Acts:
    """Acts that are observed by one Prometheus."""

    prometheus: Prometheus

    async def fires(self, node: Node, alert: str, *, matcher: str = "") -> bool:
        """Wait until the alert fires for the node; return whether it did."""
        of = matcher or f'instance="{node.name}"'
        return await self.seen(f'ALERTS{{alertname="{alert}",alertstate="firing",{of}}}')

    async def ends(self, node: Node, alert: str) -> None:
        """Wait until the alert no longer fires for the node; if it continues, its test fails."""
        query = f'ALERTS{{alertname="{alert}",alertstate="firing",instance="{node.name}"}}'
        with suppress(TimeoutError):
            async with asyncio.timeout(_LONGEST):
                while True:
                    if not await asyncio.to_thread(self.prometheus.now, query):
                        return
                    await asyncio.sleep(0.5)

    async def seen(self, series: str) -> bool:
        """Wait until Prometheus has ``series``; return whether it got it."""
        return await self.has_result(f"count_over_time({series}[5s])")

    async def has_result(self, query: str) -> bool:
        """Wait until ``query`` has a result; return whether it got one."""
        with suppress(TimeoutError):
            async with asyncio.timeout(_LONGEST):
                while True:
                    if await asyncio.to_thread(self.prometheus.now, query):
                        return True
                    await asyncio.sleep(0.5)
        return False

    # -- devices that fail -----------------------------------------------------------------------------------------

    async def ill(self, node: Node) -> None:
        await self._verification_fails(node)
        await self._tenant_is_rough(node)
        storm = await asyncio.create_subprocess_exec(sys.executable, "-c", _STORM, str(node.sim_dir), "7")
        try:
            async with asyncio.TaskGroup() as group:
                for act in (self._driver_is_stuck, self._is_condemned, self._many_are_out, self._break_glass_is_used):
                    group.create_task(act(node))
            assert await storm.wait() == 0
        finally:
            await _ended(storm)
        await self._children_die(node)  # after the driver hang: a child that dies during a call reports otherwise

    async def _verification_fails(self, node: Node) -> None:
        """Let the verification fail on a device on which a process outlived its pod, too; that process is killed first.

        An event before the first scrape would not increase a counter.
        """
        await self.seen(f'scrubber_kills_total{{instance="{node.name}"}}')
        pod = await running(node, replace(writer("last", "team-a", "--leave-leftover"), leave_children=True))
        await seen_to_run(node)
        (device,) = pod.device_ids
        control.add_faults(node.sim_dir, device, wont_clear=True)
        await node.kubelet.delete(pod, grace=0)
        await self.fires(node, "ScrubberVerificationFailed")
        control.clear_faults(node.sim_dir, device, ["wont-clear"])
        if (await node.becomes(device, "healthy", "condemned")).health == "condemned":
            await node.order("unquarantine", device, "--yes", "--reason", "it clears again")
        await node.at_rest()
        await node.order("reset", device, "--yes", "--reason", "to be sure")

    async def _driver_is_stuck(self, node: Node) -> None:
        control.add_faults(node.sim_dir, "0", stuck=True)
        await self.fires(node, "ScrubberDriverTimeout")
        control.clear_faults(node.sim_dir, "0", ["stuck"])

    async def _is_condemned(self, node: Node) -> None:
        control.add_faults(node.sim_dir, "1", xid=95, reset="fail")
        await node.becomes("1", "condemned")
        await self.fires(node, "ScrubberDeviceCondemned")
        await node.order("break-glass", "1", "--duration", "30m", "--reason", "nothing else is left", "--yes")
        condemned = await node.becomes("1", "condemned")
        await self.seen(f'scrubber_break_glass_active{{device="{condemned.id}"}}')
        await node.order("break-glass", "1", "--end", "--reason", "something else is", "--yes")
        control.clear_faults(node.sim_dir, "1", ["xid", "reset"])
        await node.order("unquarantine", "1", "--yes", "--reason", "reseated")

    async def _many_are_out(self, node: Node) -> None:
        for index in ("2", "3", "4"):
            control.add_faults(node.sim_dir, index, conditions={"row-remap-failure": "a row could not be remapped"})
        await asyncio.gather(
            self.fires(node, "ScrubberQuarantineRatioHigh"), self.fires(node, "ScrubberDeviceNeedsOperator")
        )
        for index in ("2", "3", "4"):
            control.clear_faults(node.sim_dir, index, ["condition"])
            await node.order("unquarantine", index, "--yes", "--reason", "its memory was changed")

    async def _tenant_is_rough(self, node: Node) -> None:
        for number in range(3):
            pod = await running(node, writer(f"rough-{number}", "team-rough"))
            (device,) = pod.device_ids
            control.add_faults(node.sim_dir, device, xid=95)
            await node.becomes(device, "quarantined")
            await node.kubelet.delete(pod, grace=0)
            await node.becomes(device, "healthy")
        await self.fires(node, "ScrubberTenantCausesQuarantines", matcher='tenant="team-rough"')

    async def _break_glass_is_used(self, node: Node) -> None:
        await node.order("break-glass", "5", "--duration", "30m", "--reason", "an outage", "--yes")
        await self.fires(node, "ScrubberBreakGlassActive")
        await node.order("break-glass", "5", "--end", "--reason", "it is over", "--yes")
        await self.ends(node, "ScrubberBreakGlassActive")

    async def _children_die(self, node: Node) -> None:
        async def each_second() -> None:
            while True:
                for child in children_of(node.service.pid):
                    if child.module.endswith(".driver"):
                        child.signal(signal.SIGKILL)
                await asyncio.sleep(1.0)

        killing = asyncio.create_task(each_second())
        try:
            await self.fires(node, "ScrubberChildProcessRestarts")
        finally:
            killing.cancel()

    # -- guarantees and rules --------------------------------------------------------------------------------------

    async def strict(self, node: Node) -> None:
        await self._residue_appears(node)
        await self._unauthorized_process_opens(node)
        await self._resets_are_used_up(node)
        async with asyncio.TaskGroup() as group:
            group.create_task(self.fires(node, "ScrubberBreakerOpen"))
            group.create_task(self._fast_path_falls(node))
            group.create_task(self._policy_is_rejected(node))
        await self._policy_observes(node)

    async def _residue_appears(self, node: Node) -> None:
        """Write to an unassigned device: its certificate is no longer true."""
        with node.memory(5).open("r+b") as memory:
            memory.write(b"residue." * 100)
        await node.order("scrub", "5")
        await self.fires(node, "ScrubberResidueAfterCertificate")

    async def _resets_are_used_up(self, node: Node) -> None:
        """Need two resets where the policy of this node permits one."""
        devices = node.kubelet.allocatable(RESOURCE)
        for _ in range(2):
            await node.becomes("0", "healthy")
            before = await _times_out(node, "0")
            control.add_faults(node.sim_dir, "0", xid=95)
            async with asyncio.timeout(SOON):
                while True:  # by the audit log: the device may return between two queries
                    if await _times_out(node, "0") > before:
                        break
                    await asyncio.sleep(0.1)
        await node.kubelet.wait_until(lambda kubelet: kubelet.allocatable(RESOURCE) == devices - 1, SOON)

    async def _unauthorized_process_opens(self, node: Node) -> None:
        argv = tenant_argv("--device", str(node.memory(2)), "--hold", "forever")
        process = await asyncio.create_subprocess_exec(*argv, stdout=asyncio.subprocess.DEVNULL)
        try:
            await self.fires(node, "ScrubberUnauthorizedUse")
            await self.fires(node, "ScrubberDeviceHeld")
        finally:
            await _ended(process)

    async def _fast_path_falls(self, node: Node) -> None:
        """Let starts find clean devices for a while; then make clearing so slow that each next one has to wait."""
        for number in range(2):
            await running(node, writer(f"keeper-{number}", "team-b"))
        for number in range(5):
            await job(node, f"early-{number}", "team-b")
            await node.at_rest()
        for index in range(1, 6):
            control.add_faults(node.sim_dir, str(index), slow_clear=2.0)

        async def lane(lane: int) -> None:
            for number in count():
                await job(node, f"late-{lane}-{number}", "team-b")

        busy = [asyncio.create_task(lane(each)) for each in range(3)]
        try:
            await self.fires(node, "ScrubberFastPathRatioLow")
        finally:
            for each in busy:
                each.cancel()
            await asyncio.gather(*busy, return_exceptions=True)

    async def _policy_is_rejected(self, node: Node) -> None:
        """Let the service find a policy that is not valid; the one before stays in force."""
        good = node.policy.read_text()
        node.follow(good + "sharing: sometime\n")
        await self.fires(node, "ScrubberPolicyRejected")
        node.follow(good)

    async def _policy_observes(self, node: Node) -> None:
        good = node.policy.read_text()
        node.follow(good + "enforcement: observe\n")
        await self.fires(node, "ScrubberObserveOnly")
        node.follow(good)

    # -- slowness, and the ledger ----------------------------------------------------------------------------------

    async def slow(self, node: Node) -> None:
        for _ in range(3):
            await node.order("scrub", "4")
        # The mean of a week has one value an hour: one of them must be of the usual rate.
        usual = f'scrubber_clear_rate_bytes_per_second{{instance="{node.name}"}}[{SECONDS["7d"]}s:{SECONDS["1h"]}s]'
        await self.has_result(f"count(count_over_time({usual})) >= 5")
        control.add_faults(node.sim_dir, "4", slow_clear=8.0)
        await node.order("scrub", "4")
        async with asyncio.TaskGroup() as group:
            for act in (self._clearing_is_slow, self._starts_wait, self._audit_is_not_verified):
                group.create_task(act(node))
        node.rewrite_history()
        await self.fires(node, "ScrubberAuditBroken")

        async def lose_state() -> None:
            await node.service.stop(SOON)
            shutil.rmtree(node.state)

        await node.restart(lose_state, node.service)
        await self.fires(node, "ScrubberAuditTruncated")

    async def _clearing_is_slow(self, node: Node) -> None:
        await self.fires(node, "ScrubberScrubSlow")

    async def _starts_wait(self, node: Node) -> None:
        """Let pods on all devices wait, one after the other: each until its hand-over times out and is repeated."""
        for index in range(4):
            control.add_faults(node.sim_dir, str(index), slow_clear=80.0)
        first = [await running(node, writer(f"first-{number}", "team-c")) for number in range(5)]
        waiting = []
        for number, pod in enumerate(first):
            await node.kubelet.delete(pod, grace=0)
            waiting.append(await node.kubelet.run(writer(f"waiting-{number}", "team-d")))
            await asyncio.sleep(3.0)
        await self.fires(node, "ScrubberHandoverSlow")
        for index in range(4):
            control.add_faults(node.sim_dir, str(index), slow_clear=CLEARING)
        for pod in waiting:
            await node.kubelet.delete(pod, grace=0)

    async def _audit_is_not_verified(self, node: Node) -> None:
        (node.state / HELD_UP).touch()
        await self.fires(node, "ScrubberAuditUnverified")
        (node.state / HELD_UP).unlink()

    # -- unavailable components ------------------------------------------------------------------------------------

    async def cut(self, node: Node) -> None:
        if FULL_DISKS:
            await self._disk_is_full(node)
        await self._is_yielded(node)
        await self._agents_stay_paused(node)
        await self._away(node, "ScrubberServiceDown", node.service)
        await self._away(node, "ScrubberPluginDown", node.plugin)
        await node.kubelet.stop()
        await asyncio.gather(
            self.fires(node, "ScrubberPluginNotRegistered"), self.fires(node, "ScrubberKubeletUntrusted")
        )
        await node.kubelet.start()
        await self._away(node, "ScrubberNodeDown", node.service, node.plugin)

    async def _is_yielded(self, node: Node) -> None:
        await node.order("yield", "--timeout", f"{SOON:g}s", "--reason", "driver upgrade")
        await self.fires(node, "ScrubberNodeYielded")
        await node.order("resume", "--timeout", f"{SOON:g}s", "--reason", "done")
        await node.read_client.close()
        await node.wait_until_clean(SOON)
        await self.ends(node, "ScrubberNodeYielded")

    async def _agents_stay_paused(self, node: Node) -> None:
        """Start a service after one that died during a pause of agents, which its plugin does not restore for now."""
        await node.service.stop(SOON)
        change = LabelChange("a", "true", "false")
        pause = AgentPause("pause-1", PauseWay.LABELS, (), time.time(), ending=True, changes=(change,))
        ledger = SqliteLedger(node.state)
        await ledger.load()
        await ledger.commit(LedgerChange(agent_pause=AgentPauseRecord(pause)))
        await ledger.close()
        await node.service.start()
        await self.fires(node, "ScrubberAgentsPaused")
        async with PluginClient(node.socket_dir) as plugin:
            await plugin.report_agent_pause(pb.AgentPauseReport(pause_id=pause.id, state="restored"), timeout=SOON)
        await node.read_client.close()
        await node.wait_until_clean(SOON)
        await self.ends(node, "ScrubberAgentsPaused")

    async def _away(self, node: Node, alert: str, *daemons: Daemon) -> None:
        for daemon in daemons:
            await daemon.stop(SOON)
        await self.fires(node, alert)
        for daemon in daemons:
            await daemon.start()
        await node.wait_until_clean(SOON)
        await self.ends(node, alert)

    async def _disk_is_full(self, node: Node) -> None:
        ballast = node.state / "ballast"
        with ballast.open("wb", buffering=0) as file, suppress(OSError):
            while True:
                file.write(b"\0" * 4096)
        pod = await node.kubelet.run(writer("before", "team-e"))
        await self.fires(node, "ScrubberLedgerFailing")
        ballast.unlink()
        await node.kubelet.delete(pod, grace=0)


async def _times_out(node: Node, device: str) -> int:
    """Return how often it was quarantined, by the audit log."""
    return len((await node.read_client.history(device, limit=None, events=["health.quarantined"])).entries)


async def _ended(process: asyncio.subprocess.Process) -> None:
    """Kill it, unless it has ended."""
    with suppress(ProcessLookupError):
        process.kill()
    await process.wait()
