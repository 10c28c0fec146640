"""Which agents belong to the node's infrastructure, and what their use of a device means."""

from __future__ import annotations

import pytest

from scrubber.domain.infrastructure import (
    InfrastructureClass,
    InfrastructurePod,
    InfrastructureUnit,
    PodIdentity,
    class_of_pod,
    class_of_unit,
    infrastructure_kind,
)
from scrubber.domain.telemetry import HolderKind

MONITORING, DRIVER, VALIDATION = InfrastructureClass
PODS = (
    InfrastructurePod("operator", "exporter", MONITORING),
    InfrastructurePod("operator", "driver-*", DRIVER),
    InfrastructurePod("operator", "validator", VALIDATION),
    InfrastructurePod("monitoring"),
    InfrastructurePod("drivers", "", DRIVER),
)


@pytest.mark.parametrize(
    ("namespace", "account", "expected"),
    [
        ("operator", "exporter", MONITORING),
        ("operator", "driver-a-b", DRIVER),
        ("operator", "validator", VALIDATION),
        ("operator", "driver", None),
        ("operator", "default", None),
        ("operator", None, MONITORING),
        ("monitoring", "anything", MONITORING),
        ("monitoring", None, MONITORING),
        ("drivers", None, DRIVER),
        ("tenant", "exporter", None),
        ("tenant", None, None),
        ("operator-2", None, None),
    ],
)
def test_namespace_decides_and_a_known_account_narrows(
    namespace: str, account: str | None, expected: InfrastructureClass | None
) -> None:
    assert class_of_pod(PODS, PodIdentity(namespace, "exporter-x", "uid-1", account)) is expected


def test_pod_without_a_token_is_never_taken_for_a_driver_that_is_recognized_by_its_account() -> None:
    """An agent that only monitors gains nothing by hiding its account."""
    only_driver = (InfrastructurePod("operator", "driver", DRIVER),)
    assert class_of_pod(only_driver, PodIdentity("operator", "driver-x", "uid-1")) is MONITORING


def test_unit_has_its_class() -> None:
    units = (InfrastructureUnit("a.service"), InfrastructureUnit("b.service", MONITORING))
    assert class_of_unit(units, "a.service") is DRIVER
    assert class_of_unit(units, "b.service") is MONITORING
    assert class_of_unit(units, "c.service") is None
    assert class_of_unit(units, None) is None


@pytest.mark.parametrize("agent_class", InfrastructureClass)
def test_only_a_driver_may_have_a_context(agent_class: InfrastructureClass) -> None:
    assert infrastructure_kind(agent_class, has_context=False) is HolderKind.INFRASTRUCTURE
    expected = HolderKind.INFRASTRUCTURE if agent_class is DRIVER else HolderKind.VALIDATION
    assert infrastructure_kind(agent_class, has_context=True) is expected
