"""Management of child processes, so that a call that hangs costs one child and never the service.

Everything that may hang, crash or load a vendor library runs in a child that can be killed. This module itself stays
empty: every child imports it, and a child is replaced while a device waits.
"""
