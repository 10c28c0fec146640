"""The shipped kernels on a machine without a GPU: the same source, compiled for the CPU.

The code is the ``.cu`` file from which the PTX text beside it was made, with the names and parameter widths of that
text; only the header between the two (``standin/host_cuda.h``) belongs to the tests. A launch that touches memory
without an allocation ends with the address, as on a GPU, instead of ending the process.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import re
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

__all__ = ["MOST_THREADS", "REGISTER_BYTES", "Entry", "HostKernels", "Processor", "entries_of"]

MOST_THREADS: Final = 1024
REGISTER_BYTES: Final = 256 * 256 * 4
"""The register file of a simulated SM: 256 threads with 256 registers of 4 bytes."""

_HEADER = Path(__file__).parent / "standin" / "host_cuda.h"
_FLAGS = ("-x", "c", "-std=gnu11", "-O2", "-shared", "-fPIC", "-fno-strict-aliasing", "-Wall", "-Werror")
_WIDTHS: Final = {"u64": 8, "u32": 4}


@dataclass(frozen=True, slots=True)
class Entry:
    """A kernel of a PTX text: the bytes of each parameter, and whether its threads use barriers."""

    name: str
    widths: tuple[int, ...]
    barriers: bool


@dataclass(frozen=True, slots=True)
class Processor:
    """A simulated SM: its ``%smid``, and the addresses of its shared memory and of its :data:`REGISTER_BYTES`.

    ``stuck`` is the address of a byte of either that does not keep what is written; 0: there is none.
    """

    number: int
    shared: int
    registers: int
    stuck: int = 0


class _Index(ctypes.Structure):
    _fields_ = (("x", ctypes.c_uint), ("y", ctypes.c_uint), ("z", ctypes.c_uint))


class _Processor(ctypes.Structure):
    _fields_ = (
        ("id", ctypes.c_uint),
        ("shared", ctypes.c_void_p),
        ("registers", ctypes.c_void_p),
        ("stuck", ctypes.c_void_p),
    )


class _Launch(ctypes.Structure):
    _fields_ = (
        ("kernel", ctypes.c_void_p),
        ("arguments", ctypes.c_void_p),
        ("barriers", ctypes.c_bool),
        ("grid", _Index),
        ("block", _Index),
        ("sms", ctypes.POINTER(_Processor)),
        ("sm_count", ctypes.c_uint),
        ("sm_ids", ctypes.c_uint),
    )


def entries_of(ptx: str) -> dict[str, Entry]:
    """Return the kernels of a PTX text, by name."""
    found = re.findall(r"^\.visible \.entry (\w+)\(\n(.*?)\n?\)(.*?)^}", ptx, re.MULTILINE | re.DOTALL)
    return {
        name: Entry(
            name,
            tuple(_WIDTHS[kind] for kind in re.findall(r"\.param \.(\w+)", parameters)),
            re.search(r"^\s*(bar|barrier)\.sync", body, re.MULTILINE) is not None,
        )
        for name, parameters, body in found
    }


class HostKernels:
    """The kernels of one ``.cu`` file. One launch at a time: a simulated GPU is one thread of a CPU."""

    def __init__(self, library: ctypes.CDLL, entries: Mapping[str, Entry]) -> None:
        self.entries = entries
        self._library = library
        self._one_at_a_time = threading.Lock()

    @classmethod
    def build(cls, ptx: Path, cache: Path) -> HostKernels:
        """Compile the source beside ``ptx``, unless ``cache`` contains it already.

        Raises:
            FileNotFoundError: there is no gcc, or no source.
            subprocess.CalledProcessError: the source is not plain C; the compiler's message is on standard error.
        """
        compiler = shutil.which("gcc")
        if compiler is None:
            raise FileNotFoundError("The stand-in for a GPU compiles its kernels with gcc; there is none on PATH.")
        entries = entries_of(ptx.read_text("ascii"))
        code = _translation_unit(ptx.with_suffix(".cu"), entries.values())
        digest = hashlib.sha256("\0".join((code, _HEADER.read_text(), *_FLAGS)).encode()).hexdigest()[:16]
        library = cache / f"{ptx.stem}-{digest}.so"
        if not library.exists():
            _compile(compiler, code, library)
        return cls(ctypes.CDLL(str(library)), entries)

    def launch(
        self,
        name: str,
        grid: Sequence[int],
        block: Sequence[int],
        arguments: Sequence[bytes],
        processors: Sequence[Processor],
        processor_ids: int,
    ) -> int | None:
        """Run a kernel to its end; return the address of an invalid access, None if there was none.

        ``arguments`` are the bytes of each parameter. Blocks are distributed to ``processors`` in turn; there are
        ``processor_ids`` numbers of SMs, of which some may never be given work.
        """
        entry = self.entries[name]
        if tuple(map(len, arguments)) != entry.widths:
            raise ValueError(f"{name} takes parameters of {entry.widths} bytes, not {tuple(map(len, arguments))}.")
        kept = [ctypes.create_string_buffer(argument, len(argument)) for argument in arguments]
        launch = _Launch(
            kernel=ctypes.cast(getattr(self._library, f"thunk_{name}"), ctypes.c_void_p),
            arguments=ctypes.cast((ctypes.c_void_p * len(kept))(*map(ctypes.addressof, kept)), ctypes.c_void_p),
            barriers=entry.barriers,
            grid=_Index(*_three(grid)),
            block=_Index(*_three(block)),
            sms=(_Processor * len(processors))(
                *[_Processor(each.number, each.shared, each.registers, each.stuck) for each in processors]
            ),
            sm_count=len(processors),
            sm_ids=processor_ids,
        )
        fault = ctypes.c_void_p()
        with self._one_at_a_time:
            outcome = self._library.host_run(ctypes.byref(launch), ctypes.byref(fault))
        if outcome == 2:
            raise MemoryError("There is no memory for the threads of a block.")
        return (fault.value or 0) if outcome == 1 else None


def _three(sizes: Sequence[int]) -> tuple[int, int, int]:
    x, y, z = (*sizes, 1, 1)[:3]
    return x, y, z


def _translation_unit(source: Path, entries: Iterable[Entry]) -> str:
    """Return the source with its header, and for each kernel a function that takes its arguments as a driver would."""
    thunks = []
    for entry in entries:
        types = ", ".join(f"uint{8 * width}_t" for width in entry.widths)
        values = ", ".join(f"*(uint{8 * width}_t *)a[{i}]" for i, width in enumerate(entry.widths))
        # Through a volatile pointer: an address is passed as an integer, as in PTX.
        thunks.append(
            f"static void (*volatile call_{entry.name})({types}) = (void (*)({types}))(void *){entry.name};\n"
            f"void thunk_{entry.name}(void *const *a);\n"
            f"void thunk_{entry.name}(void *const *a) {{ call_{entry.name}({values}); }}\n"
        )
    return f'#include "host_cuda.h"\n#line 1 "{source.name}"\n{source.read_text("ascii")}\n{"".join(thunks)}'


def _compile(compiler: str, code: str, library: Path) -> None:
    library.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    descriptor, made = tempfile.mkstemp(suffix=".so", dir=library.parent)
    os.close(descriptor)
    try:
        subprocess.run(
            [compiler, *_FLAGS, f"-I{_HEADER.parent}", "-o", made, "-"], input=code, encoding="ascii", check=True
        )
        os.replace(made, library)  # two processes may compile at once; the results are equal
    finally:
        Path(made).unlink(missing_ok=True)
