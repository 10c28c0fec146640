"""Generate the ``_pb2`` modules of every ``.proto`` file under ``scrubber/`` and ``plugin/``.

Invariant: the file names inside the descriptors are the paths from the root of the tree (``plugin/api/x.proto``), so
that no two of our files, and no file of another project, have the same name in Python's descriptor pool. The generated
imports are absolute for the same reason. ``tests/project/test_protos.py`` runs this into an empty directory and
compares.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib import resources
from pathlib import Path

from grpc_tools import protoc

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("scrubber", "plugin")
GENERATED = ("_pb2.py", "_pb2.pyi", "_pb2_grpc.py")


def proto_files(root: Path = ROOT) -> list[Path]:
    """Return every ``.proto`` file, relative to ``root``, in a stable order."""
    return sorted(path.relative_to(root) for package in PACKAGES for path in (root / package).rglob("*.proto"))


def generate(out: Path, root: Path = ROOT) -> list[Path]:
    """Compile all protos of ``root`` into ``out``; return the files written, relative to ``out``.

    Raises:
        SystemExit: the compiler failed; its messages are on standard error.
    """
    sources = proto_files(root)
    wellknown = resources.files("grpc_tools") / "_proto"
    arguments = [f"-I{root}", f"-I{wellknown}", f"--python_out={out}", f"--pyi_out={out}", f"--grpc_python_out={out}"]
    status = protoc.main(["protoc", *arguments, *map(str, sources)])
    if status != 0:
        raise SystemExit(f"protoc refused {', '.join(map(str, sources))} (exit status {status})")
    return [source.with_name(source.stem + suffix) for source in sources for suffix in GENERATED]


def main(argv: Sequence[str] | None = None) -> int:
    """Regenerate in place, or below ``--out``, and print the files written."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, default=ROOT, help="output directory (default: the tree itself)")
    out: Path = parser.parse_args(argv).out
    for path in generate(out):
        print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
