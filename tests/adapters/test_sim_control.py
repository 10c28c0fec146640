"""Faults of a simulated device: an XID is an event and a condition, bad values are refused, writers do not conflict."""

import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scrubber.adapters.sim import control
from scrubber.adapters.sim.control import (
    CONDITIONS,
    Faults,
    add_faults,
    clear_faults,
    is_driver_absent,
    read_combined_faults,
    read_faults,
)
from scrubber.adapters.sim.faults import ABSENT, CONDITION_CODES, RECOVERY_ACTIONS
from scrubber.adapters.sim.inventory import SimInventory
from scrubber.adapters.sim.layout import load_node, write_json
from scrubber.adapters.sim.shape import MIB, create, split
from scrubber.domain.errors import InvalidConfiguration, InvalidRequest, Unreadable


@pytest.fixture
def node(tmp_path: Path) -> Path:
    create(tmp_path / "sim", 2, MIB)
    return tmp_path / "sim"


@pytest.fixture
def place(node: Path) -> Path:
    return node / "devices" / "0"


FAULTS = st.builds(
    Faults,
    xid_counts=st.dictionaries(st.integers(1, 999), st.integers(1, 9), max_size=4),
    ecc=st.integers(0, 9),
    lost=st.booleans(),
    stuck=st.booleans(),
    slow_clear=st.floats(0, 3600),
    wont_clear=st.booleans(),
    reset_fails=st.booleans(),
    ghost=st.booleans(),
    unkillable=st.booleans(),
    temperature=st.integers(-40, 150),
    recovery=st.sampled_from(RECOVERY_ACTIONS),
    conditions=st.dictionaries(
        st.sampled_from([*sorted(CONDITION_CODES), "sulking"]), st.sampled_from(["", "x8 of x16"]), max_size=4
    ),
    counters=st.dictionaries(st.sampled_from(["retired_pages", "made_up"]), st.integers(0, 9)),
    firmware=st.sampled_from(["sim-vbios-1", "96.00.89", "A1_b-2"]),
)


@given(FAULTS)
def test_faults_round_trip_through_their_file(faults: Faults) -> None:
    assert Faults.from_json(faults.to_json(), "x") == faults
    active = faults.with_xid(95)
    assert Faults.from_json(active.to_json(), "x") == active


@given(FAULTS)
def test_clearing_all_faults_keeps_the_lifetime_counters(faults: Faults) -> None:
    sound = faults.with_xid(95).without(CONDITIONS)
    assert sound == Faults(xid_counts=faults.with_xid(95).xid_counts, counters=faults.counters)


@given(FAULTS, FAULTS)
def test_instance_has_at_least_the_faults_of_its_gpu(own: Faults, parent: Faults) -> None:
    both = own.combined_with(parent)
    assert both.ecc >= parent.ecc
    for name in ("lost", "stuck", "wont_clear", "reset_fails", "ghost", "unkillable"):
        assert getattr(both, name) >= getattr(parent, name)
    for mapping in ("conditions", "counters", "xid_counts", "active_xids"):
        assert getattr(both, mapping).keys() >= getattr(parent, mapping).keys()
    assert parent.recovery == "none" or both.recovery != "none"
    assert both.firmware == parent.firmware  # there is only the GPU's firmware
    assert own.combined_with(Faults(temperature=-40, firmware=own.firmware)) == own


def test_xid_is_counted_permanently_and_stays_active_until_cleared(node: Path, place: Path) -> None:
    add_faults(node, "0", xid=95)
    assert add_faults(node, "0", xid=95).xid_counts == {95: 2}
    assert read_faults(place).active_xids == {95: 2}
    clear_faults(node, "0", ["xid"])
    assert read_faults(place) == Faults(xid_counts={95: 2})


def test_recurring_xid_is_counted_from_one_by_the_driver(node: Path, place: Path) -> None:
    for _ in range(3):
        add_faults(node, "0", xid=95)
    clear_faults(node, "0", ["xid"])
    add_faults(node, "0", xid=95)
    assert read_faults(place) == Faults(xid_counts={95: 4}, active_xids={95: 1})


def test_ecc_errors_accumulate_and_a_reset_lifts_them(node: Path, place: Path) -> None:
    add_faults(node, "0", ecc=2, xid=48, recovery="reset", lost=True)
    add_faults(node, "0", ecc=1)
    assert read_faults(place).ecc == 3
    after = control.update_faults(place, Faults.after_reset)
    assert after == Faults(xid_counts={48: 1}, lost=True)


LASTING = {
    *("hw-slowdown", "hw-thermal-slowdown", "power-brake", "pcie-width", "pcie-generation", "nvlink-down"),
    *("row-remap-failure", "page-retirement-limit", "inforom-corrupt", "event-stream-lost", "scrub-on-free-disabled"),
}


def test_reset_lifts_only_conditions_that_a_reset_can_lift(node: Path, place: Path) -> None:
    add_faults(node, "0", conditions=dict.fromkeys([*CONDITION_CODES, "sulking"], "read"), temperature=99)
    after = control.update_faults(place, Faults.after_reset)
    assert set(after.conditions) == {*LASTING, "sulking"}
    assert after.temperature == 99


@pytest.mark.parametrize(
    ("requested", "left"),
    [
        ("none", "none"),
        ("reset", "none"),
        ("drain-and-reset", "none"),
        ("bus-reset", "none"),
        ("reboot", "reboot"),
        ("system-reboot", "system-reboot"),
        ("drain-p2p", "drain-p2p"),
        ("imex", "imex"),
        (ABSENT, ABSENT),
    ],
)
def test_reset_satisfies_only_a_driver_request_for_a_reset(node: Path, place: Path, requested: str, left: str) -> None:
    add_faults(node, "0", recovery=requested)
    assert control.update_faults(place, Faults.after_reset).recovery == left


def test_lifetime_counters_survive_resets_and_clearing(node: Path, place: Path) -> None:
    add_faults(node, "0", counters={"retired_pages": 3, "remapped_rows_uncorrectable": 1}, xid=95)
    add_faults(node, "0", counters={"retired_pages": 4})
    control.update_faults(place, Faults.after_reset)
    clear_faults(node)
    assert read_faults(place) == Faults(
        xid_counts={95: 1}, counters={"retired_pages": 4, "remapped_rows_uncorrectable": 1}
    )


def test_conditions_are_cleared_one_by_one_or_all_together(node: Path, place: Path) -> None:
    add_faults(node, "0", conditions={"pcie-width": "x8 of x16", "sulking": "", "power-brake": ""}, lost=True)
    clear_faults(node, "0", ["pcie-width"])
    clear_faults(node, "0", ["pcie-width", "sulking"])
    assert read_faults(place) == Faults(conditions={"power-brake": ""}, lost=True)
    add_faults(node, "1", conditions={"grumbling": ""})
    clear_faults(node, None, ["condition"])
    assert read_faults(place) == Faults(lost=True)
    assert read_faults(node / "devices" / "1") == Faults()


@pytest.mark.parametrize(
    "wrong",
    [
        {"conditions": {"": ""}},
        {"conditions": {"PCIe": ""}},
        {"conditions": {"a b": ""}},
        {"conditions": {"a" * 65: ""}},
        {"conditions": {"lost": ""}},
        {"conditions": {"xid-95": ""}},
        {"conditions": {"pcie-width": "x8\nof x16"}},
        {"conditions": {"pcie-width": "x" * 201}},
        {"counters": {"retired-pages": 1}},
        {"counters": {"retired_pages": -1}},
        {"counters": {"retired_pages": 1 << 60}},
        {"counters": {"retired_pages": True}},
    ],
)
def test_impossible_condition_or_counter_is_refused_and_unreadable_in_a_file(
    node: Path, place: Path, wrong: dict[str, dict[str, object]]
) -> None:
    with pytest.raises(InvalidRequest):
        add_faults(node, "0", **wrong)  # type: ignore[arg-type]
    assert read_faults(place) == Faults()
    write_json(place / "control.json", wrong)
    with pytest.raises(Unreadable, match=r"control\.json"):
        read_faults(place)


def test_one_condition_can_be_cleared_while_others_stay(node: Path, place: Path) -> None:
    add_faults(node, "0", stuck=True, wont_clear=True, slow_clear=3, reset="fail", temperature=99)
    clear_faults(node, "0", ["stuck", "reset", "slow-clear"])
    assert read_faults(place) == Faults(wont_clear=True, temperature=99)


def test_fault_hits_the_device_named_by_id_prefix_or_index(node: Path) -> None:
    first, second = create(node, 2, MIB).devices
    add_faults(node, first.device.id, lost=True)
    assert read_faults(first.directory).lost
    assert not read_faults(second.directory).lost
    add_faults(node, second.device.id[:-2], ghost=True)
    assert read_faults(second.directory).ghost


def test_gpu_fault_is_a_fault_of_its_instances(node: Path) -> None:
    part, other = split(node, "0", 2)
    add_faults(node, "0", xid=95)
    add_faults(node, part.device.id, ecc=1)
    assert read_combined_faults(part.control_directories) == Faults(xid_counts={95: 1}, active_xids={95: 1}, ecc=1)
    assert read_combined_faults(other.control_directories).ecc == 0


def test_driver_is_removed_and_restored_for_the_whole_node(node: Path) -> None:
    assert not is_driver_absent(node)
    add_faults(node, driver_absent=True)
    assert is_driver_absent(node)
    clear_faults(node, "0", ["xid"])
    assert is_driver_absent(node)
    clear_faults(node)
    assert not is_driver_absent(node)


def test_malformed_node_file_means_no_driver(node: Path) -> None:
    write_json(node / "control.json", {"driver_absent": "maybe"})
    assert is_driver_absent(node)


def test_clearing_the_node_clears_every_device_and_replaces_unreadable_files(node: Path, place: Path) -> None:
    add_faults(node, "1", lost=True)
    (place / "control.json").write_text("{")
    clear_faults(node)
    assert read_faults(place) == read_faults(node / "devices" / "1") == Faults()


def test_written_firmware_version_survives_reset_and_reboot_until_cleared(node: Path, place: Path) -> None:
    usual = read_faults(place).firmware
    assert add_faults(node, "0", firmware="96.00.89").firmware == "96.00.89"
    add_faults(node, "0", firmware="A1_b-2", xid=95)
    assert control.update_faults(place, Faults.after_reset).firmware == "A1_b-2"
    assert control.update_faults(place, Faults.after_reboot).firmware == "A1_b-2"
    clear_faults(node, "0", ["xid"])
    assert read_faults(place).firmware == "A1_b-2"
    clear_faults(node, "0", ["firmware"])
    assert (read_faults(place).firmware, usual) == (usual, Faults().firmware)


def test_instances_report_the_firmware_of_their_gpu(node: Path) -> None:
    part, other = split(node, "0", 2)
    add_faults(node, "0", firmware="96.00.89")
    assert [read_combined_faults(each.control_directories).firmware for each in (part, other)] == [
        "96.00.89",
        "96.00.89",
    ]


async def test_inventory_describes_each_device_with_its_firmware(node: Path) -> None:
    add_faults(node, "0", firmware="96.00.89")
    described = await SimInventory(node).devices()
    assert [dict(device.traits) for device in described] == [{"vbios": "96.00.89"}, {"vbios": Faults().firmware}]


@pytest.mark.parametrize("word", ["", " ", "96 00", "-1", "1-", "a..b", "a" * 65, "x\n", "\x1b[2J", "é"])
def test_impossible_firmware_version_is_refused_and_unreadable_in_a_file(node: Path, place: Path, word: str) -> None:
    with pytest.raises(InvalidRequest, match="not a firmware version"):
        add_faults(node, "0", firmware=word)
    assert read_faults(place) == Faults()
    write_json(place / "control.json", {"firmware": word})
    with pytest.raises(Unreadable, match=r"control\.json"):
        read_faults(place)


@pytest.mark.parametrize(
    ("wrong", "hint"),
    [
        ({"xid": 0}, "31, 79 or 95"),
        ({"xid": 10_000}, "31, 79 or 95"),
        ({"ecc": -1}, "uncorrected"),
        ({"slow_clear": 0.0}, "seconds"),
        ({"slow_clear": float("nan")}, "seconds"),
        ({"temperature": 4000}, "Celsius"),
        ({"reset": "maybe"}, "ok or fail"),
        ({"recovery": "pray"}, "none, reset, reboot, drain-p2p"),
        ({}, "xid, ecc, lost"),
    ],
)
def test_invalid_fault_value_is_refused_with_a_hint_and_changes_nothing(
    node: Path, place: Path, wrong: dict[str, object], hint: str
) -> None:
    with pytest.raises(InvalidRequest, match=hint):
        add_faults(node, "0", **wrong)  # type: ignore[arg-type]
    assert read_faults(place) == Faults()


def test_fault_without_a_device_hits_every_gpu_once_and_its_instances_through_the_gpu(node: Path) -> None:
    split(node, "0", 2)
    add_faults(node, ecc=3)
    found = {each.device.index: read_combined_faults(each.control_directories) for each in load_node(node).devices}
    assert {"0", "0:0", "0:1", "1"} <= found.keys()
    assert {each.ecc for each in found.values()} == {3}


def test_unknown_device_or_condition_is_refused(node: Path, tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="No device"):
        add_faults(node, "9", lost=True)
    with pytest.raises(InvalidRequest, match="slow-clear"):
        clear_faults(node, "0", ["slowness"])
    with pytest.raises(InvalidConfiguration, match="sim create"):
        add_faults(tmp_path, "0", lost=True)
    with pytest.raises(InvalidConfiguration, match="sim create"):
        add_faults(tmp_path, driver_absent=True)


@pytest.mark.parametrize(
    "document",
    [
        {"ecc": "3"},
        {"ecc": True},
        {"lost": 1},
        {"xids": []},
        {"xids": {"x": {}}},
        {"xids": {"79": {"seen": 0, "active": 1}}},
        {"xids": {"79": {"seen": 1, "active": "0"}}},
        {"xids": {"79": {"seen": 1.5, "active": 1}}},
        {"xids": {"79": {"seen": 1, "active": True}}},
        {"xids": {"079": {"seen": 1, "active": 1}}},
        {"conditions": []},
        {"conditions": {"pcie-width": 8}},
        {"counters": []},
        {"firmware": 7},
        {"firmware": None},
    ],
)
def test_malformed_control_file_is_unreadable_never_healthy(place: Path, document: dict[str, object]) -> None:
    write_json(place / "control.json", document)
    with pytest.raises(Unreadable, match=r"control\.json"):
        read_faults(place)


@pytest.mark.parametrize(
    "content",
    [
        "[" * 100_000,
        '{"slow_clear": Infinity}',
        '{"slow_clear": 1e999}',
        '{"slow_clear": -1}',
        '{"temperature": NaN}',
        '{"temperature": 99999999999999999999}',
        '{"ecc": -1}',
        '{"ecc": 9223372036854775808}',
        '{"recovery": "pray"}',
        '{"recovery": "\\ud800"}',
        '{"xids": {"95": {"seen": 1e999, "active": true}}}',
        '{"xids": {"95": {"seen": -1, "active": true}}}',
        '{"xids": {"0": {"seen": 1, "active": true}}}',
        '{"xids": {"99999999999999999999": {"seen": 1, "active": true}}}',
    ],
)
def test_excessive_numbers_and_nesting_are_unreadable_and_can_be_cleared(node: Path, place: Path, content: str) -> None:
    (place / "control.json").write_text(content)
    with pytest.raises(Unreadable, match=r"control\.json"):
        read_faults(place)
    add_faults(node, "1", lost=True)
    clear_faults(node)
    assert read_faults(place) == Faults()


def test_concurrent_writers_lose_no_event(node: Path, place: Path) -> None:
    script = (
        "import sys; from pathlib import Path; from scrubber.adapters.sim.control import add_faults\n"
        "for _ in range(50): add_faults(Path(sys.argv[1]), '0', xid=95)"
    )
    writers = [subprocess.Popen([sys.executable, "-c", script, str(node)]) for _ in range(2)]
    assert [writer.wait() for writer in writers] == [0, 0]
    assert read_faults(place).xid_counts == {95: 100}
