"""Regenerates ``dashboards/*.json``, the files that Grafana imports; a test compares them with the code."""

from __future__ import annotations

import sys
from pathlib import Path

from dashboards.boards import BOARDS
from dashboards.dashboard import to_json

_DIRECTORY = Path(__file__).resolve().parent


def main() -> int:
    """Write every board, and print its path."""
    for which, make in BOARDS.items():
        path = _DIRECTORY / f"{which}.json"
        path.write_text(to_json(make()), encoding="utf-8")
        sys.stdout.write(f"{path.relative_to(_DIRECTORY.parent)}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
