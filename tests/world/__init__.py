"""A simulated world for tests of the engine: bytes with labels, pods with processes, a kubelet, and time that is owned.

Every port of :mod:`scrubber.ports` has its counterpart in here. What happens follows from the test's calls alone: there
is no real time and no randomness, so a failure can be played again.
"""
