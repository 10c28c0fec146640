"""When devices in a confidential-computing mode accept work, and which nonce their reports are requested with."""

from __future__ import annotations

import hashlib

import pytest

from scrubber.domain.attestation import NONCE_BYTES, attestation_nonce
from scrubber.domain.confidential import may_accept_work
from scrubber.domain.states import Health, Hygiene
from tests.simulation.samples import record

CLEAN, DIRTY, SCRUBBING, IN_USE = Hygiene.CLEAN, Hygiene.DIRTY, Hygiene.SCRUBBING, Hygiene.IN_USE
OUT_OF_SERVICE = (DIRTY, Health.QUARANTINED)


@pytest.mark.parametrize(
    ("devices", "accept"),
    [
        ([], False),
        ([CLEAN], True),
        ([IN_USE], True),
        ([DIRTY], False),
        ([SCRUBBING], False),
        ([CLEAN, CLEAN], True),
        ([CLEAN, DIRTY], False),
        ([CLEAN, SCRUBBING], False),
        ([IN_USE, DIRTY], True),
        ([IN_USE, CLEAN], True),
        ([OUT_OF_SERVICE], False),
        ([OUT_OF_SERVICE, CLEAN], True),
        ([OUT_OF_SERVICE, DIRTY], False),
    ],
)
def test_devices_accept_work_if_one_is_in_use_or_all_in_service_are_clean(
    devices: list[Hygiene | tuple[Hygiene, Health]], accept: bool
) -> None:
    states = [each if isinstance(each, tuple) else (each, Health.HEALTHY) for each in devices]
    assert may_accept_work(record(hygiene, health) for hygiene, health in states) is accept


def test_nonce_can_be_computed_from_the_fields_of_a_certificate() -> None:
    nonce = attestation_nonce(node="n", boot="b", device="GPU-1", scrub="scrub-1", previous_grant=3)
    written = b'["scrubber attestation v1","n","b","GPU-1","scrub-1",3]'
    assert nonce == hashlib.sha256(written).digest()
    assert len(nonce) == NONCE_BYTES


@pytest.mark.parametrize("changed", ["node", "boot", "device", "scrub", "previous_grant"])
def test_nonce_differs_for_another_scrub_device_grant_boot_or_node(changed: str) -> None:
    values = {"node": "n", "boot": "b", "device": "GPU-1", "scrub": "scrub-1"}
    other = {**values, changed: "x"} if changed in values else values
    grants = (3, 4) if changed == "previous_grant" else (3, 3)
    one, two = (
        attestation_nonce(**each, previous_grant=grant) for each, grant in zip((values, other), grants, strict=True)
    )
    assert one != two
