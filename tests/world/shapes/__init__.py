"""The matrix of pod shapes: every pod of a few containers, with one restart of one component between any two events.

``shape`` says what there is to play, ``kubelet`` and ``node`` what it is played in, ``play`` how, ``matrix`` how all of it is run
(``python -m tests.world.shapes``).
"""
