"""What the engine reports for metrics: records of scrubs, waiting starts, and unexplained residue."""

from __future__ import annotations

import pytest

from scrubber.domain.evidence import (
    Certificate,
    Finding,
    Outcome,
    PathKind,
    ScrubRecord,
    ScrubTrigger,
    Severity,
    Step,
    StepResult,
    Verdict,
)
from scrubber.domain.states import Hygiene
from scrubber.engine import events
from scrubber.ports.record import Event
from tests.world.asking import admitted, answered, ask, started
from tests.world.timeline import in_virtual_time
from tests.world.world import World, a_world


def told(world: World, name: str = "residue.unexplained") -> list[Event]:
    """Return the audit events of that name."""
    return [event for event in world.vault.events if event.name == name]


def records(world: World, path: PathKind) -> list[ScrubRecord]:
    assert world.journal is not None
    return [each for each in world.journal.scrubs if each.path is path]


# -- residue -----------------------------------------------------------------------------------------------------------


@in_virtual_time
async def test_residue_on_a_device_that_was_not_granted_since_its_certificate_is_logged_as_unexplained() -> None:
    async with a_world(1) as world:
        proved = world.record().certificate
        assert proved is not None
        world.gpu().cells[0] = "nobody's"
        news = [each async for each in world.node.actions.scrub(world.gpu().id, PathKind.SLOW, "uid:0")]
        (event,) = told(world)
        assert [each.unexplained_residue for each in news if each.unexplained_residue] == [event.fields["message"]]
        assert news[-1].unexplained_residue, "whoever ordered the scrub is told with its end"
        assert event.device == world.gpu().id
        assert event.fields["certificate"] == proved.id
        assert event.fields["residue_bytes"]
        assert event.scrub == records(world, PathKind.SLOW)[-1].id
        assert world.journal is not None
        assert event in world.journal.events


@in_virtual_time
async def test_residue_of_a_tenant_is_not_logged_as_unexplained() -> None:
    async with a_world(1) as world:
        tenant = await started(world)
        world.kubelet.delete(tenant)
        await world.until(lambda: world.record().hygiene is Hygiene.CLEAN)
        assert any(each.measurement(Step.MEMORY, "residue_bytes") for each in records(world, PathKind.SLOW))
        assert told(world) == []


@in_virtual_time
async def test_scrub_of_a_clean_device_without_residue_reports_no_unexplained_residue() -> None:
    async with a_world(1) as world:
        news = [each async for each in world.node.actions.scrub(world.gpu().id, PathKind.SLOW, "uid:0")]
        assert (told(world), news[-1].unexplained_residue) == ([], "")


CERTIFICATE = Certificate(
    *("cert-1", "node", "boot", "driver", "GPU-a", 1, 0, PathKind.SLOW, "scrub-0", (), (), "default", "digest"),
    issued_at=1.0,
)
RESIDUE = StepResult(Step.MEMORY, Verdict.PASSED, 1.0, measured={"residue_bytes": 512})


def of_steps(*steps: StepResult) -> ScrubRecord:
    return ScrubRecord("scrub-1", "GPU-a", PathKind.SLOW, ScrubTrigger.MAINTENANCE, 1.0, 2.0, Outcome.PASSED, steps)


@pytest.mark.parametrize("writer", [Step.RESET, Step.DIAGNOSTICS])
def test_residue_after_a_step_that_writes_to_memory_is_not_unexplained(writer: Step) -> None:
    assert events.residue_unexplained(of_steps(StepResult(writer, Verdict.PASSED, 1.0), RESIDUE), CERTIFICATE) == ()
    untouched = StepResult(writer, Verdict.NOT_COVERED, 1.0)
    assert len(events.residue_unexplained(of_steps(untouched, RESIDUE), CERTIFICATE)) == 1


def test_residue_on_a_device_without_a_certificate_is_not_unexplained() -> None:
    assert events.residue_unexplained(of_steps(RESIDUE), None) == ()


# -- records -----------------------------------------------------------------------------------------------------------


@in_virtual_time
async def test_every_scrub_and_every_hand_over_check_reaches_the_journal_once_stored() -> None:
    async with a_world(1) as world:
        (first,) = records(world, PathKind.SLOW)
        assert first.outcome is Outcome.PASSED
        assert first.steps[0].step is Step.HOLDERS
        await started(world)
        (check,) = records(world, PathKind.FAST)
        assert {step.step for step in check.steps} == {Step.HOLDERS, Step.SETTINGS, Step.HEALTH}
        (granted,) = told(world, "handover.granted")
        assert granted.scrub == check.id


@in_virtual_time
async def test_reset_step_records_the_reset_method() -> None:
    async with a_world(1) as world:
        async for _ in world.node.actions.reset("0", "hangs", "uid:0"):
            pass
        (step,) = (step for step in records(world, PathKind.SLOW)[-1].steps if step.step is Step.RESET)
        assert step.measured["method"]


# -- waiting starts ----------------------------------------------------------------------------------------------------


@in_virtual_time
async def test_waiting_starts_are_counted_until_they_end_or_are_cancelled() -> None:
    async with a_world(1) as world:
        await started(world)
        assert world.node.waiting_starts == 0
        call = ask(world, await admitted(world), wait=5.0)
        await world.run(1.0)
        assert world.node.waiting_starts == 1
        await answered(call)
        assert world.node.waiting_starts == 0
        given_up = ask(world, await admitted(world, name="serve-1"), wait=5.0)
        await world.run(1.0)
        given_up.cancel()
        await world.run(0.1)
        assert world.node.waiting_starts == 0


@in_virtual_time
async def test_kubelet_restarts_are_counted() -> None:
    async with a_world(1) as world:
        assert world.node.kubelet_restarts == 0
        for times in (1, 2):
            world.kubelet.starts += 1
            await world.until(lambda times=times: world.node.kubelet_restarts == times, within=30.0)  # type: ignore[misc]


@in_virtual_time
async def test_eraser_pool_reports_busy_slots_and_waiting_scrubs() -> None:
    async with a_world(4) as world:
        slots = world.node.devices.eraser_pool
        size = slots.free
        assert (slots.busy, slots.waiting) == (0, 0)
        for each in world.matter.gpus.values():
            each.slow = 100.0
        for number in range(4):
            await world.controller(number).scrubs.start(ScrubTrigger.ON_DEMAND)
        await world.until(lambda: slots.busy == size and slots.waiting == 4 - size)
        assert slots.free == 0
        for each in world.matter.gpus.values():
            each.slow = 1.0


def test_process_killed_as_unauthorized_is_not_attributed_to_the_tenant_that_had_the_device() -> None:
    stranger = Finding(
        Step.HOLDERS, "unauthorized-process-killed", Severity.NOTE, "It was ended.", {"pid": 7, "pod_uid": "uid-2"}
    )
    record = of_steps(StepResult(Step.HOLDERS, Verdict.PASSED, 1.0, (stranger,)))
    ended, finished = events.scrub_finished(record, None, "acme")
    assert (ended.name, ended.fields) == (
        "unauthorized.process.killed",
        {"pid": 7, "pod_uid": "uid-2", "tenant": None},
    )
    assert finished.fields["tenant"] == "acme"
