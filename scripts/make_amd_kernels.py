"""Compile the kernels for AMD GPUs to the code objects that are shipped beside their sources, one for each architecture.

Invariant: the same source and compiler give the same bytes on every machine, so ``--check`` shows that an object was made
from the source beside it; ``tests/adapters/test_amd_kernels.py`` runs it. The image needs no compiler. The compiler is
clang and lld 19 as Debian ships them (``apt-get install clang-19 lld-19``); no GPU and no part of ROCm is needed.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCES = (Path("scrubber/adapters/amd/kernels.c"), Path("tests/gpu/amd/attacks.c"))
ARCHITECTURES = ("gfx90a", "gfx942")
"""Instinct MI200 and MI300."""
COMPILER = "clang-19"
OPTIONS = (
    *("-x", "c", "-std=c11", "-target", "amdgcn-amd-amdhsa", "-nogpulib", "-ffreestanding", "-O3"),
    *("-Wall", "-Wextra", "-Werror", "-mcode-object-version=5", "-Wl,--strip-all"),
)


class KernelError(Exception):
    """There is no compiler, or the source does not compile; the message contains the reason."""


def object_path(source: Path, architecture: str) -> Path:
    """Return the path of the code object of ``source``."""
    return source.with_suffix(f".{architecture}.co")


def compile_object(source: Path, architecture: str, compiler: str = COMPILER) -> bytes:
    """Return the code object of ``source`` for ``architecture``.

    Raises:
        KernelError: the compiler's messages, or that there is none.
    """
    with tempfile.TemporaryDirectory() as directory:
        output = Path(directory) / "object"
        command = [compiler, *OPTIONS, f"-mcpu={architecture}", "-o", str(output), source.name]
        try:
            done = subprocess.run(command, cwd=source.parent, capture_output=True, text=True, check=False)
        except FileNotFoundError:
            raise KernelError(f"{compiler} is missing; as root: apt-get install clang-19 lld-19") from None
        if done.returncode != 0:
            raise KernelError(f"{source.name} for {architecture}: {done.stderr}".rstrip())
        return output.read_bytes()


def main(argv: Sequence[str] | None = None) -> int:
    """Write the code objects, or report with ``--check`` which are outdated; return 1 if any is."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--check", action="store_true", help="compare only; write nothing")
    parser.add_argument("--compiler", default=COMPILER, help=f"the compiler (default: {COMPILER})")
    parser.add_argument("source", type=Path, nargs="*", help="a source (default: all in the tree)")
    arguments = parser.parse_args(argv)
    stale = False
    for source in arguments.source or [ROOT / path for path in SOURCES]:
        for architecture in ARCHITECTURES:
            try:
                made = compile_object(source, architecture, arguments.compiler)
            except KernelError as error:
                print(error, file=sys.stderr)
                return 1
            shipped = object_path(source, architecture)
            if shipped.is_file() and shipped.read_bytes() == made:
                continue
            stale = True
            if arguments.check:
                print(f"{shipped} does not match {source.name}; run make amd-kernels", file=sys.stderr)
            else:
                shipped.write_bytes(made)
                print(shipped)
    return 1 if stale and arguments.check else 0


if __name__ == "__main__":
    sys.exit(main())
