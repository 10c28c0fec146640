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
from tests.world.asking import started
from tests.world.timeline import in_virtual_time
from tests.world.world import DEFAULT, World, a_world

POD = "5e0f1c1a-0000-4000-8000-00000000cafe"
CROWD = UninspectedProcess(
    4242, 77, "crowd of uid 1000: there was no time to look through its descriptors", confined=True
)
END = replace(DEFAULT, uninspected_processes=UninspectedProcessAction.KILL)


class Walks:
    """Makes the world's walks leave ``left`` uninspected, for as many walks as ``times``."""

    def __init__(self, world: World, *left: UninspectedProcess, pod: str | None = POD, times: int = 1_000_000) -> None:
        assert world.service is not None
        self.had: list[Collection[str]] = []
        self.ended: list[int] = []
        dependencies = world.service.dependencies
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


async def scrubbed(world: World) -> ScrubRecord:
    job = await world.controller().scrubs.start(ScrubTrigger.ON_DEMAND)
    return await job.wait()


def findings(finished: ScrubRecord) -> dict[str, Severity]:
    return {each.code: each.severity for each in finished.findings}


def events(world: World) -> list[str]:
    assert world.journal is not None
    wanted = ("uninspected.process.found", "uninspected.process.killed")
    return [event.name for event in world.journal.events if event.name in wanted]


@in_virtual_time
async def test_pod_that_never_had_the_device_blocks_no_scrub_by_being_slow_to_inspect() -> None:
    async with a_world(devices=1) as world:
        await world.run(5.0)
        walks = Walks(world, CROWD)
        finished = await scrubbed(world)
        assert finished.outcome is Outcome.PASSED
        assert findings(finished) == {"uninspected-processes": Severity.NOTE}
        assert len(walks.had) == 1, "nothing waits for it"
        certificate = world.record().certificate
        assert certificate is not None
        (line,) = [each for each in certificate.not_covered if "never given the device" in each]
        assert line.startswith("holders: 1 process(es) of 1 pod(s)")
        assert POD not in "".join(certificate.not_covered)
        for _ in range(3):
            await scrubbed(world)
        assert events(world) == ["uninspected.process.found"], "once it was not finished in several walks"
        assert "4242" in world.controller().view.uninspected_processes[0]


@pytest.mark.parametrize("left", [replace(CROWD, confined=False), replace(CROWD, pid=0, pod_uid=None, confined=False)])
@in_virtual_time
async def test_uninspected_process_that_may_open_the_device_blocks_the_scrub(
    left: UninspectedProcess,
) -> None:
    async with a_world(devices=1) as world:
        await world.run(5.0)
        walks = Walks(world, left)
        finished = await scrubbed(world)
        assert finished.outcome is Outcome.BLOCKED
        assert findings(finished) == {"uninspected-processes": Severity.BLOCKING}
        assert len(walks.had) == 4, "it was gone on with several times first"
        assert events(world) == ["uninspected.process.found"]


@in_virtual_time
async def test_process_that_a_later_walk_inspects_only_delays_the_scrub_and_is_not_reported() -> None:
    async with a_world(devices=1) as world:
        await world.run(5.0)
        walks = Walks(world, replace(CROWD, confined=False), pod=None, times=2)
        finished = await scrubbed(world)
        assert (finished.outcome, findings(finished)) == (Outcome.PASSED, {})
        assert len(walks.had) == 3
        assert events(world) == []
        assert world.controller().view.uninspected_processes == ()


@in_virtual_time
async def test_process_of_a_pod_that_has_the_device_may_hold_the_device_undetected() -> None:
    async with a_world(devices=1) as world:
        tenant = await started(world)
        grants = world.record().open_grants
        assert grants[0].pod is not None
        assert world.service is not None
        reading = world.node.pods.reading
        assert may_hold_undetected(tenant.uid, world.gpu().id, grants, reading, confined=True)
        assert not may_hold_undetected(POD, world.gpu().id, grants, reading, confined=True)


@pytest.mark.parametrize(
    ("policy", "pod", "ended"),
    [(END, POD, [4242]), (END, None, []), (DEFAULT, POD, [])],
)
@in_virtual_time
async def test_uninspected_pod_process_is_killed_after_several_walks_only_where_the_policy_says_so(
    policy: Policy, pod: str | None, ended: list[int]
) -> None:
    async with a_world(devices=1, policy=policy) as world:
        await world.run(5.0)
        walks = Walks(world, CROWD, pod=pod)
        for _ in range(3):
            await scrubbed(world)
            if pod is not None:
                assert walks.ended == [], "not before several walks"
        await scrubbed(world)
        assert walks.ended == ended
        assert ("uninspected.process.killed" in events(world)) == bool(ended)


@in_virtual_time
async def test_untrusted_kubelet_reading_clears_no_pod_of_undetected_use() -> None:
    async with a_world(devices=1) as world:
        await world.run(5.0)
        assert world.service is not None
        reading = world.node.pods.reading
        asked: Callable[..., bool] = may_hold_undetected
        assert not asked(POD, world.gpu().id, (), reading, confined=True)
        assert asked(POD, world.gpu().id, (), replace(reading, trust=Trust.UNREADABLE), confined=True)
        assert asked(None, world.gpu().id, (), reading, confined=True)


@in_virtual_time
async def test_hundreds_of_holders_are_counted_and_some_of_each_kind_are_named_in_the_findings() -> None:
    async with a_world(devices=1) as world:
        await world.run(5.0)
        assert world.service is not None
        many = [Holder(5_000 + each, 1, HolderKind.INFRASTRUCTURE, "exporter") for each in range(450)]
        worst = Holder(9_999, 1, HolderKind.PROCESS, "intruder")

        async def holders(device: Device, pod_uids: Collection[str] = (), scrub: str | None = None) -> HolderReport:
            return HolderReport((*many, worst), omitted_count=49)

        world.service.dependencies.holders.list_holders = holders  # type: ignore[method-assign]
        finished = await scrubbed(world)
        assert len(finished.findings) == _MAX_NAMED + 1
        assert any("9999" in each.message for each in finished.findings)
        (more,) = [each for each in finished.findings if each.code == "holders-omitted"]
        assert more.severity is Severity.BLOCKING
        assert more.message.startswith(f"{451 + 49 - _MAX_NAMED} more process(es)")
