"""The source tree of another version, to run its daemons beside those of this one.

The next version is this tree with what an upgrade may bring: another version number, a new field in the records of
devices, a new table in the ledger, and new fields in both directions of the API. A released version of the previous
minor comes from git, where a checkout has its tag.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tarfile
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path

from scrubber import __version__

__all__ = ["NEXT", "OtherVersion", "build", "other_versions"]

ROOT = Path(__file__).parents[1]
PARTS = ("scrubber", "plugin", "policies")
NEXT = "next"
MAJOR, MINOR = (int(part) for part in __version__.split(".")[:2])

# In each file, what is replaced: it occurs there exactly once.
PATCHES: tuple[tuple[str, str, str], ...] = (
    ("scrubber/__init__.py", f'__version__ = "{__version__}"', f'__version__ = "{MAJOR}.{MINOR + 1}.0"'),
    (
        "scrubber/domain/record.py",
        "    admin_claims: tuple[Claim, ...] = ()\n",
        '    admin_claims: tuple[Claim, ...] = ()\n    rack: str = "r7"\n',
    ),
    (
        "scrubber/adapters/ledger/documents.py",
        "    admin_claims=tuple_of(CLAIM),\n",
        "    admin_claims=tuple_of(CLAIM),\n    rack=TEXT,\n",
    ),
    ("scrubber/adapters/ledger/documents.py", "Document(_RECORD, format=1)", "Document(_RECORD, format=2)"),
    (
        "scrubber/adapters/ledger/schema.py",
        'CURRENT = Schema(number=1, oldest_reader=1, oldest_reader_version="0.1.0")',
        (
            "def _add_rack(document):\n"
            '    return {**document, "format": 2, "rack": "unknown"}\n\n\n'
            "CURRENT = Schema(\n"
            '    number=2, oldest_reader=1, oldest_reader_version="0.1.0", upgrades={1: {"devices": _add_rack}},\n'
            '    tables=(*_TABLES, "CREATE TABLE topology (gpu TEXT PRIMARY KEY) STRICT"),\n'
            ")"
        ),
    ),
    (
        "scrubber/api/scrubber.proto",
        "  string service_version = 9;\n",
        "  string service_version = 9;\n  repeated string topology = 50;\n",
    ),
    (
        "scrubber/api/scrubber.proto",
        "  string resource = 4;  // as in ReserveRequest\n",
        "  string resource = 4;  // as in ReserveRequest\n  string placement = 50;\n",
    ),
    (
        "scrubber/api/messages.py",
        "        service_version=__version__,\n",
        '        service_version=__version__,\n        topology=["r7"],\n',
    ),
    (
        "scrubber/api/client.py",
        "unreserved_ids=reserved_unseen, resource=resource\n",
        'unreserved_ids=reserved_unseen, resource=resource, placement="r7"\n',
    ),
)


@dataclass(frozen=True, slots=True)
class OtherVersion:
    """A source tree in ``tree``, and its version."""

    tree: Path
    version: str

    @property
    def is_newer(self) -> bool:
        return self.version == f"{MAJOR}.{MINOR + 1}.0"


def other_versions() -> list[str]:
    """Return the arguments of :func:`build`: the next version, and the tag of the previous minor, where git has it."""
    listed = subprocess.run(
        ["git", "tag", "--list", f"v{MAJOR}.{MINOR - 1}.*"], cwd=ROOT, capture_output=True, check=False
    )
    tags = [tag for tag in listed.stdout.decode().split() if re.fullmatch(r"v\d+\.\d+\.\d+", tag)]
    return [NEXT, *sorted(tags, key=lambda tag: int(tag.rpartition(".")[2]))[-1:]]


def build(which: str, tree: Path) -> OtherVersion:
    """Write the source tree of a version of :func:`other_versions` into ``tree``, which does not exist yet."""
    if which == NEXT:
        return _build_next(tree)
    archive = subprocess.run(["git", "archive", which, *PARTS], cwd=ROOT, capture_output=True, check=True)
    with tarfile.open(fileobj=BytesIO(archive.stdout)) as files:
        files.extractall(tree, filter="data")
    return OtherVersion(tree, which.removeprefix("v"))


def _build_next(tree: Path) -> OtherVersion:
    for part in PARTS:
        shutil.copytree(ROOT / part, tree / part)
    for name, before, after in PATCHES:
        path = tree / name
        text = path.read_text()
        assert text.count(before) == 1, f"{name} does not contain exactly once: {before}"
        path.write_text(text.replace(before, after))
    generator = ROOT / "scripts" / "gen_protos.py"
    code = f"import runpy; from pathlib import Path; t = Path({str(tree)!r}); runpy.run_path({str(generator)!r})['generate'](t, t)"
    subprocess.run([sys.executable, "-c", code], check=True)
    return OtherVersion(tree, f"{MAJOR}.{MINOR + 1}.0")
