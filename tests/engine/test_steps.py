"""The result of each scrub step for each measurement."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest

from scrubber.domain.device import Device
from scrubber.domain.diagnostics import DiagnosticCheck, DiagnosticLevel
from scrubber.domain.errors import DeviceBusy, DeviceFault, DriverTimeout, Unreadable
from scrubber.domain.evidence import Outcome, PathKind, ScrubTrigger, Severity, Step, StepResult, Verdict
from scrubber.domain.policy import DiagnosticsRule, Limits
from scrubber.domain.telemetry import Signal, Snapshot
from scrubber.engine import scrub
from scrubber.engine.eraser_pool import ScrubPriority
from scrubber.engine.steps.context import ScrubContext
from scrubber.engine.steps.diagnostics import diagnose
from scrubber.engine.steps.memory import clear_memory
from scrubber.engine.steps.on_chip import evaluate_on_chip
from scrubber.ports.device import EraseProgress, EraseReport, EraseRequest, OnChipReport, Telemetry
from tests.simulation.cluster import DEFAULT, SimulatedCluster, simulated_cluster
from tests.simulation.timeline import in_virtual_time

WHOLE = EraseReport(total_bytes=100, cleared_bytes=100, verified_bytes=100, residue_bytes=0, failed_bytes=0)


@dataclass
class Answering:
    """:class:`scrubber.ports.Eraser` that responds as the test sets, after ``seconds``."""

    cluster: SimulatedCluster
    answer: EraseReport | Exception
    seconds: float = 0.0

    async def erase(
        self, device: Device, request: EraseRequest, progress: Callable[[EraseProgress], None]
    ) -> EraseReport:
        await self.cluster.run(self.seconds)
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer

    async def find_orphan(self, device: Device) -> int | None:
        return None

    async def terminate_orphan(self, device: Device, deadline: float) -> bool:
        return True


def work(
    cluster: SimulatedCluster, answer: EraseReport | Exception, *, seconds: float = 0.0, slow_path: float = 120.0
) -> ScrubContext:
    """Return the context of a slow path on the first device whose eraser responds with ``answer``."""
    assert cluster.service is not None
    policy = replace(cluster.policy, limits=replace(Limits(), slow_path=slow_path))
    controller = cluster.controller()
    return ScrubContext(
        scrub="scrub-1",
        device=controller.state.device,
        record=controller.state.record,
        plan=policy.plan(PathKind.SLOW, ScrubTrigger.CONTAINER_START),
        policy=policy,
        dependencies=replace(cluster.service.dependencies, eraser=Answering(cluster, answer, seconds)),
        pods=controller.pods,
        pod_liveness=controller.occupancy.pod_liveness,
        unauthorized_use=controller.occupancy.unauthorized_use,
        eraser_slot=lambda shared: cluster.node.devices.eraser_pool.slot(shared, lambda: ScrubPriority.IDLE),
        progress=lambda _: None,
        keep_out_of_use=cluster.service.node.devices.keep_out_of_use,
    )


def judged(answer: EraseReport | Exception) -> StepResult:
    """Return the result of the memory step for that answer."""

    @in_virtual_time
    async def judge() -> StepResult:
        async with simulated_cluster(devices=1) as cluster:
            return await clear_memory(work(cluster, answer))

    return judge()


def test_memory_that_was_cleared_and_read_back_completely_passes() -> None:
    result = judged(WHOLE)
    assert (result.verdict, result.findings) == (Verdict.PASSED, ())
    assert result.measured["verified_bytes"] == 100


@pytest.mark.parametrize(
    ("changes", "code", "severity"),
    [
        ({"failed_bytes": 1}, "verification-failed", Severity.FAULT),
        ({"cleared_bytes": 99}, "clearing-incomplete", Severity.FAULT),
        ({"verified_bytes": 99}, "clearing-incomplete", Severity.FAULT),
        ({"total_bytes": 0, "cleared_bytes": 0, "verified_bytes": 0}, "clearing-incomplete", Severity.FAULT),
        ({"fence_broken": True, "cleared_bytes": 5, "verified_bytes": 0}, "fence-broken", Severity.BLOCKING),
        ({"fence_broken": True, "failed_bytes": 5}, "fence-broken", Severity.BLOCKING),
        ({"unreleased_bytes": 1}, "memory-not-released", Severity.FAULT),
        ({"cleared_bytes": 90, "verified_bytes": 90, "not_covered_bytes": 10}, "clearing-incomplete", Severity.FAULT),
    ],
)
def test_memory_that_was_not_cleared_and_read_back_completely_fails(
    changes: dict[str, Any], code: str, severity: Severity
) -> None:
    result = judged(replace(WHOLE, **changes))
    assert result.verdict is Verdict.FAILED
    assert [(finding.code, finding.severity) for finding in result.findings] == [(code, severity)]


def test_memory_step_tolerates_bytes_reserved_by_the_driver_but_no_other_uncleared_bytes() -> None:
    gibibyte = 1 << 30
    whole = EraseReport(
        total_bytes=80 * gibibyte,
        cleared_bytes=77 * gibibyte,
        verified_bytes=77 * gibibyte,
        residue_bytes=0,
        failed_bytes=0,
        reserved_bytes=2 * gibibyte,
        not_covered_bytes=3 * gibibyte,
        not_covered=("memory: 2 GiB reserved by the driver", "memory: 1 GiB of the eraser's own context"),
    )
    assert judged(whole).verdict is Verdict.PASSED
    less = replace(whole, cleared_bytes=77 * gibibyte - 1, verified_bytes=77 * gibibyte - 1)
    assert judged(replace(less, not_covered_bytes=3 * gibibyte + 1)).findings[0].code == "clearing-incomplete"


NO_MEMORY = EraseReport(
    total_bytes=0,
    cleared_bytes=0,
    verified_bytes=None,
    residue_bytes=None,
    failed_bytes=0,
    not_covered=("memory: registers",),
)


def test_device_without_memory_passes_uncovered_only_where_a_command_claims_it() -> None:
    @in_virtual_time
    async def judge() -> None:
        async with simulated_cluster(devices=1) as cluster:
            context = work(cluster, NO_MEMORY)
            assert (await clear_memory(context)).findings[0].code == "clearing-incomplete"
            device = replace(context.device, claimed_by="command sha256:c0ffee", memory_bytes=0)
            memory = replace(context.policy.memory, accept_claims=True)
            claimed = replace(context, device=device, policy=replace(context.policy, memory=memory))
            result = await clear_memory(claimed)
            assert (result.verdict, result.findings) == (Verdict.NOT_COVERED, ())
            assert result.not_covered == ("memory: registers",)

    judge()


ALL_SEEN = OnChipReport(
    units=132, units_cleared=132, shared_bytes=232448, register_bytes=262144, residue_bytes=0, failed_bytes=0
)


def judged_on_chip(found: OnChipReport | None) -> StepResult:
    @in_virtual_time
    async def judge() -> StepResult:
        async with simulated_cluster(devices=1) as cluster:
            context = work(cluster, replace(WHOLE, on_chip=found))
            await clear_memory(context)
            return await evaluate_on_chip(context)

    return judge()


def test_on_chip_memory_is_verified_on_every_processor_or_not_covered() -> None:
    assert judged_on_chip(ALL_SEEN).verdict is Verdict.PASSED
    assert judged_on_chip(None).verdict is Verdict.NOT_COVERED


@pytest.mark.parametrize("changes", [{"units_cleared": 131}, {"failed_bytes": 4}, {"units": 0, "units_cleared": 0}])
def test_processor_that_did_not_run_or_stays_dirty_is_a_fault_of_the_device(changes: dict[str, Any]) -> None:
    result = judged_on_chip(replace(ALL_SEEN, **changes))
    assert [(finding.code, finding.severity) for finding in result.findings] == [("on-chip-failed", Severity.FAULT)]
    assert result.verdict is Verdict.FAILED


def test_on_chip_residue_is_recorded_as_a_note() -> None:
    result = judged_on_chip(replace(ALL_SEEN, residue_bytes=4))
    assert (result.verdict, [finding.code for finding in result.findings]) == (Verdict.PASSED, ["on-chip-residue"])


@dataclass
class Diagnosing:
    """:class:`scrubber.ports.Diagnostics` that responds as the test sets."""

    answer: tuple[DiagnosticCheck, ...] | Exception

    async def diagnose(self, device: Device, level: DiagnosticLevel, deadline: float) -> tuple[DiagnosticCheck, ...]:
        assert deadline > level.seconds > 0
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


@pytest.mark.parametrize(
    ("answer", "codes", "severity"),
    [
        ((DiagnosticCheck("matrix-product", 0, {"operations_per_second": 9e9}),), [], None),
        (
            (DiagnosticCheck("matrix-product", 1, {"operations_per_second": 9e9}),),
            ["diagnostics-failed"],
            Severity.FAULT,
        ),
        ((DiagnosticCheck("matrix-product", 0, {"operations_per_second": 1e9}),), ["diagnostics-slow"], Severity.FAULT),
        ((DiagnosticCheck("matrix-product", 0),), ["diagnostics-slow"], Severity.FAULT),
        ((), ["diagnostics-failed"], Severity.FAULT),
        (Unreadable("the child died"), ["diagnostics-failed"], Severity.FAULT),
        (DeviceBusy("the device is held"), ["device-busy"], Severity.BLOCKING),
    ],
)
def test_diagnostics_are_judged_by_errors_and_minimum_rates(
    answer: tuple[DiagnosticCheck, ...] | Exception, codes: list[str], severity: Severity | None
) -> None:
    @in_virtual_time
    async def run() -> StepResult:
        async with simulated_cluster(devices=1) as cluster:
            context = work(cluster, WHOLE)
            rule = DiagnosticsRule(min_rates={"Labelled*": {"matrix-product": 5e9}})
            return await diagnose(
                replace(
                    context,
                    plan=replace(context.plan, diagnostics=DiagnosticLevel.QUICK),
                    policy=replace(context.policy, diagnostics=rule),
                    dependencies=replace(context.dependencies, diagnostics=Diagnosing(answer)),
                )
            )

    result = run()
    assert [finding.code for finding in result.findings] == codes
    assert {finding.severity for finding in result.findings} == ({severity} if severity else set())
    assert result.verdict is (Verdict.FAILED if codes else Verdict.PASSED)


@pytest.mark.parametrize("changes", [{"residue_bytes": 7}, {"size_restored": "The size was put right."}])
def test_residue_and_a_corrected_memory_size_are_recorded_as_notes(changes: dict[str, Any]) -> None:
    result = judged(replace(WHOLE, **changes))
    assert result.verdict is Verdict.PASSED
    assert [finding.severity for finding in result.findings] == [Severity.NOTE]


@pytest.mark.parametrize(
    ("error", "code", "severity"),
    [
        (DeviceBusy("the device is held"), "device-busy", Severity.BLOCKING),
        (DriverTimeout("killed"), "erase-timeout", Severity.FAULT),
    ],
)
def test_failed_eraser_fails_the_memory_step(error: Exception, code: str, severity: Severity) -> None:
    result = judged(error)
    assert result.verdict is Verdict.FAILED
    assert [(finding.code, finding.severity) for finding in result.findings] == [(code, severity)]


@in_virtual_time
async def test_first_failed_step_ends_the_scrub() -> None:
    async with simulated_cluster(devices=1) as cluster:
        began: list[Step] = []
        result = await scrub.run_scrub(work(cluster, DeviceBusy("the device is held")), began.append)
        assert result.outcome is Outcome.BLOCKED
        assert began == [Step.HOLDERS, Step.MEMORY]


@pytest.mark.parametrize("fault", [Unreadable("nonsense"), DeviceFault("odd", code="odd")])
def test_device_fault_ends_the_scrub_with_its_own_code(fault: DeviceFault) -> None:
    @in_virtual_time
    async def fail() -> None:
        async with simulated_cluster(devices=1) as cluster:
            result = await scrub.run_scrub(work(cluster, fault), lambda _: None)
            assert result.outcome is Outcome.FAILED
            assert result.findings[-1].code == fault.code

    fail()


@in_virtual_time
async def test_step_that_exceeds_the_time_limit_of_the_scrub_fails_the_scrub() -> None:
    async with simulated_cluster(devices=1) as cluster:
        cluster.gpu().stuck = True
        result = await scrub.run_scrub(work(cluster, WHOLE, slow_path=0.5), lambda _: None)
        assert result.outcome is Outcome.FAILED
        assert [finding.code for finding in result.findings] == ["scrub-timeout"]


@dataclass
class Interrupted(Answering):
    """An eraser during whose first query the service stalls for ``stall`` seconds."""

    stall: float = 0.0

    async def find_orphan(self, device: Device) -> int | None:
        asyncio.get_running_loop().call_later(0.01, self.cluster.pause, self.stall)
        await self.cluster.run(0.02)
        return None


@dataclass
class Slow:
    """:class:`scrubber.ports.Telemetry` that takes a moment."""

    cluster: SimulatedCluster
    telemetry: Telemetry

    async def snapshot(self, device: Device) -> Snapshot:
        await self.cluster.run(0.02)
        return await self.telemetry.snapshot(device)

    def signals(self) -> AsyncIterator[Signal]:
        return self.telemetry.signals()


@pytest.mark.parametrize("stall", [0.3, 0.46, 0.49, 0.5, 0.55, 3.0])
@in_virtual_time
async def test_stall_of_the_service_during_a_step_is_not_blamed_on_the_device(stall: float) -> None:
    async with simulated_cluster(devices=1) as cluster:
        context = work(cluster, WHOLE, slow_path=0.5)
        slow = Slow(cluster, context.dependencies.telemetry)
        dependencies = replace(context.dependencies, eraser=Interrupted(cluster, WHOLE, stall=stall), telemetry=slow)
        result = await scrub.run_scrub(replace(context, dependencies=dependencies), lambda _: None)
        assert [finding.code for finding in result.findings] == []
        assert result.outcome is Outcome.PASSED


@in_virtual_time
async def test_clearing_has_a_time_limit_separate_from_that_of_the_scrub() -> None:
    async with simulated_cluster(devices=1) as cluster:
        result = await scrub.run_scrub(work(cluster, WHOLE, seconds=20.0, slow_path=10.0), lambda _: None)
        assert result.outcome is Outcome.PASSED


@in_virtual_time
async def test_wait_for_an_eraser_slot_does_not_count_towards_the_time_limit_of_the_scrub() -> None:
    one_slot = replace(DEFAULT, limits=replace(Limits(), eraser_slots=1))
    async with simulated_cluster(policy=one_slot) as cluster:
        assert cluster.service is not None
        async with cluster.node.devices.eraser_pool.slot(None, lambda: ScrubPriority.START_WAITS):
            waiting = cluster.service.life.start(
                scrub.run_scrub(work(cluster, WHOLE, slow_path=10.0), lambda _: None), "scrub"
            )
            await cluster.run(60.0)
            assert not waiting.done()
        assert (await waiting).outcome is Outcome.PASSED


# -- holders, on the fast path -----------------------------------------------------------------------------------------


@dataclass
class Snapshots:
    """:class:`scrubber.ports.Telemetry` that reports with everything else whether the device is held."""

    telemetry: Telemetry
    held: bool

    async def snapshot(self, device: Device) -> Snapshot:
        return replace(await self.telemetry.snapshot(device), is_held=self.held)

    def signals(self) -> AsyncIterator[Signal]:
        return self.telemetry.signals()


@in_virtual_time
async def test_holders_reported_with_the_health_snapshot_are_not_queried_again() -> None:
    async with simulated_cluster(devices=1) as cluster:
        cluster.unreadable.add(cluster.gpu().id)  # a query of its holders fails
        with pytest.raises(DriverTimeout):
            await cluster.controller().occupancy.is_held()
        for held, outcome in ((False, Outcome.PASSED), (True, Outcome.BLOCKED)):
            context = work(cluster, WHOLE)
            telemetry = Snapshots(context.dependencies.telemetry, held)
            context = replace(
                context,
                plan=cluster.policy.plan(PathKind.FAST, ScrubTrigger.CONTAINER_START),
                dependencies=replace(context.dependencies, telemetry=telemetry),
            )
            assert (await scrub.run_scrub(context, lambda _: None)).outcome is outcome
