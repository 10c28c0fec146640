"""The node as the cluster sees it: a condition, labels, events and, where it is allowed, evictions.

Promise: whatever the API server does, nobody waits for it. What is told is the present state and never a queue of old
ones, and without credentials nothing is asked, loaded or said.
"""
