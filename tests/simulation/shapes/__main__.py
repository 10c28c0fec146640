"""The matrix of pod shapes, from the command line.

``python -m tests.simulation.shapes`` plays all shapes of up to three containers, and some of four; exit status 1 when a play
failed. With ``--record FILE`` it continues where an earlier run was stopped. ``--play 'mG m- | Always deleted steady | service@7'`` plays one, and prints every event.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from tests.simulation.shapes.matrix import Played, Tally, in_processes, shapes_to_play, tally
from tests.simulation.shapes.play import play
from tests.simulation.shapes.shape import Box, Device, Kind, Script, Shape, written
from tests.tested_commit import tested_commit


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.simulation.shapes", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--containers", type=int, nargs="*", default=(1, 2, 3), help="play all shapes of so many")
    parser.add_argument("--four", type=int, default=20, help="shapes of four containers (default 20)")
    parser.add_argument("--seed", type=int, default=1, help="which ones (default 1)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes at a time")
    parser.add_argument(
        "--record",
        type=Path,
        metavar="FILE",
        help="append each shape's outcomes; shapes that are in it are not repeated",
    )
    parser.add_argument("--play", metavar="SCRIPT", help="one script, as a failure tells it")
    parser.add_argument("--shape", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.play is not None:
        return _one(Script.read(options.play))
    if options.shape is not None:
        shape = tuple(Box(Kind(each[0]), Device(each[1])) for each in options.shape.split())
        print(tally([shape]).dump())
        return 0
    shapes = shapes_to_play(options.containers, four=options.four, seed=options.seed)
    found = asyncio.run(_all(shapes, options.jobs, options.record))
    print(_report(found))
    return int(any(each.tally.failures for each in found))


async def _all(shapes: Sequence[Shape], jobs: int, record: Path | None) -> list[Played]:
    """Play what ``record`` lacks, and return everything."""
    lines = record.read_text().splitlines() if record is not None and record.exists() else []
    names = {written(each) for each in shapes}
    found = [each for each in map(Played.read, lines) if each.shape in names]
    known = {each.shape for each in found}
    commit = tested_commit()
    began = time.monotonic()
    async for shape, outcomes in in_processes([each for each in shapes if written(each) not in known], jobs):
        found.append(Played(written(shape), commit, outcomes))
        if record is not None:
            with record.open("a") as file:
                file.write(str(found[-1]))
        plays, failures = (sum(count) for count in zip(*map(_counts, found), strict=True))
        took = time.monotonic() - began
        print(
            f"  {len(found)} of {len(shapes)} shapes, {plays:,} plays, {failures:,} wrong, {took:,.0f} s",
            file=sys.stderr,
            flush=True,
        )
    return found


def _counts(played: Played) -> tuple[int, int]:
    return played.tally.plays.total(), played.tally.failures


def _report(found: Sequence[Played]) -> str:
    everything = Tally()
    for each in found:
        everything.add(each.tally)
    commits = Counter(each.commit for each in found)
    tested = ", ".join(f"{count} at {commit}" for commit, count in commits.items())
    return f"# The matrix of pod shapes\n\nShapes by commit: {tested}.\n\n{everything.report()}"


def _one(script: Script) -> int:
    outcome = play(script, listen=lambda at, what: print(f"{at:9.3f} s  {what}"))
    print(f"{outcome.seconds:9.3f} s  {outcome.wrong or 'all is well'}")
    return int(outcome.wrong is not None)


if __name__ == "__main__":
    sys.exit(main())
