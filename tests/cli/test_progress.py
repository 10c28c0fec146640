"""Progress, apart from any terminal: what is known is shown, what is not known is not, and all of it fits."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scrubber.api import scrubber_pb2 as pb
from scrubber.cli.cells import width
from scrubber.cli.following import Course, Target
from scrubber.cli.progress import Board
from scrubber.cli.verdict import amount
from scrubber.domain.errors import Held

GIB = 1024**3


class Clock:
    """Seconds that pass when a test says so."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def board(clock: Clock) -> Board:
    return Board(clock)


def target(number: int) -> Target:
    return Target(f"GPU-{number}", f"GPU-{number}fe3-0000-1111-2222-333344445555", str(number))


def at(
    done: float, *, total: float = 80, step: str = "memory", phase: str = "clear", number: int = 0, joined: bool = False
) -> Course:
    """Device ``number``, of which ``done`` of ``total`` GiB of a phase are done."""
    progress = pb.ScrubProgress(
        scrub="s-1",
        device=target(number).id,
        step=step,
        phase=phase,
        done_bytes=int(done * GIB),
        total_bytes=int(total * GIB),
        joined=joined,
    )
    return Course(target(number), progress)


def ended(outcome: str, number: int = 0) -> Course:
    return Course(target(number), result=pb.ScrubResult(scrub=pb.Scrub(device=target(number).id, outcome=outcome)))


def shown(board: Board, columns: int = 200) -> str:
    (line,) = board.lines(columns, 50)
    return line[0]


def test_nothing_is_shown_of_nothing(board: Board) -> None:
    assert board.lines(80, 24) == []


def test_a_line_names_device_step_phase_bytes_rate_and_what_remains(board: Board, clock: Clock) -> None:
    board.show(at(0))
    clock.now += 10
    board.show(at(20, joined=True))
    assert shown(board) == (
        "0 GPU-0fe3-0000-1111-2222-333344445555  memory: clear  [#####...............]  20 GiB of 80 GiB  2 GiB/s  "
        "30 s left  joined"
    )


def test_lines_stand_in_the_order_of_the_indexes_whoever_began_first(board: Board) -> None:
    for number in (10, 2, 9, 0):
        board.show(at(1, number=number))
    assert [line.split()[0] for line, _ in board.lines(200, 50)] == ["0", "2", "9", "10"]


def test_ids_that_were_shortened_stay_so_until_the_terminal_is_another_size(board: Board, clock: Clock) -> None:
    columns = 110
    board.show(at(0, joined=True))
    assert target(0).id in shown(board, columns)
    clock.now += 10
    board.show(at(20, joined=True))
    assert "GPU-0fe3-000…" in shown(board, columns)
    board.show(ended("passed"))
    assert "GPU-0fe3-000…" in shown(board, columns)
    assert target(0).id in shown(board, columns + 1)


def test_no_rate_is_made_up_of_what_was_done_before_anybody_looked(board: Board, clock: Clock) -> None:
    board.show(at(40))
    clock.now += 10
    assert "/s" not in shown(board)
    assert "left" not in shown(board)
    board.show(at(50))
    assert "1 GiB/s" in shown(board)
    assert "30 s left" in shown(board)


def test_two_updates_in_one_breath_give_no_rate(board: Board, clock: Clock) -> None:
    board.show(at(0))
    clock.now += 0.01
    board.show(at(40))
    assert "/s" not in shown(board)


def test_a_rate_falls_while_nothing_is_heard(board: Board, clock: Clock) -> None:
    board.show(at(0))
    clock.now += 1
    board.show(at(4))
    assert "4 GiB/s" in shown(board)
    clock.now += 3
    assert "1 GiB/s" in shown(board)


@pytest.mark.parametrize("following", [at(1, phase="verify"), at(1, step="on-chip"), at(1)])
def test_each_phase_has_its_own_rate(board: Board, clock: Clock, following: Course) -> None:
    board.show(at(0))
    clock.now += 10
    board.show(at(80))
    board.show(following)
    assert "/s" not in shown(board)
    clock.now += 1
    assert "/s" not in shown(board)


@pytest.mark.parametrize(
    ("seconds", "text"), [(1, "1:19 left"), (0.5, "40 s left"), (2, "2:38 left"), (4000, "over a day left")]
)
def test_what_remains_reads_as_people_say_it(board: Board, clock: Clock, seconds: float, text: str) -> None:
    board.show(at(0))
    clock.now += seconds
    board.show(at(1))
    assert text in shown(board)


def test_a_step_without_bytes_shows_none(board: Board, clock: Clock) -> None:
    board.show(at(0, total=0, step="holders", phase=""))
    clock.now += 10
    assert shown(board) == f"0 {target(0).id}  holders"


def test_more_done_than_there_is_stays_within_the_bar(board: Board, clock: Clock) -> None:
    board.show(at(0))
    clock.now += 10
    board.show(at(100))
    assert "[####################]" in shown(board)
    assert "0 s left" in shown(board)


def test_before_the_first_step_it_waits(board: Board) -> None:
    board.show(at(0, total=0, step="", phase=""))
    assert shown(board).endswith("waiting")


@pytest.mark.parametrize("outcome", ["passed", "failed", "held-up", "abandoned"])
def test_the_end_is_marked(board: Board, outcome: str) -> None:
    board.show(at(20))
    course = ended(outcome)
    if outcome == "passed":
        course.result.certificate.id = "c-1"  # type: ignore[union-attr]
    board.show(course)
    assert board.lines(80, 24) == [(f"0 {target(0).id}  {outcome}", outcome)]


def test_a_refusal_is_marked(board: Board) -> None:
    board.show(Course(target(0), error=Held("It is in use.")))
    assert board.lines(80, 24) == [(f"0 {target(0).id}  refused", "refused")]


def test_lines_stand_in_columns(board: Board) -> None:
    board.show(at(20, total=80, number=0))
    board.show(at(4, total=80, number=1, step="on-chip", phase="shared"))
    first, second = (line for line, _ in board.lines(200, 24))
    assert first.index("[") == second.index("[")


def test_what_is_less_important_gives_way_first(board: Board, clock: Clock) -> None:
    board.show(at(0))
    clock.now += 10
    board.show(at(20))
    seen = [shown(board, columns) for columns in (120, 80, 60, 40, 10)]
    assert [len(line) <= columns for line, columns in zip(seen, (120, 80, 60, 40, 10), strict=True)] == [True] * 5
    assert "[#####" in seen[0]
    assert "[#" not in seen[1]
    assert "20 GiB of 80 GiB  2 GiB/s  30 s left" in seen[1]
    assert "25 %  30 s left" in seen[2]
    assert "memory: clear  25 %" in seen[3]
    assert seen[4] == "0 memory:…"


def test_those_that_have_ended_give_way_where_rows_are_few(board: Board) -> None:
    for number in range(5):
        board.show(at(1, number=number))
    for number in range(3):
        board.show(ended("failed", number))
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
def test_nothing_runs_past_the_terminal_or_acts_on_it(
    columns: int, rows: int, devices: list[tuple[str, str, int, int]]
) -> None:
    clock = Clock()
    board = Board(clock)
    for number, (id_, step, done, total) in enumerate(devices):
        for factor in (2, 1):
            progress = pb.ScrubProgress(
                device=id_.encode(errors="replace").decode(),
                step=step.encode(errors="replace").decode(),
                done_bytes=done // factor,
                total_bytes=total,
            )
            board.show(Course(Target(str(number), str(number), str(number)), progress))
            clock.now += 1
    lines = [line for line, _ in board.lines(columns, rows)]
    assert len(lines) <= rows
    assert all(width(line) <= columns for line in lines)
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
def test_an_amount_reads_as_people_say_it(count: int, text: str) -> None:
    assert amount(count) == text
