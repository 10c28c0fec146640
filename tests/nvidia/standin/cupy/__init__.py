"""CuPy for a machine without a GPU: as much of its interface as the project uses, over the world of the stand-ins.

Promise: what the real CuPy refuses is refused here with the same error, and arguments of another width than a kernel's
parameter, which the real one passes on as they are, fail loudly. ``tests/adapters/test_real_cupy.py`` holds every name
here against the real package. Put the directory above this one first on PYTHONPATH, and name the world in
SCRUBBER_STANDIN_WORLD.
"""

from __future__ import annotations

from numpy import int32, int64, intp, uint8, uint32, uint64

from cupy import cuda
from cupy.raw import RawKernel, RawModule

__all__ = ["RawKernel", "RawModule", "cuda", "int32", "int64", "intp", "uint8", "uint32", "uint64"]

__version__ = "14.2.0+standin"
