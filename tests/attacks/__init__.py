"""Programs that attack the hand-over from inside a container, one in each file.

Each begins with three constants: ``TRIES``, what it tries; ``HOLDS``, what must hold; ``THREATS``, the rows of
``docs/threat-model.md`` that it tests. :mod:`tests.attacks.programs` describes the optional ones. The programs need the
standard library only and run in any container with Python: ``python -m tests.attacks NAME``.
"""
