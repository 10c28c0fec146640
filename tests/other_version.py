"""The wheel of another version, to run its daemons beside those of this one.

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
import zipfile
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from tempfile import TemporaryDirectory

from scrubber import __version__
from scrubber.adapters.ledger.documents import RECORD

__all__ = ["NEXT", "OtherVersion", "build", "other_versions"]

ROOT = Path(__file__).parents[1]
PARTS = ("scrubber", "plugin", "policies")
DESCRIPTION = ("pyproject.toml", "README.md", "LICENSE")
"""What else is needed to build a wheel."""
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
    (
        "scrubber/adapters/ledger/documents.py",
        f"Document(_RECORD, format={RECORD.format})",
        f"Document(_RECORD, format={RECORD.format + 1})",
    ),
    (
        "scrubber/adapters/ledger/schema.py",
        "@dataclass(frozen=True, slots=True)\nclass StoredSchema:\n",
        (
            "def _add_rack(document):\n"
            f'    return {{**document, "format": {RECORD.format + 1}, "rack": "unknown"}}\n\n\n'
            "CURRENT = Schema(\n"
            f'    CURRENT.number + 1, CURRENT.number, "{__version__}",\n'
            '    (*CURRENT.tables, "CREATE TABLE topology (gpu TEXT PRIMARY KEY) STRICT"),\n'
            '    {**CURRENT.upgrades, CURRENT.number: {"devices": _add_rack}},\n'
            ")\n\n\n"
            "@dataclass(frozen=True, slots=True)\nclass StoredSchema:\n"
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
    """The contents of a wheel, unpacked in ``tree`` as an installation would, and its version."""

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
    """Build the wheel of a version of :func:`other_versions`, and unpack it into ``tree``, which does not exist yet."""
    with TemporaryDirectory() as name:
        sources = Path(name, "sources")
        if which == NEXT:
            _write_next(sources)
        else:
            archive = ["git", "archive", which, *PARTS, *DESCRIPTION]
            with tarfile.open(
                fileobj=BytesIO(subprocess.run(archive, cwd=ROOT, stdout=subprocess.PIPE, check=True).stdout)
            ) as files:
                files.extractall(sources, filter="data")
        building = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", name]
        subprocess.run(building, cwd=sources, stdout=subprocess.DEVNULL, check=True)
        (wheel,) = Path(name).glob("*.whl")
        with zipfile.ZipFile(wheel) as packed:
            packed.extractall(tree)
    return OtherVersion(tree, wheel.name.split("-")[1])


def _write_next(tree: Path) -> None:
    for part in PARTS:
        shutil.copytree(ROOT / part, tree / part, ignore=shutil.ignore_patterns("__pycache__"))
    for name in DESCRIPTION:
        shutil.copy(ROOT / name, tree / name)
    for name, before, after in PATCHES:
        path = tree / name
        text = path.read_text()
        assert text.count(before) == 1, f"{name} does not contain exactly once: {before}"
        path.write_text(text.replace(before, after))
    generator = ROOT / "scripts" / "gen_protos.py"
    code = f"import runpy; from pathlib import Path; t = Path({str(tree)!r}); runpy.run_path({str(generator)!r})['generate'](t, t)"
    subprocess.run([sys.executable, "-c", code], check=True)
