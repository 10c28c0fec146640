"""The scrub service: everything that decides about, or touches, a device between two tenants.

Kept free of imports, so that the children that erase a device start in milliseconds.
"""

__version__ = "0.1.0"
