"""Progress, independent of any terminal: known values are shown, unknown ones are not, and all of it fits."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scrubber.api import scrubber_pb2 as pb
from scrubber.cli.render.progress import ProgressTable
from scrubber.cli.render.scrub_result import format_bytes
from scrubber.cli.render.text_layout import display_width
from scrubber.cli.scrub_updates import ScrubTarget, TargetStatus
from scrubber.domain.errors import DeviceBusy

GIB = 1024**3


class Clock:
    """A clock that a test advances."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def board(clock: Clock) -> ProgressTable:
    return ProgressTable(clock)


def target(number: int) -> ScrubTarget:
    return ScrubTarget(f"GPU-{number}", f"GPU-{number}fe3-0000-1111-2222-333344445555", str(number))


def at(
    done: float, *, total: float = 80, step: str = "memory", phase: str = "clear", number: int = 0, joined: bool = False
) -> TargetStatus:
    """Return device ``number``, of which ``done`` of ``total`` GiB of a phase are done."""
    progress = pb.ScrubProgress(
        scrub_id="s-1",
        device_id=target(number).id,
        step=step,
        phase=phase,
        done_bytes=int(done * GIB),
        total_bytes=int(total * GIB),
        joined=joined,
    )
    return TargetStatus(target(number), progress)


def ended(outcome: str, number: int = 0) -> TargetStatus:
    return TargetStatus(
        target(number), result=pb.ScrubResult(scrub=pb.Scrub(device_id=target(number).id, outcome=outcome))
    )


def shown(board: ProgressTable, columns: int = 200) -> str:
    (line,) = board.lines(columns, 50)
    return line[0]


def test_progress_without_updates_shows_nothing(board: ProgressTable) -> None:
    assert board.lines(80, 24) == []


def test_progress_line_has_device_step_phase_bytes_rate_and_remaining_time(board: ProgressTable, clock: Clock) -> None:
    board.update(at(0))
    clock.now += 10
    board.update(at(20, joined=True))
    assert shown(board) == (
        "0 GPU-0fe3-0000-1111-2222-333344445555  memory: clear  [#####...............]  20 GiB of 80 GiB  2 GiB/s  "
        "30 s left  joined"
    )


def test_progress_lines_are_ordered_by_device_index(board: ProgressTable) -> None:
    for number in (10, 2, 9, 0):
        board.update(at(1, number=number))
    assert [line.split()[0] for line, _ in board.lines(200, 50)] == ["0", "2", "9", "10"]


def test_id_stays_shortened_until_the_terminal_is_resized(board: ProgressTable, clock: Clock) -> None:
    columns = 110
    board.update(at(0, joined=True))
    assert target(0).id in shown(board, columns)
    clock.now += 10
    board.update(at(20, joined=True))
    assert "GPU-0fe3-000…" in shown(board, columns)
    board.update(ended("passed"))
    assert "GPU-0fe3-000…" in shown(board, columns)
    assert target(0).id in shown(board, columns + 1)


def test_bytes_done_before_the_first_update_do_not_count_for_the_rate(board: ProgressTable, clock: Clock) -> None:
    board.update(at(40))
    clock.now += 10
    assert "/s" not in shown(board)
    assert "left" not in shown(board)
    board.update(at(50))
    assert "1 GiB/s" in shown(board)
    assert "30 s left" in shown(board)


def test_updates_too_close_together_give_no_rate(board: ProgressTable, clock: Clock) -> None:
    board.update(at(0))
    clock.now += 0.01
    board.update(at(40))
    assert "/s" not in shown(board)


def test_rate_decreases_without_updates(board: ProgressTable, clock: Clock) -> None:
    board.update(at(0))
    clock.now += 1
    board.update(at(4))
    assert "4 GiB/s" in shown(board)
    clock.now += 3
    assert "1 GiB/s" in shown(board)


@pytest.mark.parametrize("following", [at(1, phase="verify"), at(1, step="on-chip"), at(1)])
def test_each_phase_has_its_own_rate(board: ProgressTable, clock: Clock, following: TargetStatus) -> None:
    board.update(at(0))
    clock.now += 10
    board.update(at(80))
    board.update(following)
    assert "/s" not in shown(board)
    clock.now += 1
    assert "/s" not in shown(board)


@pytest.mark.parametrize(
    ("seconds", "text"), [(1, "1:19 left"), (0.5, "40 s left"), (2, "2:38 left"), (4000, "over a day left")]
)
def test_remaining_time_is_rounded_to_readable_units(
    board: ProgressTable, clock: Clock, seconds: float, text: str
) -> None:
    board.update(at(0))
    clock.now += seconds
    board.update(at(1))
    assert text in shown(board)


def test_step_without_bytes_shows_no_bytes(board: ProgressTable, clock: Clock) -> None:
    board.update(at(0, total=0, step="holders", phase=""))
    clock.now += 10
    assert shown(board) == f"0 {target(0).id}  holders"


def test_progress_bar_does_not_exceed_its_total(board: ProgressTable, clock: Clock) -> None:
    board.update(at(0))
    clock.now += 10
    board.update(at(100))
    assert "[####################]" in shown(board)
    assert "0 s left" in shown(board)


def test_progress_shows_waiting_before_the_first_step(board: ProgressTable) -> None:
    board.update(at(0, total=0, step="", phase=""))
    assert shown(board).endswith("waiting")


@pytest.mark.parametrize("outcome", ["passed", "failed", "blocked", "abandoned"])
def test_finished_scrub_is_marked(board: ProgressTable, outcome: str) -> None:
    board.update(at(20))
    course = ended(outcome)
    if outcome == "passed":
        course.result.certificate.id = "c-1"  # type: ignore[union-attr]
    board.update(course)
    assert board.lines(80, 24) == [(f"0 {target(0).id}  {outcome}", outcome)]


def test_refused_scrub_is_marked(board: ProgressTable) -> None:
    board.update(TargetStatus(target(0), error=DeviceBusy("It is in use.")))
    assert board.lines(80, 24) == [(f"0 {target(0).id}  refused", "refused")]


def test_progress_lines_are_aligned_in_columns(board: ProgressTable) -> None:
    board.update(at(20, total=80, number=0))
    board.update(at(4, total=80, number=1, step="on-chip", phase="shared"))
    first, second = (line for line, _ in board.lines(200, 24))
    assert first.index("[") == second.index("[")


def test_less_important_columns_are_dropped_first(board: ProgressTable, clock: Clock) -> None:
    board.update(at(0))
    clock.now += 10
    board.update(at(20))
    seen = [shown(board, columns) for columns in (120, 80, 60, 40, 10)]
    assert [len(line) <= columns for line, columns in zip(seen, (120, 80, 60, 40, 10), strict=True)] == [True] * 5
    assert "[#####" in seen[0]
    assert "[#" not in seen[1]
    assert "20 GiB of 80 GiB  2 GiB/s  30 s left" in seen[1]
    assert "25 %  30 s left" in seen[2]
    assert "memory: clear  25 %" in seen[3]
    assert seen[4] == "0 memory:…"


def test_finished_devices_are_dropped_first_when_rows_are_scarce(board: ProgressTable) -> None:
    for number in range(5):
        board.update(at(1, number=number))
    for number in range(3):
        board.update(ended("failed", number))
    lines = [line for line, _ in board.lines(80, 4)]
    assert [line[:1] for line in lines] == ["3", "4", "0", "…"]
    assert lines[-1] == "… 5 devices in all, 3 of them done with"


@given(
    columns=st.integers(1, 220),
    rows=st.integers(1, 8),
    devices=st.lists(
        st.tuples(st.text(max_size=60), st.text(max_size=40), st.integers(0, 2**63), st.integers(0, 2**63))
    ),
)
def test_progress_line_stays_within_the_terminal_and_escapes_control_characters(
    columns: int, rows: int, devices: list[tuple[str, str, int, int]]
) -> None:
    clock = Clock()
    board = ProgressTable(clock)
    for number, (id_, step, done, total) in enumerate(devices):
        for factor in (2, 1):
            progress = pb.ScrubProgress(
                device_id=id_.encode(errors="replace").decode(),
                step=step.encode(errors="replace").decode(),
                done_bytes=done // factor,
                total_bytes=total,
            )
            board.update(TargetStatus(ScrubTarget(str(number), str(number), str(number)), progress))
            clock.now += 1
    lines = [line for line, _ in board.lines(columns, rows)]
    assert len(lines) <= rows
    assert all(display_width(line) <= columns for line in lines)
    assert all(line.isprintable() for line in lines)


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 bytes"),
        (1, "1 byte"),
        (1023, "1023 bytes"),
        (1024, "1 KiB"),
        (64 * 1024**2, "64 MiB"),
        (85_031_714_816, "79.2 GiB"),
        (1024**3 - 1, "1 GiB"),
        (5 * 1024**5, "5120 TiB"),
    ],
)
def test_byte_amount_is_shown_in_readable_units(count: int, text: str) -> None:
    assert format_bytes(count) == text
