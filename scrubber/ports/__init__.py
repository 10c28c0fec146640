"""Protocols through which the engine uses everything outside it, each with at most five methods.

Each docstring states preconditions, units and errors. Unless it states otherwise, a method raises
:class:`scrubber.domain.errors.DeviceFault` (or a subclass) when the device cannot be trusted, and never returns made-up
data. Methods may be cancelled at any ``await``; a cancelled method leaves nothing running on the device except where
its docstring states it.
"""
