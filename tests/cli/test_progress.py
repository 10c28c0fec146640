"""Progress, independent of any terminal: known values are shown, unknown ones are not, and all of it fits."""

import io

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from scrubber.api import scrubber_pb2 as pb
from scrubber.cli.render.progress import LiveProgress
from scrubber.cli.render.scrub_result import format_bytes
from scrubber.cli.render.table import display_width, render_lines
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
def progress(clock: Clock) -> LiveProgress:
    return live_progress(clock)


def live_progress(clock: Clock, columns: int = 200, rows: int = 51) -> LiveProgress:
    return LiveProgress(Console(file=io.StringIO(), width=columns, height=rows, force_terminal=True), clock)


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


def lines(progress: LiveProgress, *, colours: bool = False) -> list[str]:
    return render_lines(progress.lines.get_renderables(), progress.lines.console.width, colours=colours)


def shown(progress: LiveProgress, columns: int = 200) -> str:
    progress.lines.console.width = columns
    (line,) = lines(progress)
    return line


def scrubbing(progress: LiveProgress, clock: Clock) -> None:
    """Observe 20 of 80 GiB at 2 GiB a second; what was done before the second update is not observed."""
    progress.update(at(0, joined=True))
    clock.now += 1
    progress.update(at(2, joined=True))
    clock.now += 9
    progress.update(at(20, joined=True))


def test_progress_without_updates_shows_nothing(progress: LiveProgress) -> None:
    assert lines(progress) == []


def test_progress_line_has_device_step_phase_bar_bytes_rate_and_remaining_time(
    progress: LiveProgress, clock: Clock
) -> None:
    scrubbing(progress, clock)
    line = shown(progress)
    assert line.startswith("0 GPU-0fe3-0000-1111-2222-333344445555 memory: clear ━━━━━")
    assert line.endswith(" 20.0/80.0 GiB 2 GiB/s 0:00:30 joined")


def test_progress_lines_are_ordered_by_device_index(progress: LiveProgress) -> None:
    for number in (10, 2, 9, 0):
        progress.update(at(1, number=number))
    assert [line.split()[0] for line in lines(progress)] == ["0", "2", "9", "10"]


def test_bytes_done_before_the_first_update_do_not_count_for_the_rate(progress: LiveProgress, clock: Clock) -> None:
    progress.update(at(40))
    clock.now += 10
    assert "/s" not in shown(progress)
    assert "0:00" not in shown(progress)
    progress.update(at(45))
    clock.now += 10
    progress.update(at(55))
    assert "1 GiB/s 0:00:25" in shown(progress)


@pytest.mark.parametrize("following", [at(1, phase="verify"), at(1, step="on-chip"), at(1)])
def test_each_phase_has_its_own_rate(progress: LiveProgress, clock: Clock, following: TargetStatus) -> None:
    scrubbing(progress, clock)
    assert "/s" in shown(progress)
    progress.update(following)
    assert "/s" not in shown(progress)
    clock.now += 1
    assert "/s" not in shown(progress)


def test_step_without_bytes_shows_no_bytes(progress: LiveProgress, clock: Clock) -> None:
    progress.update(at(0, total=0, step="holders", phase=""))
    clock.now += 10
    assert shown(progress) == f"0 {target(0).id} holders"


def test_progress_does_not_exceed_its_total(progress: LiveProgress, clock: Clock) -> None:
    scrubbing(progress, clock)
    clock.now += 10
    progress.update(at(100))
    assert f"{'━' * 20} 80.0/80.0 GiB" in shown(progress)
    assert "0:00:00" in shown(progress)


def test_progress_shows_waiting_before_the_first_step(progress: LiveProgress) -> None:
    progress.update(at(0, total=0, step="", phase=""))
    assert shown(progress).endswith("waiting")


@pytest.mark.parametrize(
    ("outcome", "colour"), [("passed", 32), ("failed", 31), ("blocked", 33), ("abandoned", 31)], ids=str
)
def test_finished_scrub_shows_only_its_outcome(progress: LiveProgress, clock: Clock, outcome: str, colour: int) -> None:
    scrubbing(progress, clock)
    status = ended(outcome)
    if outcome == "passed":
        assert status.result is not None
        status.result.certificate.id = "c-1"
    progress.update(status)
    assert shown(progress) == f"0 {target(0).id} {outcome}"
    assert f"\x1b[{colour}m{outcome}" in lines(progress, colours=True)[0]


def test_refused_scrub_is_marked(progress: LiveProgress) -> None:
    progress.update(TargetStatus(target(0), error=DeviceBusy("It is in use.")))
    assert shown(progress) == f"0 {target(0).id} refused"


def test_progress_lines_are_aligned_in_columns(progress: LiveProgress) -> None:
    progress.update(at(20, total=80, number=0))
    progress.update(at(4, total=80, number=1, step="on-chip", phase="shared"))
    first, second = lines(progress)
    assert first.index("━") == second.index("━")


def test_narrower_terminal_shows_fewer_columns(progress: LiveProgress, clock: Clock) -> None:
    scrubbing(progress, clock)
    assert shown(progress, 100) == "0 GPU-0fe3-000… memory: clear 20.0/80.0 GiB 2 GiB/s 0:00:30 joined"
    assert shown(progress, 60) == "0 GPU-0fe3-000… memory: clear  25%"
    assert shown(progress, 20) == "0 memory: clear  25%"
    assert len(shown(progress, 10)) <= 10


def test_finished_devices_are_dropped_first_when_rows_are_scarce(progress: LiveProgress) -> None:
    for number in range(5):
        progress.update(at(1, number=number))
    for number in range(3):
        progress.update(ended("failed", number))
    progress.lines.console.height = 5
    found = lines(progress)
    assert [line[:1] for line in found] == ["3", "4", "0", "…"]
    assert found[-1] == "… 5 devices, 3 finished"


@given(
    columns=st.integers(8, 220),
    rows=st.integers(2, 9),
    devices=st.lists(
        st.tuples(st.text(max_size=60), st.text(max_size=40), st.integers(0, 2**63), st.integers(0, 2**63)), max_size=12
    ),
)
def test_progress_stays_within_the_terminal_and_escapes_control_characters(
    columns: int, rows: int, devices: list[tuple[str, str, int, int]]
) -> None:
    clock = Clock()
    progress = live_progress(clock, columns, rows)
    for number, (id_, step, done, total) in enumerate(devices):
        for factor in (4, 2, 1):
            update = pb.ScrubProgress(
                device_id=id_.encode(errors="replace").decode(),
                step=step.encode(errors="replace").decode(),
                done_bytes=done // factor,
                total_bytes=total,
            )
            progress.update(TargetStatus(ScrubTarget(str(number), str(number), str(number)), update))
            clock.now += 1
    found = lines(progress)
    assert len(found) < rows
    assert all(display_width(line) <= columns for line in found)
    assert all(line.isprintable() for line in found)


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
