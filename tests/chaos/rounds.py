"""Rounds of a soak until a number of processes was killed: several nodes at a time, each of its own seed and processes.

A round runs in a user, mount and PID namespace of its own: its processes see only each other, PIDs can be reused, and
all of them end with it. It forks its daemons from an interpreter that has imported their modules, which changes nothing
but the CPU time of a start. Every third round spares the service, whose memory and descriptors are then measured,
though not for long enough to reach a level: ``--pods 2000 --spare-service`` shows that. Where a record is kept, the
rounds of the same commit add up, over any number of runs.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

from tests.chaos import soak_record
from tests.chaos.soak_record import Round

__all__ = ["KILLS_A_ROUND", "PLANS", "SERVICE_ENDS", "run_rounds", "until_input_ends"]

KILLS_A_ROUND = 100
SERVICE_ENDS = frozenset(
    {
        *("service killed", "service terminated", "killed with all its children, for memory"),
        *("page torn in the log", "page torn in the database", "no memory"),
    }
)
"""Acts of the weather that end the service."""
PLANS = (("--pods", "0"), ("--pods", "0", "--dra"), ("--pods", "200", "--spare-service"))
_OWN = ("unshare", "--user", "--map-root-user", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc")
_INIT = ("sh", "-c", 'OWN_PIDS=1 "$@"; exit $?', "sh")
"""The shell adopts and reaps what the round's processes leave behind."""
_TREE = Path(__file__).resolve().parents[2]


async def run_rounds(
    found: list[Round], *, commit: str, kills: int, nodes: int, seed: int, record: Path | None, records: Path
) -> None:
    """Run rounds until ``kills`` processes were killed, those of the rounds already ``found`` included; append to them.

    Cancelled, it ends the running rounds, which then do not count.

    Args:
        records: where a round with a breach leaves its logs, facts and ledger.
    """
    numbers = iter(range(len(found), sys.maxsize))

    async def lane() -> None:
        while sum(sum(each.kills.values()) for each in found) < kills:
            number = next(numbers)
            each = await _round(number, seed + number, commit, records / f"round-{seed + number}")
            found.append(each)
            if record is not None:
                soak_record.append(record, each)
            killed = sum(sum(each.kills.values()) for each in found)
            print(f"  {len(found)} rounds, {killed:,} kills, seed {each.seed} with the {each.daemon}", flush=True)
            for breach in each.breaches:
                print(f"    ✗ {breach}", flush=True)

    async with asyncio.TaskGroup() as group:
        for _ in range(nodes):
            group.create_task(lane())


async def _round(number: int, seed: int, commit: str, records: Path) -> Round:
    plan = PLANS[number % len(PLANS)]
    command = [sys.executable, "-m", "tests.chaos.soak", "--round", commit, "--seed", str(seed)]
    command += ["--kills", str(KILLS_A_ROUND), "--records", str(records), *plan]
    log = records.with_suffix(".log")
    with log.open("wb") as errors:
        process = await asyncio.create_subprocess_exec(
            *(*_OWN, *_INIT, *command), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, cwd=_TREE
        )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        answer = await process.stdout.read()
    finally:
        process.stdin.close()  # a round ends with its standard input, and cleans up
        with suppress(TimeoutError):
            async with asyncio.timeout(60):
                await process.wait()
        if process.returncode is None:
            process.kill()
            await process.wait()
    if not answer:
        raise RuntimeError(f"the round with seed {seed} ended with status {process.returncode}; see {log}")
    log.unlink()
    return Round(**json.loads(answer))


async def until_input_ends(work: asyncio.Task[object]) -> None:
    """Cancel ``work`` when standard input ends: the process that started this round wants it to end, or is gone."""
    loop, ended = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(sys.stdin.fileno(), lambda: None if os.read(sys.stdin.fileno(), 1) else ended.set())
    await ended.wait()
    loop.remove_reader(sys.stdin.fileno())
    work.cancel()
