"""A node in a confidential-computing mode, on stand-ins: it becomes ready with certificates, and a pod that can start does.

The stand-in for CUDA opens no context while the GPUs are not ready, in the tenants' pods too.
"""

from __future__ import annotations

import re

from scrubber.domain.attestation import attestation_nonce
from tests.integration.acting import SOON
from tests.integration.nvidia_stage import NvidiaStage, found_by, staged


class ConfidentialStage(NvidiaStage):
    def __init__(self, *, gpus: int = 2) -> None:
        super().__init__(gpus=gpus)
        self.machine.enter_confidential_mode()


async def test_tenants_start_one_after_the_other_with_an_attested_certificate() -> None:
    async with ConfidentialStage(gpus=1) as stage:
        await stage.start_daemons()
        await stage.wait_until_clean(SOON)
        assert (await stage.logged("work-gate.changed"))["accepting"] is False
        certificate = await stage.certificate("0")
        attestation = certificate["attestation"]
        assert re.fullmatch("[0-9a-f]{64}", attestation["digest"])
        nonce = attestation_nonce(
            node=certificate["nodeName"],
            boot=certificate["bootID"],
            device=certificate["deviceID"],
            scrub=certificate["scrubID"],
            previous_grant=certificate["previousGrant"],
        )
        assert attestation["nonce"] == nonce.hex()
        pod = await stage.settled(stage.leaving("global", "a", "team-a"))
        assert stage.machine.gpus_ready
        await stage.delete(pod)
        assert await found_by(await stage.kubelet.run(stage.looking("global", "b", "team-b"))) == 0


async def test_tenant_opens_contexts_while_another_gpu_is_dirty_and_quarantined() -> None:
    async with ConfidentialStage() as stage:
        report = "nvmlDeviceGetConfComputeGpuAttestationReport"
        stage.machine.gpus[1].fail(report, 999)
        await stage.service.start()
        await stage.plugin.start()
        await stage.are("clean", "quarantined")
        (broken,) = [each for each in await stage.command_json("devices") if each["index"] == "1"]
        assert report in broken["cause"]["message"]
        await stage.offers(1)
        await stage.settled(stage.leaving("global", "a", "team-a"))
        assert stage.machine.gpus_ready


async def test_gpus_are_not_ready_after_the_service_has_ended_without_a_tenant() -> None:
    async with ConfidentialStage(gpus=1) as stage:
        await stage.start_daemons()
        await stage.wait_until_clean(SOON)
        await stage.service.stop()
        assert not stage.machine.gpus_ready


async def test_node_without_the_mode_has_certificates_without_an_attestation() -> None:
    async with staged(gpus=1) as stage:
        assert (await stage.certificate("0"))["attestation"] is None
