"""The node's signature on its certificates: its key, the cryptographic library, and the envelope that others verify.

Import the modules of this package by name: code that only reads or writes envelopes need not load the library.
"""
