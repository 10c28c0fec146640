"""``python3 -m tests.gpu.amd``: run everything, print the results, store the report. Exit status 1 on a failure."""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

from scrubber import __version__
from scrubber.domain.errors import ScrubberError
from tests.gpu.amd.parts import PARTS
from tests.gpu.amd.stand import AmdOptions, AmdStand
from tests.gpu.extent import FULL, QUICK
from tests.gpu.outcome import Log, Report, dump, file_name, finished, render

RESULTS = Path(__file__).parents[3] / "bench/results"


async def everything(options: AmdOptions, log: Log, only: Sequence[str]) -> Report:
    """Run every part in turn, or ``only`` those named.

    Raises:
        ScrubberError: there is no GPU to check, or it is in use.
    """
    made = datetime.now(UTC).strftime("%Y-%m-%dT%H:%MZ")
    extent = options.extent
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as scratch:
        async with AmdStand.opened(options, Path(scratch)) as stand:
            identity = await stand.identity()
            for name in only or PARTS:
                left = extent.all_seconds - log.seconds
                if left <= 0:
                    log.failed(name, f"It was not begun: {extent.all_seconds:.0f} s are over.")
                else:
                    await log.part(name, min(left, extent.part_seconds), partial(PARTS[name], stand, log))
    report = finished(log, made=made, quick=extent.quick, dry=options.dry, identity=identity, version=__version__)
    return replace(report, targets=())  # they are those of an NVIDIA GPU


def _options(arguments: Sequence[str] | None) -> tuple[AmdOptions, Path | None, Sequence[str]]:
    parser = argparse.ArgumentParser(
        prog="python3 -m tests.gpu.amd",
        description="Check the scrub on an idle real AMD GPU. All of its memory is overwritten.",
    )
    parser.add_argument("--device", help="PCI address or index of a GPU or a partition (default: the first)")
    parser.add_argument("--quick", action="store_true", help="fewer samples, and none kept in bench/results")
    parser.add_argument("--only", nargs="+", default=(), choices=PARTS, metavar="PART", help=f"of {', '.join(PARTS)}")
    parser.add_argument("--out", type=Path, help="directory of the report (default: bench/results, of full runs only)")
    parser.add_argument("--amd-root", type=Path, default=Path("/"), metavar="DIR", help="contains sys, dev, opt/rocm")
    parser.add_argument("--allow-settings", action="store_true", help="bring all settings to the driver's defaults")
    parser.add_argument("--allow-reset", action="store_true", help="reset the GPU (and its XGMI hive) as the last part")
    parser.add_argument(
        "--infrastructure",
        type=int,
        nargs="*",
        default=(),
        metavar="PID",
        help="the node's own daemons (AMD's exporter), which may have the device open",
    )
    parser.add_argument("--dry-run", action="store_true", help=argparse.SUPPRESS)
    found = parser.parse_args(arguments)
    extent = QUICK if found.quick else FULL
    options = AmdOptions(
        root=found.amd_root,
        extent=extent.for_stand_ins() if found.dry_run else extent,
        device=found.device,
        allow_settings=found.allow_settings,
        allow_reset=found.allow_reset,
        infrastructure=frozenset(found.infrastructure),
        dry=found.dry_run,
    )
    return options, found.out or (None if options.dry or found.quick or found.only else RESULTS), found.only


def _print(line: str) -> None:
    print(line, flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    options, out, only = _options(arguments)
    try:
        report = asyncio.run(everything(options, Log(_print), only))
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
