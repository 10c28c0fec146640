"""The names of devices in a pool, for any ids."""

from __future__ import annotations

import re

from hypothesis import given
from hypothesis import strategies as st

from plugin.dra.device_names import device_names

IDS = st.lists(st.text(max_size=90) | st.from_regex(r"(GPU|MIG)-[0-9a-f]{8}(-[0-9a-f]{4}){3}", fullmatch=True))


@given(IDS)
def test_names_are_unique_dns_labels(ids: list[str]) -> None:
    names = device_names(ids)
    assert set(names) == set(ids)
    assert len(set(names.values())) == len(names)
    assert [name for name in names.values() if not re.fullmatch("[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?", name)] == []


def test_name_of_an_nvidia_gpu_is_its_uuid_in_lower_case() -> None:
    uuid = "GPU-1a2b3c4d-0000-1111-2222-333344445555"
    assert device_names([uuid, "SIM-0"]) == {uuid: uuid.lower(), "SIM-0": "sim-0"}
