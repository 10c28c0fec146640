"""Devices that an administrator's own program inventories, checks, clears and resets: the backend ``command``.

What such a program reports is its claim, and every certificate says so. See ``docs/backends.md`` for its protocol.
"""
