"""`python -m dashboards.preview record|draw`: what `make boards-preview` does, in its two halves."""

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from dashboards.preview.chromium import BrowserError, Chromium
from dashboards.preview.draw import StaleRecording, ToolMissing, bundle, draw
from dashboards.preview.record import Prometheus, PrometheusError, record, write_recording
from dashboards.preview.variables import UnknownVariable

HERE = Path(__file__).parent
BOARDS = HERE.parent
RECORDED = HERE / "recorded"
IMAGES = BOARDS.parent / "docs" / "images"
NAMES = ("fleet", "node", "device")
MAX_IMAGE_BYTES = 400_000
EXPECTED_ERRORS = (
    *(BrowserError, PrometheusError, StaleRecording, ToolMissing, UnknownVariable),
    *(OSError, subprocess.CalledProcessError),
)


def main(arguments: list[str] | None = None) -> int:
    chosen = _parser().parse_args(arguments)
    try:
        return int(chosen.act(chosen))
    except EXPECTED_ERRORS as error:
        sys.stderr.write(f"preview: {error}\n")
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m dashboards.preview", description=__doc__)
    acts = parser.add_subparsers(required=True)
    asks = acts.add_parser("record", help="record the results of all queries of the dashboards from a Prometheus")
    asks.add_argument("--prometheus", required=True, metavar="URL", help="address, such as http://127.0.0.1:9090")
    asks.add_argument(
        "--from", dest="start", type=float, metavar="SECONDS", help="start, since the epoch (default: see --last)"
    )
    asks.add_argument("--to", dest="end", type=float, metavar="SECONDS", help="end, since the epoch (default: now)")
    asks.add_argument(
        "--last", type=float, default=3600.0, metavar="SECONDS", help="length of the range without --from (3600)"
    )
    asks.add_argument("--scrape", type=float, default=15.0, metavar="SECONDS", help="scrape interval (15)")
    asks.add_argument("--var", action="append", default=[], metavar="NAME=VALUE", help="value of a variable")
    asks.set_defaults(act=_record)
    draws = acts.add_parser("draw", help="draw the dashboards from recordings")
    draws.set_defaults(act=_draw)
    for act in (asks, draws):
        act.add_argument("--boards", type=Path, default=BOARDS, metavar="DIR", help="directory of NAME.json")
        act.add_argument("--recorded", type=Path, default=RECORDED, metavar="DIR", help="directory of the recordings")
        act.add_argument("names", nargs="*", default=list(NAMES), metavar="NAME", help="fleet, node, device (all)")
    draws.add_argument("--images", type=Path, default=IMAGES, metavar="DIR", help="output directory")
    return parser


def _record(chosen: argparse.Namespace) -> int:
    end = chosen.end or time.time()
    start = chosen.start or end - chosen.last
    variables = dict(pair.split("=", 1) for pair in chosen.var)
    chosen.recorded.mkdir(parents=True, exist_ok=True)
    for name in chosen.names:
        board = _read(chosen.boards / f"{name}.json")
        has = {variable["name"] for variable in board.get("templating", {}).get("list", [])}
        selected = {key: value for key, value in variables.items() if key in has}
        answers = record(Prometheus(chosen.prometheus), board, start, end, scrape=chosen.scrape, values=selected)
        write_recording(answers, chosen.recorded / f"{name}.json")
    return 0


def _draw(chosen: argparse.Namespace) -> int:
    bundle()
    chosen.images.mkdir(parents=True, exist_ok=True)
    ended = 0
    with Chromium() as browser:
        for name in chosen.names:
            board, recorded = _read(chosen.boards / f"{name}.json"), _read(chosen.recorded / f"{name}.json")
            picture = draw(browser, board, recorded)
            path = chosen.images / f"board-{name}.png"
            path.write_bytes(picture)
            sys.stderr.write(f"{path.name}: {len(picture) // 1000} kB\n")
            if len(picture) > MAX_IMAGE_BYTES:
                sys.stderr.write(f"  larger than {MAX_IMAGE_BYTES // 1000} kB\n")
                ended = 1
        for error in dict.fromkeys(browser.page_errors):
            sys.stderr.write(f"  the page reported: {error[:500]}\n")
    return ended


def _read(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


if __name__ == "__main__":
    sys.exit(main())
