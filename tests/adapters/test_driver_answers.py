"""Answers of the drivers' children that no driver gives: they make a device unreadable, and change nothing else."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from scrubber.adapters.amd.errors import ErrorCounters
from scrubber.adapters.amd.inventory import AmdInventory
from scrubber.adapters.amd.kernel_files import AmdPaths
from scrubber.adapters.amd.requests import process_memory
from scrubber.adapters.amd.telemetry import AmdTelemetry
from scrubber.adapters.children.driver_response import count, counts, optional_number
from scrubber.adapters.nvidia.description import parse_description
from scrubber.domain.device import Device
from scrubber.domain.errors import Unreadable

ADDRESS = "0000:0c:00.0"
NODE = {
    "name": ADDRESS,
    "gpu_id": 1,
    "partition": 0,
    "memory": 1024,
    "architecture": "gfx942",
    "render": "renderD128",
    "render_number": "226:128",
    "card": "card1",
}
SNAPSHOT: Mapping[str, Any] = {
    "errors": {"umc": {"ue": 0}},
    "records": None,
    "fatal_records": [],
    "pages": {"R": 0},
    "settings": {},
    "defaults": {},
    "used": 0,
    "processes": [],
}
INSTANCE = {"uuid": "MIG-1", "index": 0, "gi": 1, "ci": 0, "total": 1024, "name": ""}
DESCRIPTION: Mapping[str, Any] = {
    "uuid": "GPU-1",
    "name": "NVIDIA H100",
    "minor": 0,
    "total": 8192,
    "mig": True,
    "links": [],
    "instances": [INSTANCE],
}


class Requests:
    """A pool whose child gives one answer."""

    def __init__(self, answer: Mapping[str, Any]) -> None:
        self._answer = answer

    async def request(self, key: str, request: Mapping[str, object]) -> Mapping[str, Any]:
        return self._answer


class Holders:
    async def usage_shows_holder(self, device: Device, answer: Mapping[str, object]) -> bool:
        return False


def describe_amd(*nodes: Mapping[str, object]) -> tuple[Device, ...]:
    inventory = AmdInventory(AmdPaths(Path("/nowhere")), Requests({}), node="n")  # type: ignore[arg-type]
    inventory._indexes[ADDRESS] = 0
    return inventory._compose(ADDRESS, {"nodes": list(nodes)})


async def snapshot_of_amd(**changed: object) -> object:
    requests: Any = Requests({**SNAPSHOT, **changed})
    telemetry = AmdTelemetry(
        requests,
        Holders(),  # type: ignore[arg-type]
        ErrorCounters(Path("/nonexistent"), "boot"),
        devices=tuple,
        fingerprint=str,
        poll_interval=1000.0,
    )
    device = Device("a", "0", "m", 1, traits=(("pci_address", ADDRESS), ("kfd_id", "1")))
    return await telemetry.snapshot(device)


@pytest.mark.parametrize("value", [-1, 2**63, True, 1.0, "1", None])
def test_count_of_a_driver_is_whole_and_not_negative_and_fits_into_the_ledger(value: object) -> None:
    with pytest.raises(Unreadable, match="'n' is not a count"):
        count({"n": value}, "n")
    with pytest.raises(Unreadable, match="'n' is not an object of counts"):
        counts({"n": {"a": value}}, "n")


def test_temperature_below_zero_is_a_number() -> None:
    assert optional_number({"n": -20}, "n") == -20
    with pytest.raises(Unreadable, match="'n' is not a number"):
        optional_number({"n": -(2**63)}, "n")


@pytest.mark.parametrize("row", [[-1, 0], [7, -4096], [7, 2**63]])
def test_process_with_a_negative_number_makes_the_users_of_a_device_unreadable(row: list[int]) -> None:
    with pytest.raises(Unreadable, match="'processes'"):
        process_memory({"processes": [row]})


def test_process_in_two_rows_has_the_larger_memory() -> None:
    assert process_memory({"processes": [[7, 4096], [7, 0]]}) == {7: 4096}


@pytest.mark.parametrize(
    "second",
    [
        {**NODE, "partition": 1},
        {**NODE, "name": "amdgpu_xcp_1"},
        {**NODE, "name": [], "partition": 1},
    ],
    ids=["id", "number", "no-id"],
)
def test_two_partitions_with_one_id_or_one_number_are_refused(second: Mapping[str, object]) -> None:
    assert len(describe_amd(NODE, {**NODE, "name": "amdgpu_xcp_1", "partition": 1})) == 2
    with pytest.raises(Unreadable):
        describe_amd(NODE, second)


@pytest.mark.parametrize("nodes", [{"render": "../mem"}, {"render": "card1"}, {"card": "../mem"}])
def test_container_gets_no_device_node_that_is_not_a_gpus(nodes: Mapping[str, object]) -> None:
    with pytest.raises(Unreadable, match="not the device nodes of a GPU"):
        describe_amd({**NODE, **nodes})


@pytest.mark.parametrize(
    "changed",
    [
        {"errors": {"umc": {"ue": "1"}}},
        {"errors": {"umc": {"ce": -1}}},
        {"errors": {"gfx": {"ue": 2**63}}},
        {"pages": {"P": []}},
        {"pages": [1]},
        {"records": {"fatal": True}},
    ],
    ids=str,
)
async def test_health_of_a_gpu_with_a_counter_that_is_no_count_is_unreadable(changed: dict[str, object]) -> None:
    await snapshot_of_amd()
    with pytest.raises(Unreadable):
        await snapshot_of_amd(**changed)


@pytest.mark.parametrize(
    "text",
    [
        json.dumps({"boot": "b", "atReset": {ADDRESS: {"errors": {"umc": -5}, "records": []}}}),
        json.dumps({"boot": "b", "atReset": {ADDRESS: {"errors": {"umc": True}, "records": []}}}),
        '{"boot": "b", "atReset": {"0000:0c:00.0": {"errors": {"umc": Infinity}, "records": []}}}',
        json.dumps({"boot": "b", "atReset": {ADDRESS: {"errors": {"umc": 1}, "records": "0a"}}}),
        "[" * 100_000,
    ],
    ids=["negative", "true", "infinity", "text", "nested"],
)
def test_damaged_file_of_error_counters_subtracts_nothing(tmp_path: Path, text: str) -> None:
    path = tmp_path / "errors.json"
    path.write_text(text)
    assert ErrorCounters(path, "b").since_reset(ADDRESS, {"umc": 3}) == {"umc": 3}


@pytest.mark.parametrize(
    "changed",
    [
        {"total": 0},
        {"minor": -1},
        {"mig": "false"},
        {"instances": [{**INSTANCE, "total": 0}]},
        {"instances": [INSTANCE, {**INSTANCE, "index": 1}]},
        {"instances": [INSTANCE, {**INSTANCE, "uuid": "MIG-2"}]},
        {"instances": [{**INSTANCE, "name": 0}]},
    ],
    ids=["no-memory", "minor", "mig", "instance-without-memory", "id", "index", "name"],
)
def test_description_of_a_gpu_that_no_driver_gives_is_refused(changed: dict[str, object]) -> None:
    parse_description({**DESCRIPTION})
    with pytest.raises(Unreadable):
        parse_description({**DESCRIPTION, **changed})
