"""The configured type of the node's condition: what is accepted, and what is never written."""

import pytest

from plugin.cluster.condition import ConditionFormat
from scrubber.domain.errors import InvalidConfiguration


@pytest.mark.parametrize("type_", ["GpusInService", "AcceleratedHardwareReady", "example.com/Gpu_Problem", "a" * 63])
def test_name_of_a_condition_is_accepted(type_: str) -> None:
    assert ConditionFormat(type_).type == type_


@pytest.mark.parametrize("type_", ["", "-a", "a b", "/a", "a/", "A.com/x", "a/b/c", "a" * 64, "ä", "a\n"])
def test_invalid_name_of_a_condition_is_refused(type_: str) -> None:
    with pytest.raises(InvalidConfiguration, match="is not a valid type of a condition"):
        ConditionFormat(type_)


@pytest.mark.parametrize("type_", ["Ready", "MemoryPressure", "DiskPressure", "PIDPressure", "NetworkUnavailable"])
def test_condition_that_kubernetes_schedules_by_is_never_written(type_: str) -> None:
    with pytest.raises(InvalidConfiguration, match="belongs to Kubernetes"):
        ConditionFormat(type_)
