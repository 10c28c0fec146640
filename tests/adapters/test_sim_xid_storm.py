"""A storm of XIDs on a simulated device: as many as requested, no faster, and none lost on a busy machine."""

from pathlib import Path

import pytest

from scrubber.adapters.sim import control
from scrubber.adapters.sim.shape import MIB, create
from scrubber.adapters.sim.xid_storm import XidStormResult, raise_xids
from scrubber.domain.errors import InvalidConfiguration, InvalidRequest


@pytest.fixture
def node(tmp_path: Path) -> Path:
    create(tmp_path / "sim", 2, MIB)
    return tmp_path / "sim"


class Time:
    """A clock that a sleep advances, and each reading by ``slow`` seconds."""

    def __init__(self, slow: float = 0.0) -> None:
        self.now, self.slow = 1000.0, slow
        self.slept: list[float] = []

    def clock(self) -> float:
        self.now += self.slow
        return self.now

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds


def test_xids_are_raised_in_turn_each_as_its_own_change_at_the_requested_rate(node: Path) -> None:
    time = Time()
    done = raise_xids(node, "0", [31, 13, 95], repeat=10, rate=4.0, clock=time.clock, sleep=time.sleep)
    assert done == XidStormResult(raised=10, changes=10, seconds=2.25)
    assert time.slept == [0.25] * 9
    assert control.read_faults(node / "devices" / "0").xid_counts == {31: 4, 13: 3, 95: 3}
    assert control.read_faults(node / "devices" / "1") == control.Faults()


def test_delayed_xids_are_raised_together_and_none_is_lost(node: Path) -> None:
    time = Time(slow=1.0)
    done = raise_xids(node, "0", [31, 13], repeat=20, rate=4.0, clock=time.clock, sleep=time.sleep)
    assert done.raised == 20
    assert done.changes < 20
    assert control.read_faults(node / "devices" / "0").xid_counts == {31: 10, 13: 10}


@pytest.mark.parametrize(
    "wrong",
    [
        {"codes": []},
        {"codes": [0]},
        {"codes": [10_000]},
        {"repeat": 0},
        {"rate": 0.0},
        {"rate": float("nan")},
        {"device": "9"},
    ],
)
def test_impossible_xid_storm_is_refused_and_changes_nothing(node: Path, wrong: dict[str, object]) -> None:
    requested: dict[str, object] = {"device": "0", "codes": [31], "repeat": 5, "rate": 10.0, **wrong}
    with pytest.raises(InvalidRequest):
        raise_xids(node, **requested)  # type: ignore[arg-type]
    assert control.read_faults(node / "devices" / "0") == control.Faults()


def test_xid_storm_without_a_node_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidConfiguration, match="sim create"):
        raise_xids(tmp_path, "0", [31], repeat=1, rate=1.0)
