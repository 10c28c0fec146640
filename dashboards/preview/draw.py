"""Turns a board and its recorded data into a picture: bundle, page, browser."""

import json
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from dashboards.preview.chromium import Chromium
from dashboards.preview.record import changed_queries

HERE = Path(__file__).parent
BUILD = HERE / "build"
WIDTH = 1600

PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title>
<link rel="stylesheet" href="{style}"></head>
<body style="margin:0"><div id="board"></div>
<script>window.preview = {data};</script>
<script src="{script}"></script></body></html>
"""


class ToolMissing(Exception):
    """The preview's packages cannot be installed here."""


class StaleRecording(Exception):
    """The board's queries have changed since it was recorded."""


def bundle() -> None:
    """Install the packages of package-lock.json unless they are installed, and bundle the page.

    Raises ToolMissing without npm; a failed installation or build shows the tool's own output.
    """
    npm = _tool("npm")
    lock, installed = HERE / "package-lock.json", HERE / "node_modules" / ".package-lock.json"
    if not installed.exists() or installed.stat().st_mtime < lock.stat().st_mtime:
        subprocess.run([npm, "ci", "--ignore-scripts", "--no-progress"], cwd=HERE, check=True)
        installed.touch()
    subprocess.run([npm, "run", "--silent", "build"], cwd=HERE, check=True)


def draw(browser: Chromium, board: dict[str, Any], recorded: dict[str, Any]) -> bytes:
    """Return a PNG of `board` with the data that `record` wrote.

    Raises StaleRecording if a query of the board was not recorded, and BrowserError if a panel cannot be drawn as the
    board specifies.
    """
    if missing := changed_queries(board, recorded):
        raise StaleRecording(f"{board['uid']}: changed since it was recorded: {'; '.join(missing)}")
    data = json.dumps({"board": board, "recorded": recorded, "width": WIDTH}).replace("<", "\\u003c")
    with tempfile.TemporaryDirectory(prefix="scrubber-preview-") as directory:
        page = Path(directory) / "page.html"
        script, style = ((BUILD / name).as_uri() for name in ("preview.js", "preview.css"))
        page.write_text(PAGE.format(title=board["uid"], data=data, script=script, style=style), encoding="utf-8")
        return _reduce_colours(browser.screenshot(page, WIDTH))


def _reduce_colours(picture: bytes) -> bytes:
    done = subprocess.run([_tool("node"), HERE / "palette.mjs"], input=picture, stdout=subprocess.PIPE, check=True)
    return done.stdout


def _tool(name: str) -> str:
    found = shutil.which(name)
    if not found:
        raise ToolMissing(f"{name} was not found: the preview needs Node.js 20 or newer, with npm")
    return found
