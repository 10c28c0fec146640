"""Faults of a simulated device: an XID is an event and a condition, bad values are refused, writers do not collide."""

import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scrubber.adapters.sim import control
from scrubber.adapters.sim.control import CONDITIONS, Faults, clear, driver_absent, fault, read, read_all
from scrubber.adapters.sim.faults import ABSENT, CODES, RECOVERIES
from scrubber.adapters.sim.inventory import SimInventory
from scrubber.adapters.sim.layout import load, write_json
from scrubber.adapters.sim.shape import MIB, create, split
from scrubber.domain.errors import BadConfiguration, InvalidRequest, Unreadable


@pytest.fixture
def node(tmp_path: Path) -> Path:
    create(tmp_path / "sim", 2, MIB)
    return tmp_path / "sim"


@pytest.fixture
def place(node: Path) -> Path:
    return node / "devices" / "0"


FAULTS = st.builds(
    Faults,
    xids_seen=st.dictionaries(st.integers(1, 999), st.integers(1, 9), max_size=4),
    ecc=st.integers(0, 9),
    lost=st.booleans(),
    stuck=st.booleans(),
    slow_clear=st.floats(0, 3600),
    wont_clear=st.booleans(),
    reset_fails=st.booleans(),
    ghost=st.booleans(),
    unkillable=st.booleans(),
    temperature=st.integers(-40, 150),
    recovery=st.sampled_from(RECOVERIES),
    conditions=st.dictionaries(
        st.sampled_from([*sorted(CODES), "sulking"]), st.sampled_from(["", "x8 of x16"]), max_size=4
    ),
    counters=st.dictionaries(st.sampled_from(["retired_pages", "made_up"]), st.integers(0, 9)),
    firmware=st.sampled_from(["sim-vbios-1", "96.00.89", "A1_b-2"]),
)


@given(FAULTS)
def test_faults_survive_their_file(faults: Faults) -> None:
    assert Faults.from_json(faults.to_json(), "x") == faults
    standing = faults.with_xid(95)
    assert Faults.from_json(standing.to_json(), "x") == standing


@given(FAULTS)
def test_lifting_everything_leaves_a_sound_device_that_remembers_what_it_counted(faults: Faults) -> None:
    sound = faults.with_xid(95).without(CONDITIONS)
    assert sound == Faults(xids_seen=faults.with_xid(95).xids_seen, counters=faults.counters)


@given(FAULTS, FAULTS)
def test_an_instance_is_never_better_off_than_its_gpu(own: Faults, parent: Faults) -> None:
    both = own.joined(parent)
    assert both.ecc >= parent.ecc
    for name in ("lost", "stuck", "wont_clear", "reset_fails", "ghost", "unkillable"):
        assert getattr(both, name) >= getattr(parent, name)
    for mapping in ("conditions", "counters", "xids_seen", "xids_standing"):
        assert getattr(both, mapping).keys() >= getattr(parent, mapping).keys()
    assert parent.recovery == "none" or both.recovery != "none"
    assert both.firmware == parent.firmware  # there is one, and it is the GPU's
    assert own.joined(Faults(temperature=-40, firmware=own.firmware)) == own


def test_an_xid_is_counted_for_good_and_stands_until_it_is_lifted(node: Path, place: Path) -> None:
    fault(node, "0", xid=95)
    assert fault(node, "0", xid=95).xids_seen == {95: 2}
    assert read(place).xids_standing == {95: 2}
    clear(node, "0", ["xid"])
    assert read(place) == Faults(xids_seen={95: 2})


def test_an_xid_that_comes_again_is_counted_anew_by_the_driver(node: Path, place: Path) -> None:
    for _ in range(3):
        fault(node, "0", xid=95)
    clear(node, "0", ["xid"])
    fault(node, "0", xid=95)
    assert read(place) == Faults(xids_seen={95: 4}, xids_standing={95: 1})


def test_ecc_errors_add_up_and_a_reset_lifts_them_with_the_rest(node: Path, place: Path) -> None:
    fault(node, "0", ecc=2, xid=48, recovery="reset", lost=True)
    fault(node, "0", ecc=1)
    assert read(place).ecc == 3
    after = control.change(place, Faults.after_reset)
    assert after == Faults(xids_seen={48: 1}, lost=True)


LASTING = {
    *("hw-slowdown", "hw-thermal-slowdown", "power-brake", "pcie-width", "pcie-generation", "nvlink-down"),
    *("row-remap-failure", "page-retirement-limit", "inforom-corrupt", "events-unheard", "scrub-on-free-disabled"),
}


def test_a_reset_lifts_what_waits_for_one_and_nothing_else(node: Path, place: Path) -> None:
    fault(node, "0", conditions=dict.fromkeys([*CODES, "sulking"], "read"), temperature=99)
    after = control.change(place, Faults.after_reset)
    assert set(after.conditions) == {*LASTING, "sulking"}
    assert after.temperature == 99


@pytest.mark.parametrize(
    ("asked", "left"),
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
def test_a_reset_ends_the_driver_s_request_for_one_and_for_nothing_more(
    node: Path, place: Path, asked: str, left: str
) -> None:
    fault(node, "0", recovery=asked)
    assert control.change(place, Faults.after_reset).recovery == left


def test_what_the_device_counts_over_its_life_survives_resets_and_mending(node: Path, place: Path) -> None:
    fault(node, "0", counters={"retired_pages": 3, "remapped_rows_uncorrectable": 1}, xid=95)
    fault(node, "0", counters={"retired_pages": 4})
    control.change(place, Faults.after_reset)
    clear(node)
    assert read(place) == Faults(xids_seen={95: 1}, counters={"retired_pages": 4, "remapped_rows_uncorrectable": 1})


def test_conditions_are_lifted_one_by_one_or_all_together(node: Path, place: Path) -> None:
    fault(node, "0", conditions={"pcie-width": "x8 of x16", "sulking": "", "power-brake": ""}, lost=True)
    clear(node, "0", ["pcie-width"])
    clear(node, "0", ["pcie-width", "sulking"])
    assert read(place) == Faults(conditions={"power-brake": ""}, lost=True)
    fault(node, "1", conditions={"grumbling": ""})
    clear(node, None, ["condition"])
    assert read(place) == Faults(lost=True)
    assert read(node / "devices" / "1") == Faults()


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
def test_a_condition_or_counter_that_cannot_be_is_refused_and_unreadable_in_a_file(
    node: Path, place: Path, wrong: dict[str, dict[str, object]]
) -> None:
    with pytest.raises(InvalidRequest):
        fault(node, "0", **wrong)  # type: ignore[arg-type]
    assert read(place) == Faults()
    write_json(place / "control.json", wrong)
    with pytest.raises(Unreadable, match=r"control\.json"):
        read(place)


def test_a_file_of_before_there_were_conditions_and_counters_reads_as_it_did(place: Path) -> None:
    flags = dict.fromkeys(["lost", "reset_fails", "stuck", "unkillable", "wont_clear"], False)
    said = {"ecc": 2, "ghost": True, "recovery": "reset", "slow_clear": 1.5, "temperature": 50}
    write_json(place / "control.json", {**flags, **said, "xids": {"95": {"seen": 2, "standing": True}}})
    standing = {95: 2}
    assert read(place) == Faults(
        xids_seen={95: 2}, xids_standing=standing, ecc=2, ghost=True, recovery="reset", slow_clear=1.5, temperature=50
    )


def test_one_condition_can_be_lifted_and_the_others_stay(node: Path, place: Path) -> None:
    fault(node, "0", stuck=True, wont_clear=True, slow_clear=3, reset="fail", temperature=99)
    clear(node, "0", ["stuck", "reset", "slow-clear"])
    assert read(place) == Faults(wont_clear=True, temperature=99)


def test_a_fault_hits_the_named_device_by_id_prefix_or_index(node: Path) -> None:
    first, second = create(node, 2, MIB).devices
    fault(node, first.device.id, lost=True)
    assert read(first.directory).lost
    assert not read(second.directory).lost
    fault(node, second.device.id[:-2], ghost=True)
    assert read(second.directory).ghost


def test_a_fault_of_the_gpu_is_one_of_its_instances(node: Path) -> None:
    part, other = split(node, "0", 2)
    fault(node, "0", xid=95)
    fault(node, part.device.id, ecc=1)
    assert read_all(part.control_directories) == Faults(xids_seen={95: 1}, xids_standing={95: 1}, ecc=1)
    assert read_all(other.control_directories).ecc == 0


def test_the_driver_goes_and_comes_for_the_whole_node(node: Path) -> None:
    assert not driver_absent(node)
    fault(node, driver_absent=True)
    assert driver_absent(node)
    clear(node, "0", ["xid"])
    assert driver_absent(node)
    clear(node)
    assert not driver_absent(node)


def test_a_node_file_that_makes_no_sense_is_no_driver(node: Path) -> None:
    write_json(node / "control.json", {"driver_absent": "maybe"})
    assert driver_absent(node)


def test_clearing_the_node_clears_every_device_and_mends_what_cannot_be_read(node: Path, place: Path) -> None:
    fault(node, "1", lost=True)
    (place / "control.json").write_text("{")
    clear(node)
    assert read(place) == read(node / "devices" / "1") == Faults()


def test_firmware_is_what_somebody_last_wrote_and_neither_a_reset_nor_a_reboot_brings_it_back(
    node: Path, place: Path
) -> None:
    usual = read(place).firmware
    assert fault(node, "0", firmware="96.00.89").firmware == "96.00.89"
    fault(node, "0", firmware="A1_b-2", xid=95)
    assert control.change(place, Faults.after_reset).firmware == "A1_b-2"
    assert control.change(place, Faults.after_reboot).firmware == "A1_b-2"
    clear(node, "0", ["xid"])
    assert read(place).firmware == "A1_b-2"
    clear(node, "0", ["firmware"])
    assert (read(place).firmware, usual) == (usual, Faults().firmware)


def test_instances_say_the_firmware_of_their_gpu(node: Path) -> None:
    part, other = split(node, "0", 2)
    fault(node, "0", firmware="96.00.89")
    assert [read_all(each.control_directories).firmware for each in (part, other)] == ["96.00.89", "96.00.89"]


async def test_the_inventory_describes_each_device_with_its_firmware(node: Path) -> None:
    fault(node, "0", firmware="96.00.89")
    described = await SimInventory(node).devices()
    assert [dict(device.traits) for device in described] == [{"vbios": "96.00.89"}, {"vbios": Faults().firmware}]


@pytest.mark.parametrize("word", ["", " ", "96 00", "-1", "1-", "a..b", "a" * 65, "x\n", "\x1b[2J", "é"])
def test_firmware_that_no_device_could_have_is_refused_and_unreadable_in_a_file(
    node: Path, place: Path, word: str
) -> None:
    with pytest.raises(InvalidRequest, match="no version of firmware"):
        fault(node, "0", firmware=word)
    assert read(place) == Faults()
    write_json(place / "control.json", {"firmware": word})
    with pytest.raises(Unreadable, match=r"control\.json"):
        read(place)


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
def test_a_bad_value_is_refused_with_a_hint_and_changes_nothing(
    node: Path, place: Path, wrong: dict[str, object], hint: str
) -> None:
    with pytest.raises(InvalidRequest, match=hint):
        fault(node, "0", **wrong)  # type: ignore[arg-type]
    assert read(place) == Faults()


def test_a_fault_without_a_device_hits_every_gpu_once_and_its_instances_through_it(node: Path) -> None:
    split(node, "0", 2)
    fault(node, ecc=3)
    found = {each.device.index: read_all(each.control_directories) for each in load(node).devices}
    assert {"0", "0:0", "0:1", "1"} <= found.keys()
    assert {each.ecc for each in found.values()} == {3}


def test_an_unknown_device_or_condition_is_refused(node: Path, tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="No device"):
        fault(node, "9", lost=True)
    with pytest.raises(InvalidRequest, match="slow-clear"):
        clear(node, "0", ["slowness"])
    with pytest.raises(BadConfiguration, match="sim create"):
        fault(tmp_path, "0", lost=True)
    with pytest.raises(BadConfiguration, match="sim create"):
        fault(tmp_path, driver_absent=True)


@pytest.mark.parametrize(
    "document",
    [
        {"ecc": "3"},
        {"ecc": True},
        {"lost": 1},
        {"xids": []},
        {"xids": {"x": {}}},
        {"conditions": []},
        {"conditions": {"pcie-width": 8}},
        {"counters": []},
        {"firmware": 7},
        {"firmware": None},
    ],
)
def test_a_file_that_makes_no_sense_is_unreadable_never_sound(place: Path, document: dict[str, object]) -> None:
    write_json(place / "control.json", document)
    with pytest.raises(Unreadable, match=r"control\.json"):
        read(place)


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
        '{"xids": {"95": {"seen": 1e999, "standing": true}}}',
        '{"xids": {"95": {"seen": -1, "standing": true}}}',
        '{"xids": {"0": {"seen": 1, "standing": true}}}',
        '{"xids": {"99999999999999999999": {"seen": 1, "standing": true}}}',
    ],
)
def test_numbers_and_nesting_beyond_all_bounds_are_unreadable_and_can_be_cleared(
    node: Path, place: Path, content: str
) -> None:
    (place / "control.json").write_text(content)
    with pytest.raises(Unreadable, match=r"control\.json"):
        read(place)
    fault(node, "1", lost=True)
    clear(node)
    assert read(place) == Faults()


def test_writers_do_not_lose_each_other_s_events(node: Path, place: Path) -> None:
    script = (
        "import sys; from pathlib import Path; from scrubber.adapters.sim.control import fault\n"
        "for _ in range(50): fault(Path(sys.argv[1]), '0', xid=95)"
    )
    writers = [subprocess.Popen([sys.executable, "-c", script, str(node)]) for _ in range(2)]
    assert [writer.wait() for writer in writers] == [0, 0]
    assert read(place).xids_seen == {95: 100}
