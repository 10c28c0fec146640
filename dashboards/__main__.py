"""Generates the boards' JSON, the files that Grafana imports.

    python -m dashboards                                   # the committed files; a test compares them
    python -m dashboards --cluster-label NAME --out DIR    # with another label for clusters
    python -m dashboards --runbooks https://… --out DIR    # with the address of your runbooks

``scripts/gen_rules.py`` has the same options.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from dashboards.boards import BOARDS
from dashboards.cluster_label import CLUSTER, parse_label, rename_in_board
from dashboards.dashboard import RUNBOOKS, to_json

_DIRECTORY = Path(__file__).resolve().parent


def main(arguments: Sequence[str] | None = None) -> int:
    """Write every board, and print its path."""
    parser = argparse.ArgumentParser(prog="python -m dashboards", description="Write the dashboards' JSON.")
    parser.add_argument(
        "--cluster-label",
        metavar="NAME",
        type=parse_label,
        default=CLUSTER,
        help=f"label that distinguishes clusters (default {CLUSTER}); needs --out",
    )
    parser.add_argument(
        "--runbooks",
        metavar="BASE",
        default=RUNBOOKS,
        help="base address of the pages of docs/runbooks; needs --out",
    )
    parser.add_argument("--out", metavar="DIR", type=Path, help="write to this directory, and nothing to the tree")
    options = parser.parse_args(arguments)
    if options.out is None and (options.cluster_label != CLUSTER or options.runbooks != RUNBOOKS):
        parser.error("--cluster-label and --runbooks need --out: they are not for the dashboards in the tree")
    directory = options.out or _DIRECTORY
    directory.mkdir(parents=True, exist_ok=True)
    for which, make in BOARDS.items():
        document = rename_in_board(json.loads(to_json(make())), options.cluster_label)
        for variable in document["templating"]["list"]:
            if variable["name"] == "runbooks":
                variable["query"] = options.runbooks.rstrip("/")
        path = directory / f"{which}.json"
        path.write_text(to_json(document), encoding="utf-8")
        sys.stdout.write(f"{path}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
