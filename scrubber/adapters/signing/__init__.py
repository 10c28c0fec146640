"""The node's signature under its certificates: its key, the library that signs, and the envelope that others verify.

Import the modules in here by name: the envelope is plain, and whoever writes or reads one need not load the library.
"""
