"""CuPy for a machine without a GPU: the part of its interface that the project uses, over the machine of the stand-ins.

What the real CuPy refuses is refused here with the same error. Arguments with another width than the kernel's
parameter, which the real one passes on unchanged, are an error here. ``tests/adapters/test_real_cupy.py`` compares
every name here with the real package. Put the parent directory first on PYTHONPATH, and name the machine in
SCRUBBER_STANDIN_WORLD.
"""

from __future__ import annotations

from numpy import int32, int64, intp, uint8, uint32, uint64

from cupy import cuda
from cupy.raw import RawKernel, RawModule

__all__ = ["RawKernel", "RawModule", "cuda", "int32", "int64", "intp", "uint8", "uint32", "uint64"]

__version__ = "14.2.0+standin"
