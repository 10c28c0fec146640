"""The CUDA side of an NVIDIA device: clearing its memory and its processors, and proving it.

CuPy is loaded in the zygote and in the children that it forks, and nowhere else. This module stays empty: the service
imports the parent-side modules of this package, and must not load CUDA by doing so.
"""
