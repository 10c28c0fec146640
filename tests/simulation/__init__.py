"""A simulated cluster for tests of the engine: labelled bytes, pods with processes, a kubelet, and virtual time.

Every port of :mod:`scrubber.ports` has a counterpart here. All events follow from the test's calls alone: there is no
real time and no randomness, so that a failure can be reproduced.
"""
