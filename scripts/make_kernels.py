"""Compile each ``.cu`` file of this project to the PTX text that is shipped beside it.

Invariants: every CUDA 12 driver and every GPU from Volta on can load the text (``.version`` 7.8 at most, ``.target
sm_70``). Its first line names its source, and the same source gives the same bytes on every machine. So the image needs
no compiler, and ``tests/adapters/test_kernels_ptx.py`` compares each file with its source.

The compiler is NVRTC 11.8, the last one whose output those drivers load without errors; it comes with the development
dependencies (nvidia-cuda-nvrtc-cu11) and needs no GPU.
"""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import re
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, files
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCES = (
    Path("scrubber/adapters/cuda/kernels.cu"),
    Path("tests/gpu/attacks.cu"),
    Path("tests/clustercheck/search.cu"),
)
# See docs/decisions/0026-shipped-ptx.md.
OPTIONS = (b"--gpu-architecture=compute_70", b"--std=c++14")
NEWEST_VERSION = (7, 8)
TARGET = "sm_70"

_PACKAGE = "nvidia-cuda-nvrtc-cu11"
_LIBRARY = "libnvrtc.so.11.2"


class KernelError(Exception):
    """The source does not compile, or drivers could not load the result; the message contains the reason."""


def source_heading(source: Path) -> bytes:
    """Return the first line of the PTX text of ``source``, which identifies the source."""
    return f"// {source.name} sha256:{hashlib.sha256(source.read_bytes()).hexdigest()}\n".encode()


def compile_ptx(source: Path) -> bytes:
    """Return the PTX text of ``source``, with its heading.

    Raises:
        KernelError: the compiler's messages, or what is wrong with the text.
    """
    text = _compile(source)
    _check(source, text.decode("ascii"))
    return source_heading(source) + text


def _check(source: Path, text: str) -> None:
    version = re.search(r"^\.version (\d+)\.(\d+)$", text, re.MULTILINE)
    target = re.search(r"^\.target (\S+)$", text, re.MULTILINE)
    if version is None or (int(version[1]), int(version[2])) > NEWEST_VERSION:
        raise KernelError(f"{source.name}: {version and version[0]} is too new for drivers of CUDA 12.")
    if target is None or target[1] != TARGET:
        raise KernelError(f"{source.name}: {target and target[0]} instead of .target {TARGET}.")


def _library() -> ctypes.CDLL:
    try:
        found = [file for file in files(_PACKAGE) or [] if file.name == _LIBRARY]
    except PackageNotFoundError:
        found = []
    if not found:
        raise KernelError(f"{_LIBRARY} is missing; install the development dependencies ({_PACKAGE}).")
    library = ctypes.CDLL(str(found[0].locate()))
    library.nvrtcGetErrorString.restype = ctypes.c_char_p
    return library


def _compile(source: Path) -> bytes:
    nvrtc = _library()
    libc = ctypes.CDLL(None)
    libc.uselocale.restype, libc.uselocale.argtypes = ctypes.c_void_p, (ctypes.c_void_p,)
    before = libc.uselocale(None)

    def must(status: int, *, log: ctypes.c_void_p | None = None) -> None:
        if status != 0:
            log_text = _text(nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog, log).decode() if log else ""
            raise KernelError(f"{source.name}: {nvrtc.nvrtcGetErrorString(status).decode()}\n{log_text}".rstrip())

    program = ctypes.c_void_p()
    must(nvrtc.nvrtcCreateProgram(ctypes.byref(program), source.read_bytes(), source.name.encode(), 0, None, None))
    try:
        options = (ctypes.c_char_p * len(OPTIONS))(*OPTIONS)
        must(nvrtc.nvrtcCompileProgram(program, len(OPTIONS), options), log=program)
        return _text(nvrtc.nvrtcGetPTXSize, nvrtc.nvrtcGetPTX, program)
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))
        libc.uselocale(before)  # the compiler leaves this thread in the locale "C"


def _text(size_of: ctypes._NamedFuncPointer, get: ctypes._NamedFuncPointer, program: ctypes.c_void_p) -> bytes:
    size = ctypes.c_size_t()
    size_of(program, ctypes.byref(size))
    buffer = ctypes.create_string_buffer(size.value)
    get(program, buffer)
    return buffer.value


def main(argv: Sequence[str] | None = None) -> int:
    """Write the PTX text of each source, or report with ``--check`` which is outdated; return 1 if any is."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--check", action="store_true", help="compare only; write nothing")
    parser.add_argument("source", type=Path, nargs="*", help="a .cu file (default: all in the tree)")
    arguments = parser.parse_args(argv)
    stale = False
    for source in arguments.source or [ROOT / path for path in SOURCES]:
        try:
            text = compile_ptx(source)
        except KernelError as refused:
            print(refused, file=sys.stderr)
            return 1
        shipped = source.with_suffix(".ptx")
        if shipped.is_file() and shipped.read_bytes() == text:
            continue
        stale = True
        if arguments.check:
            print(f"{shipped} does not match {source.name}; run make kernels", file=sys.stderr)
        else:
            shipped.write_bytes(text)
            print(shipped)
    return 1 if stale and arguments.check else 0


if __name__ == "__main__":
    sys.exit(main())
