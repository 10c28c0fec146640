"""A yielded node: who requests it, what is refused meanwhile, and what is durable."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from scrubber.domain.codes import ErrorCode
from scrubber.domain.errors import InvalidRequest, LedgerFailure, NotReady
from scrubber.domain.evidence import PathKind
from scrubber.domain.node_record import YieldRequester
from scrubber.domain.states import BindingState, Hygiene
from scrubber.domain.taints import YIELDED
from scrubber.engine import refusals
from scrubber.engine.views import CertificateStatus, HandOverCall
from scrubber.engine.yielding import DriverlessNode, YieldControl
from tests.simulation.cluster import SimulatedCluster, simulated_cluster
from tests.simulation.timeline import in_virtual_time

OPERATOR, PLUGIN = YieldRequester.OPERATOR, YieldRequester.PLUGIN
WHO = "uid:1000"


def names(cluster: SimulatedCluster) -> list[str]:
    return [event.name for event in cluster.ledger_store.events if event.name.startswith("node.")]


def driverless_node(
    cluster: SimulatedCluster,
    *,
    remaining: frozenset[int] = frozenset(),
    driver_error: Callable[[], str] | None = None,
) -> DriverlessNode:
    """Return what serves the cluster's node once its driver is closed, or while the driver does not answer."""
    assert cluster.service is not None
    tools = cluster.service.dependencies
    return DriverlessNode(
        devices=cluster.node.view().devices,
        yields=cluster.node.yields,
        pauses=cluster.node.pauses,
        service_view=cluster.node.service_view,
        epoch="yielded",
        ledger=tools.ledger,
        journal=tools.journal,
        clock=tools.clock,
        audit_log=tools.audit_log,
        certificates=tools.certificates,
        remaining_children=lambda: remaining,
        driver_error=driver_error,
    )


@in_virtual_time
async def test_every_device_is_withheld_while_a_yield_is_requested() -> None:
    async with simulated_cluster(devices=2) as cluster:
        await cluster.node.yields.request(OPERATOR, "driver upgrade", WHO)
        cluster.node.publish_yield()
        view = cluster.node.view()
        assert [each.advertised for each in view.devices] == [False, False]
        assert {each.refusal_message for each in view.devices} == {refusals.NODE_YIELDED}
        assert [each.taints for each in view.devices] == [(YIELDED,), (YIELDED,)]
        assert {each.binding for each in view.devices} == {BindingState.OUT_OF_SERVICE}
        assert "driver upgrade" in view.yielded
        await cluster.node.yields.withdraw(OPERATOR, "done", WHO)
        cluster.node.publish_yield()
        assert [each.advertised for each in cluster.node.view().devices] == [True, True]
        assert [each.taints for each in cluster.node.view().devices] == [(), ()]


@in_virtual_time
async def test_start_on_a_node_that_is_to_be_yielded_waits_and_names_the_reason_to_operators_only() -> None:
    async with simulated_cluster(devices=1) as cluster:
        await cluster.node.yields.request(OPERATOR, "driver upgrade", WHO)
        with pytest.raises(NotReady) as refusal:
            await cluster.node.hand_over(HandOverCall((cluster.gpu(0).id,)))
        assert refusal.value.code == ErrorCode.NODE_YIELDED
        assert "driver upgrade" in str(refusal.value)
        assert refusal.value.public_message == refusals.NODE_YIELDED
        await cluster.node.yields.withdraw(OPERATOR, "done", WHO)
        cluster.node.publish_yield()


@in_virtual_time
async def test_node_is_yielded_until_every_requester_has_withdrawn() -> None:
    async with simulated_cluster(devices=1) as cluster:
        yields = cluster.node.yields
        await yields.request(OPERATOR, "driver upgrade", WHO)
        await yields.request(PLUGIN, "label paused", "plugin")
        resumed = asyncio.ensure_future(yields.wait_until(yielded=False))
        await yields.withdraw(OPERATOR, "done", WHO)
        assert yields.record.of(OPERATOR) == ()
        assert yields.record.is_yielded
        await yields.withdraw(PLUGIN, "label is back", "plugin")
        await resumed
        assert names(cluster) == [*["node.yield-requested"] * 2, *["node.yield-ended"] * 2]


@in_virtual_time
async def test_reason_that_an_operator_overrode_requests_nothing_until_the_plugin_has_another_one() -> None:
    async with simulated_cluster(devices=1) as cluster:
        yields = cluster.node.yields
        await yields.request(PLUGIN, "label is paused", "plugin")
        await yields.withdraw(OPERATOR, "the label was forgotten", WHO, everyone=True)
        await yields.request(PLUGIN, "label is paused", "plugin")
        assert not yields.record.is_yielded
        await yields.request(OPERATOR, "driver upgrade", WHO)
        await yields.withdraw(OPERATOR, "done", WHO, everyone=True)
        await yields.request(PLUGIN, "label is paused", "plugin")
        assert not yields.record.is_yielded, "an operator's request does not end the override"
        assert names(cluster) == ["node.yield-requested", "node.yield-ended"] * 2
        for reason in ("label is false", "label is paused"):
            await yields.request(PLUGIN, reason, "plugin")
            assert [each.reason for each in yields.record.yields] == [reason]
        await yields.withdraw(PLUGIN, "done", "plugin")
        cluster.node.publish_yield()


@in_virtual_time
async def test_reason_that_an_operator_overrode_counts_again_once_the_plugin_withdrew_it_after_a_restart() -> None:
    async with simulated_cluster(devices=1) as cluster:
        assert cluster.service is not None
        tools = cluster.service.dependencies
        await cluster.node.yields.request(PLUGIN, "label is paused", "plugin")
        await cluster.node.yields.withdraw(OPERATOR, "the label was forgotten", WHO, everyone=True)
        cluster.node.publish_yield()
        stored = (await cluster.ledger_store.ledger.load()).node
        yields = YieldControl(stored, ledger=tools.ledger, journal=tools.journal, clock=tools.clock)
        await yields.request(PLUGIN, "label is paused", "plugin")
        assert not yields.record.is_yielded
        await yields.withdraw(PLUGIN, "the plugin no longer requests it", "plugin")
        assert names(cluster) == ["node.yield-requested", "node.yield-ended"], "no request has ended"
        await yields.request(PLUGIN, "label is paused", "plugin")
        assert yields.record.is_yielded


@in_virtual_time
async def test_request_of_one_plugin_stands_whatever_another_plugin_of_the_node_requests() -> None:
    async with simulated_cluster(devices=1) as cluster:
        yields = cluster.node.yields
        await yields.request(PLUGIN, "label is paused", "plugin of a")
        await yields.withdraw(PLUGIN, "the plugin no longer requests it", "plugin of b")
        assert [each.actor for each in yields.record.yields] == ["plugin of a"]
        await yields.request(PLUGIN, "label is paused", "plugin of b")
        await yields.request(OPERATOR, "driver upgrade", WHO)
        await yields.withdraw(PLUGIN, "the plugin no longer requests it", "plugin of a")
        assert [each.actor for each in yields.record.yields] == ["plugin of b", WHO]
        await yields.withdraw(OPERATOR, "done", "uid:2000")
        assert [each.actor for each in yields.record.yields] == ["plugin of b"]
        await yields.withdraw(PLUGIN, "the plugin no longer requests it", "plugin of b")
        assert not yields.record.is_yielded
        cluster.node.publish_yield()


@in_virtual_time
async def test_operator_overrides_the_reason_of_every_plugin_and_each_plugin_ends_only_its_own_override() -> None:
    async with simulated_cluster(devices=1) as cluster:
        yields = cluster.node.yields
        for plugin in ("plugin of a", "plugin of b"):
            await yields.request(PLUGIN, "label is paused", plugin)
        await yields.withdraw(OPERATOR, "the label was forgotten", WHO, everyone=True)
        await yields.withdraw(PLUGIN, "the plugin no longer requests it", "plugin of a")
        for plugin in ("plugin of a", "plugin of b"):
            await yields.request(PLUGIN, "label is paused", plugin)
        assert [each.actor for each in yields.record.yields] == ["plugin of a"]
        await yields.withdraw(PLUGIN, "done", "plugin of a")
        cluster.node.publish_yield()


@in_virtual_time
async def test_request_of_one_plugin_too_many_is_refused_and_an_operator_can_end_them_all() -> None:
    async with simulated_cluster(devices=1) as cluster:
        yields = cluster.node.yields
        for number in range(16):
            await yields.request(PLUGIN, "label is paused", f"plugin of {number}")
        with pytest.raises(InvalidRequest, match="16 plugins request already"):
            await yields.request(PLUGIN, "label is paused", "plugin of more")
        await yields.request(PLUGIN, "label is false", "plugin of 0")
        await yields.request(OPERATOR, "driver upgrade", WHO)
        await yields.withdraw(OPERATOR, "done", WHO, everyone=True)
        assert not yields.record.is_yielded
        for number in range(16, 32):
            await yields.request(PLUGIN, "label is paused", f"plugin of {number}")
        await yields.withdraw(OPERATOR, "done", WHO, everyone=True)
        assert len(yields.record.overridden) == 16, "plugins that are gone do not accumulate"
        cluster.node.publish_yield()


@in_virtual_time
async def test_repeated_request_is_recorded_once_and_a_new_reason_keeps_the_time_of_the_first() -> None:
    async with simulated_cluster(devices=1) as cluster:
        yields = cluster.node.yields
        await yields.request(PLUGIN, "label is false", "plugin")
        (first,) = yields.record.yields
        await cluster.run(10)
        await yields.request(PLUGIN, "label is false", "plugin")
        await yields.request(PLUGIN, "label is paused", "plugin")
        (last,) = yields.record.yields
        assert (last.reason, last.since) == ("label is paused", first.since)
        assert names(cluster) == ["node.yield-requested"] * 2
        await yields.withdraw(PLUGIN, "done", "plugin")
        cluster.node.publish_yield()


@in_virtual_time
async def test_request_without_a_reason_is_refused_and_withdrawing_nothing_changes_nothing() -> None:
    async with simulated_cluster(devices=1) as cluster:
        with pytest.raises(InvalidRequest, match="needs a reason"):
            await cluster.node.yields.request(OPERATOR, " ", WHO)
        await cluster.node.yields.withdraw(OPERATOR, "done", WHO)
        assert names(cluster) == []


@in_virtual_time
async def test_request_that_cannot_be_stored_has_no_effect() -> None:
    async with simulated_cluster(devices=1) as cluster:
        cluster.ledger_store.refuses = "The disk is full."
        with pytest.raises(LedgerFailure):
            await cluster.node.yields.request(OPERATOR, "driver upgrade", WHO)
        assert not cluster.node.yields.record.is_yielded


@in_virtual_time
async def test_request_is_completed_although_its_caller_left() -> None:
    async with simulated_cluster(devices=1) as cluster:
        caller = asyncio.ensure_future(cluster.node.yields.request(OPERATOR, "driver upgrade", WHO))
        await asyncio.sleep(0)
        caller.cancel()
        await cluster.node.yields.wait_until(yielded=True)
        assert names(cluster) == ["node.yield-requested"]


@in_virtual_time
async def test_yielded_node_refuses_what_needs_the_driver_and_still_answers_from_the_ledger() -> None:
    async with simulated_cluster(devices=1) as cluster:
        device = cluster.gpu(0).id
        certificate = cluster.node.view().devices[0].record.certificate
        assert certificate is not None
        await cluster.node.yields.request(OPERATOR, "driver upgrade", WHO)
        node = driverless_node(cluster, remaining=frozenset({4711}))
        refused = [
            node.hand_over(HandOverCall((device,))),
            node.actions.reset_plan(device),
            node.actions.quarantine(device, "why", WHO),
            node.actions.unquarantine(device, "why", WHO),
            node.actions.break_glass(device, 60, "why", WHO),
            node.actions.accept_baseline(device, "why", WHO),
        ]
        for each in refused:
            with pytest.raises(NotReady, match="driver upgrade"):
                await each
        with pytest.raises(NotReady, match="driver upgrade"):
            node.actions.scrub(device, PathKind.SLOW, WHO)
        with pytest.raises(NotReady, match="driver upgrade"):
            node.actions.reset(device, "why", WHO)
        assert await node.reserve((device,)) == (), "a refusal would fail the pod for good"
        found = await node.certificate(certificate.id)
        assert (found.certificate, found.status) == (certificate, CertificateStatus.VOIDED)
        (view,) = node.view().devices
        assert (view.advertised, view.record.hygiene, view.record.certificate) == (False, Hygiene.DIRTY, None)
        info = node.service_view()
        assert (info.driver_closed, info.remaining_pids) == (False, (4711,))


@in_virtual_time
async def test_service_that_waits_for_its_driver_says_why_and_can_be_yielded() -> None:
    async with simulated_cluster(devices=1) as cluster:
        device = cluster.gpu(0).id
        error = "The driver is not loaded."
        node = driverless_node(cluster, driver_error=lambda: error)
        assert not node.view().ready
        with pytest.raises(NotReady, match="waits for the driver: The driver is not loaded"):
            node.view().require_ready()
        for refused in (
            node.hand_over(HandOverCall((device,))),
            node.reserve((device,)),
            node.actions.reset_plan(device),
        ):
            with pytest.raises(NotReady, match="The driver is not loaded") as refusal:
                await refused
            assert refusal.value.code == ErrorCode.SERVICE_STARTING
            assert "driver" not in refusal.value.public_message
        error = "The driver does not answer."
        node.publish()
        with pytest.raises(NotReady, match="does not answer"):
            node.view().require_ready()
        await node.yields.request(OPERATOR, "driver upgrade", WHO)
        node.publish()
        assert "driver upgrade" in node.view().yielded
        assert not node.service_view().driver_closed, "a child may still ask the driver"
        with pytest.raises(NotReady, match="driver upgrade"):
            await node.hand_over(HandOverCall((device,)))
