"""How child processes live and die, so that a call that hangs costs one child and never the service.

Whatever may hang, crash or bring a vendor's library with it runs in a child that can be killed. This module itself
stays empty: every child imports it, and a child is replaced while a device waits.
"""
