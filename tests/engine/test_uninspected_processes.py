"""Processes that a walk does not inspect completely: what they block, who is notified, and which may be killed."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import replace

import pytest

from scrubber.domain.assignment import Pod, Process, Trust
from scrubber.domain.device import Device
from scrubber.domain.evidence import Outcome, ScrubRecord, ScrubTrigger, Severity
from scrubber.domain.policy import Policy, UninspectedProcessAction
from scrubber.domain.telemetry import Holder, HolderKind, HolderReport, UninspectedProcess
from scrubber.domain.usage import may_hold_undetected
from scrubber.engine.steps.holders import _MAX_NAMED
from tests.simulation.cluster import DEFAULT, SimulatedCluster, simulated_cluster
from tests.simulation.start_requests import started
from tests.simulation.timeline import in_virtual_time

POD = "5e0f1c1a-0000-4000-8000-00000000cafe"
CROWD = UninspectedProcess(4242, 77, "crowd of uid 1000: there was no time to scan its descriptors", confined=True)
END = replace(DEFAULT, uninspected_processes=UninspectedProcessAction.KILL)


class Walks:
    """Makes the cluster's walks leave ``left`` uninspected, for as many walks as ``times``."""

    def __init__(
        self, cluster: SimulatedCluster, *left: UninspectedProcess, pod: str | None = POD, times: int = 1_000_000
    ) -> None:
        assert cluster.service is not None
        self.had: list[Collection[str]] = []
        self.ended: list[int] = []
        dependencies = cluster.service.dependencies
        really, uid_of = dependencies.holders.list_holders, dependencies.containers.pod_uid_of
        pids = {each.pid for each in left}

        async def holders(device: Device, pod_uids: Collection[str] = (), scrub: str | None = None) -> HolderReport:
            self.had.append(pod_uids)
            walks = len(self.had)
            report = await really(device, pod_uids, scrub)
            unfinished = tuple(replace(each, walks=walks) for each in left if each.pid not in self.ended)
            return replace(report, uninspected=unfinished if walks <= times else ())

        async def pod_uid_of(pid: int) -> str | None:
            return pod if pid in pids else await uid_of(pid)

        async def end(pod: Pod, leftovers: Iterable[Process], deadline: float) -> tuple[Process, ...]:
            self.ended += [each.pid for each in leftovers]
            return ()

        dependencies.holders.list_holders = holders  # type: ignore[method-assign]
        dependencies.containers.pod_uid_of = pod_uid_of  # type: ignore[method-assign]
        dependencies.containers.terminate = end  # type: ignore[method-assign]


async def scrubbed(cluster: SimulatedCluster) -> ScrubRecord:
    job = await cluster.controller().scrubs.start(ScrubTrigger.ON_DEMAND)
    return await job.wait()


def findings(finished: ScrubRecord) -> dict[str, Severity]:
    return {each.code: each.severity for each in finished.findings}


def events(cluster: SimulatedCluster) -> list[str]:
    assert cluster.journal is not None
    names = ("uninspected.process.found", "uninspected.process.killed")
    return [event.name for event in cluster.journal.events if event.name in names]


@in_virtual_time
async def test_pod_that_never_had_the_device_blocks_no_scrub_by_being_slow_to_inspect() -> None:
    async with simulated_cluster(devices=1) as cluster:
        await cluster.run(5.0)
        walks = Walks(cluster, CROWD)
        finished = await scrubbed(cluster)
        assert finished.outcome is Outcome.PASSED
        assert findings(finished) == {"uninspected-processes": Severity.NOTE}
        assert len(walks.had) == 1, "nothing waits for it"
        certificate = cluster.record().certificate
        assert certificate is not None
        (line,) = [each for each in certificate.not_covered if "never granted the device" in each]
        assert line.startswith("holders: 1 process(es) of 1 pod(s)")
        assert POD not in "".join(certificate.not_covered)
        for _ in range(3):
            await scrubbed(cluster)
        assert events(cluster) == ["uninspected.process.found"], "once it was not finished in several walks"
        assert "4242" in cluster.controller().view.uninspected_processes[0]


@pytest.mark.parametrize("left", [replace(CROWD, confined=False), replace(CROWD, pid=0, pod_uid=None, confined=False)])
@in_virtual_time
async def test_uninspected_process_that_may_open_the_device_blocks_the_scrub(
    left: UninspectedProcess,
) -> None:
    async with simulated_cluster(devices=1) as cluster:
        await cluster.run(5.0)
        walks = Walks(cluster, left)
        finished = await scrubbed(cluster)
        assert finished.outcome is Outcome.BLOCKED
        assert findings(finished) == {"uninspected-processes": Severity.BLOCKING}
        assert len(walks.had) == 4, "it was gone on with several times first"
        assert events(cluster) == ["uninspected.process.found"]


@in_virtual_time
async def test_process_that_a_later_walk_inspects_only_delays_the_scrub_and_is_not_reported() -> None:
    async with simulated_cluster(devices=1) as cluster:
        await cluster.run(5.0)
        walks = Walks(cluster, replace(CROWD, confined=False), pod=None, times=2)
        finished = await scrubbed(cluster)
        assert (finished.outcome, findings(finished)) == (Outcome.PASSED, {})
        assert len(walks.had) == 3
        assert events(cluster) == []
        assert cluster.controller().view.uninspected_processes == ()


@in_virtual_time
async def test_process_of_a_pod_that_has_the_device_may_hold_the_device_undetected() -> None:
    async with simulated_cluster(devices=1) as cluster:
        tenant = await started(cluster)
        grants = cluster.record().open_grants
        assert grants[0].pod is not None
        assert cluster.service is not None
        reading = cluster.node.pods.reading
        assert may_hold_undetected(tenant.uid, cluster.gpu().id, grants, reading, confined=True)
        assert not may_hold_undetected(POD, cluster.gpu().id, grants, reading, confined=True)


@pytest.mark.parametrize(
    ("policy", "pod", "ended"),
    [(END, POD, [4242]), (END, None, []), (DEFAULT, POD, [])],
)
@in_virtual_time
async def test_uninspected_pod_process_is_killed_after_several_walks_only_where_the_policy_says_so(
    policy: Policy, pod: str | None, ended: list[int]
) -> None:
    async with simulated_cluster(devices=1, policy=policy) as cluster:
        await cluster.run(5.0)
        walks = Walks(cluster, CROWD, pod=pod)
        for _ in range(3):
            await scrubbed(cluster)
            if pod is not None:
                assert walks.ended == [], "not before several walks"
        await scrubbed(cluster)
        assert walks.ended == ended
        assert ("uninspected.process.killed" in events(cluster)) == bool(ended)


@in_virtual_time
async def test_untrusted_kubelet_reading_clears_no_pod_of_undetected_use() -> None:
    async with simulated_cluster(devices=1) as cluster:
        await cluster.run(5.0)
        assert cluster.service is not None
        reading = cluster.node.pods.reading
        may_hold: Callable[..., bool] = may_hold_undetected
        assert not may_hold(POD, cluster.gpu().id, (), reading, confined=True)
        assert may_hold(POD, cluster.gpu().id, (), replace(reading, trust=Trust.UNREADABLE), confined=True)
        assert may_hold(None, cluster.gpu().id, (), reading, confined=True)


@in_virtual_time
async def test_hundreds_of_holders_are_counted_and_some_of_each_kind_are_named_in_the_findings() -> None:
    async with simulated_cluster(devices=1) as cluster:
        await cluster.run(5.0)
        assert cluster.service is not None
        many = [Holder(5_000 + each, 1, HolderKind.INFRASTRUCTURE, "exporter") for each in range(450)]
        worst = Holder(9_999, 1, HolderKind.PROCESS, "intruder")

        async def holders(device: Device, pod_uids: Collection[str] = (), scrub: str | None = None) -> HolderReport:
            return HolderReport((*many, worst), omitted_count=49)

        cluster.service.dependencies.holders.list_holders = holders  # type: ignore[method-assign]
        finished = await scrubbed(cluster)
        assert len(finished.findings) == _MAX_NAMED + 1
        assert any("9999" in each.message for each in finished.findings)
        (more,) = [each for each in finished.findings if each.code == "holders-omitted"]
        assert more.severity is Severity.BLOCKING
        assert more.message.startswith(f"{451 + 49 - _MAX_NAMED} more process(es)")
