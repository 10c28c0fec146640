"""The CUDA side of an NVIDIA device: clearing its memory and its processors, and proving it.

CuPy is loaded in the zygote and in what it forks, nowhere else. This module itself stays empty: the service imports
its parents' side, and must not meet CUDA on the way.
"""
