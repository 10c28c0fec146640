"""The matrix of pod shapes, from the command line.

``python -m tests.simulation.shapes`` plays all shapes of up to three containers, and some of four; exit status 1 when a play
failed. ``--play 'mG m- | Always deleted steady | service@7'`` plays one, and prints every event.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from tests.simulation.shapes.matrix import Tally, in_processes, shapes_to_play, tally
from tests.simulation.shapes.play import play
from tests.simulation.shapes.shape import Box, Device, Kind, Script


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.simulation.shapes", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--containers", type=int, nargs="*", default=(1, 2, 3), help="play all shapes of so many")
    parser.add_argument("--four", type=int, default=20, help="shapes of four containers (default 20)")
    parser.add_argument("--seed", type=int, default=1, help="which ones (default 1)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes at a time")
    parser.add_argument("--record", type=Path, metavar="FILE", help="write the result here, too")
    parser.add_argument("--play", metavar="SCRIPT", help="one script, as a failure tells it")
    parser.add_argument("--shape", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.play is not None:
        return _one(Script.read(options.play))
    if options.shape is not None:
        shape = tuple(Box(Kind(each[0]), Device(each[1])) for each in options.shape.split())
        print(tally([shape]).dump())
        return 0
    began = time.monotonic()
    shapes = shapes_to_play(options.containers, four=options.four, seed=options.seed)
    found = asyncio.run(in_processes(shapes, options.jobs))
    report = _report(found, options.four, options.seed, time.monotonic() - began, options.jobs)
    print(report)
    if options.record is not None:
        options.record.write_text(report + "\n")
    return int(found.failures > 0)


def _report(found: Tally, four: int, seed: int, seconds: float, jobs: int) -> str:
    head = f"Shapes of four containers: {four}, by seed {seed}. {seconds:,.0f} s with {jobs} processes."
    return f"# The matrix of pod shapes\n\n{head}\n\n{found.report()}"


def _one(script: Script) -> int:
    outcome = play(script, listen=lambda at, what: print(f"{at:9.3f} s  {what}"))
    print(f"{outcome.seconds:9.3f} s  {outcome.wrong or 'all is well'}")
    return int(outcome.wrong is not None)


if __name__ == "__main__":
    sys.exit(main())
