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
from tests.world.asking import admitted, ask, started
from tests.world.life import Life
from tests.world.matter import gpu
from tests.world.timeline import in_virtual_time
from tests.world.vault import CrashPoint
from tests.world.world import DEFAULT, World, a_world

WHY, WHO = "new VBIOS, ticket 4711", "uid:1000"
STRICT = replace(DEFAULT, health=load_policy("strict").health)
"""The health rules of the shipped strict policy: changed firmware takes a device out of service after a second."""
A_MINUTE = 60.0 + 2 * 5.0
"""The inventory is read once a minute, and a change takes effect with the driver's next answer."""


def told(world: World, name: str) -> list[Event]:
    """Return the audit events of that name."""
    return [event for event in world.vault.events if event.name == name]


def vbios(world: World, number: int = 0) -> str:
    """Return the VBIOS version recorded in the baseline."""
    baseline = world.record(number).baseline
    assert baseline is not None
    return dict(baseline.facts)["vbios"]


async def written(world: World, firmware: str = "vbios-2", number: int = 0) -> None:
    """Change the device's firmware and wait until the inventory reports it."""
    world.gpu(number).firmware = firmware
    world.node.devices.inventory_changed.set()
    await world.until(lambda: ("vbios", firmware) in world.controller(number).state.device.traits)


async def health_is(world: World, health: Health, within: float = 120.0) -> None:
    await world.until(lambda: world.record().health is health, within)


async def accepted(world: World) -> None:
    await world.node.actions.accept_baseline("0", WHY, WHO)


# -- recorded ----------------------------------------------------------------------------------------------------------


@in_virtual_time
async def test_baseline_is_recorded_and_logged_once_when_a_device_first_appears() -> None:
    async with a_world(devices=2) as world:
        for number in (0, 1):
            baseline = world.record(number).baseline
            assert baseline is not None
            assert (baseline.facts, baseline.conditions, baseline.actor, baseline.reason) == (
                (("model", "Labelled One"), ("vbios", "vbios-1")),
                (),
                "service",
                "",
            )
        taken = told(world, "baseline.recorded")
        assert [(event.device, event.actor, dict(event.fields)) for event in taken] == [
            (world.gpu(number).id, "service", {"model": "Labelled One", "vbios": "vbios-1"}) for number in (0, 1)
        ]


@in_virtual_time
async def test_baseline_survives_service_restart_and_node_reboot_and_is_not_recorded_again() -> None:
    async with a_world(devices=1) as world:
        first = world.record().baseline
        world.kill()
        await world.start_service()
        world.reboot()
        await world.start_service()
        await world.until(world.settled)
        assert world.record().baseline == first
        assert len(told(world, "baseline.recorded")) == 1


@in_virtual_time
async def test_records_from_before_baselines_existed_get_a_baseline_at_the_next_start() -> None:
    async with a_world(devices=1, settled=False) as world:
        before = world.vault.next_service(Life(0))
        await before.load()
        await before.commit(LedgerChange(records=(DeviceRecord(world.gpu().id, version=1, boot="boot-1"),)))
        assert world.record().baseline is None
        await world.start_service()
        assert vbios(world) == "vbios-1"
        assert len(told(world, "baseline.recorded")) == 1


@in_virtual_time
async def test_device_that_appears_later_gets_a_baseline_of_its_own() -> None:
    async with a_world(devices=1) as world:
        new = gpu(1)
        world.matter.gpus[new.id] = new
        world.node.devices.inventory_changed.set()
        await world.until(lambda: new.id in world.node.devices.controllers)
        assert vbios(world, 1) == "vbios-1"
        assert [event.device for event in told(world, "baseline.recorded")] == [world.gpu(0).id, new.id]


@in_virtual_time
async def test_device_that_left_and_returned_is_compared_with_its_earlier_baseline() -> None:
    async with a_world(devices=2) as world:
        world.gpu().listed = False
        world.node.devices.inventory_changed.set()
        await world.until(lambda: world.gpu().id not in world.node.devices.controllers)
        world.gpu().listed, world.gpu().firmware = True, "vbios-2"
        world.node.devices.inventory_changed.set()
        await health_is(world, Health.SUSPECT)
        assert vbios(world) == "vbios-1"
        assert len(told(world, "baseline.recorded")) == 2


@pytest.mark.parametrize("durable", [False, True])
@in_virtual_time
async def test_service_killed_while_recording_baselines_records_all_or_none(durable: bool) -> None:
    async with a_world(devices=2, settled=False) as world:
        world.vault.point = CrashPoint(1, durable)
        await world.start_service()
        assert not world.serving
        assert len(told(world, "baseline.recorded")) == (2 if durable else 0)
        await world.start_service()
        await world.until(world.settled)
        assert len(told(world, "baseline.recorded")) == 2


@in_virtual_time
async def test_fact_that_the_baseline_lacks_is_added_at_the_next_start_and_compared_from_then_on() -> None:
    async with a_world(devices=1, settled=False) as world:
        before = world.vault.next_service(Life(0))
        await before.load()
        known = DeviceRecord(world.gpu().id, version=1, boot="boot-1", baseline=Baseline((("model", "Labelled One"),)))
        await before.commit(LedgerChange(records=(known,)))
        await world.start_service()
        await world.until(world.settled)
        assert (vbios(world), world.record().health) == ("vbios-1", Health.HEALTHY)
        assert [dict(event.fields) for event in told(world, "baseline.recorded")] == [{"vbios": "vbios-1"}]
        await written(world)
        await health_is(world, Health.SUSPECT)


# -- changed -----------------------------------------------------------------------------------------------------------


@in_virtual_time
async def test_changed_firmware_makes_a_device_suspect_within_a_minute_without_a_signal() -> None:
    async with a_world(devices=2) as world:
        world.gpu().firmware = "vbios-2"
        await health_is(world, Health.SUSPECT, within=A_MINUTE)
        cause = world.record().cause
        assert cause is not None
        assert (cause.code, cause.recovery_method) == ("baseline-mismatch", RecoveryMethod.OPERATOR)
        assert "vbios is vbios-2, not vbios-1" in cause.message
        assert world.record(1).health is Health.HEALTHY
        assert vbios(world) == "vbios-1"


@in_virtual_time
async def test_firmware_changed_while_no_service_ran_is_detected_at_the_next_start() -> None:
    async with a_world(devices=1) as world:
        world.kill()
        world.gpu().firmware = "vbios-2"
        world.reboot()
        await world.start_service()
        await health_is(world, Health.SUSPECT)
        assert vbios(world) == "vbios-1"


@in_virtual_time
async def test_changed_device_stays_in_service_by_default_and_every_certificate_names_the_warning() -> None:
    async with a_world(devices=1) as world:
        await written(world)
        await health_is(world, Health.SUSPECT)
        assert world.service is not None
        await world.service.scrub(world.gpu().id)
        slow = world.record().certificate
        assert slow is not None
        assert "health: no fault; it warns of baseline-mismatch" in slow.covered
        (granted,) = await ask(world, await admitted(world))
        assert granted.certificate is not None
        fast = world.vault.certificates[granted.certificate]
        assert "health: no fault; it warns of baseline-mismatch" in fast.covered


@in_virtual_time
async def test_container_restart_on_a_changed_device_needs_a_certificate() -> None:
    """The exception that allows a restart on checks alone applies only to devices without suspicion."""
    async with a_world(devices=1) as world:
        tenant = await started(world)
        await world.run(3.0)
        await written(world)
        await health_is(world, Health.SUSPECT)
        world.kubelet.exit(tenant, again=True)
        await world.until(lambda: tenant.starts == 2)
        last = world.record().last_grant
        assert last is not None
        assert last.basis is Basis.CERTIFICATE


@in_virtual_time
async def test_device_with_its_original_firmware_restored_becomes_healthy_without_an_operator() -> None:
    async with a_world(devices=1) as world:
        await written(world)
        await health_is(world, Health.SUSPECT)
        await written(world, "vbios-1")
        await health_is(world, Health.HEALTHY)


@in_virtual_time
async def test_strict_policy_quarantines_a_changed_device_through_time_restarts_and_reboots() -> None:
    async with a_world(devices=1, policy=STRICT) as world:
        await written(world)
        await health_is(world, Health.QUARANTINED, within=20.0)
        cause = world.record().cause
        assert cause is not None
        assert (cause.code, cause.recovery_method) == ("baseline-mismatch", RecoveryMethod.OPERATOR)
        assert not world.node.view().devices[0].advertised
        await world.run(3600.0)
        world.kill()
        await world.start_service()
        world.reboot()
        await world.start_service()
        await world.run(3600.0)
        assert world.record().health is Health.QUARANTINED
        assert world.gpu().resets == 0


@in_virtual_time
async def test_strict_policy_keeps_a_changed_device_quarantined_after_its_firmware_is_restored() -> None:
    """An attacker who changed the firmware can also make it report the original version."""
    async with a_world(devices=1, policy=STRICT) as world:
        await written(world)
        await health_is(world, Health.QUARANTINED)
        await written(world, "vbios-1")
        await world.run(3600.0)
        assert world.record().health is Health.QUARANTINED


@in_virtual_time
async def test_changed_device_released_without_baseline_acceptance_is_quarantined_again() -> None:
    async with a_world(devices=1, policy=STRICT) as world:
        await written(world)
        await health_is(world, Health.QUARANTINED)
        so_far = len(world.laws.health.past)
        await world.node.actions.unquarantine("0", WHY, WHO)
        assert world.record().health is Health.PROBATION
        await health_is(world, Health.QUARANTINED)
        assert not any(record.advertised for _, record in world.laws.health.past[so_far:])


@in_virtual_time
async def test_strict_policy_quarantines_every_changed_device_of_the_node() -> None:
    """The breaker spares devices for faults that may pass; an attacker must not benefit from changing eight of them."""
    async with a_world(devices=8, policy=STRICT) as world:
        for number in range(8):
            await written(world, number=number)
        await world.run(30.0)
        assert [view.advertised for view in world.node.view().devices] == [False] * 8


@in_virtual_time
async def test_baseline_acceptance_without_a_release_leaves_the_device_quarantined() -> None:
    async with a_world(devices=1, policy=STRICT) as world:
        await written(world)
        await health_is(world, Health.QUARANTINED)
        await accepted(world)
        await world.run(3600.0)
        assert world.record().health is Health.QUARANTINED


@pytest.mark.parametrize("accept_first", [True, False])
@in_virtual_time
async def test_baseline_acceptance_and_release_return_a_changed_device_through_probation(accept_first: bool) -> None:
    async with a_world(devices=1, policy=STRICT) as world:
        await written(world)
        await health_is(world, Health.QUARANTINED)
        for accepts in (accept_first, not accept_first):
            await (accepted(world) if accepts else world.node.actions.unquarantine("0", WHY, WHO))
        assert world.record().health is Health.PROBATION
        await health_is(world, Health.HEALTHY)
        await world.run(600.0)
        assert (world.record().health, vbios(world)) == (Health.HEALTHY, "vbios-2")


@in_virtual_time
async def test_tenant_keeps_a_device_quarantined_for_changed_firmware_and_no_later_pod_gets_it() -> None:
    async with a_world(devices=1, policy=STRICT) as world:
        tenant = await started(world)
        await written(world)
        await health_is(world, Health.QUARANTINED)
        assert tenant.first is not None
        assert tenant.first.alive
        (strike,) = world.record().recent_quarantines
        assert (strike.code, strike.tenant) == ("baseline-mismatch", "acme")
        world.kubelet.delete(tenant)
        await world.run(600.0)
        assert world.record().health is Health.QUARANTINED
        assert await world.admit("umbrella", "serve-0") is None


# -- accepted ----------------------------------------------------------------------------------------------------------


@in_virtual_time
async def test_accepted_baseline_is_the_current_reading_and_is_audited_with_actor_and_reason() -> None:
    async with a_world(devices=1) as world:
        await written(world)
        await health_is(world, Health.SUSPECT)
        await accepted(world)
        baseline = world.record().baseline
        assert baseline is not None
        assert (dict(baseline.facts)["vbios"], baseline.actor, baseline.reason) == ("vbios-2", WHO, WHY)
        assert baseline.at == world.clock.wall()
        (event,) = told(world, "baseline.accepted")
        assert (event.device, event.actor) == (world.gpu().id, WHO)
        assert dict(event.fields) == {
            "reason": WHY,
            "current_model": "Labelled One",
            "current_vbios": "vbios-2",
            "previous_model": "Labelled One",
            "previous_vbios": "vbios-1",
        }
        await health_is(world, Health.HEALTHY)
        assert (await world.node.actions.accept_baseline("0", WHY, WHO)).record.health is Health.HEALTHY


@in_virtual_time
async def test_baseline_acceptance_records_firmware_read_at_that_moment() -> None:
    """It records the current firmware, not what the inventory last read, which may be a minute old."""
    async with a_world(devices=1) as world:
        world.gpu().firmware = "vbios-2"
        await accepted(world)
        assert vbios(world) == "vbios-2"
        await world.run(600.0)
        assert [event.name for event in world.vault.events if event.name.startswith("health.")] == []


@in_virtual_time
async def test_baseline_acceptance_succeeds_if_the_expected_values_match_the_current_reading() -> None:
    async with a_world(devices=1) as world:
        await written(world)
        await world.node.actions.accept_baseline("0", WHY, WHO, {"model": "Labelled One", "vbios": "vbios-2"})
        assert vbios(world) == "vbios-2"


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
    async with a_world(devices=1) as world:
        world.gpu().firmware = "vbios-2"
        with pytest.raises(Refused, match="something else by now than what you were shown"):
            await world.node.actions.accept_baseline("0", WHY, WHO, shown)
        assert vbios(world) == "vbios-1"
        assert told(world, "baseline.accepted") == []


@in_virtual_time
async def test_firmware_changed_during_a_baseline_acceptance_is_not_accepted() -> None:
    async with a_world(devices=1) as world:
        await written(world)
        assert world.telemetry is not None
        ask, later = world.telemetry.snapshot, replace(world.controller().state.device, traits=(("vbios", "vbios-3"),))

        async def snapshot(device: Device) -> Snapshot:
            world.controller().state.describe(later)
            return await ask(device)

        world.telemetry.snapshot = snapshot  # type: ignore[method-assign]
        with suppress(Refused):
            await world.node.actions.accept_baseline("0", WHY, WHO, {"model": "Labelled One", "vbios": "vbios-2"})
        assert vbios(world) in ("vbios-1", "vbios-2")


@in_virtual_time
async def test_accepted_baseline_survives_a_restart_and_is_not_recorded_again() -> None:
    async with a_world(devices=1) as world:
        await written(world)
        await accepted(world)
        before = world.record().baseline
        world.kill()
        await world.start_service()
        await world.run(120.0)
        assert world.record().baseline == before
        assert world.record().health is Health.HEALTHY


@in_virtual_time
async def test_lasting_conditions_present_at_acceptance_become_normal_and_transient_ones_do_not() -> None:
    async with a_world(devices=1) as world:
        world.gpu().conditions.update({"pcie-width": "x8 of x16", "power-brake": "0x80"})
        await health_is(world, Health.SUSPECT)
        await accepted(world)
        baseline = world.record().baseline
        assert baseline is not None
        assert baseline.conditions == (("pcie-width", "x8 of x16"),)
        assert told(world, "baseline.accepted")[0].fields["current_pcie-width"] == "x8 of x16"
        await accepted(world)
        assert told(world, "baseline.accepted")[1].fields["previous_pcie-width"] == "x8 of x16"
        await world.run(30.0)
        assert world.record().health is Health.SUSPECT
        del world.gpu().conditions["power-brake"]
        await health_is(world, Health.HEALTHY)
        await world.run(3600.0)
        assert world.record().health is Health.HEALTHY


@in_virtual_time
async def test_accepted_condition_may_disappear_and_return_but_a_different_value_makes_the_device_suspect() -> None:
    async with a_world(devices=1) as world:
        world.gpu().conditions["pcie-width"] = "x8 of x16"
        await health_is(world, Health.SUSPECT)
        await accepted(world)
        await health_is(world, Health.HEALTHY)
        del world.gpu().conditions["pcie-width"]
        await world.run(120.0)
        world.gpu().conditions["pcie-width"] = "x8 of x16"
        await world.run(120.0)
        assert world.record().health is Health.HEALTHY
        world.gpu().conditions["pcie-width"] = "x4 of x16"
        await health_is(world, Health.SUSPECT)


@in_virtual_time
async def test_fault_is_never_accepted_into_the_baseline() -> None:
    async with a_world(devices=1) as world:
        world.gpu().conditions["row-remap-failure"] = "a row could not be remapped"
        await health_is(world, Health.QUARANTINED)
        await accepted(world)
        baseline = world.record().baseline
        assert baseline is not None
        assert baseline.conditions == ()
        await world.node.actions.unquarantine("0", WHY, WHO)
        await health_is(world, Health.QUARANTINED)


@in_virtual_time
async def test_later_baseline_acceptance_drops_conditions_that_are_no_longer_read() -> None:
    async with a_world(devices=1) as world:
        world.gpu().conditions["pcie-width"] = "x8 of x16"
        await health_is(world, Health.SUSPECT)
        await accepted(world)
        del world.gpu().conditions["pcie-width"]
        await accepted(world)
        world.gpu().conditions["pcie-width"] = "x8 of x16"
        await health_is(world, Health.SUSPECT)


@in_virtual_time
async def test_baseline_of_a_device_that_does_not_answer_is_not_accepted() -> None:
    async with a_world(devices=1) as world:
        await written(world)
        world.gpu().stuck = True
        with pytest.raises(DeviceFault):
            await accepted(world)
        assert vbios(world) == "vbios-1"
        assert told(world, "baseline.accepted") == []


@pytest.mark.parametrize(("device", "reason"), [("7", WHY), ("0", ""), ("0", " \n")])
@in_virtual_time
async def test_baseline_acceptance_without_a_device_or_a_reason_changes_nothing(device: str, reason: str) -> None:
    async with a_world(devices=1) as world:
        await written(world)
        with pytest.raises(InvalidRequest):
            await world.node.actions.accept_baseline(device, reason, WHO)
        assert vbios(world) == "vbios-1"


@in_virtual_time
async def test_baseline_acceptance_leaves_the_current_tenant_running() -> None:
    async with a_world(devices=1) as world:
        tenant = await started(world)
        await written(world)
        await health_is(world, Health.SUSPECT)
        await accepted(world)
        assert tenant.first is not None
        assert tenant.first.alive
        assert world.record().hygiene is Hygiene.IN_USE


@pytest.mark.parametrize("durable", [False, True])
@in_virtual_time
async def test_baseline_acceptance_by_a_service_that_is_killed_is_stored_with_its_audit_row_or_not_at_all(
    durable: bool,
) -> None:
    async with a_world(devices=1) as world:
        await written(world)
        await health_is(world, Health.SUSPECT)
        assert world.service is not None
        world.vault.point = CrashPoint(1, durable)
        given = world.service.life.start(accepted(world), "accept")
        await world.until(given.done)
        assert not world.serving
        assert len(told(world, "baseline.accepted")) == int(durable)
        await world.start_service()
        assert vbios(world) == ("vbios-2" if durable else "vbios-1")
