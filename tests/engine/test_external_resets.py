"""Resets that another service makes: when one begins, which reports are accepted, and when the node is yielded and resumed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial

import pytest

from scrubber.domain.agent_pause import AgentPause, PauseOffer, PauseReport, PauseState, PauseWay
from scrubber.domain.errors import InvalidRequest
from scrubber.domain.evidence import FindingCode, Outcome, ScrubRecord, ScrubTrigger
from scrubber.domain.node_record import NodeRecord, YieldRequest, YieldRequester
from scrubber.domain.policy import ResetMode
from scrubber.engine.external_resets import ExternalResets
from tests.engine.test_agent_pauses import MONITORING, OFFERS, monitored
from tests.simulation.cluster import DEFAULT, SimulatedCluster
from tests.simulation.timeline import in_virtual_time

EXTERNAL = PauseOffer(PauseWay.EXTERNAL_RESET, ("request it",))
LIMIT = 100.0
SERVICE = YieldRequester.SERVICE


class Resets:
    """The component under test beside a simulated node; both of its tasks run."""

    def __init__(self, cluster: SimulatedCluster) -> None:
        self.cluster = cluster
        node = cluster.node
        self.part = ExternalResets(pauses=node.pauses, yields=node.yields, clock=cluster.clock, limit=lambda: LIMIT)

    @property
    def pause(self) -> AgentPause | None:
        return self.cluster.node.pauses.pause

    @property
    def is_yielded(self) -> bool:
        return bool(self.cluster.node.yields.record.of(SERVICE))

    async def report(self, state: PauseState, message: str = "", pause: str = "") -> None:
        assert self.pause is not None
        report = PauseReport((EXTERNAL,), pause or self.pause.id, state, (), message)
        await self.cluster.node.pauses.report(report)

    async def ordered(self) -> ScrubRecord:
        job = await self.cluster.controller().scrubs.start(ScrubTrigger.ON_DEMAND, reset_reason="hangs")
        return await job.wait()


@asynccontextmanager
async def external(*offers: PauseOffer, devices: int = 1) -> AsyncIterator[Resets]:
    """Provide a node whose agents hold every device, and a plugin that offers resets by another service."""
    async with monitored(devices, paused=False) as operands:
        cluster = operands.cluster
        cluster.policy = replace(DEFAULT, reset=ResetMode.BEST_EFFORT)
        await cluster.until(cluster.settled)
        await cluster.node.pauses.report(PauseReport(offers or (EXTERNAL,)))
        resets = Resets(cluster)
        tasks = [
            asyncio.ensure_future(work)
            for work in (resets.part.run(), resets.part.yield_when_free(cluster.node.devices))
        ]
        yield resets
        await cluster.until(lambda: not resets.is_yielded)
        cluster.node.publish_yield()
        for each in tasks:
            each.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def events(cluster: SimulatedCluster) -> list[str]:
    return [each.name for each in cluster.ledger_store.events if each.name.startswith("external-reset.")]


@in_virtual_time
async def test_node_is_yielded_once_the_scrub_has_ended_and_resumed_when_the_request_is_gone() -> None:
    async with external() as resets:
        cluster = resets.cluster
        finished = await resets.ordered()
        assert finished.outcome is Outcome.BLOCKED
        assert [each.code for each in finished.findings][-1] == FindingCode.RESET_LEFT_TO_OTHERS
        await cluster.until(lambda: resets.is_yielded)
        kept = cluster.ledger_store.agent_pause.pause
        assert kept is not None
        assert (kept.way, kept.devices) == (PauseWay.EXTERNAL_RESET, (cluster.gpu().id,))
        await resets.report(PauseState.FAILED, "in use")
        assert resets.is_yielded, "the other service may still work on it"
        await resets.report(PauseState.RESTORED)
        await cluster.until(lambda: not resets.is_yielded)
        assert events(cluster) == ["external-reset.started", "external-reset.failed", "external-reset.ended"]


@in_virtual_time
async def test_external_reset_is_accepted_only_while_the_driver_is_closed() -> None:
    async with external() as resets:
        cluster = resets.cluster
        await resets.ordered()
        await cluster.until(lambda: resets.is_yielded)
        with pytest.raises(InvalidRequest, match="No device can have been reset"):
            await resets.report(PauseState.RESET)
        cluster.node.pauses.driver_closed = True
        await resets.report(PauseState.RESET, "done")
        assert cluster.ledger_store.agent_pause.externally_reset == (cluster.gpu().id,)
        assert resets.pause is not None
        assert resets.pause.ending
        await resets.report(PauseState.RESTORED)


@in_virtual_time
async def test_reset_that_is_reported_after_it_was_given_up_changes_nothing() -> None:
    async with external() as resets:
        await resets.ordered()
        await resets.cluster.until(lambda: resets.is_yielded)
        resets.cluster.node.pauses.driver_closed = True
        await resets.cluster.until(lambda: resets.pause is not None and resets.pause.ending, within=LIMIT + 10)
        await resets.report(PauseState.RESET, "done")
        assert resets.cluster.ledger_store.agent_pause.externally_reset == ()
        await resets.report(PauseState.RESTORED)


@in_virtual_time
async def test_node_is_resumed_after_the_limit_although_the_request_still_exists() -> None:
    async with external() as resets:
        cluster = resets.cluster
        began = cluster.clock.monotonic()
        await resets.ordered()
        await cluster.until(lambda: resets.is_yielded)
        await cluster.until(lambda: not resets.is_yielded, within=300)
        assert 2 * LIMIT <= cluster.clock.monotonic() - began < 2 * LIMIT + 20
        assert resets.pause is not None, "the plugin still has to remove the request"
        await resets.report(PauseState.RESTORED)


@in_virtual_time
async def test_other_ways_are_tried_before_a_reset_is_left_to_another_service() -> None:
    async with external(*OFFERS, EXTERNAL) as resets:
        cluster = resets.cluster
        scrub = asyncio.ensure_future(resets.ordered())
        await cluster.until(lambda: resets.pause is not None)
        first = cluster.ledger_store.agent_pause.pause
        assert first is not None
        assert first.way is PauseWay.LABELS
        both = (*OFFERS, EXTERNAL)
        await cluster.node.pauses.report(PauseReport(both, first.id, PauseState.PLANNED, (MONITORING,)))
        await cluster.node.pauses.report(PauseReport(both, first.id, PauseState.FAILED, (), "forbidden"))
        await cluster.until(lambda: resets.pause is not None and resets.pause.ending)
        await cluster.node.pauses.report(PauseReport(both, first.id, PauseState.RESTORED))
        finished = await scrub
        assert [each.code for each in finished.findings][-1] == FindingCode.RESET_LEFT_TO_OTHERS
        kept = cluster.ledger_store.agent_pause.pause
        assert kept is not None
        assert kept.is_external_reset
        await cluster.until(lambda: resets.is_yielded)
        await resets.report(PauseState.FAILED, "no")
        await resets.report(PauseState.RESTORED)


@in_virtual_time
async def test_reset_is_not_left_to_another_service_while_a_device_that_is_reset_with_it_is_in_use() -> None:
    async with external(devices=2) as resets:
        cluster = resets.cluster
        cluster.gpu(0).together = (cluster.gpu(1).id,)
        tenant = await cluster.admit("acme", "train", devices=(1,))
        assert tenant is not None
        await cluster.until(partial(getattr, tenant, "running"), within=300)
        finished = await resets.ordered()
        assert finished.outcome is Outcome.BLOCKED
        assert [each.code for each in finished.findings][-1] == FindingCode.DEVICE_BUSY
        assert (resets.pause, events(cluster)) == (None, [])


def test_services_request_to_yield_is_not_the_operators() -> None:
    operator = YieldRequest(YieldRequester.OPERATOR, "upgrade", "uid:0", 1.0)
    own = YieldRequest(SERVICE, "another service resets GPU-a", "service", 2.0)
    both = NodeRecord().with_request(operator).with_request(own)
    assert both.without(YieldRequester.OPERATOR).yields == (own,)
    assert both.without(SERVICE).yields == (operator,)
    assert both.without_any().yields == ()
