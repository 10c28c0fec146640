"""Benchmarks of the shipped daemons on a simulated node: ``make bench``, or ``python -m bench --quick``.

Invariants: the daemons are started by their commands and called over their sockets. Every measurement has a reference
that was measured in the same run, alternating sample by sample: a ratio is valid on a busy machine, an absolute figure
is not.
"""
