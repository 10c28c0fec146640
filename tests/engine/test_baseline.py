"""The baseline: recorded at first sight, kept across restarts, and changed only by an operator."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace

import pytest

from scrubber.config.policy_file import load_policy
from scrubber.domain.baseline import Baseline
from scrubber.domain.device import Device
from scrubber.domain.errors import DeviceFault, InvalidRequest, Refused
from scrubber.domain.handover_kind import Basis
from scrubber.domain.record import DeviceRecord
from scrubber.domain.states import Health, Hygiene, RecoveryMethod
from scrubber.domain.telemetry import Snapshot
from scrubber.ports.record import Event, LedgerChange
from tests.simulation.cluster import DEFAULT, SimulatedCluster, leisurely_cluster, simulated_cluster
from tests.simulation.ledger_store import CrashPoint
from tests.simulation.life import Life
from tests.simulation.process_table import gpu
from tests.simulation.start_requests import admitted, request_start, started
from tests.simulation.timeline import in_virtual_time

WHY, WHO = "new VBIOS, ticket 4711", "uid:1000"
STRICT = replace(DEFAULT, health=load_policy("strict").health)
"""The health rules of the shipped strict policy: changed firmware takes a device out of service after a second."""
A_MINUTE = 60.0 + 2 * 5.0
"""The inventory is read once a minute, and a change takes effect with the driver's next answer."""


def logged(cluster: SimulatedCluster, name: str) -> list[Event]:
    """Return the audit events of that name."""
    return [event for event in cluster.ledger_store.events if event.name == name]


def vbios(cluster: SimulatedCluster, number: int = 0) -> str:
    """Return the VBIOS version recorded in the baseline."""
    baseline = cluster.record(number).baseline
    assert baseline is not None
    return dict(baseline.facts)["vbios"]


async def written(cluster: SimulatedCluster, firmware: str = "vbios-2", number: int = 0) -> None:
    """Change the device's firmware and wait until the inventory reports it."""
    cluster.gpu(number).firmware = firmware
    cluster.node.devices.inventory_changed.set()
    await cluster.until(lambda: ("vbios", firmware) in cluster.controller(number).state.device.traits)


async def health_is(cluster: SimulatedCluster, health: Health, within: float = 120.0) -> None:
    await cluster.until(lambda: cluster.record().health is health, within)


async def accepted(cluster: SimulatedCluster) -> None:
    await cluster.node.actions.accept_baseline("0", WHY, WHO)


# -- recorded ----------------------------------------------------------------------------------------------------------


@in_virtual_time
async def test_baseline_is_recorded_and_logged_once_when_a_device_first_appears() -> None:
    async with leisurely_cluster(devices=2) as cluster:
        for number in (0, 1):
            baseline = cluster.record(number).baseline
            assert baseline is not None
            assert (baseline.facts, baseline.conditions, baseline.actor, baseline.reason) == (
                (("model", "Labelled One"), ("vbios", "vbios-1")),
                (),
                "service",
                "",
            )
        taken = logged(cluster, "baseline.recorded")
        assert [(event.device, event.actor, dict(event.fields)) for event in taken] == [
            (cluster.gpu(number).id, "service", {"model": "Labelled One", "vbios": "vbios-1"}) for number in (0, 1)
        ]


@in_virtual_time
async def test_baseline_survives_service_restart_and_node_reboot_and_is_not_recorded_again() -> None:
    async with leisurely_cluster(devices=1) as cluster:
        first = cluster.record().baseline
        cluster.kill()
        await cluster.start_service()
        cluster.reboot()
        await cluster.start_service()
        await cluster.until(cluster.settled)
        assert cluster.record().baseline == first
        assert len(logged(cluster, "baseline.recorded")) == 1


@in_virtual_time
async def test_records_from_before_baselines_existed_get_a_baseline_at_the_next_start() -> None:
    async with leisurely_cluster(devices=1, settled=False) as cluster:
        before = cluster.ledger_store.next_service(Life(0))
        await before.load()
        await before.commit(LedgerChange(records=(DeviceRecord(cluster.gpu().id, version=1, boot="boot-1"),)))
        assert cluster.record().baseline is None
        await cluster.start_service()
        assert vbios(cluster) == "vbios-1"
        assert len(logged(cluster, "baseline.recorded")) == 1


@in_virtual_time
async def test_device_that_appears_later_gets_a_baseline_of_its_own() -> None:
    async with leisurely_cluster(devices=1) as cluster:
        new = gpu(1)
        cluster.process_table.gpus[new.id] = new
        cluster.node.devices.inventory_changed.set()
        await cluster.until(lambda: new.id in cluster.node.devices.controllers)
        assert vbios(cluster, 1) == "vbios-1"
        assert [event.device for event in logged(cluster, "baseline.recorded")] == [cluster.gpu(0).id, new.id]


@in_virtual_time
async def test_device_that_left_and_returned_is_compared_with_its_earlier_baseline() -> None:
    async with leisurely_cluster(devices=2) as cluster:
        cluster.gpu().listed = False
        cluster.node.devices.inventory_changed.set()
        await cluster.until(lambda: cluster.gpu().id not in cluster.node.devices.controllers)
        cluster.gpu().listed, cluster.gpu().firmware = True, "vbios-2"
        cluster.node.devices.inventory_changed.set()
        await health_is(cluster, Health.SUSPECT)
        assert vbios(cluster) == "vbios-1"
        assert len(logged(cluster, "baseline.recorded")) == 2


@pytest.mark.parametrize("durable", [False, True])
@in_virtual_time
async def test_service_killed_while_recording_baselines_records_all_or_none(durable: bool) -> None:
    async with leisurely_cluster(devices=2, settled=False) as cluster:
        cluster.ledger_store.point = CrashPoint(1, durable)
        await cluster.start_service()
        assert not cluster.serving
        assert len(logged(cluster, "baseline.recorded")) == (2 if durable else 0)
        await cluster.start_service()
        await cluster.until(cluster.settled)
        assert len(logged(cluster, "baseline.recorded")) == 2


@in_virtual_time
async def test_fact_that_the_baseline_lacks_is_added_at_the_next_start_and_compared_from_then_on() -> None:
    async with leisurely_cluster(devices=1, settled=False) as cluster:
        before = cluster.ledger_store.next_service(Life(0))
        await before.load()
        known = DeviceRecord(
            cluster.gpu().id, version=1, boot="boot-1", baseline=Baseline((("model", "Labelled One"),))
        )
        await before.commit(LedgerChange(records=(known,)))
        await cluster.start_service()
        await cluster.until(cluster.settled)
        assert (vbios(cluster), cluster.record().health) == ("vbios-1", Health.HEALTHY)
        assert [dict(event.fields) for event in logged(cluster, "baseline.recorded")] == [{"vbios": "vbios-1"}]
        await written(cluster)
        await health_is(cluster, Health.SUSPECT)


# -- changed -----------------------------------------------------------------------------------------------------------


@in_virtual_time
async def test_changed_firmware_makes_a_device_suspect_within_a_minute_without_a_signal() -> None:
    async with leisurely_cluster(devices=2) as cluster:
        cluster.gpu().firmware = "vbios-2"
        await health_is(cluster, Health.SUSPECT, within=A_MINUTE)
        cause = cluster.record().cause
        assert cause is not None
        assert (cause.code, cause.recovery_method) == ("baseline-mismatch", RecoveryMethod.OPERATOR)
        assert "vbios is vbios-2, not vbios-1" in cause.message
        assert cluster.record(1).health is Health.HEALTHY
        assert vbios(cluster) == "vbios-1"


@in_virtual_time
async def test_firmware_changed_while_no_service_ran_is_detected_at_the_next_start() -> None:
    async with leisurely_cluster(devices=1) as cluster:
        cluster.kill()
        cluster.gpu().firmware = "vbios-2"
        cluster.reboot()
        await cluster.start_service()
        await health_is(cluster, Health.SUSPECT)
        assert vbios(cluster) == "vbios-1"


@in_virtual_time
async def test_changed_device_stays_in_service_by_default_and_every_certificate_names_the_warning() -> None:
    async with leisurely_cluster(devices=1) as cluster:
        await written(cluster)
        await health_is(cluster, Health.SUSPECT)
        assert cluster.service is not None
        await cluster.service.scrub(cluster.gpu().id)
        slow = cluster.record().certificate
        assert slow is not None
        assert "health: no fault; warnings: baseline-mismatch" in slow.covered
        (granted,) = await request_start(cluster, await admitted(cluster))
        assert granted.certificate is not None
        fast = cluster.ledger_store.certificates[granted.certificate]
        assert "health: no fault; warnings: baseline-mismatch" in fast.covered


@in_virtual_time
async def test_container_restart_on_a_changed_device_needs_a_certificate() -> None:
    """The exception that allows a restart on checks alone applies only to devices without suspicion."""
    async with leisurely_cluster(devices=1) as cluster:
        tenant = await started(cluster)
        await cluster.run(3.0)
        await written(cluster)
        await health_is(cluster, Health.SUSPECT)
        cluster.kubelet.exit(tenant, again=True)
        await cluster.until(lambda: tenant.starts == 2)
        last = cluster.record().last_grant
        assert last is not None
        assert last.basis is Basis.CERTIFICATE


@in_virtual_time
async def test_device_with_its_original_firmware_restored_becomes_healthy_without_an_operator() -> None:
    async with leisurely_cluster(devices=1) as cluster:
        await written(cluster)
        await health_is(cluster, Health.SUSPECT)
        await written(cluster, "vbios-1")
        await health_is(cluster, Health.HEALTHY)


@in_virtual_time
async def test_strict_policy_quarantines_a_changed_device_through_time_restarts_and_reboots() -> None:
    async with leisurely_cluster(devices=1, policy=STRICT) as cluster:
        await written(cluster)
        await health_is(cluster, Health.QUARANTINED, within=20.0)
        cause = cluster.record().cause
        assert cause is not None
        assert (cause.code, cause.recovery_method) == ("baseline-mismatch", RecoveryMethod.OPERATOR)
        assert not cluster.node.view().devices[0].advertised
        await cluster.run(3600.0)
        cluster.kill()
        await cluster.start_service()
        cluster.reboot()
        await cluster.start_service()
        await cluster.run(3600.0)
        assert cluster.record().health is Health.QUARANTINED
        assert cluster.gpu().resets == 0


@in_virtual_time
async def test_strict_policy_keeps_a_changed_device_quarantined_after_its_firmware_is_restored() -> None:
    """An attacker who changed the firmware can also make it report the original version."""
    async with leisurely_cluster(devices=1, policy=STRICT) as cluster:
        await written(cluster)
        await health_is(cluster, Health.QUARANTINED)
        await written(cluster, "vbios-1")
        await cluster.run(3600.0)
        assert cluster.record().health is Health.QUARANTINED


@in_virtual_time
async def test_changed_device_released_without_baseline_acceptance_is_quarantined_again() -> None:
    async with simulated_cluster(devices=1, policy=STRICT) as cluster:
        await written(cluster)
        await health_is(cluster, Health.QUARANTINED)
        so_far = len(cluster.laws.health.past)
        await cluster.node.actions.unquarantine("0", WHY, WHO)
        assert cluster.record().health is Health.PROBATION
        await health_is(cluster, Health.QUARANTINED)
        assert not any(record.advertised for _, record in cluster.laws.health.past[so_far:])


@in_virtual_time
async def test_strict_policy_quarantines_every_changed_device_of_the_node() -> None:
    """The breaker spares devices for faults that may pass; an attacker must not benefit from changing eight of them."""
    async with leisurely_cluster(devices=8, policy=STRICT) as cluster:
        for number in range(8):
            await written(cluster, number=number)
        await cluster.run(30.0)
        assert [view.advertised for view in cluster.node.view().devices] == [False] * 8


@in_virtual_time
async def test_baseline_acceptance_without_a_release_leaves_the_device_quarantined() -> None:
    async with leisurely_cluster(devices=1, policy=STRICT) as cluster:
        await written(cluster)
        await health_is(cluster, Health.QUARANTINED)
        await accepted(cluster)
        await cluster.run(3600.0)
        assert cluster.record().health is Health.QUARANTINED


@pytest.mark.parametrize("accept_first", [True, False])
@in_virtual_time
async def test_baseline_acceptance_and_release_return_a_changed_device_through_probation(accept_first: bool) -> None:
    async with leisurely_cluster(devices=1, policy=STRICT) as cluster:
        await written(cluster)
        await health_is(cluster, Health.QUARANTINED)
        for accepts in (accept_first, not accept_first):
            await (accepted(cluster) if accepts else cluster.node.actions.unquarantine("0", WHY, WHO))
        assert cluster.record().health is Health.PROBATION
        await health_is(cluster, Health.HEALTHY)
        await cluster.run(600.0)
        assert (cluster.record().health, vbios(cluster)) == (Health.HEALTHY, "vbios-2")


@in_virtual_time
async def test_tenant_keeps_a_device_quarantined_for_changed_firmware_and_no_later_pod_gets_it() -> None:
    async with leisurely_cluster(devices=1, policy=STRICT) as cluster:
        tenant = await started(cluster)
        await written(cluster)
        await health_is(cluster, Health.QUARANTINED)
        assert tenant.first is not None
        assert tenant.first.alive
        (strike,) = cluster.record().recent_quarantines
        assert (strike.code, strike.tenant) == ("baseline-mismatch", "acme")
        cluster.kubelet.delete(tenant)
        await cluster.run(600.0)
        assert cluster.record().health is Health.QUARANTINED
        assert await cluster.admit("umbrella", "serve-0") is None


# -- accepted ----------------------------------------------------------------------------------------------------------


@in_virtual_time
async def test_accepted_baseline_is_the_current_reading_and_is_audited_with_actor_and_reason() -> None:
    async with leisurely_cluster(devices=1) as cluster:
        await written(cluster)
        await health_is(cluster, Health.SUSPECT)
        await accepted(cluster)
        baseline = cluster.record().baseline
        assert baseline is not None
        assert (dict(baseline.facts)["vbios"], baseline.actor, baseline.reason) == ("vbios-2", WHO, WHY)
        assert baseline.at == cluster.clock.wall()
        (event,) = logged(cluster, "baseline.accepted")
        assert (event.device, event.actor) == (cluster.gpu().id, WHO)
        assert dict(event.fields) == {
            "reason": WHY,
            "current_model": "Labelled One",
            "current_vbios": "vbios-2",
            "previous_model": "Labelled One",
            "previous_vbios": "vbios-1",
        }
        await health_is(cluster, Health.HEALTHY)
        assert (await cluster.node.actions.accept_baseline("0", WHY, WHO)).record.health is Health.HEALTHY


@in_virtual_time
async def test_baseline_acceptance_records_firmware_read_at_that_moment() -> None:
    """It records the current firmware, not what the inventory last read, which may be a minute old."""
    async with leisurely_cluster(devices=1) as cluster:
        cluster.gpu().firmware = "vbios-2"
        await accepted(cluster)
        assert vbios(cluster) == "vbios-2"
        await cluster.run(600.0)
        assert [event.name for event in cluster.ledger_store.events if event.name.startswith("health.")] == []


@in_virtual_time
async def test_baseline_acceptance_succeeds_if_the_expected_values_match_the_current_reading() -> None:
    async with leisurely_cluster(devices=1) as cluster:
        await written(cluster)
        await cluster.node.actions.accept_baseline("0", WHY, WHO, {"model": "Labelled One", "vbios": "vbios-2"})
        assert vbios(cluster) == "vbios-2"


@pytest.mark.parametrize(
    "shown",
    [
        {"model": "Labelled One", "vbios": "vbios-1"},
        {"model": "Labelled One"},
        {"model": "Labelled One", "vbios": "vbios-2", "serial": "S1"},
    ],
    ids=str,
)
@in_virtual_time
async def test_baseline_acceptance_is_refused_if_the_expected_values_differ_from_the_current_reading(
    shown: dict[str, str],
) -> None:
    """The firmware may change again between the operator's reading and their command."""
    async with leisurely_cluster(devices=1) as cluster:
        cluster.gpu().firmware = "vbios-2"
        with pytest.raises(Refused, match="differs from what you were shown"):
            await cluster.node.actions.accept_baseline("0", WHY, WHO, shown)
        assert vbios(cluster) == "vbios-1"
        assert logged(cluster, "baseline.accepted") == []


@in_virtual_time
async def test_firmware_changed_during_a_baseline_acceptance_is_not_accepted() -> None:
    async with leisurely_cluster(devices=1) as cluster:
        await written(cluster)
        assert cluster.telemetry is not None
        take_snapshot, later = (
            cluster.telemetry.snapshot,
            replace(cluster.controller().state.device, traits=(("vbios", "vbios-3"),)),
        )

        async def snapshot(device: Device) -> Snapshot:
            cluster.controller().state.describe(later)
            return await take_snapshot(device)

        cluster.telemetry.snapshot = snapshot  # type: ignore[method-assign]
        with suppress(Refused):
            await cluster.node.actions.accept_baseline("0", WHY, WHO, {"model": "Labelled One", "vbios": "vbios-2"})
        assert vbios(cluster) in ("vbios-1", "vbios-2")


@in_virtual_time
async def test_accepted_baseline_survives_a_restart_and_is_not_recorded_again() -> None:
    async with leisurely_cluster(devices=1) as cluster:
        await written(cluster)
        await accepted(cluster)
        before = cluster.record().baseline
        cluster.kill()
        await cluster.start_service()
        await cluster.run(120.0)
        assert cluster.record().baseline == before
        assert cluster.record().health is Health.HEALTHY


@in_virtual_time
async def test_lasting_conditions_present_at_acceptance_become_normal_and_transient_ones_do_not() -> None:
    async with leisurely_cluster(devices=1) as cluster:
        cluster.gpu().conditions.update({"pcie-width": "x8 of x16", "power-brake": "0x80"})
        await health_is(cluster, Health.SUSPECT)
        await accepted(cluster)
        baseline = cluster.record().baseline
        assert baseline is not None
        assert baseline.conditions == (("pcie-width", "x8 of x16"),)
        assert logged(cluster, "baseline.accepted")[0].fields["current_pcie-width"] == "x8 of x16"
        await accepted(cluster)
        assert logged(cluster, "baseline.accepted")[1].fields["previous_pcie-width"] == "x8 of x16"
        await cluster.run(30.0)
        assert cluster.record().health is Health.SUSPECT
        del cluster.gpu().conditions["power-brake"]
        await health_is(cluster, Health.HEALTHY)
        await cluster.run(3600.0)
        assert cluster.record().health is Health.HEALTHY


@in_virtual_time
async def test_accepted_condition_may_disappear_and_return_but_a_different_value_makes_the_device_suspect() -> None:
    async with leisurely_cluster(devices=1) as cluster:
        cluster.gpu().conditions["pcie-width"] = "x8 of x16"
        await health_is(cluster, Health.SUSPECT)
        await accepted(cluster)
        await health_is(cluster, Health.HEALTHY)
        del cluster.gpu().conditions["pcie-width"]
        await cluster.run(120.0)
        cluster.gpu().conditions["pcie-width"] = "x8 of x16"
        await cluster.run(120.0)
        assert cluster.record().health is Health.HEALTHY
        cluster.gpu().conditions["pcie-width"] = "x4 of x16"
        await health_is(cluster, Health.SUSPECT)


@in_virtual_time
async def test_fault_is_never_accepted_into_the_baseline() -> None:
    async with leisurely_cluster(devices=1) as cluster:
        cluster.gpu().conditions["row-remap-failure"] = "a row could not be remapped"
        await health_is(cluster, Health.QUARANTINED)
        await accepted(cluster)
        baseline = cluster.record().baseline
        assert baseline is not None
        assert baseline.conditions == ()
        await cluster.node.actions.unquarantine("0", WHY, WHO)
        await health_is(cluster, Health.QUARANTINED)


@in_virtual_time
async def test_later_baseline_acceptance_drops_conditions_that_are_no_longer_read() -> None:
    async with leisurely_cluster(devices=1) as cluster:
        cluster.gpu().conditions["pcie-width"] = "x8 of x16"
        await health_is(cluster, Health.SUSPECT)
        await accepted(cluster)
        del cluster.gpu().conditions["pcie-width"]
        await accepted(cluster)
        cluster.gpu().conditions["pcie-width"] = "x8 of x16"
        await health_is(cluster, Health.SUSPECT)


@in_virtual_time
async def test_baseline_of_a_device_that_does_not_answer_is_not_accepted() -> None:
    async with leisurely_cluster(devices=1) as cluster:
        await written(cluster)
        cluster.gpu().stuck = True
        with pytest.raises(DeviceFault):
            await accepted(cluster)
        assert vbios(cluster) == "vbios-1"
        assert logged(cluster, "baseline.accepted") == []


@pytest.mark.parametrize(("device", "reason"), [("7", WHY), ("0", ""), ("0", " \n")])
@in_virtual_time
async def test_baseline_acceptance_without_a_device_or_a_reason_changes_nothing(device: str, reason: str) -> None:
    async with leisurely_cluster(devices=1) as cluster:
        await written(cluster)
        with pytest.raises(InvalidRequest):
            await cluster.node.actions.accept_baseline(device, reason, WHO)
        assert vbios(cluster) == "vbios-1"


@in_virtual_time
async def test_baseline_acceptance_leaves_the_current_tenant_running() -> None:
    async with leisurely_cluster(devices=1) as cluster:
        tenant = await started(cluster)
        await written(cluster)
        await health_is(cluster, Health.SUSPECT)
        await accepted(cluster)
        assert tenant.first is not None
        assert tenant.first.alive
        assert cluster.record().hygiene is Hygiene.IN_USE


@pytest.mark.parametrize("durable", [False, True])
@in_virtual_time
async def test_baseline_acceptance_by_a_service_that_is_killed_is_stored_with_its_audit_row_or_not_at_all(
    durable: bool,
) -> None:
    async with leisurely_cluster(devices=1) as cluster:
        await written(cluster)
        await health_is(cluster, Health.SUSPECT)
        assert cluster.service is not None
        cluster.ledger_store.point = CrashPoint(1, durable)
        given = cluster.service.life.start(accepted(cluster), "accept")
        await cluster.until(given.done)
        assert not cluster.serving
        assert len(logged(cluster, "baseline.accepted")) == int(durable)
        await cluster.start_service()
        assert vbios(cluster) == ("vbios-2" if durable else "vbios-1")
