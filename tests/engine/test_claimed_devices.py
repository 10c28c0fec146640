"""Devices whose facts are claims of a command: what the policy must accept, and which error codes are whose."""

from __future__ import annotations

from dataclasses import replace

from scrubber.adapters.command.conditions import COMMAND_SIGNALS
from scrubber.adapters.nvidia.conditions import NVIDIA_SIGNALS
from scrubber.domain.handover_kind import Basis
from scrubber.domain.health.signal_table import ErrorClass
from scrubber.domain.policy import MemoryRule, Policy, PolicyOverride
from scrubber.domain.states import Health, Hygiene
from tests.simulation.cluster import DEFAULT, SimulatedCluster, simulated_cluster
from tests.simulation.process_table import Gpu, gpu
from tests.simulation.start_requests import TRUSTED, admitted, refusal_of, request_start, started
from tests.simulation.timeline import in_virtual_time

CLAIMANT = "command sha256:c0ffee"
ACCEPTING = replace(DEFAULT, memory=replace(MemoryRule(), accept_claims=True))


def claimed(number: int = 0, backend: str = "") -> Gpu:
    """Return a device of which the service measures nothing."""
    found = gpu(number)
    found.device = replace(found.device, claimed_by=CLAIMANT, backend=backend)
    return found


@in_virtual_time
async def test_device_whose_claims_the_policy_does_not_accept_is_handed_to_no_pod_and_the_message_names_the_setting() -> (
    None
):
    async with simulated_cluster(gpus=[claimed()], settled=False) as cluster:
        await cluster.start_service()
        tenant = await admitted(cluster)
        await cluster.run(60.0)
        assert (cluster.record().hygiene, cluster.record().health) == (Hygiene.DIRTY, Health.HEALTHY)
        assert cluster.erasers.started == 0
        assert cluster.record().grant_sequence == 0
        refused = await refusal_of(request_start(cluster, tenant, wait=5.0))
        assert CLAIMANT in str(refused)
        assert "set memory.acceptClaims: true in the policy" in str(refused)
        cluster.policy = ACCEPTING
        await cluster.until(lambda: cluster.record().is_certified, within=120.0)
        await request_start(cluster, tenant)


@in_virtual_time
async def test_container_that_restarts_on_a_claimed_device_needs_a_certificate_where_a_measured_one_needs_checks() -> (
    None
):
    policy = replace(TRUSTED, memory=ACCEPTING.memory)
    async with simulated_cluster(policy=policy, gpus=[claimed(0), gpu(1)]) as cluster:
        for number, basis in enumerate((Basis.CERTIFICATE, Basis.SAME_CONTAINER)):
            tenant = await started(cluster, "acme", f"train-{number}", number)
            await cluster.run(2.0)
            cluster.kubelet.exit(tenant, again=True)
            await cluster.until(lambda tenant=tenant: tenant.starts == 2, within=60.0)  # type: ignore[misc]
            last = cluster.record(number).last_grant
            assert last is not None
            assert last.basis is basis
            assert cluster.record(number).grant_sequence == 2


# -- several backends on one node ----------------------------------------------------------------------------------------


def of_two_backends() -> Policy:
    """Return a policy in whose tables the error codes 7 and 79 mean something else for each backend."""
    policy = replace(
        ACCEPTING, own_error_classes={7: ErrorClass.RESET, 79: ErrorClass.IGNORE}, error_notes={7: "a note of NVIDIA"}
    )
    policy = replace(policy, error_classes={**policy.error_classes, 7: ErrorClass.IGNORE})
    tables = {"nvidia": NVIDIA_SIGNALS, "command": COMMAND_SIGNALS}
    override = PolicyOverride(replace(policy, name="default/other"), models=("Another *",))
    return replace(policy, overrides=(override,)).with_signals(NVIDIA_SIGNALS.merged_with([COMMAND_SIGNALS]), tables)


def two_backends() -> list[Gpu]:
    measured = gpu(0)
    measured.device = replace(measured.device, backend="nvidia")
    overridden = claimed(2, "command")
    overridden.device = replace(overridden.device, model="Another Two")
    return [measured, claimed(1, "command"), overridden]


def quarantines(cluster: SimulatedCluster) -> list[tuple[str | None, str, object]]:
    found = [each for each in cluster.ledger_store.events if each.name == "health.quarantined"]
    return [(each.device, str(each.fields["cause"]), each.fields["message"]) for each in found]


@in_virtual_time
async def test_error_codes_mean_what_the_table_of_the_devices_own_backend_says() -> None:
    async with simulated_cluster(policy=of_two_backends(), gpus=two_backends()) as cluster:
        for number in range(3):
            cluster.gpu(number).report_xid(7)
        await cluster.until(lambda: [each.resets for each in map(cluster.gpu, range(3))] == [0, 1, 1], within=120.0)
        await cluster.until(cluster.settled, within=600.0)
        assert [each[:2] for each in quarantines(cluster)] == [(cluster.gpu(number).id, "error-7") for number in (1, 2)]
        assert "a note of NVIDIA" not in str(quarantines(cluster))


@in_virtual_time
async def test_error_code_that_one_backend_ignores_takes_only_the_other_backends_device_out_of_service() -> None:
    async with simulated_cluster(policy=of_two_backends(), gpus=two_backends()) as cluster:
        for number in range(3):
            cluster.gpu(number).report_xid(79)
        await cluster.until(lambda: cluster.record(0).health is Health.QUARANTINED)
        await cluster.run(30.0)
        assert [each[:2] for each in quarantines(cluster)] == [(cluster.gpu(0).id, "xid-79")]
