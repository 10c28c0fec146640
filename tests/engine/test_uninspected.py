"""Processes that a walk does not get through: what they keep from being scrubbed, who is told, and who may be ended."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import replace

import pytest

from scrubber.domain.assignment import Pod, Process, Trust
from scrubber.domain.device import Device
from scrubber.domain.evidence import Occasion, Outcome, ScrubRecord, Severity
from scrubber.domain.policy import Policy, Uninspectable
from scrubber.domain.telemetry import Holder, HolderKind, HolderReport, Uninspected
from scrubber.domain.using import may_hold_unseen
from scrubber.engine.steps.holders import _MOST_NAMED
from tests.world.asking import started
from tests.world.timeline import in_virtual_time
from tests.world.world import DEFAULT, World, a_world

POD = "5e0f1c1a-0000-4000-8000-00000000cafe"
CROWD = Uninspected(4242, 77, "crowd of uid 1000: there was no time to look through its descriptors", confined=True)
END = replace(DEFAULT, uninspectable=Uninspectable.END)


class Walks:
    """Has the world's walks leave ``left`` unfinished, for as many walks as ``times`` says."""

    def __init__(self, world: World, *left: Uninspected, pod: str | None = POD, times: int = 1_000_000) -> None:
        assert world.service is not None
        self.had: list[Collection[str]] = []
        self.ended: list[int] = []
        dependencies = world.service.dependencies
        really, uid_of = dependencies.holders.holders, dependencies.containers.pod_uid_of
        pids = {each.pid for each in left}

        async def holders(device: Device, had: Collection[str] = (), scrub: str | None = None) -> HolderReport:
            self.had.append(had)
            walks = len(self.had)
            report = await really(device, had, scrub)
            unfinished = tuple(replace(each, walks=walks) for each in left if each.pid not in self.ended)
            return replace(report, unfinished=unfinished if walks <= times else ())

        async def pod_uid_of(pid: int) -> str | None:
            return pod if pid in pids else await uid_of(pid)

        async def end(pod: Pod, leftovers: Iterable[Process], deadline: float) -> tuple[Process, ...]:
            self.ended += [each.pid for each in leftovers]
            return ()

        dependencies.holders.holders = holders  # type: ignore[method-assign]
        dependencies.containers.pod_uid_of = pod_uid_of  # type: ignore[method-assign]
        dependencies.containers.end = end  # type: ignore[method-assign]


async def scrubbed(world: World) -> ScrubRecord:
    job = await world.controller().scrubs.start(Occasion.ON_DEMAND)
    return await job.wait()


def findings(finished: ScrubRecord) -> dict[str, Severity]:
    return {each.code: each.severity for each in finished.findings}


def events(world: World) -> list[str]:
    assert world.journal is not None
    wanted = ("process.uninspected", "uninspected.ended")
    return [event.name for event in world.journal.events if event.name in wanted]


@in_virtual_time
async def test_a_pod_that_never_had_the_device_keeps_it_from_no_scrub_by_being_slow_to_look_through() -> None:
    async with a_world(devices=1) as world:
        await world.run(5.0)
        walks = Walks(world, CROWD)
        finished = await scrubbed(world)
        assert finished.outcome is Outcome.PASSED
        assert findings(finished) == {"walk-unfinished": Severity.NOTE}
        assert len(walks.had) == 1, "nothing waits for it"
        certificate = world.record().certificate
        assert certificate is not None
        (line,) = [each for each in certificate.not_covered if "never given the device" in each]
        assert line.startswith("holders: 1 process(es) of 1 pod(s)")
        assert POD not in "".join(certificate.not_covered)
        for _ in range(3):
            await scrubbed(world)
        assert events(world) == ["process.uninspected"], "once it was not finished in several walks"
        assert "4242" in world.controller().view.uninspected[0]


@pytest.mark.parametrize("left", [replace(CROWD, confined=False), replace(CROWD, pid=0, pod=None, confined=False)])
@in_virtual_time
async def test_a_process_that_may_open_the_device_by_itself_keeps_it_from_being_scrubbed(left: Uninspected) -> None:
    async with a_world(devices=1) as world:
        await world.run(5.0)
        walks = Walks(world, left)
        finished = await scrubbed(world)
        assert finished.outcome is Outcome.HELD_UP
        assert findings(finished) == {"walk-unfinished": Severity.DIRTY}
        assert len(walks.had) == 4, "it was gone on with several times first"
        assert events(world) == ["process.uninspected"]


@in_virtual_time
async def test_a_process_that_the_walks_that_follow_get_through_delays_a_scrub_and_is_told_of_to_nobody() -> None:
    async with a_world(devices=1) as world:
        await world.run(5.0)
        walks = Walks(world, replace(CROWD, confined=False), pod=None, times=2)
        finished = await scrubbed(world)
        assert (finished.outcome, findings(finished)) == (Outcome.PASSED, {})
        assert len(walks.had) == 3
        assert events(world) == []
        assert world.controller().view.uninspected == ()


@in_virtual_time
async def test_a_process_of_the_pod_that_has_the_device_may_hold_it_unseen() -> None:
    async with a_world(devices=1) as world:
        tenant = await started(world)
        grants = world.record().open_grants
        assert grants[0].pod is not None
        assert world.service is not None
        reading = world.node.pods.reading
        assert may_hold_unseen(tenant.uid, world.gpu().id, grants, reading, confined=True)
        assert not may_hold_unseen(POD, world.gpu().id, grants, reading, confined=True)


@pytest.mark.parametrize(
    ("policy", "pod", "ended"),
    [(END, POD, [4242]), (END, None, []), (DEFAULT, POD, [])],
)
@in_virtual_time
async def test_only_where_the_policy_says_so_a_pods_process_is_ended_after_several_walks(
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
        assert ("uninspected.ended" in events(world)) == bool(ended)


@in_virtual_time
async def test_a_reading_that_is_not_trusted_frees_no_pod_from_suspicion() -> None:
    async with a_world(devices=1) as world:
        await world.run(5.0)
        assert world.service is not None
        reading = world.node.pods.reading
        asked: Callable[..., bool] = may_hold_unseen
        assert not asked(POD, world.gpu().id, (), reading, confined=True)
        assert asked(POD, world.gpu().id, (), replace(reading, trust=Trust.UNREADABLE), confined=True)
        assert asked(None, world.gpu().id, (), reading, confined=True)


@in_virtual_time
async def test_hundreds_of_holders_are_counted_and_some_of_each_kind_are_named() -> None:
    async with a_world(devices=1) as world:
        await world.run(5.0)
        assert world.service is not None
        many = [Holder(5_000 + each, 1, HolderKind.INFRASTRUCTURE, "exporter") for each in range(450)]
        worst = Holder(9_999, 1, HolderKind.PROCESS, "intruder")

        async def holders(device: Device, had: Collection[str] = (), scrub: str | None = None) -> HolderReport:
            return HolderReport((*many, worst), more=49)

        world.service.dependencies.holders.holders = holders  # type: ignore[method-assign]
        finished = await scrubbed(world)
        assert len(finished.findings) == _MOST_NAMED + 1
        assert any("9999" in each.sentence for each in finished.findings)
        (more,) = [each for each in finished.findings if each.code == "more-holders"]
        assert more.severity is Severity.DIRTY
        assert more.sentence.startswith(f"{451 + 49 - _MOST_NAMED} more process(es)")
