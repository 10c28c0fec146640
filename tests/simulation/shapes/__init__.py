"""The matrix of pod shapes: every pod of a few containers, with one restart of one component between any two events.

``shape`` defines the cases, ``kubelet`` and ``node`` their environment, ``play`` one run, ``matrix`` the run of all
cases (``python -m tests.simulation.shapes``).
"""
