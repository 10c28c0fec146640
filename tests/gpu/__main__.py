"""``python3 -m tests.gpu``: run everything, print the results, store the report. Exit status 1 on a failure.

A missed target is a result, not a failure. What could not be tested is listed, with the reason.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
from collections.abc import Awaitable, Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

from scrubber import __version__
from scrubber.adapters.nvidia.driver_paths import DriverPaths
from scrubber.domain.errors import ScrubberError
from tests.gpu.extent import FULL, QUICK
from tests.gpu.nvidia_smi import Smi
from tests.gpu.outcome import Log, Report, dump, file_name, finished, render
from tests.gpu.parts import attacks, figures, node, resets, scrubbing
from tests.gpu.stand import Options, Stand

RESULTS = Path(__file__).parents[2] / "bench/results"
PARTS = (
    "inventory",
    "settings",
    "holders",
    "coverage",
    "attack",
    "kill",
    "bench.throughput",
    "bench.starting",
    "bench.questions",
    "diagnostics",
    "reset",
)


async def everything(options: Options, log: Log, only: Sequence[str] = ()) -> Report:
    """Run every part in turn, or ``only`` those named, each separately.

    Raises:
        ScrubberError: there is no GPU to check, or it is in use.
    """
    made = datetime.now(UTC).strftime("%Y-%m-%dT%H:%MZ")
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as scratch:
        async with Stand.opened(options, Path(scratch)) as stand:
            identity = {**await stand.identity(), **stand.software()}
            smi = Smi(stand.places, stand.places.environment())
            parts = _parts(stand, smi, log)
            for name in only or PARTS:
                left = options.extent.all_seconds - log.seconds
                if left <= 0:
                    log.failed(name, f"It was not begun: {options.extent.all_seconds:.0f} s are over.")
                else:
                    await log.part(name, min(left, options.extent.part_seconds), parts[name])
    return finished(log, made=made, quick=options.extent.quick, dry=options.dry, identity=identity, version=__version__)


def _parts(stand: Stand, smi: Smi, log: Log) -> Mapping[str, Callable[[], Awaitable[None]]]:
    return {
        "inventory": lambda: node.inventory(stand, smi, log),
        "settings": lambda: node.compute_mode(stand, log),
        "holders": lambda: node.holders(stand, log),
        "coverage": lambda: scrubbing.coverage(stand, log),
        "attack": lambda: attacks.attacks(stand, log),
        "kill": lambda: scrubbing.killed(stand, log),
        "bench.throughput": lambda: figures.throughput(stand, log),
        "bench.starting": lambda: figures.starting(stand, log),
        "bench.questions": lambda: figures.questions(stand, smi, log),
        "diagnostics": lambda: figures.diagnostics(stand, log),
        "reset": lambda: resets.reset(stand, log),
    }


def _options(arguments: Sequence[str] | None) -> tuple[Options, Path | None, Sequence[str]]:
    parser = argparse.ArgumentParser(
        prog="python3 -m tests.gpu",
        description="Check the scrub on an idle real GPU. All of its memory is overwritten.",
    )
    parser.add_argument("--device", help="UUID or index of a GPU or a MIG instance (default: the first)")
    parser.add_argument(
        "--quick", action="store_true", help="fewer samples, and none kept in bench/results; four minutes at most"
    )
    parser.add_argument("--only", nargs="+", default=(), choices=PARTS, metavar="PART", help=f"of {', '.join(PARTS)}")
    parser.add_argument("--out", type=Path, help="directory of the report (default: bench/results, of full runs only)")
    parser.add_argument(
        *("--driver-root", "--nvidia-driver-root"),
        type=Path,
        default=Path("/"),
        metavar="DIR",
        help="where the driver is installed (default: /)",
    )
    parser.add_argument(
        "--leave-settings",
        action="store_true",
        help="do not even fence: the compute mode stays as it is, for a machine that may not be changed at all",
    )
    parser.add_argument("--allow-settings", action="store_true", help="bring all settings to the driver's defaults")
    parser.add_argument("--allow-reset", action="store_true", help="reset the GPU as the last part")
    parser.add_argument(
        "--infrastructure",
        type=int,
        nargs="*",
        default=(),
        metavar="PID",
        help="the node's own daemons (nvidia-persistenced, DCGM), which may have the device open",
    )
    parser.add_argument("--stand-ins", type=Path, metavar="WORLD", help=argparse.SUPPRESS)
    found = parser.parse_args(arguments)
    if found.leave_settings and found.allow_settings:
        parser.error("--leave-settings and --allow-settings contradict each other")
    extent = QUICK if found.quick else FULL
    root = found.stand_ins or found.driver_root
    options = Options(
        places=_stood_in(root) if found.stand_ins else DriverPaths.below(root),
        extent=extent.for_stand_ins() if found.stand_ins else extent,
        device=found.device,
        leave_settings=found.leave_settings,
        allow_settings=found.allow_settings,
        allow_reset=found.allow_reset,
        infrastructure=frozenset(found.infrastructure),
        stand_ins=found.stand_ins,
    )
    return options, found.out or (None if options.dry or found.quick or found.only else RESULTS), found.only


def _stood_in(world: Path) -> DriverPaths:
    return DriverPaths(world, world / "dev", world / "proc/driver/nvidia", world / "sys", world / "run")


def _print(line: str) -> None:
    print(line, flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    options, out, only = _options(arguments)
    log = Log(_print)
    try:
        report = asyncio.run(everything(options, log, only))
    except ScrubberError as error:
        print(f"Nothing was checked: {error}", file=sys.stderr)
        return 2
    print(render(report))
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        path = out / file_name(report)
        path.write_text(dump(report), encoding="utf-8")
        print(f"Kept in {path}")
    return 1 if report.failed else 0


if __name__ == "__main__":
    sys.exit(main())
