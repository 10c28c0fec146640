"""Benchmarks of the shipped daemons on a simulated node: ``make bench``, or ``python -m bench --quick``.

Promise: the daemons are started by their commands and asked over their sockets, and every figure stands beside a
reference that was measured in the same run, sample by sample in turn. A ratio survives a busy machine; a figure alone
does not.
"""
