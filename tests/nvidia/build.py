"""Compile the stand-in for the driver's library, once for each test run."""

from __future__ import annotations

import functools
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

__all__ = ["LIBRARY", "exported_functions", "library"]

LIBRARY = "libnvidia-ml.so.1"
_SOURCES = Path(__file__).with_name("libnvidia_ml")
_COMPILE = (
    *("gcc", "-std=c11", "-shared", "-fPIC", "-O1", "-fvisibility=hidden"),
    *("-Wall", "-Wextra", "-Werror", f"-Wl,-soname,{LIBRARY}"),
)


@functools.cache
def library() -> bytes:
    """Return the compiled library, to be copied into a machine: it finds the machine by the path that it is loaded from.

    Raises:
        RuntimeError: there is no gcc, or the source does not compile.
    """
    if shutil.which("gcc") is None:
        raise RuntimeError("The stand-in for the driver's library is compiled by the tests: install gcc.")
    with tempfile.TemporaryDirectory(prefix="gs-nvml-") as directory:
        built = Path(directory) / LIBRARY
        sources = sorted(str(source) for source in _SOURCES.glob("*.c"))
        # dlopen and threads are in libc itself since glibc 2.34; older versions need these options
        done = subprocess.run(
            [*_COMPILE, "-o", str(built), *sources, "-ldl", "-lpthread"], capture_output=True, text=True, check=False
        )
        if done.returncode != 0:
            raise RuntimeError(f"The stand-in for the driver's library does not compile:\n{done.stderr}")
        return built.read_bytes()


@functools.cache
def exported_functions() -> frozenset[str]:
    """Return the names of NVML's functions that the library exports."""
    text = "".join(source.read_text() for source in _SOURCES.glob("*.c"))
    return frozenset(re.findall(r"\bnvml[A-Z]\w+(?=[(,])", text))
