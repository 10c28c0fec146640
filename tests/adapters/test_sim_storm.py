"""A storm of XIDs on a simulated device: as many as were asked for, no faster, and none lost on a busy machine."""

from pathlib import Path

import pytest

from scrubber.adapters.sim import control
from scrubber.adapters.sim.shape import MIB, create
from scrubber.adapters.sim.storm import Storm, storm
from scrubber.domain.errors import BadConfiguration, InvalidRequest


@pytest.fixture
def node(tmp_path: Path) -> Path:
    create(tmp_path / "sim", 2, MIB)
    return tmp_path / "sim"


class Time:
    """A clock that goes on when somebody sleeps, and by ``slow`` seconds with each look at it."""

    def __init__(self, slow: float = 0.0) -> None:
        self.now, self.slow = 1000.0, slow
        self.slept: list[float] = []

    def clock(self) -> float:
        self.now += self.slow
        return self.now

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds


def test_codes_are_raised_in_turn_each_by_a_change_of_its_own_at_the_rate_that_was_asked_for(node: Path) -> None:
    time = Time()
    done = storm(node, "0", [31, 13, 95], repeat=10, rate=4.0, clock=time.clock, sleep=time.sleep)
    assert done == Storm(raised=10, changes=10, seconds=2.25)
    assert time.slept == [0.25] * 9
    assert control.read(node / "devices" / "0").xids_seen == {31: 4, 13: 3, 95: 3}
    assert control.read(node / "devices" / "1") == control.Faults()


def test_what_is_late_is_raised_together_and_nothing_is_left_out(node: Path) -> None:
    time = Time(slow=1.0)
    done = storm(node, "0", [31, 13], repeat=20, rate=4.0, clock=time.clock, sleep=time.sleep)
    assert done.raised == 20
    assert done.changes < 20
    assert control.read(node / "devices" / "0").xids_seen == {31: 10, 13: 10}


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
def test_a_storm_that_cannot_be_is_refused_and_changes_nothing(node: Path, wrong: dict[str, object]) -> None:
    asked: dict[str, object] = {"device": "0", "codes": [31], "repeat": 5, "rate": 10.0, **wrong}
    with pytest.raises(InvalidRequest):
        storm(node, **asked)  # type: ignore[arg-type]
    assert control.read(node / "devices" / "0") == control.Faults()


def test_without_a_node_there_is_no_storm(tmp_path: Path) -> None:
    with pytest.raises(BadConfiguration, match="sim create"):
        storm(tmp_path, "0", [31], repeat=1, rate=1.0)
