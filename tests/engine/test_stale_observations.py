"""Conclusions from an outdated record of a device change nothing about the device."""

from __future__ import annotations

from dataclasses import replace

from tests.simulation.cluster import simulated_cluster
from tests.simulation.samples import assignment, pod
from tests.simulation.start_requests import started
from tests.simulation.timeline import in_virtual_time


@in_virtual_time
async def test_check_that_began_before_a_certificate_was_issued_does_not_void_the_certificate() -> None:
    async with simulated_cluster(1) as cluster:
        controller = cluster.controller()
        record = controller.state.record
        assert record.certificate is not None
        seen = replace(record, certificate=replace(record.certificate, id="cert-before"))
        assert not await controller.occupancy.void_certificate(seen)
        assert controller.state.record is record


@in_virtual_time
async def test_pod_that_has_a_grant_is_not_adopted_again() -> None:
    async with simulated_cluster(1) as cluster:
        tenant = await started(cluster)
        controller = cluster.controller()
        record = controller.state.record
        await controller.occupancy.adopt(assignment(tenant.pod))
        assert controller.state.record is record


@in_virtual_time
async def test_pod_and_container_of_an_earlier_grant_are_not_recorded_with_the_last_grant() -> None:
    async with simulated_cluster(1) as cluster:
        await started(cluster)
        controller = cluster.controller()
        record = controller.state.record
        await controller.occupancy.record_grant_pod(record.grant_sequence - 1, assignment(pod("umbrella")), ())
        await controller.occupancy.record_started_container(record.grant_sequence - 1, "cgroup-before", "another")
        assert controller.state.record is record
