"""Compile the kernels of the AMD backend to the code objects that are shipped beside them, one for each instruction set.

Invariant: ``kernels.json`` names the source and the objects that were made from it, by their SHA-256, and
``tests/adapters/test_amd_kernels.py`` compares them. So neither the image nor the tests need this compiler: clang and lld
19, as Debian ships them (``apt-get install clang-19 lld-19``). No GPU and no part of ROCm is needed.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

DIRECTORY = Path(__file__).resolve().parent.parent / "scrubber/adapters/amd"
SOURCE = DIRECTORY / "kernels.c"
MANIFEST = DIRECTORY / "kernels.json"
ARCHITECTURES = ("gfx90a", "gfx942")
"""Instinct MI200 and MI300."""
OPTIONS = (
    *("-x", "c", "-std=c11", "-target", "amdgcn-amd-amdhsa", "-nogpulib", "-ffreestanding", "-O3"),
    *("-Wall", "-Wextra", "-Werror", "-mcode-object-version=5", "-Wl,--strip-all"),
)


def object_path(architecture: str) -> Path:
    """Return the path of the shipped code object."""
    return SOURCE.with_suffix(f".{architecture}.co")


def digest(content: bytes) -> str:
    """Return the SHA-256 of ``content`` in hexadecimal."""
    return hashlib.sha256(content).hexdigest()


def compile_object(compiler: str, architecture: str) -> bytes:
    """Return the code object for ``architecture``.

    Raises:
        FileNotFoundError: there is no such compiler.
        subprocess.CalledProcessError: the source does not compile; the compiler's message is on standard error.
    """
    with tempfile.TemporaryDirectory() as directory:
        output = Path(directory) / "object"
        command = [compiler, *OPTIONS, f"-mcpu={architecture}", "-o", str(output), SOURCE.name]
        subprocess.run(command, check=True, cwd=DIRECTORY)
        return output.read_bytes()


def main(argv: Sequence[str] | None = None) -> int:
    """Write the code objects, or report with ``--check`` whether they differ; return 1 if any does."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--check", action="store_true", help="compare only; write nothing")
    parser.add_argument("--compiler", default="clang-19", help="the compiler (default: clang-19)")
    arguments = parser.parse_args(argv)
    made = {each: compile_object(arguments.compiler, each) for each in ARCHITECTURES}
    manifest = {
        "source": digest(SOURCE.read_bytes()),
        "objects": {each: digest(content) for each, content in made.items()},
    }
    files = {object_path(each): content for each, content in made.items()}
    files[MANIFEST] = (json.dumps(manifest, indent=2) + "\n").encode()
    stale = [path for path, content in files.items() if not path.is_file() or path.read_bytes() != content]
    for path in stale:
        if arguments.check:
            print(f"{path} does not match {SOURCE.name}; run scripts/make_amd_kernels.py", file=sys.stderr)
        else:
            path.write_bytes(files[path])
            print(path)
    return 1 if stale and arguments.check else 0


if __name__ == "__main__":
    sys.exit(main())
