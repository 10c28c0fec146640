"""The cgroup of a process that ends while it is read, from files that are laid out as the kernel's."""

from __future__ import annotations

from pathlib import Path

import pytest

from scrubber.adapters.cgroups.procfs import ProcFs
from scrubber.adapters.kernel_text import ProcStat, parse_stat
from scrubber.domain.errors import Unreadable

PID = 77
PF_EXITING = 4
V1 = b"4:pids:/\n3:memory:/\n"


def stat_text(*, exiting: bool, threads: int) -> bytes:
    fields = [b"0"] * 50
    fields[0], fields[6], fields[17] = b"R", b"%d" % (PF_EXITING if exiting else 0), b"%d" % threads
    return b"%d (train) " % PID + b" ".join(fields) + b"\n"


def laid_out(root: Path, *, leader: bytes | None, threads: dict[int, bytes | None]) -> ProcStat:
    """Write the process, whose ``threads`` are listed; None: gone before it is read. Return what was read of it before."""
    (root / f"{PID}/task").mkdir(parents=True)
    (root / f"{PID}/cgroup").write_bytes(V1)
    if leader is not None:
        (root / f"{PID}/stat").write_bytes(leader)
    for thread, stat in threads.items():
        (root / f"{PID}/task/{thread}").mkdir()
        if stat is not None:
            (root / f"{PID}/task/{thread}/stat").write_bytes(stat)
            (root / f"{PID}/task/{thread}/cgroup").write_bytes(V1)
    return parse_stat(stat_text(exiting=True, threads=1))


@pytest.mark.parametrize(
    ("leader", "threads"),
    [
        (None, {PID: None}),
        (None, {}),
        (stat_text(exiting=True, threads=1), {PID: stat_text(exiting=True, threads=1)}),
        (stat_text(exiting=True, threads=1), {PID: stat_text(exiting=True, threads=1), 78: None}),
    ],
    ids=["gone since its thread was listed", "gone", "exiting", "last thread exiting"],
)
def test_process_that_is_ending_is_in_the_cgroup_that_the_kernel_reports_last(
    tmp_path: Path, leader: bytes | None, threads: dict[int, bytes | None]
) -> None:
    assert ProcFs(tmp_path).cgroup(laid_out(tmp_path, leader=leader, threads=threads)) == V1


@pytest.mark.parametrize(
    "threads",
    [{78: None}, {PID: stat_text(exiting=True, threads=2), 78: None}, {PID: stat_text(exiting=True, threads=2)}],
    ids=["all that were listed", "one of two", "one unlisted"],
)
def test_cgroup_of_a_process_whose_threads_start_and_end_meanwhile_is_unknown(
    tmp_path: Path, threads: dict[int, bytes | None]
) -> None:
    stat = laid_out(tmp_path, leader=stat_text(exiting=False, threads=2), threads=threads)
    with pytest.raises(Unreadable, match="start and exit too fast"):
        ProcFs(tmp_path).cgroup(stat)
