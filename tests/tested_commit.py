"""The commit that a recorded run tested."""

from __future__ import annotations

import subprocess
from pathlib import Path

__all__ = ["tested_commit"]

_ROOT = Path(__file__).parents[1]


def tested_commit() -> str:
    """Return the commit that is checked out, with ``-changed`` where a tracked file differs from it; records may differ."""

    def git(*words: str) -> str:
        return subprocess.run(("git", *words), cwd=_ROOT, capture_output=True, text=True, check=True).stdout.strip()

    changed = git("status", "--porcelain", "--untracked-files=no", "--", ":!bench/results")
    return git("rev-parse", "--short", "HEAD") + ("-changed" if changed else "")
